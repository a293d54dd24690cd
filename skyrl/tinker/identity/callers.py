"""Identity of callers. If keys are configured, each key is a tenant. Otherwise every key is accepted, and each session
is a tenant.

A client can exchange its key for a token, which it sends instead of the key for an hour. Tokens of keys that are no
longer configured are rejected.
"""

import hashlib
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from skyrl.tinker.errors import BadKey
from skyrl.tinker.identity.tokens import BadToken, Signer

log = logging.getLogger(__name__)

TELL_S = 60.0
MOST_ADDRESSES = 1000
TOKEN_LIFETIME_S = 3600
TOKEN_PREFIX = "eyJ"
"""Prefix of every JSON web token."""
ORGANIZATION = "local"


@dataclass(frozen=True)
class Caller:
    """The sender of a request. `tenant` is None on a server without keys, where everybody may access everything."""

    tenant: str | None
    address: str = ""
    """Network address of the sender."""
    expires: int | None = None
    """Unix time at which the caller's token expires; None: the caller sent a key."""
    alias: str = ""
    """Display name of the tenant; empty: `name`."""

    @property
    def sharer(self) -> str:
        """Sharer in limits and quotas: the tenant. Without keys, the address, because anybody can create sessions."""
        return self.tenant or self.address

    def tenant_of(self, session_id: str) -> str:
        """Return the tenant that owns the caller's new objects in a session."""
        return self.tenant or session_id

    def may_touch(self, owner: str) -> bool:
        return self.tenant is None or self.tenant == owner

    @property
    def name(self) -> str:
        """Id of the caller in answers: the owner of everything that the caller can access."""
        return self.tenant or LOCAL

    @property
    def display_name(self) -> str:
        """Name of the caller for people. It may change; `name` does not."""
        return self.alias or self.name

    @property
    def urn(self) -> str:
        return f"skyrl:user:{self.name}"

    @property
    def key_id(self) -> int:
        """Stable number for the key."""
        return int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:4], "big")

    @property
    def email(self) -> str:
        """Display name in the form of an email address, which clients display."""
        return self.display_name if "@" in self.display_name else f"{self.display_name}@localhost"


EVERYBODY = Caller(None)
"""A caller that may access everything, as on a server without keys."""


class Keys:
    """The keys of this server (as hashes) and the tokens that clients send instead of keys.

    Args:
        tenants: Tenant of each configured key, by key. Empty: every key is accepted.
        signer: Creates the tokens.
        operators: Keys of operators, who are not tenants.
        names: Display names of the tenants.
    """

    def __init__(
        self,
        tenants: Mapping[str, str],
        signer: Signer,
        operators: Iterable[str] = (),
        names: "DisplayNames | None" = None,
    ):
        self._tenants = {_hash(key): tenant for key, tenant in tenants.items()}
        self._operators = frozenset(map(_hash, operators))
        self._names = names or DisplayNames({})
        self.signer = signer

    def caller(self, api_key: str | None) -> Caller:
        """Return the caller with this key or token. Raises `BadKey`."""
        if not self._tenants:
            return EVERYBODY
        if (tenant := self._tenants.get(_hash(api_key or ""))) is not None:
            return Caller(tenant, alias=self._alias(tenant))
        if api_key is None or not api_key.startswith(TOKEN_PREFIX):
            raise BadKey("X-API-Key is not one of this server's keys; set api_key or TINKER_API_KEY to one")
        try:
            claims = self.signer.read("api", api_key)
        except BadToken as error:
            raise BadKey(f"the token in X-API-Key {error}; get another from auth/token", is_token=True) from error
        if (tenant := claims.get("tenant")) not in self._tenants.values():
            raise BadKey("the token in X-API-Key is of a key that this server no longer has", is_token=True)
        return Caller(tenant, expires=claims["exp"], alias=self._alias(claims["tenant"]))

    def _alias(self, tenant: str) -> str:
        return self._names(tenant) if tenant in self._names else ""

    def is_operator(self, key: str | None) -> bool:
        """Return True if the key may see the status of the whole server.

        This is the case for operator keys, and for every key if the server has neither operator keys nor API keys.
        Raises `BadKey` for an unknown key.
        """
        if not (self._operators or self._tenants) or _hash(key or "") in self._operators:
            return True
        if not self._tenants:
            raise BadKey("X-API-Key is no operator's key of this server; send one of its --operator-keys-file")
        self.caller(key)
        return False

    def token_for_key(self, api_key: str | None) -> str:
        """Create a token for a key. A token cannot be exchanged for a new one, so a leaked token expires within an
        hour.

        Raises `BadKey`.
        """
        caller = self.caller(api_key)
        if self._tenants and _hash(api_key or "") not in self._tenants:
            raise BadKey("X-API-Key is a token, which is not exchanged for another; send the key")
        return self.token_for(caller)

    def token_for(self, caller: Caller) -> str:
        """Create a token for the caller, with the claims that clients read."""
        claims = {"iss": "skyrl", "sub": caller.urn, "org_id": ORGANIZATION, "email": caller.email}
        return self.signer.sign("api", {**claims, "tenant": caller.tenant}, int(time.time()) + TOKEN_LIFETIME_S)


class WrongKeys:
    """Logs requests with unknown keys: the first at once, then at most one line per minute and address."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, tuple[float, int]] = OrderedDict()
        """Time of the last log line, and number of requests since, by address."""

    def note(self, address: str) -> None:
        """Record a request with an unknown key."""
        told_at, count = self._seen.pop(address, (-math.inf, 0))
        count += 1
        if time.monotonic() - told_at > TELL_S:
            log.warning("%s with a wrong key from %s", "1 request" if count == 1 else f"{count} requests", address)
            told_at, count = time.monotonic(), 0
        self._seen[address] = told_at, count
        while len(self._seen) > MOST_ADDRESSES:
            self._seen.popitem(last=False)


def _hash(api_key: str) -> bytes:
    return hashlib.sha256(api_key.encode()).digest()


LOCAL = "local"
"""Name of everybody on a server without keys, where each session is a tenant."""


class DisplayNames:
    """Display names of a server's tenants.

    Args:
        names: Display name of each tenant that has a key. Empty for a server without keys.
    """

    def __init__(self, names: Mapping[str, str]):
        self._names = dict(names)
        self._tenants = {name: tenant for tenant, name in names.items()}

    def __bool__(self) -> bool:
        """Return True if the server has keys."""
        return bool(self._names)

    def __contains__(self, tenant: str) -> bool:
        """Return True if the tenant has a key."""
        return tenant in self._names

    def __call__(self, tenant: str) -> str:
        """Return the display name of a tenant. A tenant whose key was removed is shown by its id."""
        return self._names.get(tenant, tenant) if self._names else LOCAL

    def tenant(self, name: str) -> str:
        """Return the tenant with this display name or id."""
        return self._tenants.get(name, name)
