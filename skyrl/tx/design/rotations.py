"""Frequencies of rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864), of all kinds.

They are computed as in transformers, with the same rounding to float32: at position 100,000, the last bit of a
frequency changes the angle by up to 0.01 radians. Kinds whose frequencies depend on the length of a sequence use the
maximum served length instead, as in vLLM, so that cached keys stay valid when a sequence grows past a limit.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from skyrl.tx.design.config import head_dim_of
from skyrl.tx.design.design import Frequencies

ORIGINAL = "original_max_position_embeddings"
"""Member of config.json: maximum length of sequences, in tokens, before the context was extended."""


def frequencies(
    config: Any, layer_type: str | None = None, width: int | None = None, partial: bool = False
) -> Frequencies:
    """Compute the frequencies of a configuration.

    The configuration is of transformers 5 (`rope_parameters`) or earlier (`rope_theta`, `rope_scaling`).

    Args:
        config: Configuration of the model. The maximum length of sequences is the smaller of `max_context_length`, if
            set and not 0, and `max_position_embeddings`.
        layer_type: Type of the layer, if each type has separate parameters.
        width: Number of rotated dimensions; None: the head width.
        partial: True if the family rotates only the fraction `partial_rotary_factor` of these dimensions. Other
            families ignore that option, as in transformers.

    Raises ValueError for kinds that are not implemented.
    """
    parameters = _parameters(config, layer_type)
    kind, part = _kind(parameters), float(parameters.get("partial_rotary_factor") or 1.0)
    if kind not in KINDS:
        raise ValueError(
            f"rope_type={kind!r} is not implemented (known: {', '.join(KINDS)}); use a base model with one of these"
        )
    if part != 1.0 and kind != "default" and not partial:
        raise ValueError(
            f"partial_rotary_factor={part:g} and rope_type={kind!r}: not implemented, as in transformers, because "
            "this architecture rotates whole heads; check the model's config.json"
        )
    width = int((width or head_dim_of(config)) * (part if partial else 1.0))
    values, factor = KINDS[kind](_request(config, parameters, width))
    return Frequencies(tuple(values.astype(np.float32).tolist()), factor)


def length_notice(config: Any) -> str | None:
    """Return a line for the log if short sequences have other frequencies than in transformers. None otherwise."""
    for layer_type in (None, *sorted(set(getattr(config, "layer_types", None) or ()))):
        parameters = _parameters(config, layer_type)
        request = _request(config, parameters, head_dim_of(config))
        if _kind(parameters) == "longrope" and request.is_long:
            return (
                f"rope_type='longrope' with max_context_length={request.longest}, above the original "
                f"{request.original} tokens: sequences of all lengths use long_factor, as in vLLM, and transformers "
                f"uses short_factor for sequences up to {request.original} tokens; set max_context_length to at most "
                f"{request.original} for short_factor"
            )
    return None


def score_factor(config: Any) -> float:
    """Return the factor that `mscale_all_dim` puts on attention scores, as in DeepSeek-V3's own code. Default: 1.0."""
    parameters = _parameters(config, None)
    kind, scale = _kind(parameters), float(parameters.get("mscale_all_dim") or 0)
    return _strength(float(parameters["factor"]), scale) ** 2 if scale and kind != "default" else 1.0


@dataclass(frozen=True)
class _Request:
    parameters: Mapping[str, Any]
    width: int
    """Number of rotated dimensions."""
    maximum: int | None
    longest: int | None

    def __getitem__(self, name: str) -> Any:
        if self.parameters.get(name) is None:
            raise ValueError(f"rope_parameters have no {name}; check the model's config.json")
        return self.parameters[name]

    @property
    def theta(self) -> float:
        return float(self.parameters["rope_theta"])

    @property
    def original(self) -> int:
        """Maximum length of sequences before the context was extended."""
        original = self.parameters.get(ORIGINAL) or self.maximum
        return original if original is not None else self[ORIGINAL]

    @property
    def is_long(self) -> bool:
        """True if served sequences may be longer than before the context was extended."""
        return self.longest is not None and self.longest > self.original

    def powers(self, theta: float | None = None) -> np.ndarray:
        """theta^(2 i / width), float32."""
        exponents = np.arange(0, self.width, 2, dtype=np.float32) / np.float32(self.width)
        return np.power(np.float32(self.theta if theta is None else theta), exponents)


def _request(config: Any, parameters: Mapping[str, Any], width: int) -> _Request:
    maximum = getattr(config, "max_position_embeddings", None)
    longest = min(filter(None, (getattr(config, "max_context_length", 0), maximum)), default=None)
    return _Request(parameters, width, maximum, longest)


def _parameters(config: Any, layer_type: str | None) -> Mapping[str, Any]:
    """Collect rope_type, rope_theta and all other parameters in one dictionary.

    Parameters in the dictionary of the configuration override members of the configuration itself. An exception is
    `original_max_position_embeddings` if all layers have the same parameters: transformers fills in a default in the
    dictionary before it reads the member.
    """
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    separate = layer_type is not None and layer_type in found
    given = {name: value for name, value in (found[layer_type] if separate else found).items() if value is not None}
    names = ("rope_theta", "partial_rotary_factor", ORIGINAL)
    members = {name: value for name in names if (value := getattr(config, name, None)) is not None}
    if ORIGINAL in members and not separate:
        given[ORIGINAL] = members[ORIGINAL]
    return {"rope_theta": 10_000.0} | members | given


def _kind(parameters: Mapping[str, Any]) -> str:
    return parameters.get("rope_type") or parameters.get("type") or "default"


def _default(request: _Request) -> tuple[np.ndarray, float]:
    return np.float32(1) / request.powers(), 1.0


def _linear(request: _Request) -> tuple[np.ndarray, float]:
    return _default(request)[0] / np.float32(request["factor"]), 1.0


def _dynamic(request: _Request) -> tuple[np.ndarray, float]:
    """NTK-aware scaling of the base, by the ratio of the maximum served length to `max_position_embeddings`."""
    assert request.maximum is not None and request.longest is not None, "a configuration with a longest sequence"
    factor, width = request["factor"], request.width
    stretched = factor * max(request.longest, request.maximum) / request.maximum - (factor - 1)
    return np.float32(1) / request.powers(request.theta * stretched ** (width / (width - 2))), 1.0


def _llama3(request: _Request) -> tuple[np.ndarray, float]:
    """Scale long wavelengths, keep short ones, and interpolate in between (Llama 3.1's own code)."""
    plain, factor = _default(request)[0], np.float32(request["factor"])
    low, high = request["low_freq_factor"], request["high_freq_factor"]
    waves = np.float32(2 * math.pi) / plain
    scaled = np.where(waves > np.float32(request.original / low), plain / factor, plain)
    smooth = (np.float32(request.original) / waves - np.float32(low)) / np.float32(high - low)
    between = ~(waves < np.float32(request.original / high)) & ~(waves > np.float32(request.original / low))
    return np.where(between, (1 - smooth) * scaled / factor + smooth * scaled, scaled), 1.0


def _strength(factor: float, scale: float) -> float:
    """Return the attention temperature for a context extended by `factor` (Peng et al. 2023, equation 15)."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _yarn(request: _Request) -> tuple[np.ndarray, float]:
    """Interpolate slow pairs and extrapolate fast ones (Peng et al. 2023, https://arxiv.org/abs/2309.00071)."""
    parameters, width = request.parameters, request.width
    assert request.maximum is not None, "a configuration with a longest sequence"
    factor = float(parameters.get("factor") or request.maximum / request.original)

    def pair(turns: float) -> float:
        """Return the (fractional) index of the pair that turns `turns` times over the original context."""
        return width * math.log(request.original / (turns * 2 * math.pi)) / (2 * math.log(request.theta))

    attention = parameters.get("attention_factor")
    if attention is None:
        scale, of_all = float(parameters.get("mscale") or 0), float(parameters.get("mscale_all_dim") or 0)
        attention = _strength(factor, scale) / _strength(factor, of_all) if scale and of_all else _strength(factor, 1.0)
    low, high = pair(float(parameters.get("beta_fast") or 32)), pair(float(parameters.get("beta_slow") or 1))
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high += 0.001 if low == high else 0
    places = np.arange(width // 2, dtype=np.float32)
    kept = 1 - np.clip((places - np.float32(low)) / np.float32(high - low), 0, 1)
    powers = request.powers()
    slow, fast = np.float32(1) / (np.float32(factor) * powers), np.float32(1) / powers
    return slow * (1 - kept) + fast * kept, float(attention)


def _longrope(request: _Request) -> tuple[np.ndarray, float]:
    """Divide each pair by its own factor, from a set for short or long contexts (https://arxiv.org/abs/2402.13753)."""
    parameters, original = request.parameters, request.original
    assert request.maximum is not None and request.longest is not None, "a configuration with a longest sequence"
    factor, attention = parameters.get("factor") or request.maximum / original, parameters.get("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    divisors = np.asarray(request["long_factor" if request.is_long else "short_factor"], np.float32)
    return np.float32(1) / (divisors * request.powers()), float(attention)


KINDS: dict[str, Callable[[_Request], tuple[np.ndarray, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
"""Functions by `rope_type`."""
