"""Prompts made from texts as JSON writes them have the ids that they have when all is decoded."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.model.card import ModelCard
from configs.model.template import ChatTemplate
from router.openai.contents import Written, contents_of
from router.openai.plain import read_plain
from router.openai.schema import Limits
from router.rendering import shelves
from router.rendering.pieces import INLINE_CHARS
from router.rendering.render import RenderBounds, Renderer
from tests.router.openai.test_render import MARKERS, expected, ids_of, say

LIMITS = Limits(models=frozenset(["m"]), context_tokens=512, vocab=300)
WORDS = st.lists(
    st.sampled_from(
        ["a", "word", "été", "мир", "☃", "\n", "\t", '"q"', "\\", "\\n", "/", "7", "x "]
    ),
    max_size=40,
).map(" ".join)
TEXTS = (
    WORDS
    | st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=20)
    | st.sampled_from([*MARKERS, *(marker[-4:] + "x" for marker in MARKERS)])
    | st.text("a \n<|>/\\im_e", max_size=12)
)
MESSAGES = st.lists(
    st.tuples(st.sampled_from(["system", "user", "assistant"]), TEXTS), min_size=1, max_size=5
)

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BARE = "{% for message in messages %}{{ message['content'] }}%s 100%\n{% endfor %}<|im_start|>"

pytestmark = pytest.mark.skipif(
    contents_of()(b"{}") is None, reason="there is no compiler: all is decoded"
)


@pytest.fixture(scope="module", params=[CHATML, BARE], ids=["chatml", "bare"])
def copying(request: pytest.FixtureRequest, card: ModelCard) -> ModelCard:
    """Its template only copies contents."""
    markers = card.tokenizer.specials
    return dataclasses.replace(card, template=ChatTemplate(request.param, markers))


@pytest.fixture(scope="module")
def chatml(card: ModelCard) -> ModelCard:
    return dataclasses.replace(card, template=ChatTemplate(CHATML, card.tokenizer.specials))


@pytest.fixture(scope="module")
def plan(chatml: ModelCard, executor: ThreadPoolExecutor) -> shelves.Plan:
    """Of one question."""
    found = Renderer(chatml, executor)._plan(("user",))
    assert found is not None
    return found


def body_of(messages: list[dict], ascii_only: bool = False) -> bytes:
    return json.dumps({"model": "m", "messages": messages}, ensure_ascii=ascii_only).encode()


def written(messages: list[dict]) -> Written:
    asked = read_plain(body_of(messages), LIMITS)
    assert asked is not None
    assert isinstance(asked.messages, Written)
    return asked.messages


@settings(max_examples=40, deadline=None)
@given(
    conversations=st.lists(MESSAGES, min_size=1, max_size=4),
    sizes=st.sampled_from([(4_096, 256, 64), (48, 12, 5), (20, 8, 2)]),
)
def test_R8_what_is_written_gives_the_same_ids(
    copying: ModelCard,
    executor: ThreadPoolExecutor,
    conversations: list[list[tuple[str, str]]],
    sizes: tuple[int, int, int],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, size in zip(("LARGE_CHARS", "SMALL_CHARS", "TAIL_CHARS"), sizes, strict=True):
            patch.setattr(shelves, name, size)
        renderer = Renderer(copying, executor, RenderBounds(segment_cache_bytes=8_000))

    async def check() -> None:
        for conversation in conversations * 2:
            messages = [{"role": role, "content": text} for role, text in conversation]
            for cut in range(1, len(messages) + 1):
                rendered = await renderer.chat(written(messages[:cut]), tenant="t")
                assert ids_of(rendered) == expected(copying, messages[:cut])

    asyncio.run(check())


def test_R9_both_ways_to_keep_texts_share_one_bound(
    chatml: ModelCard, executor: ThreadPoolExecutor
) -> None:
    renderer = Renderer(chatml, executor, RenderBounds(segment_cache_bytes=40_000))

    async def ask(decoded: bool, tenants: range) -> int:
        for tenant in tenants:
            for number in range(20):
                messages = [{"role": "user", "content": f"{tenant} {number} " + "word " * 20}]
                asked = messages if decoded else written(messages)
                await renderer.chat(asked, tenant=str(tenant))
        return renderer.text_bytes

    one_way = asyncio.run(ask(False, range(20)))
    assert 0 < one_way <= renderer.text_limit_bytes / 2
    both = asyncio.run(ask(True, range(20)))
    assert one_way < both <= renderer.text_limit_bytes == 40_000


@settings(max_examples=200, deadline=None)
@given(conversation=MESSAGES, ascii_only=st.booleans())
def test_messages_read_the_same(conversation: list[tuple[str, str]], ascii_only: bool) -> None:
    messages = [{"role": role, "content": text} for role, text in conversation]
    asked = read_plain(body_of(messages, ascii_only), LIMITS)
    assert asked is not None
    assert list(asked.messages) == messages
    assert len(asked.messages) == len(messages)
    assert asked.messages[:1] == messages[:1]


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages":[{"role":"user","content":"x","content":"x"}],"model":"m"}',
        b'{"messages":[{"role":"content","content":"x"}],"model":"m"}',
        b'{"messages":[{"role":"user","content":"x"}],"model":"m","content":"x"}',
        b'{"messages":[{"role":"user","content":"x}],"model":"m"}',
        b'{"messages":[{"role":"user","content":"\xc0\x80"}],"model":"m"}',
        b'{"messages":[{"role":"user","content":"\xed\xa0\x80"}],"model":"m"}',
        b'{"messages":[{"role":"user","content":"\xf4\x90\x80\x80"}],"model":"m"}',
        b'{"messages":[{"role":"user","content":"\\',
        b'{"messages":[{"role":"user","content":"\xe2\x98',
    ],
)
def test_P11_what_is_not_quite_so_is_not_taken(body: bytes) -> None:
    assert read_plain(body, LIMITS) is None


async def test_a_known_head_is_not_tokenised_again(
    chatml: ModelCard, executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer = Renderer(chatml, executor)
    monkeypatch.setattr(chatml.template, "outlined", lambda _: pytest.fail("decoded"))
    encoded: list[str] = []
    real = chatml.tokenizer.encode
    history = say("one question", 'one\n"answer"', "another")
    await renderer.chat(written(say("x", "y", "z")), tenant="t")
    await renderer.chat(written(history[:1]), tenant="t")
    monkeypatch.setattr(chatml.tokenizer, "encode", lambda text: encoded.append(text) or real(text))
    await renderer.chat(written(history), tenant="t")
    assert encoded == ['assistant\none\n"answer"', "user\nanother"]
    await renderer.chat(written(history), tenant="t")
    assert len(encoded) == 2


async def test_S2_tenants_do_not_share_what_is_known(
    chatml: ModelCard, executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer = Renderer(chatml, executor)
    encoded: list[str] = []
    real = chatml.tokenizer.encode
    await renderer.chat(written(say("a secret")), tenant="a")
    monkeypatch.setattr(chatml.tokenizer, "encode", lambda text: encoded.append(text) or real(text))
    await renderer.chat(written(say("a secret")), tenant="b")
    assert encoded[-2:] == ["user\na", " secret"]


async def test_a_generated_turn_keeps_its_ids(
    chatml: ModelCard, executor: ThreadPoolExecutor
) -> None:
    renderer = Renderer(chatml, executor)
    answer = "it is"
    ids = [token for char in answer for token in chatml.tokenizer.encode(char)]
    assert ids != chatml.tokenizer.encode(answer)
    assert renderer.remember("t", answer, ids)
    history = say("hi", answer, "go on")
    found = ids_of(await renderer.chat(written(history), tenant="t"))
    assert found == ids_of(await renderer.chat(history, tenant="t"))
    assert found != expected(chatml, history)
    assert ids_of(await renderer.chat(written(history), tenant="u")) == expected(chatml, history)


async def test_long_texts_are_tokenised_in_a_thread_and_known_then(
    chatml: ModelCard, executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer = Renderer(chatml, executor)
    monkeypatch.setattr(chatml.template, "outlined", lambda _: pytest.fail("decoded"))
    await renderer.chat(written(say("x")), tenant="t")
    threads: set[int] = set()
    real = chatml.tokenizer.encode
    monkeypatch.setattr(
        chatml.tokenizer, "encode", lambda text: threads.add(threading.get_ident()) or real(text)
    )
    history = say("the\n" * INLINE_CHARS)
    found = ids_of(await renderer.chat(written(history), tenant="t"))
    assert threads
    assert threading.get_ident() not in threads
    threads.clear()
    assert ids_of(await renderer.chat(written(history), tenant="t")) == found
    assert not threads


async def test_what_is_known_is_bounded(card: ModelCard, executor: ThreadPoolExecutor) -> None:
    bound = 8_000
    shelf = shelves.shelves_for(card.tokenizer, card.template.markers, bound, bound // 4)
    assert shelf is not None
    for number in range(200):
        shelf.put(f"tenant {number % 9}", b"text %d" % number, bytes(4 * (number % 30)))
        assert shelf.size_bytes <= bound
    assert shelf.size_bytes > bound // 2
    shelf.put("tenant 0", b"x", bytes(bound))
    assert shelf.size_bytes <= bound


def test_S1_many_markers_cost_a_text_that_is_written_for_them_no_more(
    chatml: ModelCard, plan: shelves.Plan
) -> None:
    messages = written(say("<|a" * 40_000))

    def seconds(markers: int) -> float:
        named = [f"<|a special one of {number}|>" for number in range(markers)]
        shelf = shelves.shelves_for(chatml.tokenizer, named, 1 << 20, 1 << 18)
        assert shelf is not None
        began_s = time.thread_time()
        assert shelf.join("t", plan, messages, {}) is None
        return time.thread_time() - began_s

    few_s, many_s = (min(seconds(markers) for _ in range(3)) for markers in (2, 400))
    assert many_s < 8 * few_s


@settings(max_examples=100, deadline=None)
@given(
    markers=st.sets(st.text("ab</|é", min_size=2, max_size=5), min_size=1, max_size=9),
    text=st.text("ab</|é", max_size=20),
    slashed=st.booleans(),
)
def test_S1_a_marker_or_a_part_of_one_is_noticed(
    chatml: ModelCard, plan: shelves.Plan, markers: set[str], text: str, slashed: bool
) -> None:
    shelf = shelves.shelves_for(chatml.tokenizer, list(markers), 1 << 20, 1 << 18)
    assert shelf is not None
    body = body_of(say(text)).replace(b"/", rb"\/" if slashed else b"/")
    asked = read_plain(body, LIMITS)
    assert asked is not None
    assert isinstance(asked.messages, Written)
    noticed = shelf.join("t", plan, asked.messages, {}) is None
    there = bool(ChatTemplate(CHATML, dict.fromkeys(markers, 1))._breaker.cuts(text))
    assert noticed >= there if slashed else noticed == there
