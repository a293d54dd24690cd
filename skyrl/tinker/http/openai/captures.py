"""Captured sessions: the exact tokens of what an agent drew, as rows to train on."""

import json
from collections.abc import Iterator
from typing import Annotated

from fastapi import APIRouter
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, FiniteFloat

from skyrl.tinker.http.openai.dialect import OpenAIRoute
from skyrl.tinker.http.routes.dependencies import CallerDependency, CapturesDependency, json_body

router = APIRouter(route_class=OpenAIRoute)

LINES = "application/x-ndjson"


class RewardRequest(BaseModel):
    """Request that gives a session its reward."""

    model_config = ConfigDict(extra="forbid")

    reward: FiniteFloat


@router.get("/captures")
async def list_captures(captures: CapturesDependency, caller: CallerDependency) -> JSONResponse:
    """The caller's sessions."""
    return JSONResponse({"object": "list", "data": await captures.list(caller.name)})


@router.get("/captures/{name}", response_model=None)
async def get_capture(name: str, captures: CapturesDependency, caller: CallerDependency) -> StreamingResponse:
    """The rows of a session, as JSON lines."""
    frozen = (await captures.get(caller.name, name)).freeze()

    def lines() -> Iterator[str]:  # in a thread
        for row in frozen.rows():
            yield f"{json.dumps(row, separators=(',', ':'))}\n"

    return StreamingResponse(lines(), media_type=LINES)


@router.put("/captures/{name}")
async def set_reward(
    name: str,
    captures: CapturesDependency,
    caller: CallerDependency,
    request: Annotated[RewardRequest, json_body(RewardRequest)],
) -> JSONResponse:
    """Give a session its reward, which all of its rows have."""
    session = await captures.get(caller.name, name)
    await captures.set_reward(session, request.reward)
    return JSONResponse(captures.facts(session))


@router.delete("/captures/{name}")
async def delete_capture(name: str, captures: CapturesDependency, caller: CallerDependency) -> JSONResponse:
    """Forget a session."""
    await captures.drop(caller.name, name)
    return JSONResponse({"id": name, "object": "capture", "deleted": True})
