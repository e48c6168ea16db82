// Vectors of 16 floats, exp, and products of a few rows: what the kernels beside this file are made of.
// Every kernel is the twin of one in kernels/_reference; pointers and strides (in elements) come from torch tensors.

#pragma once

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
// Weights are float32, or (half) bfloat16, which is widened exactly: half the bytes, the same products.
typedef uint16_t u16x16 __attribute__((vector_size(32), aligned(2), may_alias));
typedef uint32_t u32x16 __attribute__((vector_size(64)));

static inline __attribute__((always_inline)) v16 weights16(const void *w, i64 at, int half) {
    if (!half) return load((const float *)w + at);
    u32x16 wide = __builtin_convertvector(*(const u16x16 *)((const uint16_t *)w + at), u32x16) << 16;
    return (v16)wide;
}

static inline float weight1(const void *w, i64 at, int half) {
    if (!half) return ((const float *)w)[at];
    union { uint32_t bits; float value; } wide = {(uint32_t)((const uint16_t *)w)[at] << 16};
    return wide.value;
}

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

static inline float dot(const float *a, const float *b, i64 n) {
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
    int rows, const float **a, i64 depth, const void *b, i64 stride, float **c, i64 column, int half) {
    v16 total[ROWS][4];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < 4; v++) total[r][v] = load(c[r] + column + v * LANES);
    for (i64 d = 0; d < depth; d++) {
        i64 at = d * stride + column;
        v16 w0 = weights16(b, at, half), w1 = weights16(b, at + 16, half), w2 = weights16(b, at + 32, half),
            w3 = weights16(b, at + 48, half);
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

static inline __attribute__((always_inline)) void few_rows_of(
    int rows, const float **a, i64 depth, const void *b, i64 stride, i64 columns, float **c, int half) {
    i64 column = 0;
    for (; column + WIDE <= columns; column += WIDE) {
        switch (rows) {
        case 1: block(1, a, depth, b, stride, c, column, half); break;
        case 2: block(2, a, depth, b, stride, c, column, half); break;
        case 3: block(3, a, depth, b, stride, c, column, half); break;
        case 4: block(4, a, depth, b, stride, c, column, half); break;
        case 5: block(5, a, depth, b, stride, c, column, half); break;
        default: block(6, a, depth, b, stride, c, column, half);
        }
    }
    for (i64 d = 0; column < columns && d < depth; d++)
        for (int r = 0; r < rows; r++)
            for (i64 j = column; j < columns; j++) c[r][j] += a[r][d] * weight1(b, d * stride + j, half);
}

static inline void few_rows(int rows, const float **a, i64 depth, const float *b, i64 stride, i64 columns, float **c) {
    few_rows_of(rows, a, depth, b, stride, columns, c, 0);
}

// Weights that begin `first` elements behind w.
static inline void few_rows_weights(int rows, const float **a, i64 depth, const void *w, i64 first, i64 columns, float **c,
                                    int half) {
    if (half)
        few_rows_of(rows, a, depth, (const uint16_t *)w + first, columns, columns, c, 1);
    else
        few_rows_of(rows, a, depth, (const float *)w + first, columns, columns, c, 0);
}
