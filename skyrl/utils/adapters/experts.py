"""Adapters of experts: one per expert, or fused for all experts of a layer, as with PEFT's `target_parameters`.

In the fused form, A is `[experts * rank, in]` with the experts outermost, and B is `[out, rank * experts]` with the
experts innermost. If two parameters of a module have adapters, the first one is the `base_layer` of the other.

Source: `ParamWrapper.get_delta_weight` of PEFT 0.21.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from skyrl.errors import RequestError
from skyrl.utils.adapters.layouts import Rows
from skyrl.utils.adapters.naming import ModuleValues, Pair, Pairs, padded

PARTS = ("gate_proj", "up_proj", "down_proj")
"""Linear maps of an expert. The parameters of fused experts are gate_up_proj (rows of gate above up) and down_proj."""
_PARAMETER = re.compile(r"(.*experts\.)?(gate_up|down)_proj")
"""Names of fused parameters. PEFT writes them without a path if target_modules are gate_proj, up_proj and down_proj."""
_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<number>\d+)\.(?P<part>gate_proj|up_proj|down_proj)")
_ROUTER = re.compile(r"(.+\.)?(gate|router)(\.weight)?")
"""Names of routers, which choose experts."""


def named_weights(config: Mapping[str, Any]) -> list[str]:
    """Return the target_parameters that are weights of linear maps. Their pairs have the same form as for modules."""
    return [name for name in config.get("target_parameters") or () if name.endswith("_proj.weight")]


def named_experts(config: Mapping[str, Any]) -> list[str]:
    """Return the target_parameters that are fused experts of a layer."""
    return [name for name in config.get("target_parameters") or () if _PARAMETER.fullmatch(name)]


def experts_apart(pairs: Pairs, config: Mapping[str, Any], where: object) -> tuple[Pairs, dict[str, str]]:
    """Split pairs of fused experts (PEFT's target_parameters) into pairs for each expert.

    Target parameters that are weights of linear maps (`mlp.down_proj.weight`) have ordinary pairs.

    Returns:
        The pairs by module; and, for each module from a fused pair, the parameter name that rank_pattern and
        alpha_pattern use.

    Raises RequestError for parameters other than experts.gate_up_proj and experts.down_proj.
    """
    named, fused = named_weights(config), named_experts(config)
    if others := sorted({*(config.get("target_parameters") or ())} - {*named, *fused}):
        router = next(filter(_ROUTER.fullmatch, others), None)
        if router is not None:
            raise RequestError(
                f"{where}: target_parameters has {router}; routers of experts are not adapted, but PEFT's all-linear "
                "includes them, even with exclude_modules; list target_modules by name, without gate, and train again"
            )
        raise RequestError(
            f"{where}: target_parameters has {others[0]}; only experts.gate_up_proj, experts.down_proj and weights of "
            "linear maps are read, so merge this adapter with PEFT itself"
        )
    if not fused:
        return pairs, {}
    ranks = ModuleValues(config.get("rank_pattern"))
    made: Pairs = {}
    parts: dict[str, str] = {}
    for module, pair in pairs.items():
        if not is_fused(module):
            made[module] = pair
            continue
        experts = module.removesuffix(".base_layer")
        is_inner = module != experts
        parameter = "gate_up_proj" if is_inner or _fused_in(experts, fused) == {"gate_up_proj"} else "down_proj"
        rank = int(ranks.of(f"{experts}.{parameter}", config["r"]))
        count, rest = divmod(len(pair.a), rank)
        if rest:
            raise RequestError(
                f"{where}: lora_A of {module} is {list(pair.a.shape)}; its first axis is experts times r={rank}"
            )
        a = pair.a.reshape(count, rank, -1)
        b = pair.b.reshape(len(pair.b), rank, count)
        for expert in range(count):
            made[f"{experts}.{expert}.{parameter}"] = Pair(a[expert], b[:, :, expert])
            parts[f"{experts}.{expert}.{parameter}"] = f"{experts}.{parameter}"
    return made, parts


def _fused_in(experts: str, names: Sequence[str]) -> set[str]:
    """Return the fused parameters of a layer's experts that `names` select. Names match at their ends, as in PEFT."""
    return {
        part for part in ("gate_up_proj", "down_proj") if f".{experts}.{part}".endswith(tuple(f".{x}" for x in names))
    }


def untrained_beside(trained: Collection[str], modules: Iterable[str]) -> list[str]:
    """Return the modules that must be in a file with zeros, because PEFT does not load `trained` without them.

    PEFT fuses the matrices of all experts of a layer, and gate with up. It loads a layer only if all of its
    experts have matrices. It loads gate and up only together, and only with down. It loads down without the others.

    Args:
        trained: Names of the modules of an adapter.
        modules: Names of all modules that the adapter could have.
    """
    parts: dict[str, set[str]] = {}
    for found in filter(None, map(_EXPERT.fullmatch, trained)):
        parts.setdefault(found["experts"], set()).add(found["part"])
    needed = {experts: own if own == {"down_proj"} else set(PARTS) for experts, own in parts.items()}
    return [
        module
        for module in modules
        if module not in trained
        and (found := _EXPERT.fullmatch(module))
        and found["part"] in needed.get(found["experts"], ())
    ]


def with_untrained(pairs: Pairs, rows: Rows) -> Pairs:
    """Add zeros for the linear maps of experts that PEFT needs in a file (`untrained_beside`).

    Args:
        pairs: Pairs of separate modules, all of one rank.
        rows: Returns the output features of the base model's modules. If it knows none, the last expert of a layer is
            the last one with a pair.
    """
    layers: dict[str, list[tuple[int, str, Pair]]] = {}
    for module, pair in pairs.items():
        if found := _EXPERT.fullmatch(module):
            layers.setdefault(found["experts"], []).append((int(found["number"]), found["part"], pair))
    zeros: Pairs = {}
    for experts, own in layers.items():
        count = 1 + max(number for number, _, _ in own)
        while rows(f"{experts}.{count}.{PARTS[0]}") is not None:
            count += 1
        _, part, (a, b) = own[0]
        hidden, inner = (len(b), a.shape[1]) if part == "down_proj" else (a.shape[1], len(b))
        up, down = (
            Pair(np.zeros_like(a, shape=(len(a), x)), np.zeros_like(b, shape=(y, len(a))))
            for x, y in ((hidden, inner), (inner, hidden))
        )
        zeros |= {
            f"{experts}.{number}.{name}": down if name == "down_proj" else up
            for number in range(count)
            for name in PARTS
        }
    return pairs | {module: zeros[module] for module in untrained_beside(pairs, zeros)}


class FusedExperts(NamedTuple):
    """Pairs of an adapter with fused experts."""

    pairs: Pairs
    rank: int
    """Rank of all pairs."""
    parameters: list[str]
    """`target_parameters` of PEFT for the pairs."""


def experts_together(pairs: Pairs, where: object, by_path: bool = False) -> FusedExperts:
    """Fuse the pairs of all experts of a layer.

    If gate and up of each expert have the same A, the fused pair has it too. Otherwise, the rank of the fused
    pair is the sum of both ranks. Its A stacks gate's A above up's A, and its B has a block for each. All pairs are
    padded with zeros to one rank. PEFT assumes that names such as up_proj belong to experts, so other linear maps with
    such a name are also listed in the parameters.

    Args:
        pairs: Pairs by module, for each expert.
        where: The adapter, for messages.
        by_path: Name the parameters by their whole paths. Otherwise, their names are those of the parameters in all
            layers.

    Raises RequestError for an adapter that covers no experts, or only some experts of a layer.
    """
    experts: dict[str, dict[str, dict[int, Pair]]] = {}
    made: Pairs = {}
    for module, pair in pairs.items():
        if found := _EXPERT.fullmatch(module):
            experts.setdefault(found["experts"], {}).setdefault(found["part"], {})[int(found["number"])] = pair
        else:
            made[module] = pair
    _check_whole(experts, where)
    name_of = str if by_path else _last_two
    parameters = [f"{name_of(module)}.weight" for module in made if module.rpartition(".")[2] in PARTS]
    stacks: dict[str, list[Pair]] = {}
    for module, parts in experts.items():
        fused = {name: [own[number] for number in sorted(own)] for name, own in parts.items()}
        if "up_proj" in fused:
            gates, ups = fused.pop("gate_proj"), fused.pop("up_proj")
            shared = all(np.array_equal(gate.a, up.a) for gate, up in zip(gates, ups, strict=True))
            above = [_above(gate, up, shared) for gate, up in zip(gates, ups, strict=True)]
            fused = {"gate_up_proj": above} | fused
        stacks |= dict(zip([f"{module}.base_layer", module][-len(fused) :], fused.values(), strict=True))
        parameters += [f"{name_of(module)}.{name}" for name in fused]
    rank = max(len(pair.a) for pair in [*made.values(), *(stack[0] for stack in stacks.values())])
    made = {module: padded(pair, rank) for module, pair in made.items()}
    made |= {module: _fused(stack, rank) for module, stack in stacks.items()}
    return FusedExperts(made, rank, list(dict.fromkeys(parameters)))


def _check_whole(experts: Mapping[str, Mapping[str, Mapping[int, Pair]]], where: object) -> None:
    """Raise RequestError unless all layers have the same linear maps for all experts, with the same shapes."""
    if not experts:
        raise RequestError(f"{where}: it is on no experts, such as mlp.experts.0.up_proj; leave the layout separate")
    names = {name for parts in experts.values() for name in parts}
    names |= set(PARTS[:2]) if names & set(PARTS[:2]) else set()
    for module, parts in experts.items():
        count = 1 + max(max(own) for own in parts.values())
        for name in sorted(names):
            shapes = {(pair.a.shape, pair.b.shape) for pair in parts.get(name, {}).values()}
            missing = next((number for number in range(count) if number not in parts.get(name, {})), None)
            if missing is not None or len(shapes) > 1:
                reason = "have different shapes" if missing is None else f"are to be fused, and {missing} has none"
                raise RequestError(f"{where}: {name} of {module} {reason}; leave the layout separate")


def _above(gate: Pair, up: Pair, shared: bool) -> Pair:
    """Return the fused pair of gate and up. Gate's output rows are above up's."""
    if shared:
        return Pair(gate.a, np.concatenate([gate.b, up.b]))
    (rows, rank), (more_rows, more_rank) = gate.b.shape, up.b.shape
    blocks = np.pad(gate.b, ((0, more_rows), (0, more_rank))) + np.pad(up.b, ((rows, 0), (rank, 0)))
    return Pair(np.concatenate([gate.a, up.a]), blocks)


def _fused(stack: Sequence[Pair], rank: int) -> Pair:
    """Fuse the pairs of a layer's experts. Experts are outermost in the rows of A and innermost in the columns of B."""
    pairs = [padded(pair, rank) for pair in stack]
    b = np.stack([pair.b for pair in pairs], axis=-1)
    return Pair(np.concatenate([pair.a for pair in pairs]), b.reshape(len(b), -1))


def _last_two(module: str) -> str:
    return ".".join(module.split(".")[-2:])


def is_fused(module: str) -> bool:
    """Return True if `module` is the name of a pair for the fused experts of a layer."""
    return module.removesuffix(".base_layer").endswith(".experts")
