"""A server whose only checkpoint is large and empty. Prints the URL of its archive, then serves until it is killed.

Usage: `archive_server.py FOLDER MEGABYTES`.
"""

import json
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from skyrl.utils.files.atomic_folders import write_folder
from tests.tinker.harness import LiveServer, wait_until_ready
from tests.tinker.test_rest_checkpoints import saved
from tests.tinker.test_rest_downloads import archive_url, folder

with LiveServer(Path(sys.argv[1])) as server:
    wait_until_ready(server)
    path = saved(server)
    piece = bytes(2**20)
    write_folder(folder(server, path), {"big": lambda file: [file.write(piece) for _ in range(int(sys.argv[2]))]})
    print(json.dumps({"url": archive_url(server, path)}), flush=True)
    threading.Event().wait()
