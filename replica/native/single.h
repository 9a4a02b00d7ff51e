// Attention of one new token over its row's pages of bfloat16, by AMX tiles.
//
// Nothing is packed first: 16 keys lie in a page as the rows of a tile, and pairs of values are
// interleaved in registers. All heads of a row pass over its pages together, so that these are read
// once and in their order; so decoding does little else than read them.
#pragma once

#include "ahead.h"
#include "softmax.h"
#include "tiles.h"
#include "transpose.h"

#if defined(WR_TILES)

namespace single {

using ahead::STRETCH;

constexpr long SPAN = 256;    // positions for which scores are held at once
constexpr long ABREAST = 64;  // positions that are scored side by side
constexpr long SQUARES = ABREAST / STRETCH;
constexpr long MOST_QUERIES = tiles::ROWS;
constexpr long FEW_QUERIES = 4;  // that four vectors hold for 16 positions

// Lines fetched ahead per 32 of a key's depth at 64 positions, and per 64 of a value's at two: by
// the time that either takes. Together they are what both read.
constexpr long KEY_LINES = 32, VALUE_LINES = 6;

using u16x32 = uint16_t __attribute__((vector_size(64)));

// By head and query of its group, side by side.
struct Scratch {
    std::vector<float> scores, outputs, squares;
    std::vector<bf16> weights, queries;

    void reserve(long heads, long group, long dim) {
        scores.resize(heads * group * SPAN);
        weights.resize(heads * group * SPAN);
        outputs.assign(heads * group * dim, 0.0f);
        squares.resize(heads * SQUARES * tiles::ROWS * WIDTH);
        queries.resize(heads * dim * MOST_QUERIES);
    }
};

// One item's work: `heads` heads of keys and values, from `keys` and `values` on, of one row.
struct Item {
    const ahead::Pages& pages;
    const bf16 *keys, *values;
    long row, heads, group;

    // Queries of a tile.
    long width() const { return group <= FEW_QUERIES ? FEW_QUERIES : MOST_QUERIES; }
    long dim() const { return pages.dim; }
    const bf16* keys_at(long head, long position) const {
        return keys + head * dim() + pages.offset(row, position);
    }
    const bf16* values_at(long head, long position) const {
        return values + head * dim() + pages.offset(row, position);
    }
};

// [dim / 2][width queries][2], zeros for those that there are not
inline void pack_queries(const bf16* query, bf16* packed, long group, long dim, long width) {
    std::memset(packed, 0, dim * width * sizeof(bf16));
    for (long k = 0; k < dim; k += 2)
        for (long g = 0; g < group; ++g)
            std::memcpy(packed + k * width + 2 * g, query + g * dim + k, sizeof(uint32_t));
}

// squares[4][16 positions][width] of the keys at four places
inline void score(const bf16* const (&keys)[SQUARES], const bf16* queries, long step, long dim,
                  long width, float* squares, ahead::Ahead& next) {
    long stride = step * sizeof(bf16), line = width * sizeof(float), square = tiles::ROWS * width;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long k = 0; k < dim; k += tiles::DEPTH, queries += tiles::DEPTH * width) {
        _tile_loadd(6, queries, line);
        _tile_loadd(4, keys[0] + k, stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, keys[1] + k, stride);
        _tile_dpbf16ps(1, 5, 6);
        _tile_loadd(4, keys[2] + k, stride);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(5, keys[3] + k, stride);
        _tile_dpbf16ps(3, 5, 6);
        next.some(KEY_LINES);
    }
    _tile_stored(0, squares, line);
    _tile_stored(1, squares + square, line);
    _tile_stored(2, squares + 2 * square, line);
    _tile_stored(3, squares + 3 * square, line);
}

// scores[group][SPAN] of the 16 positions of a square
inline void spread(const float* square, float* scores, long group, long width) {
    if (width == FEW_QUERIES) {
        constexpr i32x16 every_4th = {0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28};
        constexpr i32x16 halves = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23};
        f32x16 quarter[4];
        for (long i = 0; i < 4; ++i) quarter[i] = load_floats(square + i * WIDTH);
        for (int g = 0; g < group; ++g) {
            f32x16 left = __builtin_shuffle(quarter[0], quarter[1], every_4th + g);
            f32x16 right = __builtin_shuffle(quarter[2], quarter[3], every_4th + g);
            store(scores + g * SPAN, __builtin_shuffle(left, right, halves));
        }
        return;
    }
    u32x16 rows[WIDTH];
    for (long r = 0; r < WIDTH; ++r) rows[r] = load<u32x16>(square + r * WIDTH);
    transpose(rows);
    for (long g = 0; g < group; ++g) store(scores + g * SPAN, rows[g]);
}

// scores[heads][group][SPAN] of `count` positions from `base` on, rounded up to whole 16s
inline void score_span(const Item& item, long base, long count, Scratch& scratch,
                       ahead::Ahead& next) {
    long square = tiles::ROWS * item.width();
    for (long first = 0; first < count; first += ABREAST) {
        long stretches = std::min(SQUARES, (count - first) / STRETCH);
        auto squares_of = [&](long head) { return scratch.squares.data() + head * SQUARES * square; };
        for (long head = 0; head < item.heads; ++head) {
            const bf16* keys[SQUARES];
            for (long i = 0; i < SQUARES; ++i)
                keys[i] = item.keys_at(head, base + first + (i < stretches ? i * STRETCH : 0));
            score(keys, scratch.queries.data() + head * item.dim() * item.width(),
                  item.pages.step(), item.dim(), item.width(), squares_of(head), next);
        }
        for (long head = 0; head < item.heads; ++head)
            for (long i = 0; i < stretches; ++i)
                spread(squares_of(head) + i * square,
                       scratch.scores.data() + head * item.group * SPAN + first + i * STRETCH,
                       item.group, item.width());
    }
}

// Numbers of 32 columns side by side in the order in which pairs of rows interleave: the lower
// halves of each 8, then the upper ones.
inline void in_order(f32x16& low, f32x16& high) {
    constexpr i32x16 left = {0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23};
    f32x16 first = __builtin_shuffle(low, high, left);
    high = __builtin_shuffle(low, high, left + 8);
    low = first;
}

// outputs[ROWS][dim] += weights[ROWS][SPAN] * values of up to ABREAST positions, for LOADS * 32
// columns from `column` on, each 32 of them as they interleave. Calls `between` at each pair of positions.
template <int ROWS, int LOADS, typename Between>
inline void blend(const Item& item, long head, long column, long base, long count,
                  const bf16* weights, float* outputs, Between&& between) {
    constexpr u16x32 low = {0,  32, 1,  33, 2,  34, 3,  35, 8,  40, 9,  41, 10, 42, 11, 43,
                            16, 48, 17, 49, 18, 50, 19, 51, 24, 56, 25, 57, 26, 58, 27, 59};
    constexpr u16x32 high = low + 4;
    long dim = item.dim(), step = item.pages.step();
    f32x16 total[ROWS][2 * LOADS];
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < 2 * LOADS; ++v) total[r][v] = load_floats(outputs + r * dim + v * WIDTH);
    for (long first = 0; first < count; first += STRETCH) {
        const bf16* at = item.values_at(head, base + first) + column;
        long end = std::min(count - first, STRETCH);
        for (long p = 0; p < end; p += 2, at += 2 * step) {
            between();
            for (int l = 0; l < LOADS; ++l) {
                u16x32 even = load<u16x32>(at + 32 * l), odd{};
                if (p + 1 < end) odd = load<u16x32>(at + step + 32 * l);
                auto left = (u32x16)__builtin_shuffle(even, odd, low);
                auto right = (u32x16)__builtin_shuffle(even, odd, high);
                for (int r = 0; r < ROWS; ++r) {
                    const bf16* weight = weights + r * SPAN + first + p;
                    total[r][2 * l] = multiply_add(total[r][2 * l], weight, left);
                    total[r][2 * l + 1] = multiply_add(total[r][2 * l + 1], weight, right);
                }
            }
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < 2 * LOADS; ++v) store(outputs + r * dim + v * WIDTH, total[r][v]);
}

// What up to ABREAST positions from `base` on add to one head's outputs.
template <typename Between>
inline void blend_head(const Item& item, long head, long base, long count, const bf16* weights,
                       float* outputs, Between&& between) {
    constexpr int ROWS = FEW_QUERIES;
    auto nothing = [] {};
    for (long row = 0; row < item.group; row += ROWS) {
        auto part = [&]<int COUNT>() {
            const bf16* of = weights + row * SPAN;
            float* to = outputs + row * item.dim();
            auto columns = [&](auto&& each) {
                long i = 0;
                for (; i + 64 <= item.dim(); i += 64)
                    blend<COUNT, 2>(item, head, i, base, count, of, to + i, each);
                if (i < item.dim())
                    blend<COUNT, 1>(item, head, i, base, count, of, to + i, each);
            };
            if (row == 0)
                columns(between);
            else
                columns(nothing);
        };
        last_tile<ROWS>(std::min<long>(ROWS, item.group - row), part);
    }
}

inline void blend_span(const Item& item, long base, long count, Scratch& scratch,
                       ahead::Ahead& next) {
    for (long first = 0; first < count; first += ABREAST)
        for (long head = 0; head < item.heads; ++head)
            blend_head(item, head, base + first, std::min(ABREAST, count - first),
                       scratch.weights.data() + head * item.group * SPAN + first,
                       scratch.outputs.data() + head * item.group * item.dim(),
                       [&] { next.some(VALUE_LINES); });
}

// query and out: [heads][group][dim] of the item, side by side
inline void attend(const Item& item, const bf16* query, bf16* out, ahead::Ahead& next) {
    static thread_local Scratch scratch;
    long dim = item.dim(), group = item.group, queries = item.heads * group;
    long context = item.pages.contexts[item.row];
    tiles::Configured configured(tiles::ROWS, tiles::ROWS, item.width());
    scratch.reserve(item.heads, group, dim);
    float* outputs = scratch.outputs.data();
    for (long head = 0; head < item.heads; ++head)
        pack_queries(query + head * group * dim, scratch.queries.data() + head * dim * item.width(),
                     group, dim, item.width());
    static thread_local std::vector<Running> running;
    running.assign(queries, {});
    float scale = LOG2_E / std::sqrt((float)dim);
    for (long base = 0; base < context; base += SPAN) {
        long inside = std::min(SPAN, context - base);
        long count = (inside + STRETCH - 1) / STRETCH * STRETCH;
        score_span(item, base, count, scratch, next);
        for (long q = 0; q < queries; ++q)
            soften(scratch.scores.data() + q * SPAN, scratch.weights.data() + q * SPAN,
                   outputs + q * dim, dim, inside, count, scale, running[q]);
        blend_span(item, base, inside, scratch, next);
    }
    for (long q = 0; q < queries; ++q) {
        float share = 1.0f / sum(running[q].totals);
        for (long i = 0; i < dim; i += PANEL) {
            f32x16 low = load_floats(outputs + q * dim + i);
            f32x16 high = load_floats(outputs + q * dim + i + WIDTH);
            in_order(low, high);
            store_floats(out + q * dim + i, low * share);
            store_floats(out + q * dim + i + WIDTH, high * share);
        }
    }
}

}  // namespace single
#endif
