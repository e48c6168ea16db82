// Whole sublayers of a decode step in one call each: with few rows, calling is dearer than computing. They call the
// kernels beside this file one after the other, so their results are bit for bit those of single calls.

#include "kernels.h"

static float *floats(void **scratch, i64 count) {
    float *found = *scratch;
    *scratch = found + (count + LANES - 1) / LANES * LANES;
    return found;
}

// ---- routed experts with a shared one

// out[rows][hidden]. The router's columns: logits, and with a shared expert its gate, its gate_proj and its up_proj.
void moe_step(const moe_t *moe, const float *x, i64 rows, void *scratch, float *out) {
    i64 hidden = moe->bank.hidden, width = moe->router.columns, k = moe->k, shared = moe->shared;
    i64 *chosen = (i64 *)floats(&scratch, 2 * rows * k);
    float *weights = floats(&scratch, rows * k), *inner = floats(&scratch, rows * width);
    multiply(&moe->router, x, hidden, rows, inner);
    route(inner, width, rows, moe->bank.experts, k, moe->renormalise, weights, chosen);
    experts(&moe->bank, x, rows, k, weights, chosen, out);
    if (!shared) return;
    const float *share = inner + moe->bank.experts, *gate = share + 1;
    float *held = floats(&scratch, rows * shared), *more = floats(&scratch, rows * hidden);
    silu_and_mul(gate, gate + shared, width, rows, shared, share, held);
    multiply(&moe->shared_down, held, shared, rows, more);
    for (i64 i = 0; i < rows * hidden; i++) out[i] += more[i];
}

// ---- Gated DeltaNet, one token per row

// out[rows][hidden]; page[r] holds a row's convolution columns and its states, in two views of pages.
void delta_net_step(const delta_net_t *net, const float *x, i64 rows, float *conv_pages, i64 conv_stride,
                    float *state_pages, i64 state_stride, const i64 *page, void *scratch, float *out) {
    i64 keys = net->k_heads * net->d_k, values = net->v_heads * net->d_v, channels = 2 * keys + values;
    i64 width = net->inner.columns, heads = net->v_heads;
    float *inner = floats(&scratch, rows * width), *gates = floats(&scratch, 3 * rows * heads);
    float *mixed = floats(&scratch, rows * channels), *normed = floats(&scratch, rows * 2 * keys);
    float *read = floats(&scratch, rows * values);
    float *log_decay = gates, *decay = gates + rows * heads, *beta = decay + rows * heads;
    multiply(&net->inner, x, net->inner.depth, rows, inner);
    delta_gates(inner + channels + values, width, rows, heads, net->decay_bias, net->decay_rate, log_decay, decay, beta);
    conv_rows(inner, width, rows, 0, channels, net->conv_width, net->conv, conv_pages, conv_stride, page, mixed);
    normalise(mixed, channels, rows, 2 * net->k_heads, net->d_k, 0, 1, net->l2_eps, 0, normed);
    for (i64 r = 0; r < rows; r++)
        for (i64 i = 0; i < keys; i++) normed[r * 2 * keys + i] *= net->query_scale;
    delta_rows(normed, 2 * keys, normed + keys, 2 * keys, mixed + 2 * keys, channels, decay, 0, heads, beta, heads, rows,
               0, net->k_heads, heads, net->d_k, net->d_v, state_pages, state_stride, page, read);
    gated_norm(read, inner + channels, width, rows, heads, net->d_v, net->norm, net->eps);
    multiply(&net->outer, read, values, rows, out);
}

// ---- what stands before and behind attention

// inner[rows][inner.columns]: queries, keys, values, gate; query_key[rows][heads + kv_heads][dim] normed and turned (it is
// the front of inner, turned there, where there is no norm); keys and values go to their pages.
void attention_front(const attention_layer_t *layer, const float *x, i64 x_stride, i64 rows, const float *cosine,
                     const float *sine, i64 half, float *key_pages, i64 key_page, i64 key_token, float *value_pages,
                     i64 value_page, i64 value_token, const i64 *page, const i64 *offset, float *inner, float *query_key) {
    i64 turned = layer->heads + layer->kv_heads, width = layer->inner.columns, dim = layer->dim;
    i64 stride = layer->head_norm ? turned * dim : width, row = layer->kv_heads * dim;
    multiply(&layer->inner, x, x_stride, rows, inner);
    if (layer->head_norm) normalise(inner, width, rows, turned, dim, layer->head_norm, turned, layer->eps, 1, query_key);
    rotate(query_key, stride, rows, turned, dim, cosine, sine, half);
    write_rows(query_key + layer->heads * dim, stride, rows, row, key_pages, key_page, key_token, page, offset);
    write_rows(inner + turned * dim, width, rows, row, value_pages, value_page, value_token, page, offset);
}

// out[rows][hidden] of mixed[rows][heads * dim], which a gate changes in place.
void attention_back(const attention_layer_t *layer, float *mixed, const float *inner, i64 rows, float *out) {
    i64 values = layer->heads * layer->dim;
    if (layer->gated)
        mul_sigmoid(mixed, inner + values + 2 * layer->kv_heads * layer->dim, layer->inner.columns, rows, values);
    multiply(&layer->outer, mixed, values, rows, out);
}
