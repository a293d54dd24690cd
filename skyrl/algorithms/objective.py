"""Objective of an optimizer step: the sum over tokens of policy, KL and entropy terms, or the critic's loss.

Each term is one number per token, multiplied by the token's weight. The sum therefore does not depend on padding, the
order of rows, or the split of a mini-batch into micro-batches and over devices.
"""

import json
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Literal, Protocol, runtime_checkable

from array_api_compat import array_namespace
from jaxtyping import Float

from skyrl.algorithms.arrays import Tokens
from skyrl.algorithms.kl import KL_ESTIMATORS, KLEstimator, k3
from skyrl.algorithms.losses import Loss, LossInputs, stop_gradient
from skyrl.algorithms.policy_losses import find_policy_loss
from skyrl.errors import RequestError
from skyrl.utils.own_code import import_own

SOURCES = {
    "selected": "the tokens chosen by a forward pass over the mini-batch; where there is none, use another loss",
    "reference_logprobs": "those of the reference model; set use_kl_loss to false to do without",
    "entropy": "the learner's per token; set use_entropy_loss to false to do without",
}
"""Explanation of each field, for the error message if the field is missing."""


Output = Literal["logprobs", "entropy", "values"]
"""Name of a value that a learner computes for each token."""


@runtime_checkable
class Objective(Protocol):
    """Loss of a training pass, in the form that backends use. Immutable and compared by value.

    Equal objectives compute the same loss, so caches of compiled programs use objectives as keys. Unpickling rebuilds
    an objective from its settings.
    """

    @property
    def needs(self) -> tuple[str, ...]:
        """Required `LossInputs` fields. Each is given by every datum or computed by the learner."""
        ...

    @property
    def inputs(self) -> tuple[str, ...]:
        """`LossInputs` fields that a datum may give, besides `weights`. A missing field has its value in `EMPTY`."""
        ...

    @property
    def outputs(self) -> tuple[Output, ...]:
        """Values that the learner computes and returns."""
        ...

    @property
    def multiple_of(self) -> tuple[str, ...]:
        """Same as `Loss.multiple_of`."""
        ...

    def __call__(self, x: LossInputs) -> Tokens:
        """Return the loss of each token, `[batch, tokens]`. The caller sums it."""
        ...


@dataclass(frozen=True)
class ForwardOnly:
    """Forward pass without a loss, for its outputs. They use the temperature of each token."""

    outputs: tuple[Output, ...]
    needs: tuple[str, ...] = field(default=(), init=False)
    inputs: tuple[str, ...] = field(default=(), init=False)
    multiple_of: tuple[str, ...] = field(default=(), init=False)

    def __call__(self, x: LossInputs) -> Tokens:
        return 0.0 * x.weights


@dataclass(frozen=True)
class ValueObjective:
    """Loss of the critic per token; see `value_loss`."""

    value_clip: float | None
    outputs: tuple[Output, ...] = field(default=("values",), init=False)
    multiple_of: tuple[str, ...] = field(default=(), init=False)

    @property
    def inputs(self) -> tuple[str, ...]:
        return ("returns",) if self.value_clip is None else ("returns", "old_values")

    needs = inputs

    def __call__(self, x: LossInputs) -> Tokens:
        return value_loss(x, value_clip=self.value_clip)


@dataclass(frozen=True)
class PolicyObjective:
    """Loss of the policy per token: policy loss plus KL minus entropy. Created by `policy_objective`."""

    specification: str
    """The algorithm's options as JSON, from which the objective is built."""
    on_policy: bool
    """True if each batch has one optimizer step.

    `sampling_logprobs` are then the learner's own log-probabilities, without gradient. No earlier forward pass is thus
    needed. The pass also returns the entropy.
    """
    loss: Loss = field(compare=False)
    knobs: Mapping[str, float] = field(compare=False)
    """Settings of the loss."""
    kl_estimator: KLEstimator = field(default=k3, compare=False)
    kl_coef: float = field(default=0.0, compare=False)
    """Factor of the KL from the reference; 0 disables it."""
    entropy_coef: float = field(default=0.0, compare=False)
    """Factor of the entropy bonus; 0 disables it."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to rebuild the objective in another process, which first imports the modules of its functions.

        Raises RequestError for a function that is registered in the main script, which cannot be imported.
        """
        options = json.loads(self.specification)
        modules = {each.__module__ for each in (self.loss.function, self.kl_estimator)}
        if "__main__" in modules:
            raise RequestError(
                f"policy_loss_type={options['policy_loss_type']}, kl_estimator_type={options['kl_estimator_type']}: a "
                "function of the main script does not reach workers in other processes; define it in a module, and "
                "import that or give module:function"
            )
        return _rebuilt, (sorted(modules), options, self.on_policy)

    @property
    def needs(self) -> tuple[str, ...]:
        """Required `LossInputs` fields."""
        loss = tuple(name for name in self.loss.needs if not (self.on_policy and name == "sampling_logprobs"))
        kl = ("reference_logprobs",) if self.kl_coef else ()
        entropy = ("entropy",) if self.entropy_coef else ()
        return (*loss, *kl, *entropy)

    @property
    def inputs(self) -> tuple[str, ...]:
        given = dict.fromkeys((*self.needs, *self.loss.optional, "correction"))
        return tuple(name for name in given if name != "entropy")

    @property
    def outputs(self) -> tuple[Output, ...]:
        return ("logprobs", "entropy") if self.entropy_coef or self.on_policy else ("logprobs",)

    @property
    def multiple_of(self) -> tuple[str, ...]:
        return () if self.kl_coef or self.entropy_coef else self.loss.multiple_of

    def __call__(self, x: LossInputs) -> Tokens:
        """Return the loss of each token (the sum of its `terms`), `[batch, tokens]`. The caller sums it over tokens."""
        return reduce(operator.add, self.terms(x).values())

    def terms(self, x: LossInputs) -> dict[str, Tokens]:
        """Return the terms of each token's loss: "policy", "kl" and "entropy". `x.correction` multiplies only "policy".

        Raises ValueError if a required field is missing.
        """
        for name in self.needs:
            if getattr(x, name) is None:
                raise ValueError(f"policy_loss_type={self.loss.name!r} needs {name}, {SOURCES.get(name, 'per token')}")
        if self.on_policy:
            x = x._replace(sampling_logprobs=stop_gradient(x.logprobs))
        terms = {"policy": self.loss(x, **self.knobs)}
        if x.correction is not None:
            terms["policy"] = terms["policy"] * stop_gradient(x.correction)
        if self.kl_coef:
            assert x.reference_logprobs is not None
            terms["kl"] = self.kl_coef * x.weights * self.kl_estimator(x.logprobs, x.reference_logprobs)
        if self.entropy_coef:
            assert x.entropy is not None
            terms["entropy"] = -(self.entropy_coef * x.weights * x.entropy)
        return terms


def policy_objective(options: Mapping[str, Any], on_policy: bool = False) -> PolicyObjective:
    """Return the objective for the algorithm's options.

    Args:
        options: `trainer.algorithm` as a mapping; its sections are nested mappings. Keys used: `policy_loss_type` and
            the loss's settings, `use_kl_loss`, `kl_loss_coef`, `kl_estimator_type`, `use_entropy_loss`,
            `entropy_loss_coef`.
        on_policy: See `PolicyObjective.on_policy`.

    Raises KeyError for unknown names, and ValueError for settings out of range (see `find_policy_loss`).
    """
    loss, knobs = find_policy_loss(options["policy_loss_type"], options)
    return PolicyObjective(
        json.dumps(options, sort_keys=True),
        on_policy,
        loss,
        knobs,
        KL_ESTIMATORS.get(options["kl_estimator_type"]),
        options["kl_loss_coef"] if options["use_kl_loss"] else 0.0,
        options["entropy_loss_coef"] if options["use_entropy_loss"] else 0.0,
    )


def _rebuilt(modules: Sequence[str], options: Mapping[str, Any], on_policy: bool) -> PolicyObjective:
    for module in modules:
        import_own(module)  # registers its functions
    return policy_objective(options, on_policy)


def value_loss(x: LossInputs, *, value_clip: float | None) -> Tokens:
    """Return the critic's loss of each token, times the token's weight, `[batch, tokens]`.

    The loss is half the squared distance between value and return. With clipping, the loss is also computed for the
    value clipped to a range around the old value, and the larger of both is returned.

    Args:
        x: Token arrays with `values`, `returns` and, if clipping, `old_values`.
        value_clip: Maximum distance of the clipped value from the old value. None: no clipping.

    Source: Schulman et al. 2017, https://arxiv.org/abs/1707.06347, equation 9. The clip follows their reference code.
    """
    assert x.values is not None
    assert x.returns is not None
    xp = array_namespace(x.values)
    squared = (x.values - x.returns) ** 2
    if value_clip is not None:
        assert x.old_values is not None
        clipped = x.old_values + xp.clip(x.values - x.old_values, -value_clip, value_clip)
        squared = xp.maximum(squared, (clipped - x.returns) ** 2)
    return 0.5 * squared * x.weights


def entropy(logits: Float[Any, "*batch vocab"]) -> Float[Any, "*batch"]:
    """Return the entropy in nats over the last axis. Differentiable.

    Logits may be minus infinity (impossible tokens). They must already be divided by the sampling temperature.
    """
    xp = array_namespace(logits)
    shifted = logits - stop_gradient(xp.max(logits, axis=-1, keepdims=True))
    weights = xp.exp(shifted)
    total = xp.sum(weights, axis=-1)
    finite = xp.where(weights > 0, shifted, 0.0)
    return xp.log(total) - xp.sum(weights * finite, axis=-1) / total
