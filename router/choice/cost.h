// What the pricing of a pool reads and writes: router/choice/sheet.py has the same columns in the same order.

#pragma once

#include <cstdint>

constexpr long TERMS = 15, EVIDENCE = 6;

// What a row of the table says of one replica.
struct Row {
    double context_limit, total_blocks, barred, admits_from_s, load_at_s, digest_at_s, unknown,
        trust, a, b, c, base, per_row, per_context, step_tokens, max_running, failures, unreported,
        backlog_ms, cached_blocks, prompts_seen, prompts_cached, busy, requests, rows, context_tokens,
        unseen_prefill_ms, queued_tokens, free_blocks, prefills_ms[7];
};

struct Ask {
    double now_s, prompt_tokens, output_tokens, block_tokens, deadline_ms, unheard_s, min_match;
};

struct Weights {
    double own_decode, harm, busy, crowd, max_occupancy, lateness, suspect_ms,
        max_ageing_ms, fresh_s, half_life_s, min_idle, some_ms, fetch_margin, reuse_guess, reuse_tokens;
};

// One of the best, and what its price rests on.
struct Line {
    double place, row, terms[TERMS], evidence[EVIDENCE];
};

struct Answer {
    double soonest_ms, least_queued, longest, runner_up;
    Line best[];
};

// One pool's numbers. `there`: leading blocks that each replica holds, `depths`: with those on their way.
// `rows` and `terms` are those of the candidates, `best` has places among them.
struct Sheet {
    const Row *table;
    long n;
    int32_t *there, *depths;
    uint8_t *state;
    double *terms;
    int64_t *rows, *best;
    Answer *answer;
    long keep;
};

// What most requests have nothing of. `asked`: who may be asked at all. Of tiers below the devices the
// leading blocks, by tier and replica, and how fast each gives them, by replica and tier. `startup_ms`:
// what else has to be brought there first.
struct Extras {
    const uint8_t *asked;
    const int32_t *lower;
    const double *speeds;
    long tiers;
    const double *startup_ms;
};

// Fills the sheet's state, rows, terms, best and answer; how many may take it.
long price(const Sheet &sheet, const Ask &ask, const Weights &weights, const Extras &extras);
