// Recurrent layers, and attention over pages.

#include "vectors.h"

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

static void softmax_line(float *line, i64 count, const float *sink) {
    float most = sink ? *sink : -INFINITY;
    for (i64 t = 0; t < count; t++) most = line[t] > most ? line[t] : most;
    float total = sink ? exp1(*sink - most) : 0;
    for (i64 t = 0; t < count; t++) line[t] = exp1(line[t] - most);
    for (i64 t = 0; t < count; t++) total += line[t];
    float share = 1.0f / total;
    for (i64 t = 0; t < count; t++) line[t] *= share;
}

// All heads of a row: keys are read once, in the order they lie in. Scores are [heads][visible tokens].
static void attend_row(const attention_t *shape, i64 row, const float *query, const float *keys, const float *values,
                       const float *sinks, float *scores, float *out) {
    i64 heads = shape->heads, group = heads / shape->kv_heads, dim = shape->dim;
    i64 length = shape->kv_len[row], size = shape->page_tokens;
    i64 start = shape->window && length > shape->window ? length - shape->window : 0, count = length - start;
    const i64 *table = shape->tables + row * shape->max_pages - shape->first_page[row];
    for (i64 t = start, stop; t < length; t = stop) {
        stop = (t / size + 1) * size < length ? (t / size + 1) * size : length;
        const float *k = keys + table[t / size] * shape->key_page + (t % size) * shape->key_token;
        for (i64 i = t; i < stop; i++, k += shape->key_token)
            for (i64 h = 0; h < heads; h++)
                scores[h * count + i - start] =
                    dot(query + h * dim, k + h / group * shape->key_head, dim) * shape->scale;
    }
    for (i64 h = 0; h < heads; h++) softmax_line(scores + h * count, count, sinks ? sinks + h : 0);
    memset(out, 0, sizeof(float) * heads * dim);
    for (i64 t = start, stop; t < length; t = stop) {
        stop = (t / size + 1) * size < length ? (t / size + 1) * size : length;
        const float *v = values + table[t / size] * shape->value_page + (t % size) * shape->value_token;
        for (i64 first = 0; first < heads; first += group)
            for (i64 g = 0; g < group; g += ROWS) {
                int rows = group - g < ROWS ? (int)(group - g) : ROWS;
                const float *from[ROWS];
                float *to[ROWS];
                for (int r = 0; r < rows; r++) {
                    from[r] = scores + (first + g + r) * count + t - start;
                    to[r] = out + (first + g + r) * dim;
                }
                few_rows(rows, from, stop - t, v + first / group * shape->value_head, shape->value_token, dim, to);
            }
    }
}

// scratch holds heads * the longest count of visible tokens.
void paged_decode(const attention_t *shape, const float *query, const float *keys, const float *values,
                  const float *sinks, float *scratch, float *out) {
    for (i64 row = 0; row < shape->rows; row++)
        attend_row(shape, row, query + row * shape->query_stride, keys, values, sinks, scratch,
                   out + row * shape->heads * shape->dim);
}
