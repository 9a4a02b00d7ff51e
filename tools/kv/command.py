"""`warmroute kv stats|inspect|verify|flush`: what the host's shared KV memory holds.

It asks the kvd that `warmroute up` started (--state), or any other (--socket). Prompts are never
printed: a block shows its place and its owner's digest, not its tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from configs.schema import ClusterConfig
from events.secrets import parse_secret
from kvstore.errors import StoreError
from kvstore.identity import scope_id
from kvstore.kvd.client import Kvd, SocketControl
from router.tenancy.tenants import ANONYMOUS, scope_salt
from tools.errors import CommandError
from tools.flags import positive
from tools.kv.blocks import described, verified
from tools.kv.remote import purged, url_of
from tools.kv.show import print_blocks, print_report
from tools.local import admin_of
from tools.up.state import cluster_of, default_folder

DEADLINE_S = 30.0
GATEWAY_S = 5.0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="warmroute kv",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (_, text) in _COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--socket", type=Path, help="of the kvd to ask")
        command.add_argument("--state", type=Path, help="state folder of the cluster")
        command.add_argument("--json", action="store_true", help="print JSON")
        if name == "inspect":
            command.add_argument("--limit", type=positive, default=20, help="how many blocks")
            command.add_argument("key", nargs="?", help="of one block, or how it begins (hex)")
        if name == "flush":
            command.add_argument("--tenant", help="only this tenant's private blocks")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run one subcommand; returns the exit status: 1 where `verify` found a wrong block."""
    flags = _parser().parse_args(list(argv))
    try:
        socket = _socket_of(flags)
        if not socket.exists():
            raise CommandError(f"no kvd at {socket}: `warmroute up` starts one")
        control = Kvd(socket, "warmroute kv").connect("cli", _soon())
        try:
            return _COMMANDS[flags.command][0](flags, control)
        finally:
            control.close()
    except StoreError as error:
        raise CommandError(str(error)) from None


def _soon() -> float:
    return time.monotonic() + DEADLINE_S


def _cluster(flags: argparse.Namespace) -> ClusterConfig:
    return cluster_of(flags.state or default_folder("local"))


def _socket_of(flags: argparse.Namespace) -> Path:
    if flags.socket is not None:
        return Path(flags.socket)
    host = _cluster(flags).kv.host
    if host in ("auto", "inproc", "off"):
        raise CommandError(f"this cluster has no kvd (kv.host is '{host}')")
    return Path(host)


def _stats(flags: argparse.Namespace, control: SocketControl) -> int:
    report = control.report(_soon())
    if flags.json:
        _print_json(msgspec.to_builtins(report.stats) | {"uptime_s": report.uptime_s})
    else:
        print_report(report)
    return 0


def _inspect(flags: argparse.Namespace, control: SocketControl) -> int:
    blocks = described(control, flags.key or "", flags.limit, _soon())
    if flags.json:
        _print_json(msgspec.to_builtins(blocks))
    else:
        print_blocks(blocks)
    return 0


def _verify(flags: argparse.Namespace, control: SocketControl) -> int:
    """The key is worked out anew where the cluster's secret is at hand."""
    secret = None
    if flags.socket is None:
        secret = parse_secret(_cluster(flags).secret)
    found = verified(control, secret, DEADLINE_S)
    if flags.json:
        _print_json(msgspec.to_builtins(found))
    else:
        wrong = ", ".join(f"{count} {reason}" for reason, count in found.wrong.items())
        print(f"{found.right} blocks are right; wrong and removed: {wrong or 'none'}")
    return 1 if found.wrong else 0


def _flush(flags: argparse.Namespace, control: SocketControl) -> int:
    scopes = {} if flags.tenant is None else _scopes(flags)
    owner = None if flags.tenant is None else _owner(flags, scopes)
    removed = control.purge(owner, _soon())
    remote = _flushed_remote(flags, owner)
    if flags.json:
        _print_json({"removed": removed} | ({} if remote is None else {"removed_remote": remote}))
    else:
        there = "" if remote is None else f" and {remote} in the store for all hosts"
        print(f"{removed} blocks removed{there}, {_whose(flags.tenant, scopes)}")
    if removed or remote or flags.tenant is None or flags.tenant in scopes:
        return 0
    raise CommandError(
        f"no block of a private tenant '{flags.tenant}', and neither the cluster file nor a running"
        " gateway has such a tenant"
    )


def _flushed_remote(flags: argparse.Namespace, owner: bytes | None) -> int | None:
    """How many of the owner's blocks, or of all, were removed there; None without such a store, or
    where only a kvd was named."""
    if flags.socket is not None and flags.tenant is None:
        return None
    cluster = _cluster(flags)
    url = url_of(cluster.kv, flags.state or default_folder("local"))
    return purged(url, parse_secret(cluster.secret), owner) if url else None


def _whose(tenant: str | None, scopes: Mapping[str, str]) -> str:
    if tenant is None:
        return "of all tenants and of public prefixes"
    scope = scopes.get(tenant, "private")
    return f"of tenant '{tenant}'" + ("" if scope == "private" else f" and its {scope}")


def _scopes(flags: argparse.Namespace) -> dict[str, str]:
    """Of the tenants in the cluster file, of whoever comes without a key, and of those that the
    gateway was told of, where one runs: what it says is newer."""
    tenants = _cluster(flags).tenants
    listed = {ANONYMOUS: "private"} | {tenant.name: tenant.scope for tenant in tenants}
    try:
        return listed | asyncio.run(_told(flags.state))
    except CommandError:
        return listed


async def _told(state: Path | None) -> dict[str, str]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(GATEWAY_S)) as session:
        return await admin_of(session, state, None).tenant_scopes()


def _owner(flags: argparse.Namespace, scopes: Mapping[str, str]) -> bytes:
    """The digest in the headers of a tenant's blocks."""
    secret = parse_secret(_cluster(flags).secret)
    return scope_id(secret, scope_salt(secret, flags.tenant, scopes.get(flags.tenant, "private")))


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


_COMMANDS: dict[str, tuple[Callable[[argparse.Namespace, SocketControl], int], str]] = {
    "stats": (_stats, "memory, blocks, users, and what each tenant takes"),
    "inspect": (_inspect, "list blocks by their headers"),
    "verify": (_verify, "check every block; wrong ones are removed"),
    "flush": (_flush, "remove all blocks, or one tenant's, here and in kv.remote"),
}
