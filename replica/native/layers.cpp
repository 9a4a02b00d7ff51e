// What surrounds attention: norms, rotation and storing, and matrix products with what follows them.
//
// Plain C interface over raw pointers; `is_bf16` tells the element type. The caller guarantees
// shapes, contiguous rows, and that no buffer is shared unless it says so.

#include <algorithm>
#include <cmath>

#include "blocks.h"
#include "few.h"
#include "products.h"
#include "thin.h"
#include "tiles.h"
#include "vec.h"

namespace {

using namespace products;

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

template <typename E>
void gate_halves(const float* halves, E* out, long rows, long columns, long width) {
    Gate<E> gate;
#pragma omp parallel for schedule(static)
    for (long row = 0; row < rows; ++row)
        for (long first = 0; first < columns; first += WIDTH) {
            const float* from = halves + row * width + 2 * first;
            gate(out + row * columns + first, load_floats(from), load_floats(from + WIDTH), first,
                 std::min(columns - first, WIDTH));
        }
}

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
            return body((float*)out, Add<float>{});
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

// out[rows][columns]: silu of 16 columns of `halves` times the 16 behind them, and so on; a row of
// halves has `width` floats, whole panels.
void wr_gate(const float* halves, void* out, long rows, long columns, long width, int is_bf16) {
    if (is_bf16)
        gate_halves(halves, (bf16*)out, rows, columns, width);
    else
        gate_halves(halves, (float*)out, rows, columns, width);
}

// out[rows][columns] += what each of `count` parts makes of its rows of x[rows][depth]; see thin.h.
// kind: as of wr_product; `tiles` are used where `depth` fills them. floats: of what type out is,
// else of that of x.
void wr_add_thin(const void* x, void* out, const void* parts, const void* pairs, long count,
                 long depth, long columns, int floats, int kind) {
    enum { FLOAT, BF16, TILES };
    thin::Group group{(const thin::Part*)parts, (const thin::Pair*)pairs, count, depth, columns};
    if (kind == FLOAT)
        return thin::add<float>((const float*)x, (float*)out, group, false);
    if (floats)
        return thin::add<bf16>((const bf16*)x, (float*)out, group, kind == TILES);
    thin::add<bf16>((const bf16*)x, (bf16*)out, group, kind == TILES);
}

// kind: 0 float, 1 bfloat16, 2 bfloat16 by tiles (depth a multiple of 32).
// then: 0 writes in the dtype of x, 1 writes floats, 2 adds to floats, 3 gates. bias may be null;
// it has as many floats as there are packed columns, and counts for 0 and 1 only.
// encoding: 0 for what wr_pack made, else that of wr_pack_blocks. singles: so many rows, the first
// ones, may go the way of few rows.
void wr_product(const void* x, const void* packed, const void* bias, void* out, long rows,
                long singles, long columns, long depth, int then, int kind, int encoding) {
    enum { FLOAT, BF16, TILES };
    auto* b = (const float*)bias;
    if (kind == FLOAT)
        return any_product<float>(x, packed, b, out, rows, columns, depth, then, encoding);
#if defined(WR_TILES)
    if (kind == TILES)
        return with_then<bf16>(then, out, b, [&](auto* to, const auto& what) {
            auto* from = (const bf16*)x;
            auto multiply = [&]<typename Q>() {
                few_product<Q>(from, (const uint8_t*)packed, to, singles, columns, depth, what);
            };
            long done = singles && few::with_encoding(encoding, multiply) ? singles : 0;
            if (done == rows) return;
            Panels<bf16> weights(packed, depth, encoding);
            tiled_product(from + done * depth, weights, to + done * columns, rows - done, columns,
                          depth, what);
        });
#endif
    any_product<bf16>(x, packed, b, out, rows, columns, depth, then, encoding);
}
}
