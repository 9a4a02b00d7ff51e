// Causal attention over the paged pool, for rows of any length: decode, prefill, chunks on a prefix.
//
// For each row and key/value head the row's pages are packed once; tiles of queries (all heads of
// the group side by side) then pass over them with a running softmax. Only positions inside the
// row's own context are ever read. Scratch memory grows to the longest context seen.

#include <algorithm>
#include <cmath>
#include <vector>

#include "vec.h"

namespace {

constexpr long BLOCK = 64;      // positions for which scores are held at once
constexpr long QUERY_ROWS = 48; // queries times heads of one tile, at most

struct Shape {
    long heads, kv_heads, dim, block_tokens, query_step;
    long group() const { return heads / kv_heads; }
    long token_stride() const { return kv_heads * dim; }
};

template <typename E>
struct Scratch {
    std::vector<E> keys, values, queries, weights;
    std::vector<float> scores, outputs;

    void reserve(long context_size, long rows, long dim) {
        if ((long)keys.size() < context_size) {
            keys.resize(context_size);
            values.resize(context_size);
        }
        queries.resize(rows * dim);
        outputs.resize(rows * dim);
        weights.resize(rows * BLOCK);
        scores.resize(rows * BLOCK);
    }
};

inline void transpose(u32x16 (&rows)[16]) {
    for (int step = 8; step; step /= 2) {
        u32x16 low{}, high{};
        for (int i = 0; i < 16; ++i) {
            low[i] = i & step ? 16 + (i ^ step) : i;
            high[i] = i & step ? 16 + i : i ^ step;
        }
        for (int i = 0; i < 16; ++i)
            if (!(i & step)) {
                u32x16 a = rows[i], b = rows[i + step];
                rows[i] = __builtin_shuffle(a, b, low);
                rows[i + step] = __builtin_shuffle(a, b, high);
            }
    }
}

// One row's pages of one head; position by position.
template <typename E>
struct Pages {
    const E* pool;
    const int32_t* table;
    const Shape& shape;
    const E* at(long position) const {
        long block = table[position / shape.block_tokens];
        long slot = block * shape.block_tokens + position % shape.block_tokens;
        return pool + slot * shape.token_stride();
    }
};

// Keys to [context / 32][dim / lane][32][lane]; positions behind the context become zero.
template <typename E>
void pack_keys(const Pages<E>& pages, E* packed, long context, long dim) {
    long lanes = dim / LANE<E>;
    for (long first = 0; first < context; first += WIDTH) {
        auto* to = (uint32_t*)packed + first / PANEL * lanes * PANEL + first % PANEL;
        const E* rows[WIDTH];
        long count = std::min(WIDTH, context - first);
        for (long i = 0; i < count; ++i) rows[i] = pages.at(first + i);
        long k = 0;
        for (; k + WIDTH <= lanes; k += WIDTH) {
            u32x16 square[16];
            for (long i = 0; i < WIDTH; ++i)
                square[i] = i < count ? load<u32x16>(rows[i] + k * LANE<E>) : u32x16{};
            transpose(square);
            for (long i = 0; i < WIDTH; ++i) store(to + (k + i) * PANEL, square[i]);
        }
        for (; k < lanes; ++k)
            for (long i = 0; i < WIDTH; ++i)
                to[k * PANEL + i] = i < count ? load<uint32_t>(rows[i] + k * LANE<E>) : 0;
        if (count + first == context && first % PANEL == 0)
            for (long k = 0; k < lanes; ++k) store(to + k * PANEL + WIDTH, u32x16{});
    }
}

// Values to [context / lane][dim][lane], up to a whole panel; behind the context they are zero.
void pack_values(const Pages<float>& pages, float* packed, long context, long dim) {
    for (long t = 0; t < context; ++t) std::memcpy(packed + t * dim, pages.at(t), dim * sizeof(float));
    long end = (context + PANEL - 1) / PANEL * PANEL;
    std::memset(packed + context * dim, 0, (end - context) * dim * sizeof(float));
}

void pack_values(const Pages<bf16>& pages, bf16* packed, long context, long dim) {
    auto* to = (uint32_t*)packed;
    long end = (context + PANEL - 1) / PANEL * PANEL;
    for (long t = 0; t < end; t += 2, to += dim) {
        const bf16* even = t < context ? pages.at(t) : nullptr;
        const bf16* odd = t + 1 < context ? pages.at(t + 1) : nullptr;
        for (long i = 0; i < dim; i += WIDTH) {
            u32x16 low = even ? __builtin_convertvector(load<u16x16>(even + i), u32x16) : u32x16{};
            u32x16 high = odd ? __builtin_convertvector(load<u16x16>(odd + i), u32x16) : u32x16{};
            store(to + i, low | high << 16);
        }
    }
}

// scores[rows][BLOCK] of 32 positions
template <int ROWS, typename E>
inline void score_tile(const E* queries, const E* panel, float* scores, long dim, float scale) {
    f32x16 total[ROWS][2] = {};
    multiply<ROWS, 2>(total, queries, dim, panel, PANEL * LANE<E>, dim / LANE<E>);
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < 2; ++v) store(scores + r * BLOCK + v * WIDTH, total[r][v] * scale);
}

// outputs[rows][dim] += weights[rows][positions] * values, for VECS * 16 columns
template <int ROWS, int VECS, typename E>
inline void output_tile(const E* weights, const E* values, float* outputs, long dim,
                        long positions) {
    f32x16 total[ROWS][VECS];
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECS; ++v) total[r][v] = load_floats(outputs + r * dim + v * WIDTH);
    multiply<ROWS, VECS>(total, weights, BLOCK, values, dim * LANE<E>, positions / LANE<E>);
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECS; ++v) store(outputs + r * dim + v * WIDTH, total[r][v]);
}

template <typename Body>
inline void in_tiles(long rows, Body&& body) {
    long row = 0;
    auto tile = [&]<int ROWS>() { body.template operator()<ROWS>(row); };
    for (; row + TILE_ROWS <= rows; row += TILE_ROWS) tile.template operator()<TILE_ROWS>();
    last_tile<TILE_ROWS - 1>(rows - row, tile);
}

inline float largest(f32x16 value) {
    float best = value[0];
    for (int i = 1; i < WIDTH; ++i) best = std::max(best, value[i]);
    return best;
}

// Turns scores of one row into weights, the first `inside` of `positions` counting; keeps the
// running maximum and sum, and rescales what the row has summed so far.
template <typename E>
inline void soften(float* scores, E* weights, float* output, long dim, long inside, long positions,
                   float& maximum, float& total) {
    const i32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    f32x16 best = splat(maximum);
    for (long i = 0; i < positions; i += WIDTH) {
        f32x16 s = load_floats(scores + i);
        s = lanes + (int32_t)i < (int32_t)inside ? s : splat(-INFINITY);
        store(scores + i, s);
        best = best < s ? s : best;
    }
    float now = largest(best);
    if (now == -INFINITY) now = 0;
    f32x16 added{};
    for (long i = 0; i < positions; i += WIDTH) {
        f32x16 s = load_floats(scores + i);
        f32x16 w = s == -INFINITY ? f32x16{} : exponential(s - now);
        added += w;
        store_floats(weights + i, w);
    }
    if (now != maximum) {
        float shrink = std::exp(maximum - now);
        total *= shrink;
        for (long i = 0; i < dim; i += WIDTH)
            store(output + i, load_floats(output + i) * shrink);
        maximum = now;
    }
    total += sum(added);
}

// `count` queries of one group, the first at `position`; each token's side by side.
template <typename E>
void attend_tile(const Shape& shape, const E* query, E* out, long count, long position,
                 Scratch<E>& scratch) {
    float scale = 1.0f / std::sqrt((float)shape.dim);
    long dim = shape.dim, group = shape.group(), rows = count * group, step = shape.heads * dim;
    float maximum[QUERY_ROWS], total[QUERY_ROWS];
    std::fill_n(maximum, rows, -INFINITY);
    std::fill_n(total, rows, 0.0f);
    E* queries = scratch.queries.data();
    float* outputs = scratch.outputs.data();
    for (long t = 0; t < count; ++t)
        std::memcpy(queries + t * group * dim, query + t * shape.query_step, group * dim * sizeof(E));
    std::fill_n(outputs, rows * dim, 0.0f);
    for (long base = 0; base < position + count; base += BLOCK) {
        long positions = std::min(BLOCK, (position + count - base + PANEL - 1) / PANEL * PANEL);
        in_tiles(rows, [&]<int ROWS>(long row) {
            for (long p = 0; p < positions; p += PANEL)
                score_tile<ROWS>(queries + row * dim, scratch.keys.data() + (base + p) * dim,
                                 scratch.scores.data() + row * BLOCK + p, dim, scale);
        });
        for (long row = 0; row < rows; ++row)
            soften(scratch.scores.data() + row * BLOCK, scratch.weights.data() + row * BLOCK,
                   outputs + row * dim, dim, position + row / group + 1 - base, positions,
                   maximum[row], total[row]);
        in_tiles(rows, [&]<int ROWS>(long row) {
            const E* weights = scratch.weights.data() + row * BLOCK;
            const E* values = scratch.values.data() + base * dim;
            long i = 0;
            for (; i + PANEL <= dim; i += PANEL)
                output_tile<ROWS, 2>(weights, values + i * LANE<E>, outputs + row * dim + i, dim,
                                     positions);
            if (i < dim)
                output_tile<ROWS, 1>(weights, values + i * LANE<E>, outputs + row * dim + i, dim,
                                     positions);
        });
    }
    for (long t = 0; t < count; ++t)
        for (long i = 0; i < group * dim; i += WIDTH) {
            float share = 1.0f / total[t * group + i / dim];
            store_floats(out + t * step + i, load_floats(outputs + t * group * dim + i) * share);
        }
}

// All queries of one row in one group; `query` and `out` point at the row's first token.
template <typename E>
void attend_row(const Shape& shape, const E* query, E* out, const Pages<E>& keys,
                const Pages<E>& values, long count, long context) {
    static thread_local Scratch<E> scratch;
    long dim = shape.dim, group = shape.group(), tile = std::max(1L, QUERY_ROWS / group);
    scratch.reserve((context + PANEL) * dim, tile * group, dim);
    pack_keys(keys, scratch.keys.data(), context, dim);
    pack_values(values, scratch.values.data(), context, dim);
    for (long done = 0; done < count; done += tile) {
        attend_tile(shape, query + done * shape.query_step, out + done * shape.heads * dim, std::min(tile, count - done),
                    context - count + done, scratch);
    }
}

template <typename E>
void attend(const Shape& shape, const E* query, E* out, const E* keys, const E* values,
            const int32_t* tables, const int32_t* starts, const int32_t* contexts, long rows,
            long table_width) {
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (long row = 0; row < rows; ++row)
        for (long head = 0; head < shape.kv_heads; ++head) {
            const int32_t* table = tables + row * table_width;
            long first = head * shape.group() * shape.dim;
            attend_row(shape, query + starts[row] * shape.query_step + first,
                       out + starts[row] * shape.heads * shape.dim + first, Pages<E>{keys + head * shape.dim, table, shape},
                       Pages<E>{values + head * shape.dim, table, shape},
                       starts[row + 1] - starts[row], contexts[row]);
        }
}

}  // namespace

extern "C" {

// query: [tokens][heads][dim] with `query_step` numbers from token to token; out: the same, dense;
// keys, values: [blocks][block_tokens][kv_heads][dim]
void wr_attend(const void* query, void* out, const void* keys, const void* values,
               const int32_t* tables, const int32_t* starts, const int32_t* contexts,
               long query_step, long rows, long table_width, long heads, long kv_heads, long dim,
               long block_tokens, int is_bf16) {
    Shape shape{heads, kv_heads, dim, block_tokens, query_step};
    if (is_bf16)
        attend(shape, (const bf16*)query, (bf16*)out,
               (const bf16*)keys, (const bf16*)values, tables, starts, contexts, rows, table_width);
    else
        attend(shape, (const float*)query, (float*)out,
               (const float*)keys, (const float*)values, tables, starts, contexts, rows,
               table_width);
}
}
