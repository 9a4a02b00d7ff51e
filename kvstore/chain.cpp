// The chain of block keys: kvstore/identity.py has the twin, which says what is hashed. BLAKE2b as
// in RFC 7693, keyed and personalised. The state behind the key's own block is the same for all.

#include <cstdint>
#include <cstring>

namespace {

constexpr int BLOCK = 128, DIGEST = 16;

constexpr uint64_t IV[8] = {
    0x6a09e667f3bcc908ULL, 0xbb67ae8584caa73bULL, 0x3c6ef372fe94f82bULL, 0xa54ff53a5f1d36f1ULL,
    0x510e527fade682d1ULL, 0x9b05688c2b3e6c1fULL, 0x1f83d9abfb41bd6bULL, 0x5be0cd19137e2179ULL};

constexpr uint8_t SIGMA[12][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4},
    {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13},
    {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11},
    {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5},
    {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3}};

inline uint64_t turned(uint64_t x, int by) { return x >> by | x << (64 - by); }

inline void mix(uint64_t *v, int a, int b, int c, int d, uint64_t x, uint64_t y) {
    v[a] += v[b] + x;
    v[d] = turned(v[d] ^ v[a], 32);
    v[c] += v[d];
    v[b] = turned(v[b] ^ v[c], 24);
    v[a] += v[b] + y;
    v[d] = turned(v[d] ^ v[a], 16);
    v[c] += v[d];
    v[b] = turned(v[b] ^ v[c], 63);
}

template <int ROUND> inline void rounds(uint64_t *v, const uint64_t *m) {
    constexpr const uint8_t *s = SIGMA[ROUND];
    mix(v, 0, 4, 8, 12, m[s[0]], m[s[1]]);
    mix(v, 1, 5, 9, 13, m[s[2]], m[s[3]]);
    mix(v, 2, 6, 10, 14, m[s[4]], m[s[5]]);
    mix(v, 3, 7, 11, 15, m[s[6]], m[s[7]]);
    mix(v, 0, 5, 10, 15, m[s[8]], m[s[9]]);
    mix(v, 1, 6, 11, 12, m[s[10]], m[s[11]]);
    mix(v, 2, 7, 8, 13, m[s[12]], m[s[13]]);
    mix(v, 3, 4, 9, 14, m[s[14]], m[s[15]]);
    if constexpr (ROUND < 11) rounds<ROUND + 1>(v, m);
}

// `total`: message bytes up to the end of this block, the key's block included.
void compress(uint64_t *h, const uint8_t *block, uint64_t total, bool last) {
    uint64_t m[16], v[16];
    std::memcpy(m, block, BLOCK);
    std::memcpy(v, h, 64);
    std::memcpy(v + 8, IV, 64);
    v[12] ^= total;
    if (last) v[14] = ~v[14];
    rounds<0>(v, m);
    for (int i = 0; i < 8; i++) h[i] ^= v[i] ^ v[i + 8];
}

void keyed(uint64_t *h, const uint8_t *key, uint64_t key_bytes, const uint8_t *person) {
    uint8_t block[BLOCK] = {0};
    std::memcpy(block, key, key_bytes);
    std::memcpy(h, IV, 64);
    h[0] ^= 0x01010000ULL ^ key_bytes << 8 ^ DIGEST;
    uint64_t personal[2];
    std::memcpy(personal, person, 16);
    h[6] ^= personal[0];
    h[7] ^= personal[1];
    compress(h, block, BLOCK, false);
}

}  // namespace

// Keys of `blocks` blocks of `block_bytes` bytes of token ids each, one after the other, to `keys`.
// key_bytes is 1 to 64, `person` has 16 bytes (padded with zeros), `parent` 16.
extern "C" void wr_chain(const uint8_t *key, long key_bytes, const uint8_t *person,
                         const uint8_t *parent, const uint8_t *tokens, long blocks,
                         long block_bytes, uint8_t *keys) {
    uint64_t start[8];
    keyed(start, key, key_bytes, person);
    const uint32_t count = block_bytes / 4;
    const long head_bytes = DIGEST + sizeof count;
    for (long i = 0; i < blocks; i++, parent = keys, keys += DIGEST, tokens += block_bytes) {
        uint64_t h[8];
        uint8_t block[BLOCK] = {0};
        std::memcpy(h, start, sizeof h);
        std::memcpy(block, parent, DIGEST);
        std::memcpy(block + DIGEST, &count, sizeof count);
        const uint8_t *from = tokens;
        long left = block_bytes, room = BLOCK - head_bytes;
        uint64_t total = BLOCK;
        uint8_t *to = block + head_bytes;
        while (left > room) {
            std::memcpy(to, from, room);
            compress(h, block, total += BLOCK, false);
            from += room;
            left -= room;
            room = BLOCK;
            to = block;
        }
        std::memset(to, 0, room);
        std::memcpy(to, from, left);
        compress(h, block, total + (to - block) + left, true);
        std::memcpy(keys, h, DIGEST);
    }
}
