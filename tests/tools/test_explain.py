"""What `warmroute explain` prints of an answer."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from tools.explain import MAX_COLUMNS, TERMS, table, verdict

ANSWER: dict[str, Any] = {
    "prompt_tokens": 1_200,
    "prompt_blocks": 75,
    "hand_off": None,
    "policy": "warmroute",
    "replica": "r1",
    "reason": "warm",
    "predicted_cached_tokens": 1_184,
    "predicted_ttft_ms": 41.2,
}


def candidate(replica: str, filtered: str | None = None, **terms: float) -> dict[str, Any]:
    ages = {"trust": 1.0, "digest_age_ms": 31.0, "load_age_ms": 2_500.0, "overlap_blocks": 74}
    where = {"replica": replica, "pool": "", "filtered": filtered}
    return {**where, **dict.fromkeys(TERMS, 0.0), **ages, **terms}


def drawn(*candidates: dict[str, Any]) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(table({**ANSWER, "candidates": list(candidates)}))
    return console.file.getvalue()


def test_terms_that_come_to_nothing_everywhere_are_left_out() -> None:
    text = drawn(candidate("r1", score=12.34, harm_ms=3.0), candidate("r0", lateness_ms=0.04))
    assert "12.3" in text
    assert "harm to others" in text
    assert "lateness" not in text
    assert "74 / 75" in text
    assert "2.5 s" in text


def test_a_filtered_replica_shows_the_filter_and_no_terms() -> None:
    text = drawn(candidate("r1"), candidate("r0", filtered="draining"))
    assert "draining" in text
    assert text.count("74 / 75") == 1


def test_many_candidates_are_cut_and_counted() -> None:
    text = drawn(*(candidate(f"r{number}") for number in range(MAX_COLUMNS + 3)))
    assert "and 3 more" in text
    assert f"r{MAX_COLUMNS}" not in text


def test_the_verdict_is_one_sentence() -> None:
    assert verdict(ANSWER) == (
        "r1 would get it (warm; policy warmroute): 1,184 of 1,200 prompt tokens are cached there,"
        " the first token comes after about 41 ms."
    )
    nobody = {**ANSWER, "replica": None, "reason": "deadline", "retry_after_s": 3.0}
    assert verdict(nobody) == (
        "Nobody can take these 1,200 prompt tokens now: deadline; ask again in 3 s."
    )


def test_where_replicas_have_roles_it_says_who_would_compute_it() -> None:
    pair = {"verdict": "split", "prefill": "p0", "prefill_ms": 80.0, "split_ms": 120.0}
    said = verdict({**ANSWER, "hand_off": {**pair, "colocated_ms": 1_900.0}})
    assert said.startswith("p0 would compute it within 80 ms (cost 120 ms, at one place for both")
    stays = verdict({**ANSWER, "hand_off": {"verdict": "short"}})
    assert stays.startswith("Nobody would compute it for another one (short). ")
