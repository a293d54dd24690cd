"""Operations that a backend runs, one dataclass per kind, and the completion that the backend returns for each."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from skyrl.algorithms.objective import Objective
from skyrl.types import (
    AdamParams,
    Datum,
    DimuonParams,
    GradientEffect,
    LoraConfig,
    Result,
    SamplingOptions,
    SamplingParams,
    TokenMatrix,
)

NO_OPTIONS = SamplingOptions()
ADAMW = AdamParams()


@dataclass(frozen=True, kw_only=True)
class Operation:
    """A unit of work. `request_id` is unique, and the operation's completion has the same id."""

    request_id: str
    tenant: str = ""
    """Owner of the operation. Tenants share the machine fairly and never share cached data."""


@dataclass(frozen=True, kw_only=True)
class ModelOperation(Operation):
    """Work on one model's trainable state, done in the order of submission."""

    model_id: str
    alone: bool = False
    """True if the operation must not share a call with other models, because it may crash the process."""


@dataclass(frozen=True, kw_only=True)
class CreateModel(ModelOperation):
    """Create an adapter with fresh weights, or a copy of the base model (rank 0). Returns `ModelOutput`."""

    lora_config: LoraConfig
    value_head: bool = False
    """True for a critic, which maps each token to a value."""


@dataclass(frozen=True, kw_only=True)
class ForwardBackward(ModelOperation):
    """Compute a loss over `data` and add its gradients to the gradient sums. Returns `ForwardBackwardOutput`."""

    data: list[Datum]
    """Sequences, checked by `check_pass`. If `loss_fn` is an objective, each has the inputs that its `inputs` names,
    and `weights`, `target_tokens` and `temperature`."""
    loss_fn: str | Objective
    """Name of a loss of the Tinker protocol, or a trainer's objective. Reuse the same object: compiled programs are
    looked up by it."""
    loss_fn_config: Mapping[str, float] = field(default_factory=dict)
    """Settings of a loss of the Tinker protocol."""
    forward_only: bool = False
    """Compute outputs and metrics only; gradient sums stay unchanged."""
    reference: bool = False
    """Compute with the base model instead of the trained model. Requires `forward_only`."""

    @cached_property
    def tokens(self) -> int:
        """Number of tokens in all data."""
        return sum(len(datum.tokens) for datum in self.data)


@dataclass(frozen=True, kw_only=True)
class OptimStep(ModelOperation):
    """Apply the accumulated gradients with AdamW or Dimuon, then clear them. Returns `OptimStepOutput`."""

    adam_params: AdamParams = ADAMW
    dimuon_params: DimuonParams | None = None
    """Hyper-parameters of a Dimuon step; `adam_params` is then ignored. A model cannot switch between the two
    optimizers."""
    skip_if_not_finite: bool = False
    """If the gradient norm is not finite, clear the gradients without applying them."""


@dataclass(frozen=True, kw_only=True)
class SaveCheckpoint(ModelOperation):
    """Write weights, optimizer state and configuration to the folder `path`.

    Returns `SaveOutput` when it is complete.
    """

    path: str


@dataclass(frozen=True, kw_only=True)
class LoadCheckpoint(ModelOperation):
    """Load weights and optimizer state from a training checkpoint. Creates the model if it does not exist.

    Pending gradients are dropped. Returns `ModelOutput`.
    """

    path: str
    load_optimizer: bool = True
    """False starts with a new optimizer state (zero moments, step 0)."""
    digest: str | None = None
    """Hash of the folder's manifest (sha256, hex), if known."""


@dataclass(frozen=True, kw_only=True)
class SaveSnapshot(ModelOperation):
    """Write the model's complete state, gradient sums included, to the folder `path`. Returns `SaveOutput` when the
    folder is complete.

    Then all earlier writes of the model (checkpoints, versions) are on disk. If one of them cannot be written, the
    snapshot fails.
    """

    path: str


@dataclass(frozen=True, kw_only=True)
class LoadSnapshot(ModelOperation):
    """Create a model from a snapshot of `SaveSnapshot`. Returns `ModelOutput`."""

    path: str
    digest: str
    """Hash of the folder's manifest."""


@dataclass(frozen=True, kw_only=True)
class Publish(ModelOperation):
    """Freeze the current weights as the immutable sampler version `version`, stored in PEFT layout at `path`.

    With `persist`, returns `SaveOutput` when the version is on disk. Otherwise returns it at once, and the write
    continues in the background.
    """

    version: str
    path: str | None
    """Folder of the version; None: in memory only, until the version is dropped."""
    persist: bool = True


@dataclass(frozen=True, kw_only=True)
class ExportModel(ModelOperation):
    """Write the base model with the trained weights as a Hugging Face folder. Returns `SaveOutput`."""

    path: str


@dataclass(frozen=True, kw_only=True)
class DeleteModel(ModelOperation):
    """Free the model's trainable state. Published versions and checkpoints stay. Returns `ModelOutput`."""


@dataclass(frozen=True, kw_only=True)
class Rejected(ModelOperation):
    """Placeholder for a request that was rejected before submission. It keeps the request's place in the model's order.

    It completes with `error`. `gradients="incomplete"` makes the model's next optimizer step fail too, which prevents a
    step on a partial batch. `gradients="dropped"` clears the gradient sums, as a failed step does.
    """

    error: str
    gradients: GradientEffect = "kept"


@dataclass(frozen=True, kw_only=True)
class Sample(Operation):
    """Continue `prompt` `num_samples` times with one published version. Returns `SampleOutput`."""

    version: str | None
    """Id of the version, or None for the base model."""
    path: str | None = None
    """Folder of the version (sampler or training checkpoint), to read if the version is not in memory."""
    prompt: np.ndarray
    """int32 `[prompt]`, not empty."""
    params: SamplingParams
    """Sampling parameters with `seed` and `max_tokens` set."""
    options: SamplingOptions = NO_OPTIONS
    num_samples: int = 1
    reports_progress: bool = False
    """Report new tokens through `AbstractBackend.on_progress`. A backend may report none."""
    routing_key: str | None = None
    """Requests with equal keys, such as the turns of a conversation, share prefixes. With several engines, the router
    prefers to send them to the same engine, because its cache may have the prefix. The key has no influence on the
    result."""
    tempered_logprobs: bool = False
    """Report log-probabilities of generated tokens at the request's temperature, for trainers, instead of at 1."""
    topk_sample_logprobs: int = 0
    """Number of most likely tokens to report at each generated position; 0: none."""
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    prompt_logprobs_last_n: int | None = None
    """Number of last prompt tokens that `prompt_logprobs` and `topk_prompt_logprobs` apply to; None: all."""
    target_prompt_logprobs: TokenMatrix | None = None
    """int32 `[prompt - 1, K]`: K token ids to score at each prompt position after the first. Row i is for position
    i + 1; -1 stands for no token."""
    prompt_alt_tokens_k: int = 0
    """Number of tokens to draw for each prompt position after the first, at the request's temperature, without top-k,
    top-p or other filters."""


@dataclass(frozen=True)
class Progress:
    """New tokens of a running sequence. The request's result contains them again."""

    request_id: str
    number: int
    """Index of the sequence among the request's samples."""
    tokens: np.ndarray
    """int32 `[n]`."""
    logprobs: np.ndarray
    """float32 `[n]`, as in the result."""


@dataclass(frozen=True)
class Completion:
    """The end of an operation: a result or an `ErrorResponse`."""

    request_id: str
    result: Result
    device_s: float = 0.0
    """Device seconds of the operation. The time of a dispatch is divided among its requests: by tokens in training,
    equally in sampling. 0.0 if unknown, as for samples of external engines."""
