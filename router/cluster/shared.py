"""The settings that routers share: tenants, public prefixes, the policy and the shadow."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from configs.schema import TenantConfig
from events.errors import UserError, WireError
from router.tenancy.prefixes import PublicPrefixes
from router.tenancy.tenants import Tenants

TENANT = "tenant"
PREFIX = "prefix"
POLICY = "policy"
SHADOW = "shadow"
REVISION = "revision"
ONLY = ""
"""The name of a setting that there is one of."""


class TenantSection:
    """Tenants by name; the value is a TenantConfig. `on_removed` is told of names."""

    def __init__(
        self,
        tenants: Tenants,
        configured: Iterable[TenantConfig],
        on_removed: Callable[[str], None],
    ) -> None:
        self._tenants = tenants
        self._file = {tenant.name: encode_tenant(tenant) for tenant in configured}
        self._on_removed = on_removed

    def apply(self, name: str, value: bytes | None) -> None:
        """See Section.apply."""
        if value is None:
            self._tenants.remove(name)
            self._on_removed(name)
            return
        try:
            self._tenants.take(decode_tenant(value))
        except (ValueError, msgspec.MsgspecError) as error:
            raise WireError(f"a tenant that can't be used ({type(error).__name__})") from None

    def in_file(self, name: str) -> bytes | None:
        """See Section.in_file."""
        return self._file.get(name)


def encode_tenant(config: TenantConfig) -> bytes:
    """A tenant's settings as they are kept."""
    return msgspec.msgpack.encode(config)


def decode_tenant(value: bytes) -> TenantConfig:
    """What a later version added is left out. Raises msgspec.MsgspecError."""
    told = msgspec.msgpack.decode(value, type=dict[str, object])
    known = {name: told[name] for name in TenantConfig.__struct_fields__ if name in told}
    return msgspec.convert(known, TenantConfig)


class PrefixSection:
    """Public prefixes by name; the value holds the tokens."""

    def __init__(self, prefixes: PublicPrefixes) -> None:
        self._prefixes = prefixes

    def apply(self, name: str, value: bytes | None) -> None:
        """See Section.apply."""
        if value is None:
            self._prefixes.remove(name)
            return
        try:
            self._prefixes.add(value)
        except UserError as error:
            raise WireError(f"a public prefix that can't be used: {error}") from None

    def in_file(self, name: str) -> bytes | None:
        """The file has none."""
        return None


class PolicySection:
    """A policy's name, in force or in the shadow (then "" for none)."""

    def __init__(self, set_policy: Callable[[str], None], in_file: str) -> None:
        self._set = set_policy
        self._in_file = in_file.encode()

    def apply(self, name: str, value: bytes | None) -> None:
        """See Section.apply."""
        try:
            self._set((value or b"").decode())
        except ValueError:
            raise WireError("a policy that is not known here") from None

    def in_file(self, name: str) -> bytes | None:
        """See Section.in_file."""
        return self._in_file
