// Inner loops over digest planes: rows are bit positions, columns are replicas, 64 to a word.
// router/locality/planes.py has their twin in NumPy, and says what they mean.

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace {

constexpr long AHEAD_BLOCKS = 8, LINE_WORDS = 8;

// Columns whose depth is still open, by the range that it lies in.
struct Ranges {
    std::vector<long> low, high;
    std::vector<uint64_t> open;

    long size() const { return long(low.size()); }
    void clear() {
        low.clear();
        high.clear();
        open.clear();
    }
    // The key of the block that is looked at next is fetched ahead.
    void add(long from, long to, const uint64_t *columns, long words, const uint64_t *halves) {
        __builtin_prefetch(halves + 2 * (from < to ? from + (to - from) / 2 : from - 1));
        low.push_back(from);
        high.push_back(to);
        open.insert(open.end(), columns, columns + words);
    }
};

// The chain's blocks against the planes. Looking again at a block costs little: its rows are in the
// cache by then.
struct Search {
    const uint64_t *rows;
    long words;
    uint64_t mask;
    long k;
    const uint64_t *halves;
    long window, scanned;
    int32_t *depths;

    const uint64_t *row(long block, long i) const {
        const uint64_t step = halves[2 * block + 1] | 1;
        return rows + ((halves[2 * block] + uint64_t(i) * step) & mask) * words;
    }

    void prefetch(long block) const {
        for (long i = 0; i < k; i++)
            for (long w = 0; w < words; w += LINE_WORDS) __builtin_prefetch(row(block, i) + w);
    }

    void credit(const uint64_t *before, const uint64_t *after, long depth) {
        for (long w = 0; w < words; w++)
            for (uint64_t over = after ? before[w] & ~after[w] : before[w]; over; over &= over - 1)
                depths[64 * w + __builtin_ctzll(over)] = int32_t(depth);
    }

    // Those of `from` that hold the block too; whether any does. A cache line of columns at a time, so
    // that what is left of them stays in registers from row to row.
    bool keep(uint64_t *to, const uint64_t *from, long block) const {
        uint64_t any = 0;
        long w = 0;
        for (; w + LINE_WORDS <= words; w += LINE_WORDS) {
            uint64_t some[LINE_WORDS];
            for (long v = 0; v < LINE_WORDS; v++) some[v] = from[w + v];
            for (long i = 0; i < k; i++) {
                const uint64_t *next = row(block, i) + w;
                for (long v = 0; v < LINE_WORDS; v++) some[v] &= next[v];
            }
            for (long v = 0; v < LINE_WORDS; v++) any |= to[w + v] = some[v];
        }
        for (; w < words; w++) {
            uint64_t some = from[w];
            for (long i = 0; i < k; i++) some &= row(block, i)[w];
            any |= to[w] = some;
        }
        return any != 0;
    }

    // The columns of `open` hold all blocks before `low`, as far as the search looked, and none
    // holds more than `high`. All that a round looks at is fetched before its first look.
    void bisect(Ranges &now, Ranges &next, uint64_t *room) {
        for (; now.size(); std::swap(now, next)) {
            next.clear();
            for (long at = 0; at < now.size(); at++)
                for (long block = first(now, at); block <= final(now, at); block++)
                    prefetch(block);
            for (long at = 0; at < now.size(); at++) {
                const uint64_t *open = now.open.data() + at * words;
                if (now.low[at] == now.high[at])
                    settle(now.low[at], open, room, next);
                else
                    halve(now.low[at], now.high[at], open, room, next);
            }
        }
    }

    // The blocks that a range's next step looks at.
    long first(long low, long high) const {
        if (low < high) return low + (high - low) / 2;
        return low - window > scanned ? low - window : scanned;
    }
    long first(const Ranges &of, long at) const { return first(of.low[at], of.high[at]); }
    long final(const Ranges &of, long at) const {
        return of.low[at] < of.high[at] ? first(of, at) : of.low[at] - 1;
    }

    void halve(long low, long high, const uint64_t *open, uint64_t *room, Ranges &next) {
        const long middle = first(low, high);
        if (keep(room, open, middle)) next.add(middle + 1, high, room, words, halves);
        if (part(room, open)) next.add(low, middle, room, words, halves);
    }

    // The search ended at `depth`: whoever lacks one of the last blocks before it was misjudged.
    void settle(long depth, const uint64_t *open, uint64_t *room, Ranges &next) {
        for (long w = 0; w < words; w++) room[w] = open[w];
        for (long block = first(depth, depth); block < depth; block++) keep(room, room, block);
        credit(room, nullptr, depth);
        if (part(room, open)) next.add(scanned, depth - 1, room, words, halves);
    }

    // Leave in `kept` those of `all` that are not in it; whether there is any.
    bool part(uint64_t *kept, const uint64_t *all) {
        uint64_t any = 0;
        for (long w = 0; w < words; w++) any |= kept[w] = all[w] & ~kept[w];
        return any != 0;
    }
};

}  // namespace

extern "C" {

void wr_depths(const uint64_t *rows, long words, long bits, long k, const uint64_t *halves,
               long blocks, const uint64_t *known, long head, long window, int32_t *depths) {
    static thread_local std::vector<uint64_t> room;
    room.assign(words * 2, 0);
    Search search{rows, words, uint64_t(bits) - 1, k, halves, window, 0, depths};
    uint64_t *alive = room.data(), *next = alive + words;
    for (long w = 0; w < words; w++) alive[w] = known[w];
    const long scanned = search.scanned = head < blocks ? head : blocks;
    for (long block = 0; block < scanned && block < AHEAD_BLOCKS; block++) search.prefetch(block);
    for (long block = 0; block < scanned; block++) {
        if (block + AHEAD_BLOCKS < scanned) search.prefetch(block + AHEAD_BLOCKS);
        const bool any = search.keep(next, alive, block);
        search.credit(alive, next, block);
        if (!any) return;
        uint64_t *old = alive;
        alive = next;
        next = old;
    }
    static thread_local Ranges now, later;
    now.clear();
    now.add(scanned, blocks, alive, words, halves);
    search.bisect(now, later, next);
}

void wr_change(uint64_t *rows, long words, long column, const uint32_t *positions, long count,
               int set) {
    uint64_t *word = rows + column / 64;
    const uint64_t bit = 1ull << (column % 64);
    if (set)
        for (long i = 0; i < count; i++) word[positions[i] * words] |= bit;
    else
        for (long i = 0; i < count; i++) word[positions[i] * words] &= ~bit;
}

void wr_reset(uint64_t *rows, long words, long column, const uint8_t *bits, long count) {
    uint64_t *word = rows + column / 64;
    const long shift = column % 64;
    const uint64_t bit = 1ull << shift;
    for (long i = 0; i < count; i++)
        word[i * words] = (word[i * words] & ~bit) | uint64_t(bits[i / 8] >> (i % 8) & 1) << shift;
}

}  // extern "C"
