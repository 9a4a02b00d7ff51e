"""The gateway's admin routes, as the tools use them."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import aiohttp

from tools.errors import CommandError


class AdminClient:
    """Typed calls with the admin key. Every method raises CommandError with the gateway's words."""

    def __init__(self, session: aiohttp.ClientSession, url: str, admin_key: str) -> None:
        self._session = session
        self._url = url
        self._headers = {"Authorization": f"Bearer {admin_key}"}

    async def _call(self, method: str, path: str, body: object = None) -> Any:
        try:
            async with self._session.request(
                method, f"{self._url}{path}", json=body, headers=self._headers
            ) as response:
                answer = await response.json(content_type=None)
                if response.status >= 400:
                    text = answer.get("error", {}).get("message", "no reason given")
                    raise CommandError(f"{method} {path}: {response.status}: {text}")
                return answer
        except (aiohttp.ClientError, OSError) as error:
            raise CommandError(
                f"no gateway at {self._url} ({type(error).__name__}): start one with `warmroute up`"
            ) from error
        except (ValueError, AttributeError):
            raise CommandError(f"{self._url} answers, but is no warmroute gateway") from None

    async def replicas(self) -> list[dict[str, Any]]:
        """What the router knows of each replica."""
        return (await self._call("GET", "/router/replicas"))["replicas"]

    async def alarms(self) -> list[dict[str, Any]]:
        """What the router noticed and is still so."""
        return (await self._call("GET", "/router/alarms"))["alarms"]

    async def policy(self) -> str:
        """The policy in force."""
        return (await self._call("GET", "/router/policy"))["policy"]

    async def set_policy(self, name: str) -> None:
        """Another policy, from the next request on."""
        await self._call("PUT", "/router/policy", {"policy": name})

    async def put_tenant(self, name: str, key: str) -> None:
        """A tenant with one API key, until it is deleted."""
        await self._call("PUT", f"/router/tenants/{name}", {"key": key, "scope": "private"})

    async def tenant_scopes(self) -> dict[str, str]:
        """Whose blocks each tenant's are, by its name: "private", or "group:<name>"."""
        listed = (await self._call("GET", "/router/tenants"))["tenants"]
        return {of["name"]: of["scope"] for of in listed}

    async def delete_tenant(self, name: str) -> None:
        """Nobody asks as this tenant any more."""
        await self._call("DELETE", f"/router/tenants/{name}")

    async def publish_prefix(self, prompt: dict[str, Any]) -> str:
        """A head that all tenants share: {"messages": [...]} or {"prompt": "..."}; its name."""
        return (await self._call("POST", "/router/public-prefixes", prompt))["name"]

    async def withdraw_prefix(self, name: str) -> None:
        """Nobody shares it any more."""
        await self._call("DELETE", f"/router/public-prefixes/{quote(name, safe='')}")

    async def clear_caches(self, limit_blocks: int | None = None) -> None:
        """Empty every replica's cache; a limit bounds the blocks that it uses from now on."""
        await self._call("POST", "/router/cache/clear", {"limit_blocks": limit_blocks})

    async def warm(self, body: dict[str, Any]) -> dict[str, Any]:
        """Make one prompt warm on k replicas; the answer tells what a probe found on each."""
        return await self._call("POST", "/router/warm", body)

    async def explain(self, body: dict[str, Any]) -> dict[str, Any]:
        """What the router would do now with a request that is not sent."""
        return await self._call("POST", "/router/explain", body)
