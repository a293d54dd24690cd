"""Shared exceptions. There are two kinds of failures: those that the caller can fix, and internal errors.

A `RequestError` is reported to the client verbatim, so its message names the field, its value, the rule and a way out.
A `ConfigError` is the counterpart for a configuration. All other exceptions are internal errors: the client gets
"internal error (request ...)", and the log has the traceback. `BackendLost` reports a failure of the backend itself,
not of one request.
"""


class RequestError(Exception):
    """The request cannot be served as sent. The message names the field, its value and a way out."""


class UnknownName(RequestError):
    """Unknown id or name (HTTP status 404)."""


class StorageError(Exception):
    """A stored file is missing, damaged or cannot be written. The message has the path and the problem."""


class DamagedFiles(StorageError):
    """Stored files are missing or damaged, so reading them again does not help. Other storage errors may be
    temporary."""


class BackendLost(Exception):
    """The backend cannot continue because a worker died or timed out, or a device failed. It does not mean that a
    request was invalid.

    The engine process of a server exits, and a new one recovers from snapshots and the log. A training run restarts
    from its newest checkpoint.

    Args:
        message: The lost part of the backend and the reason.
        request_ids: Requests that the lost part was computing. One of them may still be the cause of the failure.
            None: all running requests.
    """

    def __init__(self, message: str, request_ids: tuple[str, ...] | None = None):
        super().__init__(message)
        self.request_ids = request_ids


class BackendStopped(RuntimeError):
    """A backend that runs in a thread has stopped, so it does no more work. The cause is in `__cause__`."""


class WrongWeights(Exception):
    """A sample was generated with other weights than requested. The message names both."""


class ConfigError(ValueError):
    """A configuration cannot be used as written. The message names each field, its value, the rule and a way out."""
