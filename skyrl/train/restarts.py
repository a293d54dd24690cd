"""Restarts of a training run that has lost its backend, for example because a worker died.

A restart does what a repetition of the command does: it continues from the newest checkpoint, or begins anew if there
is none. The process stays the same.
"""

import gc
import logging
import time
from collections.abc import Callable

from skyrl.errors import BackendLost, BackendStopped, ConfigError, RequestError

log = logging.getLogger(__name__)

PAUSES_S = (0.0, 10.0, 60.0)
"""Seconds before the first restart and before later ones. The last value applies to all that follow."""


def train_with_restarts(train: Callable[[], None], limit: int) -> None:
    """Call `train`, and again after each loss of the backend, up to `limit` more times.

    If the backend does not start at first, there is no restart, because the configuration may be the cause. Later, a
    failed start counts as a loss.

    Raises `BackendLost` if the backend is lost and there is no further restart. Also raises the errors of `train`.
    """
    for number in range(limit + 1):
        try:
            return train()
        except BackendStopped as stopped:
            if not isinstance(stopped.__cause__, BackendLost):
                raise
            lost = BackendLost(str(stopped.__cause__))  # without the traceback, which refers to the old backend
        except (BackendLost, ConfigError) as error:
            if number == 0 or (isinstance(error, ConfigError) and not isinstance(error.__cause__, RequestError)):
                raise
            lost = type(error)(str(error))
        if number == limit:
            raise lost
        pause = PAUSES_S[min(number, len(PAUSES_S) - 1)]
        log.error("the backend is lost: %s", lost)
        log.warning("restart %d of %d in %g s, from the newest checkpoint", number + 1, limit, pause)
        gc.collect()  # frees the memory of the old backend
        time.sleep(pause)
