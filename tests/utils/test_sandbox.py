"""Code of a model: what it can do, and what it cannot.

Each attack is run for what it is, and judged by what it printed or left behind.
"""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from isolation import require, strongest

from skyrl.utils.sandbox.run import Isolation, Limits, Outcome, run_code

SMALL = Limits(cpu_s=10, memory_mb=512, file_mb=1)
BOTH = pytest.mark.parametrize("isolation", ["full", "limited"])


def run(code: str, *inputs: str, isolation: Isolation = "full", limits: Limits = SMALL, **options) -> list[Outcome]:
    require(isolation)
    cases = [{"stdin": text} for text in inputs or [""]]
    return asyncio.run(run_code(code, cases, limits=limits, isolation=isolation, **options))


def printed(code: str, isolation: Isolation = "full") -> str:
    """Return the output of a program that must come to its end."""
    (outcome,) = run(code, isolation=isolation)
    assert outcome.status == "ok", outcome
    return outcome.stdout.strip()


@BOTH
def test_a_program_reads_its_input_and_prints(isolation):
    outcomes = run("import sys\na = input()\nprint(a, sys.stdin.read(), sep='|')", "1\n2", "é\n", isolation=isolation)
    assert [(outcome.status, outcome.stdout) for outcome in outcomes] == [("ok", "1|2\n"), ("ok", "é|\n")]


def test_a_program_is_the_main_module():
    assert printed("if __name__ == '__main__':\n    print('main')") == "main"


def test_cases_share_nothing_in_memory():
    outcomes = run("import math\nprint(hasattr(math, 'seen'))\nmath.seen = 1", "", "")
    assert [outcome.stdout for outcome in outcomes] == ["False\n", "False\n"]


def test_an_exception_is_an_error_with_the_codes_own_traceback():
    (outcome,) = run("print('before')\n1 / 0")
    assert (outcome.status, outcome.stdout) == ("error", "before\n")
    assert outcome.stderr.startswith("Traceback") and "ZeroDivisionError" in outcome.stderr
    assert "child.py" not in outcome.stderr


def test_code_that_does_not_parse_is_an_error():
    assert "SyntaxError" in run("def")[0].stderr


@pytest.mark.parametrize("end", ["raise SystemExit", "import sys; sys.exit(3)", "exit()"])
def test_a_program_may_end_itself(end):
    (outcome,) = run(f"print('before')\n{end}")
    assert (outcome.status, outcome.stdout) == ("ok", "before\n")


def test_a_function_gets_arguments_and_returns_json():
    code = "def pair(a, b):\n    return {'sum': a + b}, (1, 2), inf"
    cases = [{"arguments": [1, 2]}, {"arguments": ["x", "y"]}]
    outcomes = asyncio.run(run_code(code, cases, function="pair", prelude=True, limits=SMALL, isolation=strongest()))
    assert [outcome.value for outcome in outcomes] == [
        '[{"sum": 3}, [1, 2], Infinity]',
        '[{"sum": "xy"}, [1, 2], Infinity]',
    ]


def test_a_method_of_the_class_solution_is_called():
    code = "class Solution:\n    def f(self, a: List[int]): return max(a)\n\nif __name__ == '__main__': input()"
    (outcome,) = asyncio.run(
        run_code(code, [{"arguments": [[1, 3]]}], function="f", prelude=True, limits=SMALL, isolation=strongest())
    )
    assert outcome.value == "3"


@pytest.mark.parametrize("code", ["def g(): pass", "def f(): return {1}", "def f(): return object()"])
def test_a_function_that_is_missing_or_returns_no_json_is_an_error(code):
    (outcome,) = asyncio.run(run_code(code, [{"arguments": []}], function="f", limits=SMALL, isolation=strongest()))
    assert (outcome.status, outcome.value) == ("error", None)


def test_no_case_is_run_after_one_that_decides():
    code = "print(input())"
    outcomes = run(code, "a", "b", "c", go_on=lambda index, outcome: outcome.stdout != "b\n")
    assert [outcome.stdout for outcome in outcomes] == ["a\n", "b\n"]


# Attacks on the machine.

# What a call would do if it were not refused is harmless: signal 0, a limit that is only read.
CALLS = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)

def call(name, *arguments):
    if getattr(libc, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), name)
"""
NEW_PROCESSES = [
    "import os; os.fork()",
    "import os; os.posix_spawn('/bin/true', ['true'], {})",
    "import os; os.execv('/bin/true', ['true'])",
    "import subprocess; subprocess.run(['true'])",
    "import multiprocessing as m; m.get_context('fork').Process(target=print).start()",
    "call('fork')",
    "call('syscall', 57)",
]
NETWORK = [
    "import socket; socket.socket()",
    "import socket; socket.socket(socket.AF_UNIX)",
    "import socket; socket.create_connection(('127.0.0.1', 80))",
    "call('socket', 2, 1, 0)",
    "call('syscall', 425, 1, ctypes.create_string_buffer(120))",
]
OTHERS = [
    "import os; os.kill(os.getppid(), 0)",
    "import os; os.setsid()",
    "import os; os.setpgid(0, 0)",
    "import os, resource; resource.prlimit(os.getppid(), resource.RLIMIT_CPU)",
    "call('ptrace', 2, 1, 0, 0)",
    "call('unshare', 0x10000000)",
    "call('mount', b'tmpfs', b'.', b'tmpfs', 0, None)",
]


@BOTH
@pytest.mark.parametrize("code", [*NEW_PROCESSES, *NETWORK, *OTHERS])
def test_the_kernel_refuses(code, isolation):
    attack = (
        f"{CALLS}\ntry:\n{indented(code)}\nexcept OSError as error:\n    if error.errno in (1, 38): print('refused')"
    )
    (outcome,) = run(attack, isolation=isolation)
    assert (outcome.status, outcome.stdout) == ("ok", "refused\n"), outcome


def indented(code: str) -> str:
    return "\n".join(f"    {line}" for line in code.split("\n"))


@BOTH
def test_memory_is_bounded(isolation):
    code = "try:\n    bytearray(2**30)\nexcept MemoryError:\n    print('refused')"
    assert printed(code, isolation) == "refused"


@pytest.mark.full
@BOTH
def test_cpu_time_is_bounded_and_the_other_cases_run(isolation):
    code = "if input() == 'loop':\n    while True: pass\nprint('done')"
    outcomes = run(code, "go\n", "loop\n", "go\n", isolation=isolation, limits=Limits(cpu_s=1))
    assert [(outcome.status, outcome.stdout) for outcome in outcomes] == [
        ("ok", "done\n"),
        ("timeout", ""),
        ("ok", "done\n"),
    ]


def test_time_that_is_waited_is_bounded():
    assert run("import time; time.sleep(10**6)", limits=Limits(cpu_s=0.1))[0].status == "timeout"


@BOTH
def test_memory_that_grows_is_bounded(isolation):
    (outcome,) = run("a = [0]\nfor _ in a: a.append(0)", isolation=isolation, limits=Limits(cpu_s=100, memory_mb=200))
    assert outcome.status == "error" and "MemoryError" in outcome.stderr


@BOTH
def test_output_is_bounded(isolation):
    (outcome,) = run("while True: print('x' * 1000)", isolation=isolation, limits=Limits(cpu_s=20, file_mb=1))
    assert outcome.status == "error" and "File too large" in outcome.stderr
    assert len(outcome.stdout) <= 2**20


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("open('big', 'wb').write(bytes(2**21))", "File too large"),
        ("for i in range(99): open(str(i), 'wb').write(bytes(2**20))", "No space left on device"),
        ("for i in range(10**5): open(str(i), 'wb').close()", "No space left on device"),
    ],
    ids=["one file", "all files", "files without content"],
)
def test_files_are_bounded(code, said):
    (outcome,) = run(code, limits=Limits(cpu_s=20, file_mb=1))
    assert outcome.status == "error" and said in outcome.stderr


@BOTH
def test_open_files_are_bounded(isolation):
    assert "Too many open files" in run("files = [open('/dev/null') for _ in range(99)]", isolation=isolation)[0].stderr


@BOTH
def test_threads_work(isolation):
    assert (
        printed("import threading as t; x = t.Thread(target=print, args=(7,)); x.start(); x.join()", isolation) == "7"
    )


@BOTH
def test_a_crash_is_told(isolation):
    assert run("import ctypes; ctypes.string_at(0)", isolation=isolation)[0].status == "killed"


@BOTH
def test_our_environment_is_not_passed_on(isolation, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    assert "sk-secret" not in printed("import os; print(dict(os.environ))", isolation)


READ_ENVIRONMENTS = """
import glob
for path in glob.glob("/proc/*/environ") + glob.glob("/proc/*/task/*/environ"):
    try:
        print(open(path, "rb").read())
    except OSError:
        pass
print("done")
"""


def test_no_environment_of_another_process_can_be_read():
    # A process of the same user whose environment is what it was started with.
    environment = {**os.environ, "OPENAI_API_KEY": "sk-secret"}

    require("full")

    async def beside() -> str:
        other = await asyncio.create_subprocess_exec("sleep", "1000", env=environment)
        try:
            (outcome,) = await run_code(READ_ENVIRONMENTS, [{"stdin": ""}], limits=SMALL)
        finally:
            other.kill()
            await other.wait()
        return outcome.stdout

    seen = asyncio.run(beside())
    assert "done" in seen and "sk-secret" not in seen


def test_no_process_outside_is_in_sight():
    pids = printed("import os; print([int(name) for name in os.listdir('/proc') if name.isdigit()])")
    assert len(eval(pids)) == 2  # the one that starts cases, and this case


def test_there_is_no_network_interface_but_the_loopback():
    code = "print([line.split(':')[0].strip() for line in open('/proc/self/net/dev') if ':' in line])"
    assert printed(code) == "['lo']"


def test_the_folder_starts_empty_and_is_gone_afterwards():
    folder, listed = printed("import os; print(os.getcwd(), os.listdir()); open('left', 'w').write('x')").split(
        maxsplit=1
    )
    assert listed == "[]" and not Path(folder).exists()


def test_the_home_folder_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".netrc").write_text("password")
    assert printed(f"import os; print(os.path.exists({str(tmp_path)!r}))") == "False"


def test_packages_beside_python_can_be_imported_but_not_the_users_project():
    assert printed("import numpy; print(numpy.arange(3).sum())", strongest()) == "3"
    project = "try: import skyrl.errors\nexcept (ModuleNotFoundError, PermissionError): print('not there')"
    assert printed(project, strongest()) == "not there"


ONE_OF_EACH = """
import asyncio
from skyrl.utils.sandbox.run import Limits, run_code
for isolation in ("full", "limited"):
    try:
        (outcome,) = asyncio.run(run_code("import os; print(os.getuid())", [{}], limits=Limits(), isolation=isolation))
        print(isolation, outcome.stdout.strip())
    except Exception as error:
        print(isolation, type(error).__name__, error)
"""


def within(*namespace: str) -> list[str]:
    """Lines that a run of each isolation prints in a user namespace of its own."""
    require("full")
    command = ["unshare", *namespace, sys.executable, "-c", ONE_OF_EACH]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def test_a_user_who_is_not_root_has_both_isolations():
    assert within("--user", "--map-user=1000", "--map-group=1000") == ["full 1000", "limited 1000"]


def test_a_system_that_refuses_namespaces_is_told_with_a_way_out():
    forbid = ("sh", "-c", 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"', "sh")
    full, limited = within("--user", "--map-root-user", *forbid)
    assert full.startswith("full ConfigError isolation=full: this system does not permit it ([Errno 28] unshare:")
    assert "set isolation=limited" in full and limited == "limited 0"


def test_a_root_who_may_name_no_other_user_has_code_that_is_called_nobody():
    assert within("--user", "--map-root-user") == ["full 65534", "limited 0"]


def test_a_container_with_a_masked_proc_has_both_isolations():
    mask = ("sh", "-c", 'mount -t tmpfs none /proc/irq && exec "$@"', "sh")
    assert within("--user", "--map-root-user", "--mount", *mask) == ["full 65534", "limited 0"]


def test_no_thread_is_started_where_nobody_can_count_them():
    # A process can have one watcher for its calls; that of some containers takes the place.
    start = """
import asyncio
from skyrl.utils.sandbox import calls
from skyrl.utils.sandbox.run import Limits, run_code
calls.give_up_gains()
calls._install(calls._step(0x06, 0x7FFF0000), 8)
code = "import threading\\ntry: threading.Thread(target=print).start()\\nexcept RuntimeError: print('refused')"
print(asyncio.run(run_code(code, [{}], limits=Limits(), isolation="limited"))[0].stdout)
"""
    done = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True)
    assert done.stdout.strip() == "refused", done.stderr


@pytest.mark.full
def test_a_case_is_run_only_after_the_outcome_before_it_was_judged():
    judged: list[float] = []

    def judge_slowly(index: int, outcome: Outcome) -> bool:
        time.sleep(1)
        judged.append(time.time())
        return True

    code = run_code(
        "import time; print(time.time())", [{}, {}], limits=SMALL, isolation=strongest(), go_on=judge_slowly
    )
    _, second = asyncio.run(code)
    assert float(second.stdout) > judged[0]


@BOTH
def test_nothing_goes_on_after_a_caller_who_gave_up(isolation):
    def running() -> set[psutil.Process]:
        """Of this test: other tests may run code at the same time."""
        return {process for process in psutil.Process().children(recursive=True) if goes_on(process)}

    def goes_on(process: psutil.Process) -> bool:
        try:
            runs_code = "skyrl.utils.sandbox.child" in " ".join(process.cmdline())
            return runs_code and process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    require(isolation)

    async def give_up() -> None:
        limits = Limits(cpu_s=10_000)
        code = run_code("while True: pass", [{}], limits=limits, isolation=isolation)
        task = asyncio.create_task(code)
        while len(begun := running()) < (3 if isolation == "full" else 2):
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        while running() or any(map(goes_on, begun)):
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(give_up(), 120))
