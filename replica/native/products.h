// Products with packed panels, and what follows them: written, added, or gated.
#pragma once

#include <algorithm>

#include "blocks.h"
#include "few.h"
#include "tiles.h"
#include "vec.h"

namespace products {

using blocks::Panels;

template <typename Out>
void store_some(Out* to, f32x16 value, long count) {
    if (count >= WIDTH) return store_floats(to, value);
    Out all[WIDTH];
    store_floats(all, value);
    if (count > 0) std::memcpy(to, all, count * sizeof(Out));
}

template <typename Out>
void add_some(Out* to, f32x16 value, long count) {
    if (count >= WIDTH) return store_floats(to, load_floats(to) + value);
    Out all[WIDTH]{};
    if (count > 0) std::memcpy(all, to, count * sizeof(Out));
    store_floats(all, load_floats(all) + value);
    if (count > 0) std::memcpy(to, all, count * sizeof(Out));
}

// What becomes of one row of a panel, `left` and `right` being its two halves.

template <typename Out>
struct Write {
    static constexpr long columns = PANEL;
    const float* bias;
    void operator()(Out* to, f32x16 left, f32x16 right, long first, long count) const {
        if (bias) {
            left += load_floats(bias + first);
            right += load_floats(bias + first + WIDTH);
        }
        store_some(to, left, count);
        store_some(to + WIDTH, right, count - WIDTH);
    }
};

template <typename Out>
struct Add {
    static constexpr long columns = PANEL;
    void operator()(Out* to, f32x16 left, f32x16 right, long, long count) const {
        add_some(to, left, count);
        add_some(to + WIDTH, right, count - WIDTH);
    }
};

inline f32x16 gated(f32x16 gate, f32x16 up) {
    f32x16 exponent = gate * -LOG2_E;
    exponent = exponent > 126.0f ? splat(126.0f) : exponent;
    return gate / (1.0f + power_of_two(exponent)) * up;
}

// silu(left) * right: the panel holds 16 columns of the gate, then the same 16 of the other factor
template <typename Out>
struct Gate {
    static constexpr long columns = WIDTH;
    void operator()(Out* to, f32x16 left, f32x16 right, long, long count) const {
        store_some(to, gated(left, right), count);
    }
};

template <int ROWS, typename E, typename Out, typename Then>
inline void product_tile(const E* x, Panels<E>& panels, const E* ahead, long depth, Out* out,
                         long stride, long first, long count, const Then& then) {
    f32x16 total[ROWS][2] = {};
    for (long k = 0, step = panels.step(); k < depth; k += step)
        multiply<ROWS, 2>(total, x + k, depth, panels.at(k), PANEL * LANE<E>, step / LANE<E>,
                          ahead);
    for (int r = 0; r < ROWS; ++r)
        then(out + r * stride + first, total[r][0], total[r][1], first, count);
}

constexpr long ROW_BLOCK = 128;  // rows of x that stay in the second-level cache

// then(out[rows][columns], x[rows][depth] * weights). A number is summed in the same order whatever
// the other rows are, so that it doesn't depend on them.
template <typename E, typename Out, typename Then>
void product(const E* x, const Panels<E>& weights, Out* out, long rows, long columns, long depth,
             const Then& then) {
    long count_panels = (columns + Then::columns - 1) / Then::columns;
#pragma omp parallel
    {
        Panels<E> panels = weights;
#pragma omp for collapse(2) schedule(static)
        for (long block = 0; block < rows; block += ROW_BLOCK)
            for (long index = 0; index < count_panels; ++index) {
                long first = index * Then::columns;
                long count = std::min(columns - first, Then::columns);
                long row = block, end = std::min(rows, block + ROW_BLOCK);
                panels.open(index, end - block > TILE_ROWS);
                auto tile = [&]<int ROWS>() {
                    const E* ahead = row + ROWS == end ? panels.next() : nullptr;
                    product_tile<ROWS>(x + row * depth, panels, ahead, depth, out + row * columns,
                                       columns, first, count, then);
                };
                for (; row + TILE_ROWS <= end; row += TILE_ROWS)
                    tile.template operator()<TILE_ROWS>();
                last_tile<TILE_ROWS - 1>(end - row, tile);
            }
    }
}

#if defined(WR_TILES)
constexpr long TILED_ROWS = 256;  // rows of x that stay in the second-level cache

// The same by tiles; `depth` fills whole ones.
template <typename Out, typename Then>
void tiled_product(const bf16* x, const Panels<bf16>& weights, Out* out, long rows, long columns,
                   long depth, const Then& then) {
    long count_panels = (columns + Then::columns - 1) / Then::columns;
    if (!rows) return;
    // Tiles of just those rows, if they don't fill one; else the last ones as a full tile.
    bool few = rows < tiles::ROWS;
    long whole = rows / tiles::ROWS * tiles::ROWS;
    static thread_local std::vector<bf16> kept;
    const bf16* last = x;
    if (!few && whole < rows) {
        kept.assign(tiles::ROWS * depth, bf16{0});
        std::memcpy(kept.data(), x + whole * depth, (rows - whole) * depth * sizeof(bf16));
        last = kept.data();
    }
#pragma omp parallel
    {
        tiles::Configured configured(few ? rows : tiles::ROWS);
        Panels<bf16> panels = weights;
        alignas(64) float sums[2 * tiles::ROWS * PANEL];
#pragma omp for collapse(2) schedule(static)
        for (long block = 0; block < rows; block += TILED_ROWS)
            for (long index = 0; index < count_panels; ++index) {
                long first = index * Then::columns;
                long count = std::min(columns - first, Then::columns);
                long end = std::min(rows, block + TILED_ROWS);
                const long tiled = end - block;
                panels.open(index, tiled > tiles::ROWS && tiled != 2 * tiles::ROWS);
                auto write = [&](long row, long many) {
                    for (long r = 0; r < many; ++r)
                        then(out + (row + r) * columns + first, load_floats(sums + r * PANEL),
                             load_floats(sums + r * PANEL + WIDTH), first, count);
                };
                const long passes = (tiled + 2 * tiles::ROWS - 1) / (2 * tiles::ROWS);
                tiles::Fetch fetch(panels.next(), depth, passes);
                long row = block, full = std::min(whole, end);
                for (; row + 2 * tiles::ROWS <= full; row += 2 * tiles::ROWS) {
                    tiles::multiply<2>(x + row * depth, depth, panels, depth, sums, PANEL, fetch);
                    write(row, 2 * tiles::ROWS);
                }
                for (; row < end; row += tiles::ROWS) {
                    const bf16* from = row < whole ? x + row * depth : last;
                    tiles::multiply<1>(from, depth, panels, depth, sums, PANEL, fetch);
                    write(row, std::min(tiles::ROWS, end - row));
                }
            }
    }
}

// The same for a few rows and weights kept as blocks of Q.
template <typename Q, typename Out, typename Then>
void few_product(const bf16* x, const uint8_t* packed, Out* out, long rows, long columns,
                 long depth, const Then& then) {
    for (; rows > few::MOST_ROWS; rows -= few::MOST_ROWS) {
        few_product<Q>(x, packed, out, few::MOST_ROWS, columns, depth, then);
        x += few::MOST_ROWS * depth;
        out += few::MOST_ROWS * columns;
    }
    long count_panels = (columns + Then::columns - 1) / Then::columns;
    static thread_local std::vector<float> x_sums;
    x_sums.resize(std::max<size_t>(x_sums.size(), rows * depth / blocks::DEPTH));
    few::sum_blocks(x, rows, depth, x_sums.data());
    const float* all_sums = x_sums.data();
#pragma omp parallel
    {
        tiles::Configured configured = few::configured(rows);
        few::Scratch scratch;
#pragma omp for schedule(static)
        for (long index = 0; index < count_panels; ++index) {
            const uint8_t* panel = packed + index * (depth / blocks::DEPTH) * Q::BYTES;
            long first = index * Then::columns, count = std::min(columns - first, Then::columns);
            few::multiply<Q>(x, all_sums, rows, panel, depth, scratch);
            for (long r = 0; r < rows; ++r)
                then(out + r * columns + first, load_floats(scratch.totals + r * PANEL),
                     load_floats(scratch.totals + r * PANEL + WIDTH), first, count);
        }
    }
}
#endif

}  // namespace products
