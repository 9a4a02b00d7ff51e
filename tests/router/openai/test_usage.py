"""Counting tokens over prompts and choices."""

from __future__ import annotations

from events.output import Usage
from router.openai.usage import total


def test_a_prompt_counts_once_and_its_least_hit_is_told() -> None:
    body = total([Usage(10, 8, 3), Usage(10, 0, 4), Usage(20, 16, 5), Usage(20, 17, 6)], 2)
    assert (body.prompt_tokens, body.completion_tokens, body.total_tokens) == (30, 18, 48)
    assert body.prompt_tokens_details.cached_tokens == 16


def test_choices_that_never_reported_count_nothing() -> None:
    body = total([None, Usage(10, 2, 1), None], 1)
    assert (body.prompt_tokens, body.completion_tokens) == (10, 1)
    assert body.prompt_tokens_details.cached_tokens == 2
