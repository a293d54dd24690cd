"""JSON of the management endpoints: runs, checkpoints, sessions, keys. Those of training and sampling are in `schemas`.

The SDK checks responses strictly: a field of another type, a missing one, or a time without a zone is an error there.
"""

from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import AwareDatetime, BaseModel, Field, model_validator

from skyrl.tinker.wire import strict_json
from skyrl.tinker.wire.parsing import Int64
from skyrl.tinker.wire.schemas import ApiLoraConfig, FinishReason, RequestModel, TtlSeconds
from skyrl.types import WireModel

CHECKPOINT_TYPES: dict[str, Literal["training", "sampler", "external"]] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}
"""Names in the API of the checkpoints of each `CheckpointKind`."""


def moment(seconds: float) -> datetime:
    """A unix time as the API writes it."""
    return datetime.fromtimestamp(seconds, UTC)


def texts(user_metadata: dict[str, Any] | None) -> dict[str, str] | None:
    """Metadata as the API writes it: values that are no text are written as JSON."""
    if user_metadata is None:
        return None
    return {
        key: value if isinstance(value, str) else strict_json.dumps(value).decode()
        for key, value in user_metadata.items()
    }


# -- runs and checkpoints ---------------------------------------------------------------------------------------------


class Cursor(BaseModel):
    """A page of a list."""

    offset: int
    limit: int
    total_count: int


class Checkpoint(BaseModel):
    """A named checkpoint."""

    checkpoint_id: str
    """Its kind and name: weights/NAME."""
    checkpoint_type: Literal["training", "sampler", "external"]
    time: datetime
    tinker_path: str
    size_bytes: int | None = None
    public: bool = False
    user_metadata: dict[str, str] | None = None
    expires_at: datetime | None = None


class CheckpointsListResponse(BaseModel):
    """`checkpoints` and `training_runs/{run_id}/checkpoints`, newest first."""

    checkpoints: list[Checkpoint]
    cursor: Cursor | None = None
    """None: these are all."""


class TrainingRun(BaseModel):
    """A model."""

    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool = True
    corrupted: bool = False
    """Its training state is gone, and only its checkpoints are left."""
    lora_rank: int | None = None
    last_request_time: datetime
    last_checkpoint: Checkpoint | None = None
    last_sampler_checkpoint: Checkpoint | None = None
    user_metadata: dict[str, str] | None = None


class TrainingRunsResponse(BaseModel):
    """`training_runs`, newest first."""

    training_runs: list[TrainingRun]
    cursor: Cursor


class SetTtlRequest(WireModel):
    """`.../ttl`. An explicit null removes what was set."""

    ttl_seconds: TtlSeconds | None


class CopyWeightsRequest(RequestModel):
    """`copy_weights`: into a project, or as a model of a session."""

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
    """`copy_weights`."""

    tinker_path: str


# -- uploads ----------------------------------------------------------------------------------------------------------


class UploadStartRequest(RequestModel):
    """`external_weights_upload_start`: what the adapter is that is to be uploaded."""

    base_model: str
    lora_config: ApiLoraConfig
    destination_project_id: str | None = Field(default=None, max_length=256)


class UploadStartResponse(BaseModel):
    """`external_weights_upload_start`."""

    upload_id: str
    urls: dict[str, str]
    """By name of the file that is to be PUT there."""
    expires: datetime


class UploadFinishRequest(RequestModel):
    """`external_weights_upload_finish`."""

    upload_id: str


class UploadFinishResponse(BaseModel):
    """`external_weights_upload_finish`."""

    tinker_path: str


# -- downloads --------------------------------------------------------------------------------------------------------


class ArchiveUrlResponse(BaseModel):
    """`.../archive`, for clients that ask for JSON."""

    url: str
    expires: datetime


class TraceExportResponse(BaseModel):
    """`sessions/{session_id}/trace_export`."""

    status: Literal["pending", "ready", "failed"]
    url: str | None = None
    error: str | None = None


class ExternalWeightsUrlsResponse(BaseModel):
    """`.../external_weights_urls`."""

    urls: dict[str, str]
    """By name of the file."""
    expires: datetime


# -- sessions ---------------------------------------------------------------------------------------------------------


class ListSessionsResponse(BaseModel):
    """`sessions`, newest first."""

    sessions: list[str]


class GetSessionResponse(BaseModel):
    """`sessions/{session_id}`."""

    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: dict[str, str] | None = None
    display_name: str | None = None


class SetProjectRequest(RequestModel):
    """`sessions/{session_id}/project`."""

    project_id: str = Field(min_length=1)


class SearchOwner(WireModel):
    """Users whose sessions to search."""

    type: Literal["own", "accessible", "user"] = "own"
    owner_urns: list[str] | None = Field(default=None, min_length=1, max_length=10)

    @model_validator(mode="after")
    def _names_users(self) -> "SearchOwner":
        if (self.type == "user") != (self.owner_urns is not None):
            raise ValueError('give owner_urns with {"type": "user"}, and only there')
        return self


class SearchStatus(WireModel):
    """A status to match."""

    type: Literal["active", "cancelled", "failed", "client_finished"]
    reasons: list[Literal["success", "errored", "interrupted"]] | None = Field(None, min_length=1)

    @model_validator(mode="after")
    def _reasons_are_of_the_client(self) -> "SearchStatus":
        if self.reasons is not None and self.type != "client_finished":
            raise ValueError('reasons go with {"type": "client_finished"} only')
        return self


class SearchCursor(WireModel):
    """The last session of a page."""

    last_created_at: AwareDatetime
    last_session_id: str


class SessionSearchRequest(RequestModel):
    """`sessions/search`. What is left out matches everything."""

    session_id: str | None = None
    project_ids: list[str] | None = None
    user_metadata: dict[str, str] = Field(default_factory=dict)
    display_name: str | None = Field(None, min_length=1)
    """Words that a session's name has, whatever their case. With `session_id`, either one matches."""
    owner: SearchOwner = SearchOwner()
    statuses: list[SearchStatus] | None = Field(None, min_length=1)
    limit: int = Field(50, ge=1, le=200)
    cursor: SearchCursor | None = None


class SessionStatus(BaseModel):
    """Presence of a session's client."""

    type: Literal["active", "client_finished"]
    reason: FinishReason | None = None


class SessionSummary(BaseModel):
    """A session that was found."""

    session_id: str
    created_at: datetime
    owner: str
    project_id: str
    status: SessionStatus | None = None
    """None: it has gone silent without a word."""
    checkpoints_count: int
    display_name: str | None = None
    user_metadata: dict[str, str] | None = None
    checkpoint_storage_bytes: int | None = None


class SessionSearchResponse(BaseModel):
    """`sessions/search`, newest first."""

    sessions: list[SessionSummary]
    next_cursor: SearchCursor | None = None
    """None: there are no more."""


# -- keys -------------------------------------------------------------------------------------------------------------


class AuthTokenResponse(BaseModel):
    """`auth/token`."""

    jwt: str


class OrganizationDetails(BaseModel):
    """Owner of this server."""

    name: str


class UserDetails(BaseModel):
    """Owner of the key."""

    email: str


class ApiKeyDetails(BaseModel):
    """Owner behind a key."""

    org_details: OrganizationDetails
    user_details: UserDetails


class ApiKeyResponse(BaseModel):
    """`auth/apikey/me`."""

    key_id: int
    name: str
    note: str
    details: ApiKeyDetails


# -- the ledger -------------------------------------------------------------------------------------------------------


class TrainingUsage(BaseModel):
    """Tokens of passes."""

    type: Literal["training"] = "training"
    forward_only: bool
    """True for those that add no gradients."""
    token_count: int


class PrefillUsage(BaseModel):
    """Tokens of prompts."""

    type: Literal["sampling_prefill"] = "sampling_prefill"
    cached: bool
    token_count: int


class SampleUsage(BaseModel):
    """Tokens that were generated."""

    type: Literal["sampling_sample"] = "sampling_sample"
    token_count: int


class CheckpointUsage(BaseModel):
    """Named checkpoints that were made."""

    type: Literal["checkpoint"] = "checkpoint"
    count: int


class StorageUsage(BaseModel):
    """Named checkpoints on disk."""

    type: Literal["storage"] = "storage"
    free: bool = False
    gigabyte_hours: float


class UsageEvent(BaseModel):
    """What was used in an hour by a session and a run, of one kind. Nothing costs anything here."""

    bucket_start: datetime
    bucket_end: datetime
    base_model: str
    user_id: str
    user_name: str
    session_id: str | None = None
    project_id: str | None = None
    training_run_id: str | None = None
    """The run that was trained or sampled; None: the base model. This and the next two are ours."""
    flops: int | None = None
    """By convention; see docs/operations.md. None where the number of parameters is not known."""
    device_seconds: float | None = None
    """Of a sample's prompt they are with its generated tokens."""
    estimated_cost_usd: float | None = None
    effective_rate_usd_per_million_tokens: float | None = None
    effective_rate_usd_per_gigabyte_month: float | None = None
    event_info: TrainingUsage | PrefillUsage | SampleUsage | CheckpointUsage | StorageUsage


class UsageSession(BaseModel):
    """A session that used something."""

    user_metadata: dict[str, str] | None = None


class UsageResponse(BaseModel):
    """`billing/usage/events`, by hour, those of most tokens first."""

    data: list[UsageEvent]
    sessions: dict[str, UsageSession]
    cost_data_through: datetime | None = None


class StoredNow(BaseModel):
    """Named checkpoints of a project and an owner."""

    project_id: str | None = None
    org_user_urn: str
    user_email: str
    user_name: str
    checkpoint_count: int
    size_bytes: int
    size_gigabytes: float
    estimated_monthly_cost_usd: float | None = None


class StoredNowResponse(BaseModel):
    """`billing/usage/checkpoints/current`."""

    effective_rate_usd_per_gigabyte_month: float | None = None
    data: list[StoredNow]


class AuditEntry(BaseModel):
    """Something that somebody has done."""

    timestamp: datetime
    event: str
    event_details: dict[str, Any]
    model_id: str | None = None
    tinker_path: str | None = None
    purpose: str | None = None


class AuditResponse(BaseModel):
    """`audit`, the oldest first."""

    entries: list[AuditEntry]
