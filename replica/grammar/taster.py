"""A grammar tried out by a process that may die of it.

The library follows references and nested rules on its stack, and intersects expressions for as long
as that takes: a few thousand definitions end the process that compiles them, and a hundred patterns
that have to fit at once never come to an end. Neither is an error that could be caught. So whatever
looks as if it could be of that kind is compiled by a child first, over single bytes, with less
stack than ours and little time.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import threading
from collections.abc import Callable

import msgspec

from events.grammar import JSON_SCHEMA, LARK, Grammar

HARMLESS_BYTES = 8 * 1024
HARMLESS_PATTERNS = 3
CPU_S = 4
WAIT_S = 8.0
"""In all, on a machine that is busy; whoever asks for the grammar waits 10 s."""

STACK_BYTES = 4 << 20
"""Threads of ours have the system's 8 MiB."""

MEMORY_BYTES = 4 << 30


def is_harmless(grammar: Grammar) -> bool:
    """Whether it is too small and too plain to cost much."""
    source = grammar.source
    if len(source) > HARMLESS_BYTES:
        return False
    if grammar.kind == LARK:
        return "&" not in source and "~" not in source
    if grammar.kind == JSON_SCHEMA:
        # Keywords may be written with escapes.
        plain = "allOf" not in source and "\\u" not in source
        return plain and source.count("attern") <= HARMLESS_PATTERNS
    return True


def survives(grammar: Grammar) -> bool:
    """Blocking. Whether a child lived through it; that it compiles is not said."""
    command = [sys.executable, "-m", "replica.grammar.taster"]
    quiet = subprocess.DEVNULL
    try:
        done = subprocess.run(
            command,
            input=msgspec.msgpack.encode(grammar),
            stdout=quiet,
            stderr=quiet,
            timeout=WAIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def limit() -> None:
    """Of the process that runs this; for good."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


def on_small_stack(work: Callable[[], None]) -> None:
    """Run it in a thread with STACK_BYTES. Ends the process with 1 when it fails."""
    failed: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join()
    if failed:
        sys.exit(1)


def main() -> None:
    """Compile what comes on the standard input."""
    from replica.grammar.compiler import try_out

    limit()
    grammar = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Grammar)
    on_small_stack(lambda: try_out(grammar))


if __name__ == "__main__":
    main()
