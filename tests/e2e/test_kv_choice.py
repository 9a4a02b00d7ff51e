"""KV below the devices, through the whole cluster: what one replica wrote the other can fetch."""

from __future__ import annotations

import json
from typing import Any

from openai import OpenAI

from tests.e2e.conftest import MODEL
from tests.e2e.test_rows import complete, fresh
from tests.e2e.up import Up, wait_until


def explained(up: Up, prompt: str) -> dict[str, dict[str, Any]]:
    """The terms of each replica for this prompt now."""
    admin = json.loads((up.state / "keys.json").read_text())["admin_key"]
    ask = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "tenant": "default"}
    status, text = up.call("POST", "/router/explain", json.dumps(ask).encode(), key=admin)
    assert status == 200, text
    return {one["replica"]: one for one in json.loads(text)["candidates"]}


def test_the_choice_knows_what_the_other_replica_could_fetch(up: Up, client: OpenAI) -> None:
    prompt = fresh(600)
    home = complete(client, prompt).headers["x-warmroute-replica"]
    (other,) = {"r0", "r1"} - {home}

    def all_shown() -> bool:
        terms = explained(up, prompt)
        here, there = terms[home]["overlap_blocks"], terms[other]["overlap_blocks"]
        return there >= here - 1 > 0

    wait_until(all_shown, what="the other replica's reach is as deep")
    terms = explained(up, prompt)
    assert terms[other]["transfer_ms"] > 0
    assert terms[home]["transfer_ms"] == 0
    # Which of them is chosen depends on how fast each has just been; both beat a cold one.
    for one in terms.values():
        assert one["saved_prefill_ms"] > one["transfer_ms"] + one["prefill_ms"] / 2
