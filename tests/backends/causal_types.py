"""Every causal architecture of transformers, as a small random model, on the torch backend.

`python -m tests.backends.causal_types` computes all of them and writes the table of docs/torch.md. Each type has a
process of its own, with limits of memory and time, so that no type ends or delays the others.
"""

import logging
import multiprocessing
import re
import resource
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from skyrl.backends.common.models.kind import Kind
from skyrl.backends.common.page_table import PAGE_SIZE
from skyrl.backends.torch.base_model.attention import Packed
from skyrl.backends.torch.base_model.loading import LoadOptions, decoder_layers, lacks_memory, one_line, skeleton
from skyrl.backends.torch.base_model.model import LoadedModel, Weights, abilities_of_copy
from skyrl.backends.torch.base_model.small_copy import FEW, MANY, small_copy
from skyrl.backends.torch.workers.worker import Worker, WorkerOptions
from skyrl.errors import RequestError
from skyrl.types import LoraConfig
from tests import oracle

PAGE = Path(__file__).parents[2] / "docs" / "torch.md"
BEGIN, END = "<!-- causal types -->\n", "<!-- end of causal types -->"
CPU = torch.device("cpu")
LENGTHS = (40, 23)
RIGHT = ("packed and sampled", "packed, not sampled", "one by one, sampled", "one by one, not sampled")
REFUSED, LACKING, WRONG, FAILED = "refused", "too large for the table", "wrong", "error"
MEMORY, SECONDS = 2**33, 300
"""Limits of a type, in bytes, and in seconds of a processor."""
SHARED = re.compile("shared_experts$")
QWEN4 = {
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dbrx": {"attn_config": {"rope_theta": 5e5, "kv_n_heads": 8, "clip_qkv": 8}},
    "gemma4_assistant": {
        "text_config": {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    },
    "qwen4_exp_text": QWEN4,
    "qwen4_exp": {"text_config": QWEN4},
    "xmod": {"default_language": "en_XX"},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
}
"""Settings that checkpoints have, and that configuration classes have no defaults for."""
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(  # which is imported once for all types
    ["skyrl.backends.torch.workers.worker", "tests.oracle", "torch._dynamo", "transformers.modeling_utils"]
)


def types() -> list[str]:
    """Model types that transformers has a causal language model of."""
    return sorted({config.model_type for config in MODEL_FOR_CAUSAL_LM_MAPPING})


def make_small(kind: str, folder: Path) -> None:
    """Write a small random model of a type, with all limits short.

    Raises `RequestError` if the backend refuses the type by its default configuration.
    """
    config = CONFIG_MAPPING[kind](**SETTINGS.get(kind, {}))
    for name in (name for name, value in config.to_dict().items() if value is None):  # but every checkpoint has one
        if name in ("n_group", "topk_group"):
            setattr(config, name, 1)
        elif any(pattern.search(name) for pattern in (MANY, FEW, SHARED)):
            setattr(config, name, 2)
        elif name == "head_dim":
            config.head_dim = config.hidden_size // config.num_attention_heads
        elif name == "num_key_value_heads":
            config.num_key_value_heads = config.num_attention_heads
    if getattr(config, "is_decoder", None) is False:
        config.is_decoder = True  # without it, all tokens see each other
    config.save_pretrained(folder)
    whole = skeleton(folder, CPU, LoadOptions())
    model = small_copy(whole, decoder_layers(whole))
    if model is None:
        abilities_of_copy(whole, folder)  # which refuses it
    model.save_pretrained(folder)


def outcome(kind: str) -> tuple[str, str]:
    """Treatment of a type by the backend, and the reason, in a process of its own."""
    ours, theirs = PROCESSES.Pipe(duplex=False)
    child = PROCESSES.Process(target=_send_outcome, args=(kind, theirs))
    child.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        child.join()
        if child.exitcode == -signal.SIGXCPU:
            return LACKING, f"more than {SECONDS} seconds"
        if child.exitcode == -signal.SIGKILL:  # by the system
            return LACKING, f"more than {MEMORY >> 30} GiB"
        return FAILED, f"its process ended with status {child.exitcode}"
    finally:
        child.join()


def _send_outcome(kind: str, answers: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, resource.RLIM_INFINITY))
    transformers.logging.set_verbosity_error()
    logging.disable()
    torch.set_num_threads(1)
    answers.send(_outcome(kind))


def _outcome(kind: str) -> tuple[str, str]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            make_small(kind, folder)
            return _computed(folder)
        except Exception as error:
            if lacks_memory(error):
                return LACKING, f"more than {MEMORY >> 30} GiB"
            if isinstance(error, RequestError):
                return REFUSED, one_line(error).replace(f"base_model={folder}: ", "")
            return FAILED, f"{type(error).__name__}: {one_line(error)}"  # a defect


def _computed(folder: Path) -> tuple[str, str]:
    """Compare logits under an adapter, and gradients of a matrix, with a model of transformers that has it merged."""
    try:
        worker = Worker(WorkerOptions(folder, LoadOptions(gradient_checkpointing=True), 7))
    except RequestError as error:
        if "no list of layers to recompute" not in str(error):
            raise
        worker = Worker(WorkerOptions(folder, LoadOptions(), 7))
    model, theirs = worker.model, oracle.load(folder)
    theirs.config.use_cache = False
    rng = torch.Generator().manual_seed(0)
    adapter = {}
    shared = Counter(id(x) for _, x in theirs.named_parameters(remove_duplicate=False))
    of_experts: dict[str, list[torch.Tensor]] = {}
    for target in model.targets:
        name, place = target.matrix
        weight = theirs.get_parameter(name)
        if shared[id(weight)] > 1:
            continue  # the merged weight would be that of other modules, too
        a, b = (torch.randn(n, generator=rng) for n in ((target.in_features, 2), (2, target.out_features)))
        for matrix, x in {f"{target.stack}.lora_A": a / 30, f"{target.stack}.lora_B": b / 30}.items():
            if target.experts:
                of_experts.setdefault(matrix, []).append(x)
            else:
                adapter[matrix] = x
        with torch.no_grad():
            weight[place] += (a @ b).T / 900
    adapter |= {name: torch.stack(some) for name, some in of_experts.items()}
    matrices = [
        [one.get_parameter(name).requires_grad_() for one in (model.hf, theirs)]
        for name in dict.fromkeys(target.matrix[0] for target in model.targets)
    ]
    rows = [np.random.default_rng(n).integers(0, model.vocab_size - 1, n).tolist() for n in LENGTHS]
    of_theirs = [theirs for _, theirs in matrices]
    wanted, gradients = _reference(theirs, rows, of_theirs)
    with model.using(Weights(Kind(LoraConfig(rank=2, alpha=2)), adapter)):
        results = {"alone": []}
        for row in rows:
            (found,) = _logits(model, [row])
            _loss([found]).backward()  # before the next pass, as in training
            results["alone"].append(found.detach())
        if model.packs:
            for ours, _ in matrices:
                ours.grad = None
            results["packed"] = _logits(model, rows)
            _loss(results["packed"]).backward()
    if model.cache_shapes:
        results["sampled"] = [_sampled(worker, adapter, row) for row in rows]
    results["gradients"] = [_gradient(ours) for ours, _ in matrices]
    apart = {how: _apart(found, gradients if how == "gradients" else wanted) for how, found in results.items()}
    limits = {how: 1e-3 * _size(gradients) if how == "gradients" else 1e-4 * max(_size(wanted), 1) for how in results}
    if any(not apart[how] <= limits[how] for how in results):  # of many layers, transformers itself has larger errors
        exact = _reference(theirs.double(), rows, of_theirs)
        rounding = [4 * _apart(x, y) for x, y in zip(exact, (wanted, gradients), strict=True)]
        limits = {how: max(limits[how], rounding[how == "gradients"]) for how in results}
    if wrong := [f"{how} {apart[how]:.1g}, not {limits[how]:.1g}" for how in results if not apart[how] <= limits[how]]:
        return WRONG, ", ".join(wrong)
    return RIGHT[2 * (not model.packs) + (not model.cache_shapes)], ""


def _reference(theirs: Any, rows: list[list[int]], weights: list[torch.Tensor]) -> tuple[list[torch.Tensor], ...]:
    """Logits of transformers, and gradients of some weights."""
    for weight in weights:
        weight.grad = None
    found = [oracle.logits(theirs, row) for row in rows]
    _loss(found).backward()
    return [x.detach() for x in found], [_gradient(weight).clone() for weight in weights]


def _loss(logits: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([x.square().mean() for x in logits]).sum()


def _gradient(weight: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(weight) if weight.grad is None else weight.grad


def _apart(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """Largest difference."""
    return max(float((x - y).detach().abs().max()) for x, y in zip(found, wanted, strict=True))


def _size(tensors: list[torch.Tensor]) -> float:
    """Largest value."""
    return max(float(x.abs().max()) for x in tensors)


def _logits(model: LoadedModel, rows: list[list[int]]) -> list[torch.Tensor]:
    """Logits of sequences in one row, with padding after them."""
    lengths = [len(row) for row in rows]
    tokens = torch.tensor([[*chain(*rows), 1, 1]])
    positions = torch.cat([torch.arange(n) for n in (*lengths, 2)])[None]
    out = model.base.run(lambda: model.logits(model.hidden(tokens, positions, Packed(lengths))))[0]
    return list(out[:-2].split(lengths))


def _sampled(worker: Worker, adapter: dict[str, torch.Tensor], row: list[int]) -> torch.Tensor:
    """Logits of a sequence that is read in parts."""
    weights = Weights(Kind(LoraConfig(rank=2, alpha=2)), adapter)
    worker.sampling.open(8, 0)
    parts = []
    for start, end in ((0, 13), (13, len(row) - 1), (len(row) - 1, len(row))):
        pages = list(range(7, 7 - -(-len(row) // PAGE_SIZE), -1))
        blocks = worker.sampling.read(weights, [(pages, np.asarray(row[start:end], np.int32), start)])
        for block in range(blocks[0]):
            worker.sampling.project(weights, block)
            parts.append(worker.sampling._logits)
    return torch.cat(parts)


def table(outcomes: dict[str, tuple[str, str]]) -> str:
    """Section of the page."""
    groups = defaultdict(list)
    for kind, (result, reason) in outcomes.items():
        shown = reason.replace(kind, "...").replace("|", "/")[:160]
        groups[result, "" if result in RIGHT else re.sub(r"; use another model.*", "", shown)].append(f"`{kind}`")
    order = (*RIGHT, REFUSED, LACKING, WRONG, FAILED)
    lines = [
        f"{len(outcomes)} of the {len(types())} causal model types of transformers {transformers.__version__}:\n",
        "| result | types |",
        "| --- | --- |",
    ]
    for (result, reason), kinds in sorted(groups.items(), key=lambda item: (order.index(item[0][0]), -len(item[1]))):
        said = f"{result}: {reason}" if reason else result
        lines.append(f"| {said} | {len(kinds)}: {', '.join(kinds)} |")
    return "\n".join(lines) + "\n"


def shown() -> dict[str, str]:
    """Results of the page by model type."""
    section = PAGE.read_text().split(BEGIN)[1].split(END)[0]
    rows = (line.strip("| ").split(" | ") for line in section.splitlines() if "`" in line)
    return {kind: said.split(":")[0] for said, kinds in rows for kind in re.findall("`([^`]+)`", kinds)}


def main() -> None:
    """Compute all types, or those named, and write the table if all were computed."""
    outcomes = {}
    for kind in sys.argv[1:] or types():
        start = time.monotonic()
        outcomes[kind] = outcome(kind)
        print(f"{time.monotonic() - start:.1f} s", kind, *outcomes[kind], flush=True)
    if not sys.argv[1:]:
        head, rest = PAGE.read_text().split(BEGIN)
        PAGE.write_text(head + BEGIN + table(outcomes) + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
