"""KV below the devices, through the whole cluster: what one replica wrote the other can fetch."""

from __future__ import annotations

import json
import time
from typing import Any

from openai import OpenAI

from tests.e2e.conftest import MODEL
from tests.e2e.test_rows import complete, fresh
from tests.e2e.up import Up


def explained(up: Up, prompt: str) -> dict[str, dict[str, Any]]:
    """The terms of each replica for this prompt now."""
    admin = json.loads((up.state / "keys.json").read_text())["admin_key"]
    ask = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "tenant": "default"}
    status, text = up.call("POST", "/router/explain", json.dumps(ask).encode(), key=admin)
    assert status == 200, text
    return {one["replica"]: one for one in json.loads(text)["candidates"]}


def test_the_choice_knows_what_the_other_replica_could_fetch(up: Up, client: OpenAI) -> None:
    def shown() -> tuple[str, str, str] | None:
        """A prompt, its home and the other replica, once both reach it. Blocks that are computed
        while kvd is away (another test stops it) are not written: then another prompt shows it."""
        prompt = fresh(600)
        home = complete(client, prompt).headers["x-warmroute-replica"]
        (other,) = {"r0", "r1"} - {home}
        end = time.monotonic() + 3.0
        while time.monotonic() < end:
            terms = explained(up, prompt)
            here, there = terms[home]["overlap_blocks"], terms[other]["overlap_blocks"]
            if there >= here - 1 > 0:
                return prompt, home, other
            time.sleep(0.05)
        return None

    found = next(filter(None, (shown() for _ in range(10))), None)
    assert found, "the other replica's reach never becomes as deep"
    prompt, home, other = found
    terms = explained(up, prompt)
    assert terms[other]["transfer_ms"] > 0
    assert terms[home]["transfer_ms"] == 0
    # Which of them is chosen depends on how fast each has just been; both beat a cold one.
    for one in terms.values():
        assert one["saved_prefill_ms"] > one["transfer_ms"] + one["prefill_ms"] / 2
