"""JSON of the management endpoints: runs, checkpoints, sessions, keys. Those of training and sampling are in `schemas`.

The SDK checks responses strictly: a field of another type, a missing one, or a time without a zone is an error there.
"""

from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import AwareDatetime, BaseModel, Field, model_validator

from skyrl.tinker.wire import strict_json
from skyrl.tinker.wire.parsing import Int64
from skyrl.tinker.wire.schemas import FinishReason, RequestModel, TtlSeconds
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


# -- downloads --------------------------------------------------------------------------------------------------------


class ArchiveUrlResponse(BaseModel):
    """`.../archive`, for clients that ask for JSON."""

    url: str
    expires: datetime


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
    """Whether a session's client is there."""

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
