// Products of a few rows with weights kept as blocks, by AMX: the tiles multiply the blocks' whole
// numbers, and the scale of each block comes behind.
//
// So a weight costs a few operations, and is exact: nothing but the rows of x is rounded. A row costs
// more than with weights that were made numbers, so it is for rows that read the weights almost
// alone. Each number is summed in one order, whatever the other rows are.
#pragma once

#include "blocks.h"
#include "tiles.h"

#if defined(WR_TILES)

namespace few {

constexpr long BLOCK = blocks::DEPTH;
constexpr long MOST_ROWS = 64;  // that go through one expansion of the weights

struct Scratch {
    alignas(64) bf16 numbers[2][blocks::PIECE];
    alignas(64) float products[2][MOST_ROWS * PANEL];
    alignas(64) float totals[MOST_ROWS * PANEL];
};

// sums[rows][depth / 32] of the blocks of x[rows][depth]
inline void sum_blocks(const bf16* x, long rows, long depth, float* sums) {
    for (long i = 0; i < rows * depth; i += BLOCK, ++sums)
        *sums = sum(load_floats(x + i) + load_floats(x + i + WIDTH));
}

inline f32x16 halves_at(const uint8_t* halves, long column) {
    return blocks::from_halves(load<u16x16>(halves + column * sizeof(uint16_t)));
}

// A nibble q is the bfloat16 128 + q, which is its bits below those of 128; what that adds is taken
// off with the least value.
struct Q4 {
    static constexpr long BYTES = blocks::Q4_BYTES;

    // [16][32 columns][2] numbers
    static void expand(const uint8_t* piece, bf16* to) {
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

    f32x16 scale, least;  // of 16 columns

    Q4(const uint8_t* piece, long column) {
        scale = halves_at(piece + blocks::NIBBLES, column);
        least = halves_at(piece + blocks::NIBBLES + blocks::HALVES, column) - 128.0f * scale;
    }

    f32x16 operator()(f32x16 total, f32x16 product, float x_sum) const {
        return total + scale * product + least * splat(x_sum);
    }
};

#if defined(__AVX512FP16__)
#define WR_FEW_Q8 1

// A number is made a float16, whose bits are those of a bfloat16 that is 2**112 times less, once
// they are moved to where its exponent ends.
struct Q8 {
    static constexpr long BYTES = blocks::Q8_BYTES;

    static void expand(const uint8_t* piece, bf16* to) {
        const __m512i kept = _mm512_set1_epi16((short)0x8fff);
        for (long i = 0; i < blocks::PIECE; i += PANEL) {
            auto numbers = _mm512_cvtepi8_epi16(load<__m256i>(piece + i));
            auto bits = _mm512_castph_si512(_mm512_cvtepi16_ph(numbers));
            store(to + i, _mm512_and_si512(_mm512_srai_epi16(bits, 3), kept));
        }
    }

    f32x16 scale;

    Q8(const uint8_t* piece, long column) { scale = halves_at(piece + blocks::PIECE, column); }

    f32x16 operator()(f32x16 total, f32x16 product, float) const {
        return total + scale * (product * 0x1p112f);
    }
};
#endif

// totals[rows][32] += what the products[rows][32] of one piece stand for
template <typename Q>
inline void add(const uint8_t* piece, const float* products, const float* x_sums, long x_step,
                long rows, float* totals) {
    for (long half = 0; half < PANEL; half += WIDTH) {
        Q scaled(piece, half);
        for (long r = 0; r < rows; ++r) {
            float* total = totals + r * PANEL + half;
            f32x16 product = load_floats(products + r * PANEL + half);
            store(total, scaled(load_floats(total), product, x_sums[r * x_step]));
        }
    }
}

constexpr long WIDE = PANEL * sizeof(float);

// products[16][32] = x[16][32] * the numbers in tiles 6 and 7
inline void multiply_whole(const bf16* x, long bytes, float* products) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_loadd(4, x, bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_stored(0, products, WIDE);
    _tile_stored(1, products + WIDTH, WIDE);
}

// The same for less than 16 rows, as the odd tiles are configured.
inline void multiply_rest(const bf16* x, long bytes, float* products) {
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(5, x, bytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    _tile_stored(2, products, WIDE);
    _tile_stored(3, products + WIDTH, WIDE);
}

// What the tiles have to be for so many rows.
inline tiles::Configured configured(long rows) {
    long rest = rows % tiles::ROWS;
    return tiles::Configured(tiles::ROWS, rest ? rest : tiles::ROWS);
}

// totals[rows][32] = x[rows][depth] * panel, for up to MOST_ROWS. A piece is made while the one
// before is multiplied and the one before that is added, so that nothing is read that was just
// written.
template <typename Q>
inline void multiply(const bf16* x, const float* x_sums, long rows, const uint8_t* panel,
                     long depth, Scratch& scratch) {
    long count = depth / BLOCK, whole = rows / tiles::ROWS * tiles::ROWS;
    long bytes = depth * (long)sizeof(bf16);
    std::fill_n(scratch.totals, rows * PANEL, 0.0f);
    auto piece = [&](long k) { return panel + k * Q::BYTES; };
    auto finish = [&](long k) {
        add<Q>(piece(k), scratch.products[k % 2], x_sums + k, count, rows, scratch.totals);
    };
    Q::expand(piece(0), scratch.numbers[0]);
    for (long k = 0; k < count; ++k) {
        blocks::fetch(piece(k), Q::BYTES);
        if (k + 1 < count) Q::expand(piece(k + 1), scratch.numbers[(k + 1) % 2]);
        asm volatile("" ::: "memory");  // loads of tiles are no reads to the compiler
        const bf16* numbers = scratch.numbers[k % 2];
        const bf16* from = x + k * BLOCK;
        float* products = scratch.products[k % 2];
        _tile_loadd(6, numbers, WIDE);
        _tile_loadd(7, numbers + PANEL, WIDE);
        for (long row = 0; row < whole; row += tiles::ROWS)
            multiply_whole(from + row * depth, bytes, products + row * PANEL);
        if (whole < rows) multiply_rest(from + whole * depth, bytes, products + whole * PANEL);
        if (k) finish(k - 1);
    }
    finish(count - 1);
}

// Calls body with the encoding's type where few rows can be multiplied with it, and says whether.
template <typename Body>
bool with_encoding(int encoding, Body&& body) {
    if (encoding == blocks::Q4_1) return body.template operator()<Q4>(), true;
#if defined(WR_FEW_Q8)
    if (encoding == blocks::Q8_0) return body.template operator()<Q8>(), true;
#endif
    return false;
}

}  // namespace few
#endif
