// The spellings of special tokens, looked for in texts as they are written in JSON.

#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

// Anybody writes these texts: a place costs a look into a table, and where that says nothing a search, however
// many markers there are.
class Markers {
  public:
    // Of two bytes at least, none of which JSON must escape.
    void add(std::string_view marker) {
        if (std::find(firsts.begin(), firsts.end(), marker[0]) == firsts.end()) firsts.push_back(marker[0]);
        may_follow[byte(marker[1])] = true;
        for (size_t at = 1; at < marker.size(); at++) {
            may_end[byte(marker[at])] = true;
            tails.emplace(marker.substr(at));
        }
        has_slash |= marker.find('/') != std::string_view::npos;
        longest = std::max(longest, marker.size());
        for (const std::string &known : sorted)
            if (marker.starts_with(known)) return;
        std::erase_if(sorted, [&](std::string_view known) { return known.starts_with(marker); });
        sorted.insert(std::upper_bound(sorted.begin(), sorted.end(), marker), std::string(marker));
    }

    // Whether a text may hold a marker, or complete one with what stands around it.
    bool may_be_in(std::string_view text) const {
        if (text.empty() || !longest) return false;
        const bool slashed = has_slash && is_slashed(text);
        for (const char first : firsts)
            for (size_t at = text.find(first); at != std::string_view::npos; at = text.find(first, at + 1)) {
                const std::string_view rest = text.substr(at, longest);
                if (begins(rest) || (slashed && is_slashed(rest))) return true;
            }
        if (slashed && is_slashed(text.substr(0, longest + 1))) return true;
        if (!may_end[byte(text[0])]) return false;
        for (size_t size = 1; size < longest && size <= text.size(); size++)
            if (tails.count(std::string(text.substr(0, size)))) return true;
        return false;
    }

  private:
    static unsigned char byte(char letter) { return static_cast<unsigned char>(letter); }

    // Whether it holds a byte that JSON may write in two ways in the way of these two.
    static bool is_slashed(std::string_view text) { return text.find("\\/") != std::string_view::npos; }

    // Whether a marker stands at the start of what is left of a text, or runs out of it.
    bool begins(std::string_view rest) const {
        if (rest.size() > 1 && !may_follow[byte(rest[1])]) return false;
        const auto behind = std::upper_bound(sorted.begin(), sorted.end(), rest);
        // Of those that are not behind it only the last one can be its beginning: none begins with another one.
        if (behind != sorted.begin() && rest.starts_with(behind[-1])) return true;
        return behind != sorted.end() && behind->starts_with(rest);
    }

    std::vector<std::string> sorted;  // those that begin with none of the others
    std::vector<char> firsts;
    std::unordered_set<std::string> tails;
    bool may_follow[256] = {false}, may_end[256] = {false}, has_slash = false;
    size_t longest = 0;
};
