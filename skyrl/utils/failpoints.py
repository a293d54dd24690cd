"""Named crash points at which tests kill the process, to prove that nothing is lost.

`SKYRL_CRASH_POINTS` names a folder. If the folder contains a file `x`, a process that reaches `crash_point("x")`
removes the file and kills itself with SIGKILL. Without the variable, crash points do nothing.
"""

import os
import signal
from pathlib import Path

CRASH_POINTS = {
    "start: state id in the database, not in the folder",
    "start: state id in the folder, not confirmed",
    "start: snapshots in the bucket, state id on disk",
    "api: request parsed, not logged",
    "api: request logged, not sent",
    "api: result received, not stored",
    "api: result stored, not answered",
    "api: sample charged, not answered",
    "api: answer stored, not sent",
    "api: snapshot reported, not recorded",
    "api: snapshot recorded, older files still there",
    "api: revival read, not sent",
    "api: checkpoint unnamed, files still there",
    "engine: before a quantum",
    "engine: quantum done, result not sent",
    "engine: optimizer step computed, not kept",
    "engine: model half revived",
    "engine: version published, not written",
    "storage: files half written",
    "storage: files written, not in place",
    "storage: older folder moved aside",
    "storage: folder in place",
    "publish: adapter written, not in place",
    "publish: adapter in place, not loaded",
    "publish: adapter loaded, not sampled",
    "archive: half written",
    "bucket: files half sent",
    "bucket: folder in place",
    "trainer: step taken, not recorded",
    "trainer: models written, state not",
    "trainer: checkpoint in place, not the newest",
    "trainer: newest named, older ones still there",
}
"""Names of all crash points."""

_folder = os.environ.get("SKYRL_CRASH_POINTS")


def crash_point(name: str) -> None:
    """Kill this process if a test has requested it."""
    if _folder is None:
        return
    assert name in CRASH_POINTS, name
    try:
        (Path(_folder) / name).unlink()
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)
