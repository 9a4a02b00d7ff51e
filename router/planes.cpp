// Inner loops over digest planes: rows are bit positions, columns are replicas, 64 to a word.
// router/planes.py has their twin in NumPy, and says what they mean.

#include <cstddef>
#include <cstdint>
#include <vector>

namespace {

constexpr long AHEAD_BLOCKS = 4;

// The chain's blocks against the planes. Each block is looked up at most once.
struct Search {
    const uint64_t *rows;
    long words;
    uint64_t mask;
    long k;
    const uint64_t *halves;
    long window;
    int32_t *depths;
    std::vector<uint64_t> &held;   // by block: who holds it, where `seen`
    std::vector<uint8_t> &seen;

    const uint64_t *row(long block, long i) const {
        const uint64_t step = halves[2 * block + 1] | 1;
        return rows + ((halves[2 * block] + uint64_t(i) * step) & mask) * words;
    }

    void prefetch(long block) const {
        if (seen[block]) return;
        for (long i = 0; i < k; i++)
            for (long w = 0; w < words; w += 8) __builtin_prefetch(row(block, i) + w);
    }

    const uint64_t *holders(long block) {
        uint64_t *found = held.data() + block * words;
        if (seen[block]) return found;
        seen[block] = 1;
        const uint64_t *first = row(block, 0);
        for (long w = 0; w < words; w++) found[w] = first[w];
        for (long i = 1; i < k; i++) {
            const uint64_t *next = row(block, i);
            for (long w = 0; w < words; w++) found[w] &= next[w];
        }
        return found;
    }

    void credit(const uint64_t *before, const uint64_t *after, long depth) {
        for (long w = 0; w < words; w++)
            for (uint64_t over = after ? before[w] & ~after[w] : before[w]; over; over &= over - 1)
                depths[64 * w + __builtin_ctzll(over)] = int32_t(depth);
    }

    // Those of `from` that hold the block too; whether there is any.
    bool keep(uint64_t *to, const uint64_t *from, long block) {
        const uint64_t *found = holders(block);
        uint64_t any = 0;
        for (long w = 0; w < words; w++) any |= to[w] = from[w] & found[w];
        return any != 0;
    }

    // `open` hold all blocks before `low`, none holds more than `high`. `room` is for the halves.
    void bisect(long low, long high, uint64_t *open, uint64_t *room) {
        while (low < high) {
            const long middle = low + (high - low) / 2;
            const long begin = middle - window + 1 > low ? middle - window + 1 : low;
            for (long block = begin; block <= middle; block++) prefetch(block);
            bool any = keep(room, open, middle);
            for (long block = begin; any && block < middle; block++) any = keep(room, room, block);
            if (any) {
                uint64_t rest = 0;
                for (long w = 0; w < words; w++) rest |= open[w] &= ~room[w];
                bisect(middle + 1, high, room, room + words);
                if (!rest) return;
            }
            high = middle;
        }
        credit(open, nullptr, low);
    }
};

}  // namespace

extern "C" {

void wr_depths(const uint64_t *rows, long words, long bits, long k, const uint64_t *halves,
               long blocks, const uint64_t *known, long head, long window, int32_t *depths) {
    static thread_local std::vector<uint64_t> held, room;
    static thread_local std::vector<uint8_t> seen;
    if (held.size() < std::size_t(blocks * words)) held.resize(blocks * words);
    seen.assign(blocks, 0);
    room.assign(words * 72, 0);
    Search search{rows, words, uint64_t(bits) - 1, k, halves, window, depths, held, seen};
    uint64_t *alive = room.data(), *next = alive + words;
    for (long w = 0; w < words; w++) alive[w] = known[w];
    const long scanned = head < blocks ? head : blocks;
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
    uint64_t *open = room.data() + 2 * words;
    for (long w = 0; w < words; w++) open[w] = alive[w];
    search.bisect(scanned, blocks, open, open + words);
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
