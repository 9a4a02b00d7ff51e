"""How long a step takes on named devices. Rooflines from data sheets, or a fit of a real run.

A roofline takes 60 % of the peak for products and 80 % of the bandwidth for weights and KV, as
serving engines reach in practice. Times in ms.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from events.load import DecodeFit, PrefillFit

OF_PEAK = 0.6
OF_BANDWIDTH = 0.8


@dataclass(frozen=True, slots=True)
class Device:
    """One replica's speed. `prefill` and `decode` price a step alone; a mixed step reads the
    weights once."""

    name: str
    source: str
    prefill: PrefillFit
    decode: DecodeFit
    max_running: int
    max_step_tokens: int
    kv_bytes_per_token: int

    def step_ms(self, chunks: Iterable[tuple[int, int]], rows: int, context_tokens: int) -> float:
        """One step: chunks of (tokens before, new tokens), and `rows` decodes over a context."""
        prefill = self.prefill
        work = sum(
            prefill.b * new + prefill.c * (before * new + new * (new + 1) / 2)
            for before, new in chunks
        )
        alone = self.decode.predict_ms(rows, context_tokens)
        return prefill.a + work + alone - self.decode.base if work else alone

    def service_ms(self, prompt_tokens: int, output_tokens: int) -> float:
        """What one request takes of the device without any cache: its prefill, and its share of
        decode steps that are full."""
        decode = self.decode
        context = prompt_tokens + output_tokens / 2
        token = decode.base / self.max_running + decode.per_row + decode.per_context * context
        return self.prefill.predict_ms(0, prompt_tokens) + output_tokens * token


def roofline(
    name: str,
    source: str,
    *,
    tflops: float,
    gbytes_per_s: float,
    parameters: float,
    layers: int,
    heads_dim: int,
    kv_bytes_per_token: int,
    max_running: int = 256,
    max_step_tokens: int = 8_192,
) -> Device:
    """16-bit weights. A token costs 2 FLOP for each parameter, and 4 for each layer, head
    dimension and token that it attends to."""
    flop_per_ms = tflops * 1e9 * OF_PEAK
    bytes_per_ms = gbytes_per_s * 1e6 * OF_BANDWIDTH
    weights_ms = 2 * parameters / bytes_per_ms
    return Device(
        name=name,
        source=source,
        prefill=PrefillFit(
            a=weights_ms,
            b=2 * parameters / flop_per_ms,
            c=4 * layers * heads_dim / flop_per_ms,
            confidence=1.0,
        ),
        decode=DecodeFit(
            base=weights_ms,
            per_row=2 * parameters / flop_per_ms,
            per_context=kv_bytes_per_token / bytes_per_ms,
            confidence=1.0,
        ),
        max_running=max_running,
        max_step_tokens=max_step_tokens,
        kv_bytes_per_token=kv_bytes_per_token,
    )


_ALL = (
    roofline(
        "h100-8b",
        "Llama 3.1 8B in bf16; NVIDIA H100 SXM data sheet: 989 TFLOP/s, 3,350 GB/s",
        tflops=989,
        gbytes_per_s=3_350,
        parameters=8.0e9,
        layers=32,
        heads_dim=4_096,
        kv_bytes_per_token=131_072,
    ),
    roofline(
        "h100-32b-tp2",
        "Qwen3 32B in bf16 over two H100 SXM (data sheet), 90 % of them after communication",
        tflops=2 * 989 * 0.9,
        gbytes_per_s=2 * 3_350 * 0.9,
        parameters=32.8e9,
        layers=64,
        heads_dim=8_192,
        kv_bytes_per_token=262_144,
    ),
    roofline(
        "h100-70b-tp4",
        "Llama 3.1 70B in bf16 over four H100 SXM (data sheet), 85 % of them after communication",
        tflops=4 * 989 * 0.85,
        gbytes_per_s=4 * 3_350 * 0.85,
        parameters=70.6e9,
        layers=80,
        heads_dim=8_192,
        kv_bytes_per_token=327_680,
    ),
    roofline(
        "a10g-7b",
        "Qwen2.5 7B in bf16; NVIDIA A10G data sheet: 70 TFLOP/s dense, 600 GB/s",
        tflops=70,
        gbytes_per_s=600,
        parameters=7.6e9,
        layers=28,
        heads_dim=3_584,
        kv_bytes_per_token=57_344,
        max_running=64,
        max_step_tokens=2_048,
    ),
    Device(
        name="cpu-smollm2",
        source="fit of `warmroute bench engine`: SmolLM2-135M in bf16, one thread, AVX512-BF16",
        prefill=PrefillFit(a=7.0, b=1.022, c=1.94e-4, confidence=1.0),
        decode=DecodeFit(base=11.3, per_row=1.95, per_context=8.0e-4, confidence=1.0),
        max_running=32,
        max_step_tokens=512,
        kv_bytes_per_token=23_040,
    ),
)

DEVICES = {device.name: device for device in _ALL}
