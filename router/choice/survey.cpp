// What each replica holds of a chain, what it is promised, and what the request costs there, in one go.
// router/choice/pricer.py says what the steps mean; its twin takes them one by one.

#include <cstring>

#include "cost.h"

namespace {

// router/locality/planes.cpp has it.
using LookUp = void (*)(const uint64_t *rows, long words, long bits, long k, const uint64_t *keys, long blocks,
                        const uint64_t *known, long head, long window, int32_t *found);

// A digest plane, and the column there of each replica, -1 for none; router/locality/index.py.
struct Seat {
    LookUp look_up;
    const uint64_t *rows;
    long words, bits, k;
    const uint64_t *known;
    long head, window;
    int32_t *found;
    const int64_t *columns;

    // Added up: a replica has a column in one plane at most.
    void add(const uint64_t *keys, long blocks, int32_t *depths, long n) const {
        std::memset(found, 0, (64 * words + 1) * sizeof *found);
        look_up(rows, words, bits, k, keys, blocks, known, head, window, found);
        for (long i = 0; i < n; i++) depths[i] += columns[i] < 0 ? 0 : found[columns[i]];
    }
};

// A tree of promises, and the row of each of its slots, -1 for none; router/locality/promises.cpp has the
// look-up, which only makes depths larger.
struct Promises {
    void (*look_up)(void *tree, const uint64_t *keys, long blocks, const int32_t *rows, int32_t *depths);
    void *tree;
    const int32_t *rows;
};

}  // namespace

extern "C" {

long wr_look(const Sheet *sheet, const Seat *seats, long planes, const uint64_t *keys, long blocks,
             const Promises *promises) {
    std::memset(sheet->there, 0, sheet->n * sizeof *sheet->there);
    for (long at = 0; at < planes; at++) seats[at].add(keys, blocks, sheet->there, sheet->n);
    std::memcpy(sheet->depths, sheet->there, sheet->n * sizeof *sheet->there);
    promises->look_up(promises->tree, keys, blocks, promises->rows, sheet->depths);
    return 0;
}

long wr_price(const Sheet *sheet, const Ask *ask, const Weights *weights, const Extras *extras) {
    return price(*sheet, *ask, *weights, extras ? *extras : Extras{});
}

long wr_survey(const Sheet *sheet, const Seat *seats, long planes, const uint64_t *keys, long blocks,
               const Promises *promises, const Ask *ask, const Weights *weights, const Extras *extras) {
    wr_look(sheet, seats, planes, keys, blocks, promises);
    return wr_price(sheet, ask, weights, extras);
}

}  // extern "C"
