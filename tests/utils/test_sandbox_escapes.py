"""Each way out that was ever listed, tried by code in the sandbox of a trainer who is root, and of one who is not.

The attempts are in `tests/escapes.py`, which runs as that user with a copy of the sandbox, of which one fact is asked
here at a time. `full` is tried where the kernel grants it; the reason of a skipped test says which half was not.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import escapes
import pytest

from skyrl.utils.sandbox.confinement import MAX_THREADS, NOBODY

ROOT = Path(__file__).parents[2]
USER = 12345
REFUSED = {"EPERM", "EACCES", "EROFS", "ENOENT", "ENOSYS"}
"""Errors by which the kernel forbids; others would say that a call was carried out, with bad arguments."""
MODES = [(user, isolation) for isolation in ("full", "limited") for user in ("root", "user")]
IN_FULL = pytest.mark.parametrize("results", MODES[:2], ids="-".join, indirect=True)


@pytest.fixture(scope="module")
def open_folder() -> Iterator[Path]:
    """A folder that every user can reach, with the sandbox in it."""
    with tempfile.TemporaryDirectory(prefix="skyrl-escapes-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        shutil.copytree(ROOT / "skyrl/utils/sandbox", folder / "project/skyrl/utils/sandbox")
        shutil.copy(ROOT / "skyrl/errors.py", folder / "project/skyrl")
        shutil.copy(escapes.__file__, folder)
        (folder / "python").mkdir()
        for path in folder.rglob("*"):  # whatever the umask is that another test has left
            path.chmod(0o755 if path.is_dir() else 0o644)
        yield folder


def command(user: str, folder: Path) -> list[str]:
    """Python for that user. Skips the test where this system does not let us be that user."""
    is_root = os.getuid() == 0
    if user == "root":
        return [sys.executable] if is_root else ["unshare", "--user", "--map-root-user", sys.executable]
    if not is_root:
        return [sys.executable]
    become = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]
    if works([*become, sys.executable]):
        return [*become, sys.executable]
    # Python is where only root can read, so it is shown elsewhere, to this command alone.
    program = folder / "python/bin" / Path(sys.executable).resolve().name
    show = ["unshare", "--mount", "sh", "-c", f'mount --bind {sys.base_prefix} {folder}/python && exec "$@"', "sh"]
    return [*show, *become, "env", f"LD_LIBRARY_PATH={folder}/python/lib", str(program)]


def start(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"]}
    return subprocess.run(arguments, capture_output=True, text=True, cwd="/", env=environment, timeout=250)


def works(python: list[str]) -> bool:
    """Return True if it starts, and can start itself again without the help of its parent."""
    again = "import subprocess, sys; subprocess.run([sys.executable, '-c', ''], check=True)"
    return start([*python, "-c", again]).returncode == 0


@cache
def tried(user: str, isolation: str, folder: Path, *options: str) -> Mapping[str, Any]:
    """Return the results of all attempts."""
    python = command(user, folder)
    if not works(python):
        pytest.skip(f"not tested as {user}: this system does not let the user {os.getuid()} become that")
    home = folder / "-".join(["home", user, isolation, *options])
    home.mkdir(mode=0o755)
    if user == "user" and os.getuid() == 0:
        os.chown(home, USER, USER)
    arguments = [str(folder / "escapes.py"), isolation, str(home), str(folder / "project"), *options]
    done = start([*python, *arguments])
    return {"failed": done.stderr} if done.returncode else json.loads(done.stdout)


@pytest.fixture(params=MODES, ids="-".join)
def results(request: pytest.FixtureRequest, open_folder: Path) -> Mapping[str, Any]:
    user, isolation = request.param
    found = tried(user, isolation, open_folder)
    assert "failed" not in found, found["failed"]
    if "refused" in found:
        pytest.skip(f"isolation={isolation} is not tested as {user}: {found['refused']}")
    if not found["landlock"] and isolation == "limited":
        pytest.skip("isolation=limited is not tested with Landlock: this kernel has none")
    return {**found, "user": user, "isolation": isolation}


def refusal(outcome: list[str]) -> str:
    """The kernel's word for it; empty if the code got what it wanted."""
    status, printed, _ = outcome
    words = printed.split()
    return words[1] if status == "ok" and words[:1] == ["refused"] else ""


@pytest.mark.full
@pytest.mark.parametrize("name", escapes.WRITES)
def test_nothing_outside_can_be_opened_to_change_it(results, name):
    assert refusal(results["writes"][name]) in REFUSED, results["writes"][name]


@pytest.mark.full("root-full", "user-limited")
@pytest.mark.parametrize("name", escapes.READS)
def test_what_is_not_the_library_cannot_be_read(results, name):
    assert refusal(results["reads"][name]) in REFUSED, results["reads"][name]


@pytest.mark.full("root-full", "user-limited")
@pytest.mark.parametrize("name", escapes.CALLS)
def test_a_call_that_reaches_out_is_refused(results, name):
    assert refusal(results["calls"][name]) in REFUSED, results["calls"][name]


@pytest.mark.full("root-full", "user-limited")
@pytest.mark.parametrize("name", escapes.LEGITIMATE)
def test_what_code_of_good_will_does_works(results, name):
    status, printed, errors = results["legitimate"][name]
    assert status == "ok" and printed.endswith("done\n"), errors or printed


@pytest.mark.full("root-full", "user-limited")
def test_nothing_of_the_user_changed_and_nobody_came_by(results):
    assert (results["changed"], results["visitors"], results["alive"]) == ([], 0, True)


@pytest.mark.full("root-full", "user-limited")
def test_a_call_in_another_numbering_ends_the_process(results):
    if os.uname().machine != "x86_64":
        pytest.skip("x32 is a numbering of x86_64")
    assert results["foreign"]["x32"][0] == "killed"


@pytest.mark.full("root-full", "user-limited")
def test_code_does_not_run_as_root(results):
    expected = {"root": NOBODY, "user": USER}[results["user"]]
    if os.getuid() != 0:
        # A user who plays root in a namespace has no other user to become; `full` names the one that there is so.
        expected = {"root": {"full": NOBODY, "limited": 0}[results["isolation"]], "user": os.getuid()}[results["user"]]
    assert f"({expected}, {expected}, {expected})" in fact(results, "user")


def fact(results: Mapping[str, Any], name: str) -> str:
    status, printed, errors = results["facts"][name]
    assert status == "ok" and printed.endswith("done\n"), errors or printed
    return printed.removesuffix("done\n").strip()


@pytest.mark.full("root-full", "user-limited")
def test_code_has_no_file_but_its_own_four(results):
    assert fact(results, "files") == "[0, 1, 2, 3]"


@pytest.mark.full("root-full", "user-limited")
def test_the_environment_holds_nothing_of_the_trainer(results):
    assert escapes.SECRET not in fact(results, "environment")


@pytest.mark.full("root-full", "user-limited")
def test_threads_are_bounded(results):
    assert MAX_THREADS - 5 <= int(fact(results, "threads")) <= MAX_THREADS + 1


@pytest.mark.full("root-full", "user-limited")
def test_only_full_has_a_folder_to_write_to(results):
    if results["isolation"] == "full":
        assert sorted(eval(fact(results, "writing"))) == ["folder", "other"]
    else:
        assert refusal(results["facts"]["writing"]) == "EACCES"


@pytest.mark.full("root-full", "user-limited")
@IN_FULL
def test_full_holds_only_mounts_that_are_read_only_or_its_own_memory_or_harmless_devices(results):
    for line in fact(results, "mounts").splitlines():
        place, options = line.split()[4:6]
        flags = options.split(",")
        assert "nosuid" in flags
        if place in ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"):
            continue
        assert "nodev" in flags and ("ro" in flags or "/skyrl-code-" in place), line


@pytest.mark.full("root-full", "user-limited")
@IN_FULL
def test_full_leaves_code_no_right_of_an_administrator_but_to_read(results):
    rights = {line.split(":\t")[0]: int(line.split(":\t")[1], 16) for line in eval(fact(results, "rights"))}
    assert rights["CapPrm"] & ~4 == 0 and rights["CapEff"] & ~4 == 0 and rights["CapInh"] == rights["CapAmb"] == 0


@pytest.mark.full
@pytest.mark.parametrize("user", ["root", "user"])
def test_without_landlock_limited_still_changes_nothing_and_says_what_it_cannot_stop(user, open_folder):
    results = tried(user, "limited", open_folder, "no-landlock")
    assert (results["landlock"], results["changed"], results["visitors"]) == (0, [], 0)
    for kind in ("writes", "calls"):
        assert {name: refusal(outcome) in REFUSED for name, outcome in results[kind].items()} == dict.fromkeys(
            results[kind], True
        )
    (warning,) = results["warnings"]
    assert "no Landlock" in warning and "can read all files" in warning
    assert not refusal(results["reads"]["data"])  # what the warning says, if code is the user of the trainer still
