"""Types shared by the server, the trainers and the backends; one definition of each thing.

Objects that users write as JSON are pydantic models with the wire names and defaults of the Tinker API. Objects that
carry token arrays are frozen dataclasses of NumPy arrays. Nothing here imports jax or torch.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_validator

from skyrl.errors import RequestError
from skyrl.utils.adapters.fitting import Features

LORA_ALPHA = 32.0
"""Numerator of the LoRA scale (scale = alpha / rank) of every model made through the Tinker API."""

TokenTable = tuple[np.ndarray, np.ndarray]
"""Token ids int32 and their log-probabilities float32, of one shape `[places, k]`."""
OptimizerFamily = Literal["adamw", "dimuon"]
ModuleGroup = Literal["attn", "mlp", "unembed"]
"""Switch of LoraConfig's train_* that selects a linear map."""
StopReason = Literal["stop", "length"]
ErrorCategory = Literal["user", "server", "unknown"]
GradientEffect = Literal["kept", "incomplete", "dropped"]
"""Effect of a failed request on its model's gradient sums: as they were; lacking its share, so that the next
optimizer step must fail; or cleared."""


class WireModel(BaseModel):
    """A JSON object of the API. Unknown fields are refused, so that no option is silently ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class LoraConfig(WireModel):
    """Adapter to train. `LoraConfig` of the Tinker API, plus `alpha` and `optimizer`."""

    rank: int = Field(default=32, ge=0)
    """Inner dimension of each A B pair. 0 trains all weights of the base model instead of an adapter."""
    seed: int | None = None
    """Seed of the initial A matrices; None draws one."""
    train_unembed: bool = True
    """Adapt the vocabulary projection (also where it is tied to the embedding)."""
    train_mlp: bool = True
    """Adapt gate, up and down projections."""
    train_attn: bool = True
    """Adapt query, key, value and output projections."""
    alpha: float = Field(default=LORA_ALPHA, gt=0)
    """The adapter's product is multiplied by alpha / rank."""
    optimizer: OptimizerFamily = Field(default="adamw", exclude_if=lambda family: family == "adamw")
    """Optimizer that trains it. What is stored of models with AdamW does not name it: older servers read that too."""

    @classmethod
    def of_groups(cls, rank: int, alpha: float, groups: Collection[str]) -> "LoraConfig":
        """The configuration of an adapter that was found in files, with tensors of these groups."""
        trained = {f"train_{group}": group in groups for group in get_args(ModuleGroup)}
        return cls.model_validate({"rank": rank, "alpha": alpha, **trained})

    @property
    def scaling(self) -> float:
        """alpha / rank; 1 where there is no adapter."""
        return self.alpha / self.rank if self.rank else 1.0

    def selects(self, module: str, group: ModuleGroup) -> bool:
        """True if the linear map of that name, which is in that group, is adapted."""
        return {"attn": self.train_attn, "mlp": self.train_mlp, "unembed": self.train_unembed}[group]


class AdapterConfig(LoraConfig):
    """Adapter with what a trainer may ask for beyond the Tinker API, where PEFT's names are used.

    Names of modules are regular expressions of whole names, as PEFT reads them where they are one string.
    """

    target_modules: str | None = None
    """Modules that are adapted, in the place of those that train_* select. None: these."""
    exclude_modules: str | None = None
    """Modules that are not."""
    init_method: Literal["kaiming", "gaussian"] = "kaiming"
    """Initial A: uniform in +-1 / sqrt(in), or from N(0, 1 / rank^2). B is zero."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability that a number which an adapter reads is zero in a pass that makes gradients, where the others are
    divided by 1 - dropout. What is zero follows from the seed, the optimizer steps and the data of the pass."""

    def selects(self, module: str, group: ModuleGroup) -> bool:
        if self.exclude_modules is not None and re.fullmatch(self.exclude_modules, module):
            return False
        if self.target_modules is not None:
            return re.fullmatch(self.target_modules, module) is not None
        return super().selects(module, group)

    @field_validator("target_modules", "exclude_modules")
    @classmethod
    def _is_expression(cls, value: str | None) -> str | None:
        if value is None:
            return None
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"it is no regular expression ({error}); use one such as .*\\.(q_proj|v_proj)") from None
        return value


LARGEST_FLOAT32 = 3.4028234663852886e38
Float32 = Annotated[float, Field(ge=0, le=LARGEST_FLOAT32)]
"""A number that is finite and not negative as a float32, which optimizers compute in."""


class AdamParams(WireModel):
    """Hyper-parameters of one optimizer step: `torch.optim.AdamW` with the API's defaults."""

    learning_rate: Float32 = 1e-4
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-12, gt=0)
    weight_decay: Float32 = 0.0
    """Decoupled decay: the weights shrink by the factor 1 - learning_rate * weight_decay."""
    grad_clip_norm: Float32 = 0.0
    """Largest global gradient norm, as `torch.nn.utils.clip_grad_norm_`. 0 does not clip."""


class DimuonParams(WireModel):
    """Hyper-parameters of one Dimuon step, see `skyrl.backends.common.dimuon`."""

    type: Literal["dimuon"] = "dimuon"
    learning_rate: Float32
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Share of the momentum that stays; it takes 1 - beta1 of the gradient."""
    grad_clip_norm: float = Field(default=0.0, le=LARGEST_FLOAT32)
    """Largest global gradient norm, as of AdamW. 0 and below do not clip."""


class SamplingParams(WireModel):
    """Options for continuing a prompt. Limits are per sequence."""

    max_tokens: int | None = Field(default=None, ge=1)
    """Tokens to generate at most; None fills the context."""
    seed: int | None = None
    """Any int64. None draws one when the request is accepted. Sample i of a request uses (seed, i)."""
    stop: str | list[str] | list[int] | None = None
    """Strings or token ids that end a sequence, beside EOS. None stops at EOS only; [] never stops."""
    temperature: float = Field(default=1.0, ge=0)
    """0 takes the most likely token."""
    top_k: int = Field(default=-1, ge=-1)
    """Sample among the k most likely tokens. -1 and 0 are off."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample among the fewest tokens whose probabilities reach top_p. 1 is off."""


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Ways to continue a prompt beyond `SamplingParams`, whose names are the wire's. As each field stands, it is off.

    A backend says in `BackendInfo.sampling_options` which it serves. Log-probabilities are the model's own whatever
    these change of what is drawn.
    """

    min_p: float = 0.0
    """Sample among tokens at least this fraction as likely as the likeliest. After top_k and top_p."""
    min_tokens: int = 0
    """Tokens after which a sequence may stop: until there are so many, no stop token (EOS and those listed) is drawn,
    and no stop string counts."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a sequence, beside `SamplingParams.stop`, whatever that is."""
    repetition_penalty: float = 1.0
    """Logits of tokens that were there before, in the prompt too, are divided by it if positive, else multiplied."""
    presence_penalty: float = 0.0
    """Is taken from the logits of tokens that were generated before."""
    frequency_penalty: float = 0.0
    """Is taken from a token's logit for each time that it was generated before.

    The three apply in this order, before the temperature and everything that filters."""

    @property
    def given(self) -> dict[str, Any]:
        """Options that are not off, by name."""
        return {name: value for name, value in vars(self).items() if value != getattr(SamplingOptions, name)}

    @property
    def penalises(self) -> bool:
        """True if it matters which tokens were there before."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


@dataclass(frozen=True)
class Datum:
    """One training sequence. Position i of `tokens` predicts position i of `target_tokens` (already shifted)."""

    tokens: np.ndarray
    """int32 `[tokens]`."""
    loss_fn_inputs: dict[str, np.ndarray]
    """By name: `target_tokens` int64 and float32 inputs, each `[tokens]` or `[tokens, K]`."""
    sampled: np.ndarray | None = None
    """bool `[tokens]`: whether a target was drawn by a sampler. None: nobody said."""


@dataclass(frozen=True)
class ForwardBackwardOutput:
    """Result of a pass, datum by datum in request order."""

    loss_fn_outputs: list[dict[str, np.ndarray]]
    """Per datum float32 `elementwise_loss` `[tokens]` and what the loss is computed from: `logprobs` (shape of its
    targets), or with an objective its `outputs`, `[tokens]` each."""
    metrics: dict[str, float]
    """Keys are `name:reduction`; `loss:sum` is always there."""
    loss_fn_output_type: str = "ArrayRecord"


@dataclass(frozen=True)
class OptimStepInput:
    """The documented argument of `AbstractBackend.optim_step`."""

    adam_params: AdamParams


@dataclass(frozen=True)
class OptimStepOutput:
    """Metrics of one optimizer step: `skyrl.ai/grad_norm` (before clipping), `skyrl.ai/learning_rate`, and of Dimuon
    `skyrl.ai/dimuon_formula`."""

    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Origin:
    """Weights that a run of generated tokens was drawn from, stamped by the sampler that drew them."""

    first: int
    """Place of the run's first token in its sequence. It ends where the next run begins."""
    version: str | None
    """Published version; None is the base model."""
    base: str
    """Content id of the base weights below it, as `BackendInfo.base_id`."""
    engine: str | None = None
    """Address of the engine that drew them; None: the backend itself."""


@dataclass(frozen=True)
class GeneratedSequence:
    """One sample. `tokens` int32 `[n]` includes the stop token; `logprobs` float32 `[n]` are untempered, in nats."""

    tokens: np.ndarray
    logprobs: np.ndarray
    stop_reason: StopReason
    topk_logprobs: TokenTable | None = None
    """The k most likely tokens at each place `[n, k]`, most likely first, untempered."""
    origins: tuple[Origin, ...] = ()
    """Weights that each run of its tokens was drawn from, in the order of the runs. Not sent to the API's clients."""


@dataclass(frozen=True)
class TokenMatrix:
    """Token ids, or a number of each token, by row: dense, or the cells that a CSR layout lists."""

    values: np.ndarray
    """`[cells]`, in the order of the layout."""
    shape: tuple[int, int]
    crow_indices: np.ndarray | None = None
    """int64 `[rows + 1]`, offsets into `values`. None: dense."""
    col_indices: np.ndarray | None = None
    """int64 `[cells]`."""

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
    """float32 `[prompt]`; those that are not scored, the first among them, are NaN."""
    topk_prompt_logprobs: TokenTable | None = None
    """`[prompt, k]`, most likely first. Rows that are not scored, row 0 among them, are (0, -99999.0)."""
    prompt_cache_hit_tokens: int = 0
    target_prompt_logprobs: TokenMatrix | None = None
    """float32, in the layout of the request; 0.0 where it named no token."""
    prompt_alt_tokens: TokenTable | None = None
    """`[prompt - 1, k]`: row i holds draws from the distribution over prompt token i + 1."""

    @property
    def nbytes(self) -> int:
        """Bytes of its tokens and tables."""
        tables = [self.topk_prompt_logprobs, self.prompt_alt_tokens, *(one.topk_logprobs for one in self.sequences)]
        arrays = [one.tokens for one in self.sequences] + [array for table in tables if table for array in table]
        targets = 0 if self.target_prompt_logprobs is None else self.target_prompt_logprobs.values.nbytes
        return targets + sum(array.nbytes for array in arrays)


@dataclass(frozen=True)
class SaveOutput:
    """A checkpoint that is on disk (or, for an ephemeral version, published). No path: it is in memory only."""

    path: str
    size_bytes: int | None = None
    digest: str | None = None
    """sha256 (hex) of the folder's manifest. None where the files are not written yet."""


@dataclass(frozen=True)
class ModelOutput:
    """A model that was created, loaded or deleted."""

    model_id: str


@dataclass(frozen=True)
class ErrorResponse:
    """A failed operation. `category` tells whose fault it is; "user" errors are reported word for word."""

    error: str
    status: ErrorCategory = "server"
    gradients: GradientEffect = "kept"
    of_storage: bool = field(default=False, compare=False)
    """True if a file is missing, damaged or cannot be written."""


Result = ForwardBackwardOutput | OptimStepOutput | SampleOutput | SaveOutput | ModelOutput | ErrorResponse


@dataclass(frozen=True)
class ModelMetadata:
    """A loaded model as seen from outside the backend."""

    adapter_index: int
    lora_config: LoraConfig


RequestSlice = tuple[str, str, int, int]
"""(request_id, model_id, start, end): the rows of one request in a prepared batch."""


@dataclass(frozen=True)
class PreparedModelPassBatch:
    """Passes of several models and requests as columns, one entry per sequence."""

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
    """Inputs that have no column of their own, by wire name, such as `sequence_ratio_mask`. Empty: no row has any."""


@dataclass(frozen=True)
class PreparedSampleBatch:
    """Prompts of several requests as columns, one entry per sequence to generate."""

    all_prompts: list[list[int]]
    all_sampling_params: list[SamplingParams]
    all_model_ids: list[str]
    """Empty strings sample the base model."""
    all_checkpoint_ids: list[str]
    request_batch_slices: list[tuple[str, str, int, int, bool]]
    """(request_id, model_id, start, end, needs_prompt_logprobs)."""


@dataclass(frozen=True)
class BackendInfo:
    """Facts of a loaded backend for the doors to check requests and to answer questions about it."""

    base_model: str
    """Name to report: a hub id, or the absolute path of a local folder."""
    architecture: str
    vocab_size: int
    max_context_length: int
    """Longest sequence (tokens) that can be trained on or sampled."""
    max_lora_rank: int
    tokenizer_path: str
    """Folder of the tokenizer on this machine."""
    samples_at_a_time: int = 2**18
    """Tokens of samples of one tenant (prompts, and what may be generated) that the backend is given at a time: enough
    to be busy with one tenant alone. Results of no more than these are in memory."""
    sampling_options: frozenset[str] = frozenset()
    """Names of the `SamplingOptions` that are served; samples with others are refused."""
    active_parameters: int | None = None
    """Parameters of the base model that a token passes through; None where its weights have no files."""
    adaptable: Mapping[str, Features] = field(default_factory=dict)
    """Linear maps that adapters may be on, by their names in Hugging Face's models. Empty: none are imported."""
    samples: bool = True
    """False if models are trained only: their layers cannot read earlier tokens from the backend's cache."""
    base_id: str = ""
    """Content id of the base weights: equal for equal configurations and numbers, wherever they are stored."""
    colocated: bool = False
    """True if training and sampling need devices that only one of them can use at a time, and so take turns."""

    def check_samples(self) -> None:
        """Raise `RequestError` for a base model that is trained only."""
        if not self.samples:
            raise RequestError(
                f"base_model={self.base_model}: {self.architecture} is trained here and not sampled, as it needs more "
                "of earlier tokens than a plain cache of keys and values (attention of transformers' interface in all "
                "layers, and no other state); save the weights, and sample them elsewhere"
            )
