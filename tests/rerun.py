"""Run the suite, and what fails beside other tests once more alone: `python -m tests.rerun ARGUMENTS OF PYTEST`.

Tests kill processes and measure time, three at once on two cores. What fails there and passes alone is printed as such
and does not fail the run: it is a race, of the test or of the code, to be looked for. More than a few are no chance.
"""

import json
import subprocess
import sys
from pathlib import Path

MOST = 4
"""Failures that may be a matter of chance."""
LAST_FAILED = Path(__file__).parents[1] / ".pytest_cache" / "v" / "cache" / "lastfailed"
PYTEST = [sys.executable, "-m", "pytest"]


def main(arguments: list[str]) -> int:
    """Exit status of the suite, or of what was run again."""
    LAST_FAILED.unlink(missing_ok=True)
    status = subprocess.run([*PYTEST, *arguments]).returncode
    if status != 1 or not LAST_FAILED.exists():  # only 1 says that tests ran, and some failed
        return status
    failed = [name for name, is_failed in json.loads(LAST_FAILED.read_text()).items() if is_failed]
    if not 0 < len(failed) <= MOST:
        return status
    print(f"\n{len(failed)} failed beside other tests; once more alone: {', '.join(failed)}", flush=True)
    status = subprocess.run([*PYTEST, *failed]).returncode
    if status == 0:
        print(f"FAILED BESIDE OTHERS, PASSED ALONE: {', '.join(failed)}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
