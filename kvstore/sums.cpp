// The checksums of all layers of a block: XXH3_64bits (seed 0, default secret) of each run of
// `size` bytes, in canonical (big endian) form. `size` must be above 240, where XXH3 takes its long
// path. The algorithm is xxHash's (BSD-2); the tests hold this to the xxhash package.
//
// A copy sums up the very registers that it stores: each byte is read once. What is too large to
// stay in a core's cache is stored past it, so that the target's old bytes are not read first.

#include <cstdint>
#include <cstring>
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr uint64_t kPrime32_1 = 0x9E3779B1, kPrime32_2 = 0x85EBCA77, kPrime32_3 = 0xC2B2AE3D;
constexpr uint64_t kPrime64_1 = 0x9E3779B185EBCA87, kPrime64_2 = 0xC2B2AE3D27D4EB4F,
                   kPrime64_3 = 0x165667B19E3779F9, kPrime64_4 = 0x85EBCA77C2B2AE63,
                   kPrime64_5 = 0x27D4EB2F165667C5;
constexpr int kStripe = 64, kSecretBytes = 192, kAhead = 4096;
constexpr int kStripesPerBlock = (kSecretBytes - kStripe) / 8;
constexpr long kCached = 128 << 10;  // what a copy up to here has stored is still in the cache

alignas(64) constexpr uint8_t kSecret[kSecretBytes] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c,
    0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb,
    0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e,
    0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6,
    0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb,
    0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97,
    0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7,
    0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31,
    0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83,
    0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26,
    0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc,
    0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

uint64_t read64(const uint8_t* from) {
  uint64_t value;
  memcpy(&value, from, 8);
  return value;
}

// 64 bytes in registers: how they come, how they go, and what XXH3 does with them.
#if defined(__AVX512F__)
struct Stripe {
  __m512i all;
  explicit Stripe(const void* from) : all(_mm512_loadu_si512(from)) {}
  void store(uint8_t* to) const { _mm512_storeu_si512(to, all); }
  void stream(uint8_t* to) const { _mm512_stream_si512((__m512i*)to, all); }
  void add(Stripe data, const uint8_t* secret) {
    __m512i key = _mm512_xor_si512(data.all, _mm512_loadu_si512(secret));
    __m512i product = _mm512_mul_epu32(key, _mm512_srli_epi64(key, 32));
    __m512i swapped = _mm512_shuffle_epi32(data.all, (_MM_PERM_ENUM)0x4E);
    all = _mm512_add_epi64(all, _mm512_add_epi64(swapped, product));
  }
  void scramble(const uint8_t* secret) {
    __m512i prime = _mm512_set1_epi64(kPrime32_1);
    __m512i mixed = _mm512_xor_si512(all, _mm512_srli_epi64(all, 47));
    mixed = _mm512_xor_si512(mixed, _mm512_loadu_si512(secret));
    __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(mixed, 32), prime);
    all = _mm512_add_epi64(_mm512_mul_epu32(mixed, prime), _mm512_slli_epi64(high, 32));
  }
};
#elif defined(__AVX2__)
struct Stripe {
  __m256i half[2];
  explicit Stripe(const void* from)
      : half{_mm256_loadu_si256((const __m256i*)from),
             _mm256_loadu_si256((const __m256i*)from + 1)} {}
  void store(uint8_t* to) const {
    for (int at = 0; at < 2; at++) _mm256_storeu_si256((__m256i*)to + at, half[at]);
  }
  void stream(uint8_t* to) const {
    for (int at = 0; at < 2; at++) _mm256_stream_si256((__m256i*)to + at, half[at]);
  }
  void add(Stripe data, const uint8_t* secret) {
    for (int at = 0; at < 2; at++) {
      __m256i key = _mm256_xor_si256(data.half[at], Stripe(secret).half[at]);
      __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
      __m256i swapped = _mm256_shuffle_epi32(data.half[at], 0x4E);
      half[at] = _mm256_add_epi64(half[at], _mm256_add_epi64(swapped, product));
    }
  }
  void scramble(const uint8_t* secret) {
    __m256i prime = _mm256_set1_epi64x(kPrime32_1);
    for (int at = 0; at < 2; at++) {
      __m256i mixed = _mm256_xor_si256(half[at], _mm256_srli_epi64(half[at], 47));
      mixed = _mm256_xor_si256(mixed, Stripe(secret).half[at]);
      __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
      half[at] = _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), _mm256_slli_epi64(high, 32));
    }
  }
};
#else
struct Stripe {
  uint64_t lanes[8];
  explicit Stripe(const void* from) { memcpy(lanes, from, sizeof lanes); }
  void store(uint8_t* to) const { memcpy(to, lanes, sizeof lanes); }
  void stream(uint8_t* to) const { store(to); }
  void add(Stripe data, const uint8_t* secret) {
    for (int lane = 0; lane < 8; lane++) {
      uint64_t key = data.lanes[lane] ^ read64(secret + 8 * lane);
      lanes[lane ^ 1] += data.lanes[lane];
      lanes[lane] += (key & 0xFFFFFFFF) * (key >> 32);
    }
  }
  void scramble(const uint8_t* secret) {
    for (int lane = 0; lane < 8; lane++) {
      uint64_t value = lanes[lane] ^ lanes[lane] >> 47 ^ read64(secret + 8 * lane);
      lanes[lane] = value * kPrime32_1;
    }
  }
};
#endif

uint64_t folded(uint64_t left, uint64_t right) {
  unsigned __int128 product = (unsigned __int128)left * right;
  return (uint64_t)product ^ (uint64_t)(product >> 64);
}

uint64_t merged(Stripe acc, uint64_t start) {
  uint8_t lanes[kStripe];
  acc.store(lanes);
  uint64_t hash = start;
  for (int pair = 0; pair < 4; pair++)
    hash += folded(read64(lanes + 16 * pair) ^ read64(kSecret + 11 + 16 * pair),
                   read64(lanes + 16 * pair + 8) ^ read64(kSecret + 11 + 16 * pair + 8));
  hash ^= hash >> 37;
  hash *= 0x165667919E3779F9;
  return hash ^ hash >> 32;
}

enum class To { kNowhere, kCache, kMemory };

// The checksum of `size` bytes, which are copied to `out` on the way where that is asked for.
template <To to>
uint64_t sum(const uint8_t* in, long size, uint8_t* out) {
  constexpr uint64_t kStart[8] = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3,
                                  kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};
  constexpr long kBlock = kStripe * kStripesPerBlock;
  Stripe acc(kStart);
  const long blocks = (size - 1) / kBlock, left = (size - 1 - blocks * kBlock) / kStripe;
  auto take = [&](long at, int number) {
    Stripe data(in + at);
    __builtin_prefetch(in + at + kAhead);
    if (to == To::kCache) data.store(out + at);
    if (to == To::kMemory) data.stream(out + at);
    acc.add(data, kSecret + 8 * number);
  };
  for (long block = 0; block < blocks; block++) {
    for (int stripe = 0; stripe < kStripesPerBlock; stripe++)
      take(block * kBlock + stripe * kStripe, stripe);
    acc.scramble(kSecret + kSecretBytes - kStripe);
  }
  for (int stripe = 0; stripe < left; stripe++) take(blocks * kBlock + stripe * kStripe, stripe);
  const long done = blocks * kBlock + left * kStripe;
  if (to != To::kNowhere) memcpy(out + done, in + done, size - done);
  acc.add(Stripe(in + size - kStripe), kSecret + kSecretBytes - kStripe - 7);
  return merged(acc, (uint64_t)size * kPrime64_1);
}

template <To to>
void sum_layers(const uint8_t* in, long layers, long size, uint8_t* sums, uint8_t* out) {
  for (long layer = 0; layer < layers; layer++) {
    long at = layer * size;
    uint64_t canonical = __builtin_bswap64(sum<to>(in + at, size, out + at));
    memcpy(sums + 8 * layer, &canonical, 8);
  }
}

}  // namespace

extern "C" void wr_layer_sums(const uint8_t* payload, long layers, long size, uint8_t* sums) {
  sum_layers<To::kNowhere>(payload, layers, size, sums, nullptr);
}

// The two may not overlap.
extern "C" void wr_copy_sums(uint8_t* into, const uint8_t* from, long layers, long size,
                             uint8_t* sums) {
  const bool aligned = (uintptr_t)into % kStripe == 0 && size % kStripe == 0;
  if (!aligned || layers * size < kCached) {
    sum_layers<To::kCache>(from, layers, size, sums, into);
    return;
  }
  sum_layers<To::kMemory>(from, layers, size, sums, into);
#if defined(__AVX512F__) || defined(__AVX2__)
  _mm_sfence();  // whoever is told of the copy sees all of it
#endif
}
