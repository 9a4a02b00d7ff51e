// Which prefixes many of the last requests went through: router/policies/heat.py has the twin, and says what it means.

#include <algorithm>
#include <cstdint>
#include <deque>
#include <unordered_map>
#include <vector>

namespace {

struct Key {
    uint64_t low, high;
    bool operator==(const Key &) const = default;
};

// Keys are hashes already.
struct KeyHash {
    size_t operator()(const Key &key) const { return key.low; }
};

// The watched prefixes that one request went through, and the depth that it watches itself.
struct Seen {
    std::vector<Key> keys;
    long depth;
};

struct Heat {
    size_t window, max_depths;
    std::deque<Seen> recent;
    std::unordered_map<Key, long, KeyHash> counts;
    std::unordered_map<long, long> depths;

    template <class Counts, class Item> static void take(Counts &counts, const Item &item) {
        const auto at = counts.find(item);
        if (!--at->second) counts.erase(at);
    }

    void forget(const Seen &seen) {
        take(depths, seen.depth);
        for (const Key &key : seen.keys) take(counts, key);
    }

    void note(const Key *chain, long blocks, long shared) {
        Seen seen{{}, shared};
        if (recent.size() == window) {
            forget(recent.front());
            recent.pop_front();
        }
        for (auto [depth, watchers] : depths)
            if (depth > 0 && depth <= blocks && counts.contains(chain[depth - 1]))
                seen.keys.push_back(chain[depth - 1]);
        if (!depths.contains(shared) && depths.size() >= max_depths) seen.depth = 0;
        if (seen.depth > 0 && seen.depth <= blocks) {
            const Key &own = chain[seen.depth - 1];
            if (std::find(seen.keys.begin(), seen.keys.end(), own) == seen.keys.end()) seen.keys.push_back(own);
        }
        depths[seen.depth]++;
        for (const Key &key : seen.keys) counts[key]++;
        recent.push_back(std::move(seen));
    }
};

}  // namespace

extern "C" {

void *wr_heat(long window, long max_depths) { return new Heat{size_t(window), size_t(max_depths)}; }

void wr_cool(Heat *heat) { delete heat; }

void wr_note(Heat *heat, const Key *chain, long blocks, long shared) { heat->note(chain, blocks, shared); }

// How many of the last requests went through the first blocks of a chain of so many, where that is watched.
long wr_count(const Heat *heat, const Key *chain, long length, long blocks) {
    if (blocks <= 0 || blocks > length) return 0;
    const auto at = heat->counts.find(chain[blocks - 1]);
    return at == heat->counts.end() ? 0 : at->second;
}

long wr_recent(const Heat *heat) { return long(heat->recent.size()); }

}  // extern "C"
