// What caches of the native kernels have in common: a hash of words, and the order of last use.

#pragma once

#include <cstdint>
#include <cstring>

inline uint64_t load_word(const void *at) {
    uint64_t value;
    std::memcpy(&value, at, 8);
    return value;
}

inline uint64_t folded(uint64_t a, uint64_t b) {
    const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
    return uint64_t(product) ^ uint64_t(product >> 64);
}

// Of a ring: behind its head comes what was used longest ago.
struct Link {
    Link *before = this, *after = this;
    void leave() {
        before->after = after;
        after->before = before;
    }
    void put_before(Link &other) {
        before = other.before, after = &other;
        before->after = other.before = this;
    }
    void move_before(Link &other) {
        leave();
        put_before(other);
    }
};
