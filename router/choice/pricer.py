"""The kernel that prices a whole pool: compiled where a compiler is there, else its NumPy twin."""

from __future__ import annotations

import ctypes
import logging
import math
import struct
from functools import cache
from pathlib import Path

import numpy as np

from configs.native import CompileError, NativeSource, address, declare, load_object
from kvstore.identity import KeyChain
from router.choice.cost import WEIGHTS, NumpyPricer
from router.choice.sheet import MIN_MATCH_TOKENS, Below, Demand, Pricer, Prices, Sheet
from router.fleet.member import SUSPECT_LOAD_AGE_S
from router.locality.index import Seats
from router.locality.optimistic import PromiseSeats
from router.locality.planes import native_planes
from router.locality.promises import promise_kernels

log = logging.getLogger(__name__)

KERNELS = NativeSource(
    "cost",
    Path(__file__).parent,
    ("cost.cpp", "survey.cpp"),
    ("cost.h",),
    flags=("-ffp-contract=off",),
)

_WEIGHTS_AT = address(WEIGHTS)
_ask, _extra = struct.Struct("7d"), struct.Struct("5q")


class NativePricer:
    """Compiled from cost.cpp and survey.cpp. The kernels of planes and promises look up for it."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._look = library.wr_look
        self._price = library.wr_price
        self._survey = library.wr_survey

    def look(self, sheet: Sheet, seats: Seats, chain: KeyChain, promises: PromiseSeats) -> None:
        self._look(sheet.at, seats.at, seats.count, chain.data, chain.blocks, promises.at)

    def price(
        self,
        sheet: Sheet,
        demand: Demand,
        now_s: float,
        asked: np.ndarray | None = None,
        below: Below | None = None,
        startup_ms: np.ndarray | None = None,
    ) -> Prices:
        extras = _extras(asked, below, startup_ms)
        ask = _asked(demand, now_s)
        return sheet.prices(self._price(sheet.at, ask, _WEIGHTS_AT, extras))

    def survey(
        self,
        sheet: Sheet,
        seats: Seats,
        chain: KeyChain,
        promises: PromiseSeats,
        demand: Demand,
        now_s: float,
        asked: np.ndarray | None = None,
        below: Below | None = None,
        startup_ms: np.ndarray | None = None,
    ) -> Prices:
        extras = None
        if asked is not None or below is not None or startup_ms is not None:
            extras = _extras(asked, below, startup_ms)
        fit = self._survey(
            sheet.at,
            seats.at,
            seats.count,
            chain.data,
            chain.blocks,
            promises.at,
            _asked(demand, now_s),
            _WEIGHTS_AT,
            extras,
        )
        return sheet.prices(fit)


def _asked(demand: Demand, now_s: float) -> bytes:
    """As the kernel reads it."""
    deadline_ms = demand.ttft_deadline_ms
    return _ask.pack(
        now_s,
        demand.prompt_tokens,
        demand.output_tokens,
        demand.block_tokens,
        math.inf if deadline_ms is None else deadline_ms,
        SUSPECT_LOAD_AGE_S,
        MIN_MATCH_TOKENS,
    )


def _extras(asked: np.ndarray | None, below: Below | None, startup_ms: np.ndarray | None) -> bytes:
    """Addresses, as the kernel reads them; the arrays must outlive its call."""
    return _extra.pack(
        0 if asked is None else address(asked),
        0 if below is None else address(below.depths),
        0 if below is None else address(below.speeds),
        0 if below is None else len(below.depths),
        0 if startup_ms is None else address(startup_ms),
    )


def native_pricer() -> Pricer:
    """Compiled from cost.cpp. Raises CompileError."""
    pointer, long = ctypes.c_void_p, ctypes.c_long
    look = [pointer, pointer, long, pointer, long, pointer]
    price = [pointer] * 3
    signatures = {
        "wr_look": look,
        "wr_price": [pointer, *price],
        "wr_survey": [*look, *price],
    }
    return NativePricer(declare(load_object(KERNELS, quick=True), signatures, result=long))


@cache
def pricer() -> Pricer:
    """The fastest there is here; compiles it at the first call on a machine. The native one calls
    what else is native."""
    try:
        native_planes()
        promise_kernels()
        return native_pricer()
    except CompileError as error:
        log.warning("no native cost, NumPy prices replicas: %s", error)
        return NumpyPricer()


if __name__ == "__main__":
    pricer()
