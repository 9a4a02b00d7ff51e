// Vectors of 16 floats in the compiler's own notation, and products of float or bfloat16 lanes.
//
// A lane holds one float, or a pair of bfloat16 whose products are summed. Matrices that are
// multiplied by columns are packed lane by lane: [depth / lane][columns][lane].
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

using f32x16 = float __attribute__((vector_size(64)));
using i32x16 = int32_t __attribute__((vector_size(64)));
using u32x16 = uint32_t __attribute__((vector_size(64)));
using u16x16 = uint16_t __attribute__((vector_size(32)));

struct bf16 {
    uint16_t bits;
};

constexpr long WIDTH = 16;
constexpr long PANEL = 2 * WIDTH;  // columns of one packed panel
constexpr int SECOND_LEVEL = 2;    // the cache to fetch into: more is on its way to it than to the first

#if defined(__AVX512F__)
constexpr int TILE_ROWS = 8;  // 16 accumulators, 2 columns and a splat fit into 32 registers
#else
constexpr int TILE_ROWS = 2;
#endif

template <typename E>
constexpr long LANE = sizeof(float) / sizeof(E);

static inline f32x16 splat(float value) { return f32x16{} + value; }

template <typename V>
static inline V load(const void* from) {
    V value;
    std::memcpy(&value, from, sizeof(V));
    return value;
}

template <typename V>
static inline void store(void* to, V value) {
    std::memcpy(to, &value, sizeof(V));
}

static inline float to_float(float value) { return value; }

static inline float to_float(bf16 value) {
    uint32_t bits = uint32_t(value.bits) << 16;
    return load<float>(&bits);
}

static inline f32x16 load_floats(const float* from) { return load<f32x16>(from); }

static inline f32x16 load_floats(const bf16* from) {
    return (f32x16)(__builtin_convertvector(load<u16x16>(from), u32x16) << 16);
}

// Round to nearest even; NaN stays NaN.
static inline u16x16 round_to_bf16(f32x16 value) {
#if defined(__AVX512BF16__)
    return (u16x16)_mm512_cvtneps_pbh((__m512)value);
#else
    u32x16 bits = (u32x16)value;
    u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    u32x16 quiet = (bits >> 16) | 0x40;
    return __builtin_convertvector(value == value ? rounded : quiet, u16x16);
#endif
}

static inline void store_floats(float* to, f32x16 value) { store(to, value); }

static inline void store_floats(bf16* to, f32x16 value) { store(to, round_to_bf16(value)); }

// Folds the 16 numbers into one, halves first: a short chain, and always the same order.
template <typename Join>
static inline float fold(f32x16 value, Join&& join) {
    for (int half : {8, 4, 2, 1}) {
        i32x16 across = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        value = join(value, __builtin_shuffle(value, across ^ half));
    }
    return value[0];
}

static inline float sum(f32x16 value) {
    return fold(value, [](f32x16 a, f32x16 b) { return a + b; });
}

static inline float largest(f32x16 value) {
    return fold(value, [](f32x16 a, f32x16 b) { return a < b ? b : a; });
}

// Whether a lane of a comparison holds.
static inline bool any(i32x16 lanes) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)lanes, (__m512i)lanes);
#else
    int32_t found = 0;
    for (int i = 0; i < WIDTH; ++i) found |= lanes[i];
    return found;
#endif
}

// 2**x for x <= 127; it is 2**-126 for whatever lies below, NaN stays NaN
static inline f32x16 power_of_two(f32x16 x) {
    x = x < -126.0f ? splat(-126.0f) : x;
    f32x16 shifted = x + 12582912.0f;  // rounds to a whole number in the low bits
    f32x16 r = x - (shifted - 12582912.0f);
    f32x16 p = splat(1.32648694e-03f);
    p = p * r + 9.67148385e-03f;
    p = p * r + 5.55073292e-02f;
    p = p * r + 2.40222425e-01f;
    p = p * r + 6.93146978e-01f;
    p = p * r + 1.0f;
    return (f32x16)((i32x16)p + ((i32x16)shifted << 23));
}

constexpr float LOG2_E = 1.44269504f;

// total + splat(lane at a) * lanes of b, for float
static inline f32x16 multiply_add(f32x16 total, const float* a, f32x16 b) {
    return total + splat(*a) * b;
}

// the same for pairs of bfloat16
static inline f32x16 multiply_add(f32x16 total, const bf16* a, u32x16 b) {
    uint32_t pair = load<uint32_t>(a);
#if defined(__AVX512BF16__)
    return (f32x16)_mm512_dpbf16_ps((__m512)total, (__m512bh)(u32x16{} + pair), (__m512bh)b);
#else
    u32x16 pairs = u32x16{} + pair;
    f32x16 low = (f32x16)(pairs << 16) * (f32x16)(b << 16);
    f32x16 high = (f32x16)(pairs & 0xffff0000u) * (f32x16)(b & 0xffff0000u);
    return total + low + high;
#endif
}

static inline f32x16 load_lanes(const float* from) { return load<f32x16>(from); }
static inline u32x16 load_lanes(const bf16* from) { return load<u32x16>(from); }

// total[ROWS][VECS * 16] += a[ROWS][depth lanes] * b[depth][VECS * 16 lanes]; fetches as much from
// `ahead` into the cache as it reads of b, where there is such
template <int ROWS, int VECS, typename E>
static inline void multiply(f32x16 (&total)[ROWS][VECS], const E* a, long a_step, const E* b,
                            long b_step, long depth, const E* ahead = nullptr) {
    for (long k = 0; k < depth; ++k) {
        if (ahead)
            for (int v = 0; v < VECS; ++v)
                __builtin_prefetch(ahead + k * b_step + v * WIDTH * LANE<E>);
        decltype(load_lanes(b)) column[VECS];
        for (int v = 0; v < VECS; ++v) column[v] = load_lanes(b + k * b_step + v * WIDTH * LANE<E>);
        for (int r = 0; r < ROWS; ++r)
            for (int v = 0; v < VECS; ++v)
                total[r][v] = multiply_add(total[r][v], a + r * a_step + k * LANE<E>, column[v]);
    }
}

// Calls body with the row count as a constant: full tiles, then one for what is left.
template <int ROWS, typename Body>
static inline void last_tile(long rows, Body&& body) {
    if constexpr (ROWS > 0) {
        if (rows == ROWS)
            body.template operator()<ROWS>();
        else
            last_tile<ROWS - 1>(rows, body);
    }
}
