"""The RESP client against a real Valkey, and against servers that misbehave (S1, K5)."""

from __future__ import annotations

import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import hiredis
import pytest
import trustme

from kvstore.remote.endpoint import Endpoint
from kvstore.remote.resp import WINDOW_BYTES, Odd, RespConnection, RespError, Value
from kvstore.remote.server import EmbeddedValkey

MIB = 1024 * 1024


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedValkey]:
    server = EmbeddedValkey(tmp_path_factory.mktemp("valkey"), 256 * MIB)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def client(valkey: EmbeddedValkey) -> Iterator[RespConnection]:
    with closing(RespConnection(Endpoint.from_url(valkey.url), soon())) as connection:
        connection.call(b"FLUSHALL", deadline=soon())
        yield connection


class Served:
    """A real socket that answers every connection with `answer`; what it is asked is dropped."""

    def __init__(self, answer: Callable[[socket.socket], None]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._answer = answer
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            with peer:
                self._answer(peer)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def pump(source: socket.socket, sink: socket.socket) -> None:
    while data := source.recv(1 << 16):
        sink.sendall(data)


def hello_then(data: bytes) -> Callable[[socket.socket], None]:
    def answer(peer: socket.socket) -> None:
        peer.recv(4096)
        peer.sendall(b"%0\r\n" + data)
        while peer.recv(65536):
            pass

    return answer


def read(client: RespConnection, *rooms: bytearray, head: int = 64) -> list[object]:
    seen: list[object] = [None] * len(rooms)
    keys = [b"k%d" % index for index in range(len(rooms))]
    into = [memoryview(room) for room in rooms]
    client.get_into(keys, into, lambda got: len(got) <= head, soon(), seen.__setitem__)
    return seen


def test_values_land_in_the_callers_memory(client: RespConnection) -> None:
    payloads = [random.Random(size).randbytes(size) for size in (0, 1, 100, 70_000, 3 * MIB)]
    sets = [(b"SET", b"k%d" % i, b"head%d" % i + data) for i, data in enumerate(payloads)]
    assert client.pipeline(sets, soon()) == [b"OK"] * len(payloads)
    rooms = [bytearray(len(data)) for data in payloads]
    missing = bytearray(5)
    assert read(client, *rooms, missing) == [*(Value(b"head%d" % i) for i in range(5)), None]
    assert rooms == payloads
    assert missing == bytes(5)


def test_many_small_values_in_one_pipeline(client: RespConnection) -> None:
    blocks = 700
    sets = [(b"SET", b"k%d" % index, b"%08d" % index * 40) for index in range(blocks)]
    client.pipeline(sets, soon())
    rooms = [bytearray(320) for _ in range(blocks)]
    assert read(client, *rooms) == [Value(b"")] * blocks
    assert rooms == [b"%08d" % index * 40 for index in range(blocks)]


def test_values_that_do_not_fit_are_skipped_and_the_stream_goes_on(client: RespConnection) -> None:
    client.pipeline([(b"SET", b"k0", b"short"), (b"SET", b"k1", b"x" * 400_000)], soon())
    client.pipeline([(b"SET", b"k2", b"hfits"), (b"LPUSH", b"k3", b"list")], soon())
    outcome = read(client, bytearray(6), bytearray(10), bytearray(4), bytearray(4))
    assert outcome[:3] == [Odd(5), Odd(400_000), Value(b"h")]
    assert isinstance(outcome[3], hiredis.ReplyError)
    assert client.call(b"PING", deadline=soon()) == b"PONG"


def test_windows_bound_what_is_in_flight(client: RespConnection) -> None:
    data = bytes(5 * MIB)
    sets = [(b"SET", b"k%d" % index, (memoryview(data),)) for index in range(4)]
    assert len(data) * 2 > WINDOW_BYTES
    assert client.pipeline(sets, soon()) == [b"OK"] * 4
    assert read(client, *(bytearray(len(data)) for _ in range(4))) == [Value(b"")] * 4


def test_the_server_is_told_who_we_are(valkey: EmbeddedValkey) -> None:
    wrong = valkey.url.replace("://:", "://:wrong")
    with pytest.raises(RespError, match="WRONGPASS") as caught:
        RespConnection(Endpoint.from_url(wrong), soon())
    assert "wrong" not in str(caught.value).replace("WRONGPASS", "")


def test_a_server_without_hello_gets_auth() -> None:
    """What a RESP2-only server says; AUTH must come behind it."""
    asked = []

    def old(peer: socket.socket) -> None:
        peer.recv(4096)
        peer.sendall(b"-ERR unknown command `HELLO`\r\n")
        asked.append(peer.recv(4096))
        peer.sendall(b"+OK\r\n+PONG\r\n")
        peer.recv(4096)

    with Served(old) as server:
        endpoint = Endpoint("127.0.0.1", server.port, password="pw")
        with closing(RespConnection(endpoint, soon())) as client:
            assert client.call(b"PING", deadline=soon()) == b"PONG"
    assert asked == [b"*2\r\n$4\r\nAUTH\r\n$2\r\npw\r\n"]


def test_tls_end_to_end(valkey: EmbeddedValkey, tmp_path: Path) -> None:
    """Valkey behind a TLS socket: the client checks the certificate, and large values fit."""
    authority = trustme.CA()
    ca = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(ca))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)

    def relay(peer: socket.socket) -> None:
        try:
            inside = context.wrap_socket(peer, server_side=True)
        except ssl.SSLError:
            return
        with inside, socket.create_connection(("127.0.0.1", valkey.port)) as behind:
            back = threading.Thread(target=pump, args=(behind, inside))
            back.start()
            pump(inside, behind)
            behind.shutdown(socket.SHUT_RDWR)
            back.join()

    with Served(relay) as server:
        url = valkey.url.replace(f":{valkey.port}", f":{server.port}")
        url = url.replace("valkey://", "rediss://")
        with closing(RespConnection(Endpoint.from_url(f"{url}/0?ca={ca}"), soon())) as client:
            client.call(b"SET", b"k0", b"head" + bytes(100_000), deadline=soon())
            assert read(client, bytearray(100_000)) == [Value(b"head")]
        with pytest.raises(ssl.SSLError):
            RespConnection(Endpoint.from_url(url), soon())


def test_a_deadline_ends_the_wait_for_a_silent_server() -> None:
    with Served(hello_then(b"")) as server:
        client = RespConnection(Endpoint("127.0.0.1", server.port), soon())
        began = time.monotonic()
        with closing(client), pytest.raises(TimeoutError):
            client.call(b"PING", deadline=soon(0.05))
        assert time.monotonic() - began < 10


def test_interrupt_wakes_a_waiting_thread() -> None:
    with Served(hello_then(b"")) as server:
        client = RespConnection(Endpoint("127.0.0.1", server.port), soon())
        waker = threading.Timer(0.05, client.interrupt)
        waker.start()
        with closing(client), pytest.raises(OSError):
            client.call(b"PING", deadline=soon(30))
        waker.join()


@pytest.mark.parametrize(
    "junk",
    [
        b"$5\r\nhell",
        b"$99999999999999\r\n",
        b"$-7\r\n",
        b"$5\r\nhelloXX",
        b":1\r\n",
        b"x" * 20_000,
        b"*3\r\n$1\r\na\r\n",
        b"",
    ],
)
def test_S1_answers_that_are_no_answers_end_the_connection(junk: bytes) -> None:
    def answer(peer: socket.socket) -> None:
        peer.recv(4096)
        peer.sendall(b"%0\r\n")
        peer.recv(4096)
        peer.sendall(junk)

    with Served(answer) as server:
        client = RespConnection(Endpoint("127.0.0.1", server.port), soon())
        with closing(client), pytest.raises(OSError):
            read(client, bytearray(5))


@pytest.mark.parametrize("count", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_S1_random_answers(count: int) -> None:
    """Whatever bytes come: an OSError or a result, within the deadline, never anything else."""
    dice = random.Random(5)
    alphabet = [b"\r\n", b"$", b"*", b":", b"-", b"+", b"_", b"%", b"0", b"5", b"k", b"\x00"]
    answers = [b"".join(dice.choices(alphabet, k=dice.randrange(24))) for _ in range(count)]
    queue = iter(answers)

    def answer(peer: socket.socket) -> None:
        peer.recv(64)
        peer.sendall(b"%0\r\n")
        peer.recv(64)
        peer.sendall(next(queue))

    with Served(answer) as server:
        endpoint = Endpoint("127.0.0.1", server.port)
        for number in range(len(answers)):
            with closing(RespConnection(endpoint, soon())) as client:
                try:
                    if number % 2:
                        read(client, bytearray(5))
                    else:
                        client.pipeline([[b"PING"]], soon())
                except OSError:
                    pass


@pytest.mark.parametrize(
    "url", ["http://x", "valkey://", "valkey://h/zero", "valkey://h:port", "redis:///1"]
)
def test_urls_that_name_no_server(url: str) -> None:
    with pytest.raises(ValueError):
        Endpoint.from_url(url)


def test_what_a_url_says() -> None:
    endpoint = Endpoint.from_url("valkey://me:p%40ss@host:7000/3")
    assert (endpoint.host, endpoint.port, endpoint.database) == ("host", 7000, 3)
    assert (endpoint.username, endpoint.password) == ("me", "p@ss")
    assert "p@ss" not in repr(endpoint)
    assert Endpoint.from_url("rediss://host").tls is not None
