"""Start, stop and recovery of the whole cluster, with real processes and real signals."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from openai import OpenAI

from tests.e2e.conftest import MODEL
from tests.e2e.up import Up, alive, descendants
from tests.waiting import wait_until


def start(state: Path, model: Path, *more: str) -> Up:
    flags = ("--model", str(model), "--model-name", MODEL, "--dtype", "float32", "--replicas", "1")
    return Up(state, "--port", "0", *flags, *more)


def chat(client: OpenAI, **more):
    settings = {"max_tokens": 4, **more}
    return client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hello"}], **settings
    )


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Up]:
    """One replica behind two routers, with a model file of its own; tests leave it well."""
    folder = tmp_path_factory.mktemp("small")
    shutil.copy(tiny_model, folder / "model.gguf")
    up = start(folder / "state", folder / "model.gguf", "--routers", "2")
    try:
        yield up.wait_ready()
    finally:
        up.close()


def test_R17_up_says_ready_only_when_every_replica_can_be_sent_to(up: Up) -> None:
    replicas = up.seen_first["/router/replicas"]["replicas"]
    assert [of["replica"] for of in replicas if of["linked"]] == ["r0", "r1"]
    assert up.seen_first["/ready"]["status"] == "ready"


def test_a_start_after_kill_9_works_and_ctrl_c_ends_every_child(
    tmp_path: Path, tiny_model: Path
) -> None:
    first = start(tmp_path, tiny_model)
    try:
        first.wait_ready()
        children = first.children()
        first.process.kill()
        first.process.wait(10)
        wait_until(lambda: not any(map(alive, children)), what="children die with their parent")
        second = start(tmp_path, tiny_model)
        try:
            second.wait_ready()
            assert second.key == first.key
            with OpenAI(base_url=f"{second.url}/v1", api_key=second.key) as client:
                assert chat(client).choices
            children = second.children()
            assert len(children) >= 4  # the bus, kvd, a replica, a router
            assert (tmp_path / "kvd.sock").exists()
            assert second.interrupt() == 0
            wait_until(lambda: not any(map(alive, children)), what="children end")
            assert not (tmp_path / "kvd.sock").exists()
        finally:
            second.close()
    finally:
        first.close()


@pytest.mark.slow
def test_ctrl_c_says_what_it_waits_for_and_a_second_one_ends_it_at_once(
    tmp_path: Path, tiny_model: Path
) -> None:
    up = start(tmp_path, tiny_model)
    try:
        up.wait_ready()
        os.kill(replica_process(up, "r0"), signal.SIGSTOP)
        with socket.create_connection(("127.0.0.1", urlsplit(up.url).port or 0)) as client:
            messages = [{"role": "user", "content": "hello"}]
            body = json.dumps({"model": MODEL, "messages": messages, "stream": True}).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}"
            client.sendall(head.encode() + b"\r\n\r\n" + body)
            wait_until(lambda: in_flight(up) == 1, what="the stream is open")
            children = up.children()
            up.process.send_signal(signal.SIGINT)
            wait_until(lambda: "s for router-0 (up to" in up.output, what="it says so")
            assert "again: stop at once" in up.output
            assert up.process.poll() is None
            assert up.interrupt(10) == 0
        wait_until(lambda: not any(map(alive, children)), what="children end")
    finally:
        up.close()


def in_flight(up: Up) -> int:
    return sum(of["in_flight"] for of in up.get_json("/router/replicas")["replicas"])


def test_a_taken_port_is_a_clear_error(tmp_path: Path, tiny_model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        up = Up(tmp_path, "--port", str(taken.getsockname()[1]), "--model", str(tiny_model))
        try:
            assert up.process.wait(30) == 1
            up.close()
            assert "--port" in up.output
            assert "Traceback" not in up.output
        finally:
            up.close()


def test_a_missing_model_is_a_clear_error(tmp_path: Path) -> None:
    up = Up(tmp_path, "--port", "0", "--model", str(tmp_path / "none.gguf"))
    try:
        assert up.process.wait(30) == 1
        up.close()
        assert "no model at" in up.output
        assert "Traceback" not in up.output
    finally:
        up.close()


def replica_process(up: Up, name: str) -> int:
    for pid in descendants(up.process.pid):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"replica.server" in words and name.encode() in words:
            return pid
    raise AssertionError(f"no process of {name}")


def test_a_router_that_dies_is_stood_in_for_and_comes_back_where_clients_know_it(
    small: Up,
) -> None:
    (second,) = re.findall(r"router-1 (http\S+)", small.output)
    os.kill(router_process(small, "router-0"), signal.SIGKILL)
    with OpenAI(base_url=f"{second}/v1", api_key=small.key, max_retries=0) as client:
        assert chat(client).choices
    wait_until(lambda: "router-0 is back" in small.output, what="the router is back")
    with OpenAI(base_url=f"{small.url}/v1", api_key=small.key, max_retries=0) as client:
        assert chat(client).choices
    wait_until(lambda: small.get_json("/router/peers")["peers"], what="it hears the other one")
    (peer,) = small.get_json("/router/peers")["peers"]
    assert (small.get_json("/router/peers")["router"], peer["router"]) == ("router-0", "router-1")
    made = small.get_json("/router/decisions")["decisions"][0]["decision"]
    assert made["router"] == "router-0"


def test_a_replica_that_fails_to_start_again_is_tried_again(small: Up) -> None:
    model = small.state.parent / "model.gguf"
    away = model.rename(small.state.parent / "away.gguf")
    os.kill(replica_process(small, "r0"), signal.SIGKILL)
    wait_until(lambda: "r0 did not start" in small.output, what="a failed start")
    away.rename(model)
    wait_until(lambda: "r0 is back" in small.output, what="the replica is back")
    wait_until(lambda: healthy(small) == {"r0"}, what="it is healthy")


@pytest.mark.slow
def test_everything_killed_at_once_comes_back(small: Up) -> None:
    before = small.output
    for pid in small.children():
        os.kill(pid, signal.SIGKILL)
    names = ("r0 is back", "router-0 is back", "router-1 is back")
    wait_until(
        lambda: all(name in small.output[len(before) :] for name in names), 60, "all are back"
    )
    wait_until(lambda: healthy(small) == {"r0"}, what="it is healthy")
    with OpenAI(base_url=f"{small.url}/v1", api_key=small.key, max_retries=0) as client:
        assert chat(client).choices


def router_process(up: Up, name: str) -> int:
    return next(
        pid
        for pid in up.children()
        if f"WARMROUTE_ROUTER__ID={name}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    )


def healthy(up: Up) -> set[str]:
    replicas = up.get_json("/router/replicas")["replicas"]
    return {of["replica"] for of in replicas if of["state"] == "healthy"}


def test_E9_a_bus_that_restarts_costs_no_request(up: Up, client: OpenAI) -> None:
    pid = next(
        pid
        for pid in descendants(up.process.pid)
        if b"nats-server" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    os.kill(pid, signal.SIGKILL)
    for _ in range(3):
        assert chat(client).choices
    wait_until(lambda: digests_known(up), what="digests are known again")
    assert chat(client).choices


def digests_known(up: Up) -> bool:
    replicas = up.get_json("/router/replicas")["replicas"]
    return len(replicas) == 2 and all(of["digest_known"] for of in replicas)


def test_readiness_and_health(up: Up) -> None:
    assert up.call("GET", "/health")[0] == 200
    assert up.call("GET", "/ready")[0] == 200


def test_policy_changes_without_a_restart(up: Up, client: OpenAI) -> None:
    keys = json.loads((up.state / "keys.json").read_text())
    body = json.dumps({"policy": "round_robin"}).encode()
    assert up.call("PUT", "/router/policy", body)[0] == 401
    assert up.call("PUT", "/router/policy", body, key=keys["admin_key"])[0] == 200
    try:
        seen = {
            client.chat.completions.with_raw_response.create(
                model=MODEL, messages=[{"role": "user", "content": "x"}], max_tokens=1
            ).headers["x-warmroute-replica"]
            for _ in range(4)
        }
        assert seen == {"r0", "r1"}
    finally:
        up.call("PUT", "/router/policy", b'{"policy": "warmroute"}', key=keys["admin_key"])
