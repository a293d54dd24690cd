"""Errors that occur before a request reaches its operation. Each has its own HTTP status."""


class BadKey(Exception):
    """Unknown key. If `is_token`, an invalid or expired token, which the client must renew with its key."""

    def __init__(self, message: str, is_token: bool = False):
        super().__init__(message)
        self.is_token = is_token


class MalformedBody(Exception):
    """The request body cannot be parsed. The message has the reason."""


class BodyTooLarge(MalformedBody):
    """A body exceeds the limit that the message states.

    Args:
        message: Message to the client.
        beginning: Piece of the body that was received last. With the pieces before it, it may contain the request's
            address. None: requests of this path have no address.
    """

    def __init__(self, message: str, beginning: bytes | None = None):
        super().__init__(message)
        self.beginning = beginning


class EngineStarting(Exception):
    """No engine has been ready yet, so the base model is not known."""


class SampleFailed(Exception):
    """The server could not sample, through no fault of the request, which may be sent again."""


class DatabaseFull(Exception):
    """The database's disk is full or fails. Nothing of the job was stored; it may be retried."""
