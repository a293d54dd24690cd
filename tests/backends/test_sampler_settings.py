"""Settings of a sampler that change how it computes, and never what it says: oracles are the sampler without them."""

import pytest
from sampling_rig import Rig, finish, output, prompt_of, request, run, same

pytestmark = pytest.mark.full

LONG = prompt_of(300)


@pytest.fixture(scope="module")
def rig(tiny_model) -> Rig:
    return Rig.of(tiny_model)


def test_without_prefix_caching_no_page_is_shared_and_texts_are_equal(rig):
    sampler = rig.make_sampler(prefix_caching=False)
    asked = [request(LONG, "v1", seed=seed, max_tokens=32) for seed in (1, 2)]
    for each in asked:
        sampler.add(each)
    while len(sampler._running) < 2:
        assert not sampler.burst()
    first, second = ({*sequence.pages, *(node.page for node in sequence.shared)} for sequence in sampler._running)
    assert len(first) == len(second) and not first & second
    alone = finish(sampler)
    shared = run(rig.sampler, *asked)
    for each, result in zip(asked, shared, strict=True):
        assert same(alone[each.request_id].sequences[0], result.sequences[0])
    hits = [output(each, LONG, "v1").prompt_cache_hit_tokens for each in (sampler, rig.sampler)]
    assert hits[0] == 0 < hits[1]


@pytest.mark.parametrize(("most", "calls"), [(0, [256, 43]), (64, [64] * 4 + [43]), (100, [64] * 4 + [43])])
def test_no_call_reads_more_tokens_than_are_allowed(rig, most, calls, monkeypatch):
    sampler = rig.make_sampler(max_tokens=most)
    seen: list[int] = []
    read = sampler._runner.read

    def noted(version, pieces):
        seen.extend(len(piece.tokens) for piece in pieces)
        return read(version, pieces)

    monkeypatch.setattr(sampler._runner, "read", noted)
    (drawn,) = output(sampler, LONG, "v2").sequences
    assert seen == calls
    assert same(drawn, output(rig.sampler, LONG, "v2").sequences[0])


@pytest.mark.parametrize(("chunked", "bursts"), [(True, 5), (False, 1)])
def test_a_prompt_is_read_in_parts_between_others_tokens_or_at_once(rig, chunked, bursts):
    sampler = rig.make_sampler(max_tokens=64, chunked_prefill=chunked)
    sampler.add(request(prompt_of(4), max_tokens=200))
    sampler.burst()
    sampler.add(request(LONG, max_tokens=1))
    taken = 0
    while taken == 0 or sampler._prefill:
        sampler.burst()
        taken += 1
    assert taken == bursts
    finish(sampler)
