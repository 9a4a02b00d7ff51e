"""The kernel that prices a whole pool: compiled where a compiler is there, else its NumPy twin."""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from pathlib import Path

import numpy as np

from configs.native import CompileError, NativeSource, address, declare, load_object
from router.choice.cost import WEIGHTS, NumpyPricer
from router.choice.sheet import BEST, NOBODY, Below, Demand, Figures, Pricer, Prices, Sheet

log = logging.getLogger(__name__)

KERNELS = NativeSource("cost", Path(__file__).parent, ("cost.cpp",), flags=("-ffp-contract=off",))

_WEIGHTS_AT = address(WEIGHTS)


class NativePricer:
    """Compiled from cost.cpp."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def price(
        self,
        sheet: Sheet,
        demand: Demand,
        asked: np.ndarray,
        depths: np.ndarray,
        there: np.ndarray,
        now_s: float,
        below: Below | None = None,
        startup_ms: np.ndarray | None = None,
    ) -> Prices:
        table, state, terms, best, figures = sheet.at
        fit = self._library.wr_price(
            table,
            len(sheet.state),
            demand.numbers(now_s),
            _WEIGHTS_AT,
            sheet.everybody_at if asked is sheet.everybody else address(asked),
            address(depths),
            address(there),
            None if below is None else address(below.depths),
            None if below is None else address(below.speeds),
            0 if below is None else len(below.depths),
            None if startup_ms is None else address(startup_ms),
            state,
            terms,
            best,
            BEST,
            figures,
        )
        if not fit:
            return Prices(sheet.state, sheet.terms[:0], [], NOBODY)
        soonest, least, longest, *scores = sheet.figures[: 3 + fit].tolist()
        said = Figures(soonest, least, int(longest), scores)
        return Prices(sheet.state, sheet.terms[:fit], sheet.best[:fit].tolist(), said)


def native_pricer() -> Pricer:
    """Compiled from cost.cpp. Raises CompileError."""
    pointer, long = ctypes.c_void_p, ctypes.c_long
    price = [pointer, long, *[pointer] * 7, long, *[pointer] * 4, long, pointer]
    return NativePricer(declare(load_object(KERNELS, quick=True), {"wr_price": price}, result=long))


@cache
def pricer() -> Pricer:
    """The fastest there is here; compiles it at the first call on a machine."""
    try:
        return native_pricer()
    except CompileError as error:
        log.warning("no native cost, NumPy prices replicas: %s", error)
        return NumpyPricer()


if __name__ == "__main__":
    pricer()
