"""Adapters with a marker in their weights, tickets for samples of them, and a fleet that draws these."""

import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from safetensors.numpy import save

from skyrl.backends.engines.adapter_folder import PREFIX, AdapterFolder
from skyrl.backends.engines.config import EngineOptions
from skyrl.backends.engines.fleet import Fleet, Outcome
from skyrl.backends.engines.protocol import Admitted, Draw, Drawn, Engine
from skyrl.backends.engines.router import Ticket
from skyrl.backends.engines.sync_check import Check
from skyrl.backends.operations import Sample
from skyrl.types import SamplingParams

BASE = "marked base"
OPTIONS = EngineOptions(
    urls=("http://nowhere",),
    folder="nowhere",
    connect_timeout_s=60,
    timeout_s=120,
    health_interval_s=0.1,
    absent_timeout_s=120,
)


def write_marker(folder: AdapterFolder, marker: int) -> str:
    """An adapter that reveals this number. Returns its name."""
    config = {"r": 1, "lora_alpha": 1, "target_modules": []}
    tensors = save({"marker": np.asarray([marker], np.float32)})
    return folder.write({"adapter_model.safetensors": tensors, "adapter_config.json": json.dumps(config).encode()})


def ticket(
    name: str,
    adapter: str | None = None,
    *,
    tenant: str = "",
    max_tokens: int = 2,
    prompt: tuple[int, ...] = (1, 2, 3),
    key: str | None = None,
) -> Ticket:
    tokens = np.asarray(prompt, np.int32)
    params = SamplingParams(max_tokens=max_tokens, seed=0)
    request = Sample(request_id=name, tenant=tenant, version=adapter, prompt=tokens, params=params, routing_key=key)
    draw = Draw(prompt=tokens, adapter=adapter, max_tokens=max_tokens, seed=1, temperature=0.0)
    return Ticket(request, draw)


async def admit(engine: Engine) -> Admitted:
    """Trust an engine, of whose adapters we use as many as it holds."""
    facts = await engine.facts()
    ours = [name for name in facts.adapters if name.startswith(PREFIX)]
    for name in ours[engine.max_loras :]:
        await engine.unload_adapter(name)
    engine.base_id = BASE
    return Admitted(facts.longest, frozenset(), ours[: engine.max_loras], BASE)


class Answers:
    """Outcomes of tickets, by their names."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Outcome] = {}
        self.troubles: dict[str, str] = {}
        """Last trouble of each engine."""
        self._changed = threading.Condition()

    def tell(self, ticket: Ticket, outcome: Outcome) -> None:
        with self._changed:
            assert ticket.request.request_id not in self.outcomes, "it was answered before"
            self.outcomes[ticket.request.request_id] = outcome
            self._changed.notify_all()

    def wait(self, count: int, timeout_s: float = 60) -> dict[str, Outcome]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.outcomes) >= count, timeout_s), (len(self.outcomes), count)
            return dict(self.outcomes)

    def note(self, fleet: Fleet) -> None:
        """Engines have come or gone."""
        with self._changed:
            self.troubles |= {name: str(error) for name, error in fleet.troubles.items()}
            self._changed.notify_all()

    def until(self, engines: Callable[[], set[str]], wanted: set[str], timeout_s: float = 60) -> None:
        """Wait until exactly these are in use."""
        with self._changed:
            assert self._changed.wait_for(lambda: engines() == wanted, timeout_s), engines()

    def drawn(self, name: str) -> Drawn:
        """Sample of a ticket."""
        drawn = self.outcomes[name]
        assert isinstance(drawn, Drawn), drawn
        return drawn

    def marker(self, name: str) -> int:
        """Number that the samples of a ticket reveal."""
        drawn = self.drawn(name)
        assert len(set(drawn.tokens.tolist())) == 1, "one sample of several versions"
        return int(drawn.tokens[0])


@contextmanager
def fleet_of(
    engines: list[Any],
    folder: AdapterFolder,
    options: EngineOptions = OPTIONS,
    wait: bool = True,
    check: Check | None = None,
    admit: Callable[[Engine], Awaitable[Admitted]] = admit,
    **options_of_fleet: Any,
) -> Iterator[tuple[Fleet, Answers]]:
    """A fleet of engines, all of which are in use."""
    answers = Answers()
    fleet = Fleet(
        engines,
        options,
        admit=admit,
        path=folder.path,
        tidy=folder.shed,
        tell=answers.tell,
        changed=lambda: answers.note(fleet),
        check=check,
        **options_of_fleet,
    )
    fleet.start()
    try:
        if wait:
            answers.until(lambda: set(fleet.engines), {engine.name for engine in engines})
        yield fleet, answers
    finally:
        fleet.close()
