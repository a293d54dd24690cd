"""Training runs, and the checkpoints of a run."""

from functools import partial

from fastapi import APIRouter
from starlette.responses import Response

from skyrl.tinker.database.queries import listings
from skyrl.tinker.http.routes.dependencies import CallerDependency, Limit, Offset, ServiceDependency
from skyrl.tinker.wire import management_schemas as rest

router = APIRouter()


@router.get("/training_runs", response_model=rest.TrainingRunsResponse)
async def list_training_runs(
    service: ServiceDependency,
    caller: CallerDependency,
    limit: Limit = 20,
    offset: Offset = 0,
    access_scope: listings.Scope = "owned",
    project_id: str | None = None,
) -> Response:
    """Runs, newest first."""
    page = partial(
        listings.training_runs, caller=caller, scope=access_scope, project_id=project_id, limit=limit, offset=offset
    )
    return await service.listings.answer(caller, page)


@router.get("/training_runs/{run_id}", response_model_exclude_none=True)
async def get_training_run(
    run_id: str, service: ServiceDependency, caller: CallerDependency, access_scope: listings.Scope = "owned"
) -> rest.TrainingRun:
    """Facts about a run, and its newest checkpoints."""
    return await service.database.read(partial(listings.training_run, caller=caller, scope=access_scope, run_id=run_id))


@router.get("/training_runs/{run_id}/checkpoints", response_model=rest.CheckpointsListResponse)
async def list_checkpoints_of_run(run_id: str, service: ServiceDependency, caller: CallerDependency) -> Response:
    """Checkpoints of a run, newest first. For another tenant's run, only the public ones."""
    return await service.listings.answer(caller, partial(listings.checkpoints_of_run, caller=caller, run_id=run_id))
