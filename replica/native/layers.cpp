// What surrounds attention: norms, rotation and storing, and matrix products with what follows them.
//
// Plain C interface over raw pointers; `is_bf16` tells the element type. The caller guarantees
// shapes, contiguous rows, and that no buffer is shared unless it says so.

#include <algorithm>
#include <cmath>

#include "blocks.h"
#include "few.h"
#include "tiles.h"
#include "vec.h"

namespace {

using blocks::Panels;

// out[rows][size] = hidden / rms(hidden) * weight
template <typename E>
void norm(const float* hidden, const float* weight, E* out, long rows, long size, float eps) {
    for (long row = 0; row < rows; ++row, hidden += size, out += size) {
        f32x16 squares{};
        for (long i = 0; i < size; i += WIDTH) {
            f32x16 x = load_floats(hidden + i);
            squares += x * x;
        }
        f32x16 scale = splat(1.0f / std::sqrt(sum(squares) / size + eps));
        for (long i = 0; i < size; i += WIDTH)
            store_floats(out + i, load_floats(hidden + i) * scale * load_floats(weight + i));
    }
}

// Turns heads of qkv[rows][packed] in place: `turned` heads of `dim` by the row's position; then
// copies keys and values (kv_heads each) to the row's slot.
template <typename E>
void rotate_and_store(E* qkv, const float* cos, const float* sin, const int64_t* positions,
                      const int64_t* slots, E* keys, E* values, long rows, long heads,
                      long kv_heads, long dim) {
    long half = dim / 2, kv_size = kv_heads * dim;
    for (long row = 0; row < rows; ++row, qkv += (heads + 2 * kv_heads) * dim) {
        const float* c = cos + positions[row] * half;
        const float* s = sin + positions[row] * half;
        for (E* head = qkv; head < qkv + (heads + kv_heads) * dim; head += dim)
            for (long i = 0; i < half; i += WIDTH) {
                f32x16 left = load_floats(head + i), right = load_floats(head + half + i);
                f32x16 ci = load_floats(c + i), si = load_floats(s + i);
                store_floats(head + i, left * ci - right * si);
                store_floats(head + half + i, right * ci + left * si);
            }
        const E* key = qkv + heads * dim;
        std::memcpy(keys + slots[row] * kv_size, key, kv_size * sizeof(E));
        std::memcpy(values + slots[row] * kv_size, key + kv_size, kv_size * sizeof(E));
    }
}

// weight[columns][depth] to panels [columns / 32][depth / lane][32][lane]; missing columns are zero
template <typename E>
void pack(const E* weight, E* packed, long columns, long depth) {
    for (long first = 0; first < columns; first += PANEL)
        for (long k = 0; k < depth; k += LANE<E>)
            for (long column = first; column < first + PANEL; ++column, packed += LANE<E>)
                if (column < columns)
                    std::memcpy(packed, weight + column * depth + k, sizeof(float));
                else
                    std::memset(packed, 0, sizeof(float));
}

template <typename Out>
void store_some(Out* to, f32x16 value, long count) {
    if (count >= WIDTH) return store_floats(to, value);
    Out all[WIDTH];
    store_floats(all, value);
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

struct Add {
    static constexpr long columns = PANEL;
    void operator()(float* to, f32x16 left, f32x16 right, long, long count) const {
        if (count == PANEL) {
            store_floats(to, load_floats(to) + left);
            store_floats(to + WIDTH, load_floats(to + WIDTH) + right);
        } else {
            for (long i = 0; i < count; ++i) to[i] += i < WIDTH ? left[i] : right[i - WIDTH];
        }
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
    long whole = rows / tiles::ROWS * tiles::ROWS;
    static thread_local std::vector<bf16> kept;
    kept.assign(tiles::ROWS * depth, bf16{0});
    std::memcpy(kept.data(), x + whole * depth, (rows - whole) * depth * sizeof(bf16));
    const bf16* last = kept.data();
#pragma omp parallel
    {
        tiles::Configured configured;
        Panels<bf16> panels = weights;
        alignas(64) float sums[2 * tiles::ROWS * PANEL];
#pragma omp for collapse(2) schedule(static)
        for (long block = 0; block < rows; block += TILED_ROWS)
            for (long index = 0; index < count_panels; ++index) {
                long first = index * Then::columns;
                long count = std::min(columns - first, Then::columns);
                long end = std::min(rows, block + TILED_ROWS);
                panels.open(index, end - block > 2 * tiles::ROWS);
                auto write = [&](long row, long many) {
                    for (long r = 0; r < many; ++r)
                        then(out + (row + r) * columns + first, load_floats(sums + r * PANEL),
                             load_floats(sums + r * PANEL + WIDTH), first, count);
                };
                const bf16* ahead = index + 1 < count_panels ? panels.next() : nullptr;
                long row = block, full = std::min(whole, end);
                for (; row + 2 * tiles::ROWS <= full; row += 2 * tiles::ROWS, ahead = nullptr) {
                    tiles::multiply<2>(x + row * depth, depth, panels, depth, sums, PANEL, ahead);
                    write(row, 2 * tiles::ROWS);
                }
                for (; row < end; row += tiles::ROWS, ahead = nullptr) {
                    const bf16* from = row < whole ? x + row * depth : last;
                    tiles::multiply<1>(from, depth, panels, depth, sums, PANEL, ahead);
                    write(row, std::min(tiles::ROWS, end - row));
                }
            }
    }
}

// The same for up to 16 rows and weights kept as blocks of Q.
template <typename Q, typename Out, typename Then>
void few_product(const bf16* x, const uint8_t* packed, Out* out, long rows, long columns,
                    long depth, const Then& then) {
    long count_panels = (columns + Then::columns - 1) / Then::columns;
    static thread_local std::vector<float> x_sums;
    x_sums.resize(std::max<size_t>(x_sums.size(), rows * depth / blocks::DEPTH));
    few::sum_blocks(x, rows, depth, x_sums.data());
    const float* all_sums = x_sums.data();
#pragma omp parallel
    {
        tiles::Configured configured(rows);
        few::Scratch scratch;
        alignas(64) float totals[tiles::ROWS * PANEL];
#pragma omp for schedule(static)
        for (long index = 0; index < count_panels; ++index) {
            const uint8_t* panel = packed + index * (depth / blocks::DEPTH) * Q::BYTES;
            long first = index * Then::columns, count = std::min(columns - first, Then::columns);
            few::multiply<Q>(x, all_sums, rows, panel, depth, scratch, totals);
            for (long r = 0; r < rows; ++r)
                then(out + r * columns + first, load_floats(totals + r * PANEL),
                     load_floats(totals + r * PANEL + WIDTH), first, count);
        }
    }
}
#endif

// Calls body with what becomes of a row, and with `out` as the numbers that takes.
template <typename E, typename Body>
void with_then(int then, void* out, const float* bias, Body&& body) {
    enum { WRITE, WRITE_FLOAT, ADD_FLOAT, GATE };
    switch (then) {
        case WRITE:
            return body((E*)out, Write<E>{bias});
        case WRITE_FLOAT:
            return body((float*)out, Write<float>{bias});
        case ADD_FLOAT:
            return body((float*)out, Add{});
        case GATE:
            return body((E*)out, Gate<E>{});
    }
}

template <typename E>
void any_product(const void* x, const void* packed, const float* bias, void* out, long rows,
                 long columns, long depth, int then, int encoding) {
    with_then<E>(then, out, bias, [&](auto* to, const auto& what) {
        product((const E*)x, Panels<E>(packed, depth, encoding), to, rows, columns, depth, what);
    });
}

template <typename E>
void columns_of(const void* packed, const int64_t* ids, float* out, long count, long depth,
                int encoding) {
    Panels<E> panels(packed, depth, encoding);
    for (long i = 0; i < count; ++i) panels.column(ids[i], out + i * depth);
}

}  // namespace

extern "C" {

void wr_norm(const void* hidden, const void* weight, void* out, long rows, long size, float eps,
             int is_bf16) {
    auto *h = (const float*)hidden, *w = (const float*)weight;
    if (is_bf16)
        norm(h, w, (bf16*)out, rows, size, eps);
    else
        norm(h, w, (float*)out, rows, size, eps);
}

void wr_rotate_and_store(void* qkv, const float* cos, const float* sin, const int64_t* positions,
                         const int64_t* slots, void* keys, void* values, long rows, long heads,
                         long kv_heads, long dim, int is_bf16) {
    if (is_bf16)
        rotate_and_store((bf16*)qkv, cos, sin, positions, slots, (bf16*)keys, (bf16*)values, rows,
                         heads, kv_heads, dim);
    else
        rotate_and_store((float*)qkv, cos, sin, positions, slots, (float*)keys, (float*)values,
                         rows, heads, kv_heads, dim);
}

// packed: the columns rounded up to whole panels
void wr_pack(const void* weight, void* packed, long columns, long depth, int is_bf16) {
    if (is_bf16)
        pack((const bf16*)weight, (bf16*)packed, columns, depth);
    else
        pack((const float*)weight, (float*)packed, columns, depth);
}

// blocks[columns][depth / 32] of a file to panels, which are as long; the columns fill panels, and
// `packed` holds zeros. encoding: 1 Q4_1, 2 Q8_0.
void wr_pack_blocks(const void* from, void* packed, long columns, long depth, int encoding,
                    int is_bf16) {
    if (is_bf16)
        blocks::pack<bf16>((const uint8_t*)from, (uint8_t*)packed, columns, depth, encoding);
    else
        blocks::pack<float>((const uint8_t*)from, (uint8_t*)packed, columns, depth, encoding);
}

// out[count][depth] = columns of packed blocks by their ids, rounded to the panels' type
void wr_columns(const void* packed, const int64_t* ids, float* out, long count, long depth,
                int encoding, int is_bf16) {
    if (is_bf16)
        columns_of<bf16>(packed, ids, out, count, depth, encoding);
    else
        columns_of<float>(packed, ids, out, count, depth, encoding);
}

// Whether wr_product may be told to use tiles.
int wr_tiles() {
#if defined(WR_TILES)
    return tiles::allowed();
#else
    return 0;
#endif
}

// kind: 0 float, 1 bfloat16, 2 bfloat16 by tiles (depth a multiple of 32).
// then: 0 writes in the dtype of x, 1 writes floats, 2 adds to floats, 3 gates. bias may be null;
// it has as many floats as there are packed columns, and counts for 0 and 1 only.
// encoding: 0 for what wr_pack made, else that of wr_pack_blocks.
void wr_product(const void* x, const void* packed, const void* bias, void* out, long rows,
                long columns, long depth, int then, int kind, int encoding) {
    enum { FLOAT, BF16, TILES };
    auto* b = (const float*)bias;
    if (kind == FLOAT)
        return any_product<float>(x, packed, b, out, rows, columns, depth, then, encoding);
#if defined(WR_TILES)
    if (kind == TILES)
        return with_then<bf16>(then, out, b, [&](auto* to, const auto& what) {
            auto* from = (const bf16*)x;
            auto multiply = [&]<typename Q>() {
                few_product<Q>(from, (const uint8_t*)packed, to, rows, columns, depth, what);
            };
            if (rows <= tiles::ROWS && few::with_encoding(encoding, multiply)) return;
            Panels<bf16> weights(packed, depth, encoding);
            tiled_product(from, weights, to, rows, columns, depth, what);
        });
#endif
    any_product<bf16>(x, packed, b, out, rows, columns, depth, then, encoding);
}
}
