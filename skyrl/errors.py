"""The two kinds of failure: what the caller can fix, and the rest.

A `RequestError` is reported to its sender word for word, so its message names the field, its value, the rule and a
way out. A `ConfigError` is the same for a configuration. Every other exception is a fault of ours: the sender reads
"internal error (request ...)" and the log has the traceback. `BackendLost` is nobody's fault, and ends the process.
"""


class RequestError(Exception):
    """The request cannot be served as sent. The message names the field, its value and a way out."""


class UnknownName(RequestError):
    """An id or name that nothing is known by (a 404 at the HTTP door)."""


class StorageError(Exception):
    """A stored file is missing, damaged or cannot be written. The message names the path and what is wrong with it."""


class BackendLost(Exception):
    """The backend cannot go on, and no request is to blame: a worker is dead or late, a device has failed for good.

    The message says which and why. Its process ends; a new one recovers from snapshots and the log.

    Args:
        message: What is lost and why.
        request_ids: What was being computed by what is lost, which may be the cause after all. None: all that runs.
    """

    def __init__(self, message: str, request_ids: tuple[str, ...] | None = None):
        super().__init__(message)
        self.request_ids = request_ids


class WrongWeights(Exception):
    """A sample was drawn from other weights than those that it was asked of. The message names both."""


class ConfigError(ValueError):
    """A configuration cannot be used as written. The message names each field, its value, the rule and a way out."""
