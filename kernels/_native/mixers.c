// Recurrent layers, and attention over pages.

#include "kernels.h"

// ---- recurrent layers

// Rows of lengths[r] tokens (1 each where lengths is null), flat one behind the other. A row's page [width - 1][channels]
// holds the columns before it and is shifted; out = silu(sum over taps of column * weight[tap]).
void conv_rows(const float *x, i64 row_stride, i64 rows, const i64 *lengths, i64 channels, i64 width, const float *weight,
               float *pages, i64 page_stride, const i64 *page, float *out) {
    for (i64 r = 0; r < rows; r++) {
        float *state = pages + page[r] * page_stride;
        for (i64 t = 0, n = lengths ? lengths[r] : 1; t < n; t++, x += row_stride, out += channels)
            for (i64 c = 0; c < channels; c += LANES) {
                i64 some = channels - c;
                v16 newest = load_some(x + c, some);
                v16 sum = newest * load_some(weight + (width - 1) * channels + c, some);
                for (i64 tap = 0; tap < width - 1; tap++) {
                    float *held = state + tap * channels + c;
                    sum += load_some(held, some) * load_some(weight + tap * channels + c, some);
                    store_some(held, tap + 1 < width - 1 ? load_some(held + channels, some) : newest, some);
                }
                store_some(out + c, sum * sigmoid16(sum), some);
            }
    }
}

// Some columns of one token's step: both reads of the old state in one pass over it, then decay and rank-one update in
// another, while it is near.
INLINE void delta_columns(int vectors, const float *q, const float *k, const float *v, float decay, float beta,
                          float overlap, i64 d_k, i64 d_v, float *state, float *out, i64 some) {
    v16 by_key[4] = {}, by_query[4] = {}, change[4];
    for (i64 i = 0; i < d_k; i++) {
        v16 a = splat(k[i]), b = splat(q[i]);
        for (int j = 0; j < vectors; j++) {
            v16 held = load_some(state + i * d_v + j * LANES, some);
            by_key[j] += a * held;
            by_query[j] += b * held;
        }
    }
    for (int j = 0; j < vectors; j++) {
        change[j] = beta * (load_some(v + j * LANES, some) - decay * by_key[j]);
        store_some(out + j * LANES, decay * by_query[j] + overlap * change[j], some);
    }
    for (i64 i = 0; i < d_k; i++) {
        v16 a = splat(k[i]);
        for (int j = 0; j < vectors; j++) {
            float *held = state + i * d_v + j * LANES;
            store_some(held, decay * load_some(held, some) + a * change[j], some);
        }
    }
}

static void delta_head(const float *q, const float *k, const float *v, float decay, float beta, i64 d_k, i64 d_v,
                       float *state, float *out) {
    float overlap = dot(q, k, d_k);
    i64 j = 0;
    for (; j + WIDE <= d_v; j += WIDE)
        delta_columns(4, q, k, v + j, decay, beta, overlap, d_k, d_v, state + j, out + j, LANES);
    for (; j + LANES <= d_v; j += LANES)
        delta_columns(1, q, k, v + j, decay, beta, overlap, d_k, d_v, state + j, out + j, LANES);
    if (j < d_v) delta_columns(1, q, k, v + j, decay, beta, overlap, d_k, d_v, state + j, out + j, d_v - j);
}

// From [rows][2 * heads] (write strengths, then decays): log_decay = rate * softplus(x + bias), its exp, and
// beta = sigmoid(x). libm, element by element: the same bits wherever an element stands.
void delta_gates(const float *x, i64 row_stride, i64 rows, i64 heads, const float *bias, const float *rate,
                 float *log_decay, float *decay, float *beta) {
    for (i64 r = 0; r < rows; r++, x += row_stride)
        for (i64 h = 0; h < heads; h++, log_decay++, decay++, beta++) {
            float shifted = x[heads + h] + bias[h];
            float soft = (shifted > 0 ? shifted : 0) + log1pf(expf(-fabsf(shifted)));
            *log_decay = rate[h] * soft;
            *decay = expf(*log_decay);
            *beta = 1.0f / (1.0f + expf(-x[h]));
        }
}

// Rows of lengths[r] tokens (1 each where lengths is null), flat one behind the other; page[r] holds a row's state.
// Decays are factors, or (logarithmic) their logarithms.
void delta_rows(const float *query, i64 q_stride, const float *key, i64 k_stride, const float *value, i64 v_stride,
                const float *decay, int logarithmic, i64 decay_stride, const float *beta, i64 beta_stride, i64 rows, const i64 *lengths,
                i64 k_heads, i64 v_heads, i64 d_k, i64 d_v, float *pages, i64 page_stride, const i64 *page, float *out) {
    i64 first = 0;
    for (i64 r = 0; r < rows; r++) {
        i64 last = first + (lengths ? lengths[r] : 1);
        for (i64 h = 0; h < v_heads; h++) {
            i64 shared = h / (v_heads / k_heads) * d_k;
            float *state = pages + page[r] * page_stride + h * d_k * d_v;
            for (i64 t = first; t < last; t++) {
                float factor = decay[t * decay_stride + h];
                delta_head(query + t * q_stride + shared, key + t * k_stride + shared, value + t * v_stride + h * d_v,
                           logarithmic ? expf(factor) : factor, beta[t * beta_stride + h], d_k, d_v, state,
                           out + (t * v_heads + h) * d_v);
            }
        }
        first = last;
    }
}

// Keys and values [rows][row_bytes / 4] to their entries.
void write_rows(const float *from, i64 row_stride, i64 rows, i64 n, float *pages, i64 page_stride, i64 token_stride,
                const i64 *page, const i64 *offset) {
    for (i64 r = 0; r < rows; r++)
        memcpy(pages + page[r] * page_stride + offset[r] * token_stride, from + r * row_stride, sizeof(float) * n);
}

// ---- attention of one query per row over its pages

typedef struct {
    i64 rows, heads, kv_heads, dim, page_tokens, max_pages, window;  // window 0: none
    const i64 *tables;
    const int32_t *first_page, *kv_len;
    i64 query_stride, key_page, key_token, key_head, value_page, value_token, value_head;
    float scale;
} attention_t;

// Behind the count a line has -inf up to a whole vector.
static void softmax_line(float *line, i64 count, const float *sink) {
    v16 most16 = splat(sink ? *sink : -INFINITY), total16 = {};
    for (i64 t = 0; t < count; t += LANES) most16 = max16(load(line + t), most16);
    float most = most16[0];
    for (int i = 1; i < LANES; i++) most = most16[i] > most ? most16[i] : most;
    for (i64 t = 0; t < count; t += LANES) {
        v16 weight = exp16(load(line + t) - most);
        total16 += weight;
        store(line + t, weight);
    }
    float share = 1.0f / (sum16(total16) + (sink ? exp1(*sink - most) : 0));
    for (i64 t = 0; t < count; t += LANES) store(line + t, load(line + t) * share);
}

// Scores of up to 16 tokens that lie a stride apart; of fewer, the last stands in for those behind it.
INLINE v16 scores16(const float *q, const float *k, i64 stride, i64 dim, i64 tokens) {
    v16 total[LANES] = {};
    i64 j = 0;
    for (; j + LANES <= dim; j += LANES) {
        v16 a = load(q + j);
        for (i64 t = 0; t < LANES; t++) total[t] += a * load(k + (t < tokens ? t : tokens - 1) * stride + j);
    }
    if (j < dim) {
        v16 a = load_some(q + j, dim - j);
        for (i64 t = 0; t < LANES; t++)
            total[t] += a * load_some(k + (t < tokens ? t : tokens - 1) * stride + j, dim - j);
    }
    return sums16(total);
}

// Where a token's row lies.
INLINE const float *entry(const float *pages, const i64 *table, i64 t, i64 size, i64 page, i64 token) {
    return pages + table[t / size] * page + (t % size) * token;
}

// Asks for some tokens' rows while those before them are worked on: most of what a step reads lies scattered in pages.
INLINE void fetch_tokens(const float *pages, const i64 *table, i64 t, i64 length, i64 size, i64 page, i64 token, i64 row) {
    for (i64 stop = t + LANES < length ? t + LANES : length; t < stop; t++) {
        const float *from = entry(pages, table, t, size, page, token);
        for (i64 i = 0; i < row; i += LANES) __builtin_prefetch(from + i, 0, 3);
    }
}

// All heads of a row: keys are read once, in the order they lie in. Scores are [heads][visible tokens, whole vectors].
static void attend_row(const attention_t *shape, i64 row, const float *query, const float *keys, const float *values,
                       const float *sinks, float *scores, float *out) {
    i64 heads = shape->heads, group = heads / shape->kv_heads, dim = shape->dim;
    i64 length = shape->kv_len[row], size = shape->page_tokens;
    i64 start = shape->window && length > shape->window ? length - shape->window : 0, count = length - start;
    i64 line = (count + LANES - 1) / LANES * LANES;
    i64 row_floats = shape->kv_heads * dim;
    const i64 *table = shape->tables + row * shape->max_pages - shape->first_page[row];
    for (i64 t = start, stop; t < length; t = stop) {
        stop = (t / size + 1) * size < length ? (t / size + 1) * size : length;
        const float *k = entry(keys, table, t, size, shape->key_page, shape->key_token);
        for (i64 i = t; i < stop; i += LANES, k += LANES * shape->key_token) {
            fetch_tokens(keys, table, i + LANES, length, size, shape->key_page, shape->key_token, row_floats);
            for (i64 h = 0; h < heads; h++) {
                const float *q = query + h * dim, *head = k + h / group * shape->key_head;
                float *to = scores + h * line + i - start;
                if (stop - i >= LANES)
                    store(to, scores16(q, head, shape->key_token, dim, LANES) * shape->scale);
                else
                    store_some(to, scores16(q, head, shape->key_token, dim, stop - i) * shape->scale, stop - i);
            }
        }
    }
    for (i64 t = start; t < start + LANES; t += LANES)
        fetch_tokens(values, table, t, length, size, shape->value_page, shape->value_token, row_floats);
    for (i64 h = 0; h < heads; h++) {
        for (i64 t = count; t < line; t++) scores[h * line + t] = -INFINITY;
        softmax_line(scores + h * line, count, sinks ? sinks + h : 0);
    }
    memset(out, 0, sizeof(float) * heads * dim);
    for (i64 t = start, stop; t < length; t = stop) {
        stop = t + LANES < (t / size + 1) * size ? t + LANES : (t / size + 1) * size;
        if (stop > length) stop = length;
        fetch_tokens(values, table, t + LANES, length, size, shape->value_page, shape->value_token, row_floats);
        const float *v = entry(values, table, t, size, shape->value_page, shape->value_token);
        for (i64 first = 0; first < heads; first += group)
            for (i64 g = 0; g < group; g += ROWS) {
                int rows = group - g < ROWS ? (int)(group - g) : ROWS;
                const float *from[ROWS];
                float *to[ROWS];
                for (int r = 0; r < rows; r++) {
                    from[r] = scores + (first + g + r) * line + t - start;
                    to[r] = out + (first + g + r) * dim;
                }
                few_rows(rows, from, stop - t, v + first / group * shape->value_head, shape->value_token, dim, to);
            }
    }
}

// scratch holds heads * the longest count of visible tokens, whole vectors.
void paged_decode(const attention_t *shape, const float *query, const float *keys, const float *values,
                  const float *sinks, float *scratch, float *out) {
    for (i64 row = 0; row < shape->rows; row++)
        attend_row(shape, row, query + row * shape->query_stride, keys, values, sinks, scratch,
                   out + row * shape->heads * shape->dim);
}
