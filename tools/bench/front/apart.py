"""The engine in a process of its own, as far as this bench needs it: a measuring prototype.

Frames over a socket pair, each with its length before it. No grammars, no cache facts: what the
bench asks of the engine, in its cheapest form, so that the two ways are compared at their best.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import struct
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Iterator

import msgspec

from events.cache import CacheFact
from events.load import DecodeFit, PrefillFit
from events.request import SamplingParams
from kvstore.identity import KeyChain
from replica.engine.messages import EngineLoad, EngineRequest, StepOutput
from replica.front.output import StepQueue
from replica.sched.plan import ChildId

LENGTH = struct.Struct("<I")
READ_BYTES = 1 << 16


class Word(msgspec.Struct, frozen=True, array_like=True):
    """Front to engine. `verb` is submit, abort, hold or resume; only the first says more."""

    verb: str
    child: int
    prompt: bytes = b""
    chain: bytes = b""
    parent: bytes = b""
    params: SamplingParams | None = None
    seed: int = 0
    eos_ids: tuple[int, ...] = ()


_words = msgspec.msgpack.Decoder(Word)
_steps = msgspec.msgpack.Decoder(StepOutput)
_encode = msgspec.msgpack.Encoder().encode


class Frames:
    """Cuts what a socket gives into frames."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The frames that `data` completes."""
        self._bytes += data
        while len(self._bytes) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._bytes)[0]
            if len(self._bytes) < end:
                return
            yield bytes(self._bytes[LENGTH.size : end])
            del self._bytes[:end]


def send(to: socket.socket, frame: bytes) -> None:
    """One frame, whole."""
    to.sendall(LENGTH.pack(len(frame)) + frame)


class EngineApart:
    """Implements Engine for the front; steps arrive on its event loop."""

    def __init__(self, queue: StepQueue) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "tools.bench.front.apart", "--fd", str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        self._socket = ours
        self._queue = queue
        self._frames = Frames()
        self._steps = 0

    def start(self) -> None:
        """Wait until the model is there, then listen."""
        if self._socket.recv(1) != b"!":
            raise RuntimeError("the engine's process did not start")
        asyncio.get_running_loop().add_reader(self._socket, self._read)

    def _read(self) -> None:
        for frame in self._frames.feed(self._socket.recv(READ_BYTES)):
            self._steps += 1
            self._queue(_steps.decode(frame))

    def submit(self, request: EngineRequest) -> None:
        """See Engine."""
        prompt = array("I", request.prompt).tobytes()
        word = Word(
            "submit",
            request.child,
            prompt,
            request.chain.data,
            request.chain.parent,
            request.params,
            request.seed,
            tuple(request.eos_ids),
        )
        send(self._socket, _encode(word))

    def abort(self, child: ChildId, answered: bool = False) -> None:
        """See Engine; this one learns no lengths."""
        send(self._socket, _encode(Word("abort", child)))

    def hold(self, child: ChildId) -> None:
        """See Engine."""
        send(self._socket, _encode(Word("hold", child)))

    def resume(self, child: ChildId) -> None:
        """See Engine."""
        send(self._socket, _encode(Word("resume", child)))

    def clear_cache(self, limit_blocks: int | None = None, below: bool = True) -> int:
        """See Engine; this one drops nothing."""
        return 0

    def drain_facts(self) -> list[CacheFact]:
        """See Engine; nobody asks here."""
        return []

    def load(self) -> EngineLoad:
        """See Engine: enough for liveness and for the queue's check at intake."""
        return EngineLoad(
            waiting=0,
            running=0,
            queued_prefill_tokens=0,
            running_context_tokens=0,
            free_blocks=0,
            cached_blocks=0,
            total_blocks=1,
            step_ms=0.0,
            steps=self._steps,
            prefill=PrefillFit(0.0, 1.0, 0.0, 0.0),
            decode=DecodeFit(1.0, 0.0, 0.0, 0.0),
            seen={},
            prompt_tokens_total=0,
            cached_tokens_total=0,
            preemptions_total=0,
            last_step_s=0.0,
            alive=self._process.poll() is None,
        )

    def close(self) -> None:
        """End the process."""
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        self._process.wait(10.0)


def serve(to: socket.socket) -> None:
    """The engine's side: until the other end closes."""
    from tools.bench.front.serve import make_engine

    lock = threading.Lock()

    def sink(output: StepOutput) -> None:
        with lock:
            send(to, _encode(output))

    engine = make_engine(sink)
    engine.start()
    to.sendall(b"!")
    frames = Frames()
    while data := to.recv(READ_BYTES):
        for frame in frames.feed(data):
            word = _words.decode(frame)
            if word.verb == "submit":
                engine.submit(_request(word))
            else:
                getattr(engine, word.verb)(ChildId(word.child))
    engine.close()


def _request(word: Word) -> EngineRequest:
    if word.params is None:
        raise ValueError("a request without parameters")
    return EngineRequest(
        child=ChildId(word.child),
        prompt=tuple(array("I", word.prompt)),
        chain=KeyChain(word.chain, word.parent),
        params=word.params,
        seed=word.seed,
        eos_ids=frozenset(word.eos_ids),
        tenant="bench",
        arrival_s=time.monotonic(),
    )


def main() -> None:
    """The engine's process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    serve(socket.socket(fileno=parser.parse_args().fd))


if __name__ == "__main__":
    main()
