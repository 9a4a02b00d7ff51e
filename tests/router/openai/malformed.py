"""Bodies that no POST route may accept, by name; `CANARY` marks what no error may repeat."""

from __future__ import annotations

import json

CANARY = "canary-7f3a"
_GOOD = {"model": "tiny", "messages": [{"role": "user", "content": CANARY}], "prompt": CANARY}


def _with(**fields: object) -> bytes:
    return json.dumps({**_GOOD, **fields}).encode()


MALFORMED: dict[str, bytes] = {
    "empty": b"",
    "blank": b"  \n",
    "truncated": b'{"model": "tiny", "messages": [{"role": "user", "content": "canary-7f3a',
    "not json": b"canary-7f3a",
    "form": b"model=tiny&prompt=canary-7f3a",
    "array": b'["canary-7f3a"]',
    "string": b'"canary-7f3a"',
    "number": b"5",
    "null": b"null",
    "two documents": b'{"model": "tiny"}{"prompt": "canary-7f3a"}',
    "single quotes": b"{'model': 'tiny', 'prompt': 'canary-7f3a'}",
    "nan": b'{"model": "tiny", "temperature": NaN, "prompt": "canary-7f3a"}',
    "infinity": b'{"model": "tiny", "temperature": Infinity}',
    "huge exponent": b'{"model": "tiny", "temperature": 1e400}',
    "huge integer": b'{"model": "tiny", "seed": ' + b"1" * 10_000 + b"}",
    "bad utf-8": b'{"model": "tiny", "prompt": "canary-7f3a\xff\xfe"}',
    "utf-16": '{"model": "tiny"}'.encode("utf-16"),
    "half a surrogate pair": b'{"model": "tiny", "prompt": "canary-7f3a\\ud800"}',
    "raw control character": b'{"model": "tiny", "prompt": "canary-7f3a\n"}',
    "byte order mark": b'\xef\xbb\xbf{"model": "tiny", "prompt": "canary-7f3a"}',
    "name given twice": b'{"model": "tiny", "model": "canary-7f3a"}',
    "deep arrays": b'{"model": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "empty object": b"{}",
    "model null": _with(model=None),
    "model of the wrong type": _with(model={"canary-7f3a": "canary-7f3a"}),
    "wrong types": _with(messages=CANARY, prompt={CANARY: CANARY}),
    "empty arrays": _with(messages=[], prompt=[]),
    "unknown parameter": _with(**{f"{CANARY} {CANARY}": CANARY}),
    "stream of the wrong type": _with(stream=CANARY),
}
