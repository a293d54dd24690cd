"""Models and versions of the torch backend in the driver: handles of buffers on workers."""

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from skyrl.backends.common.models.kind import Kind, check_selects
from skyrl.backends.common.offload import ModelInfo
from skyrl.backends.torch.base_model.experts import file_name
from skyrl.backends.torch.base_model.lora import Layout, lora_layout, whole_layout
from skyrl.backends.torch.base_model.memory import IN_A_STEP
from skyrl.backends.torch.base_model.tensor_ranks import is_attention
from skyrl.backends.torch.workers.group import Buffer, WorkerGroup
from skyrl.backends.torch.workers.model_facts import ModelFacts
from skyrl.errors import RequestError
from skyrl.utils.adapters.fitting import Features


@dataclass
class TorchState:
    """One model, as managed by `ModelOffload`. Buffers are never changed, only replaced."""

    kind: Kind
    weights: Buffer
    first_moment: Buffer
    second_moment: Buffer
    step: int = 0
    """Number of optimizer steps taken."""
    gradient_sums: Buffer | None = None
    """None until a pass adds to them."""
    sequences: int | None = 0
    """Number of sequences in the gradient sums; None: unknown."""

    @property
    def info(self) -> ModelInfo:
        """Facts about the model that are also stored on disk."""
        return ModelInfo(self.kind.lora_config, self.step, self.kind.value_head)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers on a worker, including space for gradient sums."""
        return state_bytes(self.kind, self.weights.size, self.weights.parts, self.first_moment.parts)

    @property
    def host_nbytes(self) -> int:
        """Bytes of all buffers in the host memory of a worker. No step needs memory there."""
        weights, moment = self.weights.worker_bytes, self.first_moment.worker_bytes
        return 2 * weights + 2 * moment

    def to_host(self) -> "TorchState":
        """Return a copy of the model in host memory of the workers, each its part. Versions keep their weights."""
        buffers = self._buffers
        copies = self.weights.group.parked(list(buffers.values()))
        return replace(self, **dict(zip(buffers, copies, strict=True)))

    def to_device(self) -> "TorchState":
        """Move the model to the devices of the workers, and return it."""
        self.weights.group.bring(list(self._buffers.values()))
        return self

    def drop_sums(self) -> None:
        """Clear the gradient sums."""
        self.gradient_sums, self.sequences = None, 0

    @property
    def _buffers(self) -> dict[str, Buffer]:
        """Buffers by field."""
        sums = {} if self.gradient_sums is None else {"gradient_sums": self.gradient_sums}
        moments = {"first_moment": self.first_moment, "second_moment": self.second_moment}
        return {"weights": self.weights, **moments, **sums}


@dataclass(frozen=True)
class TorchVersion:
    """Weights for sampling."""

    kind: Kind
    weights: Buffer


def state_bytes(kind: Kind, size: int, parts: int = 1, parts_of_moments: int = 1) -> int:
    """Bytes of a model on one worker. For a fully trained model, they include the memory of an optimizer step.

    Args:
        kind: Kind of the model.
        size: Number of trained parameters.
        parts: Number of workers that share weights and gradient sums.
        parts_of_moments: Number of workers that share each moment.
    """
    weights, moment = 4 * -(-size // parts), 4 * -(-size // parts_of_moments)
    step = 0
    if kind.is_whole:
        step = IN_A_STEP * moment
        if parts_of_moments > parts:
            step += 3 * weights  # the sum of gradients over workers, and new weights while they are gathered
    return 2 * weights + 2 * moment + step


def layout_of(facts: ModelFacts, kind: Kind) -> Layout:
    """Layout of a model of this kind. Raises `RequestError` if it cannot be trained, or a selected group is empty."""
    if kind.is_whole and not facts.trains_whole:
        raise RequestError(
            "lora_config.rank=0: models that are trained as a whole have no place where ranks share matrices; use a "
            "rank from 1, or serve with tensor_parallel_size=1 (and fsdp_size to share weights)"
        )
    if kind.is_whole:
        return whole_layout(facts.parameters, kind, facts.hidden_size)
    config = kind.lora_config
    check_selects(config, [(target.module, target.group) for target in facts.targets], facts.architecture)
    layout = lora_layout(facts.targets, kind, facts.hidden_size)
    _check_experts(layout, facts)
    has_attention = any(is_attention(name) for name in facts.parameters)
    for name, group in (("train_attn", "attn"), ("train_mlp", "mlp"), ("train_unembed", "unembed")):
        if group == "attn" and not has_attention:
            continue  # nothing requested is left out
        if getattr(config, name) and not any(target.group == group for target in facts.targets):
            raise RequestError(
                f"lora_config.{name}=True: {facts.architecture} has no linear map there that an adapter could be on "
                "(its experts are stacked in a layout that has none); set it to False, or use --backend jax if that "
                "supports the architecture"
            )
    return layout


def _check_experts(layout: Layout, facts: ModelFacts) -> None:
    """Raise `RequestError` if some experts of a layer are selected and others are not."""
    counts = Counter(target.stack for target in facts.targets if target.experts)
    for name, shape in layout.stacks:
        stack, count = name.rpartition(".")[0], shape[0]
        if stack in counts and count != counts[stack]:
            raise RequestError(
                f"lora_config.target_modules: it selects {count} of the {counts[stack]} experts of {stack}, and torch "
                "adapts all experts of a layer or none; select all of them, or use --backend jax"
            )


def fresh_state(group: WorkerGroup, kind: Kind, seed: int) -> TorchState:
    """Create a new model, without optimizer steps."""
    size = layout_of(group.facts, kind).size
    spreads = group.spreads(kind)
    weights = Buffer(group, size, spreads.weights)
    group.tell("fresh", weights.handle, kind, seed, None)
    return TorchState(kind, weights, group.zeros(size, spreads.moments), group.zeros(size, spreads.moments))


def random_version(group: WorkerGroup, kind: Kind, scale: float) -> TorchVersion:
    """Create normally distributed weights, always the same. Raises the `RequestError`s of `layout_of`."""
    draw = np.random.default_rng(0)
    tensors = {name: draw.standard_normal(shape, np.float32) for name, shape in layout_of(group.facts, kind).parts}
    scaled = {name: tensor * np.float32(scale) for name, tensor in tensors.items()}
    return TorchVersion(kind, group.put_arrays(scaled, group.spreads(kind).weights))


def adaptable(facts: ModelFacts) -> dict[str, Features]:
    """Modules that can have adapters, by their names in Hugging Face's models, and experts by those in files, too."""
    features = {one.module: Features(one.in_features, one.out_features, one.group) for one in facts.targets}
    return features | {file_name(one, facts.expert_names): found for one, found in features.items()}
