// What one request costs on each replica: router/choice/cost.py has the twin in NumPy, which says what the
// terms mean. The order of the operations is the same in both, so that the results are equal.

#include <bit>
#include <cmath>

#include "cost.h"

namespace {

double above(double low, double x) { return x > low ? x : low; }
double below(double high, double x) { return x < high ? x : high; }

double prefill_ms(const Row &r, double p, double q) {
    return above(0.0, r.a + r.b * q + r.c * (p * q + q * (q + 1) / 2));
}

double decode_ms(const Row &r, double rows, double context) {
    return above(0.0, r.base + r.per_row * rows + r.per_context * context);
}

double queue_ms(const Row &r, const Ask &ask, const Weights &weights) {
    const double age_ms = below(1e3 * (ask.now_s - r.load_at_s), weights.max_ageing_ms);
    return above(0.0, r.backlog_ms - age_ms) + r.unseen_prefill_ms;
}

struct Ahead { double share, overtaken; };

// Shortest first: what of the backlog comes before a prefill of that size, and how many come behind.
Ahead ahead_of(const Row &r, double own_ms, const Weights &w) {
    // The class of its size: of the binary exponent.
    const int size = own_ms < 1.0 ? 0 : (int(std::bit_cast<uint64_t>(own_ms) >> 52) - 1023) / 2;
    double total = 0.0, smaller = 0.0, overtaken = 0.0, per_middle_ms = 0.5;
    for (int i = 0; i < 7; i++, per_middle_ms *= 0.25) {
        const double known = above(0.0, r.prefills_ms[i]);
        total += known;
        if (i <= size) smaller += known;
        else overtaken += known * per_middle_ms;
    }
    return {total > w.some_ms ? smaller / total : 1.0, overtaken};
}

// Blocks of a prompt that can be found: its last token is computed, and so the block that it is in.
double most_blocks(const Ask &ask) { return std::floor((ask.prompt_tokens - 1) / ask.block_tokens); }

// Runs that are fetched move `reach` on.
double transfer_ms(const Row &r, const Ask &ask, const Weights &weights, const Extras &lower, long n, long i,
                   double &reach) {
    const double most = most_blocks(ask);
    double sum = 0.0;
    for (long tier = 0; tier < lower.tiers; tier++) {
        const double count = below(most, lower.lower[tier * n + i]) - reach;
        if (!(count > 0)) continue;
        const double *speed = lower.speeds + 2 * (i * lower.tiers + tier);
        const double fetch_ms = speed[0] + count * speed[1];
        const double done = reach * ask.block_tokens, fresh = count * ask.block_tokens;
        const double compute_ms = r.b * fresh + r.c * (done * fresh + fresh * (fresh + 1) / 2);
        if (!(fetch_ms <= weights.fetch_margin * compute_ms)) continue;
        reach += count;
        sum += fetch_ms;
    }
    return sum;
}

enum { FIT, NOT_ASKED, TOO_LONG, BARRED, BREAKER, UNHEARD };

// Who may take it. While some are heard, who is not may well hang; where nobody is, it is the bus.
long filter(const Row *table, long n, const Ask &ask, const uint8_t *asked, uint8_t *state) {
    const double needed = std::ceil((ask.prompt_tokens + 1) / ask.block_tokens);
    long fit = 0, heard = 0;
    for (long i = 0; i < n; i++) {
        const Row &r = table[i];
        if (asked && !asked[i]) state[i] = NOT_ASKED;
        else if (ask.prompt_tokens >= r.context_limit || needed > r.total_blocks) state[i] = TOO_LONG;
        else if (r.barred) state[i] = BARRED;
        else if (ask.now_s < r.admits_from_s) state[i] = BREAKER;
        else {
            state[i] = FIT;
            fit++;
            heard += !(ask.now_s - r.load_at_s > ask.unheard_s);
        }
    }
    if (!heard || heard == fit) return fit;
    for (long i = 0; i < n; i++)
        if (state[i] == FIT && ask.now_s - table[i].load_at_s > ask.unheard_s) state[i] = UNHEARD;
    return heard;
}

// Places of the `keep` best scores, best first, ties in order: most never get past the worst kept.
void find_best(const double *terms, long width, long fit, int64_t *best, long keep) {
    long kept = 0;
    for (long place = 0; place < fit; place++) {
        const double score = terms[place * width];
        if (kept == keep && !(score > terms[best[kept - 1] * width])) continue;
        long at = kept < keep ? kept++ : keep - 1;
        for (; at > 0 && score > terms[best[at - 1] * width]; at--) best[at] = best[at - 1];
        best[at] = place;
    }
}

// One of the best, with what it rests on.
Line line_of(const Sheet &sheet, long place, long row) {
    const Row &r = sheet.table[row];
    Line line{double(place), double(row)};
    for (long at = 0; at < TERMS; at++) line.terms[at] = sheet.terms[place * TERMS + at];
    const double evidence[] = {r.trust, r.digest_at_s, r.load_at_s, r.unknown, r.queued_tokens,
                               double(sheet.there[row])};
    for (long at = 0; at < EVIDENCE; at++) line.evidence[at] = evidence[at];
    return line;
}

void tell_best(const Sheet &sheet, long fit) {
    const long kept = fit < sheet.keep ? fit : sheet.keep;
    sheet.answer->runner_up = kept > 1 ? sheet.terms[sheet.best[1] * TERMS] : -INFINITY;
    for (long at = 0; at < kept; at++)
        sheet.answer->best[at] = line_of(sheet, sheet.best[at], sheet.rows[sheet.best[at]]);
}

}  // namespace

long price(const Sheet &sheet, const Ask &ask, const Weights &weights, const Extras &extras) {
    const Row *table = sheet.table;
    const Weights *w = &weights;
    const long n = sheet.n;
    const int32_t *depths = sheet.depths, *there = sheet.there;
    const uint8_t *state = sheet.state;
    const double *startup_ms = extras.startup_ms;
    const long fit = filter(table, n, ask, extras.asked, sheet.state);
    double idle_ms = INFINITY, crowd_ms = INFINITY, busy = 0.0, seen = 0.0, cached_of = 0.0;
    for (long i = 0; i < n; i++) {
        if (state[i] != FIT) continue;
        idle_ms = below(idle_ms, prefill_ms(table[i], 0, ask.prompt_tokens));
        crowd_ms = below(crowd_ms, queue_ms(table[i], ask, *w));
        busy += table[i].busy;
        seen += table[i].prompts_seen;
        cached_of += table[i].prompts_cached;
    }
    const double reused =
        below(1.0, (cached_of + w->reuse_guess * w->reuse_tokens) / (seen + w->reuse_tokens));
    busy /= above(1, fit);
    const double steady = w->busy * busy * busy / above(w->min_idle, 1.0 - busy);
    int64_t *row_of = sheet.rows;
    double *out = sheet.terms, soonest_ms = INFINITY, least_queued = INFINITY, longest = 0.0;
    const double most = most_blocks(ask);
    const double blocks = std::ceil((ask.prompt_tokens + ask.output_tokens) / ask.block_tokens);
    for (long i = 0; i < n; i++) {
        if (state[i] != FIT) continue;
        const Row &r = table[i];
        // Leading blocks on the device, and with those that a transfer brings there.
        double overlap = depths[i], reach = overlap;
        double moving_ms = transfer_ms(r, ask, *w, extras, n, i, reach);
        double cached = below(most, reach) * ask.block_tokens;
        if (cached < ask.min_match) cached = overlap = reach = moving_ms = 0.0;
        if (startup_ms) moving_ms += startup_ms[i];
        const double cold_ms = prefill_ms(r, 0, ask.prompt_tokens);
        const double warm_ms = below(cold_ms, prefill_ms(r, cached, ask.prompt_tokens - cached));
        const double stale_s = above(0.0, ask.now_s - r.digest_at_s - w->fresh_s);
        const double credit =
            r.unknown || !stale_s ? r.trust : r.trust * std::exp2(-stale_s / w->half_life_s);
        const double saved_ms = credit * (cold_ms - warm_ms), own_ms = cold_ms - saved_ms;
        const Ahead before = depths[i] > there[i] ? Ahead{1.0, 0.0} : ahead_of(r, own_ms, *w);
        const double queued_ms = queue_ms(r, ask, *w) * before.share;
        double mixing_ms = 0.0;
        if (r.rows > 0) {
            const double new_tokens = ask.prompt_tokens - cached;
            mixing_ms = std::ceil((r.queued_tokens * before.share + new_tokens) / r.step_tokens) *
                        above(0.0, r.per_row * r.rows + r.per_context * r.context_tokens);
        }
        const double ttft_ms = queued_ms + own_ms + moving_ms + mixing_ms;
        const double needed = blocks - below(overlap, std::floor(cached / ask.block_tokens));
        const double alone = decode_ms(r, 1, ask.prompt_tokens);
        const double shared =
            decode_ms(r, r.requests + 1, r.context_tokens + ask.prompt_tokens);
        const double decode_share_ms =
            mixing_ms + w->own_decode * ask.output_tokens * above(0.0, shared - alone);
        const double crowding = cold_ms > 0 ? w->crowd * crowd_ms / cold_ms : 0.0;
        const double occupancy = below(w->max_occupancy, steady + crowding);
        const double harm_ms = own_ms * (occupancy + before.overtaken + w->harm * above(0.0, r.rows));
        const double free = above(0.0, r.free_blocks);
        double eviction_ms = 0.0;
        if (!r.unreported && needed > 0) {
            const double full = 1.0 - below(1.0, free / above(1.0, r.total_blocks));
            const double evicted =
                below(r.cached_blocks, above(needed - free, needed * (full * full)));
            eviction_ms = reused * r.b * evicted * ask.block_tokens;
        }
        const double slots = above(1.0, r.max_running);
        const double ahead = above(0.0, r.requests + 1 - slots);
        const double step_ms = decode_ms(r, below(slots, r.requests), r.context_tokens);
        const double lacking = above(0.0, needed - free - r.cached_blocks);
        const bool suspect =
            r.unreported || r.failures || ask.now_s - r.load_at_s > ask.unheard_s;
        const double overload_ms = ahead / slots * ask.output_tokens * step_ms +
                                   2.0 * r.b * lacking * ask.block_tokens +
                                   (suspect ? w->suspect_ms * above(1.0, r.failures) : 0.0);
        const double lateness_ms = w->lateness * above(0.0, ttft_ms - ask.deadline_ms);
        const double cost_ms = (queued_ms + own_ms + moving_ms + decode_share_ms + harm_ms) +
                               (eviction_ms + overload_ms + lateness_ms);
        const double terms[] = {idle_ms - cost_ms, saved_ms, queued_ms, own_ms, moving_ms,
                                decode_share_ms, harm_ms, eviction_ms, overload_ms, lateness_ms,
                                ttft_ms, reach, cached, needed, credit * cached};
        static_assert(sizeof terms == TERMS * sizeof(double));
        for (double term : terms) *out++ = term;
        *row_of++ = i;
        soonest_ms = below(soonest_ms, ttft_ms);
        least_queued = below(least_queued, r.queued_tokens);
        longest = above(longest, reach);
    }
    if (!fit) return fit;
    find_best(sheet.terms, TERMS, fit, sheet.best, sheet.keep);
    Answer &answer = *sheet.answer;
    answer.soonest_ms = soonest_ms;
    answer.least_queued = least_queued;
    answer.longest = longest;
    tell_best(sheet, fit);
    return fit;
}
