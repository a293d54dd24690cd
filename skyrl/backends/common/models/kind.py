"""Kind of a model: its description without its weights."""

import zlib
from collections.abc import Collection
from typing import NamedTuple

from skyrl.backends.common.offload import ModelInfo
from skyrl.errors import RequestError
from skyrl.types import AdapterConfig, LoraConfig, ModuleGroup

VALUE_HEAD = "value_head"
"""Name of a critic's value head among the trained tensors."""
HEAD_STREAM = zlib.crc32(VALUE_HEAD.encode())
"""Distinguishes the random draws of a value head from others with the same seed."""
SELECTING = ("target_modules", "exclude_modules")
"""Options for the selection of modules that only `AdapterConfig` has."""


class Kind(NamedTuple):
    """Description of a model without its weights."""

    lora_config: LoraConfig
    value_head: bool = False

    @property
    def is_whole(self) -> bool:
        """True if all weights of the base model are trained."""
        return self.lora_config.rank == 0


def check_same_kind(path: str, kind: Kind, model: ModelInfo) -> None:
    """Raise `RequestError` if the checkpoint `path` is of another kind than the model that it would replace.

    The kind and rank of a model never change. Its trained modules cannot change after its first step.
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
    """Raise `RequestError` if the options select no module, or request dropout for one that does not support it.

    `modules` are the (name, group) of all modules that can be selected.
    """
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
