"""Compiled training programs: which are kept, and which go."""

import gc
import itertools
import pickle
import subprocess
import sys
import weakref
from dataclasses import dataclass

import jax
import pytest
from sampling_rig import Rig

from skyrl.algorithms.objective import ForwardOnly, ValueObjective
from skyrl.backends.jax.compile_cache import UNBOUNDED, Compiler, Program
from skyrl.backends.jax.training.programs import ALL_OBJECTIVES, OBJECTIVES, TrainingPrograms, abstract_tile


@pytest.fixture
def rig(tiny_model) -> Rig:
    return Rig.of(tiny_model)


@pytest.fixture
def programs(rig) -> TrainingPrograms:
    return TrainingPrograms(lambda _: rig.graphdef, 0, False, rig.layout)


COUNTER = itertools.count()


@dataclass(frozen=True)
class Numbered(ForwardOnly):
    number: int = 0


def another() -> ForwardOnly:
    """An objective that is equal to no other."""
    return Numbered(("logprobs",), next(COUNTER))


def executables() -> int:
    """Compiled programs that the device's client holds."""
    gc.collect()
    return len(jax.devices()[0].client.live_executables())


@pytest.mark.full
def test_what_was_compiled_for_an_objective_that_went_is_freed(rig, programs):
    objective, arguments = another(), (rig.base, rig.adapter(0), (abstract_tile(32, 1),))
    own, before = weakref.ref(objective), executables()
    programs.of(objective)[0].compiled_for(*arguments)
    assert executables() == before + 1
    del objective
    for _ in range(OBJECTIVES):
        programs.of(another())
    assert executables() == before
    assert own() is None


def test_programs_of_the_objectives_used_last_are_kept(programs):
    first, others = another(), [another() for _ in range(OBJECTIVES - 1)]
    kept = programs.of(first)
    forgotten = programs.of(others[0])
    for other in others[1:]:
        programs.of(other)
    assert programs.of(first) is kept
    programs.of(another())
    assert programs.of(first) is kept
    assert programs.of(others[0]) is not forgotten


def test_a_tenant_evicts_its_own_programs_alone(programs):
    shared, single = another(), another()
    kept = programs.of(single, "single"), programs.of(shared, "single")
    assert programs.of(shared, "busy") is kept[1]
    for _ in range(ALL_OBJECTIVES):
        programs.of(another(), "busy")
    assert (programs.of(single, "single"), programs.of(shared, "single")) == kept


def test_programs_of_many_tenants_are_bounded(programs):
    first = another()
    programs.of(first, "0")
    own = weakref.ref(first)
    for tenant in range(ALL_OBJECTIVES):
        last = another()
        kept = programs.of(last, f"{tenant + 1}")
    assert programs.of(last, f"{ALL_OBJECTIVES}") is kept
    del first, last
    gc.collect()
    assert own() is None


def test_equal_objectives_share_their_programs(programs):
    assert programs.of(ValueObjective(0.2)) is programs.of(pickle.loads(pickle.dumps(ValueObjective(0.2))))
    assert programs.of(ValueObjective(0.2)) is not programs.of(ValueObjective(0.3))


def test_programs_of_the_protocols_losses_are_kept_whatever_comes(programs):
    own = programs.of(None)
    for _ in range(2 * OBJECTIVES):
        programs.of(another())
    assert programs.of(None) == own


def test_xla_flags_have_the_last_word_on_options_that_they_name(monkeypatch):
    jax.devices()  # XLA has read its flags, and meets only what the compiler gives it
    compiler = {"on_cpu": {"xla_no_such_option": 1}}
    monkeypatch.setenv("XLA_FLAGS", "--xla_another_option=1")
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        Compiler("test", **compiler).jit("add", lambda x: x + 1)(1.0)
    monkeypatch.setenv("XLA_FLAGS", "--xla_no_such_option=2")
    assert Compiler("test", **compiler).jit("add", lambda x: x + 1)(1.0) == 2.0


COMPILES = """
import jax
from skyrl.backends.jax import backend
backend.CACHE_BYTES = 2**20
backend.keep_compiled_programs()
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.jit(lambda x: x * 3 + 1)(2.0).block_until_ready()
"""


@pytest.mark.full
def test_programs_on_disk_are_bounded_and_an_entry_whose_writer_was_killed_is_no_obstacle(tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("SKYRL_CACHE", str(tmp_path))
    (tmp_path / "xla").mkdir()
    torn = tmp_path / "xla" / "torn-cache"
    torn.write_bytes(bytes(2**20))
    subprocess.run([sys.executable, "-c", COMPILES], check=True, timeout=120)
    assert list((tmp_path / "xla").glob("*-cache")) and not torn.exists()


REFUSED = "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "


class TooSmallADevice:
    """A jitted function that the compiler of a TPU refuses."""

    def __init__(self, reason: str):
        self.reason = reason

    def lower(self, *args):
        return self

    def compile(self):
        raise jax.errors.JaxRuntimeError(self.reason)


@pytest.mark.parametrize(
    ("reason", "nbytes"),
    [
        (REFUSED + "temporaries (67.18G) exceeds available HBM (15.75G).", 67.18 * 2**30),
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 512.5M of 15.75G hbm.", 512.5 * 2**20),
        ("RESOURCE_EXHAUSTED: too large", UNBOUNDED),
    ],
)
def test_a_program_that_a_compiler_refuses_takes_what_it_says(reason, nbytes):
    assert Program(TooSmallADevice(reason)).temporary_bytes("base") == int(nbytes)


def test_other_errors_of_a_compiler_are_raised():
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        Program(TooSmallADevice("INTERNAL: broken")).temporary_bytes("base")
