// Linear layers, norms, rotary embedding and gates over rows.

#include "vectors.h"

// ---- linear layers: weights packed as [columns / 32][depth][32], zeros behind the last column; in
// bfloat16 (half) where that loses nothing

#define PANEL 32
#define STACK 8  // rows that share one pass over a panel
#define BLOCK 64

static inline __attribute__((always_inline)) void panel(int rows, const float *x, i64 stride, i64 depth, const void *w,
                                                        const float *bias, float *out, i64 columns, i64 width, int half) {
    v16 total[STACK][2] = {};
    float start[PANEL] = {0};
    if (bias) {
        memcpy(start, bias, sizeof(float) * width);
        for (int r = 0; r < rows; r++) total[r][0] = load(start), total[r][1] = load(start + LANES);
    }
    for (i64 d = 0; d < depth; d++) {
        v16 low = weights16(w, d * PANEL, half), high = weights16(w, d * PANEL + LANES, half);
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

static inline __attribute__((always_inline)) void linear_block(
    const float *x, i64 stride, i64 rows, i64 depth, const char *packed, i64 columns, const float *bias, float *out, int half) {
    for (i64 column = 0; column < columns; column += PANEL, packed += depth * PANEL * (half ? 2 : 4)) {
        i64 width = columns - column < PANEL ? columns - column : PANEL;
        const float *b = bias ? bias + column : 0;
        for (i64 r = 0; r < rows; r += STACK) {
            const float *from = x + r * stride;
            float *to = out + r * columns + column;
            switch (rows - r) {
            case 1: panel(1, from, stride, depth, packed, b, to, columns, width, half); break;
            case 2: panel(2, from, stride, depth, packed, b, to, columns, width, half); break;
            case 3: panel(3, from, stride, depth, packed, b, to, columns, width, half); break;
            case 4: panel(4, from, stride, depth, packed, b, to, columns, width, half); break;
            case 5: panel(5, from, stride, depth, packed, b, to, columns, width, half); break;
            case 6: panel(6, from, stride, depth, packed, b, to, columns, width, half); break;
            case 7: panel(7, from, stride, depth, packed, b, to, columns, width, half); break;
            default: panel(8, from, stride, depth, packed, b, to, columns, width, half);
            }
        }
    }
}

// out[rows][columns] = x[rows][depth] * weight^T + bias; BLOCK rows stay in the cache while all panels pass.
void linear(const float *x, i64 stride, i64 rows, i64 depth, const void *packed, int half, i64 columns, const float *bias,
            float *out) {
    for (i64 r = 0; r < rows; r += BLOCK) {
        i64 count = rows - r < BLOCK ? rows - r : BLOCK;
        if (half)
            linear_block(x + r * stride, stride, count, depth, packed, columns, bias, out + r * columns, 1);
        else
            linear_block(x + r * stride, stride, count, depth, packed, columns, bias, out + r * columns, 0);
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

// ---- gates

// out[rows][n] = silu(gate) * up, and with a share [rows] (a logit, strided) times its sigmoid.
void silu_and_mul(const float *gate, const float *up, i64 row_stride, i64 rows, i64 n, const float *share, float *out) {
    for (i64 r = 0; r < rows; r++, gate += row_stride, up += row_stride, out += n) {
        float scale = share ? sigmoid1(share[r * row_stride]) : 1.0f;
        for (i64 i = 0; i < n; i++) out[i] = gate[i] * sigmoid1(gate[i]) * up[i] * scale;
    }
}

// x[rows][n] *= sigmoid(gate), in place.
void mul_sigmoid(float *x, const float *gate, i64 gate_stride, i64 rows, i64 n) {
    for (i64 r = 0; r < rows; r++, gate += gate_stride, x += n)
        for (i64 i = 0; i < n; i++) x[i] *= sigmoid1(gate[i]);
}

// x[rows][heads][dim] = x / sqrt(mean(x^2) + eps) * weight[dim] * silu(gate), in place.
void gated_norm(float *x, const float *gate, i64 gate_stride, i64 rows, i64 heads, i64 dim, const float *weight, float eps) {
    for (i64 r = 0; r < rows; r++)
        for (i64 h = 0; h < heads; h++) {
            float *line = x + (r * heads + h) * dim;
            const float *z = gate + r * gate_stride + h * dim;
            float scale = 1.0f / sqrtf(dot(line, line, dim) / (float)dim + eps);
            for (i64 i = 0; i < dim; i++) line[i] *= scale * weight[i] * z[i] * sigmoid1(z[i]);
        }
}

// x[rows][n] += y, and out = x / sqrt(mean(x^2) + eps) * weight.
void add_norm(float *x, const float *y, i64 rows, i64 n, const float *weight, float eps, float *out) {
    for (i64 r = 0; r < rows; r++, x += n, y += n, out += n) {
        for (i64 i = 0; i < n; i++) x[i] += y[i];
        float scale = 1.0f / sqrtf(dot(x, x, n) / (float)n + eps);
        for (i64 i = 0; i < n; i++) out[i] = x[i] * scale * weight[i];
    }
}
