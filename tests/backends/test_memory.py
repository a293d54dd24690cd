"""Memory is planned before anything is loaded, from what compiled programs say."""

from contextlib import closing
from itertools import pairwise
from pathlib import Path

import jax
import pytest

from skyrl.backends.common.memory_plan import COPIES, GIB, KEPT_FREE, TRAINING_SHARE, Plan
from skyrl.backends.jax import JaxBackend, JaxBackendConfig
from skyrl.backends.jax.memory_plan import MODES, STACKS, choose_modes, choose_stacks
from skyrl.backends.jax.sampling.adapter_stacks import SLOTS, adapters_in_stacks, most_sampled
from skyrl.errors import RequestError
from skyrl.tx.synthetic.make_model import make_model
from skyrl.utils.machine import available_memory, host_memory

LENGTHS = [32, 128, 512, 1024, 2048]
TAKES = {False: 100, "selective": 40, True: 10}
"""Bytes per token, by mode."""


def measured(length: int, mode) -> int:
    return TAKES[mode] * length


@pytest.mark.parametrize("asked", MODES)
def test_an_explicit_mode_is_kept_whatever_it_takes(asked):
    modes, most = choose_modes(asked, LENGTHS, 512, 1, measured)
    assert modes == dict.fromkeys(LENGTHS, asked)
    assert most == 2048 * TAKES[asked]


@pytest.mark.parametrize("room", [1, 10_000, 60_000, 90_000, 10**6])
def test_auto_computes_again_no_more_than_memory_asks_for(room):
    modes, most = choose_modes("auto", LENGTHS, 512, room, measured)
    for length in LENGTHS:
        fits = [mode for mode in MODES if measured(length, mode) <= room]
        assert modes[length] == (fits[0] if fits else True)
    assert most == max(measured(length, modes[length]) for length in LENGTHS)


def test_programs_are_measured_only_until_they_fit():
    asked = []

    def measure(length, mode):
        asked.append((length, mode))
        return measured(length, mode)

    choose_modes("auto", LENGTHS, 512, 2**30, measure)
    assert asked == [(512, False)]
    asked.clear()
    choose_modes("auto", LENGTHS, 512, 10**6, measure)
    assert asked == [(512, False), (2048, False)]


CACHE_GIB = 0.01


@pytest.fixture(scope="module")
def deep_model(tmp_path_factory):
    sizes = {"hidden": 64, "layers": 12, "heads": 4, "kv_heads": 2, "head_dim": 16, "intermediate": 256}
    return make_model(tmp_path_factory.mktemp("deep"), arch="qwen3", **sizes, seed=0)


def taken(folder, **options) -> tuple[int, int, int]:
    """Bytes that XLA says of the programs for tiles of 128 and 512 tokens, and bytes of the largest adapter."""
    config = JaxBackendConfig(max_context_length=512, compilation_cache=False, kv_cache_gib=CACHE_GIB, **options)
    with closing(JaxBackend(str(folder), config)) as backend:
        widest = backend._passes._widest
        short, long = (backend._programs.temporary_bytes(backend._base, widest, length) for length in (128, 512))
        return short, long, sum(leaf.nbytes for leaf in jax.tree.leaves(widest))


@pytest.fixture(scope="module")
def taken_by_mode(deep_model):
    return {mode: taken(deep_model, gradient_checkpointing=mode) for mode in MODES}


@pytest.mark.full
def test_what_computes_more_again_takes_less_memory(taken_by_mode):
    for without, some in pairwise(MODES):
        assert taken_by_mode[without][1] > taken_by_mode[some][1]


@pytest.mark.full
@pytest.mark.parametrize("mode", [pytest.param("selective", marks=pytest.mark.slow), True])
def test_auto_runs_the_mode_that_fits_and_short_tiles_without(deep_model, taken_by_mode, mode):
    """With room for a call between what that mode takes and what the one before it does."""
    before = MODES[MODES.index(mode) - 1]
    weights = sum(file.stat().st_size for file in deep_model.glob("*.safetensors"))
    short, _, adapter = taken_by_mode[False]
    room = (taken_by_mode[before][1] + taken_by_mode[mode][1]) / 2 + 2 * adapter
    total = (room / TRAINING_SHARE + weights + CACHE_GIB * GIB) / (1 - KEPT_FREE)
    assert taken(deep_model, memory_limit_gib=total / GIB) == (short, taken_by_mode[mode][1], adapter)


def test_calls_with_several_tiles_are_those_that_memory_has_room_for():
    assert choose_stacks(10**9, 100) == STACKS
    assert choose_stacks(3 * 4 * 100, 100) == (1, 4)
    assert choose_stacks(0, 100) == (1,)
    assert choose_stacks(10**9, 100, most=15) == (1, 4)


@pytest.mark.full
@pytest.mark.parametrize("field", ["adapter_memory_gib", "adapter_host_memory_gib", "version_memory_gib"])
def test_room_that_is_not_there_is_refused_with_the_field(tiny_model, field):
    with pytest.raises(RequestError, match=rf"{field}=100000 is more than"):
        JaxBackend(str(tiny_model), JaxBackendConfig(compilation_cache=False, **{field: 1e5}))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"kv_cache_gib": 1e5}, "kv_cache_gib"),
        pytest.param({"memory_limit_gib": 0.02, "kv_cache_gib": 1e-4}, "max_context_length", marks=pytest.mark.slow),
    ],
)
def test_a_model_that_does_not_fit_is_refused_before_its_weights_are_read(tiny_model, tmp_path, options, named):
    (folder := tmp_path / "model").mkdir()
    for file in Path(tiny_model).iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    with pytest.raises(RequestError, match=rf"does not fit into memory.*memory_limit_gib.*{named}"):
        JaxBackend(str(folder), JaxBackendConfig(compilation_cache=False, **options))


def test_a_cache_of_the_default_size_leaves_room_for_two_models_but_has_room_for_a_sequence():
    plan = Plan(total=100 * GIB, base=10 * GIB, cache=60 * GIB, training=18 * GIB, model=4 * GIB)
    assert plan.left == 2 * GIB
    smaller = plan.with_smaller_cache(GIB)
    assert (smaller.cache, smaller.left) == (54 * GIB, 8 * GIB)
    assert plan.with_smaller_cache(57 * GIB).left == 5 * GIB
    assert smaller.with_smaller_cache(GIB) == smaller


@pytest.mark.full
def test_a_server_starts_with_a_smaller_cache_where_memory_has_no_room_for_the_default(tiny_model):
    config = JaxBackendConfig(compilation_cache=False, memory_limit_gib=1.0, max_context_length=512)
    with closing(JaxBackend(str(tiny_model), config)) as backend:
        assert backend.plan.cache < backend.plan.usable < 2 * GIB
        assert backend.plan.left >= 2 * backend.plan.model
        assert backend._defaults.cache_bytes == backend.plan.cache


def test_room_for_models_is_what_the_configuration_says_else_a_part_of_what_is_left():
    plan = Plan(total=100 * 2**30, base=10 * 2**30, cache=20 * 2**30, training=20 * 2**30, model=1)
    assert plan.left == 40 * 2**30
    assert plan.models(device=1.5, host=2.0) == (1.5 * 2**30, 2 * 2**30)
    for given in (0, 35):
        device, host = plan.models(device=given, host=0)
        assert device + host <= plan.left
        assert plan.versions(0, (device, host)) == plan.left - device - host
        assert plan.versions(1.5, (device, host)) == 1.5 * 2**30


@pytest.mark.parametrize(("held", "room"), [(0, 20), (35, 35), (50, 40)])
def test_models_that_a_run_holds_get_what_they_take_as_far_as_it_is_left(held, room):
    plan = Plan(100 * 2**30, 10 * 2**30, 20 * 2**30, training=20 * 2**30, model=1, device="accelerator")
    assert plan.on_device(0, held * 2**30) == room * 2**30


def test_the_host_has_the_memory_that_the_kernel_says_or_its_control_group_less():
    total = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    assert 0 < available_memory() < host_memory() <= int(total.split()[1]) * 1024


@pytest.mark.parametrize("adapters", [5, 6, 9, 12, 31, 33])
def test_stacks_of_adapters_that_are_sampled_together_fit_into_their_memory(adapters):
    most = most_sampled(adapters * 100, 100)
    full, one = -(-most // SLOTS) * SLOTS, 1
    assert full + one <= adapters and most_sampled(adapters_in_stacks(most) * 100, 100) == most


@pytest.mark.parametrize("adapters", [1, 4])
def test_adapters_of_one_stack_are_always_sampled_together(adapters):
    assert most_sampled(adapters * 100, 100) == SLOTS


def test_memory_of_stacks_limits_the_adapters_that_are_sampled_together(tiny_model):
    given = {
        "warm_up": False,
        "memory_limit_gib": 1.5,
        "kv_cache_gib": 0.1,
        "max_lora_adapters": 64,
        "max_lora_rank": 512,
    }
    with closing(JaxBackend(str(tiny_model), JaxBackendConfig(**given))) as backend:
        adapter, slots = backend.plan.model // COPIES, len(backend._versions._slots)
        assert SLOTS < slots < 63 and adapters_in_stacks(slots) * adapter < backend.plan.left / 2
