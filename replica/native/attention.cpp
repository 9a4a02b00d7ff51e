// Causal attention over the paged pool, for rows of any length: decode, prefill, chunks on a prefix.
//
// For each row and key/value head the row's pages are packed once; tiles of queries (all heads of
// the group side by side) then pass over them with a running softmax. Only positions inside the
// row's own context are ever read. Scratch memory grows to the longest context seen.

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "single.h"
#include "softmax.h"
#include "transpose.h"
#include "vec.h"

namespace {

constexpr long BLOCK = 128;     // positions for which scores are held at once
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
        rows = (rows + WIDTH - 1) / WIDTH * WIDTH;  // tiles take 16 at once
        queries.resize(rows * dim);
        outputs.resize(rows * dim);
        weights.resize(rows * BLOCK);
        scores.resize(rows * BLOCK);
    }
};

// One row's pages of one head.
template <typename E>
struct Pages {
    const E* pool;
    const int32_t* table;
    const Shape& shape;

    // body(position, its numbers) for each position up to `context`, in order
    template <typename Body>
    void each(long context, Body&& body) const {
        long step = shape.token_stride();
        for (long first = 0, page = 0; first < context; first += shape.block_tokens, ++page) {
            const E* at = pool + table[page] * shape.block_tokens * step;
            long end = std::min(context, first + shape.block_tokens);
            const E* next = end < context ? pool + table[page + 1] * shape.block_tokens * step : at;
            for (long position = first; position < end; ++position, at += step, next += step) {
                for (long i = 0; i < shape.dim; i += 64 / sizeof(E)) __builtin_prefetch(next + i);
                body(position, at);
            }
        }
    }
};

// 16 positions of keys as 16 columns of `to`; positions without numbers become zero
template <typename E>
inline void pack_columns(const E* const (&keys)[WIDTH], long count, uint32_t* to, long dim) {
    long lanes = dim / LANE<E>, whole = lanes / WIDTH * WIDTH;
    for (long k = 0; k < whole; k += WIDTH) {
        u32x16 square[WIDTH];
        for (long i = 0; i < WIDTH; ++i)
            square[i] = i < count ? load<u32x16>(keys[i] + k * LANE<E>) : u32x16{};
        transpose(square);
        for (long i = 0; i < WIDTH; ++i) store(to + (k + i) * PANEL, square[i]);
    }
    for (long k = whole; k < lanes; ++k)
        for (long i = 0; i < WIDTH; ++i)
            to[k * PANEL + i] = i < count ? load<uint32_t>(keys[i] + k * LANE<E>) : 0;
}

// Keys to [context / 32][dim / lane][32][lane]; positions behind the context become zero.
template <typename E>
void pack_keys(const Pages<E>& pages, E* packed, long context, long dim) {
    const E* keys[WIDTH];
    auto flush = [&](long first, long count) {
        auto* to = (uint32_t*)(packed + first / PANEL * PANEL * dim) + first % PANEL;
        pack_columns(keys, count, to, dim);
    };
    pages.each(context, [&](long position, const E* key) {
        keys[position % WIDTH] = key;
        if (position % WIDTH == WIDTH - 1) flush(position + 1 - WIDTH, WIDTH);
    });
    for (long first = context / WIDTH * WIDTH; first % PANEL || first < context; first += WIDTH)
        flush(first, std::max(0L, context - first));
}

// Values to [context / lane][dim][lane], up to a whole panel; behind the context they are zero.
inline void pack_values(const Pages<float>& pages, float* packed, long context, long dim) {
    pages.each(context, [&](long position, const float* value) {
        std::memcpy(packed + position * dim, value, dim * sizeof(float));
    });
    long missing = -context & (PANEL - 1);
    std::memset(packed + context * dim, 0, missing * dim * sizeof(float));
}

inline void pack_values(const Pages<bf16>& pages, bf16* packed, long context, long dim) {
    auto* to = (uint32_t*)packed;
    const bf16* even = nullptr;
    pages.each(context, [&](long position, const bf16* value) {
        if (position % 2 == 0) even = value;
        if (position % 2 == 0 && position + 1 < context) return;
        for (long i = 0; i < dim; i += WIDTH) {
            u32x16 pair = __builtin_convertvector(load<u16x16>(even + i), u32x16);
            if (position % 2) pair |= __builtin_convertvector(load<u16x16>(value + i), u32x16) << 16;
            store(to + position / 2 * dim + i, pair);
        }
    });
    long used = (context + 1) / 2, end = (context + PANEL - 1) / PANEL * PANEL / 2;
    std::memset(to + used * dim, 0, (end - used) * dim * sizeof(uint32_t));
}

// scores[rows][BLOCK] of 32 positions
template <int ROWS, typename E>
inline void score_tile(const E* queries, const E* panel, float* scores, long dim) {
    f32x16 total[ROWS][2] = {};
    multiply<ROWS, 2>(total, queries, dim, panel, PANEL * LANE<E>, dim / LANE<E>);
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < 2; ++v) store(scores + r * BLOCK + v * WIDTH, total[r][v]);
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

// Scores of `rows` queries for `positions` positions from `base` on, and what they add up to.

template <typename E>
struct ByVectors {
    static void score(Scratch<E>& scratch, long rows, long base, long positions, long dim) {
        in_tiles(rows, [&]<int ROWS>(long row) {
            for (long p = 0; p < positions; p += PANEL)
                score_tile<ROWS>(scratch.queries.data() + row * dim,
                                 scratch.keys.data() + (base + p) * dim,
                                 scratch.scores.data() + row * BLOCK + p, dim);
        });
    }

    static void blend(Scratch<E>& scratch, long rows, long base, long positions, long dim) {
        float* outputs = scratch.outputs.data();
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
};

#if defined(WR_TILES)
struct ByTiles {
    static void score(Scratch<bf16>& scratch, long rows, long base, long positions, long dim) {
        for (long p = 0; p < positions; p += PANEL)
            for (long row = 0; row < rows; row += tiles::ROWS)
                tiles::multiply<1>(scratch.queries.data() + row * dim, dim,
                                   scratch.keys.data() + (base + p) * dim, dim,
                                   scratch.scores.data() + row * BLOCK + p, BLOCK);
    }

    static void blend(Scratch<bf16>& scratch, long rows, long base, long positions, long dim) {
        const bf16* values = scratch.values.data() + base * dim;
        for (long i = 0; i < dim; i += PANEL)
            for (long row = 0; row < rows; row += tiles::ROWS)
                tiles::multiply_add(scratch.weights.data() + row * BLOCK, BLOCK, values + 2 * i,
                                    dim, positions, scratch.outputs.data() + row * dim + i, dim);
    }
};
#endif

// `count` queries of one group, the first at `position`; each token's side by side.
template <typename By, typename E>
void attend_tile(const Shape& shape, const E* query, E* out, long count, long position,
                 Scratch<E>& scratch) {
    float scale = LOG2_E / std::sqrt((float)shape.dim);
    long dim = shape.dim, group = shape.group(), rows = count * group, step = shape.heads * dim;
    Running running[QUERY_ROWS];
    E* queries = scratch.queries.data();
    float* outputs = scratch.outputs.data();
    for (long t = 0; t < count; ++t)
        std::memcpy(queries + t * group * dim, query + t * shape.query_step, group * dim * sizeof(E));
    std::fill_n(outputs, rows * dim, 0.0f);
    for (long base = 0; base < position + count; base += BLOCK) {
        long positions = std::min(BLOCK, (position + count - base + PANEL - 1) / PANEL * PANEL);
        By::score(scratch, rows, base, positions, dim);
        for (long row = 0; row < rows; ++row)
            soften(scratch.scores.data() + row * BLOCK, scratch.weights.data() + row * BLOCK,
                   outputs + row * dim, dim, position + row / group + 1 - base, positions, scale,
                   running[row]);
        By::blend(scratch, rows, base, positions, dim);
    }
    for (long row = 0; row < rows; ++row) {
        float share = 1.0f / sum(running[row].totals);
        E* to = out + row / group * step + row % group * dim;
        for (long i = 0; i < dim; i += WIDTH)
            store_floats(to + i, load_floats(outputs + row * dim + i) * share);
    }
}

// All queries of one row in one group; `query` and `out` point at the row's first token.
template <typename By, typename E>
void attend_row(const Shape& shape, const E* query, E* out, const Pages<E>& keys,
                const Pages<E>& values, long count, long context) {
    static thread_local Scratch<E> scratch;
    long dim = shape.dim, group = shape.group(), tile = std::max(1L, QUERY_ROWS / group);
    scratch.reserve((context + PANEL) * dim, tile * group, dim);
    pack_keys(keys, scratch.keys.data(), context, dim);
    pack_values(values, scratch.values.data(), context, dim);
    for (long done = 0; done < count; done += tile) {
        attend_tile<By>(shape, query + done * shape.query_step, out + done * shape.heads * dim, std::min(tile, count - done),
                    context - count + done, scratch);
    }
}

// One call: rows of any length over one pool.
template <typename E>
struct Call {
    Shape shape;
    const E* query;
    E* out;
    const E *keys, *values;
    const int32_t *tables, *starts, *contexts;
    long rows, table_width;

    long count(long row) const { return starts[row + 1] - starts[row]; }
    const E* query_of(long row, long head) const {
        return query + starts[row] * shape.query_step + head * shape.group() * shape.dim;
    }
    E* out_of(long row, long head) const {
        return out + (starts[row] * shape.heads + head * shape.group()) * shape.dim;
    }
};

// One head of keys and values of one row.
template <typename By, typename E>
void attend_head(const Call<E>& call, long row, long head) {
    const Shape& shape = call.shape;
    const int32_t* table = call.tables + row * call.table_width;
    attend_row<By>(shape, call.query_of(row, head), call.out_of(row, head),
                   Pages<E>{call.keys + head * shape.dim, table, shape},
                   Pages<E>{call.values + head * shape.dim, table, shape}, call.count(row),
                   call.contexts[row]);
}

template <typename E>
void attend_by_vectors(const Call<E>& call) {
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (long row = 0; row < call.rows; ++row)
        for (long head = 0; head < call.shape.kv_heads; ++head)
            attend_head<ByVectors<E>>(call, row, head);
}

#if defined(WR_TILES)
void attend_single(const Call<bf16>& call, const ahead::Pages& pages, long item,
                   ahead::Ahead& next) {
    long row = item / pages.parts(), head = item % pages.parts() * pages.item_heads;
    next.begin(item);
    single::attend({pages, call.keys + head * pages.dim, call.values + head * pages.dim, row,
                    pages.item_heads, call.shape.group()},
                   call.query_of(row, head), call.out_of(row, head), next);
}

// Rows of one token, which come first, go a way of their own. They are whole rows of work if that
// is enough for all threads.
void attend_by_tiles(const Call<bf16>& call) {
    const Shape& shape = call.shape;
    long singles = 0;
    while (singles < call.rows && call.count(singles) == 1) ++singles;
    long threads = omp_get_max_threads();
    bool whole = threads == 1 || singles >= 2 * threads;
    const ahead::Pages pages{
        .keys = call.keys,
        .values = call.values,
        .tables = call.tables,
        .contexts = call.contexts,
        .rows = singles,
        .table_width = call.table_width,
        .block_tokens = shape.block_tokens,
        .kv_heads = shape.kv_heads,
        .dim = shape.dim,
        .item_heads = whole ? shape.kv_heads : 1,
        .span = single::SPAN,
    };
    // Few enough at once to share out long rows, enough to go from most to what was fetched.
    long at_once = std::max(1L, pages.items() / (8 * threads));
#pragma omp parallel
    {
        ahead::Ahead next(pages);
#pragma omp for schedule(dynamic, at_once) nowait
        for (long item = 0; item < pages.items(); ++item)
            attend_single(call, pages, item, next);
#pragma omp for collapse(2) schedule(dynamic)
        for (long row = singles; row < call.rows; ++row)
            for (long head = 0; head < shape.kv_heads; ++head) {
                tiles::Configured configured;
                attend_head<ByTiles>(call, row, head);
            }
    }
}
#endif

}  // namespace

extern "C" {

// query: [tokens][heads][dim] with `query_step` numbers from token to token; out: the same, dense;
// keys, values: [blocks][block_tokens][kv_heads][dim]
// kind: 0 float, 1 bfloat16, 2 bfloat16 by tiles (blocks of whole 16s, at most 16 queries to a
// head).
void wr_attend(const void* query, void* out, const void* keys, const void* values,
               const int32_t* tables, const int32_t* starts, const int32_t* contexts,
               long query_step, long rows, long table_width, long heads, long kv_heads, long dim,
               long block_tokens, int kind) {
    enum { FLOAT, BF16, TILES };
    Shape shape{heads, kv_heads, dim, block_tokens, query_step};
    auto call = [&]<typename E>() {
        return Call<E>{shape,  (const E*)query, (E*)out,  (const E*)keys, (const E*)values,
                       tables, starts,          contexts, rows,           table_width};
    };
#if defined(WR_TILES)
    if (kind == TILES) return attend_by_tiles(call.template operator()<bf16>());
#endif
    if (kind == FLOAT)
        attend_by_vectors(call.template operator()<float>());
    else
        attend_by_vectors(call.template operator()<bf16>());
}
}
