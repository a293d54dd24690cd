"""Usage of all tenants for operators, from the ledger. It goes back to before the server's start."""

import time
from functools import partial

from fastapi import APIRouter, Depends
from fastapi.responses import Response
from pydantic import AwareDatetime

from skyrl.errors import RequestError
from skyrl.tinker.database.ledger.billing import hour_of
from skyrl.tinker.database.ledger.tenant_usage import Period, usage_of_all
from skyrl.tinker.http.routes.dependencies import ServiceDependency, operator
from skyrl.tinker.identity.callers import EVERYBODY
from skyrl.tinker.wire import management_schemas as rest

router = APIRouter(dependencies=[Depends(operator)])


@router.get("/operator/usage", response_model=rest.TenantUsageResponse)
async def get_usage_of_all(
    service: ServiceDependency,
    starting_on: AwareDatetime | None = None,
    ending_before: AwareDatetime | None = None,
    per: Period = "total",
) -> Response:
    """Return the usage of every tenant in a window of whole hours. Default: since the first hour of the ledger."""
    begin = None if starting_on is None else hour_of("starting_on", starting_on)
    end = None if ending_before is None else hour_of("ending_before", ending_before)
    if begin is not None and end is not None and end <= begin:
        raise RequestError(f"ending_before={ending_before} has to be after starting_on={starting_on}; exchange them")
    job = partial(usage_of_all, names=service.names, begin=begin, end=end, per=per, now=time.time())
    return await service.listings.answer(EVERYBODY, job)
