"""`warmroute doctor --capacity`: the flags, the settings that they change, the printed sum."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from configs.load import ConfigError, adapter_paths, load_cluster, model_path
from configs.model.adapter import AdapterFile, held_numbers
from configs.model.kept import require_q4
from configs.model.weights import open_weights
from configs.schema import HeldWeights, ReplicaConfig
from replica.sched.ledger import HORIZON_TOKENS
from tools.doctor.capacity import ELEMENT_BYTES, MIB, Capacity, Setup, capacity
from tools.doctor.machine import GIB, available_bytes
from tools.doctor.sizes import ModelSize, size_of_config, size_of_weights
from tools.errors import CommandError
from tools.fetch import default_model
from tools.flags import factor, natural, positive
from tools.up.state import default_folder

GPU_RESERVE_MIB = 512
DEFAULT_RANK = 16


def add_flags(group: argparse._ArgumentGroup) -> None:
    """What can be said about the replica; the rest is the cluster file's, or the defaults."""
    add = group.add_argument
    add("--replica", metavar="ID", help="whose settings (default: the cluster's first)")
    add("--model", type=Path, help="a GGUF file, a folder, or any decoder's config.json")
    add("--draft", type=Path, help="a draft model, as --model")
    add("--dtype", choices=("auto", *ELEMENT_BYTES), help="of the weights")
    add("--weights", choices=("dense", "q4"), help="numbers, or a GGUF's 4-bit blocks as they are")
    add("--kv-dtype", choices=tuple(ELEMENT_BYTES), help="of the KV (default: as the weights)")
    add("--tp", type=positive, default=1, metavar="N", help="devices in tensor parallelism")
    add("--memory-gib", type=factor, metavar="G", help="of one device (default: what is free)")
    add("--weights-gib", type=factor, metavar="G", help="of one device, where it isn't dense")
    add("--reserve-mib", type=natural, metavar="M", help="graphs and workspaces (CPU: 0)")
    add("--kv-blocks", type=natural, metavar="N", help="0: as many as fit")
    add("--block-tokens", type=positive, metavar="N")
    add("--max-running", type=positive, metavar="N")
    add("--max-step-tokens", type=positive, metavar="N")
    add("--adapters", type=natural, metavar="N", help="LoRA adapters in memory at once")
    add("--adapter-rank", type=positive, metavar="R", help="of the largest (default: 16)")
    add("--prompt-tokens", type=positive, default=1_024, metavar="N", help="(%(default)s)")
    add("--output-tokens", type=positive, default=256, metavar="N", help="(%(default)s)")
    add("--shared-tokens", type=natural, default=0, metavar="N", help="heads that all share")


def plan(flags: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Print the sum; the figures, as plain numbers. Raises CommandError and what files raise."""
    if flags.shared_tokens > flags.prompt_tokens:
        raise CommandError("--shared-tokens is more than --prompt-tokens")
    replica, path, folders = _settings(flags)
    model = _size(path, replica.weights)
    draft = _size(flags.draft, "dense") if flags.draft else None
    setup = _with_adapters(_setup(flags, replica, model), flags, replica, path, folders)
    found = capacity(model, setup, draft)
    _print(console, model, found, flags)
    return _figures(found, model, flags)


def _settings(flags: argparse.Namespace) -> tuple[ReplicaConfig, Path, dict[str, Path]]:
    """The replica's settings with the flags' changes, and where its model and adapters are."""
    replica, path = ReplicaConfig(id="replica"), None
    folders: dict[str, Path] = {}
    try:
        cluster = load_cluster((flags.state or default_folder("local")) / "cluster.toml")
    except ConfigError:
        if flags.state or flags.replica:
            raise
    else:
        named = [of for of in cluster.replicas if flags.replica in (None, of.id)]
        if flags.replica and not named:
            raise CommandError(f"no replica '{flags.replica}' in the cluster file")
        if named:
            replica, path = named[0], model_path(cluster, named[0])
            folders = {} if flags.model else adapter_paths(cluster, replica)
    changes = {
        name: getattr(flags, name)
        for name in ("block_tokens", "max_running", "max_step_tokens", "weights")
        if getattr(flags, name) is not None
    }
    model = flags.model or path or default_model()
    return msgspec.structs.replace(replica, **changes), model, folders


def _with_adapters(
    setup: Setup,
    flags: argparse.Namespace,
    replica: ReplicaConfig,
    path: Path,
    folders: Mapping[str, Path],
) -> Setup:
    """With room for as many adapters as may be in memory, each as large as the largest."""
    count = flags.adapters
    if count is None:
        count = min(len(folders), replica.max_adapters)
    if not count:
        return setup
    if path.suffix == ".json":
        raise CommandError("--adapters needs the model itself: a GGUF file or a folder")
    shape = open_weights(path).shape
    ranks = [AdapterFile(folder, shape).rank for folder in folders.values()]
    rank = flags.adapter_rank or max(ranks, default=DEFAULT_RANK)
    numbers = held_numbers(shape, rank)
    return replace(
        setup,
        adapters=count,
        adapter_rank=rank,
        adapter_bytes=numbers * ELEMENT_BYTES[setup.dtype],
    )


def _size(path: Path, held: HeldWeights) -> ModelSize:
    if path.suffix == ".json":
        if held == "q4":
            raise CommandError("--weights q4 needs the model's GGUF file, not a config.json")
        return size_of_config(path)
    weights = open_weights(path)
    if held == "q4":
        require_q4(weights, path)
    return size_of_weights(weights)


def _setup(flags: argparse.Namespace, replica: ReplicaConfig, model: ModelSize) -> Setup:
    from replica.runner.build import dtype_name  # torch takes seconds, and only this needs it

    given = flags.dtype if flags.dtype != "auto" else None
    dtype = given or dtype_name(replica)
    on_cpu = replica.device == "cpu" and flags.tp == 1
    if not (model.parameters or flags.weights_gib):
        raise CommandError("this model's weights can't be told from its sizes: add --weights-gib")
    reserve_mib = flags.reserve_mib
    if reserve_mib is None:
        reserve_mib = 0 if on_cpu else GPU_RESERVE_MIB
    memory = flags.memory_gib * GIB if flags.memory_gib else available_bytes()
    return Setup(
        dtype=dtype,
        kv_dtype=flags.kv_dtype or dtype,
        block_tokens=replica.block_tokens,
        kv_blocks=replica.kv_blocks if flags.kv_blocks is None else flags.kv_blocks,
        max_running=replica.max_running,
        max_step_tokens=replica.max_step_tokens,
        horizon_tokens=HORIZON_TOKENS,
        memory_bytes=int(memory),
        tensor_parallel=flags.tp,
        weights_bytes=int((flags.weights_gib or 0) * GIB),
        reserve_bytes=reserve_mib * MIB,
        copies_head=on_cpu,
        weights=replica.weights,
    )


def _print(console: Console, model: ModelSize, found: Capacity, flags: argparse.Namespace) -> None:
    setup = found.setup
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("memory of one device", no_wrap=True)
    table.add_column("MiB", justify="right", no_wrap=True)
    table.add_column("how")
    for share in found.shares:
        table.add_row(share.name, f"{share.bytes / MIB:,.1f}", share.how)
    table.add_row("all", f"{found.bytes / MIB:,.1f}", f"of {setup.memory_bytes / MIB:,.0f}")
    console.print(table)
    lengths = flags.prompt_tokens, flags.output_tokens, flags.shared_tokens
    shared = f", {lengths[2]} of them shared" if lengths[2] else ""
    lines = (
        f"KV of a token: {model.attention}, {model.formula(setup.tensor_parallel)} x "
        f"{setup.kv_dtype} = {found.kv_bytes_per_token:,} bytes",
        f"pool: {found.blocks:,} blocks, {found.tokens:,} tokens; a sequence wastes "
        f"{found.waste_bytes / 1024:,.1f} KiB of its last block in the mean",
        f"watermark: a newcomer leaves up to {found.watermark_blocks} blocks for the next "
        f"{setup.horizon_tokens} tokens of those that run",
        f"{lengths[0]} prompt tokens{shared} and {lengths[1]} of output: "
        f"{found.concurrency(*lengths)} requests side by side to their end, of "
        f"{setup.max_running} seats",
    )
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    if not _fits(found):
        console.print("It does not fit: fewer blocks, or more memory.", style="red")


def _fits(found: Capacity) -> bool:
    return found.blocks > 0 and found.bytes <= found.setup.memory_bytes


def _figures(found: Capacity, model: ModelSize, flags: argparse.Namespace) -> dict[str, Any]:
    lengths = flags.prompt_tokens, flags.output_tokens, flags.shared_tokens
    return {
        "attention": model.attention,
        "kv_bytes_per_token": found.kv_bytes_per_token,
        "blocks": found.blocks,
        "pool_tokens": found.tokens,
        "shares_bytes": {share.name: share.bytes for share in found.shares},
        "bytes": found.bytes,
        "memory_bytes": found.setup.memory_bytes,
        "fits": _fits(found),
        "waste_bytes_per_sequence": found.waste_bytes,
        "watermark_blocks": found.watermark_blocks,
        "blocks_per_request": found.blocks_of(*lengths),
        "concurrency": found.concurrency(*lengths),
        "settings": msgspec.to_builtins(found.setup),
    }
