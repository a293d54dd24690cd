"""Speed of training and sampling on the torch backend, compared with PEFT in a plain loop and with itself.

Run: `python benchmarks/bench_torch.py`. In one process, without a server: a random tiny Qwen3, adapters of rank 32 on
all linear layers except the vocabulary projection, float32. Compared calls run in turn, and the ratio is that of the
medians. With `--ray`: two workers as Ray actors compared with two local processes, and the driver's share of a
processor. With `--beside-jax`: torch and JAX, each in a separate process. With `--one-core`: processor time of one
core, for a busy machine. Prints one JSON line per case.
"""

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

import model_shapes
from common import RANK, emit, sequence
from skyrl.backends.operations import CreateModel, ForwardBackward, OptimStep, Publish, Sample
from skyrl.backends.torch import TorchBackend, TorchBackendConfig
from skyrl.tx.synthetic.make_model import make_model
from skyrl.types import AdamParams, Datum, LoraConfig, SamplingParams

NUMBERS = itertools.count()
ADAM = AdamParams(learning_rate=1e-4)
NEW, PROMPT, ROWS = 64, 64, 32
EVEN = [(PROMPT, NEW)] * ROWS
"""(tokens of a prompt, tokens after it) of each sample."""
MIXED = [(int(prompt), int(new)) for prompt, new in np.random.default_rng(1).integers((16, 8), (129, 129), (ROWS, 2))]


class Ours:
    """A backend, torch or jax, with models for training and versions for sampling."""

    def __init__(self, folder: Path, models: int, kind: str = "torch", **options):
        sizes = {"max_lora_rank": RANK, "sample_max_num_sequences": ROWS, **options}
        if kind == "torch":
            self.backend = TorchBackend(str(folder), TorchBackendConfig(**sizes))
        else:
            from skyrl.backends.jax import JaxBackend, JaxBackendConfig

            self.backend = JaxBackend(str(folder), JaxBackendConfig(**sizes))
        for number in range(models):
            config = LoraConfig(rank=RANK, seed=number, train_unembed=False)  # as PEFT
            self.run(CreateModel(request_id=_name(), model_id=str(number), lora_config=config))
            path = str(folder.parent / f"version-{_name()}")
            self.run(Publish(request_id=_name(), model_id=str(number), version=str(number), path=path, persist=False))

    def run(self, *operations) -> None:
        """Run operations until all have ended."""
        for operation in operations:
            self.backend.submit(operation)
        left = {operation.request_id for operation in operations}
        while left:
            self.backend.wait(30)
            for completion in self.backend.step():
                assert "Error" not in type(completion.result).__name__, completion
                left.discard(completion.request_id)

    def train(self, lengths: list[int], models: int = 1) -> None:
        """Run a pass and a step of each model, on its share of the sequences."""
        operations = []
        for number in range(models):
            data = [_datum(length, seed) for seed, length in enumerate(lengths) if seed % models == number]
            operations += [
                ForwardBackward(request_id=_name(), model_id=str(number), data=data, loss_fn="cross_entropy"),
                OptimStep(request_id=_name(), model_id=str(number), adam_params=ADAM),
            ]
        self.run(*operations)

    def sample(self, sizes: list[tuple[int, int]]) -> None:
        """Sample new prompts concurrently. Sizes are (tokens of the prompt, tokens after it)."""
        self.run(
            *(
                Sample(
                    request_id=_name(),
                    version="0",
                    prompt=np.asarray(sequence(prompt, next(NUMBERS)), np.int32),
                    params=SamplingParams(max_tokens=new, seed=0, stop=[]),
                )
                for prompt, new in sizes
            )
        )


class Plain:
    """PEFT and torch's AdamW in a loop without a server. Sequences are padded to the longest."""

    def __init__(self, folder: Path):
        from peft import LoraConfig as PeftConfig
        from peft import get_peft_model
        from transformers import AutoModelForCausalLM

        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model = get_peft_model(
            base, PeftConfig(r=RANK, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        )
        trained = [x for x in self.model.parameters() if x.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-4)

    def train(self, lengths: list[int], rows: int = 8) -> None:
        """Take a step on the sequences, `rows` at a time."""
        for start in range(0, len(lengths), rows):
            some = lengths[start : start + rows]
            tokens = torch.zeros(len(some), max(some) + 1, dtype=torch.int64)
            mask = torch.zeros_like(tokens)
            for row, length in enumerate(some):
                tokens[row, : length + 1] = torch.tensor(sequence(length + 1, start + row))
                mask[row, : length + 1] = 1
            logits = self.model(input_ids=tokens[:, :-1], attention_mask=mask[:, :-1]).logits
            losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
            (losses * mask[:, 1:]).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def sample(self, sizes: list[tuple[int, int]]) -> None:
        """Sample one batch with `generate`: prompts are padded on the left, and all sequences get the same length."""
        longest, new = (max(numbers) for numbers in zip(*sizes, strict=True))
        prompts = torch.zeros(len(sizes), longest, dtype=torch.int64)
        mask = torch.zeros_like(prompts)
        for row, (length, _) in enumerate(sizes):
            prompts[row, longest - length :] = torch.tensor(sequence(length, next(NUMBERS)))
            mask[row, longest - length :] = 1
        self.model.generate(
            input_ids=prompts, attention_mask=mask, do_sample=True, max_new_tokens=new, min_new_tokens=new
        )


class Apart:
    """`Ours` in a separate process, which reports the seconds of each call."""

    def __init__(self, folder: Path, kind: str, one_core: bool):
        context = get_context("spawn")
        self._pipe, its = context.Pipe()
        self._process = context.Process(target=_serve, args=(its, folder, kind, one_core), daemon=True)
        self._process.start()
        its.close()

    def seconds(self, method: str, *arguments: object) -> float:
        """Seconds of a call."""
        self._pipe.send((method, arguments))
        return self._pipe.recv()

    def close(self) -> None:
        """Stop the process."""
        self._pipe.close()
        self._process.join()


def _serve(pipe: Connection, folder: Path, kind: str, one_core: bool) -> None:
    _choose_clock(one_core)
    ours = Ours(folder, models=1, kind=kind)
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            ours.backend.close()
            return
        pipe.send(timed(lambda method=method, arguments=arguments: getattr(ours, method)(*arguments)))


def compare_backends(folder: Path, one_core: bool) -> None:
    """Print rates of torch, and its speed relative to JAX, for the same work in turn."""
    cases = {
        f"{folder.name}: 16 x 256 beside JAX": (16 * 256, "train", [256] * 16),
        f"{folder.name}: 32 samples beside JAX": (ROWS * NEW, "sample", EVEN),
    }
    torch_, jax_ = (Apart(folder, kind, one_core) for kind in ("torch", "jax"))
    for case, (tokens, *call) in cases.items():
        pairs = [(torch_.seconds(*call), jax_.seconds(*call)) for _ in range(7)][2:]  # JAX compiles in the first ones
        ours, its = (statistics.median(times) for times in zip(*pairs, strict=True))
        emit(benchmark="torch", case=case, tokens_per_s=round(tokens / ours), times_as_fast=round(its / ours, 2))
    torch_.close()
    jax_.close()


_clock = time.perf_counter


def _choose_clock(one_core: bool) -> None:
    """Measure processor time on one core, or wall time on all cores."""
    global _clock
    if one_core:
        _clock = time.process_time
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        torch.set_num_threads(1)


def timed(call: Callable[[], object]) -> float:
    """Seconds of a call."""
    start = _clock()
    call()
    return _clock() - start


def _name() -> str:
    return f"request-{next(NUMBERS)}"


def _datum(length: int, seed: int) -> Datum:
    tokens = np.asarray(sequence(length + 1, seed), np.int32)
    weights = np.ones(length, np.float32)
    return Datum(tokens[:-1], {"target_tokens": tokens[1:].astype(np.int64), "weights": weights})


def compare(case: str, tokens: int, wanted: float, ours: Callable[[], object], other: Callable[[], object]) -> None:
    """Print the rate of `ours`, and its speed relative to `other`."""
    ours(), other()
    pairs = [(timed(ours), timed(other)) for _ in range(5)]
    mine, its = (statistics.median(times) for times in zip(*pairs, strict=True))
    emit(
        benchmark="torch",
        case=case,
        tokens_per_s=round(tokens / mine),
        times_as_fast=round(its / mine, 2),
        target=wanted,
    )


def compare_executors(folder: Path) -> None:
    """Print the times of two workers for the same passes and steps, as processes and as Ray actors in turn."""
    groups = {workers: Ours(folder, models=1, workers=workers, num_workers=2) for workers in ("processes", "ray")}
    for lengths in ([256] * 16, [32]):
        took: dict[str, list[tuple[float, float]]] = {workers: [] for workers in groups}
        for number in range(9):
            for workers, group in groups.items():
                began = time.process_time()
                seconds = timed(lambda group=group, lengths=lengths: group.train(lengths))
                if number > 1:
                    took[workers].append((seconds, time.process_time() - began))
        medians = {workers: [statistics.median(x) for x in zip(*some, strict=True)] for workers, some in took.items()}
        for workers, (seconds, busy) in medians.items():
            emit(
                benchmark="torch",
                case=f"{len(lengths)} x {lengths[0]} on two workers ({workers})",
                seconds=round(seconds, 4),
                driver_share=round(busy / seconds, 3),
                times_processes=round(seconds / medians["processes"][0], 2),
            )
    for group in groups.values():
        group.backend.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted(model_shapes.SHAPES), default="tiny")
    parser.add_argument("--ray", action="store_true", help="compare Ray actors with local processes, and nothing else")
    parser.add_argument("--beside-jax", action="store_true", help="compare with the JAX backend, and nothing else")
    parser.add_argument("--one-core", action="store_true", help="measure processor time on one core")
    options = parser.parse_args()
    _choose_clock(options.one_core)
    name = options.model
    mixed = np.random.default_rng(0).integers(16, 513, 32).tolist()
    with TemporaryDirectory(prefix="skyrl-bench-") as scratch:
        folder = Path(scratch) / name
        make_model(folder, arch="qwen3", **asdict(model_shapes.SHAPES[name]), seed=0)
        if options.ray:
            compare_executors(folder)
            return
        if options.beside_jax:
            compare_backends(folder, options.one_core)
            return
        ours, plain = Ours(folder, models=4), Plain(folder)
        even, each = [256] * 16, [256] * 64
        compare("16 x 256 beside PEFT", 16 * 256, 1.0, lambda: ours.train(even), lambda: plain.train(even))
        compare(
            "64 x 256 of four models beside one",
            64 * 256,
            0.85,
            lambda: ours.train(each, models=4),
            lambda: ours.train(each),
        )
        compare("32 of 16 to 512 beside PEFT", sum(mixed), 2.0, lambda: ours.train(mixed), lambda: plain.train(mixed))
        compare(
            "32 samples at once beside one by one",
            32 * NEW,
            5.0,
            lambda: ours.sample(EVEN),
            lambda: [ours.sample([one]) for one in EVEN],
        )
        for what, sizes in (("equal", EVEN), ("mixed", MIXED)):
            compare(
                f"32 samples of {what} lengths beside one left-padded batch of generate",
                sum(new for _, new in sizes),
                1.5,
                lambda sizes=sizes: ours.sample(sizes),
                lambda sizes=sizes: plain.sample(sizes),
            )
        ours.backend.close()


if __name__ == "__main__":
    main()
