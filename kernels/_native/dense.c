// Linear layers, norms, rotary embedding and gates over rows.

#include "kernels.h"

// ---- linear layers. Weights are packed in panels of 16 columns, zeros behind the last: float32 as [depth][16]; in
// bfloat16 (half), where that loses nothing, as [depth / 2][16][2], two depths side by side and a zero behind an odd end.

#define PANEL LANES
// Rows that share one pass over a panel: as many sums as keep the multipliers busy and fit registers.
#ifdef __AVX512F__
#define STACK 16
#else
#define STACK 6
#endif
#define SPREAD 4   // panels side by side where there are fewer rows
#define BLOCK 64   // rows that stay in the cache while all panels pass
#define DEEP 4096  // deeper rows are taken stack by stack, for the sake of the thread's own stack

typedef struct {
    const float *x;  // [depth][STACK] turned, or one row
    i64 depth;
    const char *weight;
    i64 panel_bytes;
    const float *bias;
    float *out;
    i64 columns;
} product_t;

// Each sum goes through the depths in order, whatever the tile: a row's result does not depend on the rows beside it.
INLINE void tile(int rows, int panels, const product_t *p, i64 width, int half) {
    v16 total[STACK][SPREAD];
    for (int v = 0; v < panels; v++) {
        v16 start = p->bias ? load_some(p->bias + v * PANEL, width - v * PANEL) : (v16){};
        for (int r = 0; r < rows; r++) total[r][v] = start;
    }
    const float *x = p->x;
    const char *weight = p->weight;
    i64 left = p->depth, panel_bytes = p->panel_bytes, step = rows == 1 ? 1 : STACK;
    for (; half && left >= 2; left -= 2, weight += 4 * PANEL, x += 2 * step) {
        v16 first[SPREAD], second[SPREAD];
        for (int v = 0; v < panels; v++) {
            fetch(weight + v * panel_bytes);
            widen32((const uint16_t *)(weight + v * panel_bytes), &first[v], &second[v]);
        }
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < panels; v++) total[r][v] += splat(x[r]) * first[v];
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < panels; v++) total[r][v] += splat(x[step + r]) * second[v];
    }
    for (; left; left--, weight += 4 * PANEL, x += step)
        for (int v = 0; v < panels; v++) {
            v16 w, none;
            if (half)
                widen32((const uint16_t *)(weight + v * panel_bytes), &w, &none);
            else
                w = load((const float *)(weight + v * panel_bytes));
            for (int r = 0; r < rows; r++) total[r][v] += splat(x[r]) * w;
        }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < panels; v++)
            store_some(p->out + r * p->columns + v * PANEL, total[r][v], width - v * PANEL);
}

INLINE void tiles(int rows, const product_t *p, i64 width, int half) {
    switch (rows) {
#define CASE(n) case n: tile(n, 1, p, width, half); break
        CASE(1); CASE(2); CASE(3); CASE(4); CASE(5);
#if STACK == 16
        CASE(6); CASE(7); CASE(8); CASE(9); CASE(10); CASE(11); CASE(12); CASE(13); CASE(14); CASE(15);
#endif
#undef CASE
    default: tile(STACK, 1, p, width, half);
    }
}

// [rows][depth] to [depth][STACK]: the numbers that meet one row of weights lie side by side.
static void turn(const float *x, i64 stride, i64 rows, i64 depth, float *out) {
#if STACK == 16
    for (i64 d = 0; d < depth; d += LANES, out += LANES * STACK) {
        v16 line[STACK], column[LANES];
        for (i64 r = 0; r < STACK; r++) line[r] = r < rows ? load_some(x + r * stride + d, depth - d) : (v16){};
        transpose16(line, column);
        for (i64 i = 0; i < LANES && i < depth - d; i++) store(out + i * STACK, column[i]);
    }
#else
    for (i64 r = 0; r < rows; r++)
        for (i64 d = 0; d < depth; d++) out[d * STACK + r] = x[r * stride + d];
#endif
}

// `turned` holds stacks of rows one behind the other.
INLINE void linear_block(product_t at, const float *turned, i64 rows, int half) {
    float *out = at.out;
    for (i64 column = 0, step; column < at.columns; column += step) {
        step = rows < 4 && column + SPREAD * PANEL <= at.columns ? SPREAD * PANEL : PANEL;
        for (i64 r = 0; r < rows; r += STACK) {
            at.x = turned + r * at.depth;
            at.out = out + r * at.columns + column;
            if (step == PANEL)
                tiles(rows - r < STACK ? (int)(rows - r) : STACK, &at, at.columns - column, half);
            else if (rows == 1)
                tile(1, SPREAD, &at, step, half);
            else if (rows == 2)
                tile(2, SPREAD, &at, step, half);
            else
                tile(3, SPREAD, &at, step, half);
        }
        at.weight += step / PANEL * at.panel_bytes;
        if (at.bias) at.bias += step;
    }
}

// out[rows][columns] = x[rows][depth] * weight^T + bias.
void linear(const float *x, i64 stride, i64 rows, i64 depth, const void *packed, int half, i64 columns, const float *bias,
            float *out) {
    i64 panel_bytes = (half ? (depth + 1) / 2 : depth) * 4 * PANEL;
    i64 most = depth > DEEP ? STACK : BLOCK;
    for (i64 first = 0, count; first < rows; first += most) {
        count = rows - first < most ? rows - first : most;
        i64 stacks = (count + STACK - 1) / STACK;
        float turned[stacks * depth * STACK];
        for (i64 r = 0; r < count; r += STACK) {
            const float *from = x + (first + r) * stride;
            if (count - r == 1)
                memcpy(turned + r * depth, from, sizeof(float) * depth);
            else
                turn(from, stride, count - r < STACK ? count - r : STACK, depth, turned + r * depth);
        }
        product_t at = {0, depth, packed, panel_bytes, bias, out + first * columns, columns};
        if (half)
            linear_block(at, turned, count, 1);
        else
            linear_block(at, turned, count, 0);
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
