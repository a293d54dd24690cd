"""JSON of the management endpoints: runs, checkpoints, sessions, keys. Searches are in `search_schemas`.

The SDK validates responses strictly: a wrong type, a missing field, or a time without a zone raises an error there.
"""

from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import BaseModel, Field, model_validator

from skyrl.tinker.wire import strict_json
from skyrl.tinker.wire.parsing import Int64
from skyrl.tinker.wire.schemas import ApiLoraConfig, RequestModel, TtlSeconds
from skyrl.types import WireModel

CheckpointType = Literal["training", "sampler", "external"]

CHECKPOINT_TYPES: dict[str, CheckpointType] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}
"""Name of each `CheckpointKind` in the API."""
KINDS = {name: kind for kind, name in CHECKPOINT_TYPES.items()}
"""`CheckpointKind` of each name in the API."""


def moment(seconds: float) -> datetime:
    """Convert a unix time in seconds to a datetime in UTC, the type of times in the API."""
    return datetime.fromtimestamp(seconds, UTC)


def texts(user_metadata: dict[str, Any] | None) -> dict[str, str] | None:
    """Convert metadata values to strings, because the API has only strings. Other types become JSON texts."""
    if user_metadata is None:
        return None
    return {
        key: value if isinstance(value, str) else strict_json.dumps(value).decode()
        for key, value in user_metadata.items()
    }


# -- runs and checkpoints ---------------------------------------------------------------------------------------------


class Cursor(BaseModel):
    """Position of a page in a list."""

    offset: int
    limit: int
    total_count: int


class Checkpoint(BaseModel):
    """A named checkpoint."""

    checkpoint_id: str
    """Kind and name: weights/NAME."""
    checkpoint_type: CheckpointType
    time: datetime
    tinker_path: str
    base_model: str
    size_bytes: int | None = None
    public: bool = False
    user_metadata: dict[str, str] | None = None
    expires_at: datetime | None = None
    version_hash: str
    """Hash of the weights: the last part of the `system_fingerprint` of their samples."""


class CheckpointsListResponse(BaseModel):
    """Response of `checkpoints` and of `training_runs/{run_id}/checkpoints`. Newest checkpoints first."""

    checkpoints: list[Checkpoint]
    cursor: Cursor | None = None
    """Position of this page. None: the response has the whole list."""


class TrainingRun(BaseModel):
    """A training run. It has the id of the model that it trains."""

    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool = True
    corrupted: bool = False
    """True if the training state is lost and only checkpoints are left."""
    lora_rank: int | None = None
    last_request_time: datetime
    last_checkpoint: Checkpoint | None = None
    last_sampler_checkpoint: Checkpoint | None = None
    user_metadata: dict[str, str] | None = None


class TrainingRunsResponse(BaseModel):
    """Response of `training_runs`. Newest runs first."""

    training_runs: list[TrainingRun]
    cursor: Cursor


class SetTtlRequest(WireModel):
    """Request of `.../ttl`. An explicit null removes the time to live."""

    ttl_seconds: TtlSeconds | None


class CopyWeightsRequest(RequestModel):
    """Request of `copy_weights`. The copy goes to a project, or it becomes a run of a session."""

    source_path: str
    destination_project_id: str | None = None
    session_id: str | None = None
    model_seq_id: Int64 | None = None
    ttl_seconds: TtlSeconds | None = None
    weights_access_token: str | None = None

    @model_validator(mode="after")
    def _has_one_destination(self) -> "CopyWeightsRequest":
        in_session = (self.session_id, self.model_seq_id)
        if None in in_session and in_session != (None, None):
            raise ValueError("give both session_id and model_seq_id, or neither")
        if (self.session_id is None) == (self.destination_project_id is None):
            raise ValueError("give either destination_project_id, or session_id and model_seq_id")
        return self


class CopyWeightsResponse(BaseModel):
    """Response of `copy_weights`."""

    tinker_path: str


# -- uploads ----------------------------------------------------------------------------------------------------------


class UploadStartRequest(RequestModel):
    """Request of `external_weights_upload_start`. Describes the adapter that the client wants to upload."""

    base_model: str
    lora_config: ApiLoraConfig
    destination_project_id: str | None = Field(default=None, max_length=256)


class UploadUrl(BaseModel):
    """URL to which the client PUTs a file, in the format of SDK 0.40 and later."""

    url: str
    headers: dict[str, str] = Field(default_factory=dict)
    """Headers to send with the file."""


class UploadStartResponse(BaseModel):
    """Response of `external_weights_upload_start`."""

    upload_id: str
    urls: dict[str, str] | dict[str, UploadUrl]
    """URL to which the client PUTs each file, by file name."""
    expires: datetime


class UploadFinishRequest(RequestModel):
    """Request of `external_weights_upload_finish`."""

    upload_id: str


class UploadFinishResponse(BaseModel):
    """Response of `external_weights_upload_finish`."""

    tinker_path: str
    warning: str | None = None
    """Reason to doubt that the adapter belongs to this base model. Not in the SDK's schema."""


# -- downloads --------------------------------------------------------------------------------------------------------


class ArchiveUrlResponse(BaseModel):
    """Response of `.../archive`, for clients that ask for JSON."""

    url: str
    expires: datetime


class TraceExportResponse(BaseModel):
    """Response of `sessions/{session_id}/trace_export`."""

    status: Literal["pending", "ready", "failed"]
    url: str | None = None
    error: str | None = None


class ExternalWeightsUrlsResponse(BaseModel):
    """Response of `.../external_weights_urls`."""

    urls: dict[str, str]
    """URL of each file, by file name."""
    expires: datetime


# -- sessions ---------------------------------------------------------------------------------------------------------


class ListSessionsResponse(BaseModel):
    """Response of `sessions`. Newest sessions first."""

    sessions: list[str]


class GetSessionResponse(BaseModel):
    """Response of `sessions/{session_id}`."""

    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: dict[str, str] | None = None
    display_name: str | None = None


class SetProjectRequest(RequestModel):
    """Request of `sessions/{session_id}/project`."""

    project_id: str = Field(min_length=1)


# -- keys -------------------------------------------------------------------------------------------------------------


class AuthTokenResponse(BaseModel):
    """Response of `auth/token`."""

    jwt: str


class OrganizationDetails(BaseModel):
    """Owner of this server."""

    name: str


class UserDetails(BaseModel):
    """Owner of the key."""

    email: str


class ApiKeyDetails(BaseModel):
    """Details of a key's owner."""

    org_details: OrganizationDetails
    user_details: UserDetails


class ApiKeyResponse(BaseModel):
    """Response of `auth/apikey/me`."""

    key_id: int
    name: str
    note: str
    details: ApiKeyDetails


# -- the ledger -------------------------------------------------------------------------------------------------------


class TrainingUsage(BaseModel):
    """Tokens of passes."""

    type: Literal["training"] = "training"
    forward_only: bool
    """True for passes without gradients."""
    token_count: int


class PrefillUsage(BaseModel):
    """Tokens of prompts."""

    type: Literal["sampling_prefill"] = "sampling_prefill"
    cached: bool
    token_count: int


class SampleUsage(BaseModel):
    """Generated tokens."""

    type: Literal["sampling_sample"] = "sampling_sample"
    token_count: int
    sample_count: int
    """Number of generated sequences. Not part of the SDK's schema; 0 for hours before the upgrade to this version."""


class CheckpointUsage(BaseModel):
    """Named checkpoints that were created."""

    type: Literal["checkpoint"] = "checkpoint"
    count: int


class StorageUsage(BaseModel):
    """Named checkpoints on disk."""

    type: Literal["storage"] = "storage"
    free: bool = False
    gigabyte_hours: float


class UsageEvent(BaseModel):
    """Usage of one kind by one session and run in one hour. Costs are always null, because the server has no prices."""

    bucket_start: datetime
    bucket_end: datetime
    base_model: str
    user_id: str
    user_name: str
    session_id: str | None = None
    project_id: str | None = None
    training_run_id: str | None = None
    """Run that was trained or sampled. None: the base model was sampled. This field and the next two are not in the
    SDK's schema."""
    flops: int | None = None
    """Number of operations, by the convention in docs/operations.md. None if the number of parameters is unknown."""
    device_seconds: float | None = None
    """Device time in seconds. The time of a sample's prompt is counted with its generated tokens."""
    estimated_cost_usd: float | None = None
    effective_rate_usd_per_million_tokens: float | None = None
    effective_rate_usd_per_gigabyte_month: float | None = None
    event_info: TrainingUsage | PrefillUsage | SampleUsage | CheckpointUsage | StorageUsage


class UsageSession(BaseModel):
    """A session with usage in the requested window."""

    user_metadata: dict[str, str] | None = None


class UsageResponse(BaseModel):
    """Response of `billing/usage/events`. Ordered by hour, and within an hour by tokens, most tokens first."""

    data: list[UsageEvent]
    sessions: dict[str, UsageSession]
    cost_data_through: datetime | None = None


class TenantUsage(BaseModel):
    """Usage of one tenant and base model in one period. Not part of the SDK's schema."""

    from_utc: datetime
    to_utc: datetime
    tenant: str
    """Display name."""
    tenant_id: str | None = None
    """Id of the tenant's key. None: sessions that were created while the server had no keys."""
    base_model: str
    requests: int
    trained_tokens: int
    """Tokens of passes with gradients."""
    scored_tokens: int
    """Tokens of passes without gradients."""
    prompt_tokens: int
    """Tokens of prompts, once per request."""
    cached_prompt_tokens: int
    """Those of `prompt_tokens` that were found in the cache."""
    sampled_tokens: int
    samples: int
    """Number of generated sequences."""
    training_device_seconds: float
    sampling_device_seconds: float
    checkpoints_created: int
    checkpoint_gigabyte_hours: float
    """Storage of named checkpoints. A gigabyte is 10^9 bytes."""


class TenantUsageResponse(BaseModel):
    """Response of `/operator/usage`. Ordered by period, base model and name."""

    data: list[TenantUsage]


class StoredNow(BaseModel):
    """Storage of one owner's named checkpoints in one project."""

    project_id: str | None = None
    org_user_urn: str
    user_email: str
    user_name: str
    checkpoint_count: int
    size_bytes: int
    size_gigabytes: float
    estimated_monthly_cost_usd: float | None = None


class StoredNowResponse(BaseModel):
    """Response of `billing/usage/checkpoints/current`."""

    effective_rate_usd_per_gigabyte_month: float | None = None
    data: list[StoredNow]


class AuditEntry(BaseModel):
    """An entry of the audit log."""

    timestamp: datetime
    event: str
    event_details: dict[str, Any]
    model_id: str | None = None
    tinker_path: str | None = None
    purpose: str | None = None


class AuditResponse(BaseModel):
    """Response of `audit`. Oldest entries first."""

    entries: list[AuditEntry]
