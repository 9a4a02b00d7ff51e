"""Plain transformers: `generate` with its own cache, greedy; steps are timed as they end."""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers
from talk import serve
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList


class _Stamps(StoppingCriteria):
    """Asked after every step; never stops."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Transformers:
    """One model from a folder."""

    def load(self, folder: str, dtype: str, threads: int, **_: Any) -> dict[str, object]:
        torch.set_num_threads(threads)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        self._model.eval()
        return {"version": transformers.__version__, "precision": dtype}

    def prefill(self, tokens: int) -> dict[str, float]:
        begun = time.perf_counter()
        times = self._generate(1, tokens, 1)
        return {"seconds": times[0] - begun}

    def decode(self, rows: int, context: int, steps: int) -> dict[str, float]:
        times = self._generate(rows, context, steps + 2)
        return {"seconds": times[steps + 1] - times[1]}

    def _generate(self, rows: int, context: int, steps: int) -> list[float]:
        prompt = torch.randint(100, self._model.config.vocab_size - 100, (rows, context))
        stamps = _Stamps()
        with torch.inference_mode():
            self._model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                min_new_tokens=steps,
                max_new_tokens=steps,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([stamps]),
            )
        return stamps.times


if __name__ == "__main__":
    serve(Transformers())
