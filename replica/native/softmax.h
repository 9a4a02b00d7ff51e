// A softmax over scores that come piece by piece.
#pragma once

#include <algorithm>
#include <cmath>

#include "vec.h"

// The running softmax of one query: the greatest score so far, and the sums, lane by lane, of the
// weights relative to it.
struct Running {
    float greatest = -INFINITY;
    f32x16 totals = {};
};

// The greatest of the scores, or `least`, which they seldom pass.
inline float greatest(const float* scores, long count, float least) {
    f32x16 best = splat(least);
    for (long i = 0; i < count; i += WIDTH) {
        f32x16 s = load_floats(scores + i);
        best = best < s ? s : best;
    }
    return any(best > least) ? largest(best) : least;
}

// Turns the scores of one query, given in powers of two by `scale`, into weights. Of `count`
// positions the first `inside` count, the others weigh as good as nothing. Rescales what the query
// has summed so far where its greatest score rose.
template <typename E>
inline void soften(float* scores, E* weights, float* output, long dim, long inside, long count,
                   float scale, Running& running) {
    for (long i = std::max(0L, inside); i < count; ++i) scores[i] = -INFINITY;
    float now = greatest(scores, count, running.greatest);
    float shift = now == -INFINITY ? 0 : now * scale;
    f32x16 added{};
    for (long i = 0; i < count; i += WIDTH) {
        f32x16 w = power_of_two(load_floats(scores + i) * scale - shift);
        added += w;
        store_floats(weights + i, w);
    }
    if (now != running.greatest) {
        float shrink = std::exp2(running.greatest * scale - shift);
        running = {now, running.totals * shrink};
        for (long i = 0; i < dim; i += WIDTH)
            store(output + i, load_floats(output + i) * shrink);
    }
    running.totals += added;
}
