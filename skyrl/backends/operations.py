"""The work that a backend can be given: one dataclass per kind, and the completion that comes back."""

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
    """A unit of work. `request_id` is unique and comes back in its completion."""

    request_id: str
    tenant: str = ""
    """Owner of the operation: tenants share the machine fairly, and nothing cached for one is used for another."""


@dataclass(frozen=True, kw_only=True)
class ModelOperation(Operation):
    """Work on one model's trainable state, done in the order of submission."""

    model_id: str
    alone: bool = False
    """True if nothing of another model is computed in the same call, as this may end the process that computes it."""


@dataclass(frozen=True, kw_only=True)
class CreateModel(ModelOperation):
    """Make an adapter with fresh weights, or a copy of the base model (rank 0). Returns `ModelOutput`."""

    lora_config: LoraConfig
    value_head: bool = False
    """True if it is a critic, which maps each token to a value."""


@dataclass(frozen=True, kw_only=True)
class ForwardBackward(ModelOperation):
    """Add the gradients of a loss, summed over `data`, to the model's sums. Returns `ForwardBackwardOutput`."""

    data: list[Datum]
    """Checked by `check_pass`; for an objective, inputs are its `inputs`, `weights`, `target_tokens` and
    `temperature`."""
    loss_fn: str | Objective
    """A loss of the protocol by its name, or a trainer's objective. Keep one object of it: programs are found by it."""
    loss_fn_config: Mapping[str, float] = field(default_factory=dict)
    """Settings of a loss of the protocol."""
    forward_only: bool = False
    """Compute outputs and metrics only; sums stay as they are."""
    reference: bool = False
    """Compute with the base model instead of the model, which stays as it is. `forward_only` too."""

    @cached_property
    def tokens(self) -> int:
        """Number of tokens in all data."""
        return sum(len(datum.tokens) for datum in self.data)


@dataclass(frozen=True, kw_only=True)
class OptimStep(ModelOperation):
    """Apply the accumulated gradients and clear them, with AdamW or with Dimuon. Returns `OptimStepOutput`."""

    adam_params: AdamParams = ADAMW
    dimuon_params: DimuonParams | None = None
    """Hyper-parameters of a Dimuon step; with them `adam_params` mean nothing. A model keeps to one of the two."""
    skip_if_not_finite: bool = False
    """Clear gradients whose norm is not finite and change nothing else, instead of applying them."""


@dataclass(frozen=True, kw_only=True)
class SaveCheckpoint(ModelOperation):
    """Write weights, optimizer state and configuration to the folder `path`. Returns `SaveOutput` once it is there."""

    path: str


@dataclass(frozen=True, kw_only=True)
class LoadCheckpoint(ModelOperation):
    """Replace the model's weights by those of a training checkpoint. Creates the model if there is none.

    Pending gradients are dropped. Returns `ModelOutput`.
    """

    path: str
    load_optimizer: bool = True
    """False starts the optimizer anew (zero moments, step 0)."""
    digest: str | None = None
    """Hash of the folder's manifest (sha256, hex), where that is known."""


@dataclass(frozen=True, kw_only=True)
class SaveSnapshot(ModelOperation):
    """Write all that the model is, gradient sums included, to the folder `path`. Returns `SaveOutput` once it is there.

    Everything the model wrote before (checkpoints, versions) is on disk by then, or the snapshot fails.
    """

    path: str


@dataclass(frozen=True, kw_only=True)
class LoadSnapshot(ModelOperation):
    """Make the model that `SaveSnapshot` wrote. Returns `ModelOutput`."""

    path: str
    digest: str
    """Hash of the folder's manifest."""


@dataclass(frozen=True, kw_only=True)
class Publish(ModelOperation):
    """Freeze the current weights as the immutable sampler version `version`, stored in PEFT layout at `path`.

    Returns `SaveOutput`: once it is on disk if `persist`, else at once (the write goes on in the background).
    """

    version: str
    path: str | None
    """None: in memory only, until it is dropped."""
    persist: bool = True


@dataclass(frozen=True, kw_only=True)
class ExportModel(ModelOperation):
    """Write the base model with what the model has learned as a Hugging Face folder. Returns `SaveOutput`."""

    path: str


@dataclass(frozen=True, kw_only=True)
class DeleteModel(ModelOperation):
    """Free the model's trainable state. Published versions and checkpoints stay. Returns `ModelOutput`."""


@dataclass(frozen=True, kw_only=True)
class Rejected(ModelOperation):
    """A request that was refused before it came here, in its place in the model's order.

    It completes with `error`. `gradients="incomplete"` makes the model's next optimizer step fail too: never a step on
    a partial batch. `"dropped"` clears the gradient sums, as that failed step does.
    """

    error: str
    gradients: GradientEffect = "kept"


@dataclass(frozen=True, kw_only=True)
class Sample(Operation):
    """Continue `prompt` `num_samples` times with one published version. Returns `SampleOutput`."""

    version: str | None
    """Id of the version, or None for the base model."""
    path: str | None = None
    """Folder of the version (sampler or training checkpoint folder), read if it is not in memory."""
    prompt: np.ndarray
    """int32 `[prompt]`, not empty."""
    params: SamplingParams
    """`seed` and `max_tokens` are set."""
    options: SamplingOptions = NO_OPTIONS
    num_samples: int = 1
    routing_key: str | None = None
    """Requests of one key, such as a conversation's, have much in common: where there are several engines, each may
    find there what it shares with those before. It changes nothing of what is drawn."""
    tempered_logprobs: bool = False
    """Report log-probabilities of generated tokens at the request's temperature, as trainers want them, not at 1."""
    topk_sample_logprobs: int = 0
    """Most likely tokens to report at each generated place; 0: none."""
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    prompt_logprobs_last_n: int | None = None
    """Number of the prompt's last tokens that the two options above are about; None: all."""
    target_prompt_logprobs: TokenMatrix | None = None
    """int32 token ids `[prompt - 1, K]` to score, row i at prompt position i + 1; -1 scores nothing."""
    prompt_alt_tokens_k: int = 0
    """Draws at the request's temperature, without its filters, for every prompt position after the first."""


@dataclass(frozen=True)
class Progress:
    """Tokens of a sequence that is being sampled, after those that were told before. Its result has them all again."""

    request_id: str
    number: int
    """Number of the sequence among the request's samples."""
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
    """Seconds of the dispatches that computed it, each shared with what was computed beside it: by tokens in training,
    equally in sampling. 0.0 where nobody knows, as of samples that external engines draw."""
