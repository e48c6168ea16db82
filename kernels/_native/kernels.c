// Small float32 kernels for the CPU: what a decode step does between its matrix products.
// Every function is the twin of one in kernels/_reference; pointers and strides (in elements) come from torch tensors.

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef int64_t i64;
typedef float v16 __attribute__((vector_size(64), aligned(4), may_alias));

#define LANES 16
#define WIDE 64  // columns that a block keeps in registers: four vectors
#define ROWS 6   // rows that share one pass over a weight matrix

static inline v16 load(const float *p) { return *(const v16 *)p; }
static inline void store(float *p, v16 x) { *(v16 *)p = x; }
static inline v16 splat(float x) { return x - (v16){}; }

static inline float sum16(v16 x) {
    typedef float v8 __attribute__((vector_size(32)));
    typedef float v4 __attribute__((vector_size(16)));
    union { v16 all; v8 half[2]; } a = {x};
    union { v8 all; v4 half[2]; } b = {a.half[0] + a.half[1]};
    v4 c = b.half[0] + b.half[1];
    return (c[0] + c[1]) + (c[2] + c[3]);
}

// exp for any finite x: 2^n * p(r) with r in [-ln2/2, ln2/2]; relative error below 2e-7.
static inline float exp1(float x) {
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    float n = __builtin_rintf(x * 1.44269504f);
    float r = __builtin_fmaf(n, -0.693359375f, x);
    r = __builtin_fmaf(n, 2.12194440e-4f, r);
    float p = 1.9875691500e-4f;
    p = __builtin_fmaf(p, r, 1.3981999507e-3f);
    p = __builtin_fmaf(p, r, 8.3334519073e-3f);
    p = __builtin_fmaf(p, r, 4.1665795894e-2f);
    p = __builtin_fmaf(p, r, 1.6666665459e-1f);
    p = __builtin_fmaf(p, r, 5.0000001201e-1f);
    p = __builtin_fmaf(p, r * r, r) + 1.0f;
    union { int32_t i; float f; } scale = {((int32_t)n + 127) << 23};
    return p * scale.f;
}

static inline float sigmoid1(float x) { return 1.0f / (1.0f + exp1(-x)); }

static float dot(const float *a, const float *b, i64 n) {
    v16 total[2] = {};
    i64 i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES) {
        total[0] += load(a + i) * load(b + i);
        total[1] += load(a + i + LANES) * load(b + i + LANES);
    }
    if (i + LANES <= n) {
        total[0] += load(a + i) * load(b + i);
        i += LANES;
    }
    float rest = 0;
    for (; i < n; i++) rest += a[i] * b[i];
    return sum16(total[0] + total[1]) + rest;
}

// ---- products of a few rows: c[r][0..columns) += a[r][0..depth) * b[depth][columns]; the rows of a and c lie behind
// pointers, those of b a stride apart

static inline __attribute__((always_inline)) void block(
    int rows, const float **a, i64 depth, const float *b, i64 stride, float **c, i64 column) {
    v16 total[ROWS][4];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < 4; v++) total[r][v] = load(c[r] + column + v * LANES);
    for (i64 d = 0; d < depth; d++) {
        const float *line = b + d * stride + column;
        v16 w0 = load(line), w1 = load(line + 16), w2 = load(line + 32), w3 = load(line + 48);
        for (int r = 0; r < rows; r++) {
            v16 x = splat(a[r][d]);
            total[r][0] += x * w0;
            total[r][1] += x * w1;
            total[r][2] += x * w2;
            total[r][3] += x * w3;
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < 4; v++) store(c[r] + column + v * LANES, total[r][v]);
}

static void few_rows(int rows, const float **a, i64 depth, const float *b, i64 stride, i64 columns, float **c) {
    i64 column = 0;
    for (; column + WIDE <= columns; column += WIDE) {
        switch (rows) {
        case 1: block(1, a, depth, b, stride, c, column); break;
        case 2: block(2, a, depth, b, stride, c, column); break;
        case 3: block(3, a, depth, b, stride, c, column); break;
        case 4: block(4, a, depth, b, stride, c, column); break;
        case 5: block(5, a, depth, b, stride, c, column); break;
        default: block(6, a, depth, b, stride, c, column);
        }
    }
    for (i64 d = 0; column < columns && d < depth; d++)
        for (int r = 0; r < rows; r++)
            for (i64 j = column; j < columns; j++) c[r][j] += a[r][d] * b[d * stride + j];
}

// ---- linear layers: weights packed as [columns / 32][depth][32], zeros behind the last column

#define PANEL 32
#define STACK 8  // rows that share one pass over a panel

static inline __attribute__((always_inline)) void panel(int rows, const float *x, i64 stride, i64 depth, const float *w,
                                                        const float *bias, float *out, i64 columns, i64 width) {
    v16 total[STACK][2] = {};
    float start[PANEL] = {0};
    if (bias) {
        memcpy(start, bias, sizeof(float) * width);
        for (int r = 0; r < rows; r++) total[r][0] = load(start), total[r][1] = load(start + LANES);
    }
    for (i64 d = 0; d < depth; d++) {
        v16 low = load(w + d * PANEL), high = load(w + d * PANEL + LANES);
        for (int r = 0; r < rows; r++) {
            v16 a = splat(x[r * stride + d]);
            total[r][0] += a * low;
            total[r][1] += a * high;
        }
    }
    for (int r = 0; r < rows; r++)
        if (width == PANEL) {
            store(out + r * columns, total[r][0]);
            store(out + r * columns + LANES, total[r][1]);
        } else {
            store(start, total[r][0]), store(start + LANES, total[r][1]);
            memcpy(out + r * columns, start, sizeof(float) * width);
        }
}

// out[rows][columns] = x[rows][depth] * weight^T + bias
void linear(const float *x, i64 stride, i64 rows, i64 depth, const float *packed, i64 columns, const float *bias, float *out) {
    for (i64 column = 0; column < columns; column += PANEL, packed += depth * PANEL) {
        i64 width = columns - column < PANEL ? columns - column : PANEL;
        const float *b = bias ? bias + column : 0;
        for (i64 r = 0; r < rows; r += STACK) {
            const float *from = x + r * stride;
            float *to = out + r * columns + column;
            switch (rows - r) {
            case 1: panel(1, from, stride, depth, packed, b, to, columns, width); break;
            case 2: panel(2, from, stride, depth, packed, b, to, columns, width); break;
            case 3: panel(3, from, stride, depth, packed, b, to, columns, width); break;
            case 4: panel(4, from, stride, depth, packed, b, to, columns, width); break;
            case 5: panel(5, from, stride, depth, packed, b, to, columns, width); break;
            case 6: panel(6, from, stride, depth, packed, b, to, columns, width); break;
            case 7: panel(7, from, stride, depth, packed, b, to, columns, width); break;
            default: panel(8, from, stride, depth, packed, b, to, columns, width);
            }
        }
    }
}

// ---- norms and rotary embedding

// out[n][heads][dim] (contiguous) = x / sqrt(mean(x^2) + eps) * weight[head % weight_rows]; without weight plain.
// mean: divide the sum of squares by dim (RMS) or not (L2); scale multiplies the result.
void normalise(const float *x, i64 row_stride, i64 rows, i64 heads, i64 dim, const float *weight, i64 weight_rows,
               float eps, int mean, float *out) {
    for (i64 r = 0; r < rows; r++)
        for (i64 h = 0; h < heads; h++) {
            const float *from = x + r * row_stride + h * dim;
            float *to = out + (r * heads + h) * dim;
            float square = dot(from, from, dim);
            float scale = 1.0f / sqrtf((mean ? square / (float)dim : square) + eps);
            if (weight) {
                const float *w = weight + (h % weight_rows) * dim;
                for (i64 i = 0; i < dim; i++) to[i] = from[i] * scale * w[i];
            } else
                for (i64 i = 0; i < dim; i++) to[i] = from[i] * scale;
        }
}

// x[rows][heads][dim], rotated in place over planes (i, i + half) by cos, sin [rows][half].
void rotate(float *x, i64 row_stride, i64 rows, i64 heads, i64 dim, const float *cosine, const float *sine, i64 half) {
    for (i64 r = 0; r < rows; r++)
        for (i64 h = 0; h < heads; h++) {
            float *low = x + r * row_stride + h * dim, *high = low + half;
            const float *c = cosine + r * half, *s = sine + r * half;
            for (i64 i = 0; i < half; i++) {
                float a = low[i], b = high[i];
                low[i] = a * c[i] - b * s[i];
                high[i] = b * c[i] + a * s[i];
            }
        }
}

// ---- experts

// The best `k` of each row of logits, best first, lower id at ties; weights are a softmax over them, or (not
// renormalised) their shares of the softmax over all.
void route(const float *logits, i64 row_stride, i64 rows, i64 experts, i64 k, int renormalise, float *weights, i64 *chosen) {
    float scratch[experts];
    for (i64 r = 0; r < rows; r++) {
        const float *line = logits + r * row_stride;
        memcpy(scratch, line, sizeof scratch);
        float total = 0, most = 0;
        for (i64 j = 0; j < k; j++) {
            i64 best = 0;
            for (i64 e = 1; e < experts; e++)
                if (scratch[e] > scratch[best]) best = e;
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

typedef struct {
    i64 hidden, inner, experts;
    const float *gate_up, *down, *gate_up_bias, *down_bias;
    float limit, alpha;  // limit 0: silu(gate) * up
} bank_t;

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
    few_rows(rows, x, hidden, bank->gate_up + e * hidden * 2 * inner, 2 * inner, 2 * inner, to);
    for (int r = 0; r < rows; r++) {
        activate(both[r], inner, bank->limit, bank->alpha, weights[r], held[r]);
        if (bank->down_bias)
            for (i64 i = 0; i < hidden; i++) out[r][i] += weights[r] * bank->down_bias[e * hidden + i];
    }
    few_rows(rows, from, inner, bank->down + e * inner * hidden, hidden, hidden, out);
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

// ---- recurrent layers

// Rows of lengths[r] tokens (1 each where lengths is null), flat one behind the other. A row's page [width - 1][channels]
// holds the columns before it and is shifted; out = silu(sum over taps of column * weight[tap]).
void conv_rows(const float *x, i64 row_stride, i64 rows, const i64 *lengths, i64 channels, i64 width, const float *weight,
               float *pages, i64 page_stride, const i64 *page, float *out) {
    for (i64 r = 0; r < rows; r++) {
        float *state = pages + page[r] * page_stride;
        for (i64 t = 0, n = lengths ? lengths[r] : 1; t < n; t++, x += row_stride, out += channels) {
            for (i64 c = 0; c < channels; c++) out[c] = x[c] * weight[(width - 1) * channels + c];
            for (i64 tap = 0; tap < width - 1; tap++)
                for (i64 c = 0; c < channels; c++) out[c] += state[tap * channels + c] * weight[tap * channels + c];
            memmove(state, state + channels, sizeof(float) * (width - 2) * channels);
            memcpy(state + (width - 2) * channels, x, sizeof(float) * channels);
            for (i64 c = 0; c < channels; c++) out[c] *= sigmoid1(out[c]);
        }
    }
}

// One token per row and head: both reads of the old state in one pass over it, then decay and rank-one update.
static void delta_head(const float *q, const float *k, const float *v, float decay, float beta, i64 d_k, i64 d_v,
                       float *state, float *out) {
    float delta[d_v], overlap = dot(q, k, d_k);
    memset(delta, 0, sizeof delta);
    memset(out, 0, sizeof(float) * d_v);
    const float *readers[2] = {k, q};
    float *read[2] = {delta, out};
    few_rows(2, readers, d_k, state, d_v, d_v, read);
    for (i64 j = 0; j < d_v; j++) {
        delta[j] = beta * (v[j] - decay * delta[j]);
        out[j] = decay * out[j] + overlap * delta[j];
    }
    for (i64 i = 0; i < d_k; i++)
        for (i64 j = 0; j < d_v; j++) state[i * d_v + j] = decay * state[i * d_v + j] + k[i] * delta[j];
}

// Rows of lengths[r] tokens (1 each where lengths is null), flat one behind the other; page[r] holds a row's state.
void delta_rows(const float *query, i64 q_stride, const float *key, i64 k_stride, const float *value, i64 v_stride,
                const float *decay, i64 decay_stride, const float *beta, i64 beta_stride, i64 rows, const i64 *lengths,
                i64 k_heads, i64 v_heads, i64 d_k, i64 d_v, float *pages, i64 page_stride, const i64 *page, float *out) {
    i64 first = 0;
    for (i64 r = 0; r < rows; r++) {
        i64 last = first + (lengths ? lengths[r] : 1);
        for (i64 h = 0; h < v_heads; h++) {
            i64 shared = h / (v_heads / k_heads) * d_k;
            float *state = pages + page[r] * page_stride + h * d_k * d_v;
            for (i64 t = first; t < last; t++)
                delta_head(query + t * q_stride + shared, key + t * k_stride + shared, value + t * v_stride + h * d_v,
                           decay[t * decay_stride + h], beta[t * beta_stride + h], d_k, d_v, state,
                           out + (t * v_heads + h) * d_v);
        }
        first = last;
    }
}

// ---- attention of one query per row over its pages

typedef struct {
    i64 rows, heads, kv_heads, dim, page_tokens, max_pages, window;  // window 0: none
    const i64 *tables;
    const int32_t *first_page, *kv_len;
    i64 query_stride, key_page, key_token, key_head, value_page, value_token, value_head;
    float scale;
} attention_t;

static void softmax_line(float *line, i64 count, const float *sink) {
    float most = sink ? *sink : -INFINITY;
    for (i64 t = 0; t < count; t++) most = line[t] > most ? line[t] : most;
    float total = sink ? exp1(*sink - most) : 0;
    for (i64 t = 0; t < count; t++) line[t] = exp1(line[t] - most);
    for (i64 t = 0; t < count; t++) total += line[t];
    float share = 1.0f / total;
    for (i64 t = 0; t < count; t++) line[t] *= share;
}

// The query heads of one key-value head; scores are [group][visible tokens].
static void attend_head(const attention_t *shape, i64 row, i64 kv_head, const float *query, const float *keys,
                        const float *values, const float *sinks, float *scores, float *out) {
    i64 group = shape->heads / shape->kv_heads, dim = shape->dim, length = shape->kv_len[row], size = shape->page_tokens;
    i64 start = shape->window && length > shape->window ? length - shape->window : 0, count = length - start;
    const i64 *table = shape->tables + row * shape->max_pages - shape->first_page[row];
    for (i64 t = start, stop; t < length; t = stop) {
        stop = (t / size + 1) * size < length ? (t / size + 1) * size : length;
        const float *k = keys + table[t / size] * shape->key_page + (t % size) * shape->key_token + kv_head * shape->key_head;
        for (i64 i = t; i < stop; i++, k += shape->key_token)
            for (i64 g = 0; g < group; g++) scores[g * count + i - start] = dot(query + g * dim, k, dim) * shape->scale;
    }
    for (i64 g = 0; g < group; g++) softmax_line(scores + g * count, count, sinks ? sinks + g : 0);
    memset(out, 0, sizeof(float) * group * dim);
    for (i64 t = start, stop; t < length; t = stop) {
        stop = (t / size + 1) * size < length ? (t / size + 1) * size : length;
        const float *v = values + table[t / size] * shape->value_page + (t % size) * shape->value_token + kv_head * shape->value_head;
        for (i64 g = 0; g < group; g += ROWS) {
            int rows = group - g < ROWS ? (int)(group - g) : ROWS;
            const float *from[ROWS];
            float *to[ROWS];
            for (int r = 0; r < rows; r++) {
                from[r] = scores + (g + r) * count + t - start;
                to[r] = out + (g + r) * dim;
            }
            few_rows(rows, from, stop - t, v, shape->value_token, dim, to);
        }
    }
}

// scratch holds heads / kv_heads * the longest count of visible tokens.
void paged_decode(const attention_t *shape, const float *query, const float *keys, const float *values,
                  const float *sinks, float *scratch, float *out) {
    i64 group = shape->heads / shape->kv_heads;
    for (i64 row = 0; row < shape->rows; row++)
        for (i64 h = 0; h < shape->kv_heads; h++)
            attend_head(shape, row, h, query + row * shape->query_stride + h * group * shape->dim, keys, values,
                        sinks ? sinks + h * group : 0, scratch, out + (row * shape->heads + h * group) * shape->dim);
}
