"""Signed tokens of this server. Clients send some of them instead of API keys; others are in links that need no key.

All are JSON web tokens, signed with a secret that the server generates once and keeps in its database. Each purpose has
its own audience, so a token for one purpose is not accepted for another.
"""

import time
from typing import Any, Literal

import jwt

Audience = Literal["api", "download", "upload", "upload_file", "trace"]

ALGORITHM = "HS256"


class BadToken(Exception):
    """The token has a wrong signature or another purpose, or has expired."""


class Signer:
    """Creates and verifies tokens.

    Args:
        secret: Signing secret in hexadecimal digits.
    """

    def __init__(self, secret: str):
        self._key = bytes.fromhex(secret)

    def sign(self, audience: Audience, claims: dict[str, Any], expires: int) -> str:
        """Create a token with these claims that expires at `expires`, a Unix time."""
        dates = {"iat": int(time.time()), "exp": expires}
        return jwt.encode({**claims, "aud": audience, **dates}, self._key, ALGORITHM)

    def read(self, audience: Audience, token: str) -> dict[str, Any]:
        """Verify a token and return its claims. Raises `BadToken`."""
        try:
            return jwt.decode(
                token, self._key, [ALGORITHM], audience=audience, options={"require": ["exp"], "verify_iat": False}
            )
        except jwt.ExpiredSignatureError as error:
            raise BadToken("has expired") from error
        except jwt.InvalidTokenError as error:
            raise BadToken("was not made by this server, or was changed") from error
