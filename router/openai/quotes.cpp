// See router/openai/quotes.py.

#include <cstring>

extern "C" long wr_quotes(const char *body, long size) {
    long found = 0;
    const char *end = body + size, *at = body;
    while ((at = static_cast<const char *>(std::memchr(at, '"', end - at)))) {
        const char *before = at;
        while (before > body && before[-1] == '\\') before--;
        found += (at - before) % 2 == 0;
        at++;
    }
    return found;
}
