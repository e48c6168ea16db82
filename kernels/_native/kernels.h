// The kernels' own face, and what they are told of weights.

#pragma once

#include "vectors.h"

typedef struct {
    const void *weight;  // packed
    const float *bias;   // or null
    i64 columns, depth;
    int half;
} linear_t;

typedef struct {
    i64 hidden, inner, experts;
    const void *gate_up, *down;
    const float *gate_up_bias, *down_bias;
    float limit, alpha;  // limit 0: silu(gate) * up
    int half;            // the weights are bfloat16
} bank_t;

typedef struct {
    linear_t router, shared_down;
    bank_t bank;
    i64 k, shared;  // experts per token; the shared expert's width, 0: none
    int renormalise;
} moe_t;

typedef struct {
    linear_t inner, outer;
    const float *conv, *decay_rate, *decay_bias, *norm;
    i64 k_heads, v_heads, d_k, d_v, conv_width;
    float query_scale, l2_eps, eps;
} delta_net_t;

typedef struct {
    linear_t inner, outer;
    const float *head_norm;  // or null
    i64 heads, kv_heads, dim;
    float eps;
    int gated;
} attention_layer_t;

void linear(const float *x, i64 stride, i64 rows, i64 depth, const void *packed, int half, i64 columns, const float *bias,
            float *out);
void normalise(const float *x, i64 row_stride, i64 rows, i64 heads, i64 dim, const float *weight, i64 weight_rows,
               float eps, int mean, float *out);
void rotate(float *x, i64 row_stride, i64 rows, i64 heads, i64 dim, const float *cosine, const float *sine, i64 half);
void silu_and_mul(const float *gate, const float *up, i64 row_stride, i64 rows, i64 n, const float *share, float *out);
void mul_sigmoid(float *x, const float *gate, i64 gate_stride, i64 rows, i64 n);
void gated_norm(float *x, const float *gate, i64 gate_stride, i64 rows, i64 heads, i64 dim, const float *weight, float eps);
void route(const float *logits, i64 row_stride, i64 rows, i64 experts, i64 k, int renormalise, float *weights, i64 *chosen);
void experts(const bank_t *bank, const float *x, i64 rows, i64 k, const float *weights, const i64 *chosen, float *out);
void conv_rows(const float *x, i64 row_stride, i64 rows, const i64 *lengths, i64 channels, i64 width, const float *weight,
               float *pages, i64 page_stride, const i64 *page, float *out);
void delta_gates(const float *x, i64 row_stride, i64 rows, i64 heads, const float *bias, const float *rate,
                 float *log_decay, float *decay, float *beta);
void delta_rows(const float *query, i64 q_stride, const float *key, i64 k_stride, const float *value, i64 v_stride,
                const float *decay, int logarithmic, i64 decay_stride, const float *beta, i64 beta_stride, i64 rows,
                const i64 *lengths, i64 k_heads, i64 v_heads, i64 d_k, i64 d_v, float *pages, i64 page_stride,
                const i64 *page, float *out);
void write_rows(const float *from, i64 row_stride, i64 rows, i64 n, float *pages, i64 page_stride, i64 token_stride,
                const i64 *page, const i64 *offset);

static inline void multiply(const linear_t *layer, const float *x, i64 stride, i64 rows, float *out) {
    linear(x, stride, rows, layer->depth, layer->weight, layer->half, layer->columns, layer->bias, out);
}
