"""Published versions: frozen, apart from each other, and a cache over what is on disk."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampling_rig import Rig, finish, prompt_of, request, run, same, sequence

from skyrl.backends.common.versions import READ_AT_ONCE
from skyrl.backends.jax.models.state import bytes_of
from skyrl.errors import RequestError, StorageError
from skyrl.tx.layers.adapter import Adapter
from skyrl.types import ErrorResponse

pytestmark = pytest.mark.gpu

PROMPT = prompt_of(12)


@pytest.fixture(scope="module")
def rig(tiny_model) -> Rig:
    return Rig.of(tiny_model)


@pytest.fixture(autouse=True)
def nothing_is_left_behind(rig):
    yield
    assert not rig.sampler.busy
    assert rig.versions.pinned == 0


def slots(pool) -> list:
    """The first weight of each slot: which adapter is there."""
    return [0.0] + [mark(held.adapter) if held.adapter else 0.0 for _, held in sorted(pool._slots.items())]


def mark(adapter) -> float:
    return float(adapter.weights["lm_head"]["lora_A"][0, 0])


@pytest.mark.full
def test_versions_and_the_base_sampled_together_are_as_each_alone(rig):
    requests = [request(PROMPT, version, n=2, seed=4) for version in (None, "v0", "v1", "v2")]
    together = run(rig.sampler, *requests)
    for asked, result in zip(requests, together, strict=True):
        (alone,) = run(rig.sampler, asked)
        assert all(map(same, alone.sequences, result.sequences))
    assert len({tuple(result.sequences[0].tokens) for result in together}) == 4


def test_nan_weights_leave_a_neighbours_sample_bit_identical(rig):
    bad = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), rig.adapter(0))
    rig.versions.publish("nan", bad)
    rig.versions.publish("fine", rig.adapter(9))
    good = [request(PROMPT, "v1", n=2, max_tokens=20), request(PROMPT, None, max_tokens=20)]
    clean = run(rig.sampler, *good, request(PROMPT, "fine", max_tokens=20))
    beside = run(rig.sampler, *good, request(PROMPT, "nan", max_tokens=20))
    for expected, result in zip(clean[:2], beside[:2], strict=True):
        assert all(same(a, b, atol=0) for a, b in zip(expected.sequences, result.sequences, strict=True))
    assert np.isnan(beside[2].sequences[0].logprobs).all()


@pytest.mark.full
def test_a_smaller_rank_is_padded_with_zeros(rig):
    pool = rig.pool()
    wide = rig.adapter(3)
    zeroed = per_pair(wide.weights, lambda a: with_zeros(a, -1), lambda b: with_zeros(b, -2))
    narrow = per_pair(wide.weights, lambda a: np.asarray(a)[..., :4], lambda b: np.asarray(b)[..., :4, :])
    pool.publish("narrow", wide._replace(weights=narrow))
    pool.publish("zeroed", wide._replace(weights=zeroed))
    sampler = rig.make_sampler(pool)
    assert same(sequence(sampler, PROMPT, "narrow"), sequence(sampler, PROMPT, "zeroed"), atol=0)


def with_zeros(leaf, axis) -> np.ndarray:
    """A pair's matrix with all ranks beyond the fourth set to zero."""
    matrix = np.moveaxis(np.array(leaf), axis, 0)
    matrix[4:] = 0.0
    return np.moveaxis(matrix, 0, axis)


def per_pair(weights, on_a, on_b):
    if "lora_A" in weights:
        return {"lora_A": on_a(weights["lora_A"]), "lora_B": on_b(weights["lora_B"])}
    return {name: per_pair(child, on_a, on_b) for name, child in weights.items()}


def use(pool, version: str) -> None:
    """Claim, acquire and release a version, as a request does that samples it."""
    claim = pool.claim(version)
    pool.release(pool.acquire(claim))
    pool.disclaim(claim)


def test_the_least_recently_used_version_gives_up_its_slot(rig):
    pool = rig.pool(slots=3)
    adapters = {f"a{seed}": rig.adapter(20 + seed) for seed in range(3)}
    for name, adapter in adapters.items():
        pool.publish(name, adapter)
    for name in ("a0", "a1", "a0", "a2"):
        use(pool, name)
    assert sorted(slots(pool)[1:]) == sorted([mark(adapters["a0"]), mark(adapters["a2"])])


@pytest.mark.full
def test_a_version_waits_while_samples_run_on_every_slot(rig):
    pool = rig.pool()
    sampler = rig.make_sampler(pool)
    for seed in range(4):
        pool.publish(f"a{seed}", rig.adapter(seed))
    lengths = {"a0": 20, "a1": 30, "a2": 30, "a3": 1}
    for version, max_tokens in lengths.items():
        sampler.add(request(PROMPT, version, max_tokens=max_tokens, name=version))
    sampler.burst()
    assert pool.acquire(pool.claim("a3")) is None
    assert list(finish(sampler)) == ["a0", "a3", "a1", "a2"]
    assert pool.pinned == 0


def copied(rig, adapter, rank: int = 8):
    """An adapter with arrays of its own, of a smaller rank perhaps, so that a slot holds a padded copy."""
    cut = per_pair(adapter.weights, lambda a: jnp.array(a[..., :rank]), lambda b: jnp.array(b[..., :rank, :]))
    return adapter._replace(weights=cut)


def live_bytes() -> int:
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.mark.full
@pytest.mark.parametrize("rank", [8, 4])
def test_versions_that_are_stored_keep_to_the_bytes_that_they_may_take(rig, rank):
    one = bytes_of(rig.adapter(0))
    gc.collect()
    pool, before = rig.pool(slots=8, max_bytes=3 * one), live_bytes()
    for number in range(8):
        rig.stored[f"/{number}"] = adapter = copied(rig, rig.adapter(60 + number % 3), rank)
        pool.publish(f"a{number}", adapter)
        pool.mark_stored(f"a{number}", adapter, f"/{number}")
        use(pool, f"a{number}")
        del adapter, rig.stored[f"/{number}"]
    gc.collect()
    assert one < live_bytes() - before <= 3 * one + 2**10


def test_large_versions_leave_memory_after_fewer_than_small_ones(rig):
    one, large = bytes_of(rig.adapter(0)), Adapter({"base": jnp.zeros(2**20)}, jnp.float32(1))
    pool = rig.pool(max_bytes=2**22 + 4 * one)
    for number in range(3):
        pool.publish(f"large{number}", large)
        pool.mark_stored(f"large{number}", large, f"/large{number}")
    rig.held["/large1"] = None
    assert [pool.at_hand(pool.claim(f"large{number}")) for number in (2, 1)] == [True, False]
    rig.held.clear()


def test_versions_in_use_and_those_that_are_nowhere_else_stay_whatever_they_take(rig):
    pool = rig.pool(max_bytes=0)
    for number in range(3):
        pool.publish(f"a{number}", rig.adapter(number))
    pins = [pool.acquire(pool.claim(f"a{number}")) for number in range(2)]
    pool.mark_stored("a0", pool.adapter(pins[0]), "/a0")
    pool.publish("last", rig.adapter(3))
    assert all(pool.at_hand(pool.claim(f"a{number}")) for number in range(3))
    pool.release(pins[0])
    assert pool.at_hand(pool.claim("a1")) and pool.at_hand(pool.claim("a2"))
    with pytest.raises(StorageError, match="/a0"):
        pool.at_hand(pool.claim("a0"))


def test_a_write_that_ends_after_its_name_was_published_again_says_nothing_of_the_new_weights(rig):
    pool = rig.pool(slots=2, max_bytes=bytes_of(rig.adapter(0)))
    old, new = rig.adapter(50), rig.adapter(51)
    rig.stored["/old"] = old
    pool.publish("name", old)
    pool.publish("name", new)
    pool.mark_stored("name", old, "/old")
    pool.publish("other", rig.adapter(52))
    assert pool.acquire(pool.claim("name")) == 1
    assert slots(pool)[1] == mark(new)


def test_a_version_that_is_being_read_holds_up_no_other_request(rig):
    rig.stored["/slow"], rig.held["/slow"] = rig.adapter(42), None
    late = request(PROMPT, "slow", path="/slow")
    rig.sampler.add(late)
    rig.sampler.burst()
    assert not rig.sampler.busy
    beside = request(PROMPT, "v0")
    rig.sampler.add(beside)
    completions = []
    while not completions:
        completions = rig.sampler.burst()
    assert [completion.request_id for completion in completions] == [beside.request_id]
    rig.held.pop("/slow").set_result(rig.stored["/slow"])
    assert list(finish(rig.sampler)) == [late.request_id]


def test_a_version_that_was_deleted_while_it_was_read_is_not_there(rig):
    pool = rig.pool()
    rig.stored["/slow"], rig.held["/slow"] = rig.adapter(42), None
    assert not pool.at_hand(pool.claim("slow", "/slow"))
    pool.drop("slow")
    rig.held.pop("/slow").set_result(rig.stored["/slow"])
    with pytest.raises(RequestError, match="version=slow is not known here"):
        pool.acquire(pool.claim("slow"))


def test_few_versions_are_read_at_once(rig):
    pool = rig.pool()
    folders = [f"/slow{number}" for number in range(READ_AT_ONCE + 2)]
    rig.held |= dict.fromkeys(folders)
    assert not any(pool.at_hand(pool.claim(folder, folder)) for folder in folders)
    begun = [folder for folder in folders if rig.held.pop(folder) is not None]
    assert begun == folders[:READ_AT_ONCE]


def test_a_claim_of_a_version_on_disk_outlives_its_name(rig):
    pool, old = rig.pool(max_bytes=0), rig.adapter(43)
    rig.stored["/old"] = old
    pool.publish("name", old)
    pool.mark_stored("name", old, "/old")
    pool.publish("other", rig.adapter(44))  # so that `name` leaves memory
    claim = pool.claim("name")
    pool.publish("name", rig.adapter(45))
    slot = pool.acquire(claim)
    assert mark(pool.adapter(slot)) == mark(old)
    pool.release(slot)
    pool.disclaim(claim)


def test_a_version_that_is_dropped_while_it_is_read_comes_back_for_those_who_claimed_it_alone(rig):
    pool = rig.pool()
    rig.stored["/slow"], rig.held["/slow"] = rig.adapter(46), None
    claim = pool.claim("slow", "/slow")
    assert not pool.at_hand(claim)
    pool.drop("slow")
    rig.held.pop("/slow").set_result(rig.stored["/slow"])
    assert pool.at_hand(claim)
    with pytest.raises(RequestError, match="version=slow is not known here"):
        pool.acquire(pool.claim("slow"))
    pool.disclaim(claim)
    assert pool.held_bytes == 0


def test_a_version_that_cannot_be_read_fails_its_request_alone(rig):
    good, missing, unknown = run(
        rig.sampler,
        request(PROMPT, "v0"),
        request(PROMPT, "gone", path="/not/there"),
        request(PROMPT, "never-saved"),
    )
    assert same(good.sequences[0], sequence(rig.sampler, PROMPT, "v0"))
    assert missing == ErrorResponse("/not/there: no such folder", "server")
    assert unknown.status == "user"


def test_an_adapter_of_another_model_fails_its_request_alone(rig):
    wide = jax.tree.map(lambda leaf: jnp.zeros((*leaf.shape, 3), jnp.float32), rig.adapter(0))
    rig.versions.publish("alien", wide)
    good, bad = run(rig.sampler, request(PROMPT, "v0"), request(PROMPT, "alien"))
    assert same(good.sequences[0], sequence(rig.sampler, PROMPT, "v0"))
    assert isinstance(bad, ErrorResponse)
    assert bad.status == "server"
