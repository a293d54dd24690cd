"""Models and versions of the torch backend in the driver: handles of what workers hold."""

from dataclasses import dataclass

import numpy as np

from skyrl.backends.common.models.kind import Kind, check_selects
from skyrl.backends.common.offload import ModelInfo
from skyrl.backends.torch.base_model.lora import Layout, lora_layout, whole_layout
from skyrl.backends.torch.base_model.tensor_ranks import is_attention
from skyrl.backends.torch.workers.group import Buffer, WorkerGroup
from skyrl.backends.torch.workers.model_facts import ModelFacts
from skyrl.errors import RequestError
from skyrl.utils.adapters.fitting import Features


@dataclass
class TorchState:
    """One model, as `ModelOffload` moves it. Buffers are never changed, only replaced."""

    kind: Kind
    weights: Buffer
    first_moment: Buffer
    second_moment: Buffer
    step: int = 0
    """Optimizer steps taken."""
    gradient_sums: Buffer | None = None
    """None until a pass adds to them."""
    sequences: int | None = 0
    """Sequences whose gradients are in the sums; None is not known."""

    @property
    def info(self) -> ModelInfo:
        """Facts that are kept of it on disk too."""
        return ModelInfo(self.kind.lora_config, self.step, self.kind.value_head)

    @property
    def nbytes(self) -> int:
        """Memory of all buffers on a worker, gradient sums included whether they are there or not."""
        return state_bytes(self.kind, self.weights.size, self.weights.parts, self.first_moment.parts)

    def to_host(self) -> "TorchState":
        """The same model: what has no room where workers compute goes to disk."""
        return self

    def to_device(self) -> "TorchState":
        """The same model."""
        return self

    def drop_sums(self) -> None:
        """Clear its gradient sums."""
        self.gradient_sums, self.sequences = None, 0


@dataclass(frozen=True)
class TorchVersion:
    """Weights that are sampled."""

    kind: Kind
    weights: Buffer


def state_bytes(kind: Kind, size: int, parts: int = 1, parts_of_moments: int = 1) -> int:
    """`TorchState.nbytes` of a model of so many numbers; of a whole one what a step takes is included.

    Args:
        kind: Of the model.
        size: Numbers of its weights.
        parts: Workers among which weights and gradient sums are shared.
        parts_of_moments: The same for each moment.
    """
    weights, moment = 4 * -(-size // parts), 4 * -(-size // parts_of_moments)
    step = weights + 2 * moment if kind.is_whole else 0
    return 2 * weights + 2 * moment + step


def layout_of(facts: ModelFacts, kind: Kind) -> Layout:
    """Tensors that a model of this kind trains. Raises `RequestError` if workers train none, or none of a group."""
    if kind.is_whole and not facts.trains_whole:
        raise RequestError(
            "lora_config.rank=0: models that are trained as a whole have no place where ranks share matrices; use a "
            "rank from 1, or serve with tensor_parallel_size=1 (and fsdp_size to share weights)"
        )
    if kind.is_whole:
        return whole_layout(facts.parameters, kind, facts.hidden_size)
    config = kind.lora_config
    check_selects(config, [(target.module, target.group) for target in facts.targets], facts.architecture)
    has_attention = any(is_attention(name) for name in facts.parameters)
    for name, group in (("train_attn", "attn"), ("train_mlp", "mlp"), ("train_unembed", "unembed")):
        if group == "attn" and not has_attention:
            continue  # nothing is left out that was asked for
        if getattr(config, name) and not any(target.group == group for target in facts.targets):
            raise RequestError(
                f"lora_config.{name}=True: {facts.architecture} has no linear map there that an adapter could be on; "
                "set it to False"
            )
    return lora_layout(facts.targets, kind, facts.hidden_size)


def fresh_state(group: WorkerGroup, kind: Kind, seed: int) -> TorchState:
    """A model that has taken no step."""
    size = layout_of(group.facts, kind).size
    spreads = group.spreads(kind)
    weights = Buffer(group, size, spreads.weights)
    group.tell("fresh", weights.handle, kind, seed, None)
    return TorchState(kind, weights, group.zeros(size, spreads.moments), group.zeros(size, spreads.moments))


def random_version(group: WorkerGroup, kind: Kind, scale: float) -> TorchVersion:
    """Weights drawn from a normal distribution, the same each time. Raises `RequestError` as `layout_of`."""
    numbers = np.random.default_rng(0).standard_normal(layout_of(group.facts, kind).size, np.float32)
    return TorchVersion(kind, group.put(numbers * np.float32(scale), group.spreads(kind).weights))


def adaptable(facts: ModelFacts) -> dict[str, Features]:
    """Modules that adapters may be on, by their names in Hugging Face's models."""
    return {one.module: Features(one.in_features, one.out_features, one.group) for one in facts.targets}
