// Low-rank products beside a product: each of some rows of a batch, with two thin matrices of its own.
//
// All of them in one go: first what every part makes of its rows, of a few columns, then what that
// adds to the output. A number is summed in the same order whatever the other rows and parts are.
#pragma once

#include <vector>

#include "products.h"

namespace thin {

using blocks::Panels;

struct Part {  // rows of the batch
    int64_t first, last;
};

struct Pair {  // packed panels of [rank][depth] and [columns][rank]; no rank: it adds nothing
    int64_t down, up, rank;
};

struct Group {
    const Part* parts;
    const Pair* pairs;
    long count, depth, columns;
};

constexpr long ROW_BLOCK = 128;

// One panel for some rows of one part, whose intermediate numbers begin at `middle`.
struct Item {
    long part, first, last, panel, middle;
};

// then(out[rows][..], x[rows][depth] * one panel), where `out` is the panel's first column
template <typename E, typename Out, typename Then>
void multiply(const E* x, Panels<E>& panels, long depth, Out* out, long stride, long rows,
              long count, const Then& then) {
    long row = 0;
    auto tile = [&]<int ROWS>() {
        products::product_tile<ROWS>(x + row * depth, panels, (const E*)nullptr, depth,
                                     out + row * stride, stride, 0, count, then);
    };
    for (; row + TILE_ROWS <= rows; row += TILE_ROWS) tile.template operator()<TILE_ROWS>();
    last_tile<TILE_ROWS - 1>(rows - row, tile);
}

#if defined(WR_TILES)
// The same by tiles; `depth` fills whole ones.
template <typename Out, typename Then>
void multiply_tiled(const bf16* x, Panels<bf16>& panels, long depth, Out* out, long stride,
                    long rows, long count, const Then& then) {
    alignas(64) float sums[tiles::ROWS * PANEL];
    tiles::Fetch nothing;
    auto some = [&](long row, long many) {
        tiles::multiply<1>(x + row * depth, depth, panels, depth, sums, PANEL, nothing);
        for (long r = 0; r < many; ++r)
            then(out + (row + r) * stride, load_floats(sums + r * PANEL),
                 load_floats(sums + r * PANEL + WIDTH), 0, count);
    };
    long whole = rows / tiles::ROWS * tiles::ROWS;
    if (whole) {
        tiles::Configured configured;
        for (long row = 0; row < whole; row += tiles::ROWS) some(row, tiles::ROWS);
    }
    if (whole < rows) {
        tiles::Configured configured(rows - whole);
        some(whole, rows - whole);
    }
}
#endif

template <typename E, typename Out, typename Then>
void one(const E* x, const void* packed, long panel, long depth, Out* out, long stride, long rows,
         long count, const Then& then, bool by_tiles) {
    Panels<E> panels(packed, depth, blocks::DENSE);
    panels.open(panel, true);
#if defined(WR_TILES)
    if constexpr (sizeof(E) == sizeof(bf16))
        if (by_tiles && depth % tiles::DEPTH == 0)
            return multiply_tiled(x, panels, depth, out, stride, rows, count, then);
#endif
    multiply(x, panels, depth, out, stride, rows, count, then);
}

// out[rows][columns] += what the parts make of x[rows][depth]
template <typename E, typename Out>
void add(const E* x, Out* out, const Group& group, bool by_tiles) {
    static thread_local std::vector<Item> downs, ups;
    static thread_local std::vector<E> kept;
    downs.clear();
    ups.clear();
    long middle = 0;
    for (long part = 0; part < group.count; ++part) {
        const long rank = group.pairs[part].rank, last = group.parts[part].last;
        if (!rank) continue;
        for (long first = group.parts[part].first; first < last; first += ROW_BLOCK) {
            long end = std::min(last, first + ROW_BLOCK);
            for (long panel = 0; panel * PANEL < rank; ++panel)
                downs.push_back({part, first, end, panel, middle});
            for (long panel = 0; panel * PANEL < group.columns; ++panel)
                ups.push_back({part, first, end, panel, middle});
            middle += (end - first) * rank;
        }
    }
    if (kept.size() < (size_t)middle) kept.resize(middle);
    E* numbers = kept.data();
    const Item *down = downs.data(), *up = ups.data();
    const long down_count = downs.size(), up_count = ups.size();
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (long i = 0; i < down_count; ++i) {
            const Item& item = down[i];
            const Pair& pair = group.pairs[item.part];
            one(x + item.first * group.depth, (const void*)pair.down, item.panel, group.depth,
                numbers + item.middle + item.panel * PANEL, pair.rank, item.last - item.first,
                std::min(PANEL, pair.rank - item.panel * PANEL), products::Write<E>{nullptr},
                by_tiles);
        }
#pragma omp for schedule(static)
        for (long i = 0; i < up_count; ++i) {
            const Item& item = up[i];
            const Pair& pair = group.pairs[item.part];
            long column = item.panel * PANEL;
            one(numbers + item.middle, (const void*)pair.up, item.panel, pair.rank,
                out + item.first * group.columns + column, group.columns, item.last - item.first,
                std::min(PANEL, group.columns - column), products::Add<Out>{}, by_tiles);
        }
    }
}

}  // namespace thin
