"""The command around the cluster: flags, progress lines, the ready message, Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from tools.errors import CommandError
from tools.fetch import default_model
from tools.up.cluster import LocalCluster, UpOptions
from tools.up.state import default_folder

DEFAULT_NAME = "smollm2-135m-instruct"

READY = """
warmroute is up: {url}   (dashboard: {url}/dashboard)

  curl {url}/v1/chat/completions -H 'Authorization: Bearer {key}' \\
    -H 'Content-Type: application/json' \\
    -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Say hello."}}]}}'

  from openai import OpenAI
  client = OpenAI(base_url="{url}/v1", api_key="{key}")
  answer = client.chat.completions.create(
      model="{model}", messages=[{{"role": "user", "content": "Say hello."}}])
  print(answer.choices[0].message.content)

Logs and keys: {folder}. Ctrl-C stops everything.
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="warmroute up", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="where the gateway listens")
    parser.add_argument("--port", type=int, default=8000, help="the gateway's port (0: any free)")
    parser.add_argument("--bus-port", type=int, default=0, help="nats-server's port (0: any free)")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--model", type=Path, help="a GGUF file or a safetensors folder")
    parser.add_argument("--model-name", help="what clients call the model")
    parser.add_argument("--policy", default="warmroute", help="the routing policy to start with")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ...")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--kv-blocks", type=int, default=2048, help="KV blocks of each replica")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each replica")
    parser.add_argument("--cluster", default="local", help="the cluster's name on the bus")
    parser.add_argument("--state", type=Path, help="folder for keys, logs and the cluster file")
    return parser


def options_of(argv: Sequence[str]) -> UpOptions:
    """Flags to options. Raises CommandError."""
    flags = _parser().parse_args(argv)
    if not 1 <= flags.replicas <= 64:
        raise CommandError("--replicas takes 1 to 64")
    model = flags.model or default_model(progress=_say)
    if not model.exists():
        raise CommandError(f"no model at {model}")
    return UpOptions(
        state=flags.state or default_folder(flags.cluster),
        model=model.resolve(),
        model_name=flags.model_name or (model.stem.lower() if flags.model else DEFAULT_NAME),
        cluster=flags.cluster,
        host=flags.host,
        port=flags.port,
        bus_port=flags.bus_port,
        replicas=flags.replicas,
        policy=flags.policy,
        replica_settings={
            "device": flags.device,
            "dtype": flags.dtype,
            "kv_blocks": flags.kv_blocks,
            "threads": flags.threads,
        },
    )


def _say(line: str) -> None:
    print(f"  {line}", flush=True)


async def _serve(cluster: LocalCluster, options: UpOptions) -> None:
    began = time.monotonic()
    async with cluster:
        _say(f"ready after {time.monotonic() - began:.1f} s")
        print(
            READY.format(
                url=cluster.url,
                key=cluster.state.keys.api_key,
                model=options.model_name,
                folder=cluster.state.folder,
            ),
            flush=True,
        )
        raise CommandError(await cluster.wait_failed())


async def _run(options: UpOptions) -> int:
    """Serve until a signal: the first one drains, a second one kills what still drains."""
    cluster = LocalCluster(options, _say)
    serving = asyncio.create_task(_serve(cluster, options))

    def stop() -> None:
        if serving.cancelling():
            cluster.hurry()
        else:
            _say("stopping: open streams may finish (again: stop at once)")
            serving.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    try:
        await serving
    except asyncio.CancelledError:
        _say("stopped")
    return 0


def main(argv: Sequence[str]) -> int:
    """Run until Ctrl-C. Raises CommandError."""
    options = options_of(argv)
    print(f"warmroute up: cluster '{options.cluster}', model {options.model_name}", flush=True)
    return asyncio.run(_run(options))
