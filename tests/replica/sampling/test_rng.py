"""The counter-based numbers: published vectors, spread, independence."""

from __future__ import annotations

import numpy as np

from replica.sampling.rng import philox, uniforms


def words(counter: list[int], key: list[int]) -> list[int]:
    return philox(np.array([counter], np.uint64), np.array([key], np.uint64))[0].tolist()


def test_known_answers() -> None:
    full = 0xFFFFFFFF
    assert words([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert words([full] * 4, [full] * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def test_a_number_depends_on_seed_and_position_alone() -> None:
    together = uniforms([5, 5, 6, -1, 2**64 - 1], [1, 2, 1, 3, 3])
    alone = [uniforms([seed], [at])[0] for seed, at in ((5, 1), (5, 2), (6, 1), (-1, 3))]
    assert together.tolist() == [*alone, alone[-1]]
    assert len(set(together.tolist())) == 4


def test_numbers_are_spread_evenly_over_seeds_and_positions() -> None:
    for seeds, positions in ((range(50_000), [3] * 50_000), ([3] * 50_000, range(50_000))):
        numbers = uniforms(seeds, positions)
        assert numbers.min() >= 0.0
        assert numbers.max() < 1.0
        counts, _ = np.histogram(numbers, bins=50, range=(0.0, 1.0))
        assert ((counts - 1000) ** 2 / 1000).sum() < 100  # chi-square of 49: p is about 2e-5
