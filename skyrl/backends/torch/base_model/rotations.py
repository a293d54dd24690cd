"""Rotary embeddings whose angles follow the longest position of a call: LongRoPE, dynamic NTK.

A server has one set of angles, those of its longest sequence, as on the JAX backend and in vLLM. So results do not
depend on other sequences of a call, and cached keys stay valid when a sequence grows.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def fix_rotations(model: nn.Module, longest: int) -> bool:
    """Give all calls of a model the angles of a call of `longest` tokens. Returns True if angles depend on the call."""
    found = False
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        kinds = list(kinds.values()) if isinstance(kinds, Mapping) else [kinds]
        if any(isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in kinds):
            module.register_forward_pre_hook(_Reach(longest), with_kwargs=True)
            module.register_forward_hook(_without_last)
            found = True
    return found


def _without_last(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return output[..., :-1, :] if isinstance(output, Tensor) else tuple(x[..., :-1, :] for x in output)


class _Reach:
    """Hook that adds a position after the tokens of a call."""

    def __init__(self, longest: int):
        self._last = longest - 1

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if "position_ids" in kwargs:
            return args, kwargs | {"position_ids": self._longer(kwargs["position_ids"])}
        return (args[0], self._longer(args[1]), *args[2:]), kwargs

    def _longer(self, positions: Tensor) -> Tensor:
        return torch.nn.functional.pad(positions, (0, 1), value=self._last)
