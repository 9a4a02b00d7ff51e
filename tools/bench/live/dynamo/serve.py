"""Dynamo's frontend and, for each OpenAI server, a worker that forwards to it. Runs in an
interpreter that has Dynamo and imports nothing of ours; everything listens on loopback.

The frontend makes tokens of a conversation and chooses a worker by its KV router, told of each
server's cache by the server's own KV events, where there are any; the worker asks its server for
those very tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import threading
from collections.abc import AsyncIterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
DISCOVERY, REQUESTS = "file", "tcp"
ENDPOINT = "bench.backend.generate"


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", required=True, help="its name")
    parser.add_argument("--folder", type=Path, required=True, help="takes the discovery's files")
    parser.add_argument("--model-folder", type=Path, required=True)
    parser.add_argument("--block-tokens", type=int, required=True)
    parser.add_argument("--worker-urls", nargs="+", required=True)
    parser.add_argument(
        "--kv-events", nargs="*", default=[], help="of each server, over ZMQ; else they are guessed"
    )
    return parser.parse_args()


def _environ(flags: argparse.Namespace) -> dict[str, str]:
    """Before anything of Dynamo is imported."""
    hosts = ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST")
    return {
        **dict.fromkeys(hosts, HOST),
        "DYN_FILE_KV": str(flags.folder / "discovery"),
        "DYN_ZMQ_BROKER_URL": _start_broker(),
        "DYN_LOG": "error",
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
    }


def _start_broker() -> str:
    """Events pass through it: without one each publisher would listen on all interfaces. Says
    where it listens, as Dynamo wants to be told."""
    import zmq

    context = zmq.Context.instance()
    sockets = [context.socket(kind) for kind in (zmq.XSUB, zmq.XPUB)]
    publishers, readers = (s.bind_to_random_port(f"tcp://{HOST}") for s in sockets)
    threading.Thread(target=zmq.proxy, args=sockets, daemon=True).start()
    return f"xsub=tcp://{HOST}:{publishers} , xpub=tcp://{HOST}:{readers}"


async def _frontend(flags: argparse.Namespace) -> int:
    """Until it ends: its exit status."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "dynamo.frontend", "--router-mode", "kv"),
        *("--discovery-backend", DISCOVERY, "--request-plane", REQUESTS),
        *("--http-host", HOST, "--http-port", str(flags.port)),
        *("--kv-cache-block-size", str(flags.block_tokens)),
        *("--router-min-initial-workers", str(len(flags.worker_urls))),
        *(() if flags.kv_events else ("--no-router-kv-events",)),
    )
    return await child.wait()


class Forwarder:
    """One worker: tokens in, tokens out, computed by an OpenAI server."""

    def __init__(self, session: Any, tokenizer: Any, url: str, model: str) -> None:
        self._session = session
        self._tokenizer = tokenizer
        self._url = f"{url}/v1/completions"
        self._model = model

    async def generate(
        self, request: Mapping[str, Any], context: Any
    ) -> AsyncIterator[dict[str, Any]]:
        """Dynamo's tokens of one answer, chunk by chunk; the last one says why it ends."""
        prompt = list(request["token_ids"])
        async with self._session.post(self._url, json=self._body(prompt, request)) as answer:
            if answer.status != 200:
                raise RuntimeError(f"http {answer.status}")
            finish, usage = "stop", None
            async for line in answer.content:
                if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
                    continue
                chunk = json.loads(line[5:])
                usage = chunk.get("usage") or usage
                for choice in chunk["choices"]:
                    finish = choice.get("finish_reason") or finish
                    if choice["text"]:
                        yield {"token_ids": self._ids(choice["text"])}
        yield {"token_ids": [], "finish_reason": finish, "completion_usage": usage}

    def _body(self, prompt: list[int], request: Mapping[str, Any]) -> dict[str, Any]:
        stop, sampling = request["stop_conditions"], request["sampling_options"]
        return {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": stop.get("max_tokens") or 16,
            "ignore_eos": bool(stop.get("ignore_eos")),
            "temperature": sampling.get("temperature") or 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def _ids(self, text: str) -> list[int]:
        """Of a piece of text, which decode to it again: a server's stream names no ids."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


async def _work(flags: argparse.Namespace, worker: Forwarder, kv_events: str) -> None:
    """One worker's life: registered, its server's cache told where it says something, requests
    served."""
    from dynamo.llm import (
        KvEventPublisher,
        ModelInput,
        ModelRuntimeConfig,
        ModelType,
        WorkerType,
        register_model,
    )
    from dynamo.runtime import DistributedRuntime

    runtime = DistributedRuntime(asyncio.get_running_loop(), DISCOVERY, REQUESTS)
    endpoint = runtime.endpoint(ENDPOINT)
    config = ModelRuntimeConfig()
    config.kv_event_publishing_enabled = bool(kv_events)
    await register_model(
        ModelInput.Tokens,
        ModelType.Chat | ModelType.Completions,
        endpoint,
        str(flags.model_folder),
        flags.model,
        worker_type=WorkerType.Aggregated,
        kv_cache_block_size=flags.block_tokens,
        runtime_config=config,
        ignore_weights=True,
    )
    told = kv_events and KvEventPublisher(
        endpoint,
        kv_block_size=flags.block_tokens,
        zmq_endpoint=kv_events,
        zmq_topic="",
        enable_local_indexer=True,
    )
    try:
        await endpoint.serve_endpoint(worker.generate)
    finally:
        if told:
            told.shutdown()


async def main() -> int:
    """Until the frontend or a worker ends."""
    flags = _flags()
    os.environ.update(_environ(flags))
    import aiohttp
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(flags.model_folder / "tokenizer.json"))
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        tasks = [asyncio.ensure_future(_frontend(flags))]
        for url, kv_events in zip_longest(flags.worker_urls, flags.kv_events, fillvalue=""):
            worker = Forwarder(session, tokenizer, url, flags.model)
            tasks.append(asyncio.ensure_future(_work(flags, worker, kv_events)))
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return int(done.pop().result() or 1)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
