"""Tenants' names as they travel between processes, and back: keyed hashes."""

from __future__ import annotations

from events.secrets import tenant_tag
from router.tenancy.tenants import Tenant, Tenants

MAX_TAGS = 4_096


class TenantTags:
    """Bounded by the number of tenants, and by MAX_TAGS names that were asked for."""

    def __init__(self, cluster_key: bytes, tenants: Tenants) -> None:
        self._key = cluster_key
        self._tenants = tenants
        self._names: dict[bytes, str] = {}
        self._names_version = -1
        self._tags: dict[str, bytes] = {}

    def tag(self, name: str) -> bytes:
        """What stands for the tenant."""
        tag = self._tags.get(name)
        if tag is None:
            if len(self._tags) >= MAX_TAGS:
                self._tags.clear()
            tag = self._tags[name] = tenant_tag(self._key, name)
        return tag

    def tenant(self, tag: bytes) -> Tenant | None:
        """Whom it stands for; None where no such tenant is known here."""
        if self._names_version != self._tenants.roster_version:
            self._names_version = self._tenants.roster_version
            everybody = [self._tenants.anonymous, *(of for of, _ in self._tenants.listed())]
            self._names = {self.tag(tenant.name): tenant.name for tenant in everybody}
        name = self._names.get(tag)
        return None if name is None else self._tenants.named(name)
