"""Every causal architecture of transformers, as a small random model, on the torch backend.

`python tests/backends/causal_types.py` computes all of them and writes the table of docs/torch.md.
"""

import logging
import re
import sys
import tempfile
import time
from collections import defaultdict
from itertools import chain
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

import oracle
from skyrl.backends.common.models.kind import Kind
from skyrl.backends.common.page_table import PAGE_SIZE
from skyrl.backends.torch.base_model.attention import Packed
from skyrl.backends.torch.base_model.loading import LoadOptions, decoder_layers, skeleton
from skyrl.backends.torch.base_model.model import LoadedModel, Weights
from skyrl.backends.torch.base_model.small_copy import FEW, MANY, small_copy
from skyrl.backends.torch.workers.worker import Worker, WorkerOptions
from skyrl.errors import RequestError
from skyrl.types import LoraConfig

PAGE = Path(__file__).parents[2] / "docs" / "torch.md"
BEGIN, END = "<!-- causal types -->\n", "<!-- end of causal types -->"
CPU = torch.device("cpu")
LENGTHS = (40, 23)
RIGHT = ("packed and sampled", "packed, not sampled", "one by one, sampled", "one by one, not sampled")
SMALL, REFUSED, WRONG, FAILED = "no small model here", "refused", "wrong", "error"


def types() -> list[str]:
    """Model types that transformers has a causal language model of."""
    return sorted({config.model_type for config in MODEL_FOR_CAUSAL_LM_MAPPING})


def make_small(kind: str, folder: Path) -> bool:
    """Write a small random model of a type, with all limits short. Returns False if its configuration has other needs.

    Raises `RequestError` if the backend refuses the type by its default configuration.
    """
    config = CONFIG_MAPPING[kind]()
    for name, value in config.to_dict().items():
        if value is None and any(pattern.search(name) for pattern in (MANY, FEW)):
            setattr(config, name, 1 if name == "n_group" else 2)  # every checkpoint has a value, and the type has none
    config.save_pretrained(folder)
    whole = skeleton(folder, CPU, LoadOptions())
    model = small_copy(whole, decoder_layers(whole))
    if model is None:
        return False
    model.save_pretrained(folder)
    return True


def outcome(kind: str) -> tuple[str, str]:
    """Treatment of a type by the backend, and the reason."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            return _computed(folder) if make_small(kind, folder) else (SMALL, "")
        except RequestError as error:
            return REFUSED, _line(error).replace(f"base_model={folder}: ", "")
        except Exception as error:  # a defect, whatever it is
            return FAILED, f"{type(error).__name__}: {_line(error)}"


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
    for target in model.targets:
        if theirs.get_submodule(target.module) is theirs.get_output_embeddings():
            continue  # may be tied
        a, b = (torch.randn(n, generator=rng) for n in ((target.in_features, 2), (2, target.out_features)))
        adapter |= {f"{target.module}.lora_A": a / 30, f"{target.module}.lora_B": b / 30}
        with torch.no_grad():
            weight = theirs.get_submodule(target.module).weight
            weight.add_((a @ b).T / 900)
    first = model.targets[0].module
    matrices = [one.get_submodule(first).weight.requires_grad_() for one in (model.hf, theirs)]
    rows = [np.random.default_rng(n).integers(0, model.vocab_size - 1, n).tolist() for n in LENGTHS]
    wanted = [oracle.logits(theirs, row) for row in rows]
    (wanted[0].square().mean() + wanted[1].square().mean()).backward()
    scale = max(float(x.detach().abs().max()) for x in wanted)
    wrong = []
    with model.using(Weights(Kind(LoraConfig(rank=2, alpha=2)), adapter)):
        results = {"alone": []}
        for row in rows:
            (found,) = _logits(model, [row])
            found.square().mean().backward()  # before the next pass, as in training
            results["alone"].append(found.detach())
        if model.packs:
            matrices[0].grad = None
            results["packed"] = _logits(model, rows)
            sum(x.square().mean() for x in results["packed"]).backward()
    if model.cache_shapes:
        results["sampled"] = [_sampled(worker, adapter, row) for row in rows]
    for how, found in results.items():
        apart = max(float((x - y).detach().abs().max()) for x, y in zip(found, wanted, strict=True))
        if not apart <= 1e-4 * max(scale, 1):
            wrong.append(f"{how} {apart:.1g} of {scale:.1g}")
    ours, other = (matrix.grad for matrix in matrices)
    if float((ours - other).abs().max()) > 1e-3 * float(other.abs().max()):
        wrong.append("gradients")
    if wrong:
        return WRONG, ", ".join(wrong)
    return RIGHT[2 * (not model.packs) + (not model.cache_shapes)], ""


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
    worker.sampling.open(8)
    parts = []
    for start, end in ((0, 13), (13, len(row) - 1), (len(row) - 1, len(row))):
        pages = list(range(7, 7 - -(-len(row) // PAGE_SIZE), -1))
        blocks = worker.sampling.read(weights, [(pages, np.asarray(row[start:end], np.int32), start)])
        for block in range(blocks[0]):
            worker.sampling.project(weights, block)
            parts.append(worker.sampling._logits)
    return torch.cat(parts)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def table(outcomes: dict[str, tuple[str, str]]) -> str:
    """Section of the page."""
    groups = defaultdict(list)
    for kind, (result, reason) in outcomes.items():
        shown = reason.replace(kind, "...").replace("|", "/")[:160]
        groups[result, "" if result in RIGHT else re.sub(r"; use another model.*", "", shown)].append(f"`{kind}`")
    order = (*RIGHT, REFUSED, SMALL, WRONG, FAILED)
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
    transformers.logging.set_verbosity_error()
    logging.disable()
    torch.set_num_threads(1)
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
