"""Every tensor encoding against blocks that the `gguf` package decoded (tests/data)."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np
import pytest

from configs.model.quant import ENCODINGS, Encoding

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "quant_blocks.json").read_text())


@pytest.mark.parametrize("encoding", ENCODINGS.values(), ids=lambda each: each.name)
def test_decodes_as_recorded(encoding: Encoding) -> None:
    recorded = RECORDED[encoding.name]
    raw = np.frombuffer(base64.b64decode(recorded["blocks"]), np.uint8)
    wanted = np.frombuffer(base64.b64decode(recorded["values"]), "<f4")
    decoded = encoding.decode(raw.reshape(-1, encoding.size))
    assert decoded.dtype == np.float32
    assert decoded.shape == (len(wanted) // encoding.weights, encoding.weights)
    np.testing.assert_array_equal(decoded.ravel(), wanted)
