"""Kind of a model: its description without its weights."""

import re
import zlib
from collections.abc import Collection
from typing import NamedTuple

from skyrl.backends.common.offload import ModelInfo
from skyrl.errors import RequestError
from skyrl.types import AdapterConfig, LoraConfig, ModuleGroup, matches_module
from skyrl.utils.spelling import did_you_mean

VALUE_HEAD = "value_head"
"""Name of a critic's value head among the trained tensors."""
HEAD_STREAM = zlib.crc32(VALUE_HEAD.encode())
"""Distinguishes the random draws of a value head from others with the same seed."""
SELECTING = ("target_modules", "exclude_modules")
"""Options that select modules. Only `AdapterConfig` has them."""
UNADAPTED = {
    "embed_tokens": "the token embedding cannot be adapted",
    "gate": "routers of experts cannot be adapted",
    "router": "routers of experts cannot be adapted",
    "all-linear": "give all-linear alone, without brackets",
}
"""Hints for given names that do not name linear layers."""


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


def check_selects(
    config: LoraConfig,
    modules: Collection[tuple[str, ModuleGroup]],
    architecture: str,
    others: Collection[str] = (),
) -> None:
    """Raise `RequestError` if the options select no linear layer, if one of their names matches no module, or if they
    request dropout for a module that does not support it.

    Args:
        config: Options of the adapter.
        modules: (name, group) of all linear layers that can be selected.
        architecture: Name of the architecture, for messages.
        others: Names of other modules that can be selected.
    """
    if not isinstance(config, AdapterConfig):
        return
    for option in SELECTING:
        _check_names(option, getattr(config, option), [*(name for name, _ in modules), *others], architecture)
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


def _check_names(option: str, selection: str | tuple[str, ...] | None, modules: list[str], architecture: str) -> None:
    """Raise `RequestError` if a name in the option matches no module. Regular expressions are not checked."""
    if isinstance(selection, str):
        if re.fullmatch(r"[\w.-]+", selection) and not any(matches_module(selection, name) for name in modules):
            raise RequestError(
                f"lora_config.{option}={selection}: a string is a regular expression of whole names, such as "
                f"{modules[0]}, and this one matches none; for a name or the end of one, use a list: [{selection}]"
            )
        return
    ends = list(dict.fromkeys(name.rpartition(".")[2] for name in modules))
    for name in selection or ():
        if not any(matches_module((name,), module) for module in modules):
            end = name.rpartition(".")[2]
            hint = f" ({UNADAPTED[end]})" if end in UNADAPTED else ""
            raise RequestError(
                f"lora_config.{option}=[{','.join(selection or ())}]: {name} is no name or end of a name of a linear "
                f"layer of {architecture}{hint}; known: {', '.join(ends)}{'' if hint else did_you_mean(end, ends)}"
            )
