"""Kinds of models: what one is, apart from its numbers."""

import zlib
from collections.abc import Collection
from typing import NamedTuple

from skyrl.backends.common.offload import ModelInfo
from skyrl.errors import RequestError
from skyrl.types import AdapterConfig, LoraConfig, ModuleGroup

VALUE_HEAD = "value_head"
"""Name of a critic's head among what is trained."""
HEAD_STREAM = zlib.crc32(VALUE_HEAD.encode())
"""Tells the draws of a value head from others of the same seed."""
SELECTING = ("target_modules", "exclude_modules")
"""Selectors of modules that `AdapterConfig` alone has."""


class Kind(NamedTuple):
    """Description of a model, apart from its numbers."""

    lora_config: LoraConfig
    value_head: bool = False

    @property
    def is_whole(self) -> bool:
        """True if all weights of the base model are trained."""
        return self.lora_config.rank == 0


def check_same_kind(path: str, kind: Kind, model: ModelInfo) -> None:
    """Loading in place keeps what the model is and its rank, and once it has taken a step its trained modules.

    Raises `RequestError` where the checkpoint `path` is of another kind.
    """
    stored, loaded = kind.lora_config, model.lora_config
    if kind.value_head != model.value_head:
        raise RequestError(
            f"path={path}: the checkpoint has value_head={kind.value_head} but the model was created with "
            f"value_head={model.value_head}; create a new model from the checkpoint instead"
        )
    modules = ("train_attn", "train_mlp", "train_unembed", *SELECTING) if model.step else ()
    for name in ("rank", "alpha", *modules):
        ours, theirs = (getattr(config, name, None) for config in (stored, loaded))
        if ours != theirs:
            raise RequestError(
                f"path={path}: the checkpoint has {name}={ours} but the model was created with {name}={theirs}; create "
                "a new model from the checkpoint instead"
            )


def check_selects(config: LoraConfig, modules: Collection[tuple[str, ModuleGroup]], architecture: str) -> None:
    """Raise `RequestError` if none of the model's modules (name, group) is left, or one that dropout is not for."""
    if not isinstance(config, AdapterConfig):
        return
    projection = [name for name, group in modules if group == "unembed" and config.selects(name, group)]
    if config.dropout and projection:
        raise RequestError(
            f"lora_config.dropout={config.dropout} and {projection[0]} is adapted: its outputs are computed a part of "
            "the tokens at a time, and each part would be dropped alike; leave it out (exclude_modules, "
            "train_unembed=False), or set dropout=0"
        )
    if not any(config.selects(*module) for module in modules):
        raise RequestError(
            f"lora_config.target_modules={config.target_modules}, exclude_modules={config.exclude_modules}: none of "
            f"the linear maps of {architecture} is left, whose names are such as {next(iter(modules))[0]}; use "
            "regular expressions of whole names"
        )
