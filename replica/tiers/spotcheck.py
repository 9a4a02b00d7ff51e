"""Now and then a loaded block is computed all the same, and the two are compared.

Checksums say that the bytes are those that somebody wrote. Whether he wrote what this replica would
have computed (same layout, same weights, same positions) only this can tell. What is withheld of a
load is its last block: its request computes it, and whoever comes next finds it.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from threading import Lock

import numpy as np

from kvstore.errors import Reason
from kvstore.layout import Layout
from kvstore.level import Level

log = logging.getLogger(__name__)

MAX_WITHHELD = 8
ALARM = "kv_recompute_mismatch"

_TOLERANCE = {"float32": 0.01, "bfloat16": 0.1, "float16": 0.05}
"""Mean difference by mean size, of the keys or the values of any one layer: two layers that changed
places are little of a whole block. Other kernels and batches round otherwise: SmolLM2's worst layer
differs by 0.02 in bfloat16; positions that are one off differ by 0.12."""


class SpotCheck:
    """One of `one_in` loads, the first one included; 0 for none. Threads share it."""

    def __init__(self, layout: Layout, one_in: int) -> None:
        self.checked = 0
        self.mismatches = 0
        self._layout = layout
        self._one_in = one_in if layout.dtype in _TOLERANCE else 0
        self._loads = 0
        self._withheld: OrderedDict[bytes, tuple[bytes, Level]] = OrderedDict()
        self._lock = Lock()

    def due(self) -> bool:
        """Whether the next load is one to check."""
        with self._lock:
            self._loads += 1
            return self._one_in > 0 and (self._loads - 1) % self._one_in == 0

    def withhold(self, key: bytes, payload: memoryview, level: Level) -> None:
        """Keep a loaded block, to be compared once its request has computed it."""
        with self._lock:
            self._withheld[key] = bytes(payload), level
            while len(self._withheld) > MAX_WITHHELD:
                self._withheld.popitem(last=False)

    def awaits(self, key: bytes) -> bool:
        """Whether a computed block is to be compared."""
        return key in self._withheld

    def compare(self, key: bytes, computed: memoryview) -> None:
        """The block as it was computed here. A difference shuts its level out for a while."""
        with self._lock:
            loaded, level = self._withheld.pop(key, (None, None))
        if loaded is None or level is None:
            return
        self.checked += 1
        ours, theirs = self._values(computed), self._values(loaded)
        sizes = np.abs(ours).mean(axis=1)
        differences = np.abs(ours - theirs).mean(axis=1)
        if not (differences <= _TOLERANCE[self._layout.dtype] * np.maximum(sizes, 1e-6)).all():
            self.mismatches += 1
            level.refuse(key, Reason.RECOMPUTED)
            level.distrust()
            log.error("%s: KV loaded from %s is not what is computed here", ALARM, level.name)

    def _values(self, payload: memoryview | bytes) -> np.ndarray:
        """float32, without padding: a row for the keys of each layer, and one for its values."""
        layout = self._layout
        raw = np.frombuffer(payload, np.uint8).reshape(layout.layers, layout.stride_bytes)
        raw = np.ascontiguousarray(raw[:, : layout.layer_bytes])
        if layout.dtype == "bfloat16":
            values = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        elif layout.dtype == "float16":
            values = raw.view(np.float16).astype(np.float32)
        else:
            values = raw.view(np.float32)
        return values.reshape(2 * layout.layers, -1)
