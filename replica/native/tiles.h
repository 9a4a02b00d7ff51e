// Products of bfloat16 by AMX: 16 rows by 32 columns at a time, on the same packed panels.
//
// Each number is summed in one order: so a row's result does not depend on how many others there are.
#pragma once

#include <algorithm>
#include <vector>

#include "blocks.h"
#include "vec.h"

#if defined(__AMX_BF16__) && defined(__AVX512F__)
#include <sys/syscall.h>
#include <unistd.h>
#define WR_TILES 1

namespace tiles {

constexpr long ROWS = 16;       // of one tile
constexpr long DEPTH = 32;      // bfloat16 numbers in one row of a tile

// The kernel lets a process use the tiles once it has asked.
inline bool allowed() {
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

// Eight tiles of 16 rows by 64 bytes, for this thread, as long as this lives. Fewer `rows`: of the
// first six; fewer `odd_rows`: of 2, 3 and 5; fewer `columns`, of 4 bytes: of all but 4 and 5.
struct Configured {
    explicit Configured(long rows = ROWS) : Configured(rows, rows) {}
    Configured(long rows, long odd_rows, long columns = WIDTH) {
        alignas(64) struct {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t bytes[16] = {};
            uint8_t rows[16] = {};
        } config;
        std::fill_n(config.bytes, 8, columns * 4);
        std::fill_n(config.bytes + 4, 2, 64);
        std::fill_n(config.rows, 6, rows);
        config.rows[2] = config.rows[3] = config.rows[5] = odd_rows;
        std::fill_n(config.rows + 6, 2, ROWS);
        // To the compiler only its first bytes are read.
        asm volatile("" ::"r"(&config) : "memory");
        _tile_loadconfig(&config);
    }
    ~Configured() { _tile_release(); }
};

// Fetches a panel into the cache while others are multiplied, evenly over `passes` of them. It goes
// through its parts side by side: the memory gives more from several places at once.
class Fetch {
   public:
    Fetch() = default;  // nothing

    // `panel` may be null.
    Fetch(const bf16* panel, long depth, long passes)
        : at_(panel), part_(PANEL * depth / PARTS), left_(panel ? part_ / LINE : 0) {
        long steps = passes * (depth / DEPTH);
        each_ = (left_ + steps - 1) / steps;
    }

    // What falls to one step in depth of one pass.
    void step() {
        long count = std::min(each_, left_);
        left_ -= count;
        for (; count; --count, at_ += LINE)
            for (long part = 0; part < PARTS; ++part)
                __builtin_prefetch(at_ + part * part_, 0, SECOND_LEVEL);
    }

   private:
    static constexpr long LINE = 64 / sizeof(bf16), PARTS = 4;

    const bf16* at_ = nullptr;
    long part_ = 0, left_ = 0, each_ = 0;
};

// sums[TILES * 16][32] = x[TILES * 16][depth] * the panel that is open, while others are fetched
template <int TILES>
inline void multiply(const bf16* x, long x_step, blocks::Panels<bf16>& panels, long depth,
                     float* sums, long sums_step, Fetch& fetch) {
    constexpr long PAIRS = PANEL * sizeof(uint32_t);
    long bytes = x_step * sizeof(bf16);
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (TILES == 2) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (long k = 0; k < depth; k += DEPTH) {
        const bf16* panel = panels.at(k);
        fetch.step();
        _tile_loadd(6, panel, PAIRS);
        _tile_loadd(7, panel + PANEL, PAIRS);
        _tile_loadd(4, x + k, bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (TILES == 2) {
            _tile_loadd(5, x + ROWS * x_step + k, bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    long wide = sums_step * sizeof(float);
    _tile_stored(0, sums, wide);
    _tile_stored(1, sums + WIDTH, wide);
    if constexpr (TILES == 2) {
        _tile_stored(2, sums + ROWS * sums_step, wide);
        _tile_stored(3, sums + ROWS * sums_step + WIDTH, wide);
    }
}

// The same with a panel of numbers.
template <int TILES>
inline void multiply(const bf16* x, long x_step, const bf16* panel, long depth, float* sums,
                     long sums_step) {
    blocks::Panels<bf16> panels(panel, depth, blocks::DENSE);
    panels.open(0, true);
    Fetch nothing;
    multiply<TILES>(x, x_step, panels, depth, sums, sums_step, nothing);
}

// sums[16][32] += x[16][depth] * packed, of which [depth / 2][columns][2] are 32 columns
inline void multiply_add(const bf16* x, long x_step, const bf16* packed, long columns, long depth,
                         float* sums, long sums_step) {
    long bytes = x_step * sizeof(bf16), pairs = columns * sizeof(uint32_t);
    long wide = sums_step * sizeof(float);
    _tile_loadd(0, sums, wide);
    _tile_loadd(1, sums + WIDTH, wide);
    for (long k = 0; k < depth; k += DEPTH) {
        _tile_loadd(4, x + k, bytes);
        _tile_loadd(6, packed + k * columns, pairs);
        _tile_loadd(7, packed + k * columns + PANEL, pairs);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, sums, wide);
    _tile_stored(1, sums + WIDTH, wide);
}

}  // namespace tiles
#endif
