// Products of up to 16 rows with 4-bit weights, by AMX: the tiles multiply the nibbles themselves,
// and the scales of each block come behind.
//
// So a weight costs a shift and a logic operation, and is exact: nothing but the rows of x is
// rounded. A nibble q is the bfloat16 128 + q, which is its bits below those of 128; what that adds
// is taken off with the least value. Each number is summed in one order, whatever the other rows.
#pragma once

#include "blocks.h"
#include "tiles.h"

#if defined(WR_TILES)

namespace nibbles {

constexpr long BLOCK = blocks::DEPTH;
constexpr float ABOVE = 128.0f;

struct Scratch {
    alignas(64) bf16 numbers[2][blocks::PIECE];
    alignas(64) float products[2][tiles::ROWS * PANEL];
};

// sums[rows][depth / 32] of the blocks of x[rows][depth]
inline void sum_blocks(const bf16* x, long rows, long depth, float* sums) {
    for (long i = 0; i < rows * depth; i += BLOCK, ++sums)
        *sums = sum(load_floats(x + i) + load_floats(x + i + WIDTH));
}

// [16][32 columns][2] numbers 128 + q
inline void expand(const uint8_t* piece, bf16* to) {
    const __m512i nibble = _mm512_set1_epi32(0x000f000f), above = _mm512_set1_epi32(0x43004300);
    for (long i = 0; i < blocks::NIBBLES; i += PANEL * sizeof(uint32_t), to += 8 * PANEL)
        for (long half = 0; half < PANEL; half += WIDTH) {
            auto words = load<__m512i>(piece + i + half * sizeof(uint32_t));
            for (long row = 0; row < 4; ++row) {
                auto pairs = _mm512_srli_epi32(words, 4 * row);
                store(to + 2 * (row * PANEL + half),
                      _mm512_ternarylogic_epi32(pairs, nibble, above, 0xEA));  // (a & b) | c
            }
        }
}

// totals[rows][32] += products[rows][32] in units of the scales, and the least values
inline void scale(const uint8_t* piece, const float* products, const float* x_sums, long x_step,
                  long rows, float* totals) {
    for (long half = 0; half < PANEL; half += WIDTH) {
        const uint8_t* halves = piece + blocks::NIBBLES + half * sizeof(uint16_t);
        f32x16 scale = blocks::from_halves(load<u16x16>(halves));
        f32x16 least = blocks::from_halves(load<u16x16>(halves + blocks::HALVES)) - ABOVE * scale;
        for (long r = 0; r < rows; ++r) {
            float* total = totals + r * PANEL + half;
            f32x16 scaled = load_floats(total) + scale * load_floats(products + r * PANEL + half);
            store(total, scaled + least * splat(x_sums[r * x_step]));
        }
    }
}

// totals[rows][32] = x[rows][depth] * panel. The tiles are configured for so many rows. A piece is
// made while the one before is multiplied and the one before that is scaled, so that nothing is
// read that was just written.
inline void multiply(const bf16* x, const float* x_sums, long rows, const uint8_t* panel,
                     long depth, Scratch& scratch, float* totals) {
    constexpr long WIDE = PANEL * sizeof(float);
    long count = depth / BLOCK;
    std::fill_n(totals, rows * PANEL, 0.0f);
    auto piece = [&](long k) { return panel + k * blocks::Q4_BYTES; };
    auto finish = [&](long k) {
        scale(piece(k), scratch.products[k % 2], x_sums + k, count, rows, totals);
    };
    expand(piece(0), scratch.numbers[0]);
    for (long k = 0; k < count; ++k) {
        blocks::fetch(piece(k), blocks::Q4_BYTES);
        if (k + 1 < count) expand(piece(k + 1), scratch.numbers[(k + 1) % 2]);
        asm volatile("" ::: "memory");  // loads of tiles are no reads to the compiler
        const bf16* numbers = scratch.numbers[k % 2];
        _tile_zero(0);
        _tile_zero(1);
        _tile_loadd(4, x + k * BLOCK, depth * (long)sizeof(bf16));
        _tile_loadd(6, numbers, WIDE);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, numbers + PANEL, WIDE);
        _tile_dpbf16ps(1, 4, 7);
        _tile_stored(0, scratch.products[k % 2], WIDE);
        _tile_stored(1, scratch.products[k % 2] + WIDTH, WIDE);
        if (k) finish(k - 1);
    }
    finish(count - 1);
}

}  // namespace nibbles
#endif
