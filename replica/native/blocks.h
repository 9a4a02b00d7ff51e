// Weights as blocks of a file, re-ordered for vectors, and how they become numbers.
//
// A piece is 32 columns by 32 of depth: one block of each column. Numbers of a piece come vector by
// vector in the order of a packed panel: 16 / lane columns by `lane` of depth, 2 * lane vectors
// abreast. They are what a file's reader gives, rounded to the panel's type: to the bit.
#pragma once

#include <vector>

#include "vec.h"

namespace blocks {

enum Encoding { DENSE, Q4_1, Q8_0 };

constexpr long DEPTH = 32;               // weights of one block
constexpr long PIECE = PANEL * DEPTH;    // numbers of one piece
constexpr long HALVES = PANEL * sizeof(uint16_t);
constexpr long NIBBLES = PIECE / 2;
constexpr long Q4_BYTES = NIBBLES + 2 * HALVES;  // nibbles, scales, least values
constexpr long Q8_BYTES = PIECE + HALVES;        // numbers, scales
constexpr long FETCHED = 4096;           // bytes ahead that are fetched into the cache

// What lies so far ahead of `from`, into the cache.
inline void fetch(const uint8_t* from, long bytes) {
    for (long i = 0; i < bytes; i += 64) __builtin_prefetch(from + FETCHED + i);
}

inline long piece_bytes(int encoding) { return encoding == Q4_1 ? Q4_BYTES : Q8_BYTES; }

// float16 to float
inline f32x16 from_halves(u16x16 bits) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_cvtph_ps((__m256i)bits);
#else
    u32x16 wide = __builtin_convertvector(bits, u32x16);
    u32x16 sign = (wide & 0x8000) << 16, rest = (wide & 0x7fff) << 13;
    u32x16 scaled = (u32x16)((f32x16)rest * 0x1p112f), endless = rest | 0x7f800000;
    return (f32x16)((rest >= 0x0f800000 ? endless : scaled) | sign);
#endif
}

// The lowest 4 bits of each lane.
inline f32x16 from_nibbles(u32x16 words) {
#if defined(__AVX512F__)
    constexpr f32x16 all = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return (f32x16)_mm512_permutexvar_ps((__m512i)words, (__m512)all);
#else
    return __builtin_convertvector((i32x16)(words & 15), f32x16);
#endif
}

inline f32x16 from_bytes(const uint8_t* bytes) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(bytes)));
#else
    f32x16 numbers;
    for (int i = 0; i < WIDTH; ++i) numbers[i] = (int8_t)bytes[i];
    return numbers;
#endif
}

inline void store_two(float* to, f32x16 first, f32x16 second) {
    store(to, first);
    store(to + WIDTH, second);
}

inline void store_two(bf16* to, f32x16 first, f32x16 second) {
#if defined(__AVX512BF16__)
    store(to, (u32x16)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
#else
    store_floats(to, first);
    store_floats(to + WIDTH, second);
#endif
}

// What each column has, for the lanes of two vectors side by side.
struct Spread {
    f32x16 first, second;

    Spread(const uint8_t* halves, float) {
        first = from_halves(load<u16x16>(halves));
        second = from_halves(load<u16x16>(halves + HALVES / 2));
    }
    Spread(const uint8_t* halves, bf16) {
        constexpr u16x16 low = {0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7};
        auto each = load<u16x16>(halves);
        first = from_halves(__builtin_shuffle(each, low));
        second = from_halves(__builtin_shuffle(each, low + 8));
    }
};

template <typename E>
constexpr long ABREAST = 2 * LANE<E>;  // vectors that make one row of a panel

// The columns of vector `vector` of a row, where their halves begin.
template <typename E>
inline const uint8_t* halves_of(const uint8_t* halves, long vector) {
    return halves + vector * WIDTH / LANE<E> * sizeof(uint16_t);
}

// Words of 16 columns, each with 8 nibbles of its depth, the first in the lowest bits.
inline void expand_q4(const uint8_t* piece, float* to) {
    constexpr long WORDS = sizeof(u32x16), DEEP = 8;
    const uint8_t *scales = piece + NIBBLES, *least = scales + HALVES;
    Spread scale(scales, 0.0f), low(least, 0.0f);
    for (; piece < scales; piece += 2 * WORDS) {
        auto first = load<u32x16>(piece), second = load<u32x16>(piece + WORDS);
        for (long k = 0; k < DEEP; ++k, first >>= 4, second >>= 4, to += PANEL)
            store_two(to, from_nibbles(first) * scale.first + low.first,
                      from_nibbles(second) * scale.second + low.second);
    }
}

// Words of 16 columns, each with 4 nibbles of even depth in its lower half, and the 4 behind them
// in the other.
inline void expand_q4(const uint8_t* piece, bf16* to) {
    constexpr long WORDS = sizeof(u32x16), ROW = 2 * PANEL, ROWS = 4;
    constexpr u32x16 low_lanes = {0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7};
    constexpr u32x16 halves = {0, 16, 0, 16, 0, 16, 0, 16, 0, 16, 0, 16, 0, 16, 0, 16};
    const uint8_t *scales = piece + NIBBLES, *least = scales + HALVES;
    for (long half = 0; half < 2; ++half) {
        Spread scale(scales + half * HALVES / 2, bf16{}), low(least + half * HALVES / 2, bf16{});
        for (long row = 0; row < DEPTH / 2; row += ROWS) {
            auto words = load<u32x16>(piece + (row / ROWS * 2 + half) * WORDS);
            u32x16 first = __builtin_shuffle(words, low_lanes);
            u32x16 second = __builtin_shuffle(words, low_lanes + 8);
            bf16* out = to + row * ROW + half * 2 * WIDTH;
            for (uint32_t i = 0; i < ROWS; ++i, out += ROW)
                store_two(out, from_nibbles(first >> (halves + 4 * i)) * scale.first + low.first,
                          from_nibbles(second >> (halves + 4 * i)) * scale.second + low.second);
        }
    }
}

template <typename E>
inline void expand_q8(const uint8_t* piece, E* to) {
    for (long vector = 0; vector < ABREAST<E>; vector += 2) {
        Spread scale(halves_of<E>(piece + PIECE, vector), E{});
        for (long at = vector * WIDTH; at < PIECE; at += ABREAST<E> * WIDTH)
            store_two(to + at, from_bytes(piece + at) * scale.first,
                      from_bytes(piece + at + WIDTH) * scale.second);
    }
}

// The place of a number of a piece in a panel.
template <typename E>
inline long place(long column, long depth) {
    return (depth / LANE<E> * PANEL + column) * LANE<E> + depth % LANE<E>;
}

// Where a nibble of a piece lies: by its word, and how many bits it is above the lowest.
inline long word_of(long column, long depth) {
    return (depth / 8 * 2 + column / WIDTH) * WIDTH + column % WIDTH;
}

template <typename E>
inline long shift_of(long depth) {
    return LANE<E> == 1 ? 4 * (depth % 8) : 16 * (depth % 2) + 4 * (depth % 8 / 2);
}

// One block of Q4_1 (scale, least, 16 low nibbles with the 16 high ones) to its place in a piece.
template <typename E>
void pack_q4(const uint8_t* block, uint8_t* piece, long column) {
    constexpr long HALF = sizeof(uint16_t), SIDE = DEPTH / 2;
    std::memcpy(piece + NIBBLES + column * HALF, block, HALF);
    std::memcpy(piece + NIBBLES + HALVES + column * HALF, block + HALF, HALF);
    for (long k = 0; k < DEPTH; ++k) {
        uint32_t nibble = block[2 * HALF + k % SIDE] >> (k < SIDE ? 0 : 4) & 15;
        uint8_t* word = piece + word_of(column, k) * sizeof(uint32_t);
        store(word, load<uint32_t>(word) | nibble << shift_of<E>(k));
    }
}

// One block of Q8_0 (scale, 32 numbers).
template <typename E>
void pack_q8(const uint8_t* block, uint8_t* piece, long column) {
    constexpr long HALF = sizeof(uint16_t);
    std::memcpy(piece + PIECE + column * HALF, block, HALF);
    for (long k = 0; k < DEPTH; ++k) piece[place<E>(column, k)] = block[HALF + k];
}

// blocks[columns][depth / 32] to pieces [columns / 32][depth / 32], which are as long; `packed` is
// zeros
template <typename E>
void pack(const uint8_t* from, uint8_t* packed, long columns, long depth, int encoding) {
    long bytes = piece_bytes(encoding), pieces = depth / DEPTH;
    for (long column = 0; column < columns; ++column)
        for (long k = 0; k < pieces; ++k, from += bytes / PANEL) {
            uint8_t* piece = packed + (column / PANEL * pieces + k) * bytes;
            if (encoding == Q4_1)
                pack_q4<E>(from, piece, column % PANEL);
            else
                pack_q8<E>(from, piece, column % PANEL);
        }
}

// The packed panels of one matrix, for one thread: dense ones lie there as they are used, blocks
// become numbers when they are.
template <typename E>
class Panels {
   public:
    Panels(const void* packed, long depth, int encoding)
        : packed_((const uint8_t*)packed), depth_(depth), encoding_(encoding) {}

    // How much depth `at` gives at once.
    long step() const { return numbers_ ? depth_ : DEPTH; }

    // Turn to a panel. With `often` it is read more than once, so all of it becomes numbers now.
    void open(long index, bool often) {
        index_ = index;
        if (encoding_ == DENSE) {
            numbers_ = (const E*)packed_ + index * PANEL * depth_;
            return;
        }
        numbers_ = nullptr;
        room_ = room(often ? PANEL * depth_ : 2 * PIECE);
        if (!often) return;
        for (long k = 0; k < depth_; k += DEPTH) expand(k, room_ + PANEL * k);
        numbers_ = room_;
    }

    // The panel's numbers from `k` on, for k in ascending order. Pieces are made one ahead, so that
    // nothing is read that was just written.
    const E* at(long k) {
        if (numbers_) return numbers_ + PANEL * k;
        if (k == 0) expand(0, room_);
        if (k + DEPTH < depth_) expand(k + DEPTH, room_ + (k / DEPTH + 1) % 2 * PIECE);
        return room_ + k / DEPTH % 2 * PIECE;
    }

    // Where the next panel can be fetched from as it is, if it can.
    const E* next() const { return encoding_ == DENSE ? numbers_ + PANEL * depth_ : nullptr; }

    // out[depth] = one column
    void column(long column, float* out) {
        open(column / PANEL, false);
        for (long k = 0; k < depth_; k += DEPTH) {
            const E* piece = at(k);
            for (long i = 0; i < DEPTH; ++i)
                out[k + i] = to_float(piece[place<E>(column % PANEL, i)]);
        }
    }

   private:
    // Memory of this thread for so many numbers.
    static E* room(size_t numbers) {
        static thread_local std::vector<E> kept;
        if (kept.size() < numbers) kept.resize(numbers);
        return kept.data();
    }

    __attribute__((noinline)) void expand(long k, E* to) const {
        long bytes = piece_bytes(encoding_);
        const uint8_t* piece = packed_ + (index_ * depth_ + k) / DEPTH * bytes;
        fetch(piece, bytes);
        if (encoding_ == Q4_1)
            expand_q4(piece, to);
        else
            expand_q8(piece, to);
        asm volatile("" ::: "memory");  // loads of tiles are no reads to the compiler
    }

    const uint8_t* packed_;
    long depth_;
    int encoding_;
    long index_ = 0;
    const E* numbers_ = nullptr;
    E* room_ = nullptr;
};

}  // namespace blocks
