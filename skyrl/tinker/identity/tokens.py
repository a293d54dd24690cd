"""Tokens that only this server can have made: what stands for an API key, and links to files that need no key.

Both are JSON web tokens, signed with a secret that the server draws once and keeps in its database. Each kind has an
audience of its own, so that one cannot be used as the other.
"""

import time
from typing import Any, Literal

import jwt

Audience = Literal["api", "download", "upload", "upload_file", "trace"]

ALGORITHM = "HS256"


class BadToken(Exception):
    """The token was not made here, was made for something else, or has expired."""


class Signer:
    """Makes and reads tokens.

    Args:
        secret: What they are signed with, in hexadecimal digits.
    """

    def __init__(self, secret: str):
        self._key = bytes.fromhex(secret)

    def sign(self, audience: Audience, claims: dict[str, Any], expires: int) -> str:
        """A token that says `claims` until `expires`, a Unix time."""
        dates = {"iat": int(time.time()), "exp": expires}
        return jwt.encode({**claims, "aud": audience, **dates}, self._key, ALGORITHM)

    def read(self, audience: Audience, token: str) -> dict[str, Any]:
        """Claims of a token. Raises `BadToken`."""
        try:
            return jwt.decode(
                token, self._key, [ALGORITHM], audience=audience, options={"require": ["exp"], "verify_iat": False}
            )
        except jwt.ExpiredSignatureError as error:
            raise BadToken("has expired") from error
        except jwt.InvalidTokenError as error:
            raise BadToken("was not made by this server, or was changed") from error
