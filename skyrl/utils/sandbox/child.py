"""The process that runs code for `run.py`. It reads a job, walls itself in, and forks once per case.

Standard library only, so that it starts quickly. What it knows the code may know: inputs, never expected outputs.
"""

import json
import math
import os
import select
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from skyrl.utils.sandbox import confinement

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
"""Names that solutions of programming contests expect to be there."""


def main() -> None:
    """Do the job on standard input; answers are lines of JSON on standard output, one per case.

    The job is a line of JSON. Each case after the first waits for one more line.
    """
    job = json.loads(sys.stdin.readline())
    confinement.die_with_parent()
    if job["isolation"] == "full":
        hidden = list(private_files(job["home"], [*job["needed"], *sys.path, sys.prefix, sys.base_prefix]))
        try:
            confinement.enter_namespaces(job["folder"], job["folder_bytes"], hidden)
        except OSError as error:
            print(json.dumps({"refused": str(error)}), flush=True)
            return
        if inner := os.fork():  # the first process of the new namespace: all others in it end with it
            _, status = os.waitpid(inner, 0)
            os._exit(os.waitstatus_to_exitcode(status) != 0)
        confinement.die_with_parent()
        confinement.mount_own_processes()
    confinement.hide_memory()
    os.chdir(job["folder"])
    sys.set_int_max_str_digits(0)
    names: dict[str, Any] = {}
    if job["prelude"]:
        exec(PRELUDE, names)
    for number, case in enumerate(job["cases"]):
        if number and not sys.stdin.readline():
            break
        print(json.dumps(_run(job, case, names)), flush=True)
    os._exit(0)


def _run(job: dict[str, Any], case: dict[str, Any], names: dict[str, Any]) -> dict[str, str | None]:
    """One case in a process of its own: how it ended, what it printed, and the JSON of what it returned."""
    # Files in memory: what the process writes is bounded by the limit on files, and needs no reader while it runs.
    given, out, err, value = (os.memfd_create(name) for name in ("in", "out", "err", "value"))
    os.pwrite(given, case.get("stdin", "").encode(errors="surrogateescape"), 0)
    pid = os.fork()
    if not pid:
        _run_confined(job, case, names, (given, out, err, value))
    watch = os.pidfd_open(pid)
    in_time = bool(select.select([watch], [], [], job["wall_s"])[0])
    if not in_time:
        os.kill(pid, signal.SIGKILL)
    _, wait_status = os.waitpid(pid, 0)
    os.close(watch)
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
    job: dict[str, Any], case: dict[str, Any], names: dict[str, Any], files: tuple[int, int, int, int]
) -> None:
    """In the forked process, which it ends: 0 where the code came to its end, 1 where it raised."""
    status = 1
    try:
        for target, file in enumerate(files):
            os.dup2(file, target + 100)
        os.closerange(4, 100)
        for target in range(4):
            os.dup2(target + 100, target)
        os.closerange(4, 200)
        sys.stdin = sys.__stdin__ = os.fdopen(0, encoding="utf-8", errors="surrogateescape")
        sys.stdout = sys.__stdout__ = os.fdopen(1, "w", encoding="utf-8", errors="surrogateescape")
        sys.stderr = sys.__stderr__ = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace")
        confinement.die_with_parent()
        confinement.drop_capabilities()
        confinement.limit_resources(math.ceil(job["cpu_s"]), job["memory_bytes"], job["file_bytes"])
        confinement.forbid_calls()
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
    """The traceback of the current exception from the code's first line on."""
    kind, error, trace = sys.exc_info()
    return "".join(traceback.format_exception(kind, error, trace.tb_next if trace else None))


def private_files(home: str, needed: Sequence[str]) -> Iterator[str]:
    """The home folder, or what is in it and does not hold a file that Python needs."""
    needed = [os.path.realpath(path) for path in needed if path]
    home = os.path.realpath(home)

    def holds_needed(folder: str) -> bool:
        return any(path == folder or path.startswith(folder + os.sep) for path in needed)

    if home == os.sep or not os.path.isdir(home):
        return
    if not holds_needed(home):
        yield home
        return
    for entry in os.scandir(home):
        if not entry.is_symlink() and not holds_needed(entry.path):
            yield entry.path
