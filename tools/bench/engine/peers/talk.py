"""The child's side of the contest: one JSON object a line in, one out. Standard library only.

An engine has `load(words)`, which returns what it is, `prefill(tokens)` and `decode(rows, context,
steps)`, which return seconds. `tokens` is how many random ones; `decode` times `steps` steps of
`rows` sequences behind `context` tokens each, the prefill left out. Whatever an engine prints goes
to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any


def serve(engine: Any) -> None:
    """Answer until the input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        words = json.loads(line)
        try:
            answer = getattr(engine, words.pop("do"))(**words)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        print(json.dumps(answer), file=answers, flush=True)
    sys.stdout.flush()
    os._exit(0)  # some engines' threads would hold the interpreter
