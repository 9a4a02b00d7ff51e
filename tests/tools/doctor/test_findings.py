"""What is missing is said in words that tell what to do; only what can't work is an error."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import Any, cast

import pytest

from tools.admin import AdminClient
from tools.cli import main
from tools.doctor.cluster import MEANINGS, alarm_finding, cluster_findings, probe_finding
from tools.doctor.command import examine
from tools.doctor.finding import Verdict
from tools.doctor.machine import machine_findings, port_finding
from tools.up.state import lock, open_state

ROUTER = Path(__file__).parents[3] / "router"


def findings() -> dict[str, object]:
    return {finding.about: finding for finding in machine_findings()}


def test_this_machine_has_what_it_takes() -> None:
    found = findings()
    assert {"python", "compiler", "cpu", "bus", "model", "memory"} <= found.keys()
    assert all(finding.verdict is not Verdict.BROKEN for finding in found.values())


def test_without_compiler_and_model_it_only_gets_slower(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("WARMROUTE_CACHE", str(tmp_path))
    found = findings()
    assert found["compiler"].verdict is found["model"].verdict is Verdict.SLOW
    assert "install g++" in found["compiler"].remedy


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        finding = port_finding("127.0.0.1", port)
        assert finding.verdict is Verdict.BROKEN
        assert str(port) in finding.text
    assert port_finding("127.0.0.1", port).verdict is Verdict.GOOD


def test_alarms_are_told_in_words() -> None:
    alarm = {"name": "no_events", "replica": "r1", "age_s": 12.3, "count": 2, "detail": "..."}
    finding = alarm_finding(alarm)
    assert finding.text == "alarm no_events of r1 for 12 s: it is routed as if it held nothing"
    unknown = alarm_finding(alarm | {"name": "brand_new", "detail": "its own words"})
    assert unknown.text.endswith("its own words")


def test_every_alarm_with_a_meaning_exists_in_the_router() -> None:
    source = "".join(path.read_text() for path in ROUTER.rglob("*.py"))
    known = set(re.findall(r'"([a-z_]+)"', source))
    assert MEANINGS.keys() <= known


def test_locality_is_proven_by_a_probe() -> None:
    good = {"replicas": [{"replica": "r0", "cached_tokens": 96, "prompt_tokens": 120}]}
    assert probe_finding(good).verdict is Verdict.GOOD
    cold = {"replicas": [{"replica": "r0", "cached_tokens": 0, "prompt_tokens": 120}]}
    assert probe_finding(cold).verdict is Verdict.BROKEN
    assert probe_finding({"replicas": []}).verdict is Verdict.BROKEN


async def test_a_fleet_of_other_servers_has_findings_too() -> None:
    class Gateway:
        async def replicas(self) -> list[dict[str, Any]]:
            server = {"replica": "b0", "hello": {"engine": "openai"}}
            return [server | {"linked": True, "misfits": []}]

        async def alarms(self) -> list[dict[str, Any]]:
            return []

        async def warm(self, _: object) -> dict[str, Any]:
            raise AssertionError("only replicas of our own can be warmed")

    gateway = cast(AdminClient, Gateway())
    found = [each async for each in cluster_findings(gateway)]
    assert [each.about for each in found] == ["replicas", "locality"]
    assert all(each.verdict is Verdict.GOOD for each in found)
    first = await anext(cluster_findings(gateway, ("b0", "r0", "r1")))
    assert (first.verdict, first.text) == (
        Verdict.SLOW,
        "1 of 3 take requests; not there: r0, r1",
    )


def test_a_flag_that_says_something_of_a_missing_one_is_no_silence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "--tp", "2", "--memory-gib", "80"])
    assert "--tp, --memory-gib says something of --capacity" in capsys.readouterr().err


def test_a_cluster_that_is_starting_is_not_called_none(tmp_path: Path) -> None:
    state = open_state(tmp_path)
    assert examine(tmp_path, None)[-1].text == "none runs here"
    descriptor = lock(state)
    found = examine(tmp_path, None)[-1]
    assert (found.about, found.verdict) == ("cluster", Verdict.SLOW)
    assert "does not answer yet" in found.text
    os.close(descriptor)
    assert examine(tmp_path, None)[-1].text == "none runs here"
