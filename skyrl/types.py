"""Types shared by the server, the trainers and the backends.

Objects that users write as JSON are pydantic models with the names and defaults of the Tinker API. Objects with token
arrays are frozen dataclasses of NumPy arrays. This module imports neither jax nor torch.
"""

import hashlib
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_validator

from skyrl.errors import RequestError
from skyrl.utils.adapters.fitting import Features

LORA_ALPHA = 32.0
"""Numerator of the LoRA scale (scale = alpha / rank) of every model created through the Tinker API."""

TokenTable = tuple[np.ndarray, np.ndarray]
"""Token ids int32 and their log-probabilities float32, both `[positions, k]`."""
OptimizerFamily = Literal["adamw", "dimuon"]
ModuleGroup = Literal["attn", "mlp", "unembed"]
"""Group of linear layers. The switch `train_<group>` of LoraConfig selects it."""
StopReason = Literal["stop", "length"]
ErrorCategory = Literal["user", "server", "unknown"]
GradientEffect = Literal["kept", "incomplete", "dropped"]
"""Effect of a failed request on its model's gradient sums. "kept": unchanged; "incomplete": the request's gradients are
missing, so the next optimizer step must fail; "dropped": the sums were cleared."""


class WireModel(BaseModel):
    """A JSON object of the API. Unknown fields are rejected, so that no option is silently ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class LoraConfig(WireModel):
    """Adapter to train: `LoraConfig` of the Tinker API, plus `alpha` and `optimizer`."""

    rank: int = Field(default=32, ge=0)
    """Inner dimension of each A B pair. 0: train all weights of the base model instead of an adapter."""
    seed: int | None = None
    """Seed of the initial A matrices; None: a random seed."""
    train_unembed: bool = True
    """Adapt the vocabulary projection, even if it is tied to the embedding."""
    train_mlp: bool = True
    """Adapt gate, up and down projections."""
    train_attn: bool = True
    """Adapt query, key, value and output projections."""
    alpha: float = Field(default=LORA_ALPHA, gt=0)
    """Numerator of the scale: the adapter's product is multiplied by alpha / rank."""
    optimizer: OptimizerFamily = Field(default="adamw", exclude_if=lambda family: family == "adamw")
    """Optimizer of the adapter. The field is not stored for AdamW, so that older servers can read the configuration."""

    @classmethod
    def of_groups(cls, rank: int, alpha: float, groups: Collection[str]) -> "LoraConfig":
        """Return the configuration for an adapter file that has tensors of these module groups only."""
        trained = {f"train_{group}": group in groups for group in get_args(ModuleGroup)}
        return cls.model_validate({"rank": rank, "alpha": alpha, **trained})

    @property
    def scaling(self) -> float:
        """alpha / rank; 1 for models without an adapter."""
        return self.alpha / self.rank if self.rank else 1.0

    def selects(self, module: str, group: ModuleGroup) -> bool:
        """Return True if the linear layer `module` of module group `group` is adapted."""
        return {"attn": self.train_attn, "mlp": self.train_mlp, "unembed": self.train_unembed}[group]


class AdapterConfig(LoraConfig):
    """Adapter to train, with options that only trainers offer, not the Tinker API. Module names are PEFT's.

    Modules are selected as in PEFT. A string is a regular expression that matches whole names. The members of a tuple
    are names or ends of names.
    """

    target_modules: str | tuple[str, ...] | None = None
    """Modules to adapt, instead of those selected by train_*. None: use train_*."""
    exclude_modules: str | tuple[str, ...] | None = None
    """Modules not to adapt."""
    init_method: Literal["kaiming", "gaussian"] = "kaiming"
    """Distribution of the initial A: uniform in +-1 / sqrt(in), or N(0, 1 / rank^2). B is zero."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout probability of adapter inputs in passes with gradients; the remaining inputs are divided by 1 - dropout.
    The masks depend on the seed, the number of optimizer steps and the data of the pass."""

    def selects(self, module: str, group: ModuleGroup) -> bool:
        if self.exclude_modules is not None and matches_module(self.exclude_modules, module):
            return False
        if self.target_modules is not None:
            return matches_module(self.target_modules, module)
        return super().selects(module, group)

    @field_validator("target_modules", "exclude_modules")
    @classmethod
    def _is_expression(cls, value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        if not isinstance(value, str):
            return value
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"it is no regular expression ({error}); use one such as .*\\.(q_proj|v_proj)") from None
        return value


def matches_module(selection: str | tuple[str, ...], module: str) -> bool:
    """Return True if a regular expression matches the whole module name, or if a tuple has the name or its end."""
    if isinstance(selection, str):
        return re.fullmatch(selection, module) is not None
    return module in selection or module.endswith(tuple(f".{name}" for name in selection))


LARGEST_FLOAT32 = 3.4028234663852886e38
Float32 = Annotated[float, Field(ge=0, le=LARGEST_FLOAT32)]
"""A number that is finite and not negative in float32, the dtype of optimizers."""


class AdamParams(WireModel):
    """Hyper-parameters of one optimizer step: `torch.optim.AdamW` with the API's defaults."""

    learning_rate: Float32 = 1e-4
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-12, gt=0)
    weight_decay: Float32 = 0.0
    """Decoupled decay: the weights shrink by the factor 1 - learning_rate * weight_decay."""
    grad_clip_norm: Float32 = 0.0
    """Maximum global gradient norm, as in `torch.nn.utils.clip_grad_norm_`. 0: no clipping."""


class DimuonParams(WireModel):
    """Hyper-parameters of one Dimuon step; see `skyrl.backends.common.dimuon`."""

    type: Literal["dimuon"] = "dimuon"
    learning_rate: Float32
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the momentum: momentum = beta1 * momentum + (1 - beta1) * gradient."""
    grad_clip_norm: float = Field(default=0.0, le=LARGEST_FLOAT32)
    """Maximum global gradient norm, as for AdamW. 0 and below: no clipping."""


class SamplingParams(WireModel):
    """Sampling parameters of the API. Limits are per sequence."""

    max_tokens: int | None = Field(default=None, ge=1)
    """Maximum number of generated tokens; None: up to the end of the context."""
    seed: int | None = None
    """Any int64. None: a random seed, drawn when the request is accepted. Sample i of a request uses (seed, i)."""
    stop: str | list[str] | list[int] | None = None
    """Strings or token ids that end a sequence, in addition to EOS. None: only EOS; []: never stop."""
    temperature: float = Field(default=1.0, ge=0)
    """Temperature; 0 selects the most likely token."""
    top_k: int = Field(default=-1, ge=-1)
    """Sample only from the k most likely tokens. -1 and 0: off."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample only from the smallest set of most likely tokens with a total probability of at least top_p. 1: off."""


def option(default: float, rule: str, is_valid: Callable[[float], bool]) -> Any:
    """Return a dataclass field with a range.

    Args:
        default: Value that has no effect.
        rule: Description of the range, for messages.
        is_valid: Returns True for values in the range.
    """
    return field(default=default, metadata={"rule": rule, "is_valid": is_valid})


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Sampling options beyond `SamplingParams`, which has the options of the API. By default, all are off.

    Options have vLLM's names. To add one, add a field here. If it needs an array on the device, add it to `RowOptions`
    of the samplers, too, and apply it in `skyrl.tx.sampling` and in `skyrl.backends.torch.sampling.drawing`.

    `BackendInfo.sampling_options` lists the options that a backend supports. These options never affect returned
    log-probabilities, which are those of the model itself.
    """

    min_p: float = option(0.0, "between 0 (off) and 1", lambda value: 0 <= value <= 1)
    """Sample only from tokens with at least this fraction of the highest probability. Applies after top_k and top_p."""
    min_tokens: int = 0
    """Minimum number of generated tokens. Until then, EOS and the request's stop tokens are not drawn, and
    stop strings are ignored."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a sequence, in addition to `SamplingParams.stop`. They apply even if `stop` is []."""
    repetition_penalty: float = option(1.0, "above 0 and at most 100; 1 is off", lambda value: 0 < value <= 100)
    """Penalty for tokens in the prompt or generated before: divides positive logits, and multiplies other logits."""
    presence_penalty: float = option(0.0, "between -2 and 2", lambda value: -2 <= value <= 2)
    """Subtracted from the logits of tokens that were generated before."""
    frequency_penalty: float = option(0.0, "between -2 and 2", lambda value: -2 <= value <= 2)
    """Subtracted from the logit of a token for each time that it was generated before.

    The three penalties apply in this order, before the temperature and all filters."""

    @property
    def given(self) -> dict[str, Any]:
        """Options that are not off, by name."""
        return {name: value for name, value in vars(self).items() if value != getattr(SamplingOptions, name)}

    @property
    def changes_distribution(self) -> bool:
        """True if an option changes the probabilities of tokens. Stop tokens do not."""
        return bool(self.given.keys() - {"stop_token_ids"})

    @property
    def penalises(self) -> bool:
        """True if a penalty is set, so that previous tokens matter."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


@dataclass(frozen=True)
class Datum:
    """One training sequence. Position i of `tokens` predicts position i of `target_tokens` (already shifted)."""

    tokens: np.ndarray
    """int32 `[tokens]`."""
    loss_fn_inputs: dict[str, np.ndarray]
    """Inputs by name: `target_tokens` int64 and float32 inputs, each `[tokens]` or `[tokens, K]`."""
    sampled: np.ndarray | None = None
    """bool `[tokens]`: True for targets that a sampler generated. None: unknown."""


@dataclass(frozen=True)
class ForwardBackwardOutput:
    """Result of a pass, datum by datum in request order."""

    loss_fn_outputs: list[dict[str, np.ndarray]]
    """Outputs of each datum by name, all float32. `elementwise_loss` is always present. A named loss adds `logprobs`;
    an objective adds its `outputs`. `logprobs` has the shape of the targets; all other outputs are `[tokens]`."""
    metrics: dict[str, float]
    """Metrics with keys `name:reduction`; `loss:sum` is always present."""
    loss_fn_output_type: str = "ArrayRecord"


@dataclass(frozen=True)
class OptimStepInput:
    """Argument of `AbstractBackend.optim_step`."""

    adam_params: AdamParams


@dataclass(frozen=True)
class OptimStepOutput:
    """Metrics of one optimizer step: `skyrl.ai/grad_norm` (before clipping), `skyrl.ai/learning_rate`, and for
    Dimuon also `skyrl.ai/dimuon_formula`."""

    metrics: dict[str, float] = field(default_factory=dict)


def version_hash(version: str) -> str:
    """Return the hash of a published version, in 16 hexadecimal digits. Versions are never published again."""
    return hashlib.sha256(version.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Origin:
    """Weights that generated a run of consecutive tokens, as recorded by the sampler."""

    first: int
    """Index in the sequence of the run's first token. The run ends where the next run begins."""
    version: str | None
    """Published version; None: the base model."""
    base: str
    """Content id of the base weights, as in `BackendInfo.base_id`."""
    engine: str | None = None
    """Address of the engine that generated the tokens; None: the backend itself."""

    @property
    def fingerprint(self) -> str:
        """Hash of the weights: that of the base model and, for a version, `version_hash` after a hyphen."""
        return self.base if self.version is None else f"{self.base}-{version_hash(self.version)}"


@dataclass(frozen=True)
class GeneratedSequence:
    """One sample. `tokens` int32 `[n]` includes the stop token; `logprobs` float32 `[n]` in nats at temperature 1."""

    tokens: np.ndarray
    logprobs: np.ndarray
    stop_reason: StopReason
    topk_logprobs: TokenTable | None = None
    """The k most likely tokens at each position, most likely first; log-probabilities at temperature 1. `[n, k]`."""
    origins: tuple[Origin, ...] = ()
    """Weights of each run of tokens, in order."""

    @property
    def fingerprint(self) -> str:
        """Hashes of the weights that generated the tokens, in this order, with commas between them."""
        return ",".join(dict.fromkeys(origin.fingerprint for origin in self.origins))


@dataclass(frozen=True)
class TokenMatrix:
    """Matrix of token ids, or of one number per token, in a dense or CSR layout. A cell is a stored entry."""

    values: np.ndarray
    """Value of each cell, in the order of the layout: `[cells]`."""
    shape: tuple[int, int]
    crow_indices: np.ndarray | None = None
    """int64 `[rows + 1]`, offsets into `values`. None: dense."""
    col_indices: np.ndarray | None = None
    """int64 `[cells]`: column of each value. None: dense."""

    @property
    def rows(self) -> np.ndarray:
        """Row of each cell, ascending."""
        counts = self.shape[1] if self.crow_indices is None else np.diff(self.crow_indices)
        return np.repeat(np.arange(self.shape[0]), counts)


@dataclass(frozen=True)
class SampleOutput:
    """All samples of one prompt."""

    sequences: list[GeneratedSequence]
    prompt_logprobs: np.ndarray | None = None
    """float32 `[prompt]`; NaN for tokens that are not scored, such as the first."""
    topk_prompt_logprobs: TokenTable | None = None
    """`[prompt, k]`, most likely first. Rows that are not scored, such as row 0, are (0, -99999.0)."""
    prompt_cache_hit_tokens: int = 0
    target_prompt_logprobs: TokenMatrix | None = None
    """Log-probabilities of the requested targets: float32, in the request's layout. 0.0 for cells without a token."""
    prompt_alt_tokens: TokenTable | None = None
    """`[prompt - 1, k]`: row i is drawn from the model's distribution over the token at prompt position i + 1."""

    @property
    def nbytes(self) -> int:
        """Total bytes of generated tokens, token tables and target log-probabilities."""
        tables = [self.topk_prompt_logprobs, self.prompt_alt_tokens, *(one.topk_logprobs for one in self.sequences)]
        arrays = [one.tokens for one in self.sequences] + [array for table in tables if table for array in table]
        targets = 0 if self.target_prompt_logprobs is None else self.target_prompt_logprobs.values.nbytes
        return targets + sum(array.nbytes for array in arrays)


@dataclass(frozen=True)
class SaveOutput:
    """A saved checkpoint or a published ephemeral version. `path` is empty if the version is only in memory."""

    path: str
    size_bytes: int | None = None
    digest: str | None = None
    """sha256 (hex) of the folder's manifest. None if the files are not written yet."""


@dataclass(frozen=True)
class ModelOutput:
    """A model that was created, loaded or deleted."""

    model_id: str


@dataclass(frozen=True)
class ErrorResponse:
    """A failed operation. `status` is the category of the error; "user" errors are reported verbatim."""

    error: str
    status: ErrorCategory = "server"
    gradients: GradientEffect = "kept"
    of_storage: bool = field(default=False, compare=False)
    """True if a file is missing, damaged or cannot be written."""


Result = ForwardBackwardOutput | OptimStepOutput | SampleOutput | SaveOutput | ModelOutput | ErrorResponse


@dataclass(frozen=True)
class ModelMetadata:
    """Description of a loaded model for callers of the backend."""

    adapter_index: int
    lora_config: LoraConfig


RequestSlice = tuple[str, str, int, int]
"""(request_id, model_id, start, end) of the rows of one request in a prepared batch."""


@dataclass(frozen=True)
class PreparedModelPassBatch:
    """Passes of several models and requests as columns, with one entry per sequence."""

    all_input_ids: list[list[int]]
    all_targets: list[list[int]]
    all_token_weights: list[list[float]]
    all_sampling_logprobs: list[list[float]]
    all_advantages: list[list[float]]
    all_model_ids: list[str]
    all_loss_fns: list[str]
    all_loss_fn_configs: list[dict[str, float] | None]
    request_batch_slices: list[RequestSlice]
    all_loss_fn_inputs: list[dict[str, list[float]]] = field(default_factory=list)
    """Loss inputs of each row for which there is no column above, by API name, such as `sequence_ratio_mask`. Empty: no
    row has such inputs."""


@dataclass(frozen=True)
class PreparedSampleBatch:
    """Prompts of several requests as columns, with one entry per sequence to generate."""

    all_prompts: list[list[int]]
    all_sampling_params: list[SamplingParams]
    all_model_ids: list[str]
    """Model of each row. Empty string: the base model."""
    all_checkpoint_ids: list[str]
    request_batch_slices: list[tuple[str, str, int, int, bool]]
    """(request_id, model_id, start, end, needs_prompt_logprobs)."""


@dataclass(frozen=True)
class BackendInfo:
    """Description of a loaded backend, for validation of requests and for API responses."""

    base_model: str
    """Name of the base model: a hub id, or the absolute path of a local folder."""
    architecture: str
    vocab_size: int
    max_context_length: int
    """Maximum length of sequences in tokens, for training and sampling."""
    max_lora_rank: int
    tokenizer_path: str
    """Folder of the tokenizer on this machine."""
    samples_at_a_time: int = 2**18
    """Limit on the samples of one tenant that are sent to the backend at a time, in tokens (prompts plus possible
    generated tokens). It keeps the backend busy with a single tenant. It also limits the results in memory."""
    sampling_options: frozenset[str] = frozenset()
    """Names of supported `SamplingOptions`; requests with other options are rejected."""
    active_parameters: int | None = None
    """Number of base model parameters used per token; None if unknown, because the base model has no weight files."""
    adaptable: Mapping[str, Features] = field(default_factory=dict)
    """Adaptable linear layers, by their names in Hugging Face's models. Empty: adapters cannot be imported."""
    samples: bool = True
    """False if models can only be trained, because their layers cannot use the backend's cache."""
    base_id: str = ""
    """Content id of the base weights: equal for equal configurations and weights, wherever they are stored."""
    colocated: bool = False
    """True if training and sampling share devices and take turns."""

    def check_samples(self) -> None:
        """Raise `RequestError` if the base model can only be trained."""
        if not self.samples:
            raise RequestError(
                f"base_model={self.base_model}: {self.architecture} is trained here and not sampled, as it needs more "
                "of earlier tokens than a plain cache of keys and values (attention of transformers' interface in all "
                "layers, and no other state); save the weights, and sample them elsewhere"
            )
