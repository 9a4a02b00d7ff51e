"""Puts a runner together from a model card and a replica's settings."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from configs.load import ConfigError
from configs.model.adapter import AdapterCard
from configs.model.card import ModelCard
from configs.model.kept import require_q4
from configs.model.shape import ModelShape
from configs.model.weights import open_weights
from configs.native import CompileError, cpu_flags
from configs.schema import ReplicaConfig
from events.load import KVLayout
from replica.attention.base import HeadShape, PagedAttention
from replica.attention.cpu_native import NativePagedAttention
from replica.attention.torch_paged import TorchPagedAttention
from replica.lora.bank import AdapterBank
from replica.lora.weights import DeltaBuilder
from replica.models.kernels import Kernels
from replica.models.llama import Llama
from replica.models.load import load_llama
from replica.models.native_kernels import NativeKernels
from replica.models.rope import RopeTable
from replica.models.torch_kernels import TorchKernels
from replica.native.library import load_library
from replica.runner.pool import KVPool
from replica.runner.runner import ModelRunner

log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def _device(config: ReplicaConfig) -> torch.device:
    """The device of the settings, tried with one allocation. Raises ConfigError."""
    try:
        device = torch.device(config.device)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device '{config.device}' can't be used: {reason}") from error
    return device


def dtype_name(config: ReplicaConfig) -> str:
    """The name of the dtype of weights and KV. Raises ConfigError."""
    if config.dtype != "auto":
        if config.dtype not in _DTYPES:
            raise ConfigError(f"dtype '{config.dtype}' is not one of auto, {', '.join(_DTYPES)}")
        return config.dtype
    if torch.device(config.device).type == "cuda" or cpu_flags() & {"amx_bf16", "avx512_bf16"}:
        return "bfloat16"
    return "float32"


def kv_layout(card: ModelCard, config: ReplicaConfig) -> KVLayout:
    """What KV blocks of this replica look like. Raises ConfigError."""
    shape = card.shape
    return KVLayout(
        dtype=dtype_name(config),
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        block_tokens=config.block_tokens,
        rope=shape.rope,
    )


def _kernels(
    card: ModelCard, config: ReplicaConfig, device: torch.device
) -> tuple[PagedAttention, Kernels]:
    """Attention and the other kernels, as the settings say. Raises ConfigError."""
    if config.kernel not in ("auto", "torch"):
        raise ConfigError(f"kernel '{config.kernel}' is not one of auto, torch")
    shape = card.shape
    heads = HeadShape(shape.heads, shape.kv_heads, shape.head_dim)
    plain = TorchPagedAttention(heads), TorchKernels(shape.rms_eps)
    if config.kernel == "torch" or device.type != "cpu":
        return plain
    try:
        library = load_library()
    except CompileError as error:
        log.warning("no native kernels, plain torch is used: %s", error)
        return plain
    tiles = bool(library.wr_tiles())
    kernels = NativeKernels(library, shape.rms_eps, tiles=tiles)
    if not NativePagedAttention.supports(heads):
        return plain[0], kernels
    return NativePagedAttention(heads, library, tiles=tiles), kernels


def build_runner(
    card: ModelCard, config: ReplicaConfig, adapters: Mapping[str, AdapterCard] | None = None
) -> ModelRunner:
    """Load the weights and allocate the pool. `adapters`: those that can be loaded, by name.

    Raises ConfigError for settings that can't be used, ModelError for a file that can't be read.
    """
    shape, device, name = card.shape, _device(config), dtype_name(config)
    dtype = _DTYPES[name]
    torch.set_num_threads(config.threads)
    context_tokens = min(config.context_tokens, shape.context_tokens)
    attention, kernels = _kernels(card, config, device)
    source = open_weights(card.path)
    keep_blocks = config.weights == "q4"
    if keep_blocks:
        require_q4(source, card.path)
    log.info(
        "model in %s on %s, %s kernels, weights %s", name, device, attention.name, config.weights
    )
    model = Llama(
        load_llama(source, kernels, dtype, device, keep_blocks=keep_blocks),
        RopeTable.build(context_tokens, shape.head_dim, shape.rope_theta, device),
        attention,
        kernels,
    )
    pool = KVPool(
        layers=shape.layers,
        blocks=config.kv_blocks,
        block_tokens=config.block_tokens,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        dtype=dtype,
        device=device,
    )
    return ModelRunner(
        model,
        pool,
        vocab=shape.vocab,
        context_tokens=context_tokens,
        device=device,
        threads=config.threads,
        adapters=_bank(adapters, shape, DeltaBuilder(shape, kernels, dtype, device)),
    )


def _bank(
    adapters: Mapping[str, AdapterCard] | None, shape: ModelShape, builder: DeltaBuilder
) -> AdapterBank | None:
    return AdapterBank(adapters, shape, builder) if adapters else None
