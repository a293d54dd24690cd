"""JSON requests and responses of the API, one class each, for all supported SDK versions.

Older clients omit fields or send explicit nulls; both mean the default. The constant field `type` is accepted and
ignored. Unknown fields are rejected by name. Options of the protocol that are not supported yet are also declared as
fields. `unserved` returns an error if one of them is set, and the rest of the server never reads them.
"""

from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    JsonValue,
    StrictFloat,
    StrictInt,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from skyrl.tinker.wire.parsing import Int64
from skyrl.types import (
    AdamParams,
    DimuonParams,
    ErrorCategory,
    LoraConfig,
    OptimizerFamily,
    SamplingParams,
    WireModel,
)

# -- requests ---------------------------------------------------------------------------------------------------------

FREE_FORM = "user_metadata"
"""Field whose nulls are user data and do not mean defaults."""


def _array_of_integers(value: Any, read: ValidatorFunctionWrapHandler) -> Any:
    if isinstance(value, np.ndarray) and value.dtype.kind != "i":
        at = int(np.argmax(value != np.trunc(value)))
        raise ValueError(f"entry {at} is {value[at]}; send integers only")
    return value if isinstance(value, np.ndarray) else read(value)


def _array_of_numbers(value: Any, read: ValidatorFunctionWrapHandler) -> Any:
    return value if isinstance(value, np.ndarray) else read(value)


Integers = Annotated[list[StrictInt], Field(fail_fast=True), WrapValidator(_array_of_integers)]
Numbers = Annotated[list[StrictInt | StrictFloat], Field(fail_fast=True), WrapValidator(_array_of_numbers)]
"""Lists that report only their first bad entry. `json_numbers` makes long lists arrays, and these stay arrays."""


class RequestModel(WireModel):
    """A request. `type` is a constant of each endpoint and is ignored."""

    type: str | None = None

    UNSERVED: ClassVar[dict[str, str]] = {}
    """Fields that are not supported yet and must have their default. The values are the advice for the error."""

    @model_validator(mode="before")
    @classmethod
    def _nulls_mean_defaults(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        nested = {
            key: {k: v for k, v in child.items() if v is not None}
            for key, child in value.items()
            if isinstance(child, dict) and key != FREE_FORM
        }
        return {key: child for key, child in {**value, **nested}.items() if child is not None}

    def unserved(self) -> str | None:
        """Return the error for the first unsupported option that is set, or None."""
        for name, way_out in self.UNSERVED.items():
            value = getattr(self, name)
            if value != type(self).model_fields[name].default:
                return f"{name}={_shortened(value)} is not served yet; {way_out}"
        return None


class OptimizerConfig(WireModel):
    """Optimizer family of a model."""

    type: OptimizerFamily = "adamw"
    version: Literal[1] | None = None

    @classmethod
    def of(cls, family: OptimizerFamily) -> "OptimizerConfig":
        """Return the configuration that clients receive for an optimizer family."""
        return cls(type=family, version=1 if family == "dimuon" else None)


MIN_TTL_S, MAX_TTL_S = 3600, 315_360_000
"""Limits of a time to live in seconds: an hour and ten years."""
TtlSeconds = Annotated[int, Field(ge=MIN_TTL_S, le=MAX_TTL_S)]


class CreateSessionRequest(RequestModel):
    """Request of `create_session`."""

    tags: list[str] = Field(default_factory=list)
    user_metadata: dict[str, JsonValue] = Field(default_factory=dict)
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class SessionHeartbeatRequest(RequestModel):
    """Request of `session_heartbeat`."""

    session_id: str


class CustomLossInput(WireModel):
    """An input of a traced loss."""

    name: str
    rank: int


class CustomLossNode(WireModel):
    """A node of a traced loss, with the fields of a torch.fx node. Arguments are in the SDK's encoding."""

    op: str
    name: str
    target: str
    args: list[JsonValue] = Field(default_factory=list)
    kwargs: dict[str, JsonValue] = Field(default_factory=dict)


class CustomLossGraph(WireModel):
    """A traced loss: a serialized graph."""

    format: Literal[1] = 1
    nodes: list[CustomLossNode]


class CreateCustomLossRequest(RequestModel):
    """Request of `create_custom_loss`."""

    session_id: str
    custom_loss_seq_id: Int64
    name: str = Field(max_length=200)
    inputs: list[CustomLossInput]
    graph: CustomLossGraph


class FinishReason(WireModel):
    """Reason why a session ended."""

    type: Literal["success", "errored", "interrupted"]


class FinishSessionRequest(RequestModel):
    """Request of `sessions/{session_id}/finish`."""

    reason: FinishReason | None = None
    detail: str | None = None


def _only_options_of_the_api(value: Any) -> Any:
    if isinstance(value, dict) and "alpha" in value:
        raise ValueError("alpha is not an option of the API (it is always 32); remove it")
    if isinstance(value, dict) and "optimizer" in value:
        raise ValueError("optimizer is not an option of the adapter; send optimizer_config beside it")
    return value


def _is_trainable(value: LoraConfig) -> LoraConfig:
    if not (value.train_attn or value.train_mlp or value.train_unembed):
        raise ValueError("nothing to train; set one of train_attn, train_mlp, train_unembed to true")
    if value.seed is not None and not -(2**63) <= value.seed < 2**63:
        raise ValueError(f"seed={value.seed} does not fit into 64 bits; use a value from -2**63 to 2**63-1")
    return value


ApiLoraConfig = Annotated[LoraConfig, BeforeValidator(_only_options_of_the_api), AfterValidator(_is_trainable)]
"""`LoraConfig` of the API, without alpha and without the optimizer, which is a separate field of the request."""


class CreateModelRequest(RequestModel):
    """Request of `create_model`. It counts as the request with seq_id 0 of the new model."""

    session_id: str
    model_seq_id: Int64
    base_model: str
    lora_config: ApiLoraConfig = LoraConfig.model_validate({})
    user_metadata: dict[str, JsonValue] = Field(default_factory=dict)
    optimizer_config: OptimizerConfig = OptimizerConfig()


class ModelRequest(RequestModel):
    """A request about one model."""

    model_id: str


class GetInfoRequest(ModelRequest):
    """Request of `get_info`."""


class UnloadModelRequest(ModelRequest):
    """Request of `unload_model`. It has no seq_id and runs after all requests of the model that arrived before it."""


class OrderedRequest(ModelRequest):
    """A request with a position in its model's order."""

    seq_id: Int64


class TensorData(RequestModel):
    """A tensor as JSON. `data` is a flat list of all values, or the values of a CSR matrix."""

    data: Numbers
    dtype: Literal["int64", "float32"]
    shape: Integers | None = None
    sparse_crow_indices: Integers | None = None
    sparse_col_indices: Integers | None = None


class ModelInputChunk(RequestModel):
    """A part of a model input. `type` is its kind. Old clients omit `type`; then the set fields determine the kind."""

    tokens: Integers | None = None
    data: str | None = None
    location: str | None = None
    dmel: str | None = None
    format: str | None = None
    expected_tokens: int | None = None

    KINDS: ClassVar = {"tokens": "encoded_text", "data": "image", "location": "image_asset_pointer", "dmel": "dmel"}

    @property
    def kind(self) -> str:
        """`type`. If the client omitted `type`, the kind to which the set fields belong."""
        if self.type is not None:
            return self.type
        return next((kind for field, kind in self.KINDS.items() if getattr(self, field) is not None), "unknown")

    @model_validator(mode="after")
    def _has_one_content(self) -> "ModelInputChunk":
        given = [field for field in self.KINDS if getattr(self, field) is not None]
        if len(given) > 1:
            raise ValueError(f"a chunk with both {given[0]} and {given[1]}; send them as two chunks")
        return self


class ModelInput(RequestModel):
    """A prompt or training sequence: the concatenation of its chunks."""

    chunks: Annotated[list[ModelInputChunk], Field(fail_fast=True)] = Field(default_factory=list)


class DatumInput(RequestModel):
    """A training sequence."""

    model_input: ModelInput
    loss_fn_inputs: dict[str, TensorData]


MAX_DATUMS = 16384
"""Maximum number of sequences in one request. Clients send at most 1024."""


class PassInput(RequestModel):
    """Input of a pass."""

    data: Annotated[list[DatumInput], Field(fail_fast=True, max_length=MAX_DATUMS)]
    loss_fn: str
    loss_fn_config: dict[str, float | str] = Field(default_factory=dict)


class ForwardBackwardRequest(OrderedRequest):
    """Request of `forward_backward` as JSON (clients before 0.25)."""

    forward_backward_input: PassInput


class ForwardRequest(OrderedRequest):
    """Request of `forward`."""

    forward_input: PassInput


class OptimStepRequest(OrderedRequest):
    """Request of `optim_step`."""

    adam_params: AdamParams = AdamParams.model_validate({})
    optimizer_params: DimuonParams | None = None
    """Parameters of a model whose optimizer is not AdamW."""


class SaveWeightsRequest(OrderedRequest):
    """Request of `save_weights`. `path` is the checkpoint's name."""

    path: str
    ttl_seconds: TtlSeconds | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveWeightsForSamplerRequest(OrderedRequest):
    """Request of `save_weights_for_sampler`, under a name (`path`) or for a new sampler (`sampling_session_seq_id`)."""

    path: str | None = None
    sampling_session_seq_id: Int64 | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: TtlSeconds | None = None
    user_metadata: dict[str, str] | None = None

    @model_validator(mode="after")
    def _has_one_destination(self) -> "SaveWeightsForSamplerRequest":
        if (self.path is None) == (self.sampling_session_seq_id is None):
            raise ValueError("give either path (a checkpoint's name) or sampling_session_seq_id (a new sampler)")
        return self


class SaveWeightsExternalRequest(OrderedRequest):
    """Request of `save_weights_external`. `path` is the checkpoint's name."""

    path: str
    ttl_seconds: TtlSeconds | None = None
    age_encryption_recipients: list[str] | None = None
    """Public keys. Every file is encrypted for all of them."""


class LoadWeightsRequest(RequestModel):
    """Request of `load_weights`, into a model (`model_id`, `seq_id`) or a new one (`session_id`, `model_seq_id`)."""

    model_id: str | None = None
    seq_id: Int64 | None = None
    session_id: str | None = None
    model_seq_id: Int64 | None = None
    path: str
    """A `tinker://` URI."""
    optimizer: bool = True
    """True to load the optimizer state; False to reset the optimizer."""
    base_model: str | None = None
    """If set, must be the base model of the checkpoint."""
    user_metadata: dict[str, JsonValue] | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()
    """Optimizer of a new model if `optimizer` is False. Otherwise the optimizer family of the checkpoint is used."""
    weights_access_token: str | None = None
    """API key or token of the checkpoint's owner."""

    @model_validator(mode="after")
    def _has_one_address(self) -> "LoadWeightsRequest":
        in_place, new = (self.model_id, self.seq_id), (self.session_id, self.model_seq_id)
        if not (None not in in_place and new == (None, None)) and not (None not in new and in_place == (None, None)):
            raise ValueError("give either model_id and seq_id, or session_id and model_seq_id")
        return self


class CreateSamplingSessionRequest(RequestModel):
    """Request of `create_sampling_session`. Creates a sampler of the base model, or of the checkpoint `model_path`."""

    session_id: str
    sampling_session_seq_id: Int64
    base_model: str | None = None
    model_path: str | None = None

    @model_validator(mode="after")
    def _has_a_model(self) -> "CreateSamplingSessionRequest":
        if self.base_model is None and self.model_path is None:
            raise ValueError("give base_model, or model_path (a tinker:// URI of a checkpoint)")
        return self


class SampleRequest(RequestModel):
    """Request of `asample`. `check_sample` and `check_scores` of `skyrl.algorithms` define the limits of its values."""

    sampling_session_id: str
    seq_id: Int64
    prompt: ModelInput
    sampling_params: SamplingParams = SamplingParams.model_validate({})
    num_samples: int = 1
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    record_stability_info: bool = False
    """Ignored, because the training data contains everything that stable_reinforce needs from a sample."""
    base_model: str | None = None
    model_path: str | None = None
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: TensorData | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None

    UNSERVED: ClassVar = {
        "base_model": "the sampler of sampling_session_id knows its model; leave it out",
        "model_path": "the sampler of sampling_session_id knows its checkpoint; leave it out",
    }


class RetrieveFutureRequest(RequestModel):
    """Request of `retrieve_future`."""

    request_id: str
    allow_metadata_only: bool = False
    """True if the client accepts a response that has only the size of a large result."""


class SamplingSessionTarget(RequestModel):
    """A client of a sampler. The first client has number 0, and each clone of it has its own number."""

    sampling_session_id: str
    cloned_sampler_id: int = Field(0, ge=0, lt=2**34)


class RetrieveFuturesRequest(RequestModel):
    """Request of `retrieve_futures`. Asks for the samples of a client that have ended since `prev_cursor`."""

    target: SamplingSessionTarget
    prev_cursor: Int64 = 0
    timeout: float | None = Field(None, ge=0)
    """Seconds to wait until a sample ends. None: `long_poll_s`."""
    retrieved_request_ids: list[str] = Field(default_factory=list)
    """Samples whose results the server may drop."""


class JoinSamplingSessionRequest(RequestModel):
    """Request of `join_sampling_session`. Adds a client to a sampler."""

    sampling_session_id: str


class CancelFutureRequest(RequestModel):
    """Request of `cancel_future`. Only samples can be cancelled."""

    request_id: str


class WeightsInfoRequest(RequestModel):
    """Request of `weights_info`."""

    tinker_path: str


# -- responses --------------------------------------------------------------------------------------------------------


class HealthResponse(BaseModel):
    """Response of `healthz`."""

    status: str = "ok"
    engine: dict[str, int] = {}
    """Counters of the engine, such as the number of compiled programs."""


class ClientConfigResponse(BaseModel):
    """Response of `client/config`. Settings for clients of this server. Other flags keep the client's defaults."""

    pjwt_auth_enabled: bool = True
    parallel_fwdbwd_chunks: bool = True
    proto_write_fwdbwd: bool = True
    proto_compress_fwdbwd: bool = False
    fwd_via_fwdbwd: bool = True
    create_model_via_load_weights: bool = True
    sample_max_concurrent_requests: int = 512
    sample_use_retrieve_futures: bool = True
    sample_join_sampling_session: bool = True
    custom_loss_server_side: bool = True


class DynamicConfigResponse(BaseModel):
    """Response of `client/dynamic_config`. Limits how many cancellations a client sends at a time."""

    refresh_interval_sec: int = 300
    sample_cancel_enabled: bool = True
    sample_cancel_max_batch_size: int = 64


class CreateSessionResponse(BaseModel):
    """Response of `create_session`. The client logs the messages."""

    session_id: str
    info_message: str | None = None
    warning_message: str | None = None
    error_message: str | None = None
    type: str = "create_session"


class SessionHeartbeatResponse(BaseModel):
    """Response of `session_heartbeat`."""

    type: str = "session_heartbeat"


class TelemetryResponse(BaseModel):
    """Response of `telemetry`."""

    status: str = "accepted"


class SupportedModel(BaseModel):
    """A base model that may be named in `create_model` and `create_sampling_session`."""

    model_name: str
    max_context_length: int | None = None
    trainable: bool = True
    sampleable: bool = True


class ServerCapabilitiesResponse(BaseModel):
    """Response of `get_server_capabilities`."""

    supported_models: list[SupportedModel]


class FutureResponse(BaseModel):
    """Response to every queued request. With `request_id`, the client waits for the result."""

    request_id: str
    model_id: str | None = None
    sample_sequence_ids: list[str] | None = None
    """One id per sample. None for other requests than asample."""


class TryAgainResponse(BaseModel):
    """Response of `retrieve_future` for a request that is not done (status 408)."""

    request_id: str
    queue_state: Literal["active", "paused_capacity", "paused_rate_limit"] = "active"
    queue_state_reason: str | None = None
    type: str = "try_again"


class FailedResponse(BaseModel):
    """Response of `retrieve_future` for a request that failed. No other response has a field `error`."""

    error: str
    category: ErrorCategory


class MetadataResponse(BaseModel):
    """Response of `retrieve_future` for a large result: its size in bytes. The client calls again to get the result."""

    response_payload_size: int
    status: Literal["complete_metadata"] = "complete_metadata"


class SampleEnd(BaseModel):
    """The end of a sample. A failed sample has no size; `retrieve_future` returns its error."""

    request_id: str
    state: Literal["finished", "failed"]
    response_payload_uncompressed_size: int | None = None

    @classmethod
    def of(cls, request_id: str, size: int | None) -> "SampleEnd":
        """Create from the result's size in bytes. A size of None means that the sample failed."""
        state: Literal["finished", "failed"] = "failed" if size is None else "finished"
        return cls(request_id=request_id, state=state, response_payload_uncompressed_size=size)


class RetrieveFuturesResponse(BaseModel):
    """Response of `retrieve_futures`. The client sends `cursor` with its next call."""

    completions: list[SampleEnd]
    cursor: int


class JoinSamplingSessionResponse(BaseModel):
    """Response of `join_sampling_session`: the new client's number. Each client has its own range of 10^9 seq_ids."""

    client_counter: int
    type: str = "join_sampling_session"


class ModelData(BaseModel):
    """Names of a base model. Clients load the tokenizer `tokenizer_id`, or `model_name` if `tokenizer_id` is None."""

    arch: str | None = None
    model_name: str | None = None
    tokenizer_id: str | None = None


class GetInfoResponse(BaseModel):
    """Response of `get_info`."""

    model_id: str
    model_data: ModelData
    optimizer_config: OptimizerConfig = OptimizerConfig()
    is_lora: bool = True
    lora_rank: int | None = None
    model_name: str | None = None
    type: str = "get_info"


class WeightsInfoResponse(BaseModel):
    """Response of `weights_info`."""

    base_model: str
    is_lora: bool = True
    lora_rank: int
    train_unembed: bool
    train_mlp: bool
    train_attn: bool
    optimizer_config: OptimizerConfig = OptimizerConfig()


class CreateSamplingSessionResponse(BaseModel):
    """Response of `create_sampling_session`."""

    sampling_session_id: str
    type: str = "create_sampling_session"


class SamplerResponse(BaseModel):
    """Response of `samplers/{sampler_id}`. The client loads the tokenizer of `base_model`."""

    sampler_id: str
    base_model: str
    model_path: str | None = None


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
