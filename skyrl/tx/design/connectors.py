"""Connectors, which mix several residual streams: their positions, and the names and shapes of their parameters.

Each layer has one connector before attention and one before feed-forward. Their parameters are part of an adapter:
`skyrl.tx.layers.connector` defines them, and `skyrl.tx.lora` creates them.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from skyrl.tx.design.design import Design
from skyrl.tx.design.parameters import Place, Stack
from skyrl.types import ModuleGroup

CONNECTORS: dict[str, ModuleGroup] = {"attn_connector": "attn", "mlp_connector": "mlp"}
"""Names of a layer's connectors, and the module group of each. A connector is trained if its group is trained."""


def is_connectors(name: str) -> bool:
    """Return True for the name or path of a connector parameter."""
    return not CONNECTORS.keys().isdisjoint(re.split("[./]", name))


@dataclass(frozen=True)
class ConnectorTarget:
    """Connectors at one position (before attention or before feed-forward), in all layers of a group."""

    path: tuple[str, ...]
    """Path of the parameters in `Adapter.weights`."""
    module: str
    """Template of the connectors' names in files."""
    group: ModuleGroup
    stack: Stack
    hidden: int
    rate: int
    """Number of residual streams."""

    @property
    def modules(self) -> Iterator[tuple[Place, str]]:
        """(index, name) of each connector."""
        return self.stack.names(self.module)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters of one connector."""
        outputs = self.rate * (2 + self.rate)
        return {"phi": (self.rate * self.hidden, outputs), "alpha": (3,), "bias": (outputs,)}


def connector_targets(design: Design, rate: int) -> tuple[ConnectorTarget, ...]:
    """Return all connectors of a model with `rate` residual streams. Empty for one stream."""
    return tuple(
        ConnectorTarget(
            (group.name, name), f"model.layers.{{layer}}.{name}", switch, Stack(group.numbers), design.hidden, rate
        )
        for group in design.groups
        for name, switch in CONNECTORS.items()
        if rate > 1
    )
