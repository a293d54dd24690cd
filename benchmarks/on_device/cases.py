"""All cases, in order of importance. Those up to the decoding of 4B fit into the first nine minutes on one H100.

To add a case, write a function of the process's dictionary that returns figures, and list it here with its expected
seconds.
"""

import sys
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from typing import Any

from .case import Case

KERNEL_TESTS = (
    "tests/tx/layers/test_attention_bfloat16.py",
    "tests/tx/layers/test_packed_attention.py",
    "tests/tx/layers/test_lora_delta.py",
    "tests/backends/test_optimizer.py",
)
BFLOAT16_TESTS = ("tests/backends/test_bfloat16.py",)
NUMBER_TESTS = (
    "tests/tx/models/test_qwen3.py",
    "tests/backends/test_jax_backend.py",
    "tests/backends/test_jax_tenants.py",
    "tests/backends/test_sampler.py",
    "tests/conformance/test_gradients.py",
)
NUMBERS = (
    "(scanned and (logits_equal or prefill_in_chunks or slot_of_a_bank_gives)) or (trainers_forward_pass and v0)"
    " or logprobs_of_the_base_model or jax-untied-cross_entropy or deterministic_run"
    " or stack_of_models or hyper_parameters_compile_nothing or nan_weights"
)
"""Selection from these files: one test of each kind."""
BACKEND_TESTS = (
    "tests/backends/test_memory.py",
    "tests/conformance",
    "tests/backends/test_jax_backend.py",
    "tests/backends/test_jax_tenants.py",
    "tests/backends/test_defaults.py",
)
IN_ONE_PROCESS = "not (torch_sharded or torch_hybrid or torch_sequences or torch_tensors or test_gradients)"
"""Selection from the conformance kit, without its gradients, which are among the numbers above."""
SAMPLER_TESTS = (
    "tests/backends/test_sampler.py",
    "tests/backends/test_sampler_batching.py",
    "tests/backends/test_sampler_versions.py",
)
MODEL_TESTS = ("tests/tx/models/test_qwen3.py", "tests/tx/layers/test_logprobs.py", "tests/tx/test_sampling.py")
TORCH_TESTS = ("tests/backends/test_torch_worker.py",)
OBJECTIVE_TESTS = ("tests/backends/test_jax_objectives.py", "tests/backends/test_jax_whole_models.py")


def cases(tiny: bool) -> list[Case]:
    """Cases for an accelerator, or small ones with a tiny model for two CPU cores."""
    return list(_tiny() if tiny else _all())


def run(process: dict[str, Any], function: str, **arguments: Any) -> dict[str, object]:
    """Call `module:function` of this package, which is imported only in the process that runs it."""
    module, name = function.split(":")
    figures = getattr(import_module(f"{__package__}.{module}"), name)(process, **arguments)
    if jax := sys.modules.get("jax"):
        figures.setdefault("device", f"{jax.devices()[0].platform} {jax.devices()[0].device_kind}")
    return figures


def _all() -> Iterator[Case]:
    yield Case("environment", "environment", partial(run, function="environment:environment", tiny=False), 25, 90)
    yield _tests("kernels", KERNEL_TESTS, 35, 150)
    yield _tests("numbers", NUMBER_TESTS, 60, 180, only=NUMBERS)
    yield _tests("bfloat16", BFLOAT16_TESTS, 30, 150)
    for shape in ("0.6B", "4B"):
        yield from _speed(shape)
    for shape in ("0.6B", "4B"):
        yield from _torch(shape)
    yield _tests("torch", TORCH_TESTS, 60, 300)
    yield _vllm("0.6B", 150)
    yield _tests("backend", BACKEND_TESTS, 150, 400, only=IN_ONE_PROCESS)
    yield _tests("sampler", SAMPLER_TESTS, 100, 300)
    yield _tests("models", MODEL_TESTS, 100, 300)
    yield Case("skyrl demo", "server", partial(run, function="server:demo"), 90, 240)
    yield _on_ray("0.6B")
    for shape in ("0.6B", "4B"):
        yield from _more(shape)
    job = partial(run, function="correctness:out_of_memory", shape="4B")
    yield Case("4B out of memory", "4B", job, 60, 300, _start_s("4B"))
    yield _tests("objectives and whole models", OBJECTIVE_TESTS, 120, 300)
    for shape in ("1.7B", "8B"):
        yield from _speed(shape)
        yield from _more(shape)


def _tiny() -> Iterator[Case]:
    yield Case("environment", "environment", partial(run, function="environment:environment", tiny=True), 5, 60)
    yield _tests("kernels", KERNEL_TESTS[:1], 10, 120, tiny=True)
    yield from _speed("tiny", several=4, decoded=((8, 1), (12, 4)))
    yield from _torch("tiny", several=4)
    yield _vllm("tiny", 60)
    yield Case("tiny out of memory", "tiny", partial(run, function="correctness:out_of_memory", shape="tiny"), 20, 120)
    yield from _more("tiny", decoded=((4, 4),))
    yield Case("skyrl demo", "server", partial(run, function="server:demo"), 40, 240)


Decoded = tuple[tuple[int, int], ...]
"""(rows, adapters) of each case."""


def _speed(
    shape: str, several: int = 16, decoded: Decoded = ((128, 1), (128, 16), (400, 1), (32, 1))
) -> Iterator[Case]:
    """Training with one adapter and with several, and the most important decoding cases."""
    size, start_s = _billions(shape), _start_s(shape)
    yield Case(f"{shape} ready", shape, partial(run, function="throughput:ready", shape=shape), 8, 200, start_s)
    for adapters in (1, several):
        job = partial(run, function="throughput:train", shape=shape, adapters=adapters)
        yield Case(f"{shape} train, {_adapters(adapters)}", shape, job, 15 + 3 * size, 150, start_s)
    yield from _decoding(shape, decoded)


def _more(shape: str, decoded: Decoded = ((32, 16), (400, 16))) -> Iterator[Case]:
    """More decoding, prefill, RL, and profiles."""
    start_s = _start_s(shape)
    yield from _decoding(shape, decoded)
    yield Case(f"{shape} prefill", shape, partial(run, function="throughput:prefill", shape=shape), 20, 120, start_s)
    yield Case(f"{shape} RL iteration", shape, partial(run, function="throughput:rl", shape=shape), 40, 180, start_s)
    yield Case(f"{shape} profile", shape, partial(run, function="kernels:profile", shape=shape), 40, 180, start_s)


SHARED_BY_TWO = {
    "sequences": {"fsdp_size": 1, "sequence_parallel_size": 2},
    "matrices": {"tensor_parallel_size": 2},
    "offloaded weights": {"fsdp_size": -1, "cpu_offload": True},
}
"""Options of the torch backend with which two GPUs share a step, by name."""


def _torch(shape: str, several: int = 4) -> Iterator[Case]:
    """The torch backend: training, packing, decoding, steps shared by several devices. Not yet run on a GPU."""
    group, size, start_s = f"torch {shape}", _billions(shape), _start_s(shape)
    for adapters in (1, several):
        job = partial(run, function="torch_speed:train", shape=shape, adapters=adapters)
        yield Case(f"{group} training, {_adapters(adapters)}", group, job, 20 + 5 * size, 180, start_s)
    job = partial(run, function="torch_speed:offload", shape=shape, adapters=several)
    yield Case(f"{group} offload", group, job, 10 + 2 * size, 120, start_s)
    for what in ("packing", "decode", "shared"):
        job = partial(run, function=f"torch_speed:{what}", shape=shape)
        yield Case(f"{group} {what}", group, job, 30 + 5 * size, 300, start_s)
    for name, options in SHARED_BY_TWO.items():
        job = partial(run, function="torch_speed:shared", shape=shape, most=2, options=options)
        yield Case(f"{group} shared: {name}", group, job, 30 + 5 * size, 300, start_s)


def _on_ray(shape: str) -> Case:
    """A step that the GPUs of a Ray cluster share, on one or several nodes. Not yet run on a GPU."""
    job = partial(run, function="torch_speed:shared", shape=shape, options={"workers": "ray", "fsdp_size": -1})
    return Case(f"torch {shape} shared: on Ray", f"torch {shape}", job, 60, 300, _start_s(shape))


def _vllm(shape: str, estimate_s: float) -> Case:
    """A vLLM server beside the torch backend, if `VLLM_PYTHON` names one. Not yet run on a GPU."""
    return Case(f"{shape} vLLM", f"vLLM {shape}", partial(run, function="engines:vllm", shape=shape), estimate_s, 600)


def _decoding(shape: str, decoded: Decoded) -> Iterator[Case]:
    for rows, adapters in decoded:
        job = partial(run, function="throughput:decode", shape=shape, rows=rows, adapters=adapters)
        name = f"{shape} decode, {rows} rows, {_adapters(adapters)}"
        yield Case(name, shape, job, 14 + 2 * _billions(shape), 120, _start_s(shape))


def _start_s(shape: str) -> float:
    """Seconds until a process has planned memory, created the weights and measured rates."""
    return 40 + 3 * _billions(shape)


def _billions(shape: str) -> float:
    return float(shape.removesuffix("B")) if shape.endswith("B") else 0.0


def _tests(
    name: str, files: tuple[str, ...], estimate_s: float, limit_s: float, only: str = "", tiny: bool = False
) -> Case:
    job = partial(run, function="correctness:tests", files=files, only=only, limit_s=limit_s - 10, tiny=tiny)
    return Case(f"tests: {name}", "tests", job, estimate_s, limit_s)


def _adapters(count: int) -> str:
    return "1 adapter" if count == 1 else f"{count} adapters"
