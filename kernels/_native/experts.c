// Routing, and the chosen experts of a few tokens.

#include "kernels.h"

// Where the largest of n numbers is, the first of equal ones; 0 where none is a number.
static i64 first_largest(const float *line, i64 n) {
    v16 most16 = splat(-INFINITY);
    i32x16 where = {};
    i64 i = 0;
    for (; i + LANES <= n; i += LANES) {
        v16 x = load(line + i);
        i32x16 larger = x > most16;
        most16 = pick(larger, x, most16);
        where = (((i32x16){} + (int32_t)i) & larger) | (where & ~larger);
    }
    float most = -INFINITY;
    i64 found = 0;
    for (int j = 0; j < LANES; j++)
        if (most16[j] > most || (most16[j] == most && most > -INFINITY && where[j] + j < found))
            most = most16[j], found = where[j] + j;
    for (; i < n; i++)
        if (line[i] > most) most = line[i], found = i;
    return found;
}

// chosen[r] = where row r of logits is largest.
void greedy(const float *logits, i64 row_stride, i64 rows, i64 n, i64 *chosen) {
    for (i64 r = 0; r < rows; r++) chosen[r] = first_largest(logits + r * row_stride, n);
}

// The best `k` of each row of logits, best first, lower id at ties; weights are a softmax over them, or (not
// renormalised) their shares of the softmax over all.
void route(const float *logits, i64 row_stride, i64 rows, i64 experts, i64 k, int renormalise, float *weights, i64 *chosen) {
    float scratch[experts];
    for (i64 r = 0; r < rows; r++) {
        const float *line = logits + r * row_stride;
        memcpy(scratch, line, sizeof scratch);
        float total = 0, most = 0;
        for (i64 j = 0; j < k; j++) {
            i64 best = first_largest(scratch, experts);
            if (j == 0) most = scratch[best];
            chosen[r * k + j] = best;
            weights[r * k + j] = exp1(scratch[best] - most);
            total += weights[r * k + j];
            scratch[best] = -INFINITY;
        }
        if (!renormalise) {
            total = 0;
            for (i64 e = 0; e < experts; e++) total += exp1(line[e] - most);
        }
        for (i64 j = 0; j < k; j++) weights[r * k + j] /= total;
    }
}

static void activate(float *both, i64 inner, float limit, float alpha, float weight, float *out) {
    const float *gate = both, *up = both + inner;
    if (limit == 0)
        for (i64 i = 0; i < inner; i++) out[i] = gate[i] * sigmoid1(gate[i]) * up[i] * weight;
    else
        for (i64 i = 0; i < inner; i++) {
            float g = gate[i] > limit ? limit : gate[i];
            float u = up[i] > limit ? limit : up[i] < -limit ? -limit : up[i];
            out[i] = (u + 1.0f) * g * sigmoid1(alpha * g) * weight;
        }
}

static void one_expert(const bank_t *bank, i64 e, int rows, const float **x, const float *weights, float **out) {
    i64 hidden = bank->hidden, inner = bank->inner;
    float both[ROWS][2 * inner], held[ROWS][inner];
    float *to[ROWS];
    const float *from[ROWS];
    for (int r = 0; r < rows; r++) {
        if (bank->gate_up_bias)
            memcpy(both[r], bank->gate_up_bias + e * 2 * inner, sizeof both[r]);
        else
            memset(both[r], 0, sizeof both[r]);
        to[r] = both[r];
        from[r] = held[r];
    }
    few_rows_weights(rows, x, hidden, bank->gate_up, e * hidden * 2 * inner, 2 * inner, to, bank->half);
    for (int r = 0; r < rows; r++) {
        activate(both[r], inner, bank->limit, bank->alpha, weights[r], held[r]);
        if (bank->down_bias)
            for (i64 i = 0; i < hidden; i++) out[r][i] += weights[r] * bank->down_bias[e * hidden + i];
    }
    few_rows_weights(rows, from, inner, bank->down, e * inner * hidden, hidden, out, bank->half);
}

// out[rows][hidden] (zeroed here) = weighted sum over the k chosen experts of each row; experts in order of id.
void experts(const bank_t *bank, const float *x, i64 rows, i64 k, const float *weights, const i64 *chosen, float *out) {
    i64 pairs = rows * k;
    i64 first[bank->experts + 1];
    int32_t order[pairs];
    memset(first, 0, sizeof first);
    for (i64 p = 0; p < pairs; p++) first[chosen[p] + 1]++;
    for (i64 e = 0; e < bank->experts; e++) first[e + 1] += first[e];
    i64 next[bank->experts];
    memcpy(next, first, sizeof next);
    for (i64 p = 0; p < pairs; p++) order[next[chosen[p]]++] = (int32_t)p;
    memset(out, 0, sizeof(float) * rows * bank->hidden);
    for (i64 e = 0; e < bank->experts; e++)
        for (i64 start = first[e]; start < first[e + 1]; start += ROWS) {
            int count = first[e + 1] - start < ROWS ? (int)(first[e + 1] - start) : ROWS;
            const float *from[ROWS];
            float *to[ROWS], share[ROWS];
            for (int r = 0; r < count; r++) {
                i64 pair = order[start + r], row = pair / k;
                from[r] = x + row * bank->hidden;
                to[r] = out + row * bank->hidden;
                share[r] = weights[pair];
            }
            one_expert(bank, e, count, from, share, to);
        }
}
