"""Line-by-line description of an adapter."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from skyrl.utils.adapters.experts import named_experts, named_weights
from skyrl.utils.adapters.layouts import FUSED, INTERLEAVED
from skyrl.utils.adapters.naming import NameCounts, Pairs, is_other, not_finite, pairs_of
from skyrl.utils.adapters.stored import StoredAdapter
from skyrl.utils.files.hf_files import ALTERING, OFF, changes_base

FOLDED = ("use_rslora", "rank_pattern", "alpha_pattern", "target_parameters")
"""PEFT options that are supported, and that `skyrl adapter convert` removes."""


def described(adapter: StoredAdapter) -> str:
    """Return the description of an adapter. Raises RequestError for incomplete pairs, and for a file without pairs."""
    config, tensors = adapter.config, adapter.tensors
    others = {name: tensor for name, tensor in tensors.items() if is_other(name, tensor)}
    pairs, names = pairs_of({name: x for name, x in tensors.items() if name not in others}, adapter.where)
    types = Counter(tensor.dtype.name for tensor in tensors.values())
    ranks = Counter(len(pair.a) for pair in pairs.values())
    modules = Counter(module.rpartition(".")[2] for module in pairs)
    total = sum(tensor.nbytes for tensor in tensors.values())
    facts = {
        "adapter": str(adapter.where),
        "base model": str(config.get("base_model_name_or_path")),
        "rank": f"{config.get('r')}, alpha {config.get('lora_alpha')}",
        "modules": ", ".join(f"{name} ({count})" for name, count in modules.items()),
        "tensors": f"{len(tensors)}, {' and '.join(types)}, {total:,} bytes",
        "names": _naming(names),
    }
    lines = [f"{name:<12}{value}" for name, value in facts.items()]
    unusual = [*_unusual(config, tensors, pairs, ranks)]
    if others:
        unusual.append(f"tensors other than lora_A and lora_B: {_first_of([*others])}")
    lines += [f"{'unusual':<12}{what}" for what in unusual]
    return "\n".join(lines)


def _naming(names: NameCounts) -> str:
    parts = ["without PEFT's prefix" if names.bare else "PEFT's"]
    parts += [f"with the adapter's name {end}" if end else "without .weight" for end in names.ends]
    return ", ".join(parts)


def _first_of(names: Sequence[str]) -> str:
    """Return the first name, and the number of the others."""
    return names[0] + (f", and {len(names) - 1} more" if len(names) > 1 else "")


def _unusual(config: dict, tensors: Mapping[str, np.ndarray], pairs: Pairs, ranks: Counter[int]) -> Iterator[str]:
    named = [*named_weights(config), *(experts := named_experts(config))]
    config = config | {"target_parameters": [x for x in config.get("target_parameters") or () if x not in named]}
    if experts:
        yield f"fused experts: {', '.join(sorted(experts))}"
    for option in FOLDED:
        if option != "target_parameters" and config.get(option) not in OFF:
            yield f"{option}={config[option]!r}: skyrl adapter convert writes the same adapter without it"
    for option in (*ALTERING, "target_parameters"):
        if config.get(option) not in OFF:
            yield f"{option}={config[option]!r}: not implemented; only PEFT computes this adapter"
    if changes_base(config):
        yield f"init_lora_weights={config['init_lora_weights']!r}: changes the base weights, which are not in the file"
    if config.get("peft_type") not in (None, "LORA"):
        yield f"peft_type={config['peft_type']!r}: not implemented; only PEFT computes this adapter"
    if set(ranks) - {config.get("r")} and not experts and not config.get("target_parameters"):
        yield f"ranks of modules: {', '.join(f'{rank} ({count})' for rank, count in sorted(ranks.items()))}"
    fused = {module.rpartition(".")[2] for module in pairs} & {*FUSED, *INTERLEAVED}
    if fused:
        yield f"fused modules: {', '.join(sorted(fused))}"
    if any(module.endswith("lm_head") for module in pairs) and _is_tied(config.get("base_model_name_or_path")):
        yield (
            "lm_head: the base model ties its vocabulary projection to the embedding, so PEFT's merge_and_unload "
            "would change both; skyrl adapter merge changes the projection alone"
        )
    if wrong := not_finite(tensors):
        yield f"numbers that are not finite: {_first_of(wrong)}"
    if not any(pair.b.any() for pair in pairs.values()):
        yield "lora_B is zero everywhere: this adapter changes nothing"


def _is_tied(base_model: object) -> bool:
    """Return True if a base model in a local folder ties its projection to the embedding."""
    file = Path(str(base_model)) / "config.json"
    return file.is_file() and bool(json.loads(file.read_text()).get("tie_word_embeddings"))
