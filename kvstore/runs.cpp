// Runs of block keys that were worked out before: kvstore/chaincache.py has the twin.

#include <cstdint>
#include <cstring>
#include <string>
#include <unordered_map>
#include <vector>

#include "recent.h"

// kvstore/chain.cpp has it.
extern "C" void wr_chain(const uint8_t *key, long key_bytes, const uint8_t *person, const uint8_t *parent,
                         const uint8_t *tokens, long blocks, long block_bytes, uint8_t *keys);

namespace {

constexpr int KEY = 16;
constexpr long ENTRY_BYTES = 200;  // what a run costs beside its tokens and keys

// Known by the key before it and by all of its tokens.
struct Run : Link {
    uint64_t hash;
    uint8_t parent[KEY];
    std::vector<uint8_t> tokens, keys;
    long cost() const { return long(tokens.size() + keys.size()) + ENTRY_BYTES; }
    bool is(const uint8_t *before, const uint8_t *its, long bytes) const {
        return long(tokens.size()) == bytes && !std::memcmp(parent, before, KEY) &&
               !std::memcmp(tokens.data(), its, bytes);
    }
};

struct Runs {
    uint64_t seed;
    long most_bytes, bytes = 0;
    long sizes[2];  // blocks of a run: large, and small ones where a large one is not known
    std::unordered_map<uint64_t, Run *> known;
    Link oldest;

    ~Runs() {
        for (auto &[_, run] : known) delete run;
    }

    // A run is told apart by its parent already: of its tokens a few say enough. All are compared.
    uint64_t hashed(const uint8_t *parent, const uint8_t *tokens, long size) const {
        uint64_t hash = folded(load_word(parent) ^ seed, load_word(parent + 8) ^ uint64_t(size));
        for (long at = 0; at + 16 <= size; at += 16)
            hash = folded(hash ^ load_word(tokens + at), seed ^ load_word(tokens + at + 8));
        return hash;
    }

    const Run *find(uint64_t hash, const uint8_t *parent, const uint8_t *tokens, long size) {
        const auto at = known.find(hash);
        if (at == known.end() || !at->second->is(parent, tokens, size)) return nullptr;
        at->second->move_before(oldest);
        return at->second;
    }

    void drop(Run *run) {
        bytes -= run->cost();
        run->leave();
        known.erase(run->hash);
        delete run;
    }

    void put(uint64_t hash, const uint8_t *parent, const uint8_t *tokens, long size, const uint8_t *keys,
             long key_bytes) {
        if (const auto at = known.find(hash); at != known.end()) drop(at->second);
        Run *run = new Run;
        run->hash = hash;
        std::memcpy(run->parent, parent, KEY);
        run->tokens.assign(tokens, tokens + size);
        run->keys.assign(keys, keys + key_bytes);
        run->put_before(oldest);
        known[hash] = run;
        bytes += run->cost();
        while (bytes > most_bytes) drop(static_cast<Run *>(oldest.after));
    }
};

struct Chain {
    Runs &runs;
    const uint8_t *key;
    long key_bytes;
    const uint8_t *person;
    long block_bytes;

    // Blocks of a size, as far as there are whole ones; of the last level, all.
    void fill(int level, const uint8_t *parent, const uint8_t *tokens, long blocks, uint8_t *keys) {
        if (level == 2) return wr_chain(key, key_bytes, person, parent, tokens, blocks, block_bytes, keys);
        const long step = runs.sizes[level], bytes = step * block_bytes;
        for (; blocks >= step; blocks -= step, tokens += bytes, keys += KEY * step, parent = keys - KEY) {
            const uint64_t hash = runs.hashed(parent, tokens, bytes);
            if (const Run *run = runs.find(hash, parent, tokens, bytes)) {
                std::memcpy(keys, run->keys.data(), run->keys.size());
                continue;
            }
            fill(level + 1, parent, tokens, step, keys);
            runs.put(hash, parent, tokens, bytes, keys, KEY * step);
        }
        if (blocks) fill(level + 1, parent, tokens, blocks, keys);
    }
};

}  // namespace

extern "C" {

Runs *wr_runs_new(long large, long small, long most_bytes, uint64_t seed) {
    Runs *runs = new Runs;
    runs->seed = seed, runs->most_bytes = most_bytes;
    runs->sizes[0] = large, runs->sizes[1] = small;
    return runs;
}

void wr_runs_free(Runs *runs) { delete runs; }

long wr_runs_bytes(Runs *runs) { return runs->bytes; }

// As wr_chain.
void wr_runs_chain(Runs *runs, const uint8_t *key, long key_bytes, const uint8_t *person, const uint8_t *parent,
                   const uint8_t *tokens, long blocks, long block_bytes, uint8_t *keys) {
    Chain{*runs, key, key_bytes, person, block_bytes}.fill(0, parent, tokens, blocks, keys);
}

}  // extern "C"
