"""`warmroute up`: flags, progress lines, the ready message, Ctrl-C around the cluster."""

from __future__ import annotations

import argparse
import asyncio
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from configs.model.adapter import AdapterFile
from configs.model.kept import require_q4
from configs.model.weights import open_weights
from configs.schema import AdapterConfig, KvConfig, ReplicaConfig
from events.subjects import check_id
from router.backends.roster import base_url
from router.policies import POLICIES
from tools.errors import CommandError
from tools.fetch import default_model
from tools.flags import device, memory_bytes, natural, port, positive
from tools.up.cluster import LocalCluster
from tools.up.options import UpOptions
from tools.up.present import require_device, require_kvd
from tools.up.state import default_folder

DEFAULT_NAME = "smollm2-135m-instruct"
DEFAULT_REPLICAS = 2
REPLICAS_MAX = 64
ROUTERS_MAX = 16

READY = """
warmroute is up: {url}   (dashboard: {url}/dashboard)

curl {url}/v1/chat/completions -H 'Authorization: Bearer {key}' \\
  -H 'Content-Type: application/json' \\
  -d '{{"model": "{model}", "max_tokens": 64,
       "messages": [{{"role": "user", "content": "Say hello."}}]}}'

from openai import OpenAI
client = OpenAI(base_url="{url}/v1", api_key="{key}")
answer = client.chat.completions.create(
    model="{model}", messages=[{{"role": "user", "content": "Say hello."}}], max_tokens=64)
print(answer.choices[0].message.content)

Logs and keys: {folder}. Ctrl-C stops everything.
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="warmroute up",
        description="Start nats-server, replicas and the gateway on this machine, until Ctrl-C.",
    )
    add, default = parser.add_argument, "(default: %(default)s)"
    add("--host", default="127.0.0.1", help=f"where the gateway listens {default}")
    add("--port", type=port, default=8000, help=f"the first gateway's port, 0: any free {default}")
    add("--bus-port", type=port, default=0, help="nats-server's port (default: any free)")
    add(
        "--replicas",
        type=natural,
        help=f"how many, up to {REPLICAS_MAX} (default: 2, none where the others have roles)",
    )
    add("--prefill", type=natural, default=0, help="replicas that compute prompts for others")
    add("--decode", type=natural, default=0, help="replicas that answer, by KV computed elsewhere")
    add("--routers", type=positive, default=1, help=f"how many, up to {ROUTERS_MAX} {default}")
    add("--model", type=Path, help=f"a GGUF file or a safetensors folder (default: {DEFAULT_NAME})")
    add("--model-name", help="what clients call the model (default: its file's name)")
    add(
        "--lora",
        metavar="NAME=PATH",
        action="append",
        default=[],
        help="a LoRA adapter that clients ask for as model NAME: a folder as PEFT saves it; may be "
        "repeated",
    )
    add("--policy", default="warmroute", choices=sorted(POLICIES), help=f"to route by {default}")
    add("--device", type=device, default="cpu", help=f"cpu, cuda, cuda:1, ... {default}")
    add(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16"),
        help=f"of the weights and the KV blocks {default}",
    )
    add(
        "--weights",
        default="dense",
        choices=("dense", "q4"),
        help=f"in memory: as numbers, or a GGUF's 4-bit blocks as they are {default}",
    )
    add("--block-tokens", type=positive, default=16, help=f"tokens of one KV block {default}")
    add("--kv-blocks", type=positive, default=2048, help=f"KV blocks of each replica {default}")
    add("--threads", type=positive, default=1, help=f"CPU threads of each replica {default}")
    kv = KvConfig()
    add(
        "--kv-host",
        default=kv.host,
        metavar="WHERE",
        help="KV blocks that leave a device: auto, inproc, off, or a kvd's socket (default: auto)",
    )
    add(
        "--kv-bytes",
        type=memory_bytes,
        default=kv.host_bytes,
        help=f"how much of them is kept {default}",
    )
    add(
        "--kv-remote",
        default="",
        metavar="URL",
        help="a store for all hosts: valkey://, valkeys://, redis://, rediss://, file:///, s3://, "
        "lmcache://, peer:// (another host's memory); with a password in it better as "
        "WARMROUTE_KV__REMOTE in the environment",
    )
    add(
        "--backend",
        metavar="URL",
        action="append",
        default=[],
        help="an OpenAI-compatible server that runs already, as a replica; may be repeated",
    )
    add("--backend-model", default="", help="the backends' own name for the model")
    add(
        "--no-cache-salt",
        dest="cache_salt",
        action="store_false",
        help="for backends that refuse `cache_salt`, vLLM's field that keeps the tenants' blocks "
        "apart",
    )
    add(
        "--bridge",
        action="store_true",
        help="follow the backends' KV events (vLLM, SGLang); --block-tokens must be theirs",
    )
    add(
        "--remote",
        action="store_true",
        help="start an embedded Valkey too, where all replicas keep KV blocks used twice",
    )
    add("--cluster", default="local", help=f"the cluster's name on the bus {default}")
    add("--state", type=Path, help="folder for keys and logs (default: one per cluster name)")
    return parser


def options_of(argv: Sequence[str]) -> UpOptions:
    """Flags to options. Raises CommandError."""
    flags = _parser().parse_args(argv)
    if flags.replicas is None:
        flags.replicas = 0 if flags.prefill + flags.decode else DEFAULT_REPLICAS
    if flags.replicas + flags.prefill + flags.decode > REPLICAS_MAX:
        raise CommandError(f"--replicas takes 1 to {REPLICAS_MAX}, all roles together")
    if flags.prefill and not flags.decode + flags.replicas:
        raise CommandError("--prefill needs some that answer: --decode or --replicas")
    if (
        flags.prefill
        and flags.kv_host in ("inproc", "off")
        and not (flags.remote or flags.kv_remote)
    ):
        raise CommandError("--prefill needs a store that all share: --kv-host auto, or --remote")
    if not flags.replicas + flags.decode and not flags.backend:
        raise CommandError("--replicas 0 needs a --backend")
    of_backends = {
        "--bridge": flags.bridge,
        "--no-cache-salt": not flags.cache_salt,
        "--backend-model": flags.backend_model,
    }
    for flag, given in of_backends.items():
        if given and not flags.backend:
            raise CommandError(f"{flag} needs a --backend")
    for url in flags.backend:
        try:
            base_url(url)
        except ValueError as error:
            raise CommandError(f"--backend: {error}") from None
    if flags.kv_host not in ("auto", "inproc", "off") and not flags.kv_host.startswith("/"):
        raise CommandError("--kv-host takes auto, inproc, off, or the path of a kvd's socket")
    if flags.kv_host.startswith("/"):
        require_kvd(Path(flags.kv_host))
    require_device(flags.device)
    if flags.remote and flags.kv_remote:
        raise CommandError("--remote starts a store, --kv-remote names one: not both")
    if flags.routers > ROUTERS_MAX:
        raise CommandError(f"--routers takes 1 to {ROUTERS_MAX}")
    try:
        check_id(flags.cluster)
    except ValueError as error:
        raise CommandError(f"--cluster: {error}") from None
    model_name = flags.model_name or (flags.model.stem.lower() if flags.model else DEFAULT_NAME)
    adapters = _adapter_folders(flags.lora, model_name)
    # Behind all that flags alone can say: it may have to be downloaded.
    model = flags.model or default_model(progress=_say)
    if not model.exists():
        raise CommandError(f"no model at {model}")
    _try_adapters(adapters, model)
    if flags.weights == "q4":
        require_q4(open_weights(model), model)
    return UpOptions(
        state=flags.state or default_folder(flags.cluster),
        model=model.resolve(),
        model_name=model_name,
        cluster=flags.cluster,
        host=flags.host,
        port=flags.port,
        bus_port=flags.bus_port,
        replicas=flags.replicas,
        prefill=flags.prefill,
        decode=flags.decode,
        routers=flags.routers,
        backends=tuple(flags.backend),
        backend_model=flags.backend_model,
        cache_salt=flags.cache_salt,
        bridge=flags.bridge,
        policy=flags.policy,
        kv=KvConfig(host=flags.kv_host, host_bytes=flags.kv_bytes, remote=flags.kv_remote),
        remote=flags.remote,
        replica_settings={
            "device": flags.device,
            "dtype": flags.dtype,
            "weights": flags.weights,
            "block_tokens": flags.block_tokens,
            "kv_blocks": flags.kv_blocks,
            "threads": flags.threads,
        },
        adapters=adapters,
    )


def _adapter_folders(given: Sequence[str], model_name: str) -> dict[str, Path]:
    """By name, each of them there. Raises CommandError."""
    found: dict[str, Path] = {}
    for each in given:
        name, _, path = each.partition("=")
        if not path:
            raise CommandError(f"--lora takes NAME=PATH, not '{each}'")
        if name in found or name == model_name:
            raise CommandError(f"--lora: '{name}' is taken")
        folder = found[name] = Path(path).resolve()
        try:
            AdapterConfig(name=name, path=str(folder))
        except ValueError as error:
            raise CommandError(f"--lora: {error}") from None
        if not folder.is_dir():
            raise CommandError(f"--lora: no folder at {folder}")
    return found


def _try_adapters(folders: Mapping[str, Path], model: Path) -> None:
    """Each against the model: what can't be served is told before anything starts. Raises
    CommandError."""
    try:
        for folder in folders.values():
            AdapterFile(folder, open_weights(model).shape)
    except ValueError as error:
        raise CommandError(f"--lora: {error}") from None


def _say(line: str) -> None:
    print(f"  {line}", flush=True)


def few_blocks(options: UpOptions) -> str | None:
    """A warning where a replica's KV blocks hold less than one full context. Raises ModelError."""
    config = ReplicaConfig(id="any", **options.replica_settings)  # type: ignore[arg-type]
    context_tokens = min(config.context_tokens, open_weights(options.model).shape.context_tokens)
    held_tokens = config.kv_blocks * config.block_tokens
    if held_tokens >= context_tokens:
        return None
    return (
        f"warning: --kv-blocks {config.kv_blocks} holds {held_tokens} tokens, less than one full "
        f"context ({context_tokens}): a longer request fails. "
        f"{-(-context_tokens // config.block_tokens)} blocks hold one."
    )


async def _serve(cluster: LocalCluster, options: UpOptions) -> None:
    began = time.monotonic()
    async with cluster:
        _say(f"ready after {time.monotonic() - began:.1f} s")
        print(
            READY.format(
                url=cluster.urls[0],
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
    if warning := few_blocks(options):
        _say(warning)
    return asyncio.run(_run(options))
