"""Peers over TLS: nothing readable on the way, nobody without a certificate, no stall for small
blocks."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from configs.load import ConfigError
from configs.schema import KvConfig, TlsConfig
from events.load import KVLayout
from events.tls import client_context, server_context
from kvstore.peer.client import PeerAddress, PeerSession, peer_tier
from kvstore.peer.server import PeerServer
from kvstore.stream import Stream
from replica.tiers.build import build_tiers
from tests.fakes.papers import make_papers
from tests.kvstore.blocks import CLUSTER_KEY, SPACE
from tests.kvstore.conformance.backend import HOST
from tests.kvstore.conformance.blocks import Block, chain_of, reads_into, verdict
from tests.kvstore.conformance.peer_child import Held, Shelf
from tests.kvstore.peer.test_fuzz import fuzz

SECRET = bytes(range(100, 132))
TYPICAL = KVLayout(
    dtype="bfloat16", layers=6, kv_heads=2, head_dim=64, block_tokens=8, rope="default:10000"
)
"""24 KiB a block."""
NAGLE_S = 0.02
"""A delayed acknowledgement takes twice as long."""
SIPPED_S = 20.0
"""At least, of 8 MiB read 8 KiB at a time, 20 ms apart."""


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> TlsConfig:
    return make_papers(tmp_path_factory.mktemp("tls") / "papers")


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def server(shelf: Shelf, papers: TlsConfig) -> Iterator[PeerServer[Held]]:
    serving = PeerServer(shelf, SECRET, tls=server_context(papers))
    serving.start()
    yield serving
    serving.close()
    assert shelf.leased == 0
    assert serving.connections == 0


def fill(shelf: Shelf, blocks: list[Block]) -> None:
    for block in blocks:
        shelf.blocks[block.key] = Held(block.header, memoryview(block.payload))


def soon() -> float:
    return time.monotonic() + 10


class Tap:
    """Passes one connection on to `port` and keeps what went over it, both ways."""

    def __init__(self, port: int) -> None:
        self.seen = bytearray()
        self._listener = socket.create_server((HOST, 0))
        self.port = self._listener.getsockname()[1]
        self._target = port
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        near, _ = self._listener.accept()
        far = socket.create_connection((HOST, self._target))
        back = threading.Thread(target=self._copy, args=(far, near))
        back.start()
        self._copy(near, far)
        back.join()
        near.close()
        far.close()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self.seen += data
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
        self._thread.join()


def test_blocks_come_and_nothing_can_be_read_on_the_way(
    server: PeerServer[Held], shelf: Shelf, papers: TlsConfig
) -> None:
    chain = chain_of(6, 1, kv=TYPICAL)
    fill(shelf, chain)
    with (
        closing(Tap(server.port)) as tap,
        closing(peer_tier(PeerAddress(HOST, tap.port), SECRET, tls=client_context(papers))) as tier,
    ):
        rooms = [block.room() for block in chain]
        outcomes = tier.get(reads_into(chain, rooms), soon()).result(10)
        assert [verdict(*each) for each in zip(chain, outcomes, rooms, strict=True)] == ["good"] * 6
        sent = bytes(tap.seen)
    assert len(sent) > sum(len(block.value) for block in chain)
    for block in chain:
        for secret in (block.key, block.identity.tokens, block.payload[:64], SECRET):
            assert secret not in sent


def test_S1_strangers_get_nothing(
    server: PeerServer[Held], shelf: Shelf, papers: TlsConfig, tmp_path: Path
) -> None:
    """Without a certificate, with one of another authority, and without TLS; knowing the secret."""
    fill(shelf, chain_of(1, 1))
    others = make_papers(tmp_path / "others")
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.load_verify_locations(papers.ca)
    forged = client_context(TlsConfig(cert=others.cert, key=others.key, ca=papers.ca))
    for tls in (bare, forged, client_context(others), None):
        with (
            pytest.raises(OSError),
            closing(PeerSession(PeerAddress(HOST, server.port), SECRET, soon(), tls)) as session,
        ):
            session.exists_prefix([chain_of(1, 1)[0].key], soon())


def test_S1_a_host_that_must_be_asked_by_tls_is_asked_by_nothing_else(
    shelf: Shelf, papers: TlsConfig
) -> None:
    with closing(PeerServer(shelf, SECRET)) as plain:
        plain.start()
        tap = Tap(plain.port)
        with pytest.raises(OSError):
            PeerSession(PeerAddress(HOST, tap.port), SECRET, soon(), client_context(papers))
        tap.close()
        assert b"wrpeer" not in tap.seen


def test_another_hosts_certificate_is_not_taken(
    server: PeerServer[Held], papers: TlsConfig
) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        PeerSession(PeerAddress("localhost", server.port), SECRET, soon(), client_context(papers))


def test_small_blocks_wait_for_no_acknowledgement(
    server: PeerServer[Held], shelf: Shelf, papers: TlsConfig
) -> None:
    """The quickest of many: with a stall in each none would be quick."""
    chain = chain_of(1, 1, kv=TYPICAL)
    fill(shelf, chain)
    address = PeerAddress(HOST, server.port)
    with closing(peer_tier(address, SECRET, tls=client_context(papers))) as tier:
        took_s = []
        for _ in range(12):
            room, began = chain[0].room(), time.perf_counter()
            outcomes = tier.get(reads_into(chain, [room]), soon()).result(10)
            took_s.append(time.perf_counter() - began)
            assert verdict(chain[0], outcomes[0], room) == "good"
    assert min(took_s) < NAGLE_S


def test_a_client_that_reads_a_little_at_a_time_is_not_waited_for_beyond_the_deadline(
    papers: TlsConfig,
) -> None:
    with closing(socket.create_server((HOST, 0))) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    for end in (near, far):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_096)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    over = threading.Event()

    def sip() -> None:
        tls = client_context(papers).wrap_socket(near, server_hostname=HOST)
        with closing(tls), suppress(OSError):
            while not over.wait(0.02) and tls.recv(8_192):
                pass

    reader = threading.Thread(target=sip)
    reader.start()
    wrapped = server_context(papers).wrap_socket(
        far, server_side=True, do_handshake_on_connect=False
    )
    with closing(Stream(wrapped, tls=True)) as stream:
        stream.shake_hands(soon())
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            stream.send([bytes(8 << 20)], began + 0.3)
        assert time.monotonic() - began < SIPPED_S / 2
        over.set()
    reader.join()


@pytest.mark.slow
def test_a_silent_client_is_not_waited_for(server: PeerServer[Held]) -> None:
    """Neither by others, nor by the server's end: the handshake has a deadline."""
    with socket.create_connection((HOST, server.port)) as silent:
        end = time.monotonic() + 10
        while not server.connections and time.monotonic() < end:
            time.sleep(0.001)
        silent.settimeout(10)
        assert silent.recv(1) == b""


def test_settings_without_an_authority_are_refused(papers: TlsConfig) -> None:
    lax = KvConfig(
        host="off",
        peers=("peer://127.0.0.1:1",),
        peer_tls=TlsConfig(cert=papers.cert, key=papers.key),
    )
    with pytest.raises(ConfigError, match="peer_tls needs a 'ca'"):
        build_tiers(lax, CLUSTER_KEY, SPACE, _Nowhere())


class _Nowhere:
    def gather(self, block: int, into: memoryview) -> None:
        raise AssertionError

    def scatter(self, payload: memoryview, block: int) -> None:
        raise AssertionError


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_S1_fuzzed_frames_in_the_clear_and_behind_a_handshake(
    server: PeerServer[Held], shelf: Shelf, papers: TlsConfig, count: int
) -> None:
    tls = client_context(papers)
    fuzz(
        server,
        shelf,
        count,
        lambda server: PeerSession(PeerAddress(HOST, server.port), SECRET, soon(), tls),
    )
