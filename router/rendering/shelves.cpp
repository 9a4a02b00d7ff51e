// Texts to token ids, as router/rendering/pieces.py does it, but for texts as they are written in JSON: what is
// known is found without decoding it. router/rendering/shelves.py has the rest.

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "../../kvstore/recent.h"
#include "markers.h"

using std::string;
using std::string_view;

namespace {

constexpr long ENTRY_BYTES = 200;  // what an entry costs beside its text and ids

// Seeded, so that nobody can make many texts meet; an entry's text is compared all the same.
uint64_t hashed(string_view text, uint64_t seed) {
    constexpr uint64_t A = 0xa0761d6478bd642fULL, B = 0xe7037ed1a0b428dbULL;
    const char *at = text.data();
    size_t left = text.size();
    uint64_t one = seed ^ A, two = seed ^ B;
    for (; left >= 32; at += 32, left -= 32) {
        one = folded(load_word(at) ^ one, load_word(at + 8) ^ A);
        two = folded(load_word(at + 16) ^ two, load_word(at + 24) ^ B);
    }
    char rest[32] = {0};
    std::memcpy(rest, at, left);
    one = folded(load_word(rest) ^ one, load_word(rest + 8) ^ A);
    two = folded(load_word(rest + 16) ^ two, load_word(rest + 24) ^ B);
    return folded(one ^ text.size(), two ^ seed);
}

struct Shelf;

struct Entry : Link {
    Shelf *shelf;
    uint64_t hash;
    string text, ids;
    long cost() const { return long(text.size() + ids.size()) + ENTRY_BYTES; }
};

// One tenant's.
struct Shelf : Link {
    string tenant;
    uint64_t seed;
    Link entries;
    long bytes = 0;
};

bool is_letter(unsigned char c) { return unsigned((c | 32) - 'a') < 26; }

// As configs/model/cuts.py has them, of two bytes in UTF-8.
bool is_letter(unsigned char lead, unsigned char next) {
    if ((next & 0xc0) != 0x80) return false;
    const int code = (lead & 0x1f) << 6 | (next & 0x3f);
    return (lead >= 0xc3 && lead <= 0xc9 && code >= 0xc0 && code <= 0x24f && code != 0xd7 && code != 0xf7) ||
           ((lead == 0xd0 || lead == 0xd1) && code >= 0x410 && code <= 0x44f);
}

bool letter_ends(string_view text, size_t end) {
    const unsigned char last = text[end - 1];
    if (last >= 0x80) return end > 1 && is_letter(text[end - 2], last);
    if (!is_letter(last)) return false;
    size_t slashes = 0;  // of an odd number the last one makes an escape of it
    while (slashes < end - 1 && text[end - 2 - slashes] == '\\') slashes++;
    return slashes % 2 == 0;
}

bool letter_starts(string_view text, size_t at) {
    if (at >= text.size()) return false;
    const unsigned char first = text[at];
    return first < 0x80 ? is_letter(first) : at + 1 < text.size() && is_letter(first, text[at + 1]);
}

// What a prompt is made of: `size` bytes of ids or of written text at `at`, or the content of that number.
struct Part {
    const char *at;
    int64_t size;
    int64_t kind, number;
};
enum { IDS, TEXT, CONTENT };

struct Turn {
    const char *ids;
    int64_t size;
};

struct Missing {
    const char *at;
    int64_t size;
};

struct Result {
    const char *ids;
    int64_t ids_bytes;
    const Missing *missing;
};

struct Piece {
    string_view ids;
    long missing;  // its number, -1 where its ids are known
};

struct Large {
    string_view text;
    size_t first, behind;
};

struct Shelves {
    Result result{};
    long most_bytes, most_tenant_bytes, bytes = 0;
    size_t large_bytes, small_bytes, tail_bytes;  // 0: nothing may be cut
    bool digits;                                  // it may behind each of them
    size_t many;                                  // pieces: of more the whole is kept, too
    uint64_t seed;
    Markers markers;
    std::unordered_map<uint64_t, Entry *> entries;
    std::unordered_map<string, Shelf *> shelves;
    Link oldest;

    // Of the prompt that is being made.
    Shelf *shelf = nullptr;
    string written, out;
    std::vector<Piece> pieces;
    std::vector<Missing> missing;
    std::vector<Large> larges;

    ~Shelves() {
        for (auto &[_, entry] : entries) delete entry;
        for (auto &[_, own] : shelves) delete own;
    }

    Shelf &shelf_of(string_view tenant) {
        Shelf *&own = shelves[string(tenant)];
        if (!own) {
            own = new Shelf;
            own->tenant = tenant;
            own->seed = hashed(tenant, seed);
            own->put_before(oldest);
        } else {
            own->move_before(oldest);
        }
        return *own;
    }

    Entry *find(string_view text) {
        const auto at = entries.find(hashed(text, shelf->seed));
        if (at == entries.end() || at->second->shelf != shelf || at->second->text != text) return nullptr;
        at->second->move_before(shelf->entries);
        return at->second;
    }

    void drop(Entry *entry) {
        Shelf *own = entry->shelf;
        own->bytes -= entry->cost();
        bytes -= entry->cost();
        entry->leave();
        entries.erase(entry->hash);
        delete entry;
    }

    // Of this shelf the oldest entries leave, then of the one that was away longest.
    void put(string_view text, string_view ids) {
        if (long(text.size() + ids.size()) + ENTRY_BYTES > most_tenant_bytes) return;
        const uint64_t hash = hashed(text, shelf->seed);
        if (const auto at = entries.find(hash); at != entries.end()) drop(at->second);
        Entry *entry = new Entry;
        entry->shelf = shelf, entry->hash = hash, entry->text = text, entry->ids = ids;
        entry->put_before(shelf->entries);
        entries[hash] = entry;
        shelf->bytes += entry->cost();
        bytes += entry->cost();
        while (shelf->bytes > most_tenant_bytes) drop(static_cast<Entry *>(shelf->entries.after));
        while (bytes > most_bytes) {
            Shelf *longest_away = static_cast<Shelf *>(oldest.after);
            if (longest_away->entries.after != &longest_away->entries)
                drop(static_cast<Entry *>(longest_away->entries.after));
            if (longest_away != shelf && longest_away->entries.after == &longest_away->entries) {
                longest_away->leave();
                shelves.erase(longest_away->tenant);
                delete longest_away;
            }
        }
    }

    void miss(string_view text) {
        pieces.push_back({{}, long(missing.size())});
        missing.push_back({text.data(), int64_t(text.size())});
    }

    // The first of the pieces of about so many bytes that a text can be cut into.
    string_view first_piece(string_view text, size_t bytes) const {
        for (size_t at = bytes; at < text.size(); at++) {
            const bool behind_digit = digits && unsigned(text[at - 1] - '0') < 10;
            const bool behind_word = text[at] == ' ' && letter_ends(text, at) && letter_starts(text, at + 1);
            if (behind_digit || behind_word) return text.substr(0, at);
        }
        return text;
    }

    // The pieces of a text, as Pieces._look_up of the twin.
    void look_up(string_view text) {
        if (text.empty()) return;
        if (!large_bytes) return look_up_whole(text);
        while (!text.empty()) {
            string_view whole = first_piece(text, large_bytes);
            text.remove_prefix(whole.size());
            if (Entry *known = find(whole)) {
                pieces.push_back({known->ids, -1});
                continue;
            }
            const size_t first = pieces.size();
            for (string_view rest = whole; !rest.empty();) {
                const string_view small = first_piece(rest, small_bytes);
                rest.remove_prefix(small.size());
                if (small.size() < whole.size())
                    if (Entry *known = find(small)) {
                        pieces.push_back({known->ids, -1});
                        continue;
                    }
                if (small.size() < small_bytes) look_up_bits(small);
                else miss(small);
            }
            if (pieces.size() > first + many) larges.push_back({whole, first, pieces.size()});
        }
    }

    void look_up_bits(string_view small) {
        for (string_view rest = small; !rest.empty();) {
            const string_view bit = first_piece(rest, tail_bytes);
            rest.remove_prefix(bit.size());
            Entry *known = bit.size() < small.size() ? find(bit) : nullptr;
            if (known) pieces.push_back({known->ids, -1});
            else look_up_words(bit);
        }
    }

    void look_up_words(string_view bit) {
        while (!bit.empty()) {
            const string_view word = first_piece(bit, 1);
            bit.remove_prefix(word.size());
            look_up_whole(word);
        }
    }

    void look_up_whole(string_view text) {
        if (Entry *known = find(text)) pieces.push_back({known->ids, -1});
        else miss(text);
    }

    long join(string_view tenant, const Part *parts, long count, const char *body, const int64_t *spans,
              const Turn *turns) {
        auto content = [&](long number) {
            return string_view(body + spans[2 * number], spans[2 * number + 1] - spans[2 * number]);
        };
        size_t most = 0;
        for (const Part *part = parts; part < parts + count; part++) {
            if (part->kind == CONTENT && markers.may_be_in(content(part->number))) return -1;
            most += part->kind == CONTENT ? content(part->number).size() : part->size;
        }
        shelf = &shelf_of(tenant);
        pieces.clear(), missing.clear(), larges.clear(), written.clear();
        written.reserve(most);  // views of it must stay
        size_t start = 0;
        auto text_ends = [&] {
            look_up(string_view(written).substr(start));
            start = written.size();
        };
        for (const Part *part = parts; part < parts + count; part++) {
            const bool is_turn = part->kind == CONTENT && turns && turns[part->number].ids;
            if (part->kind == TEXT) {
                written.append(part->at, part->size);
            } else if (part->kind == CONTENT && !is_turn) {
                written.append(content(part->number));
            } else {
                text_ends();
                if (is_turn) pieces.push_back({{turns[part->number].ids, size_t(turns[part->number].size)}, -1});
                else pieces.push_back({{part->at, size_t(part->size)}, -1});
            }
        }
        text_ends();
        result.missing = missing.data();
        if (missing.empty()) finish({});
        return long(missing.size());
    }

    // What was missing, back to back.
    void fill(const char *ids, const int64_t *sizes) {
        std::vector<string_view> fresh;
        for (size_t at = 0; at < missing.size(); ids += sizes[at++]) fresh.push_back({ids, size_t(sizes[at])});
        for (Piece &piece : pieces)
            if (piece.missing >= 0) piece.ids = fresh[piece.missing];
        finish(fresh);
    }

    // Nothing is put on a shelf before all of it is assembled: what is known is only looked at.
    void finish(const std::vector<string_view> &fresh) {
        assemble();
        std::vector<string> whole;
        for (const Large &large : larges) {
            string &own = whole.emplace_back();
            for (size_t at = large.first; at < large.behind; at++) own += pieces[at].ids;
        }
        for (size_t at = 0; at < missing.size(); at++) put({missing[at].at, size_t(missing[at].size)}, fresh[at]);
        for (size_t at = 0; at < larges.size(); at++) put(larges[at].text, whole[at]);
    }

    void assemble() {
        out.clear();
        for (const Piece &piece : pieces) out.append(piece.ids);
        result.ids = out.data();
        result.ids_bytes = int64_t(out.size());
    }
};

}  // namespace

extern "C" {

void *wr_shelves_new(long most_bytes, long most_tenant_bytes, long large, long small, long tail, long digits,
                     long many, uint64_t seed) {
    Shelves *shelves = new Shelves;
    shelves->most_bytes = most_bytes, shelves->most_tenant_bytes = most_tenant_bytes;
    shelves->large_bytes = large, shelves->small_bytes = small, shelves->tail_bytes = tail;
    shelves->digits = digits, shelves->many = many, shelves->seed = seed;
    return shelves;
}

void wr_shelves_free(Shelves *shelves) { delete shelves; }

Result *wr_shelves_result(Shelves *shelves) { return &shelves->result; }

long wr_shelves_bytes(Shelves *shelves) { return shelves->bytes; }

void wr_shelves_mark(Shelves *shelves, const char *marker, long size) {
    shelves->markers.add({marker, size_t(size)});
}

// How many texts are missing, of which `fill` is told the ids before anything else happens; -1: there may be a
// marker among the contents.
long wr_shelves_join(Shelves *shelves, const char *tenant, long tenant_bytes, const Part *parts, long count,
                     const char *body, const int64_t *spans, const Turn *turns) {
    return shelves->join({tenant, size_t(tenant_bytes)}, parts, count, body, spans, turns);
}

void wr_shelves_fill(Shelves *shelves, const char *ids, const int64_t *sizes) { shelves->fill(ids, sizes); }

void wr_shelves_put(Shelves *shelves, const char *tenant, long tenant_bytes, const char *text, long text_bytes,
                    const char *ids, long ids_bytes) {
    shelves->shelf = &shelves->shelf_of({tenant, size_t(tenant_bytes)});
    shelves->put({text, size_t(text_bytes)}, {ids, size_t(ids_bytes)});
}

}  // extern "C"
