"""Becomes an engine: `python -m skyrl.backends.engines.launcher.launched RECORD START COMMAND...`.

The record, with the identity of this process, is there before the engine is, so that whoever starts engines finds those
that are left of a driver that was killed at any moment.
"""

import json
import os
import sys
from pathlib import Path

from skyrl.utils.files.atomic_folders import replace_file
from skyrl.utils.process_identity import ProcessIdentity


def main(record: str, start: str, command: list[str]) -> None:
    """Become an engine, unless whoever has started this is gone and the record is of another start."""
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
