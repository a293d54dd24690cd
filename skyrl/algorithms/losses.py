"""Per-token training losses, written once for JAX, PyTorch and NumPy.

A loss maps log-probabilities to one number per token, without a reduction; the objective is the sum. Functions use the
array-API standard (`xp`) plus `stop_gradient`. The `loss` decorator multiplies each loss by `weights` and clips its
inputs to +-LARGEST. For finite inputs, losses and gradients are thus finite. Log-ratios are clamped to +-20 before
`exp`. `mixed_loss` evaluates a batch in which each row has its own loss.

To add a loss, add one function here. Its keyword-only arguments are the accepted `loss_fn_config` keys. They are
numbers, called knobs, at most NUM_KNOBS. `needs` lists the required `LossInputs` fields, `optional` the optional ones.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import array_namespace, is_jax_namespace, is_torch_namespace
from jaxtyping import Bool, Float, Int, Num

from skyrl.algorithms.arrays import ROUNDING, Tokens
from skyrl.errors import RequestError
from skyrl.utils.registry import Registry

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-this before `exp`. Beyond it, the ratio is constant and its gradient 0."""

LARGEST = 1e9
"""Every loss clips its inputs and knobs to +-this, so products of all of them fit into float32."""

STABLE_RATIO = 2.0
"""Largest weight that `stable_reinforce` gives to a token."""

NUM_KNOBS = 4
"""Number of columns of packed knobs (`pack_knobs`). No loss has more knobs."""

Knob = float | Float[Any, "#batch 1"]


class LossInputs(NamedTuple):
    """Inputs of a loss, by name. All arrays are `[batch, tokens]`; padding has the values of `EMPTY`.

    It is a pytree in JAX and a tuple of tensors in torch. `num_segments` must be a Python int in JAX, so build the
    tuple inside the jitted function.
    """

    logprobs: Tokens
    """Learner log-probability of each target token, in nats. Differentiable. For cross-entropy over K targets, this is
    sum_k weight_k * logprob_k, and `weights` are 1."""
    weights: Tokens
    """Factor of each token's loss, of any sign; 0 in padding."""
    sampling_logprobs: Tokens | None = None
    """Log-probability from the policy that sampled the token, in nats. Requests call this input `logprobs`."""
    advantages: Tokens | None = None
    clip_low: Tokens | None = None
    """Lower bound on the ratio of each token. It overrides the knob; where it is negative, the knob applies."""
    clip_high: Tokens | None = None
    """Upper bound on the ratio of each token. It overrides the knob in the same way."""
    sequence_ratio_mask: Tokens | None = None
    """Non-zero for tokens that count in the ratio of their sequence."""
    selected: Tokens | None = None
    """Non-zero for tokens that `clip_cov` or `kl_cov` treats differently. They are selected from a whole mini-batch."""
    correction: Tokens | None = None
    """Off-policy weight or mask of each token. It multiplies the policy term, but not KL and entropy."""
    reference_logprobs: Tokens | None = None
    """Log-probability from the reference model, at the same temperature, in nats."""
    entropy: Tokens | None = None
    """Entropy of the learner's distribution at each token, in nats. Differentiable."""
    values: Tokens | None = None
    """The critic's value before each token. Differentiable."""
    old_values: Tokens | None = None
    """The critic's values when the batch was sampled."""
    returns: Tokens | None = None
    """Targets of the values."""
    named: Mapping[str, Any] | None = None
    """Inputs of a traced loss by name: `[batch, tokens]`, or `[batch, tokens, targets]` for rank 2."""
    segments: Int[Any, "batch tokens"] | None = None
    """int32 number of each token's sequence, from 0 in each row; -1 in padding."""
    num_segments: int = 1
    """Upper bound (static) on the number of sequences in a row."""


EMPTY = LossInputs(
    logprobs=0.0,
    weights=0.0,
    sampling_logprobs=0.0,
    advantages=0.0,
    clip_low=-1.0,
    clip_high=-1.0,
    sequence_ratio_mask=0.0,
    selected=0.0,
    correction=1.0,
    reference_logprobs=0.0,
    entropy=0.0,
    values=0.0,
    old_values=0.0,
    returns=0.0,
    segments=-1,
)
"""Value of each field in padding, and of an optional input that a request does not give."""

INPUT_FIELDS = {
    "weights": "weights",
    "logprobs": "sampling_logprobs",
    "advantages": "advantages",
    "clip_low_threshold": "clip_low",
    "clip_high_threshold": "clip_high",
    "sequence_ratio_mask": "sequence_ratio_mask",
}
"""`LossInputs` field of each float input in `loss_fn_inputs`, by its name in requests.

The field `logprobs` is not among them: the learner computes it for `target_tokens`.
"""


@dataclass(frozen=True)
class Loss:
    """A registered loss: its inputs, its knobs and its function."""

    name: str
    function: Callable[..., Tokens]
    needs: tuple[str, ...]
    """Required `LossInputs` fields, besides the targets."""
    optional: tuple[str, ...]
    """Optional `LossInputs` fields, besides `weights`."""
    knobs: Mapping[str, float]
    """`loss_fn_config` keys with their defaults."""
    multiple_of: tuple[str, ...]
    """`LossInputs` fields, besides `weights`, that multiply a token's gradient: if one is 0, the gradient is 0."""

    def __call__(self, x: LossInputs, **knobs: Knob) -> Tokens:
        """Return the loss of each token, times the weight of the token, `[batch, tokens]`.

        Knobs are numbers or arrays `[batch, 1]`.
        """
        bounded = x._replace(**{name: _bounded(value) for name, value in _floats(x).items()})
        return self.function(bounded, **{name: _bounded(knob) for name, knob in knobs.items()}) * bounded.weights


LOSSES: Registry[Loss] = Registry("loss function")


def loss(
    name: str, needs: tuple[str, ...] = (), optional: tuple[str, ...] = (), multiple_of: tuple[str, ...] = ()
) -> Callable[..., Loss]:
    """Register the decorated function as the loss `name`. The module docstring describes the function's form."""

    def register(function: Callable[..., Tokens]) -> Loss:
        return LOSSES.register(name)(make_loss(name, function, needs, optional, multiple_of))

    return register


def make_loss(
    name: str,
    function: Callable[..., Tokens],
    needs: tuple[str, ...] = (),
    optional: tuple[str, ...] = (),
    multiple_of: tuple[str, ...] = (),
) -> Loss:
    """Create a loss whose knobs are the function's keyword-only arguments.

    Raises ValueError for a keyword-only argument without a default, or for more than NUM_KNOBS of them.
    """
    parameters = [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for parameter in parameters:
        if parameter.default is parameter.empty:
            raise ValueError(f"loss {name!r}: the setting {parameter.name!r} has no default; give it a number")
    knobs = {p.name: float(p.default) for p in parameters}
    if len(knobs) > NUM_KNOBS:
        raise ValueError(f"loss {name!r} has {len(knobs)} settings, more than NUM_KNOBS={NUM_KNOBS}; use fewer")
    return Loss(name, function, needs, optional, knobs, multiple_of)


OFF_POLICY = ("sampling_logprobs", "advantages")
ADVANTAGES = ("advantages",)
CLIPS = ("clip_low", "clip_high")


@loss("cross_entropy")
def cross_entropy(x: LossInputs) -> Tokens:
    """Negative log-likelihood of the targets."""
    return -x.logprobs


@loss("importance_sampling", needs=OFF_POLICY, multiple_of=ADVANTAGES)
def importance_sampling(x: LossInputs) -> Tokens:
    """Policy gradient on samples of another policy: minus the probability ratio times the advantage."""
    return -probability_ratio(x) * x.advantages


@loss("ppo", needs=OFF_POLICY, optional=CLIPS, multiple_of=ADVANTAGES)
def ppo(x: LossInputs, *, clip_low_threshold: Knob = 0.8, clip_high_threshold: Knob = 1.2) -> Tokens:
    """Clipped surrogate: the minimum of the raw and the ratio-clipped objective.

    Args:
        x: Token arrays, each `[batch, tokens]`.
        clip_low_threshold: Lower bound on the ratio (0.8 rather than an epsilon of 0.2).
        clip_high_threshold: Upper bound on the ratio.

    Source: Schulman et al. 2017, https://arxiv.org/abs/1707.06347, equation 7.
    """
    return _clipped_surrogate(x, probability_ratio(x), clip_low_threshold, clip_high_threshold)


@loss("cispo", needs=OFF_POLICY, optional=CLIPS, multiple_of=ADVANTAGES)
def cispo(x: LossInputs, *, clip_low_threshold: Knob = 0.8, clip_high_threshold: Knob = 1.2) -> Tokens:
    """REINFORCE weighted by the clipped ratio. The ratio has no gradient, so clipped tokens still have one.

    Args:
        x: Token arrays, each `[batch, tokens]`.
        clip_low_threshold: Lower bound on the ratio.
        clip_high_threshold: Upper bound on the ratio.

    Source: MiniMax-M1 2025, https://arxiv.org/abs/2506.13585, equation 4.
    """
    clipped = _clip_ratio(x, probability_ratio(x), clip_low_threshold, clip_high_threshold)
    return -stop_gradient(clipped) * x.logprobs * x.advantages


@loss("dro", needs=OFF_POLICY)
def dro(x: LossInputs, *, beta: Knob = 0.05) -> Tokens:
    """Policy gradient with a quadratic penalty on the log-ratio. There is no `exp`, so the log-ratio is not clamped.

    Args:
        x: Token arrays, each `[batch, tokens]`.
        beta: Strength of the penalty.

    Source: Richemond et al. 2024, https://arxiv.org/abs/2405.19107.
    """
    log_ratio = x.logprobs - x.sampling_logprobs
    return -(x.logprobs * x.advantages - 0.5 * beta * log_ratio * log_ratio)


@loss("gspo", needs=(*OFF_POLICY, "sequence_ratio_mask"), optional=CLIPS, multiple_of=ADVANTAGES)
def gspo(x: LossInputs, *, clip_low_threshold: Knob = 0.8, clip_high_threshold: Knob = 1.2) -> Tokens:
    """PPO in which each token has the ratio of its sequence: exp of the mean log-ratio over `sequence_ratio_mask`.

    The value of the ratio is the sequence's, but the gradient is the token's own (GSPO-token). Reads `segments`.

    Args:
        x: Token arrays, each `[batch, tokens]`.
        clip_low_threshold: Lower bound on the sequence ratio.
        clip_high_threshold: Upper bound on the sequence ratio.

    Source: Zheng et al. 2025, https://arxiv.org/abs/2507.18071, equations 7 and 14.
    """
    xp = array_namespace(x.logprobs)
    sequence_ratio = xp.exp(_segment_mean(x, _log_ratio(x), x.sequence_ratio_mask != 0))
    ratio = stop_gradient(sequence_ratio) * xp.exp(x.logprobs - stop_gradient(x.logprobs))
    return _clipped_surrogate(x, ratio, clip_low_threshold, clip_high_threshold)


@loss("stable_reinforce", needs=OFF_POLICY)
def stable_reinforce(x: LossInputs, *, kl_coeff: Knob = 0.0) -> Tokens:
    """REINFORCE weighted by the ratio, which is truncated at STABLE_RATIO. The truncation bounds a token's gradient.

    The weight has no gradient, so at ratio 1 (no staleness) the gradient is that of `importance_sampling`. The name is
    the protocol's, but the estimator is our own, because the formula of the hosted service is not public.

    Args:
        x: Token arrays, each `[batch, tokens]`.
        kl_coeff: Strength of a penalty, half the squared log-ratio. The penalty's gradient estimates the gradient of
            the Kullback-Leibler divergence of the learner from the sampling policy. As in `dro`, the log-ratio is not
            clamped.

    Sources: Ionides 2008, https://doi.org/10.1198/106186008X320456 (truncation); Schulman 2020,
    http://joschu.net/blog/kl-approx.html (k2).
    """
    xp = array_namespace(x.logprobs)
    ratio = probability_ratio(x)
    weight = stop_gradient(xp.where(ratio > STABLE_RATIO, xp.full_like(ratio, STABLE_RATIO), ratio))
    log_ratio = x.logprobs - x.sampling_logprobs
    return -weight * x.logprobs * x.advantages + 0.5 * kl_coeff * log_ratio * log_ratio


def loss_index(name: str) -> int:
    """Return the index of a loss for `mixed_loss`. For an unknown name, raises KeyError that lists the known names."""
    return list(LOSSES).index(LOSSES[name].name)


def pack_knobs(name: str, config: Mapping[str, float]) -> np.ndarray:
    """Return all settings of a loss, including defaults, in the order of its signature: float32 `[NUM_KNOBS]`."""
    packed = np.zeros(NUM_KNOBS, np.float32)
    for column, (knob, default) in enumerate(LOSSES[name].knobs.items()):
        packed[column] = config.get(knob, default)
    return packed


def mixed_loss(x: LossInputs, index: Int[Any, "batch 1"], knobs: Float[Any, "batch knobs"]) -> Tokens:
    """Return the loss of each token, where each row has its own loss and settings.

    Losses and settings are data, so a single compiled program computes all of them.

    Every loss is evaluated on every row. Rows that use another loss are replaced by empty rows *before* the evaluation.
    The contents of a row, NaN included, thus never reach the value or gradient of a loss that the row does not use.

    Args:
        x: Token arrays `[batch, tokens]`, with all fields.
        index: int32 `loss_index` of each row.
        knobs: float32 `pack_knobs` of each row, `[batch, NUM_KNOBS]`.
    """
    xp = array_namespace(x.logprobs)
    total = xp.zeros_like(x.logprobs)
    for number, name in enumerate(LOSSES):
        spec = LOSSES[name]
        chosen = index == number
        inputs = x._replace(**{f: _where(chosen, value, getattr(EMPTY, f)) for f, value in _floats(x).items()})
        settings = {
            knob: _where(chosen, knobs[:, column : column + 1], default)
            for column, (knob, default) in enumerate(spec.knobs.items())
        }
        total = xp.where(chosen, spec(inputs, **settings), total)
    return total


def refuse_unserved(name: str) -> None:
    """Raise RequestError for an unknown loss, and for a name that the protocol has but that is not in `LOSSES`."""
    if name in LOSSES:
        return
    known = f"known losses: {', '.join(LOSSES)}"
    if name in UNSERVED:
        raise RequestError(f"loss_fn={name!r} is not a loss: {UNSERVED[name]}; {known}")
    raise RequestError(f"loss_fn={name!r} is unknown; {known}")


CUSTOM = "custom"
"""`loss_fn` of requests whose loss was traced by a client."""
UNSERVED = {
    CUSTOM: "over the API, send loss_fn_config={'loss_id': ...} of a loss that create_custom_loss has made; in a "
    "process, pass the TracedObjective itself",
}
"""Alternative to each `loss_fn` of the protocol that is not in `LOSSES`."""


def stop_gradient(x: Any) -> Any:
    """Return `x` without gradient."""
    xp = array_namespace(x)
    if is_jax_namespace(xp):
        import jax

        return jax.lax.stop_gradient(x)
    return x.detach() if is_torch_namespace(xp) else x


def gradient_of(compute: Callable[[Any], tuple[Any, Any]], at: Any) -> tuple[Any, Any]:
    """Return the gradient of a scalar function (an array without gradient), and the function's second result.

    Args:
        compute: Function of a JAX or torch array. It returns the scalar and a second result.
        at: Array at which the gradient is computed.
    """
    xp = array_namespace(at)
    if is_jax_namespace(xp):
        import jax

        return jax.grad(compute, has_aux=True)(jax.lax.stop_gradient(at))
    assert is_torch_namespace(xp), "JAX and torch have gradients"
    with xp.enable_grad():
        leaf = at.detach().requires_grad_()
        total, rest = compute(leaf)
        if total.requires_grad:
            total.backward(inputs=[leaf])
    return xp.zeros_like(at) if leaf.grad is None else leaf.grad, rest


def _log_ratio(x: LossInputs) -> Tokens:
    xp = array_namespace(x.logprobs)
    return xp.clip(x.logprobs - x.sampling_logprobs, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def probability_ratio(x: LossInputs) -> Tokens:
    """Return each token's probability under the learner divided by that under the sampling policy.

    The log-ratio is clamped.
    """
    return array_namespace(x.logprobs).exp(_log_ratio(x))


def _clip_ratio(x: LossInputs, ratio: Tokens, low: Knob, high: Knob) -> Tokens:
    """Clip the ratio to the token's own bounds, or to `low` and `high` where the token has none.

    As in torch, a ratio equal to a bound keeps its gradient.
    """
    xp = array_namespace(ratio)
    low = low + xp.zeros_like(ratio)
    high = high + xp.zeros_like(ratio)
    if x.clip_low is not None:
        low = xp.where(x.clip_low >= 0, x.clip_low, low)
    if x.clip_high is not None:
        high = xp.where(x.clip_high >= 0, x.clip_high, high)
    return xp.where(ratio < low, low, xp.where(ratio > high, high, ratio))


def _clipped_surrogate(x: LossInputs, ratio: Tokens, low: Knob, high: Knob) -> Tokens:
    """Return -min(ratio * advantage, clipped ratio * advantage).

    A ratio that differs from a bound only by rounding is not clipped. Fresh samples have ratio 1, so this matters for
    a bound of 1.
    """
    xp = array_namespace(ratio)
    clipped = _clip_ratio(x, ratio, low, high)
    clipped = xp.where(xp.abs(ratio - clipped) <= ROUNDING, ratio, clipped)
    return -xp.minimum(ratio * x.advantages, clipped * x.advantages)


def _segment_mean(x: LossInputs, values: Tokens, counted: Bool[Any, "batch tokens"]) -> Tokens:
    """Return for each token the mean of the counted values in its segment, 0 if there are none.

    Sums use `where`, not a product with a one-hot matrix, so NaN in one segment never reaches another.
    """
    xp = array_namespace(values)
    assert x.segments is not None, "losses over whole sequences need `segments`"
    numbers = xp.arange(x.num_segments, dtype=x.segments.dtype)[None, None, :]
    member = x.segments[:, :, None] == numbers
    used = member & counted[:, :, None]
    zero = xp.zeros_like(values)[:, :, None]
    sums = xp.sum(xp.where(used, values[:, :, None], zero), axis=1, keepdims=True)
    counts = xp.sum(xp.where(used, zero + 1, zero), axis=1, keepdims=True)
    means = sums / xp.where(counts > 0, counts, xp.ones_like(counts))
    return xp.sum(xp.where(member, means, zero), axis=2)


def _floats(x: LossInputs) -> dict[str, Tokens]:
    """Return the float arrays of `x` that are present, by name."""
    return {
        name: value
        for name, value in x._asdict().items()
        if name not in ("named", "segments", "num_segments") and value is not None
    }


def _where(chosen: Bool[Any, "batch 1"], values: Num[Any, "batch columns"], other: float) -> Num[Any, "batch columns"]:
    xp = array_namespace(values)
    return xp.where(chosen, values, xp.full_like(values, other))


def _bounded(value: Knob | Tokens) -> Knob | Tokens:
    if isinstance(value, float | int):
        return min(max(value, -LARGEST), LARGEST)
    return array_namespace(value).clip(value, -LARGEST, LARGEST)
