"""vLLM's CPU build, stepped in this process: eager, without a prefix cache, no text made."""

from __future__ import annotations

import itertools
import os
import random
import time
from typing import Any

from talk import serve

MARGIN_STEPS = 32
KV_BYTES = 1 << 30


class Vllm:
    """One engine for all measurements."""

    def load(
        self, folder: str, dtype: str, threads: int, rows: int, most_tokens: int, **_: Any
    ) -> dict[str, object]:
        os.environ.update(
            HF_HUB_OFFLINE="1",
            VLLM_NO_USAGE_STATS="1",
            DO_NOT_TRACK="1",
            VLLM_HOST_IP="127.0.0.1",
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_CPU_OMP_THREADS_BIND=_cpus(threads),
        )
        import vllm

        self._ids = itertools.count()
        self._random = random.Random(0)
        self._params = vllm.SamplingParams
        self._engine = vllm.LLM(
            model=folder,
            skip_tokenizer_init=True,
            dtype=dtype,
            enforce_eager=True,
            enable_prefix_caching=False,
            max_model_len=most_tokens,
            max_num_seqs=rows,
            max_num_batched_tokens=4096,
            block_size=32,
            kv_cache_memory_bytes=KV_BYTES,
        ).llm_engine
        self._vocab = self._engine.model_config.get_vocab_size()
        return {"version": vllm.__version__, "precision": dtype}

    def prefill(self, tokens: int) -> dict[str, float]:
        begun = time.perf_counter()
        self._add(tokens, 1)
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return {"seconds": time.perf_counter() - begun}

    def decode(self, rows: int, context: int, steps: int) -> dict[str, float]:
        ids = [self._add(context, steps + MARGIN_STEPS) for _ in range(rows)]
        times: list[float] = []
        while len(times) <= steps:
            if len(self._engine.step()) == rows:
                times.append(time.perf_counter())
            elif times:
                raise RuntimeError("a sequence ended early")
        self._engine.abort_request(ids)
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return {"seconds": times[steps] - times[0]}

    def _add(self, prompt_tokens: int, answer_tokens: int) -> str:
        name = str(next(self._ids))
        prompt = [self._random.randrange(100, self._vocab - 100) for _ in range(prompt_tokens)]
        params = self._params(
            temperature=0.0, max_tokens=answer_tokens, ignore_eos=True, detokenize=False
        )
        self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
        return name


def _cpus(threads: int) -> str:
    """The first ones that this process may use."""
    mine = sorted(os.sched_getaffinity(0))[:threads]
    return ",".join(map(str, mine))


if __name__ == "__main__":
    serve(Vllm())
