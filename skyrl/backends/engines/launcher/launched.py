"""Entry point of an engine process: `python -m skyrl.backends.engines.launcher.launched RECORD START COMMAND...`.

The process writes its identity to the record before it executes the engine. So even if a driver is killed at any
moment, the next driver finds all its engines.
"""

import json
import os
import sys
from pathlib import Path

from skyrl.utils.files.atomic_folders import replace_file
from skyrl.utils.processes import ProcessIdentity


def main(record: str, start: str, command: list[str]) -> None:
    """Execute the engine, unless the record belongs to a newer start."""
    path, identity = Path(record), ProcessIdentity.of(os.getpid())
    assert identity is not None
    facts = json.loads(path.read_text())
    if facts["start"] != start:
        sys.exit("another engine has been started in the place of this one")
    replace_file(path, json.dumps({**facts, **identity._asdict()}).encode())
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]} cannot be started: {error}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
