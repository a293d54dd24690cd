"""Samples that another engine goes on with: what was delivered is kept, and the rest is as it would have been."""

import asyncio
import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from skyrl.backends.engines.adapter_folder import AdapterFolder
from skyrl.backends.engines.continuation import is_whole, rest, together
from skyrl.backends.engines.needs import BY_PLACE
from skyrl.backends.engines.protocol import Admitted, Draw, Drawn, Engine, EngineDown, EngineFacts
from skyrl.backends.engines.router import Ticket
from skyrl.types import Origin, SamplingOptions
from tests.backends.engines.engine_server import EngineProcess, engine_process
from tests.backends.engines.marked import admit, fleet_of, ticket
from tests.backends.engines.numpy_models import Adapter, log_softmax
from tests.backends.engines.pretend_engine import PretendEngine, Sizes
from tests.backends.engines.test_fleet import http, options_of

WORDS = 3


class Chain:
    """Odds of three tokens that follow from the two before."""

    vocab_size = WORDS

    def logits(self, tokens: np.ndarray, adapter: Adapter | None) -> np.ndarray:
        return np.random.default_rng(tokens[-2:].tolist()).normal(0, 1.5, WORDS).astype(np.float32)


class Fragile(PretendEngine):
    """Is lost with each sample of which it has drawn some tokens, once."""

    def __init__(self, by_place: bool, after: int):
        super().__init__("fragile", Chain(), sizes=Sizes(by_place=by_place), max_requests=64)
        self.breaks_after, self.broken = after, False

    async def facts(self) -> EngineFacts:
        if self.broken:  # so it does not come back
            raise EngineDown(f"{self.name} has died")
        return await super().facts()

    async def generate(self, draw: Draw, pieces: list[Drawn] | None = None) -> Drawn:
        pieces = [] if pieces is None else pieces
        await super().generate(draw, pieces)
        del pieces[self.breaks_after :]
        self.broken = True
        raise EngineDown(f"{self.name} has died")


async def trusted(engine: Engine) -> Admitted:
    features = {BY_PLACE} if isinstance(engine, PretendEngine) and engine.sizes.by_place else set()
    admitted = await admit(engine)
    return Admitted(admitted.longest, frozenset(features), [], admitted.base)


@pytest.fixture
def folder(tmp_path) -> AdapterFolder:
    return AdapterFolder(str(tmp_path / "adapters"), 2**30)


@pytest.fixture(scope="module")
def processes() -> Iterator[tuple[EngineProcess, EngineProcess]]:
    with engine_process() as one, engine_process() as two:
        yield one, two


def asked(name: str, seed: int, max_tokens: int = 3, **options) -> Ticket:
    given = ticket(name, prompt=(1, 2), max_tokens=max_tokens)
    draw = Draw(prompt=given.draw.prompt, adapter=None, max_tokens=max_tokens, seed=seed, temperature=1.0, **options)
    return Ticket(given.request, draw)


def drawn_with_losses(folder: AdapterFolder, by_place: bool, tickets: list[Ticket], after: int = 1) -> dict[str, Drawn]:
    """Samples of which the first engine draws so many tokens, before another draws the rest."""
    fragile, steady = Fragile(by_place, after), PretendEngine("steady", Chain(), sizes=Sizes(by_place=by_place))
    steady.max_requests = 64
    steady.dead = True
    with fleet_of([fragile, steady], folder, wait=False, admit=trusted) as (fleet, answers):
        answers.until(lambda: set(fleet.engines), {"fragile"})
        fleet.submit(tickets)
        answers.until(lambda: {name for name, error in answers.troubles.items() if "died" in error}, {"fragile"})
        fragile.dead, steady.dead = True, False
        answers.wait(len(tickets))
    return {one.request.request_id: answers.drawn(one.request.request_id) for one in tickets}


@pytest.mark.full
def test_what_was_delivered_before_a_kill_is_kept_and_nothing_is_drawn_twice(processes, folder):
    one, two = (process.anew(token_s=0.02) for process in processes)
    options = options_of(one, two, health_interval_s=60)
    with fleet_of(http(options), folder, options) as (fleet, answers):
        answers.until(lambda: set(fleet.engines), {one.url, two.url})
        one.tell("/fault", fault="die", after=7)
        fleet.submit([ticket(str(number), prompt=(number,), max_tokens=20) for number in range(24)])
        answers.wait(24)
        answers.until(lambda: set(answers.troubles), {one.url})
    kept = 0
    for drawn in map(answers.drawn, answers.outcomes):
        assert drawn.tokens.tolist() == [0] * 20 and len(drawn.logprobs) == 20
        if len(drawn.origins) == 2:
            assert [origin.engine for origin in drawn.origins] == [one.url, two.url]
            kept += drawn.origins[1].first
    assert 5 <= kept <= 7 * 8
    assert two.ask()["tokens"] == 24 * 20 - kept


def test_seeded_samples_are_the_same_where_engines_draw_by_place(folder):
    tickets = [asked(str(seed), seed, max_tokens=8) for seed in range(40)]
    interrupted = drawn_with_losses(folder, True, tickets, after=3)
    steady = PretendEngine("steady", Chain(), max_requests=64)
    again = [asked(str(seed), seed, max_tokens=8) for seed in range(40)]
    with fleet_of([steady], folder) as (fleet, answers):
        fleet.submit(again)
        answers.wait(40)
    for seed in range(40):
        whole, parts = answers.drawn(str(seed)), interrupted[str(seed)]
        assert parts.tokens.tolist() == whole.tokens.tolist()
        np.testing.assert_array_equal(parts.logprobs, whole.logprobs)


@pytest.mark.full
def test_samples_that_were_interrupted_have_the_models_distribution():
    """Random numbers are used by turns: 3,000 samples of three tokens, against exact probabilities."""
    engine, count = PretendEngine("one", Chain(), sizes=Sizes(by_place=False)), 3000

    async def interrupted(seed: int) -> tuple[int, ...]:
        draw = asked("", seed).draw
        whole = await engine.generate(draw)
        delivered = dataclasses.replace(whole, tokens=whole.tokens[:1], logprobs=whole.logprobs[:1])
        more = await engine.generate(rest(draw, delivered, keeps_seed=False))
        return tuple(together([delivered, more]).tokens.tolist())

    async def all_of_them() -> list[tuple[int, ...]]:
        return [await interrupted(seed) for seed in range(count)]

    found = Counter(asyncio.run(all_of_them()))
    statistic = 0.0
    for path in itertools.product(range(WORDS), repeat=3):
        places = [1, 2, *path]
        odds = [log_softmax(Chain().logits(np.asarray(places[n : n + 2]), None))[places[n + 2]] for n in range(3)]
        expected = count * float(np.exp(sum(odds)))
        statistic += (found[path] - expected) ** 2 / expected
    assert statistic < 54.1, "chi-square of 26 degrees of freedom, p = 0.001"


def test_a_sample_that_pays_for_what_it_has_generated_begins_anew(folder):
    penalised = SamplingOptions(presence_penalty=0.5)
    drawn = drawn_with_losses(folder, True, [asked("1", 1, options=penalised)])["1"]
    assert [(origin.first, origin.engine) for origin in drawn.origins] == [(0, "steady")]


def test_a_sample_of_which_only_the_end_was_lost_is_not_drawn_again(folder):
    drawn = drawn_with_losses(folder, True, [asked("1", 1)], after=3)["1"]
    assert [origin.engine for origin in drawn.origins] == ["fragile"] and len(drawn.tokens) == 3


def test_what_is_left_has_the_limits_that_are_left():
    draw = asked("1", 5, max_tokens=9, options=SamplingOptions(min_tokens=4), stop_ids=(2,)).draw
    delivered = Drawn(np.asarray([2, 0, 2], np.int32), np.zeros(3, np.float32), False)
    assert not is_whole(draw, delivered), "too short to stop"
    left = rest(draw, delivered, keeps_seed=True)
    assert left.prompt.tolist() == [1, 2, 2, 0, 2]
    assert (left.max_tokens, left.options.min_tokens, left.seed) == (6, 1, 5)
    assert rest(draw, delivered, keeps_seed=False).seed != 5


def test_pieces_of_one_engine_have_one_stamp():
    pieces = [
        Drawn(np.asarray([number], np.int32), np.zeros(1, np.float32), False, origins=(Origin(0, "v", "b", engine),))
        for number, engine in enumerate("aab")
    ]
    assert together(pieces).origins == (Origin(0, "v", "b", "a"), Origin(2, "v", "b", "b"))
