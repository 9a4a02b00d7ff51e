"""Who may ask, and whose cache blocks they may share. Keys are kept as SHA-256 only.

The cache salt comes from the authenticated tenant and the cluster's secret, never from a client:
nobody can choose, or compute, another tenant's.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from configs.schema import TenantConfig
from events.errors import CoreError, UserError
from events.subjects import check_id

ANONYMOUS = "anonymous"
MAX_TENANTS = 1_024
MIN_KEY_CHARS, MAX_KEY_CHARS = 8, 512
SALT_BYTES = 16


@dataclass(frozen=True, slots=True)
class Tenant:
    """`salt` separates the tenant's blocks in every replica; it stays out of logs and answers."""

    name: str
    scope: str
    salt: bytes


def scope_salt(cluster_key: bytes, name: str, scope: str) -> bytes:
    """16 bytes; equal for the members of one group, different for everybody else.

    Raises ValueError for a scope that is neither "private" nor "group:<name>".
    """
    kind, _, group = scope.partition(":")
    if kind == "group":
        label = f"group:{check_id(group)}"
    elif scope == "private":
        label = f"private:{name}"
    else:
        raise ValueError('a scope is "private" or "group:<name>"')
    return hmac.digest(cluster_key, b"wr-scope-1\0" + label.encode(), "sha256")[:SALT_BYTES]


def hash_key(key: str) -> bytes:
    """What is kept of an API key."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def _refusal(message: str, param: str) -> UserError:
    return UserError(CoreError(status=400, message=message, param=param, code="invalid_value"))


class Tenants:
    """Tenants of the cluster file and those that an operator adds at run time; bounded."""

    def __init__(self, cluster_key: bytes, configured: Iterable[TenantConfig] = ()) -> None:
        self._cluster_key = cluster_key
        self._tenants: dict[str, Tenant] = {}
        self._names: dict[bytes, str] = {}
        self.anonymous = self._make(ANONYMOUS, "private")
        for tenant in configured:
            self._add(tenant.name, tenant.scope, [bytes.fromhex(h) for h in tenant.key_sha256])

    def __len__(self) -> int:
        return len(self._tenants)

    def named(self, name: str) -> Tenant | None:
        """A tenant by name."""
        return self.anonymous if name == ANONYMOUS else self._tenants.get(name)

    def of_key(self, key: str) -> Tenant | None:
        """A tenant by its API key; takes as long for a wrong key as for a right one."""
        digest, found = hash_key(key), None
        for known, name in self._names.items():
            if hmac.compare_digest(known, digest):
                found = self._tenants[name]
        return found

    def listed(self) -> list[tuple[Tenant, int]]:
        """Every tenant with the number of its keys, in the order of their names."""
        keys = Counter(self._names.values())
        return [(self._tenants[name], keys[name]) for name in sorted(self._tenants)]

    def remove(self, name: str) -> bool:
        """Forget a tenant and its keys; whether there was one. What it has running goes on."""
        self._forget_keys(name)
        return self._tenants.pop(name, None) is not None

    def put(self, name: str, key: str, scope: str) -> Tenant:
        """Add a tenant or give a known one a new key. Raises UserError (400)."""
        if not MIN_KEY_CHARS <= len(key) <= MAX_KEY_CHARS:
            raise _refusal(f"a key has {MIN_KEY_CHARS} to {MAX_KEY_CHARS} characters", "key")
        if name == ANONYMOUS:
            raise _refusal("this name is reserved", "name")
        if name not in self._tenants and len(self._tenants) >= MAX_TENANTS:
            raise _refusal(f"there are {MAX_TENANTS} tenants already", "name")
        if self._names.get(hash_key(key), name) != name:
            raise _refusal("this key belongs to another tenant", "key")
        try:
            check_id(name)
            return self._add(name, scope, [hash_key(key)])
        except ValueError as error:
            raise _refusal(str(error), "scope" if "scope" in str(error) else "name") from None

    def _add(self, name: str, scope: str, digests: list[bytes]) -> Tenant:
        tenant = self._make(name, scope)
        self._forget_keys(name)
        self._names.update(dict.fromkeys(digests, name))
        self._tenants[name] = tenant
        return tenant

    def _forget_keys(self, name: str) -> None:
        self._names = {known: of for known, of in self._names.items() if of != name}

    def _make(self, name: str, scope: str) -> Tenant:
        return Tenant(name, scope, scope_salt(self._cluster_key, name, scope))
