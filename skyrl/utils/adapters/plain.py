"""Normal form of adapters for backends: separate modules, with one rank and one alpha for all.

Modules with lower ranks are padded with zeros. Scales that differ by module are multiplied into B. Alpha includes the
scale of rank-stabilized LoRA. PEFT computes the same results with these options.
"""

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from skyrl.errors import RequestError
from skyrl.utils.adapters.experts import experts_apart
from skyrl.utils.adapters.layouts import Rows, apart
from skyrl.utils.adapters.naming import ModuleValues, Pair, Pairs, is_plain_name, padded, pairs_of
from skyrl.utils.files.hf_files import check_peft_config

LARGEST = 1e6
"""Exclusive upper bound of ranks and alphas."""
SMALLEST_ALPHA = 1e-6
LONGEST_MODULE, MOST_PARTS = 200, 24
"""Maximum length of a module's name, and maximum number of parts between dots; an expression is tried at each part."""
MOST_PATTERNS = 256
"""Maximum number of regular expressions of an option. Each is tried on each module. Names are not limited."""
LONGEST_PATTERN = 256
MOST_WAYS = 2**14
"""Maximum total number of ways in which the expressions of an option can match a name."""
_QUANTIFIER = re.compile(r"(?:[*+?]|\{[^}]*\}?)[?+]?")


class PlainAdapter(NamedTuple):
    """An adapter that adds x A^T B^T alpha / rank to each of its modules."""

    pairs: Pairs
    rank: int
    alpha: float


def plain_adapter(
    tensors: Mapping[str, np.ndarray], config: Mapping[str, Any], rows: Rows, where: object = "adapter"
) -> PlainAdapter:
    """Convert an adapter to normal form.

    Args:
        tensors: Tensors by any names that `naming` supports.
        config: Contents of adapter_config.json.
        rows: Returns the output features of the base model's modules.
        where: The adapter, for messages.

    Raises RequestError for PEFT options that are not implemented, and for adapters that cannot be converted exactly.
    """
    check_peft_config(config)
    _check_parameters(config, where)
    default = _scale(config, _number(config, "lora_alpha", where), int(_number(config, "r", where)))
    rank = rank_of(config, where)
    pairs = pairs_of(tensors, where)[0]
    for module in pairs:
        if len(module) > LONGEST_MODULE or module.count(".") >= MOST_PARTS:
            raise RequestError(
                f"{where}: a module has the name {module[:LONGEST_MODULE]!r}..., and {LONGEST_MODULE} characters and "
                f"{MOST_PARTS} parts are the most; save the adapter again"
            )
    pairs, parts = experts_apart(pairs, config, where)
    ranks, alphas = (ModuleValues(config.get(option)) for option in ("rank_pattern", "alpha_pattern"))

    def plain(module: str, pair: Pair) -> Pair:
        name = parts.get(module, module)
        own = int(ranks.of(name, config["r"]))
        scale = _scale(config, alphas.of(name, config["lora_alpha"]), own)
        a, b = pair
        if len(a) != own:
            raise RequestError(
                f"{where}: lora_A of {name} has shape {list(a.shape)}, but adapter_config.json gives it rank {own}; "
                "the two belong to different adapters"
            )
        if scale != default:
            b = b.astype(np.float32) * np.float32(scale / default)
        return padded(Pair(a, b), rank)

    pairs = {module: plain(module, pair) for module, pair in pairs.items()}
    alpha = config["lora_alpha"] if rank == config["r"] and not config.get("use_rslora") else default * rank
    return PlainAdapter(apart(pairs, rows, where), rank, alpha)


def rank_of(config: Mapping[str, Any], where: object = "adapter") -> int:
    """Return the maximum rank of any module."""
    _check_patterns(config, where)
    return max(int(_number(config, "r", where)), *map(int, (config.get("rank_pattern") or {}).values()), 1)


def _number(config: Mapping[str, Any], name: str, where: object) -> float:
    return _positive(name, config.get(name), name == "r", where)


def _positive(name: str, value: Any, is_rank: bool, where: object) -> float:
    """Return the value. Raises RequestError unless it is a valid rank or alpha."""
    named = f"{where}: adapter_config.json: {name}={value!r}"
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < LARGEST:
        raise RequestError(f"{named} is no positive number below {LARGEST:.0f}; save it again")
    if is_rank and value != int(value):
        raise RequestError(f"{named} is no whole number; save it again")
    if not is_rank and value < SMALLEST_ALPHA:
        raise RequestError(
            f"{named} is below {SMALLEST_ALPHA}, so the adapter computes nothing; train with a larger one"
        )
    return value


def _check_patterns(config: Mapping[str, Any], where: object) -> None:
    """Raise RequestError unless each pattern is a name or a simple regular expression, with a positive number."""
    for option in ("rank_pattern", "alpha_pattern"):
        pattern = config.get(option) or {}
        if not isinstance(pattern, dict):
            raise RequestError(f"{where}: adapter_config.json: {option}={pattern!r} is no object; save it again")
        expressions = [key for key in pattern if not is_plain_name(key)]
        if len(expressions) > MOST_PATTERNS:
            raise RequestError(
                f"{where}: adapter_config.json: {option} has {len(expressions)} regular expressions, and "
                f"{MOST_PATTERNS} may be; name the modules, or match several of them by one"
            )
        for key, value in pattern.items():
            _positive(f"{option}[{key[:100]!r}]", value, option == "rank_pattern", where)
            if _ways(key) > MOST_WAYS:
                raise RequestError(
                    f"{where}: adapter_config.json: {option} has the key {key[:100]!r}, which is no name of modules or "
                    "simple regular expression (one * + ? or {} at most, and none after a group that may differ); "
                    "name the modules"
                )
        if sum(map(_ways, expressions)) > MOST_WAYS:
            raise RequestError(
                f"{where}: adapter_config.json: {option} has too many keys with * + ? {{}} or |; name the modules"
            )


def _check_parameters(config: Mapping[str, Any], where: object) -> None:
    """Raise RequestError unless target_parameters are names."""
    names = config.get("target_parameters") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise RequestError(
            f"{where}: adapter_config.json: target_parameters={names!r} are not names of parameters; save it again"
        )


def _ways(key: str) -> float:
    """Return the maximum number of ways to match an expression at one position of a name; infinite if unknown.

    A backtracking matcher tries each combination of the groups' alternatives, and each length of a quantified part.
    With one quantifier, there are at most as many lengths as a name has characters.
    """
    if is_plain_name(key) and len(key) <= LONGEST_PATTERN:
        return 1
    bare = re.sub(r"\\\D", "x", key, flags=re.DOTALL)  # escaped characters are literal
    bare = re.sub(r"\[\^?\]?[^\]]*\]", "x", bare)  # so are the characters of a class
    quantifiers = len(_QUANTIFIER.findall(bare.replace("(?:", "(")))
    if len(key) > LONGEST_PATTERN or quantifiers > 1 or re.search(r"\(\?[^:]|\\|\)[*+{]", bare):
        return math.inf
    try:
        re.compile(key)
    except (re.error, OverflowError):
        return math.inf
    choices = math.prod(1 + part.count("|") for part in re.split(r"[()]", bare))
    return choices * (LONGEST_MODULE if quantifiers else 1)


def _scale(config: Mapping[str, Any], alpha: float, rank: int) -> float:
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
