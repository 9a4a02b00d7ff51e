"""The planner's sums: published sizes of known models, and what the engine really allocates."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from queue import SimpleQueue

import pytest
from torch.autograd.profiler import profile

from configs.model.adapter import adapter_card, held_numbers
from configs.model.card import load_card
from configs.model.weights import open_weights
from configs.schema import ReplicaConfig
from replica.runner.build import build_runner
from tests.fakes.adapters import write_adapter
from tests.fakes.tiny_model import write_tiny_gguf
from tests.replica.runner.driver import Driver
from tests.replica.sched.rig import Bench, sampling, tokens_of
from tools import cli
from tools.doctor.capacity import ELEMENT_BYTES, MIB, Setup, capacity
from tools.doctor.sizes import ModelSize, size_of_config, size_of_weights

GIB = 1 << 30
LLAMA2_7B = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_size": 4_096,
    "intermediate_size": 11_008,
    "vocab_size": 32_000,
}
LLAMA3_8B = LLAMA2_7B | {
    "num_key_value_heads": 8,
    "intermediate_size": 14_336,
    "vocab_size": 128_256,
}
FALCON_7B = LLAMA2_7B | {
    "num_attention_heads": 71,
    "num_key_value_heads": 1,
    "hidden_size": 4_544,
    "head_dim": 64,
}
DEEPSEEK_V3 = LLAMA2_7B | {
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "hidden_size": 7_168,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "n_routed_experts": 256,
}
SETUP = Setup(
    dtype="bfloat16",
    kv_dtype="bfloat16",
    block_tokens=16,
    kv_blocks=0,
    max_running=256,
    max_step_tokens=2_048,
    horizon_tokens=64,
    memory_bytes=80 * GIB,
)


def model(tmp_path: Path, config: dict[str, int]) -> ModelSize:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return size_of_config(path)


@pytest.mark.parametrize(
    ("config", "kind", "alone", "over_four"),
    [
        (LLAMA2_7B, "MHA", 524_288, 131_072),
        (LLAMA3_8B, "GQA", 131_072, 32_768),
        (FALCON_7B, "MQA", 8_192, 8_192),
        (DEEPSEEK_V3, "MLA", 70_272, 70_272),
    ],
)
def test_kv_bytes_of_a_token(
    tmp_path: Path, config: dict[str, int], kind: str, alone: int, over_four: int
) -> None:
    size = model(tmp_path, config)
    assert size.attention == kind
    setup = replace(SETUP, weights_bytes=10 * GIB)
    assert capacity(size, setup).kv_bytes_per_token == alone
    setup = replace(setup, tensor_parallel=4, kv_dtype="float8")
    assert capacity(size, setup).kv_bytes_per_token == over_four // 2


def test_parameters_of_dense_models_and_of_no_others(tmp_path: Path) -> None:
    assert model(tmp_path, LLAMA2_7B).parameters == pytest.approx(6.74e9, rel=0.01)
    assert model(tmp_path, LLAMA3_8B).parameters == pytest.approx(8.03e9, rel=0.01)
    assert model(tmp_path, DEEPSEEK_V3).parameters == 0


def test_the_kv_takes_what_the_rest_leaves_to_the_block(tmp_path: Path) -> None:
    size = model(tmp_path, LLAMA3_8B)
    setup = replace(SETUP, reserve_bytes=512 * MIB, tensor_parallel=2)
    found = capacity(size, setup)
    block_bytes = found.kv_bytes_per_token * setup.block_tokens
    assert found.bytes <= setup.memory_bytes < found.bytes + block_bytes
    names = [share.name for share in found.shares]
    assert names == ["KV", "weights", "activations", "communication", "graphs and workspaces"]
    fixed = capacity(size, replace(setup, kv_blocks=found.blocks))
    assert fixed.bytes == found.bytes
    with_draft = capacity(size, setup, model(tmp_path, FALCON_7B))
    assert with_draft.kv_bytes_per_token == found.kv_bytes_per_token + 8_192
    assert with_draft.blocks < found.blocks


def test_a_device_that_is_too_small_holds_nothing(tmp_path: Path) -> None:
    found = capacity(model(tmp_path, LLAMA3_8B), replace(SETUP, memory_bytes=8 * GIB))
    assert found.blocks == found.concurrency(100, 10) == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_agrees_with_what_the_engine_allocates(tiny_model: Path, dtype: str) -> None:
    config = ReplicaConfig(id="r", dtype=dtype, kernel="torch", kv_blocks=37, block_tokens=8)
    runner = build_runner(load_card(tiny_model), config)
    size = size_of_weights(open_weights(tiny_model))
    setup = replace(
        SETUP, dtype=dtype, kv_dtype=dtype, block_tokens=8, kv_blocks=37, copies_head=True
    )
    found = capacity(size, setup)
    shares = {share.name: share.bytes for share in found.shares}
    (weights,) = (share for share in found.shares if share.name == "weights")
    pool = runner._pool
    assert pool is not None
    assert found.blocks == runner.total_blocks
    assert shares["KV"] == sum(
        tensor.nbytes for layer in pool.layers for tensor in (layer.keys, layer.values)
    )
    held = runner._model._weights
    linears = [
        linear
        for layer in held.layers
        for linear in (layer.qkv, layer.output, layer.gated._both, layer.down)
    ]
    tensors = [
        linear._weight if linear._packed is None else linear._packed
        for linear in (*linears, held.head)
    ]
    numbers = sum(tensor.numel() for tensor in (*tensors, held.embedding._weight))
    norms = (2 * size.layers + 1) * size.hidden
    assert shares["weights"] == (numbers + norms) * pool.kv.itemsize
    assert ("twice" in weights.how) == size.tied_head
    runner.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("rows", "tokens"), [(1, 400), (90, 1), (20, 20)])
def test_a_step_holds_no_more_than_the_sum_says(
    tiny_model: Path, dtype: str, rows: int, tokens: int
) -> None:
    """Torch's own count of what was allocated at once; weights and KV are there before."""
    config = ReplicaConfig(id="r", dtype=dtype, kernel="torch", kv_blocks=256, block_tokens=8)
    runner = build_runner(load_card(tiny_model), config)
    driver = Driver(runner)
    driver.step([driver.child([1, 2, 3], 1)])
    children = [
        driver.child([3 + (row + at) % 290 for at in range(tokens)], 1) for row in range(rows)
    ]
    with profile(profile_memory=True) as profiled:
        driver.step(children)
    events = profiled.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    peak = max(accumulate(size for _, size in changes))
    size = size_of_weights(open_weights(tiny_model))
    planned = size.activation_bytes(rows * tokens, rows, ELEMENT_BYTES[dtype], 1)
    assert 0.95 * peak <= planned <= 2.0 * peak
    runner.close()


def test_kept_blocks_are_counted_as_the_engine_holds_them(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", q4=True)
    config = ReplicaConfig(id="r", dtype="bfloat16", weights="q4", kernel="torch", kv_blocks=8)
    runner = build_runner(load_card(path), config)
    held = runner._model._weights
    matrices = {
        linear._blocks.data.data_ptr(): linear._blocks.data.nbytes
        for layer in held.layers
        for linear in (layer.qkv, layer.output, layer.gated._both, layer.down, held.head)
    }
    assert held.embedding._weight.data.data_ptr() in matrices
    size = size_of_weights(open_weights(path))
    assert size.kept.bytes == sum(matrices.values())
    setup = replace(SETUP, kv_blocks=8, weights="q4", copies_head=True)
    (share,) = (share for share in capacity(size, setup).shares if share.name == "weights")
    norms = size.parameters - size.kept.parameters
    assert norms == (2 * size.layers + 1) * size.hidden
    assert share.bytes == size.kept.bytes + norms * 2
    assert "of blocks" in share.how
    assert "twice" not in share.how
    runner.close()


def test_4_bit_weights_are_not_planned_where_there_are_none(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["doctor", "--capacity", "--weights", "q4", "--model", str(tiny_model)]
    assert cli.main(flags) == 1
    assert "needs a GGUF file with Q4_1 weights" in capsys.readouterr().err


def test_adapters_take_what_the_engine_gives_them(tmp_path: Path, tiny_model: Path) -> None:
    shape = open_weights(tiny_model).shape
    folder = write_adapter(tmp_path / "x", shape, rank=5)
    runner = build_runner(
        load_card(tiny_model),
        ReplicaConfig(id="r", dtype="float32", kernel="torch", kv_blocks=4),
        {"x": adapter_card("x", folder, shape)},
    )
    bank = runner.adapters
    assert bank is not None
    landed: SimpleQueue[bool] = SimpleQueue()
    bank.attach(lambda name, loaded: landed.put(loaded))
    bank.load("x")
    assert landed.get(timeout=60)
    each = bank.weights["x"].bytes
    assert each == 4 * held_numbers(shape, 5)
    setup = replace(SETUP, adapters=3, adapter_rank=5, adapter_bytes=each)
    found = capacity(size_of_weights(open_weights(tiny_model)), setup)
    assert {share.name: share.bytes for share in found.shares}["adapters"] == 3 * each
    bank.close()
    runner.close()


@pytest.mark.parametrize("blocks", [64, 256])
@pytest.mark.parametrize(("prompt", "output", "shared"), [(17, 16, 0), (40, 25, 0), (33, 32, 32)])
def test_so_many_run_side_by_side_and_no_more(
    prompt: int, output: int, shared: int, blocks: int
) -> None:
    """Of known length, by the real scheduler."""
    size = ModelSize(
        layers=1,
        hidden=8,
        intermediate=8,
        heads=1,
        kv_heads=1,
        head_dim=8,
        vocab=500,
        parameters=1,
        tied_head=True,
    )
    setup = replace(SETUP, block_tokens=4, kv_blocks=blocks, max_running=64)
    many = capacity(size, setup).concurrency(prompt, output, shared)
    bench = Bench(blocks, 4, max_running=64, max_step_tokens=4_096, max_prefills=64)
    if shared:
        bench.add(tokens_of(999, shared), sampling(1))
        bench.run()
    for seed in range(many + 4):
        head = tokens_of(999, shared)
        answer = sampling(output, ignore_eos=True)
        bench.add((*head, *tokens_of(seed, prompt - shared)), answer)
    bench.step()
    assert len(bench.scheduler.table.running) == many
    bench.run()
    assert bench.scheduler.lifecycle.preemptions == 0


def test_the_command_prints_the_sum_and_says_whether_it_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "config.json", tmp_path / "found.json"
    path.write_text(json.dumps(LLAMA3_8B))
    flags = ["doctor", "--capacity", "--model", str(path), "--dtype", "bfloat16", "--kv-blocks"]
    assert cli.main([*flags, "0", "--memory-gib", "80", "--tp", "2", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["fits"]
    assert found["kv_bytes_per_token"] == 65_536
    assert sum(found["shares_bytes"].values()) == found["bytes"]
    said = capsys.readouterr().out
    assert "GQA, 2 x 32 layers x 4 KV heads x 128 x bfloat16 = 65,536 bytes" in said
    assert cli.main([*flags, "100000", "--memory-gib", "20"]) == 1
    assert "does not fit" in capsys.readouterr().out


def test_bad_models_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text("{}")
    assert cli.main(["doctor", "--capacity", "--model", str(path)]) == 1
    assert "not a decoder's config.json" in capsys.readouterr().err
    path.write_text(json.dumps(DEEPSEEK_V3))
    assert cli.main(["doctor", "--capacity", "--model", str(path)]) == 1
    assert "add --weights-gib" in capsys.readouterr().err
