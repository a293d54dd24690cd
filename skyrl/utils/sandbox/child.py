"""Process that runs code for `run.py`. It reads a job, confines itself, and forks once per case.

It uses only the standard library, for a fast start. The code can access all data in this process, so the process gets
inputs, never expected outputs.
"""

import json
import math
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from skyrl.utils.sandbox import calls, confinement, landlock, library, namespaces
from skyrl.utils.sandbox.threads import Watch

PRELUDE = """
import bisect, collections, copy, datetime, functools, heapq, io, itertools, json, math, operator, os, random, re
import statistics, string, sys
from bisect import bisect_left, bisect_right, insort
from collections import *
from copy import deepcopy
from fractions import Fraction
from functools import *
from heapq import *
from itertools import *
from math import ceil, comb, factorial, floor, gcd, inf, isqrt, lcm, log, log2, log10, perm, pi, prod, sqrt
from operator import and_, iand, ior, itemgetter, mul, or_, sub, xor
from random import randrange, shuffle
from string import ascii_letters, ascii_lowercase, ascii_uppercase, digits
from typing import *
"""
"""Names that solutions of programming contests expect to be imported."""


def main() -> None:
    """Run the job from standard input. Writes one JSON line per case to standard output.

    The job is a JSON line. Each case after the first starts when another line is received. A line before the results
    reports that the confinement failed ("refused") or is incomplete ("caution").
    """
    job = json.loads(sys.stdin.readline())
    os.umask(0o022)
    confinement.die_with_parent()
    calls.give_up_gains()
    try:
        writes = _enter_full(job) if job["isolation"] == "full" else _enter_limited()
    except OSError as error:
        print(json.dumps({"refused": str(error)}), flush=True)
        return
    confinement.hide_memory()
    confinement.die_with_parent()
    os.chdir(job["folder"])
    calls.program(writes, job["isolation"] == "limited")
    sys.set_int_max_str_digits(0)
    names: dict[str, Any] = {}
    if job["prelude"]:
        exec(PRELUDE, names)
    for number, case in enumerate(job["cases"]):
        if number and not sys.stdin.readline():
            break
        print(json.dumps(_run(job, case, names, writes)), flush=True)
    os._exit(0)


def _enter_full(job: dict[str, Any]) -> bool:
    """Enter full isolation, in a new process that sees only what the code may see. Returns True: the code may write."""
    readable = library.readable()
    namespaces.enter_namespaces()
    if inner := os.fork():  # the first process of the new namespace; when it ends, the kernel kills all others in it
        _, status = os.waitpid(inner, 0)
        os._exit(os.waitstatus_to_exitcode(status) != 0)
    confinement.die_with_parent()
    namespaces.enter_root(job["folder"], job["folder_bytes"], readable)
    confinement.give_up_rights(readable, may_read_all=True)
    return True


def _enter_limited() -> bool:
    """Enter limited isolation.

    Returns True if system calls that write may be allowed, because Landlock denies the writes.
    """
    readable, version = library.readable(), landlock.version()
    ruleset = landlock.rules(readable, library.DEVICES) if version else -1
    is_user = confinement.give_up_rights(readable, may_read_all=bool(version))
    if version:
        landlock.restrict_self(ruleset)
    if caution := _caution(is_user, bool(version)):
        print(json.dumps({"caution": caution}), flush=True)
    return version >= landlock.RESTRICTS_ALL_WRITES


def _caution(is_user: bool, has_landlock: bool) -> str:
    """Describe the restrictions that are missing on this system; empty if there are none."""
    reads = "this kernel has no Landlock: code can read all files and environments of processes that its user can read"
    roots = (
        "code keeps the user id 0, without its rights: this container may not change users, or only root can read "
        f"Python's library (make {sys.base_prefix} readable to all)"
    )
    return "; ".join(([] if has_landlock else [reads]) + ([] if is_user else [roots]))


def _run(job: dict[str, Any], case: dict[str, Any], names: dict[str, Any], writes: bool) -> dict[str, str | None]:
    """Run one case in its own process. Returns its status, its output, and the JSON of the function's result."""
    # Files in memory: the file size limit bounds the output, and no reader is needed while the process runs.
    given, out, err, value = (os.memfd_create(name) for name in ("in", "out", "err", "value"))
    os.pwrite(given, case.get("stdin", "").encode(errors="surrogateescape"), 0)
    watch = Watch(asks=job["isolation"] == "limited")
    pid = os.fork()
    if not pid:
        _run_confined(job, case, names, (given, out, err, value), watch, writes)
    watch.begin()
    in_time = watch.wait(pid, job["wall_s"])
    if not in_time:
        os.kill(pid, signal.SIGKILL)
    _, wait_status = os.waitpid(pid, 0)
    exit_code = os.waitstatus_to_exitcode(wait_status)
    late = not in_time or exit_code == -signal.SIGXCPU
    status = "timeout" if late else {0: "ok", 1: "error"}.get(exit_code, "killed")
    texts = [_take(file) for file in (out, err, value)]
    os.close(given)
    return {"status": status, "stdout": texts[0], "stderr": texts[1], "value": texts[2] or None}


def _take(file: int) -> str:
    size = os.fstat(file).st_size
    data = os.pread(file, size, 0)
    os.close(file)
    return data.decode(errors="replace")


def _run_confined(
    job: dict[str, Any],
    case: dict[str, Any],
    names: dict[str, Any],
    files: tuple[int, int, int, int],
    watch: Watch,
    writes: bool,
) -> None:
    """Run a case in the forked process and exit it: 0 if the code finished, 1 if it raised."""
    status = 1
    try:
        watch.prepare()
        for target, file in enumerate(files):
            os.dup2(file, target + 100)
        os.closerange(4, 100)
        for target in range(4):
            os.dup2(target + 100, target)
        os.closerange(4, calls.CHANNEL)
        os.closerange(calls.CHANNEL + 1, os.sysconf("SC_OPEN_MAX"))
        sys.stdin = sys.__stdin__ = os.fdopen(0, encoding="utf-8", errors="surrogateescape")
        sys.stdout = sys.__stdout__ = os.fdopen(1, "w", encoding="utf-8", errors="surrogateescape")
        sys.stderr = sys.__stderr__ = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace")
        confinement.die_with_parent()
        confinement.limit_resources(math.ceil(job["cpu_s"]), job["memory_bytes"], job["file_bytes"])
        if job["isolation"] == "full":
            confinement.limit_threads()
        watch.submit(calls.forbid_calls(writes=writes, asks=job["isolation"] == "limited"))
        status = _execute(job["code"], job["function"], case.get("arguments", []), names)
        sys.stderr.flush()
        sys.stdout.flush()
    finally:
        os._exit(status)


def _execute(code: str, function: str | None, arguments: Sequence[Any], names: dict[str, Any]) -> int:
    module = ModuleType("__main__" if function is None else "solution")
    module.__dict__.update({name: item for name, item in names.items() if not name.startswith("__")})
    sys.modules[module.__name__] = module
    try:
        exec(compile(code, "<code>", "exec"), module.__dict__)
        if function is not None:
            holder = module.Solution() if hasattr(module, "Solution") else module
            text = json.dumps(getattr(holder, function)(*arguments))
            os.write(3, text.encode())
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.stderr.write(_without_own_frames())
        return 1
    return 0


def _without_own_frames() -> str:
    """Return the traceback of the current exception, without frames of this file."""
    kind, error, trace = sys.exc_info()
    return "".join(traceback.format_exception(kind, error, trace.tb_next if trace else None))
