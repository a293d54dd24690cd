"""Eviction of unnamed versions beyond the limits per model. A long run publishes one version per step.

A model keeps its newest versions and its versions in use. A version is in use if it was created or sampled within
`ephemeral_idle_sec`, needed by a queued sample, current for inflight samplers, or not on disk yet. All others beyond
the limits are removed during the session. The newest samplers of removed versions stay; their errors name the limit.
"""

from collections.abc import Iterator, Sequence
from itertools import islice

from sqlalchemy import func, or_
from sqlmodel import Session, col, select

from skyrl.tinker.checkpoints.disk_budget import GIB
from skyrl.tinker.checkpoints.retention import BATCH, Removal, Rules, TableSweep, forget_version
from skyrl.tinker.config import EngineConfig
from skyrl.tinker.database.tables import ModelRow, SamplerRow, VersionRow

KNOWN_SAMPLERS = 1000
"""Maximum number of samplers per model that are kept after their versions were removed."""


def _crowded(session: Session, rules: Rules, now: float) -> Sequence[str]:
    """Return models with too many versions. Empty if it is unknown when versions were last sampled."""
    config = rules.config
    limits = []
    if config.keep_last_ephemeral:
        limits.append(func.count() > config.keep_last_ephemeral)
    if config.max_ephemeral_gib:
        limits.append(func.sum(VersionRow.size_bytes) > config.max_ephemeral_gib * GIB)
    if rules.sampled is None or not limits:
        return []
    crowded = session.exec(select(VersionRow.model_id).group_by(col(VersionRow.model_id)).having(or_(*limits))).all()
    may_go = (model_id for model_id in crowded if any(_going(session, model_id, rules, now)))
    return list(islice(may_go, BATCH))


def _remove(session: Session, rules: Rules, now: float, crowded: Sequence[str]) -> list[Removal]:
    removals: list[Removal] = []
    for model_id in crowded:
        if len(removals) >= BATCH:
            break
        for row, limit in islice(_going(session, model_id, rules, now), BATCH - len(removals)):
            removals.append(forget_version(session, row.version, row.folder, row.size_bytes or 0, limit))
            session.delete(row)
        if removals and (model := session.get(ModelRow, model_id)) is not None:
            removals += _forgotten_samplers(session, model)
    return removals


surplus_versions = TableSweep(_crowded, _remove)


def _going(session: Session, model_id: str, rules: Rules, now: float) -> Iterator[tuple[VersionRow, str]]:
    """Yield the versions of `_beyond` that are not in use."""
    model = session.get(ModelRow, model_id)
    for row, limit in _beyond(session, model_id, rules.config):
        is_current = model is not None and model.inflight_version == row.version
        if not is_current and not _in_use(row, rules, now):
            yield row, limit


def _beyond(session: Session, model_id: str, config: EngineConfig) -> Iterator[tuple[VersionRow, str]]:
    """Yield (version, limit that it exceeds), newest first."""
    rows = session.exec(select(VersionRow).where(VersionRow.model_id == model_id)).all()
    most, taken = config.max_ephemeral_gib * GIB, 0
    for number, row in enumerate(sorted(rows, key=_place, reverse=True)):
        taken += row.size_bytes or 0
        if config.keep_last_ephemeral and number >= config.keep_last_ephemeral:
            yield row, f"keep_last_ephemeral={config.keep_last_ephemeral}"
        elif most and taken > most and number > 0:
            yield row, f"max_ephemeral_gib={config.max_ephemeral_gib:g}"


def _place(row: VersionRow) -> int:
    """Return the seq_id of the request that published a version."""
    return int(row.version.rpartition("@")[2])


def _in_use(row: VersionRow, rules: Rules, now: float) -> bool:
    assert rules.sampled is not None
    used_at = max(row.created_at, rules.heard_since, rules.sampled.get(row.version, 0.0))
    return row.digest is None or used_at > now - rules.config.ephemeral_idle_sec


def _forgotten_samplers(session: Session, model: ModelRow) -> list[Removal]:
    """Delete a model's samplers whose versions were removed, except for the newest `KNOWN_SAMPLERS`."""
    session.flush()
    gone = select(SamplerRow).where(
        SamplerRow.session_id == model.session_id,
        SamplerRow.model_id == model.model_id,
        col(SamplerRow.removed_by).is_not(None),
    )
    oldest = session.exec(gone.order_by(col(SamplerRow.created_at).desc()).offset(KNOWN_SAMPLERS)).all()
    for sampler in oldest:
        session.delete(sampler)
    ids = tuple(sampler.sampler_id for sampler in oldest)
    return [Removal(f"{len(ids)} samplers without weights", changed=ids)] if ids else []


def limit_that_removed(sampler: SamplerRow, config: EngineConfig) -> str | None:
    """Return the error of a sampler whose version was removed by a limit. None for other samplers."""
    if sampler.removed_by is None:
        return None
    option = sampler.removed_by.partition("=")[0]
    return (
        f"its weights went because of {sampler.removed_by}, which limits what a model keeps without a name, and as "
        f"nothing had sampled them for ephemeral_idle_sec={config.ephemeral_idle_sec}. Give save_weights_for_sampler a "
        f"name (path) to keep weights, or start the server with a larger --{option.replace('_', '-')}"
    )
