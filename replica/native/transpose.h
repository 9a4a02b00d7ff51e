// 16 rows of 16 numbers of 4 bytes to 16 columns.
#pragma once

#include "vec.h"

// Takes 4-byte, 8-byte or 16-byte pieces of two vectors in turn, from the named half.
#define MIX(name, ...)                                  \
    inline u32x16 name(u32x16 a, u32x16 b) {            \
        return __builtin_shuffle(a, b, u32x16{__VA_ARGS__}); \
    }
MIX(low_4, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29)
MIX(high_4, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31)
MIX(low_8, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
MIX(high_8, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)
MIX(even_16, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27)
MIX(odd_16, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31)
#undef MIX

inline void transpose(u32x16 (&rows)[16]) {
    u32x16 four[16], eight[16];
    for (int i = 0; i < 16; i += 2) {
        four[i] = low_4(rows[i], rows[i + 1]);
        four[i + 1] = high_4(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int half = 0; half < 2; ++half) {
            eight[i + 2 * half] = low_8(four[i + half], four[i + half + 2]);
            eight[i + 2 * half + 1] = high_8(four[i + half], four[i + half + 2]);
        }
    for (int i = 0; i < 4; ++i) {
        u32x16 even = even_16(eight[i], eight[i + 4]), odd = odd_16(eight[i], eight[i + 4]);
        u32x16 even2 = even_16(eight[i + 8], eight[i + 12]);
        u32x16 odd2 = odd_16(eight[i + 8], eight[i + 12]);
        rows[i] = even_16(even, even2);
        rows[i + 4] = even_16(odd, odd2);
        rows[i + 8] = odd_16(even, even2);
        rows[i + 12] = odd_16(odd, odd2);
    }
}
