// See router/openai/contents.py. Strict: whatever is not quite so, or would have to be looked at twice, is
// left to whoever reads JSON.

#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace {

using Byte = unsigned char;

constexpr char NAME[] = "content";
constexpr long NAME_BYTES = sizeof NAME - 1;

bool is_space(Byte c) { return c == ' ' || c == '\n' || c == '\r' || c == '\t'; }

// The first byte from `at` on that is not simply itself in a string: a quote, a backslash, a control
// character, or none of ASCII.
const Byte *next_odd(const Byte *at, const Byte *end) {
#ifdef __SSE2__
    const __m128i quote = _mm_set1_epi8('"'), slash = _mm_set1_epi8('\\'), low = _mm_set1_epi8(0x20);
    for (; end - at >= 16; at += 16) {
        const __m128i some = _mm_loadu_si128(reinterpret_cast<const __m128i *>(at));
        // Signed: what is none of ASCII is below zero.
        const __m128i odd = _mm_or_si128(_mm_or_si128(_mm_cmpeq_epi8(some, quote), _mm_cmpeq_epi8(some, slash)),
                                         _mm_cmplt_epi8(some, low));
        if (const int found = _mm_movemask_epi8(odd)) return at + __builtin_ctz(found);
    }
#endif
    while (at < end && *at >= 0x20 && *at < 0x80 && *at != '"' && *at != '\\') at++;
    return at;
}

// Bytes of the UTF-8 sequence at `at`, 0 where it is none (RFC 3629: no surrogates, nothing overlong).
long sequence(const Byte *at, const Byte *end) {
    const Byte lead = *at;
    const long size = lead < 0xc2 ? 0 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : lead < 0xf5 ? 4 : 0;
    if (!size || end - at < size) return 0;
    for (long i = 1; i < size; i++)
        if ((at[i] & 0xc0) != 0x80) return 0;
    const Byte next = at[1];
    if ((lead == 0xe0 && next < 0xa0) || (lead == 0xed && next > 0x9f) || (lead == 0xf0 && next < 0x90) ||
        (lead == 0xf4 && next > 0x8f))
        return 0;
    return size;
}

// The quote that ends the string whose first byte is at `at`; null where it is not plain.
const Byte *string_end(const Byte *at, const Byte *end) {
    while ((at = next_odd(at, end)) < end) {
        if (*at == '"') return at;
        if (*at == '\\') {
            if (end - at < 2 || !std::strchr("\"\\/bfnrt", at[1]) || !at[1]) return nullptr;
            at += 2;
        } else {
            const long size = sequence(at, end);
            if (!size) return nullptr;
            at += size;
        }
    }
    return nullptr;
}

}  // namespace

// The body without its contents, at most `room` bytes, and where these stand: first byte and the one behind
// the last, for at most `most` of them. Returns how many there are, -1 where the body is not plain.
extern "C" long wr_contents(const char *body, long size, char *reduced, long room, int64_t *reduced_bytes,
                            int64_t *spans, long most) {
    const Byte *const start = reinterpret_cast<const Byte *>(body), *const end = start + size, *at = start;
    char *out = reduced;
    long found = 0;
    bool named = false;  // what comes next is the value of a content
    while (at < end) {
        const bool is_content = named && *at == '"';
        named = named && is_space(*at);
        if (*at != '"') {
            if (out == reduced + room) return -1;
            *out++ = char(*at++);
            continue;
        }
        const Byte *const close = string_end(at + 1, end);
        if (!close) return -1;
        const long bytes = is_content ? 2 : close + 1 - at;
        if (out + bytes > reduced + room) return -1;
        if (is_content) {
            if (found == most) return -1;
            spans[2 * found] = at + 1 - start;
            spans[2 * found + 1] = close - start;
            found++;
            std::memcpy(out, "\"\"", 2);
        } else {
            std::memcpy(out, at, bytes);
        }
        out += bytes;
        const bool is_name = close - at == NAME_BYTES + 1 && !std::memcmp(at + 1, NAME, NAME_BYTES);
        at = close + 1;
        if (is_content || !is_name) continue;
        while (at < end && is_space(*at)) {
            if (out == reduced + room) return -1;
            *out++ = char(*at++);
        }
        if (at < end && *at == ':') {
            if (out == reduced + room) return -1;
            *out++ = char(*at++);
            named = true;
        }
    }
    *reduced_bytes = out - reduced;
    return found;
}
