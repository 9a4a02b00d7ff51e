// The checksums of all layers of a block: XXH3_64bits (seed 0, default secret) of each run of
// `size` bytes, in canonical (big endian) form. `size` must be above 240, where XXH3 takes its long
// path. The algorithm is xxHash's (BSD-2); the tests hold this to the xxhash package.

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

void accumulate(uint64_t* acc, const uint8_t* in, const uint8_t* secret) {
#if defined(__AVX512F__)
  __m512i data = _mm512_loadu_si512(in);
  __m512i key = _mm512_xor_si512(data, _mm512_loadu_si512(secret));
  __m512i product = _mm512_mul_epu32(key, _mm512_srli_epi64(key, 32));
  __m512i swapped = _mm512_shuffle_epi32(data, (_MM_PERM_ENUM)0x4E);
  __m512i sum = _mm512_add_epi64(_mm512_load_si512(acc), swapped);
  _mm512_store_si512(acc, _mm512_add_epi64(sum, product));
#elif defined(__AVX2__)
  for (int half = 0; half < 2; half++) {
    __m256i data = _mm256_loadu_si256((const __m256i*)in + half);
    __m256i key = _mm256_xor_si256(data, _mm256_loadu_si256((const __m256i*)secret + half));
    __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
    __m256i swapped = _mm256_shuffle_epi32(data, 0x4E);
    __m256i* to = (__m256i*)acc + half;
    _mm256_store_si256(to, _mm256_add_epi64(_mm256_add_epi64(*to, swapped), product));
  }
#else
  for (int lane = 0; lane < 8; lane++) {
    uint64_t data = read64(in + 8 * lane), key = data ^ read64(secret + 8 * lane);
    acc[lane ^ 1] += data;
    acc[lane] += (key & 0xFFFFFFFF) * (key >> 32);
  }
#endif
}

void scramble(uint64_t* acc) {
  for (int lane = 0; lane < 8; lane++) {
    uint64_t value = acc[lane];
    value ^= value >> 47;
    value ^= read64(kSecret + kSecretBytes - kStripe + 8 * lane);
    acc[lane] = value * kPrime32_1;
  }
}

uint64_t folded(uint64_t left, uint64_t right) {
  unsigned __int128 product = (unsigned __int128)left * right;
  return (uint64_t)product ^ (uint64_t)(product >> 64);
}

uint64_t merged(const uint64_t* acc, uint64_t start) {
  uint64_t hash = start;
  for (int pair = 0; pair < 4; pair++)
    hash += folded(acc[2 * pair] ^ read64(kSecret + 11 + 16 * pair),
                   acc[2 * pair + 1] ^ read64(kSecret + 11 + 16 * pair + 8));
  hash ^= hash >> 37;
  hash *= 0x165667919E3779F9;
  return hash ^ hash >> 32;
}

uint64_t sum(const uint8_t* in, long size) {
  alignas(64) uint64_t acc[8] = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3,
                                 kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};
  const long block = kStripe * kStripesPerBlock, blocks = (size - 1) / block;
  for (long at = 0; at < blocks; at++) {
    for (int stripe = 0; stripe < kStripesPerBlock; stripe++) {
      const uint8_t* from = in + at * block + stripe * kStripe;
      __builtin_prefetch(from + kAhead);
      accumulate(acc, from, kSecret + 8 * stripe);
    }
    scramble(acc);
  }
  const long left = (size - 1 - blocks * block) / kStripe;
  for (long stripe = 0; stripe < left; stripe++)
    accumulate(acc, in + blocks * block + stripe * kStripe, kSecret + 8 * stripe);
  accumulate(acc, in + size - kStripe, kSecret + kSecretBytes - kStripe - 7);
  return merged(acc, (uint64_t)size * kPrime64_1);
}

}  // namespace

extern "C" void wr_layer_sums(const uint8_t* payload, long layers, long size, uint8_t* sums) {
  for (long layer = 0; layer < layers; layer++) {
    uint64_t canonical = __builtin_bswap64(sum(payload + layer * size, size));
    memcpy(sums + 8 * layer, &canonical, 8);
  }
}

// Copies, and sums up each layer where it has landed, while it is in the processor's cache.
extern "C" void wr_copy_sums(uint8_t* into, const uint8_t* from, long layers, long size,
                             uint8_t* sums) {
  for (long layer = 0; layer < layers; layer++) {
    memcpy(into + layer * size, from + layer * size, size);
    wr_layer_sums(into + layer * size, 1, size, sums + 8 * layer);
  }
}
