"""Requests that name an adapter: by content, and with the keys that the router made."""

from __future__ import annotations

from dataclasses import replace

from kvstore.identity import Namespace, chain
from replica.front.check import Limits
from tests.fakes.engine import inside
from tests.replica.front.rig import CLUSTER_KEY, LAYOUT, request, rig, served


async def test_the_engine_gets_the_adapter_and_keys_of_its_namespace() -> None:
    plain = served(65_536, 1 << 30, None)
    limits = Limits("m", plain.limits.vocab_size, 128, {"x": "digest"})
    async with rig(inside(b"hi"), serving=replace(plain, limits=limits)) as front:
        router = await front.dial()
        sent = request("r1", range(9), adapter=("x", "digest"))
        await router.send(sent)
        await router.answer("r1")
        await router.send(request("r2", range(9)))
        await router.answer("r2")
        with_adapter, without = front.engine.requests
        assert with_adapter.adapter == ("x", "digest")
        assert without.adapter is None
        space = Namespace("m", "w", LAYOUT, ("x", "digest"))
        keys = chain(CLUSTER_KEY, space, sent.salt, sent.prompt)
        assert with_adapter.chain.data == keys.data != without.chain.data


async def test_another_name_or_another_content_is_not_served() -> None:
    plain = served(65_536, 1 << 30, None)
    limits = Limits("m", plain.limits.vocab_size, 128, {"x": "digest"})
    async with rig(inside(b"hi"), serving=replace(plain, limits=limits)) as front:
        router = await front.dial()
        for number, adapter in enumerate((("x", "other"), ("y", "digest"))):
            await router.send(request(f"r{number}", adapter=adapter))
            finish = (await router.answer(f"r{number}")).finish
            assert finish is not None
            assert finish.error is not None
            assert (finish.error.status, finish.error.code) == (404, "model_not_found")
        assert not front.engine.requests
