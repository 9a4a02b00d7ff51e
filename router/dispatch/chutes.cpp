// From a frame of deltas to the bytes of clients' sockets, in one pass: router/dispatch/chutes.py
// says what a chute is. Whatever is not exactly as expected is left to the typed decoder.

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "msgpack.h"

namespace {

constexpr uint64_t DELTA_FIELDS = 9, LEAST_FIELDS = 7;

// As Python's strict decoder has it: no surrogates, nothing longer than need be.
bool is_utf8(string_view text) {
    const auto *at = reinterpret_cast<const uint8_t *>(text.data()), *end = at + text.size();
    while (at < end) {
        const uint8_t first = *at++;
        if (first < 0x80) continue;
        const int more = first >= 0xf0 ? 3 : first >= 0xe0 ? 2 : 1;
        if (first < 0xc2 || first > 0xf4 || end - at < more) return false;
        const uint8_t second = *at;
        if ((first == 0xe0 && second < 0xa0) || (first == 0xed && second > 0x9f) ||
            (first == 0xf0 && second < 0x90) || (first == 0xf4 && second > 0x8f))
            return false;
        for (int i = 0; i < more; i++)
            if ((*at++ & 0xc0) != 0x80) return false;
    }
    return true;
}

void add_hex(std::string &out, unsigned long value) {
    char digits[16];
    int count = 0;
    do digits[count++] = "0123456789abcdef"[value & 15];
    while (value >>= 4);
    while (count) out += digits[--count];
}

// A JSON string, as msgspec writes it.
void add_json(std::string &out, string_view text) {
    out += '"';
    for (const char letter : text) {
        const auto code = uint8_t(letter);
        if (code >= 0x20 && letter != '"' && letter != '\\') {
            out += letter;
            continue;
        }
        out += '\\';
        const char *found = code ? std::strchr("\"\"\\\\\bb\ff\nn\rr\tt", letter) : nullptr;
        if (found) {
            out += found[1];
        } else {
            out += code < 0x10 ? "u000" : "u00";
            add_hex(out, code);
        }
    }
    out += '"';
}

struct Delta {
    string_view request, text;
    uint64_t attempt, prompt, cached, completion;
    std::vector<uint32_t> ids;
};

// `socket` is a file of our own, so that nobody else's gets its number while the chute is open.
// `direct`: all that was sent before is out of the process, so that nothing is overtaken.
struct Chute {
    std::string request, before, behind;
    uint64_t attempt = 0;
    int socket = -1;
    bool direct = false;
    bool used = false, open = false, overtaken = false;
    double heard_s = 0;
    std::string text;
    std::vector<uint32_t> ids;
    int64_t usage[3] = {};
};

// What Python reads after a call.
struct Result {
    const char *out;
    int64_t out_bytes;
    const int64_t *pieces;
    int64_t piece_numbers;
    const int64_t *rest;
    int64_t rest_numbers;
    int64_t end;
    const char *text;
    int64_t text_bytes;
    const uint32_t *ids;
    int64_t id_count;
    int64_t usage[3];
    double heard_s;
};

struct Staged {
    long slot;
    Delta delta;
};

struct Hash : std::hash<string_view> {
    using is_transparent = void;
};

struct Chutes {
    Result result = {};
    const double *bounds;
    long bound_count;
    uint64_t *counts;
    double *total_s;
    std::vector<Chute> all;
    std::vector<long> spare;
    std::unordered_map<std::string, long, Hash, std::equal_to<>> of_request;
    std::vector<Staged> staged;
    std::vector<long> overtaken;
    std::string out, events;
    std::vector<int64_t> pieces, rest;
    uint64_t ahead = 0;  // deltas of the frame that no call has come to
    Chute drained;

    ~Chutes() {
        for (const Chute &chute : all)
            if (chute.socket >= 0) ::close(chute.socket);
    }

    // The delta, where it is nothing but text; nothing where it has more. Fails on what is no delta.
    std::optional<Delta> read(Reader &reader) {
        const uint64_t fields = reader.array();
        if (fields < LEAST_FIELDS || fields > DELTA_FIELDS) reader.failed = true;
        if (reader.failed) return {};
        Delta delta;
        delta.request = reader.text();
        delta.attempt = reader.natural();
        bool plain = reader.natural() == 0;
        delta.text = reader.text();
        const uint64_t ids = reader.array();
        for (uint64_t i = 0; i < ids && !reader.failed; i++) {
            const uint64_t id = reader.natural();
            plain &= id <= UINT32_MAX;
            delta.ids.push_back(uint32_t(id));
        }
        for (uint64_t left = reader.array(); left > 0 && !reader.failed; left--) {
            reader.skip();
            plain = false;
        }
        if (reader.array() != 3) reader.failed = true;
        for (uint64_t *count : {&delta.prompt, &delta.cached, &delta.completion}) {
            *count = reader.natural();
            plain &= *count <= INT64_MAX;
        }
        if (fields > LEAST_FIELDS) {
            plain &= reader.at < reader.end && *reader.at == 0xc0;
            reader.skip();
        }
        if (fields > LEAST_FIELDS + 1)
            for (uint64_t left = reader.array(); left > 0 && !reader.failed; left--) {
                reader.skip();
                plain = false;
            }
        if (reader.failed || !plain || !is_utf8(delta.text)) return {};
        return delta;
    }

    // -1 where nobody waits for it here.
    long slot_of(string_view request, uint64_t attempt) const {
        const auto found = of_request.find(request);
        if (found == of_request.end() || all[found->second].attempt != attempt) return -1;
        return found->second;
    }

    // What has passed of the frame's next deltas, `most` of them at most, or -1 where the frame is
    // no list of deltas from here on.
    long cast(const uint8_t *frame, long size, long start, long most, double now_s) {
        Reader reader{frame + start, frame + size};
        if (start == 0) {
            if (reader.map() != 2 || reader.text() != "type" || reader.text() != "step" ||
                reader.text() != "deltas")
                return -1;
            ahead = reader.array();
        }
        staged.clear();
        rest.clear();
        for (; ahead && most && !reader.failed; ahead--, most--) stage(reader, frame);
        for (const long slot : overtaken) all[slot].overtaken = false;
        const bool good = !reader.failed && (ahead != 0) == (reader.at < reader.end);
        if (good)
            for (const long slot : overtaken) all[slot].open = false;
        overtaken.clear();
        if (!good) return -1;
        out.clear();
        pieces.clear();
        write(now_s);
        send();
        result.out = out.data();
        result.out_bytes = int64_t(out.size());
        result.pieces = pieces.data();
        result.piece_numbers = int64_t(pieces.size());
        result.rest = rest.data();
        result.rest_numbers = int64_t(rest.size());
        result.end = reader.at - frame;
        return long(staged.size());
    }

    // A delta that is not for its chute closes it: whatever comes behind must not overtake it.
    void stage(Reader &reader, const uint8_t *frame) {
        const uint8_t *start = reader.at;
        Reader ahead = reader;
        ahead.array();
        const string_view request = ahead.text();
        const uint64_t attempt = ahead.natural();
        const long slot = ahead.failed ? -1 : slot_of(request, attempt);
        std::optional<Delta> delta = read(reader);
        if (slot >= 0 && delta && all[slot].open && !all[slot].overtaken) {
            staged.push_back({slot, std::move(*delta)});
            return;
        }
        rest.push_back(start - frame);
        rest.push_back(reader.at - frame);
        if (slot >= 0) {
            all[slot].overtaken = true;
            overtaken.push_back(slot);
        }
    }

    // One HTTP chunk for each chute, with an event for each of its deltas.
    void write(double now_s) {
        std::stable_sort(staged.begin(), staged.end(),
                         [](const Staged &a, const Staged &b) { return a.slot < b.slot; });
        for (size_t i = 0; i < staged.size();) {
            const long slot = staged[i].slot;
            events.clear();
            for (; i < staged.size() && staged[i].slot == slot; i++)
                pass(all[slot], staged[i].delta, now_s);
            if (events.empty()) continue;
            const auto start = int64_t(out.size());
            add_hex(out, events.size());
            out += "\r\n";
            out += events;
            out += "\r\n";
            pieces.insert(pieces.end(), {int64_t(slot), start, int64_t(out.size())});
        }
    }

    // What the sockets take at once; what is left of the pieces is for Python to send.
    void send() {
        size_t kept = 0;
        for (size_t i = 0; i < pieces.size(); i += 3) {
            const int64_t slot = pieces[i], end = pieces[i + 2];
            const int64_t start = pieces[i + 1] + push(all[slot], pieces[i + 1], end);
            if (start == end) continue;
            for (const int64_t number : {slot, start, end}) pieces[kept++] = number;
        }
        pieces.resize(kept);
    }

    int64_t push(Chute &chute, int64_t start, int64_t end) {
        if (!chute.direct) return 0;
        ssize_t sent;
        do sent = ::send(chute.socket, &out[start], end - start, MSG_DONTWAIT | MSG_NOSIGNAL);
        while (sent < 0 && errno == EINTR);
        chute.direct = sent == end - start;
        return std::max<ssize_t>(sent, 0);
    }

    void pass(Chute &chute, const Delta &delta, double now_s) {
        const double gap_s = now_s - chute.heard_s;
        counts[std::lower_bound(bounds, bounds + bound_count, gap_s) - bounds]++;
        *total_s += gap_s;
        chute.heard_s = now_s;
        chute.used = true;
        chute.text += delta.text;
        chute.ids.insert(chute.ids.end(), delta.ids.begin(), delta.ids.end());
        chute.usage[0] = int64_t(delta.prompt);
        chute.usage[1] = int64_t(delta.cached);
        chute.usage[2] = int64_t(delta.completion);
        if (delta.text.empty()) return;
        events += chute.before;
        add_json(events, delta.text);
        events += chute.behind;
    }

    long open(string_view request, uint64_t attempt, string_view before, string_view behind,
              double heard_s, int socket) {
        long slot = spare.empty() ? long(all.size()) : spare.back();
        if (!of_request.try_emplace(std::string(request), slot).second) return -1;
        if (spare.empty()) {
            all.emplace_back();
        } else {
            spare.pop_back();
        }
        Chute &chute = all[slot];
        chute.request = request;
        chute.attempt = attempt;
        chute.before = before;
        chute.behind = behind;
        chute.heard_s = heard_s;
        chute.open = true;
        chute.socket = socket < 0 ? -1 : fcntl(socket, F_DUPFD_CLOEXEC, 0);
        return slot;
    }

    void close(long slot) {
        of_request.erase(all[slot].request);
        if (all[slot].socket >= 0) ::close(all[slot].socket);
        all[slot] = Chute{};
        spare.push_back(slot);
    }

    bool drain(long slot) {
        Chute &chute = all[slot];
        if (!chute.used) return false;
        chute.used = false;
        drained.text.swap(chute.text);
        drained.ids.swap(chute.ids);
        chute.text.clear();
        chute.ids.clear();
        result.text = drained.text.data();
        result.text_bytes = int64_t(drained.text.size());
        result.ids = drained.ids.data();
        result.id_count = int64_t(drained.ids.size());
        std::copy_n(chute.usage, 3, result.usage);
        result.heard_s = chute.heard_s;
        return true;
    }
};

}  // namespace

extern "C" {

Chutes *wr_chutes_new(const double *bounds, long bound_count, uint64_t *counts, double *total_s) {
    auto *chutes = new Chutes;
    chutes->bounds = bounds;
    chutes->bound_count = bound_count;
    chutes->counts = counts;
    chutes->total_s = total_s;
    return chutes;
}

void wr_chutes_free(Chutes *chutes) { delete chutes; }

const Result *wr_chutes_result(const Chutes *chutes) { return &chutes->result; }

long wr_chutes_open(Chutes *chutes, const char *request, long request_bytes, uint64_t attempt,
                    const char *before, long before_bytes, const char *behind, long behind_bytes,
                    double heard_s, int socket) {
    return chutes->open({request, size_t(request_bytes)}, attempt, {before, size_t(before_bytes)},
                        {behind, size_t(behind_bytes)}, heard_s, socket);
}

void wr_chutes_direct(Chutes *chutes, long slot) {
    chutes->all[slot].direct = chutes->all[slot].socket >= 0;
}

void wr_chutes_shut(Chutes *chutes, long slot) { chutes->all[slot].open = false; }

void wr_chutes_close(Chutes *chutes, long slot) { chutes->close(slot); }

int wr_chutes_drain(Chutes *chutes, long slot) { return chutes->drain(slot); }

long wr_chutes_cast(Chutes *chutes, const char *frame, long size, long start, long most,
                    double now_s) {
    const auto *bytes = reinterpret_cast<const uint8_t *>(frame);
    return chutes->cast(bytes, size, start, most, now_s);
}

}  // extern "C"
