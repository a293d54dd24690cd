"""JSON of the searches for sessions and checkpoints. The cursor for a page names the last entry of the page before."""

from datetime import datetime
from typing import Literal
from uuid import UUID

from pydantic import AwareDatetime, BaseModel, Field, model_validator

from skyrl.tinker.wire.management_schemas import Checkpoint, CheckpointType
from skyrl.tinker.wire.schemas import FinishReason, RequestModel
from skyrl.types import WireModel


class SearchOwner(WireModel):
    """Users whose sessions or checkpoints are searched."""

    type: Literal["own", "accessible", "user"] = "own"
    owner_urns: list[str] | None = Field(default=None, min_length=1, max_length=10)

    @model_validator(mode="after")
    def _names_users(self) -> "SearchOwner":
        if (self.type == "user") != (self.owner_urns is not None):
            raise ValueError('give owner_urns with {"type": "user"}, and only there')
        return self


# -- sessions ----------------------------------------------------------------------------------------------------------


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
    """Request of `sessions/search`. An omitted condition matches everything."""

    session_id: str | None = None
    project_ids: list[str] | None = None
    user_metadata: dict[str, str] = Field(default_factory=dict)
    display_name: str | None = Field(None, min_length=1)
    """Words that the session's name must contain, ignoring case. If `session_id` is also given, one of the two
    conditions is sufficient.
    """
    owner: SearchOwner = SearchOwner()
    statuses: list[SearchStatus] | None = Field(None, min_length=1)
    limit: int = Field(50, ge=1, le=200)
    cursor: SearchCursor | None = None


class SessionStatus(BaseModel):
    """Status of a session's client."""

    type: Literal["active", "client_finished"]
    reason: FinishReason | None = None


class SessionSummary(BaseModel):
    """A session in the results."""

    session_id: str
    created_at: datetime
    owner: str
    project_id: str
    status: SessionStatus | None = None
    """Status of the client. None: the client disappeared without finishing the session."""
    checkpoints_count: int
    display_name: str | None = None
    user_metadata: dict[str, str] | None = None
    checkpoint_storage_bytes: int | None = None


class SessionSearchResponse(BaseModel):
    """Response of `sessions/search`. Newest sessions first."""

    sessions: list[SessionSummary]
    next_cursor: SearchCursor | None = None
    """Cursor for the next page. None: this is the last page."""


# -- checkpoints -------------------------------------------------------------------------------------------------------


class CheckpointSearchCursor(WireModel):
    """The last checkpoint of a page."""

    last_created_at: AwareDatetime
    last_checkpoint_uuid: UUID


class CheckpointSearchRequest(RequestModel):
    """Request of `checkpoints/search`. An omitted condition matches everything; an empty list matches nothing."""

    project_ids: list[str] | None = None
    user_metadata: dict[str, str] = Field(default_factory=dict)
    checkpoint_type: CheckpointType | None = None
    owner: SearchOwner = SearchOwner()
    base_models: list[str] | None = None
    limit: int = Field(50, ge=1, le=200)
    cursor: CheckpointSearchCursor | None = None


class CheckpointSearchResponse(BaseModel):
    """Response of `checkpoints/search`. Newest checkpoints first."""

    checkpoints: list[Checkpoint]
    next_cursor: CheckpointSearchCursor | None = None
    """Cursor for the next page. None: this is the last page."""
