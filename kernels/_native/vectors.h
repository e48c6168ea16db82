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

#define INLINE static inline __attribute__((always_inline))

typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (i32x16){__VA_ARGS__})
#endif

// Memory read in order is asked for so far ahead: the processor's own prefetching stops at every 4 KiB.
#define AHEAD 4096
INLINE void fetch(const void *p) { __builtin_prefetch((const char *)p + AHEAD, 0, 3); }

INLINE v16 load(const float *p) { return *(const v16 *)p; }
INLINE void store(float *p, v16 x) { *(v16 *)p = x; }

// The first n lanes, zeros behind them.
INLINE v16 load_some(const float *p, i64 n) {
    if (n >= LANES) return load(p);
    v16 x = {};
    memcpy(&x, p, sizeof(float) * n);
    return x;
}

INLINE void store_some(float *p, v16 x, i64 n) {
    if (n >= LANES)
        store(p, x);
    else
        memcpy(p, &x, sizeof(float) * n);
}

// Weights are float32, or (half) bfloat16, which is widened exactly: half the bytes, the same products. Neighbours are
// widened in pairs, by a shift and a mask: the even ones of 32, and the odd ones.
typedef uint32_t pairs_t __attribute__((vector_size(64), aligned(2), may_alias));

INLINE void widen32(const uint16_t *w, v16 *even, v16 *odd) {
    u32x16 both = (u32x16)*(const pairs_t *)w;
    *even = (v16)(both << 16);
    *odd = (v16)(both & 0xffff0000u);
}

INLINE v16 evens(v16 a, v16 b) { return SHUFFLE(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30); }
INLINE v16 odds(v16 a, v16 b) { return SHUFFLE(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31); }
INLINE v16 mixed_low(v16 a, v16 b) { return SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23); }
INLINE v16 mixed_high(v16 a, v16 b) {
    return SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
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

INLINE v16 pick(i32x16 where, v16 a, v16 b) { return (v16)(((i32x16)a & where) | ((i32x16)b & ~where)); }
INLINE v16 max16(v16 a, v16 b) { return pick(a > b, a, b); }

// exp1 of 16 numbers; adding and subtracting 1.5 * 2^23 rounds.
INLINE v16 exp16(v16 x) {
    x = pick(x < splat(-87.0f), splat(-87.0f), pick(x > splat(88.0f), splat(88.0f), x));
    v16 n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
    v16 r = n * -0.693359375f + x;
    r = n * 2.12194440e-4f + r;
    v16 p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = (p * (r * r) + r) + 1.0f;
    return p * (v16)((__builtin_convertvector(n, i32x16) + 127) << 23);
}

INLINE v16 sigmoid16(v16 x) { return 1.0f / (1.0f + exp16(-x)); }

// Lanes of two vectors in turn, by pairs of lanes and of four: what transposing is made of.
INLINE v16 ones_low(v16 a, v16 b) { return SHUFFLE(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29); }
INLINE v16 ones_high(v16 a, v16 b) { return SHUFFLE(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31); }
INLINE v16 twos_low(v16 a, v16 b) { return SHUFFLE(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29); }
INLINE v16 twos_high(v16 a, v16 b) { return SHUFFLE(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31); }
INLINE v16 fours_even(v16 a, v16 b) { return SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27); }
INLINE v16 fours_odd(v16 a, v16 b) { return SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31); }
INLINE v16 fours_low(v16 a, v16 b) { return SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23); }
INLINE v16 fours_high(v16 a, v16 b) { return SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31); }

// 16 rows of 16 to 16 columns.
INLINE void transpose16(const v16 row[16], v16 column[16]) {
    v16 four[16];
    for (int i = 0; i < 16; i += 4) {
        v16 a = ones_low(row[i], row[i + 1]), b = ones_high(row[i], row[i + 1]);
        v16 c = ones_low(row[i + 2], row[i + 3]), d = ones_high(row[i + 2], row[i + 3]);
        four[i] = twos_low(a, c), four[i + 1] = twos_high(a, c);
        four[i + 2] = twos_low(b, d), four[i + 3] = twos_high(b, d);
    }
    for (int i = 0; i < 4; i++) {
        v16 a = fours_low(four[i], four[i + 4]), b = fours_low(four[i + 8], four[i + 12]);
        v16 c = fours_high(four[i], four[i + 4]), d = fours_high(four[i + 8], four[i + 12]);
        column[i] = fours_even(a, b), column[i + 4] = fours_odd(a, b);
        column[i + 8] = fours_even(c, d), column[i + 12] = fours_odd(c, d);
    }
}

// The sums of 16 vectors, in order.
INLINE v16 sums16(const v16 t[16]) {
#ifndef __AVX512F__  // shuffles of so wide vectors are made of single moves there
    v16 out;
    for (int i = 0; i < 16; i++) out[i] = sum16(t[i]);
    return out;
#else
    v16 four[4], two[2];
    for (int i = 0; i < 4; i++) {
        v16 pair[2];
        for (int j = 0; j < 2; j++) {
            v16 a = t[4 * i + 2 * j], b = t[4 * i + 2 * j + 1];
            pair[j] = ones_low(a, b) + ones_high(a, b);
        }
        four[i] = twos_low(pair[0], pair[1]) + twos_high(pair[0], pair[1]);
    }
    for (int i = 0; i < 2; i++)
        two[i] = fours_even(four[2 * i], four[2 * i + 1]) + fours_odd(four[2 * i], four[2 * i + 1]);
    return fours_even(two[0], two[1]) + fours_odd(two[0], two[1]);
#endif
}

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

INLINE void block(int rows, const float **a, i64 depth, const float *b, i64 stride, float **c, i64 column) {
    v16 total[ROWS][4];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < 4; v++) total[r][v] = load(c[r] + column + v * LANES);
    b += column;
    for (i64 d = 0; d < depth; d++, b += stride) {
        v16 w0 = load(b), w1 = load(b + 16), w2 = load(b + 32), w3 = load(b + 48);
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

// The same for bfloat16 weights: sums of even and of odd columns, parted before and mixed again behind.
INLINE void half_block(int rows, const float **a, i64 depth, const uint16_t *b, i64 stride, float **c, i64 column) {
    v16 total[ROWS][4];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < 4; v += 2) {
            v16 low = load(c[r] + column + v * LANES), high = load(c[r] + column + (v + 1) * LANES);
            total[r][v] = evens(low, high);
            total[r][v + 1] = odds(low, high);
        }
    b += column;
    for (i64 d = 0; d < depth; d++, b += stride) {
        v16 w0, w1, w2, w3;
        fetch(b), fetch(b + 32);
        widen32(b, &w0, &w1);
        widen32(b + 32, &w2, &w3);
        for (int r = 0; r < rows; r++) {
            v16 x = splat(a[r][d]);
            total[r][0] += x * w0;
            total[r][1] += x * w1;
            total[r][2] += x * w2;
            total[r][3] += x * w3;
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < 4; v += 2) {
            store(c[r] + column + v * LANES, mixed_low(total[r][v], total[r][v + 1]));
            store(c[r] + column + (v + 1) * LANES, mixed_high(total[r][v], total[r][v + 1]));
        }
}

INLINE void any_block(int rows, const float **a, i64 depth, const void *b, i64 stride, float **c, i64 column, int half) {
    if (half)
        half_block(rows, a, depth, b, stride, c, column);
    else
        block(rows, a, depth, b, stride, c, column);
}

INLINE void few_rows_of(
    int rows, const float **a, i64 depth, const void *b, i64 stride, i64 columns, float **c, int half) {
    i64 column = 0;
    for (; column + WIDE <= columns; column += WIDE) {
        switch (rows) {
        case 1: any_block(1, a, depth, b, stride, c, column, half); break;
        case 2: any_block(2, a, depth, b, stride, c, column, half); break;
        case 3: any_block(3, a, depth, b, stride, c, column, half); break;
        case 4: any_block(4, a, depth, b, stride, c, column, half); break;
        case 5: any_block(5, a, depth, b, stride, c, column, half); break;
        default: any_block(6, a, depth, b, stride, c, column, half);
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
