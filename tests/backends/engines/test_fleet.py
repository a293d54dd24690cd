"""Engines that die, hang, refuse, come back and forget: nothing is lost, and every answer is of the right version."""

import itertools
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyrl.backends.engines import fleet as fleet_module
from skyrl.backends.engines.adapter_folder import AdapterFolder
from skyrl.backends.engines.config import EngineOptions
from skyrl.backends.engines.http_engine import HttpEngine
from skyrl.backends.engines.protocol import Drawn, EngineDown, EngineFailed, Mismatch, NoEngine
from skyrl.utils import slow_calls
from tests.backends.engines.engine_server import SECRET, EngineProcess, engine_process
from tests.backends.engines.marked import BASE, OPTIONS, fleet_of, ticket, write_marker
from tests.backends.engines.numpy_models import MarkerModel
from tests.backends.engines.pretend_engine import PretendEngine, Sizes


@pytest.fixture
def folder(tmp_path) -> AdapterFolder:
    return AdapterFolder(str(tmp_path / "adapters"), 2**30)


@pytest.fixture(scope="module")
def processes() -> Iterator[tuple[EngineProcess, EngineProcess]]:
    with engine_process() as one, engine_process() as two:
        yield one, two


@pytest.fixture
def one(processes) -> EngineProcess:
    """An engine that has nothing of other tests."""
    return processes[0].anew()


@pytest.fixture
def two(processes) -> EngineProcess:
    return processes[1].anew()


def options_of(*processes: EngineProcess, **changes: Any) -> EngineOptions:
    given = OPTIONS.model_dump() | {"urls": [process.url for process in processes], "api_key": SECRET}
    return EngineOptions.model_validate(given | {"max_loras": 2, "max_requests": 8} | changes)


def http(options: EngineOptions) -> list[HttpEngine]:
    return [HttpEngine(url, options) for url in options.urls]


def markers(folder: AdapterFolder, count: int) -> dict[str, int]:
    """Adapters by name, and the numbers in their weights."""
    return {write_marker(folder, marker): marker for marker in range(1, count + 1)}


@pytest.mark.full
def test_forty_versions_share_four_slots(one, two, folder):
    versions = markers(folder, 40)
    options = options_of(one, two)
    with fleet_of(http(options), folder, options) as (fleet, answers):
        names = {f"{number} {name}": name for number in range(4) for name in versions}
        fleet.submit([ticket(each, name) for each, name in names.items()])
        answers.wait(len(names))
        assert all(answers.marker(each) == versions[name] for each, name in names.items())
        told = one.ask(), two.ask()
    assert all(each["most_adapters"] <= 2 and each["most_at_once"] <= 8 for each in told)


def test_samples_of_an_engine_that_is_killed_are_drawn_elsewhere(one, two, folder):
    versions = markers(folder, 3)
    options = options_of(one.anew(token_s=0.002), two.anew(token_s=0.002))
    with fleet_of(http(options), folder, options) as (fleet, answers):
        names = {f"{number} {name}": name for number in range(20) for name in versions}
        fleet.submit([ticket(each, name, max_tokens=20) for each, name in names.items()])
        answers.wait(10)
        one.kill()
        answers.wait(len(names))
        assert all(answers.marker(each) == versions[name] for each, name in names.items())
        answers.until(lambda: set(fleet.engines), {two.url})
        one.start()
        answers.until(lambda: set(fleet.engines), {one.url, two.url})
        fleet.submit([ticket(f"again {number}", next(iter(versions))) for number in range(40)])
        answers.wait(len(names) + 40)
        assert one.ask()["most_at_once"] > 0


@pytest.mark.full("hang", "die")
@pytest.mark.parametrize("fault", ["hang", "reset", "die"])
def test_an_engine_that_fails_while_it_draws_is_left(one, two, folder, fault):
    """One that hangs by its time limit, one that ends by the end of its connection."""
    (name, marker) = next(iter(markers(folder, 1).items()))
    options = options_of(one, two, timeout_s=3.0, token_timeout_s=0.1)
    with fleet_of(http(options), folder, options) as (fleet, answers):
        one.tell("/fault", fault=fault)
        fleet.submit([ticket(str(number), name) for number in range(40)])
        answers.wait(40)
        assert {answers.marker(str(number)) for number in range(40)} == {marker}
        assert set(answers.troubles) == {one.url}


def test_an_engine_that_stands_still_while_it_answers_is_left_long_before_its_samples_limit(one, two, folder, caplog):
    options = options_of(one, two, timeout_s=2.0, token_timeout_s=600.0)
    with fleet_of(http(options), folder, options) as (fleet, answers):
        one.tell("/fault", fault="hang")
        fleet.submit([ticket(str(number)) for number in range(8)])
        answers.wait(8)
        assert f"{one.url} answers, but has sent no token of" in caplog.text


def test_an_engine_whose_samples_are_long_is_kept(one, folder, caplog):
    options = options_of(one.anew(token_s=0.25), timeout_s=2.0, token_timeout_s=600.0)
    with fleet_of(http(options), folder, options) as (fleet, answers):
        fleet.submit([ticket("long", max_tokens=12)])
        answers.wait(1)
        assert len(answers.drawn("long").tokens) == 12 and "has sent no token" not in caplog.text


@pytest.mark.full
def test_an_engine_that_draws_with_the_weights_of_others_is_left(one, two, folder):
    versions = markers(folder, 2)
    options = options_of(one, two)
    with fleet_of(http(options), folder, options) as (fleet, answers):
        names = {f"{number} {name}": name for number in range(8) for name in versions}
        fleet.submit([ticket(each, name) for each, name in names.items()])
        answers.wait(len(names))
        one.tell("/fault", fault="mixed")
        more = {f"mixed {each}": name for each, name in names.items()}
        fleet.submit([ticket(each, name) for each, name in more.items()])
        answers.wait(len(names) + len(more))
        assert all(answers.marker(each) == versions[name] for each, name in (names | more).items())
        assert "has drawn a sample from adapter=" in answers.troubles[one.url]
        for each, name in (names | more).items():
            (origin,) = answers.drawn(each).origins
            assert (origin.version, origin.base) == (name, BASE) and origin.engine in options.urls


@pytest.mark.full
def test_a_version_that_differs_though_it_was_loaded_again_fails_its_own_samples_alone(folder, monkeypatch, caplog):
    monkeypatch.setattr(fleet_module, "ATTEMPTS", 2)
    wrong, right = markers(folder, 2)
    compared: list[str | None] = []

    async def check(engine, ticket, admitted) -> None:
        compared.append(ticket.adapter)
        if ticket.adapter == wrong:
            raise Mismatch(f"{engine.name} has other weights")

    engine = PretendEngine("one", MarkerModel())
    with fleet_of([engine], folder, check=check) as (fleet, answers):
        fleet.submit([ticket(f"{number} {name}", name) for number in range(4) for name in (wrong, right, None)])
        answers.wait(12)
        assert set(fleet.engines) == {"one"} and not fleet.troubles
    for number in range(4):
        assert isinstance(answers.outcomes[f"{number} {wrong}"], Mismatch)
        assert (answers.marker(f"{number} {right}"), answers.marker(f"{number} None")) == (2, 0)
    tried = Counter(compared)
    assert tried[wrong] >= 4 and tried == {wrong: tried[wrong], right: 1}
    assert engine.loads == 1 + 1 + tried[wrong] // 2, "it is loaded again in between"
    assert "has other weights" in caplog.text


def test_a_version_that_comes_back_is_compared_again(folder):
    compared: list[str | None] = []

    async def check(engine, ticket, admitted) -> None:
        compared.append(ticket.adapter)

    engine = PretendEngine("one", MarkerModel(), sizes=Sizes(max_loras=2))
    first, *others = markers(folder, 3)
    with fleet_of([engine], folder, check=check) as (fleet, answers):
        for number, name in enumerate((first, first, *others, first)):
            fleet.submit([ticket(str(number), name)])
            answers.wait(number + 1)
    assert compared == [first, *others, first]


def test_an_engine_whose_base_was_replaced_is_left_until_it_is_proved_again(folder):
    engine = PretendEngine("one", MarkerModel())
    with fleet_of([engine], folder) as (fleet, answers):
        engine.base_id = "another"
        fleet.submit([ticket("1")])
        answers.wait(1)
        assert "on base=another, not from adapter=None on base=" in answers.troubles["one"]
        assert answers.drawn("1").origins[0].base == BASE


def test_an_engine_out_of_use_is_a_slow_call_until_it_is_back(one, folder, monkeypatch):
    monkeypatch.setattr(slow_calls, "EXPECTED_S", 0.0)
    options = options_of(one, connect_timeout_s=0.3, health_interval_s=0.05)
    listed = lambda: (call[:2] for call in slow_calls.slow_calls())  # noqa: E731
    with fleet_of(http(options), folder, options) as (fleet, answers):
        os.kill(one.process.pid, signal.SIGSTOP)
        answers.until(lambda: ("sampling engine", one.url) in listed(), True)
        os.kill(one.process.pid, signal.SIGCONT)
        answers.until(lambda: ("sampling engine", one.url) in listed(), False)
        answers.until(lambda: set(fleet.engines), {one.url})


class Pausing(PretendEngine):
    """An engine that misses its first health check."""

    checks = 0

    async def health(self) -> None:
        self.checks += 1
        if self.checks == 1:
            raise EngineDown(f"{self.name} does not answer")


def test_an_engine_that_misses_one_health_check_stays_in_use(folder, caplog):
    engine = Pausing("one", MarkerModel())
    with fleet_of([engine], folder, OPTIONS.model_copy(update={"health_interval_s": 0.05})) as (_, answers):
        answers.until(lambda: engine.checks > 2, True)
        assert "is excluded" not in caplog.text


@pytest.mark.full
def test_an_engine_that_refuses_stays_in_use_and_another_draws(one, two, folder):
    options = options_of(one, two)
    with fleet_of(http(options), folder, options) as (fleet, answers):
        one.tell("/fault", fault="refuse")
        fleet.submit([ticket(str(number)) for number in range(20)])
        outcomes = answers.wait(20)
        assert all(isinstance(outcome, Drawn) for outcome in outcomes.values())
        one.tell("/fault", fault=None)
        fleet.submit([ticket(f"after {number}") for number in range(40)])
        answers.wait(60)
        assert set(fleet.engines) == {one.url, two.url}


@pytest.mark.full
def test_an_engine_that_came_back_empty_unnoticed_is_given_its_adapters_again(one, folder):
    (name, marker) = next(iter(markers(folder, 1).items()))
    options = options_of(one, health_interval_s=600)
    with fleet_of(http(options), folder, options) as (fleet, answers):
        fleet.submit([ticket("1", name)])
        answers.wait(1)
        one.kill()
        one.start()
        fleet.submit([ticket("2", name)])
        answers.wait(2)
        assert answers.marker("2") == marker


def test_a_driver_that_is_started_again_finds_what_engines_have(one, folder):
    versions = markers(folder, 2)
    options = options_of(one)
    for turn in range(2):
        with fleet_of(http(options), folder, options) as (fleet, answers):
            fleet.submit([ticket(f"{turn} {name}", name) for name in versions])
            answers.wait(2)
            assert all(answers.marker(f"{turn} {name}") == marker for name, marker in versions.items())
    assert one.ask()["loads"] == 2


@pytest.mark.full
def test_what_no_engine_can_draw_fails_in_time_though_another_comes_and_goes(folder):
    able, other = (
        PretendEngine(name, MarkerModel(), sizes=Sizes(longest=size)) for name, size in (("a", 90), ("b", 9))
    )
    options = OPTIONS.model_copy(update={"absent_timeout_s": 1.0, "health_interval_s": 0.05})
    with fleet_of([able, other], folder, options) as (fleet, answers):
        able.dead = True
        answers.until(lambda: set(fleet.engines), {"b"})
        fleet.submit([ticket("1", max_tokens=20)])
        until = time.monotonic() + 20
        while "1" not in answers.outcomes:
            assert time.monotonic() < until
            other.dead = not other.dead
            time.sleep(0.4)
        assert isinstance(answers.outcomes["1"], NoEngine)


def test_samples_wait_for_an_engine_that_is_expected(folder):
    engine, expected = PretendEngine("one", MarkerModel()), {"one"}
    options = OPTIONS.model_copy(update={"absent_timeout_s": 0.2, "health_interval_s": 0.05})
    with fleet_of([engine], folder, options, expects=lambda name: name in expected) as (fleet, answers):
        engine.dead = True
        answers.until(lambda: set(fleet.engines), set())
        able, unable = ticket("able"), ticket("unable")
        unable.needs = frozenset({"what no engine has"})
        fleet.submit([able, unable])
        assert isinstance(answers.wait(1)["unable"], NoEngine)
        expected.clear()
        assert isinstance(answers.wait(2)["able"], NoEngine)


def test_a_fleet_is_left_at_once_though_an_engine_hangs_as_it_loads(one, folder):
    (name, _) = next(iter(markers(folder, 1).items()))
    options = options_of(one, health_interval_s=600)
    with fleet_of(http(options), folder, options) as (fleet, _answers):
        os.kill(one.process.pid, signal.SIGSTOP)
        fleet.submit([ticket("1", name)])
        time.sleep(0.3)
        begun = time.monotonic()
        fleet.close()
        assert time.monotonic() - begun < 5
    os.kill(one.process.pid, signal.SIGCONT)


def test_a_request_that_an_engine_does_not_take_is_drawn_by_another(folder):
    engines = [PretendEngine(name, MarkerModel(), sizes=Sizes(longest=50)) for name in ("one", "two", "three")]
    with fleet_of(engines, folder) as (fleet, answers):
        for engine in engines[:2]:
            engine.sizes.longest = 10  # unlike what it said
        fleet.submit([ticket(str(number), max_tokens=20, prompt=(number, 2, 3)) for number in range(24)])
        answers.wait(24)
        assert {answers.drawn(str(number)).origins[0].engine for number in range(24)} == {"three"}
        assert set(fleet.engines) == {"one", "two", "three"}


def test_a_wrong_key_is_named(one, folder):
    options = options_of(one, api_key="wrong")
    with fleet_of(http(options), folder, options, wait=False) as (fleet, answers):
        answers.until(lambda: set(fleet.troubles), {one.url})
        assert "VLLM_API_KEY" in fleet.why_absent()


def test_a_cancelled_sample_ends_on_its_engine(folder):
    engine = PretendEngine("one", MarkerModel(), sizes=Sizes(token_s=60), max_requests=1)
    with fleet_of([engine], folder) as (fleet, answers):
        fleet.submit([ticket("long")])
        fleet.cancel(["long"])
        engine.sizes.token_s = 0.0
        fleet.submit([ticket("next")])
        assert set(answers.wait(1)) == {"next"}


class _Unreliable(PretendEngine):
    """Dies and comes back, forgets its adapters, refuses, by chance."""

    def __init__(self, name: str, chance: random.Random):
        super().__init__(name, MarkerModel(), sizes=Sizes(max_loras=2), max_requests=6)
        self.chance = chance
        self.restarts = 0

    async def generate(self, draw, pieces=None):
        number = self.chance.random()
        if number < 0.004:
            self.restart()
            self.restarts += 1
            raise EngineDown(f"{self.name} was killed")
        if number < 0.006:
            self.restart()
        elif number < 0.02:
            raise EngineFailed(f"{self.name} fails")
        return await super().generate(draw, pieces)


def _random_history(tmp_path: Path, steps: int) -> None:
    """Versions are published, sampled, dropped and published again; engines fail; the driver is started again."""
    chance = random.Random(1)
    folder = AdapterFolder(str(tmp_path), 3_000)  # of a few: others are removed, and written again
    engines = [_Unreliable(f"engine {number}", chance) for number in range(3)]
    options = OPTIONS.model_copy(update={"health_interval_s": 5.0})
    numbers = itertools.count()
    left = steps
    while left:
        expected: dict[str, int] = {}
        with fleet_of(engines, folder, options) as (fleet, answers):
            for _ in range(min(10, left // 1000) or 1):
                count = min(1000, left)
                left -= count
                pinned, some = [], []
                for _ in range(count // 25):
                    marker = chance.randrange(1, 40)
                    pinned.append(name := write_marker(folder, marker))
                    for _ in range(25):
                        each = f"{next(numbers)}"
                        expected[each] = marker
                        some.append(ticket(each, name, tenant=chance.choice("abc"), max_tokens=chance.randrange(1, 4)))
                fleet.submit(some)
                answers.wait(len(expected))
                for name in pinned:
                    folder.unpin(name)
            wrong = {each for each, marker in expected.items() if answers.marker(each) != marker}
            assert not wrong
    assert all(engine.restarts and engine.most_adapters <= 2 and engine.most_at_once <= 6 for engine in engines)


@pytest.mark.full
def test_random_histories_are_answered_by_the_right_versions(tmp_path):
    _random_history(tmp_path, 10_000)


@pytest.mark.slow
def test_long_random_histories_are_answered_by_the_right_versions(tmp_path):
    _random_history(tmp_path, 100_000)
