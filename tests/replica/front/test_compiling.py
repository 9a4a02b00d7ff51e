"""Requests whose grammar is compiled first: refused, ended, held, lost meanwhile."""

from __future__ import annotations

import json
import threading

import pytest

from events.grammar import JSON_SCHEMA, MAX_GRAMMAR_BYTES, REGEX, Grammar
from events.request import Abort, ChildProgress, Hold
from replica.front import compiling
from replica.grammar.compiler import GrammarCompiler
from tests.fakes.engine import inside
from tests.fakes.vocabulary import END_ID, ByteVocabulary
from tests.replica.front.rig import request, rig
from tests.waiting import until

VOCABULARY = ByteVocabulary(tuple(b"word %d" % number for number in range(44)))
DIGITS = Grammar(REGEX, "[0-9]{4}")


class Gated(GrammarCompiler):
    """Compiles when it is let."""

    def __init__(self) -> None:
        super().__init__(VOCABULARY, {END_ID})
        self.gate = threading.Event()
        self.calls = 0

    def states(self, *args, **more):
        self.calls += 1
        assert self.gate.wait(10.0)
        return super().states(*args, **more)


@pytest.fixture
def gated() -> Gated:
    return Gated()


def plain() -> GrammarCompiler:
    return GrammarCompiler(VOCABULARY, {END_ID})


async def test_each_child_gets_a_state_behind_its_own_progress() -> None:
    async with rig(inside(b"x"), compiler=plain()) as front:
        router = await front.dial()
        progress = tuple(ChildProgress(bytes(b"".join(bytes((byte, 0, 0, 0)) for byte in text)))
                         for text in (b"12", b"", b"345"))  # fmt: skip
        await router.send(request(n=3, grammar=DIGITS, progress=progress))
        for child in range(3):
            assert (await router.answer(child=child)).finish.reason == "stop"
        one, two, three = front.engine.requests
        assert one.grammar.advance(b"34")
        assert not two.grammar.advance(b"12345")
        assert three.grammar.advance(b"6")
        assert three.grammar.finished


async def test_P12_a_bad_grammar_never_reaches_the_engine() -> None:
    async with rig(compiler=plain()) as front:
        router = await front.dial()
        bad = {
            "nonobject": Grammar(JSON_SCHEMA, json.dumps({"properties": {"a": "b"}})),
            "regex": Grammar(REGEX, "("),
            "large": Grammar(JSON_SCHEMA, json.dumps({"enum": ["x" * MAX_GRAMMAR_BYTES]})),
            "kind": Grammar("poem", "x"),
        }
        for name, grammar in bad.items():
            await router.send(request(name, n=2, grammar=grammar))
            for child in range(2):
                finish = (await router.answer(name, child=child)).finish
                assert (finish.reason, finish.error.status) == ("error", 400)
                assert finish.error.param == "response_format"
        assert front.engine.requests == []


async def test_a_replica_without_a_compiler_refuses() -> None:
    async with rig() as front:
        router = await front.dial()
        await router.send(request(grammar=DIGITS))
        assert (await router.answer()).finish.error.status == 400


async def test_the_loop_goes_on_while_a_grammar_is_compiled(gated: Gated) -> None:
    async with rig(inside(b"x"), compiler=gated) as front:
        router = await front.dial()
        await router.send(request("slow", grammar=DIGITS))
        await until(lambda: gated.calls == 1)
        await router.send(request("plain"))
        assert (await router.answer("plain")).finish.reason == "stop"
        assert [each.grammar for each in front.engine.requests] == [None]
        gated.gate.set()
        assert (await router.answer("slow")).finish.reason == "stop"


async def test_O1_an_abort_meanwhile_throws_the_grammar_away(gated: Gated) -> None:
    async with rig(compiler=gated) as front:
        router = await front.dial()
        await router.send(request(grammar=DIGITS))
        await until(lambda: gated.calls == 1)
        await router.send(Abort(request_id="r1", attempt=1))
        assert (await router.answer()).finish.reason == "abort"
        await until(front.empty)
        gated.gate.set()
        pending = front.front.intake.compiling
        await until(lambda: not len(pending))
        assert front.engine.requests == []


async def test_a_hold_meanwhile_still_holds(gated: Gated) -> None:
    async with rig(compiler=gated) as front:
        router = await front.dial()
        await router.send(request(grammar=DIGITS))
        await until(lambda: gated.calls == 1)
        await router.send(Hold(request_id="r1", attempt=1))
        await until(lambda: any(attempt.holds for attempt in front.front.attempts))
        gated.gate.set()
        await front.submitted()
        child = front.engine.requests[0].child
        await until(lambda: front.engine.calls[-1:] == [("hold", child)])
        await router.send(Abort(request_id="r1", attempt=1))
        await router.answer()


async def test_O4_what_waits_to_be_compiled_is_bounded(
    gated: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "MAX_COMPILING", 2)
    async with rig(inside(b"x"), compiler=gated) as front:
        router = await front.dial()
        for name in ("a", "b", "c"):
            await router.send(request(name, tenant=name, grammar=DIGITS))
        refused = (await router.answer("c")).finish.error
        assert (refused.status, refused.reroute) == (429, True)
        gated.gate.set()
        for name in ("a", "b"):
            assert (await router.answer(name)).finish.reason == "stop"


class Heavy(Gated):
    """Only what says so waits for the gate."""

    def states(self, grammar: Grammar, *args, **more):
        if "heavy" in grammar.source:
            return super().states(grammar, *args, **more)
        return GrammarCompiler.states(self, grammar, *args, **more)


async def test_S6_heavy_grammars_of_one_tenant_keep_nobody_waiting() -> None:
    heavy = Heavy()
    async with rig(inside(b"x"), compiler=heavy) as front:
        router = await front.dial()
        for number in range(8):
            grammar = Grammar(REGEX, f"heavy{number}+")
            await router.send(request(f"h{number}", tenant="flood", grammar=grammar))
        for name in ("a", "b"):
            await router.send(request(name, tenant=name, grammar=Grammar(REGEX, f"[{name}-z]")))
            assert (await router.answer(name)).finish.reason == "stop"
        heavy.gate.set()
        for number in range(8):
            assert (await router.answer(f"h{number}")).finish.reason == "stop"


async def test_what_was_compiled_before_waits_for_nobody() -> None:
    heavy = Heavy()
    heavy.states(DIGITS, [()], b"salt")
    async with rig(inside(b"x"), compiler=heavy) as front:
        router = await front.dial()
        for tenant in ("one", "two"):
            grammar = Grammar(REGEX, f"heavy {tenant}")
            await router.send(request(tenant, tenant=tenant, grammar=grammar))
        await router.send(request("known", n=2, grammar=DIGITS))
        for child in range(2):
            assert (await router.answer("known", child=child)).finish.reason == "stop"
        one, two = front.engine.requests
        assert one.grammar.advance(b"12")
        assert two.grammar.advance(b"3456")
        assert two.grammar.finished
        assert not one.grammar.finished
        heavy.gate.set()
        for tenant in ("one", "two"):
            await router.answer(tenant)


async def test_a_grammar_that_takes_too_long_ends_its_request(
    gated: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "MAX_COMPILE_S", 0.01)
    async with rig(compiler=gated) as front:
        router = await front.dial()
        await router.send(request(grammar=DIGITS))
        assert (await router.answer()).finish.error.code == "grammar_timeout"
        gated.gate.set()
