"""Logging as plain text on stderr, set up once per process.

`setup_logging` is called by a process's entry point and owns the root logger; libraries such as uvicorn propagate to it
(start uvicorn with `log_config=None`). A process that seems stuck says where its threads are when it gets SIGUSR1.
"""

import faulthandler
import logging
import signal
import sys

FORMAT = "%(asctime)s %(levelname)-7s {process}%(name)s: %(message)s"


def setup_logging(level: str = "info", process: str = "") -> None:
    """Log from `level` ("debug", "info", "warning", "error") upward; `process` marks each line.

    SIGUSR1 prints the stacks of all threads from now on.
    """
    prefix = f"[{process}] " if process else ""
    logging.basicConfig(level=level.upper(), format=FORMAT.format(process=prefix), force=True)
    # Libraries that narrate each HTTP request or file lock at INFO.
    for name in ("httpx", "filelock", "jax", "alembic.runtime.plugins"):
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))
    if hasattr(signal, "SIGUSR1") and sys.stderr is not None:
        faulthandler.register(signal.SIGUSR1)
