// What a thread will read next of the pages, fetched into its cache an even distance ahead.
//
// Decoding reads all of its pages once, in pieces too short for the CPU to see where they lead to.
#pragma once

#include <algorithm>

#include "vec.h"

namespace ahead {

constexpr long STRETCH = 16;  // positions side by side; a page holds whole stretches

// The pages of a batch in which each row has one new token, and how its work is cut: an item is
// `item_heads` heads of keys and values of one row.
struct Pages {
    const bf16 *keys, *values;
    const int32_t *tables, *contexts;
    long rows, table_width, block_tokens, kv_heads, dim, item_heads, span;

    long step() const { return kv_heads * dim; }
    long parts() const { return kv_heads / item_heads; }
    long items() const { return rows * parts(); }

    // Where in keys or values the position of a row lies.
    long offset(long row, long position) const {
        long block = tables[row * table_width + position / block_tokens];
        return (block * block_tokens + position % block_tokens) * step();
    }
};

// Goes through the items as their work does: a span's keys, then its values, as they lie in a page.
class Ahead {
   public:
    explicit Ahead(const Pages& pages)
        : pages_(pages),
          width_(pages.item_heads * pages.dim),
          run_(width_ == pages.step() ? STRETCH * width_ : width_) {}

    // Work on an item begins. Whoever goes from one to the next finds the cursor well ahead.
    void begin(long item) {
        if (item == expected_) {
            lead_ -= size_;
        } else {
            lead_ = 0;
            turn_to(item);
        }
        expected_ = item + 1;
        size_ = lines_of(item);
        some(DISTANCE - lead_);
    }

    // So many lines, if the cursor is not too far ahead.
    void some(long lines) {
        lines = std::min(lines, size_ + DISTANCE - lead_);
        while (lines > 0 && at_) {
            long count = std::min(lines, (run_ - column_ + LINE - 1) / LINE);
            const bf16* from = at_ + column_;
            for (long i = 0; i < count; ++i) __builtin_prefetch(from + i * LINE, 0, SECOND_LEVEL);
            lines -= count;
            lead_ += count;
            column_ += count * LINE;
            if (column_ >= run_) next_run();
        }
    }

   private:
    static constexpr long LINE = 64 / sizeof(bf16);
    static constexpr long DISTANCE = 1024;  // lines, which the second-level cache holds easily

    long lines_of(long item) const {
        long positions = (pages_.contexts[item / pages_.parts()] + STRETCH - 1) / STRETCH * STRETCH;
        return 2 * positions / (run_ / width_) * ((run_ + LINE - 1) / LINE);
    }

    void turn_to(long item) {
        item_ = item;
        position_ = base_ = 0;
        values_ = false;
        if (item < pages_.items()) {
            context_ = pages_.contexts[item / pages_.parts()];
            open();
        } else {
            at_ = nullptr;
        }
    }

    void open() {
        at_ = (values_ ? pages_.values : pages_.keys) +
              pages_.offset(item_ / pages_.parts(), position_) + item_ % pages_.parts() * width_;
        column_ = 0;
    }

    void next_run() {
        column_ = 0;
        at_ += pages_.step();
        position_ += run_ / width_;
        if (position_ % STRETCH) return;
        if (position_ >= std::min(base_ + pages_.span, context_)) {
            if (values_) base_ = position_;
            values_ = !values_;
            position_ = base_;
            if (base_ >= context_) return turn_to(item_ + 1);
        }
        open();
    }

    const Pages& pages_;
    const long width_, run_;  // what an item has of a position, and what of that lies side by side
    const bf16* at_ = nullptr;
    long expected_ = -1, lead_ = 0, size_ = 0;
    long item_ = 0, column_ = 0, position_ = 0, base_ = 0, context_ = 0;
    bool values_ = false;
};

}  // namespace ahead
