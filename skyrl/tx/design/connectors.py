"""Places of the connectors of several residual streams, and names and shapes of their numbers.

A group of layers has one before its attention and one before its feed-forward. Their numbers belong to an adapter:
`skyrl.tx.layers.connector` says what they mean, `skyrl.tx.lora` makes them.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from skyrl.tx.design.design import Design
from skyrl.tx.design.parameters import Place, Stack
from skyrl.types import ModuleGroup

CONNECTORS: dict[str, ModuleGroup] = {"attn_connector": "attn", "mlp_connector": "mlp"}
"""Names of a layer's connectors, and the group of modules that each is trained with."""


def is_connectors(name: str) -> bool:
    """Return True for the name or path of numbers of a connector."""
    return not CONNECTORS.keys().isdisjoint(re.split("[./]", name))


@dataclass(frozen=True)
class ConnectorTarget:
    """The connectors at one place of all layers of a group."""

    path: tuple[str, ...]
    """Path of their numbers in `Adapter.weights`."""
    module: str
    """Template of their names in files."""
    group: ModuleGroup
    stack: Stack
    hidden: int
    rate: int
    """Residual streams."""

    @property
    def modules(self) -> Iterator[tuple[Place, str]]:
        """Place of each connector, and its name."""
        return self.stack.names(self.module)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the numbers of one connector."""
        outputs = self.rate * (2 + self.rate)
        return {"phi": (self.rate * self.hidden, outputs), "alpha": (3,), "bias": (outputs,)}


def connector_targets(design: Design, rate: int) -> tuple[ConnectorTarget, ...]:
    """All connectors of a model with so many residual streams; none with one."""
    return tuple(
        ConnectorTarget(
            (group.name, name), f"model.layers.{{layer}}.{name}", switch, Stack(group.numbers), design.hidden, rate
        )
        for group in design.groups
        for name, switch in CONNECTORS.items()
        if rate > 1
    )
