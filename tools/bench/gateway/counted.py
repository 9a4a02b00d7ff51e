"""The gateway with a count of its calls: `python -m tools.bench.gateway.counted FILE --config ...`.

SIGUSR1 begins to count; SIGUSR2 ends it and writes FILE. Only the main thread's calls count: its
event loop is what the requests share. What the loop calls for the bus or by the clock, however much
comes meanwhile, is told apart by where the loop begins each turn of it.
"""

from __future__ import annotations

import json
import signal
import sys
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from router.process import run

_ASIDE = (
    "nats/",
    "events/",
    "streams",
    "router/telemetry/",
    "router/fleet/",
    "router/cluster/",
    "router/replication/",
    "router/dash/",
    "router/dispatch/links",
    "router/backends/",
)
"""Modules where turns begin that no request asked for."""
_FOLDERS = ("/router/", "/events/", "/kvstore/", "/configs/", "/site-packages/")


def _module(code: CodeType) -> str:
    """A short name of the file."""
    for folder in _FOLDERS:
        _, found, rest = code.co_filename.rpartition(folder)
        if found:
            own = folder.strip("/") + "/" if folder != "/site-packages/" else ""
            return own + rest.removesuffix(".py")
    return code.co_filename.rpartition("/")[2].removesuffix(".py")


class Calls:
    """Python calls (a generator's or coroutine's resumption counts as one) and calls of builtins by
    the code that made them; those of turns aside together as "aside"."""

    def __init__(self) -> None:
        self._python: Counter[CodeType] = Counter()
        self._builtin: Counter[CodeType] = Counter()
        self._depth = self._aside = 0
        self._is_aside = False

    def begin(self, *_: Any) -> None:
        """From now on."""
        self._python.clear()
        self._builtin.clear()
        self._depth = self._aside = 0
        sys.setprofile(self._note)

    def end(self, file: Path) -> None:
        """No more; `file` gets what was counted."""
        sys.setprofile(None)
        found: dict[str, dict[str, int]] = {"aside": {"python": self._aside}}
        for kind, counts in (("python", self._python), ("builtin", self._builtin)):
            for code, count in counts.items():
                entry = found.setdefault(f"{_module(code)}:{code.co_qualname}", {})
                entry[kind] = entry.get(kind, 0) + count
        made = file.with_suffix(".new")
        made.write_text(json.dumps(found))
        made.replace(file)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            if self._depth == 0:
                self._is_aside = _module(frame.f_code).startswith(_ASIDE)
            self._depth += 1
            if self._is_aside:
                self._aside += 1
            else:
                self._python[frame.f_code] += 1
        elif event == "return":
            self._depth = max(0, self._depth - 1)
        elif event == "c_call" and not self._is_aside:
            self._builtin[frame.f_code] += 1


def main() -> int:
    """The command line."""
    file, calls = Path(sys.argv[1]), Calls()
    signal.signal(signal.SIGUSR1, calls.begin)
    signal.signal(signal.SIGUSR2, lambda *_: calls.end(file))
    return run(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
