"""What the demo leaves behind, and what it says when it can't begin."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from configs.schema import BackendConfig, ClusterConfig, ModelConfig
from tools import cli
from tools.admin import AdminClient
from tools.bench.client import ChatClient, Sample
from tools.bench.demo.ceiling import CeilingCache
from tools.bench.demo.lines import Lines
from tools.bench.demo.load import Conversation, Load
from tools.bench.demo.run import DemoRunner
from tools.errors import CommandError
from tools.up.state import open_state, write_cluster

TALKS = tuple(Conversation(f"demo-{index}", "system", ("one?",)) for index in range(3))


class _Admin:
    """A gateway's tenants; one that comes after `room` others is refused."""

    def __init__(self, room: int = 99) -> None:
        self.tenants = {"acme"}
        self._room = room

    async def put_tenant(self, name: str, key: str) -> None:
        if len(self.tenants) > self._room:
            raise CommandError("full")
        self.tenants.add(name)

    async def delete_tenant(self, name: str) -> None:
        self.tenants.remove(name)

    async def publish_prefix(self, prompt: dict[str, Any]) -> None:
        pass


class _Failing:
    async def chat(self, *args: object) -> Sample:
        return Sample("demo-0", 0, "", 0.0, 0.0, (), 0, 0, 0, "", "HTTP 503")


def _runner(admin: _Admin) -> DemoRunner:
    return DemoRunner(
        cast(AdminClient, admin),
        cast(ChatClient, _Failing()),
        Load("public", TALKS, (), max_tokens=4),
        lambda: cast(CeilingCache, None),
    )


async def test_its_tenants_go_when_it_ends() -> None:
    admin = _Admin()
    runner = _runner(admin)
    await runner.prepare()
    assert len(admin.tenants) == 4
    await runner.forget()
    assert admin.tenants == {"acme"}


async def test_those_that_it_made_before_it_broke_go_too() -> None:
    admin = _Admin(room=2)
    runner = _runner(admin)
    with pytest.raises(CommandError, match="full"):
        await runner.prepare()
    await runner.forget()
    assert admin.tenants == {"acme"}


async def test_a_first_request_that_fails_is_one_line() -> None:
    with pytest.raises(CommandError, match="HTTP 503"):
        await _runner(_Admin()).cold_request_s()


def test_without_a_terminal_few_lines_say_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    for total in (3, 400):
        lines = Lines("warmroute", total)
        for _ in range(total):
            lines()
        told = capsys.readouterr()
        assert told.out == ""
        first, *more = told.err.splitlines()
        assert first == f"warmroute: 0 of {total} requests"
        assert more[-1] == f"warmroute: {total} of {total} requests"
        assert len(more) == min(total, 4)


def test_a_cluster_of_backends_alone_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = open_state(tmp_path / "state")
    backend = BackendConfig(id="b0", url="http://127.0.0.1:1")
    write_cluster(
        state,
        ClusterConfig(
            secret=state.keys.secret, model=ModelConfig(path="none"), backends=(backend,)
        ),
    )
    assert cli.main(["bench", "demo", "--state", str(state.folder)]) == 1
    assert "needs replicas of our own" in capsys.readouterr().err
