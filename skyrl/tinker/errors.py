"""Errors between a request and its operation. Each is answered with a status of its own."""


class BadKey(Exception):
    """Not a key of this server. `is_token`: it is a token, which the client should make anew with its key."""

    def __init__(self, message: str, is_token: bool = False):
        super().__init__(message)
        self.is_token = is_token


class MalformedBody(Exception):
    """The request body cannot be parsed. The message says what is wrong with it."""


class BodyTooLarge(MalformedBody):
    """A body is larger than is read. The message says what the limit is.

    Args:
        message: For its sender.
        beginning: Last piece of its beginning that was read, if that may be of use.
    """

    def __init__(self, message: str, beginning: bytes | None = None):
        super().__init__(message)
        self.beginning = beginning


class EngineStarting(Exception):
    """The engine has never been ready, so nothing is known of its model yet."""


class DatabaseFull(Exception):
    """The database's disk is full (or fails). Nothing of the job has been stored; it may be tried again."""
