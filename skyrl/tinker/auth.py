"""Who is asking. With configured keys, a tenant is a key; without, any key will do and a tenant is a session."""

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Caller:
    """The sender of a request. `tenant` is None on a server without keys, where everybody may touch everything."""

    tenant: str | None = None

    def tenant_of(self, session_id: str) -> str:
        """The tenant that owns what this caller makes in that session."""
        return self.tenant or session_id

    def may_touch(self, owner: str) -> bool:
        return self.tenant is None or self.tenant == owner


def authenticate(api_key: str | None, api_keys: Sequence[str]) -> Caller | None:
    """The caller behind an `X-API-Key` header; None if the key is not one of the configured ones."""
    if not api_keys:
        return Caller()
    given = (api_key or "").encode()
    if not any(hmac.compare_digest(given, known.encode()) for known in api_keys):
        return None
    return Caller("key-" + hashlib.sha256(given).hexdigest()[:16])
