// Attention of one new token over its row's pages of bfloat16, by AMX tiles.
//
// Nothing is packed first: 16 keys lie in a page as the rows of a tile, and pairs of values are
// interleaved in registers. So decoding reads the pages once, and does little else.
#pragma once

#include "softmax.h"
#include "tiles.h"
#include "transpose.h"

#if defined(WR_TILES)

namespace single {

constexpr long SPAN = 256;    // positions for which scores are held at once
constexpr long ABREAST = 64;  // positions that are scored side by side
constexpr long MOST_QUERIES = tiles::ROWS;

using u16x32 = uint16_t __attribute__((vector_size(64)));

struct Scratch {
    alignas(64) float scores[MOST_QUERIES * SPAN];
    alignas(64) bf16 weights[MOST_QUERIES * SPAN];
    alignas(64) float squares[4][tiles::ROWS * WIDTH];
    std::vector<bf16> queries;
    std::vector<float> outputs;
};

// One head's pages: a page holds a multiple of 16 positions.
struct Head {
    const bf16 *keys, *values;
    const int32_t* table;
    long block_tokens, step;

    long offset(long position) const {
        return (table[position / block_tokens] * block_tokens + position % block_tokens) * step;
    }
};

// [dim / 2][16 queries][2], zeros for those that there are not
inline void pack_queries(const bf16* query, bf16* packed, long group, long dim) {
    std::memset(packed, 0, dim * MOST_QUERIES * sizeof(bf16));
    for (long k = 0; k < dim; k += 2)
        for (long g = 0; g < group; ++g)
            std::memcpy(packed + k * MOST_QUERIES + 2 * g, query + g * dim + k, sizeof(uint32_t));
}

inline void fetch(const bf16* rows, long step, long dim) {
    constexpr long LINE = 64 / sizeof(bf16);
    for (long r = 0; r < tiles::ROWS; ++r)
        for (long i = 0; i < dim; i += LINE) __builtin_prefetch(rows + r * step + i);
}

// squares[4][16 positions][16 queries] of the keys at four places
inline void score(const bf16* const (&keys)[4], const bf16* queries, long step, long dim,
                  Scratch& scratch) {
    long stride = step * sizeof(bf16);
    constexpr long PACKED = tiles::DEPTH * MOST_QUERIES, LINE = 64;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long k = 0; k < dim; k += tiles::DEPTH, queries += PACKED) {
        _tile_loadd(6, queries, LINE);
        _tile_loadd(4, keys[0] + k, stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, keys[1] + k, stride);
        _tile_dpbf16ps(1, 5, 6);
        _tile_loadd(4, keys[2] + k, stride);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(5, keys[3] + k, stride);
        _tile_dpbf16ps(3, 5, 6);
    }
    _tile_stored(0, scratch.squares[0], LINE);
    _tile_stored(1, scratch.squares[1], LINE);
    _tile_stored(2, scratch.squares[2], LINE);
    _tile_stored(3, scratch.squares[3], LINE);
}

// scores[group][SPAN] of `count` positions from `base` on, rounded up to whole 16s
inline void score_span(const Head& head, const bf16* queries, long base, long count, long group,
                       long dim, Scratch& scratch) {
    for (long first = 0; first < count; first += ABREAST) {
        const bf16* keys[4];
        for (long i = 0; i < 4; ++i) {
            long at = first + i * WIDTH < count ? first + i * WIDTH : first;
            keys[i] = head.keys + head.offset(base + at);
            if (first + ABREAST + i * WIDTH < count)
                fetch(head.keys + head.offset(base + first + ABREAST + i * WIDTH), head.step, dim);
        }
        score(keys, queries, head.step, dim, scratch);
        for (long i = 0; i < 4 && first + i * WIDTH < count; ++i) {
            u32x16 rows[WIDTH];
            for (long r = 0; r < WIDTH; ++r) rows[r] = load<u32x16>(scratch.squares[i] + r * WIDTH);
            transpose(rows);
            for (long g = 0; g < group; ++g)
                store(scratch.scores + g * SPAN + first + i * WIDTH, rows[g]);
        }
    }
}

// outputs[ROWS][dim] += weights[ROWS][SPAN] * values, for LOADS * 32 columns
template <int ROWS, int LOADS>
inline void blend(const Head& head, long base, long count, const bf16* weights, float* outputs,
                  long dim) {
    constexpr u16x32 low = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                            8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    constexpr u16x32 high = low + 16;
    f32x16 total[ROWS][2 * LOADS];
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < 2 * LOADS; ++v) total[r][v] = load_floats(outputs + r * dim + v * WIDTH);
    for (long first = 0; first < count; first += WIDTH) {
        const bf16* at = head.values + head.offset(base + first);
        long end = std::min(count - first, WIDTH);
        if (first + WIDTH < count)
            fetch(head.values + head.offset(base + first + WIDTH), head.step, LOADS * 32);
        for (long p = 0; p < end; p += 2, at += 2 * head.step)
            for (int l = 0; l < LOADS; ++l) {
                u16x32 even = load<u16x32>(at + 32 * l), odd{};
                if (p + 1 < end) odd = load<u16x32>(at + head.step + 32 * l);
                auto left = (u32x16)__builtin_shuffle(even, odd, low);
                auto right = (u32x16)__builtin_shuffle(even, odd, high);
                for (int r = 0; r < ROWS; ++r) {
                    const bf16* weight = weights + r * SPAN + first + p;
                    total[r][2 * l] = multiply_add(total[r][2 * l], weight, left);
                    total[r][2 * l + 1] = multiply_add(total[r][2 * l + 1], weight, right);
                }
            }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < 2 * LOADS; ++v) store(outputs + r * dim + v * WIDTH, total[r][v]);
}

inline void blend_span(const Head& head, long base, long count, long group, long dim,
                       Scratch& scratch) {
    constexpr int ROWS = 4;
    float* outputs = scratch.outputs.data();
    for (long row = 0; row < group; row += ROWS) {
        auto part = [&]<int COUNT>() {
            const bf16* weights = scratch.weights + row * SPAN;
            Head here = head;
            long i = 0;
            for (; i + 64 <= dim; i += 64, here.values += 64)
                blend<COUNT, 2>(here, base, count, weights, outputs + row * dim + i, dim);
            if (i < dim) blend<COUNT, 1>(here, base, count, weights, outputs + row * dim + i, dim);
        };
        last_tile<ROWS>(std::min<long>(ROWS, group - row), part);
    }
}

// `group` queries side by side, which share one head of keys and values. Tiles are configured.
inline void attend(const Head& head, const bf16* query, bf16* out, long group, long dim,
                   long context) {
    static thread_local Scratch scratch;
    scratch.queries.resize(dim * MOST_QUERIES);
    scratch.outputs.assign(group * dim, 0.0f);
    bf16* packed = scratch.queries.data();
    float* outputs = scratch.outputs.data();
    pack_queries(query, packed, group, dim);
    Running running[MOST_QUERIES];
    float scale = LOG2_E / std::sqrt((float)dim);
    for (long base = 0; base < context; base += SPAN) {
        long inside = std::min(SPAN, context - base);
        long count = (inside + WIDTH - 1) / WIDTH * WIDTH;
        score_span(head, packed, base, count, group, dim, scratch);
        for (long g = 0; g < group; ++g)
            soften(scratch.scores + g * SPAN, scratch.weights + g * SPAN, outputs + g * dim, dim,
                   inside, count, scale, running[g]);
        blend_span(head, base, inside, group, dim, scratch);
    }
    for (long g = 0; g < group; ++g) {
        float share = 1.0f / sum(running[g].totals);
        for (long i = 0; i < dim; i += WIDTH)
            store_floats(out + g * dim + i, load_floats(outputs + g * dim + i) * share);
    }
}

}  // namespace single
#endif
