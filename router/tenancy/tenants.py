"""Who may ask, and whose cache blocks they may share. Keys are kept as SHA-256 only.

The cache salt comes from the authenticated tenant and the cluster's secret, never from a client:
nobody can choose, or compute, another tenant's.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from configs.schema import TenantConfig, TenantPolicy
from events.errors import CoreError, UserError
from events.subjects import check_id

ANONYMOUS = "anonymous"
MAX_TENANTS = 1_024
MAX_KEYS = 16
"""Of one tenant."""
MIN_KEY_CHARS, MAX_KEY_CHARS = 8, 512
SALT_BYTES = 16


@dataclass(frozen=True, slots=True)
class Tenant:
    """`salt` separates the tenant's blocks in every replica; it stays out of logs and answers.
    `tag` does the same in engines of other kinds, which tell it in their events."""

    name: str
    scope: str
    salt: bytes
    tag: str
    policy: TenantPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantChange:
    """What an operator asks for; what is None or not named stays as it is. `key` replaces all
    keys; `policy` maps names of TenantPolicy to new values."""

    key: str | None = None
    add_key: str | None = None
    remove_key: str | None = None
    scope: str | None = None
    policy: Mapping[str, Any] = field(default_factory=dict)


def scope_tag(cluster_key: bytes, name: str, scope: str) -> str:
    """32 hex digits; equal for the members of one group, different for everybody else.

    Raises ValueError for a scope that is neither "private" nor "group:<name>".
    """
    kind, _, group = scope.partition(":")
    if kind == "group":
        label = f"group:{check_id(group)}"
    elif scope == "private":
        label = f"private:{name}"
    else:
        raise ValueError('a scope is "private" or "group:<name>"')
    return hmac.digest(cluster_key, b"wr-tag-1\0" + label.encode(), "sha256")[:SALT_BYTES].hex()


def tag_salt(cluster_key: bytes, tag: str) -> bytes:
    """The salt behind a tag, 16 bytes: for whoever holds the cluster's secret, and one way only."""
    return hmac.digest(cluster_key, b"wr-scope-2\0" + tag.encode(), "sha256")[:SALT_BYTES]


def scope_salt(cluster_key: bytes, name: str, scope: str) -> bytes:
    """The salt of a scope. Raises ValueError as `scope_tag` does."""
    return tag_salt(cluster_key, scope_tag(cluster_key, name, scope))


def hash_key(key: str) -> bytes:
    """What is kept of an API key."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def policy_of(config: TenantConfig) -> TenantPolicy:
    """The part of a tenant's settings that is neither name nor key."""
    names = TenantPolicy.__struct_fields__
    return TenantPolicy(**{name: getattr(config, name) for name in names})


def _refusal(message: str, param: str) -> UserError:
    return UserError(CoreError(status=400, message=message, param=param, code="invalid_value"))


class Tenants:
    """Tenants of the cluster file and those that an operator adds at run time; bounded.

    `roster_version` changes with each name that comes or goes."""

    def __init__(self, cluster_key: bytes, configured: Iterable[TenantConfig] = ()) -> None:
        self.roster_version = 0
        self._cluster_key = cluster_key
        self._tenants: dict[str, Tenant] = {}
        self._keys: dict[str, frozenset[bytes]] = {}
        self._names: dict[bytes, str] = {}
        self.anonymous = self._make(ANONYMOUS, "private", TenantPolicy())
        for tenant in configured:
            self.take(tenant)

    def __len__(self) -> int:
        return len(self._tenants)

    def named(self, name: str) -> Tenant | None:
        """A tenant by name."""
        return self.anonymous if name == ANONYMOUS else self._tenants.get(name)

    def of_key(self, key: str) -> Tenant | None:
        """A tenant by its API key. The table's own hash is seeded, and bytes are compared only
        where it is equal: the time taken tells nothing of the digests in it."""
        name = self._names.get(hash_key(key))
        return None if name is None else self._tenants[name]

    def listed(self) -> list[tuple[Tenant, int]]:
        """Every tenant with the number of its keys, in the order of their names."""
        return [(self._tenants[name], self.key_count(name)) for name in sorted(self._tenants)]

    def key_count(self, name: str) -> int:
        """How many keys a tenant has."""
        return len(self._keys.get(name, ()))

    def remove(self, name: str) -> bool:
        """Forget a tenant and its keys; whether there was one. What it has running goes on."""
        self._forget_keys(name)
        known = self._tenants.pop(name, None) is not None
        self.roster_version += known
        return known

    def take(self, config: TenantConfig) -> None:
        """A tenant as a cluster file, or another router, has it. Raises ValueError."""
        made = self._make(config.name, config.scope, policy_of(config))
        self._set(made, frozenset(map(bytes.fromhex, config.key_sha256)))

    def config(self, tenant: Tenant) -> TenantConfig:
        """What another router would take."""
        return TenantConfig(
            name=tenant.name,
            key_sha256=tuple(sorted(key.hex() for key in self._keys.get(tenant.name, ()))),
            scope=tenant.scope,
            **msgspec.structs.asdict(tenant.policy),
        )

    def put(self, name: str, change: TenantChange) -> Tenant:
        """Add a tenant, or change a known one. Raises UserError (400), and has changed nothing."""
        known = self.named(name) or self._newcomer(name)
        keys = self._changed_keys(name, change)
        policy = msgspec.structs.replace(known.policy, **change.policy)
        scope = known.scope if change.scope is None else change.scope
        try:
            tenant = self._make(check_id(name), scope, policy)
        except ValueError as error:
            raise _refusal(str(error), "scope" if "scope" in str(error) else "name") from None
        if name == ANONYMOUS and (keys or scope != known.scope):
            raise _refusal("without a key there is a policy only", "name")
        if name != ANONYMOUS and not keys:
            raise _refusal("a tenant has at least one key", "key")
        self._set(tenant, keys)
        return tenant

    def _newcomer(self, name: str) -> Tenant:
        if len(self._tenants) >= MAX_TENANTS:
            raise _refusal(f"there are {MAX_TENANTS} tenants already", "name")
        return self._make(name, "private", TenantPolicy())

    def _changed_keys(self, name: str, change: TenantChange) -> frozenset[bytes]:
        keys = self._keys.get(name, frozenset())
        if change.key is not None:
            keys = frozenset([self._checked(name, change.key, "key")])
        if change.add_key is not None:
            keys |= {self._checked(name, change.add_key, "add_key")}
        if change.remove_key is not None:
            keys -= {hash_key(change.remove_key)}
        if len(keys) > MAX_KEYS:
            raise _refusal(f"a tenant has at most {MAX_KEYS} keys", "add_key")
        return keys

    def _checked(self, name: str, key: str, param: str) -> bytes:
        """The digest of a key that this tenant may have."""
        if not MIN_KEY_CHARS <= len(key) <= MAX_KEY_CHARS:
            raise _refusal(f"a key has {MIN_KEY_CHARS} to {MAX_KEY_CHARS} characters", param)
        digest = hash_key(key)
        if self._names.get(digest, name) != name:
            raise _refusal("this key belongs to another tenant", param)
        return digest

    def _set(self, tenant: Tenant, keys: frozenset[bytes]) -> None:
        if tenant.name == ANONYMOUS:
            self.anonymous = tenant
            return
        self._forget_keys(tenant.name)
        self.roster_version += tenant.name not in self._tenants
        self._keys[tenant.name] = keys
        self._names.update(dict.fromkeys(keys, tenant.name))
        self._tenants[tenant.name] = tenant

    def _forget_keys(self, name: str) -> None:
        self._keys.pop(name, None)
        self._names = {known: of for known, of in self._names.items() if of != name}

    def _make(self, name: str, scope: str, policy: TenantPolicy) -> Tenant:
        tag = scope_tag(self._cluster_key, name, scope)
        return Tenant(name, scope, tag_salt(self._cluster_key, tag), tag, policy)
