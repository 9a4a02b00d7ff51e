// A reader of msgpack over bytes that anybody may have sent.

#pragma once

#include <cstdint>
#include <string_view>

using std::string_view;

constexpr int MAX_DEPTH = 16;

// A reader of msgpack. Once it has failed it stays so, and what it gives means nothing.
struct Reader {
    const uint8_t *at, *end;
    bool failed = false;

    uint8_t byte() {
        if (at == end) {
            failed = true;
            return 0xc1;
        }
        return *at++;
    }

    uint64_t number(int bytes) {
        if (end - at < bytes) {
            failed = true;
            return 0;
        }
        uint64_t value = 0;
        for (int i = 0; i < bytes; i++) value = value << 8 | *at++;
        return value;
    }

    string_view bytes(uint64_t size) {
        if (uint64_t(end - at) < size) {
            failed = true;
            return {};
        }
        string_view found(reinterpret_cast<const char *>(at), size);
        at += size;
        return found;
    }

    string_view text() {
        const uint8_t kind = byte();
        if ((kind & 0xe0) == 0xa0) return bytes(kind & 0x1f);
        if (kind >= 0xd9 && kind <= 0xdb) return bytes(number(1 << (kind - 0xd9)));
        failed = true;
        return {};
    }

    uint64_t size(uint8_t fixed, uint8_t wide) {
        const uint8_t kind = byte();
        if ((kind & 0xf0) == fixed) return kind & 0x0f;
        if (kind == wide) return number(2);
        if (kind == wide + 1) return number(4);
        failed = true;
        return 0;
    }
    uint64_t array() { return size(0x90, 0xdc); }
    uint64_t map() { return size(0x80, 0xde); }

    // Of an integer that is not negative.
    uint64_t natural() {
        const uint8_t kind = byte();
        if (kind < 0x80) return kind;
        if (kind >= 0xcc && kind <= 0xcf) return number(1 << (kind - 0xcc));
        failed = true;
        return 0;
    }

    void skip(int depth = 0) {
        const uint8_t kind = byte();
        if (failed || depth > MAX_DEPTH || kind == 0xc1) {
            failed = true;
        } else if (kind < 0x80 || kind >= 0xe0 || kind == 0xc0 || kind == 0xc2 || kind == 0xc3) {
        } else if (kind < 0x90 || kind == 0xde || kind == 0xdf) {
            at--;
            for (uint64_t left = 2 * map(); left > 0 && !failed; left--) skip(depth + 1);
        } else if (kind < 0xa0 || kind == 0xdc || kind == 0xdd) {
            at--;
            for (uint64_t left = array(); left > 0 && !failed; left--) skip(depth + 1);
        } else if (kind < 0xc0 || (kind >= 0xd9 && kind <= 0xdb)) {
            at--;
            text();
        } else if (kind >= 0xc4 && kind <= 0xc6) {
            bytes(number(1 << (kind - 0xc4)));
        } else if (kind == 0xca || kind == 0xcb) {
            bytes(kind == 0xca ? 4 : 8);
        } else if (kind >= 0xcc && kind <= 0xcf) {
            bytes(1 << (kind - 0xcc));
        } else if (kind >= 0xd0 && kind <= 0xd3) {
            bytes(1 << (kind - 0xd0));
        } else {
            failed = true;  // an extension
        }
    }
};
