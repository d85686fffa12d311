/* What decoding and training do on a CPU between their matrix products: one pass over memory each.
 *
 * A row's result depends on that row alone, so a batch may be split over threads anywhere. Arithmetic is float32
 * whatever the storage. The typed half of the file is included twice: for float and for bfloat16.
 */
#ifndef T

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#define WIDE 1
#else
#define WIDE 0
#endif

#define TILE 64   /* keys at a time: a tile stays in the first-level cache for all query heads of its key head */
#define WORTH_A_TEAM 65536 /* values: fewer are done before other threads have woken */
#define BLOCK 256 /* tokens per block of the two-level inverse CDF, as in sampler.py */

typedef uint16_t bf16;

static inline float widen(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline bf16 narrow(float value) { /* to nearest, ties to even; NaN stays NaN */
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (bf16)((bits >> 16) | 64);
    return (bf16)((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

/* e^x by Cephes' polynomial, relative error below 3e-7; 0 below -87.3; NaN stays NaN. */
static inline float exp_fast(float x) {
    float y = x > 88.0f ? 88.0f : x;
    y = y < -87.3f ? -87.3f : y;
    float n = rintf(y * 1.44269504088896341f);
    float r = (y - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    int32_t bits = ((int32_t)n + 127) * (1 << 23);
    float scale;
    memcpy(&scale, &bits, 4);
    return x < -87.3f ? 0.0f : p * scale;
}

static inline float dot(const float *a, const float *b, long n) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (long i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

/* scores [count] = keys [count, dim] . q [dim] */
static inline void score_tile(const float *q, const float *keys, float *scores, long count, long dim) {
    long t = 0;
#if WIDE
    if (dim % 8 == 0)
        for (; t + 8 <= count; t += 8) {
            __m256 sum[8];
            for (int j = 0; j < 8; j++) sum[j] = _mm256_setzero_ps();
            for (long d = 0; d < dim; d += 8) {
                __m256 at = _mm256_loadu_ps(q + d);
                for (int j = 0; j < 8; j++) sum[j] = _mm256_fmadd_ps(at, _mm256_loadu_ps(keys + (t + j) * dim + d), sum[j]);
            }
            __m256 low = _mm256_hadd_ps(_mm256_hadd_ps(sum[0], sum[1]), _mm256_hadd_ps(sum[2], sum[3]));
            __m256 high = _mm256_hadd_ps(_mm256_hadd_ps(sum[4], sum[5]), _mm256_hadd_ps(sum[6], sum[7]));
            _mm256_storeu_ps(scores + t, _mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31)));
        }
#endif
    for (; t < count; t++) scores[t] = dot(q, keys + t * dim, dim);
}

#if WIDE
static inline void mix_columns(const float *p, const float *values, float *out, long count, long dim, const int wide) {
    __m256 sum[8];
    for (int i = 0; i < wide; i++) sum[i] = _mm256_loadu_ps(out + 8 * i);
    for (long t = 0; t < count; t++) {
        __m256 share = _mm256_broadcast_ss(p + t);
        for (int i = 0; i < wide; i++) sum[i] = _mm256_fmadd_ps(share, _mm256_loadu_ps(values + t * dim + 8 * i), sum[i]);
    }
    for (int i = 0; i < wide; i++) _mm256_storeu_ps(out + 8 * i, sum[i]);
}
#endif

/* out [dim] += p [count] . values [count, dim] */
static inline void mix_tile(const float *p, const float *values, float *out, long count, long dim) {
    long d = 0;
#if WIDE
    for (; d + 64 <= dim; d += 64) mix_columns(p, values + d, out + d, count, dim, 8);
    for (; d + 32 <= dim; d += 32) mix_columns(p, values + d, out + d, count, dim, 4);
    for (; d + 8 <= dim; d += 8) mix_columns(p, values + d, out + d, count, dim, 1);
#endif
    if (d < dim)
        for (long t = 0; t < count; t++)
            for (long i = d; i < dim; i++) out[i] += p[t] * values[t * dim + i];
}

/* scores [n] -> e^(score - largest), in place; returns their sum. cap > 0: cap tanh(score / cap) first. */
static inline float exponentiate(float *scores, long n, float scale, float cap) {
    float largest = -INFINITY, sum = 0;
    if (cap > 0)
        for (long i = 0; i < n; i++) scores[i] = cap * (1.0f - 2.0f / (exp_fast(2.0f * scale / cap * scores[i]) + 1.0f));
    else
        for (long i = 0; i < n; i++) scores[i] *= scale;
#pragma omp simd reduction(max : largest)
    for (long i = 0; i < n; i++) largest = scores[i] > largest ? scores[i] : largest;
#pragma omp simd reduction(+ : sum)
    for (long i = 0; i < n; i++) {
        scores[i] = exp_fast(scores[i] - largest);
        sum += scores[i];
    }
    return sum;
}

static inline void normalise(float *x, const float *weight, long n, float eps) {
    float scale = 1.0f / sqrtf(dot(x, x, n) / (float)n + eps);
    for (long i = 0; i < n; i++) x[i] = x[i] * scale * weight[i];
}

/* pairs [dim / 2, 2] turned by turns [dim / 2, 2] of cos, sin */
static inline void rotate(float *x, const float *turns, long dim) {
    for (long i = 0; i < dim; i += 2) {
        float a = x[i], b = x[i + 1];
        x[i] = a * turns[i] - b * turns[i + 1];
        x[i + 1] = a * turns[i + 1] + b * turns[i];
    }
}

/* ---- matrix products: y [n, width] = x [n, depth] W^T, W packed in panels [panels, depth, PANEL] of its rows ----
 * Made for the few rows of a decode step, where BLAS reaches a third of its peak. A row's bits do not depend on n. */

#if defined(__AVX512F__)
#define LANES 16
#define ROWS 12
#else
#define LANES 8
#define ROWS 6
#endif
#define PANEL (2 * LANES)
#define CACHED 65536 /* floats of x that stay in the second-level cache while a panel passes */

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

static inline __attribute__((always_inline)) void multiply_block(
    const float *x, const float *w, float *y, long depth, long ld, long columns, const float *bias, long add, const int rows) {
    vec sum[ROWS][2];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) sum[r][0] = sum[r][1] = (vec){0};
    for (long k = 0; k < depth; k++, w += PANEL) {
        const vec low = *(const vec *)w, high = *(const vec *)(w + LANES);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            sum[r][0] += x[r * depth + k] * low;
            sum[r][1] += x[r * depth + k] * high;
        }
    }
    for (int r = 0; r < rows; r++) {
        float *out = y + r * ld;
        if (columns == PANEL && !bias) {
            if (add) sum[r][0] += *(const vec *)out, sum[r][1] += *(const vec *)(out + LANES);
            *(vec *)out = sum[r][0];
            *(vec *)(out + LANES) = sum[r][1];
        } else {
            float edge[PANEL];
            *(vec *)edge = sum[r][0];
            *(vec *)(edge + LANES) = sum[r][1];
            for (long j = 0; j < columns; j++) out[j] = (add ? out[j] : 0.0f) + (bias ? bias[j] : 0.0f) + edge[j];
        }
    }
}

long panel_width(void) { return PANEL; }

static inline __attribute__((always_inline)) void transpose(vec t[LANES]) {
#pragma GCC unroll 4
    for (int s = 1; s < LANES; s *= 2)
#pragma GCC unroll 16
        for (int r = 0; r < LANES; r++)
            if (!(r & s)) { /* halves of 2s by 2s squares change places */
                vec a = t[r], b = t[r + s], above, below;
#pragma GCC unroll 16
                for (int i = 0; i < LANES; i++) {
                    above[i] = i & s ? b[i - s] : a[i];
                    below[i] = i & s ? b[i] : a[i + s];
                }
                t[r] = above, t[r + s] = below;
            }
}

/* New memory comes in pages of 2 MB where the system has them: a page of 4 KB at a time takes longer than to fill it. */
void large_pages(float *at, long bytes) {
#if defined(MADV_HUGEPAGE)
    const uintptr_t page = (uintptr_t)1 << 21, from = ((uintptr_t)at + page - 1) & ~(page - 1);
    const uintptr_t to = ((uintptr_t)at + (uintptr_t)bytes) & ~(page - 1);
    if (from < to) (void)madvise((void *)from, to - from, MADV_HUGEPAGE); /* advice: without it all is as before */
#else
    (void)at, (void)bytes;
#endif
}

/* Row of W that comes to be row r: heads of 2 `pairs` rows whose halves are interleaved; 0 pairs: as they are. */
static inline long source_row(long r, long pairs) {
    if (!pairs) return r;
    const long within = r % (2 * pairs);
    return r - within + within % 2 * pairs + within / 2;
}

static inline void put(float *to, vec value) { /* past the caches, which need not read first what is written whole */
#if defined(__AVX512F__)
    if (((uintptr_t)to & 63) == 0) {
        _mm512_stream_ps(to, (__m512)value);
        return;
    }
#elif WIDE
    if (((uintptr_t)to & 31) == 0) {
        _mm256_stream_ps(to, (__m256)value);
        return;
    }
#endif
    *(vec *)to = value;
}

#define LINE 16 /* floats of a line of the cache, which is read and written as a whole */

static inline __attribute__((always_inline)) void square(const float *const *from, long k, vec t[LANES]) {
#pragma GCC unroll 16
    for (int r = 0; r < LANES; r++) t[r] = *(const vec *)(from[r] + k);
    transpose(t);
}

/* Of a panel whose rows are all there, as many columns as are whole lines; how many those are. from: its rows */
static inline long pack_lines(const float *const from[PANEL], float *to, long depth) {
    long k = 0;
    for (; k + LINE <= depth; k += LINE, to += LINE * PANEL) {
        vec low[LINE];
        for (int c = 0; c < LINE; c += LANES) {
            vec t[LANES];
            square(from, k + c, t);
#pragma GCC unroll 16
            for (int r = 0; r < LANES; r++) low[c + r] = t[r];
        }
        for (int c = 0; c < LINE; c += LANES) {
            vec t[LANES];
            square(from + LANES, k + c, t);
#pragma GCC unroll 16
            for (int r = 0; r < LANES; r++) {
                put(to + (c + r) * PANEL, low[c + r]);
                put(to + (c + r) * PANEL + LANES, t[r]);
            }
        }
    }
    return k;
}

/* The rows of W [width, depth] that are in panel p, if W is the rows first .. first + width of the panels; others stay as they are */
static inline void pack_panel(const float *weight, float *panels, long p, long first, long width, long depth, long pairs) {
    const float *rows[PANEL];
    const long end = first + width;
    for (long r = 0; r < PANEL; r++) {
        const long row = p * PANEL + r - first;
        rows[r] = row >= 0 && row < width ? weight + source_row(row, pairs) * depth : NULL;
    }
    const int full = p * PANEL >= first && (p + 1) * PANEL <= end;
    const long begin = full ? pack_lines(rows, panels + p * depth * PANEL, depth) : 0;
    for (long row = p * PANEL; row < (p + 1) * PANEL; row += LANES) {
        const float *const *from = rows + row % PANEL;
        const int whole = row >= first && row + LANES <= end;
        for (long k = begin; k < depth; k += LANES) {
            float *to = panels + (p * depth + k) * PANEL + row % PANEL;
            if (whole && k + LANES <= depth) {
                vec t[LANES];
                square(from, k, t);
                for (int r = 0; r < LANES; r++) put(to + r * PANEL, t[r]);
            } else {
                for (int r = 0; r < LANES; r++)
                    for (int c = 0; row + r >= first && row + r < end && c < LANES && k + c < depth; c++)
                        to[c * PANEL + r] = from[r][k + c];
            }
        }
    }
}

static inline void all_is_put(void) { /* before anybody is told that it is there */
#if WIDE
    _mm_sfence();
#endif
}

/* W [width, depth] -> rows first .. first + width of the panels */
void pack_float32(const float *weight, float *panels, long first, long width, long depth, long pairs, long threads) {
    (void)threads;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(static) nowait
        for (long p = first / PANEL; p < (first + width + PANEL - 1) / PANEL; p++) pack_panel(weight, panels, p, first, width, depth, pairs);
        all_is_put();
    }
}

/* given [n, 6]: of each weight its address, that of its panels, and first, width, depth and pairs as above */
void pack_each(const long *given, long n) {
    for (; n > 0; n--, given += 6)
        for (long p = given[2] / PANEL; p < (given[2] + given[3] + PANEL - 1) / PANEL; p++)
            pack_panel((const float *)(uintptr_t)given[0], (float *)(uintptr_t)given[1], p, given[2], given[3], given[4], given[5]);
    all_is_put();
}

/* y [n, width] = x [n, depth] W^T + bias, or with add y += that; rows of y are ld floats apart. padded is for tiles */
static void product_float32(
    const float *x, const float *panels, const float *bias, float *y, float *padded, long ld, long n, long depth, long width, long add,
    long threads) {
    const long step = CACHED / depth / ROWS > 0 ? CACHED / depth / ROWS * ROWS : ROWS;
    (void)threads, (void)padded;
    for (long start = 0; start < n; start += step) {
        const long end = start + step < n ? start + step : n;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
        for (long p = 0; p < (width + PANEL - 1) / PANEL; p++) {
            const float *w = panels + p * depth * PANEL, *b = bias ? bias + p * PANEL : NULL;
            const long columns = width - p * PANEL < PANEL ? width - p * PANEL : PANEL;
            long row = start;
            for (; row + ROWS <= end; row += ROWS)
                multiply_block(x + row * depth, w, y + row * ld + p * PANEL, depth, ld, columns, b, add, ROWS);
            const float *rest = x + row * depth;
            float *out = y + row * ld + p * PANEL;
            switch (end - row) {
#define REST(r) case r: multiply_block(rest, w, out, depth, ld, columns, b, add, r); break;
                REST(1) REST(2) REST(3) REST(4) REST(5)
#if ROWS > 6
                REST(6) REST(7) REST(8) REST(9) REST(10) REST(11)
#endif
            }
        }
    }
}

#include "nf4.c"
#include "crc.c"
#include "scan.c"
#include "delta.c"
#include "segments.c"
#include "low_rank.c"
#include "tiles.c"

#define RUN 4096 /* values per turn of a parallel loop over a flat array */

/* out = x [n, heads, dim] turned by cos and sin [n, dim], pairs (i, i + dim / 2); back: the gradient of x, given that of out as x */
void rotation(
    const float *x, const float *cos, const float *sin, float *restrict out, long n, long heads, long dim, long back, long threads) {
    const long half = dim / 2;
    (void)threads;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && n * heads * dim > WORTH_A_TEAM)
    for (long t = 0; t < n; t++) {
        const float *c = cos + t * dim, *s = sin + t * dim, *a = x + t * heads * dim;
        float *y = out + t * heads * dim;
        for (long h = 0; h < heads; h++, a += dim, y += dim)
            if (back)
                for (long i = 0; i < half; i++) {
                    y[i] = a[i] * c[i] + a[half + i] * s[half + i];
                    y[half + i] = a[half + i] * c[half + i] - a[i] * s[i];
                }
            else
                for (long i = 0; i < half; i++) {
                    y[i] = a[i] * c[i] - a[half + i] * s[i];
                    y[half + i] = a[half + i] * c[half + i] + a[i] * s[half + i];
                }
    }
}

/* ---- one pass of tokens through all layers ----
 * A call of its own, because between calls the interpreter's lock goes back and forth. The same functions called one by one
 * give the same bits, and are what does the layers that this leaves out: experts, norms with a bias, no gate. */

struct layer { /* as `LayerPointers` in kernels.py; null where a model has none. Norms are float32, panels and biases of type T */
    const float *norm;
    const void *qkv, *qkv_bias;
    const float *qk_norm;
    const void *out, *out_bias;
    const float *out_norm, *mlp_norm;
    const void *up, *up_bias, *down, *down_bias;
    const float *mlp_out_norm;
    long window, rope;
};

struct stack { /* as `Stack` */
    const struct layer *layers;
    long count, hidden, ffn, heads, kv_heads, dim, kind;
    float eps, scale, cap;
};

#define PARTS 3 /* projections of one product at most */

struct low_rank { /* panels of A [parts rank, depth] and of each part's B [its width, rank]; null where there are none */
    const void *a, *b[PARTS];
};

struct low_ranks { /* of one layer, as `LowRankPointers` */
    struct low_rank qkv, out, up, down;
};

struct set_rows { /* as `SetRows`: the rows first .. end have factors, which a call adds to its products */
    const struct low_ranks *layers;
    long first, end, rank;
    float scale;
};

struct sets {
    const struct set_rows *rows;
    long count, layer;
    void *low;    /* scratch [n, (PARTS + 1) rank] */
    void *padded; /* scratch: see `Kernels.padding` */
};

#define LOW_RANK(s, i, which) (&(s)->rows[i].layers[(s)->layer].which)
#define WORTH_ALL 262144 /* multiply-adds of a product that all threads finish sooner than one */

#define T float
#define NAME(f) f##_float32
#define LOAD(x) (x)
#define STORE(x) (x)
#define FLOATS(source, buffer, count) (source)
#define LAYERS 1
#define product_wide_float32 product_float32
#include "kernels.c"
#undef T
#undef LAYERS
#undef NAME
#undef LOAD
#undef STORE
#undef FLOATS

static inline const float *widened(const bf16 *source, float *buffer, long count) {
    for (long i = 0; i < count; i++) buffer[i] = widen(source[i]);
    return buffer;
}

#define T bf16
#define NAME(f) f##_bfloat16
#define LOAD(x) widen(x)
#define STORE(x) narrow(x)
#define FLOATS(source, buffer, count) widened(source, buffer, count)
#define LAYERS TILES
#include "kernels.c"

#else /* ---- typed ---- */

/* out [n, width] = x / rms(x) * weight */
#define NORM(name, X, READ, Y, WRITE) \
    void name(const X *xs, const float *weight, Y *outs, long n, long width, float eps, long threads) { \
        (void)threads; \
        _Pragma("omp parallel for schedule(static) num_threads(threads) if (threads > 1 && n * width > WORTH_A_TEAM)") \
        for (long row = 0; row < n; row++) { \
            const X *x = xs + row * width; \
            Y *out = outs + row * width; \
            float sum = 0; \
            _Pragma("omp simd reduction(+ : sum)") \
            for (long i = 0; i < width; i++) sum += READ(x[i]) * READ(x[i]); \
            float scale = 1.0f / sqrtf(sum / (float)width + eps); \
            for (long i = 0; i < width; i++) out[i] = WRITE(READ(x[i]) * scale * weight[i]); \
        } \
    }
NORM(NAME(rms_norm), T, LOAD, T, STORE)
NORM(NAME(rms_norm_wide), float, (float), T, STORE)   /* of a residual stream */
NORM(NAME(rms_norm_exact), T, LOAD, float, (float)) /* for training */
#undef NORM

/* gate_up [n, 2 width] -> out [n, width] = act(gate) up. kind 0: SiLU, 1: GELU by tanh */
void NAME(gated)(const T *gate_up, T *outs, long n, long width, long kind, long threads) {
    (void)threads;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && n * width > WORTH_A_TEAM)
    for (long row = 0; row < n; row++) {
        const T *gate = gate_up + 2 * row * width, *up = gate + width;
        T *out = outs + row * width;
        if (kind == 0)
            for (long i = 0; i < width; i++) {
                float g = LOAD(gate[i]);
                out[i] = STORE(g / (1.0f + exp_fast(-g)) * LOAD(up[i]));
            }
        else
            for (long i = 0; i < width; i++) {
                float g = LOAD(gate[i]);
                out[i] = STORE(g / (1.0f + exp_fast(-1.5957691216f * (g + 0.044715f * g * g * g))) * LOAD(up[i]));
            }
    }
}

/* A token per row: norm and rotate its q and k, keep its k and v, attend to everything up to it.
 *
 * qkv [n, (heads + 2 kv_heads) dim], pairs of q and k interleaved · qk_norm [heads + kv_heads, dim] or null ·
 * turns [positions, dim] of (cos, sin) or null · positions [n] · slots [n] of the rows, or null for 0, 1, .. (rows of
 * one slot are in order: each sees the keys of those before it) · keys, values [slots, kv_heads, capacity, dim] ·
 * out [n, heads dim] · window: of the newest tokens that are seen, 0 is all ·
 * scratch: see `scratch_floats` in compiled.py
 */
void NAME(attend)(
    const T *qkv, const float *qk_norm, const float *turns, const int64_t *positions, const int64_t *slots, T *all_keys, T *all_values,
    T *out, float *scratch, long n, long heads, long kv_heads, long dim, long capacity, long window, float eps, float scale, float cap) {
    const long group = heads / kv_heads, width = (heads + 2 * kv_heads) * dim, slot = kv_heads * capacity * dim;
    float *row = scratch, *mixed = row + width, *buffer = mixed + group * dim, *scores = buffer + TILE * dim;
    for (long r = 0; r < n; r++, qkv += width, out += heads * dim) {
        T *keys = all_keys + (slots ? slots[r] : r) * slot, *values = all_values + (slots ? slots[r] : r) * slot;
        const long at = positions[r], from = window > 0 && at + 1 > window ? at + 1 - window : 0, seen = at + 1 - from;
        for (long i = 0; i < width; i++) row[i] = LOAD(qkv[i]);
        for (long h = 0; h < heads + kv_heads; h++) {
            if (qk_norm) normalise(row + h * dim, qk_norm + h * dim, dim, eps);
            if (turns) rotate(row + h * dim, turns + at * dim, dim);
        }
        for (long h = 0; h < kv_heads; h++) {
            const float *k = row + (heads + h) * dim, *v = k + kv_heads * dim;
            T *key = keys + (h * capacity + at) * dim, *value = values + (h * capacity + at) * dim;
            for (long d = 0; d < dim; d++) {
                key[d] = STORE(k[d]);
                value[d] = STORE(v[d]);
            }
        }
        for (long h = 0; h < kv_heads; h++) {
            const T *key = keys + (h * capacity + from) * dim, *value = values + (h * capacity + from) * dim;
            float sums[group];
            for (long t = 0; t < seen; t += TILE) {
                const long count = seen - t < TILE ? seen - t : TILE;
                const float *tile = FLOATS(key + t * dim, buffer, count * dim);
                for (long g = 0; g < group; g++) score_tile(row + (h * group + g) * dim, tile, scores + g * seen + t, count, dim);
            }
            for (long g = 0; g < group; g++) sums[g] = exponentiate(scores + g * seen, seen, scale, cap);
            memset(mixed, 0, sizeof(float) * group * dim);
            for (long t = 0; t < seen; t += TILE) {
                const long count = seen - t < TILE ? seen - t : TILE;
                const float *tile = FLOATS(value + t * dim, buffer, count * dim);
                for (long g = 0; g < group; g++) mix_tile(scores + g * seen + t, tile, mixed + g * dim, count, dim);
            }
            for (long g = 0; g < group; g++)
                for (long d = 0; d < dim; d++) out[(h * group + g) * dim + d] = STORE(mixed[g * dim + d] / sums[g]);
        }
    }
}

/* logits [n, vocab] -> the first id whose cumulative probability exceeds uniform [n], and its log-probability.
 * temperature [n]: 0 takes the largest logit, with its log-probability at temperature 1 ·
 * masses: scratch [ceil(vocab / BLOCK)] */
void NAME(sample)(
    const T *logits, const float *temperature, const double *uniform, int64_t *ids, float *logprobs, float *masses, long n, long vocab) {
    for (long row = 0; row < n; row++, logits += vocab) {
        float largest = -INFINITY;
#pragma omp simd reduction(max : largest)
        for (long i = 0; i < vocab; i++) largest = LOAD(logits[i]) > largest ? LOAD(logits[i]) : largest;
        const float scale = temperature[row] > 0 ? 1.0f / temperature[row] : 1.0f;
        double total = 0;
        for (long lo = 0, b = 0; lo < vocab; lo += BLOCK, b++) {
            const long hi = lo + BLOCK < vocab ? lo + BLOCK : vocab;
            float mass = 0;
#pragma omp simd reduction(+ : mass)
            for (long i = lo; i < hi; i++) mass += exp_fast((LOAD(logits[i]) - largest) * scale);
            masses[b] = mass;
            total += mass;
        }
        long id = 0;
        if (temperature[row] == 0) {
            while (id < vocab - 1 && !(LOAD(logits[id]) == largest)) id++;
        } else {
            double target = uniform[row] * total, below = 0;
            if (!(target < total)) target = nextafter(total, 0.0);
            long block = 0, last = (vocab - 1) / BLOCK; /* the sums below are those of the total: one exceeds the target */
            while (block < last && !(below + masses[block] > target)) below += masses[block++];
            const long lo = block * BLOCK, hi = lo + BLOCK < vocab ? lo + BLOCK : vocab;
            long possible = lo;
            for (id = lo; id < hi; id++) {
                const float p = exp_fast((LOAD(logits[id]) - largest) * scale);
                below += p;
                if (p > 0) possible = id;
                if (below > target) break;
            }
            if (id == hi) id = possible;
        }
        ids[row] = id;
        logprobs[row] = (LOAD(logits[id]) - largest) * scale - (float)log(total);
    }
}

#if LAYERS
/* add: y += x W^T + bias instead of y = ... · padded: see `Kernels.padding` */
void NAME(linear)(
    const T *x, const T *panels, const T *bias, T *y, T *padded, long n, long depth, long width, long add, long threads) {
    NAME(product)(x, panels, bias, y, padded, width, n, depth, width, add, threads);
}

/* y or, if it is not null, wide [n, width] += (x [n, depth] A^T * scale) B^T, for parts of y with these widths */
static void NAME(add_low_rank)(
    const struct set_rows *s, const struct low_rank *factors, const T *x, T *y, float *wide, const struct sets *sets, long depth,
    long width, const long *widths, long parts, long threads) {
    const long n = s->end - s->first, rank = s->rank, inner = parts * rank;
    T *low = sets->low, *padded = sets->padded;
    if (!factors->a) return;
    const long few = n * depth * inner < WORTH_ALL ? 1 : threads;
    NAME(product)(x + s->first * depth, factors->a, NULL, low, padded, inner, n, depth, inner, 0, few);
    for (long i = 0; i < n * inner; i++) low[i] = STORE(LOAD(low[i]) * s->scale); /* the few values between A and B */
    for (long p = 0, at = s->first * width; p < parts; at += widths[p++]) {
        const long team = n * rank * widths[p] < WORTH_ALL ? 1 : threads;
        T *part = low;
        if (!factors->b[p]) continue;
        if (parts > 1) {
            part = low + n * inner;
            for (long r = 0; r < n; r++) memcpy(part + r * rank, low + r * inner + p * rank, sizeof(T) * rank);
        }
        if (wide) NAME(product_wide)(part, factors->b[p], NULL, wide + at, padded, width, n, rank, widths[p], 1, team);
        else NAME(product)(part, factors->b[p], NULL, y + at, padded, width, n, rank, widths[p], 1, team);
    }
}

/* residual [n, width] += norm(x [n, depth] W^T + bias), with the factors at this offset of each layer's in W */
static void NAME(add_product)(
    const T *x, const T *panels, const T *bias, const float *norm, float *residual, T *spare, long n, long depth, long width, float eps,
    const struct sets *sets, long down, long threads) {
    if (norm) NAME(product)(x, panels, bias, spare, sets->padded, width, n, depth, width, 0, threads);
    else NAME(product_wide)(x, panels, bias, residual, sets->padded, width, n, depth, width, 1, threads);
    for (long i = 0; i < sets->count; i++)
        NAME(add_low_rank)(
            sets->rows + i, down ? LOW_RANK(sets, i, down) : LOW_RANK(sets, i, out), x, spare, norm ? NULL : residual, sets, depth,
            width, &width, 1, threads);
    if (!norm) return;
    NAME(rms_norm)(spare, norm, spare, n, width, eps, threads);
    for (long i = 0; i < n * width; i++) residual[i] += LOAD(spare[i]);
}

/* x [n, hidden]: embedded tokens, becomes what the last layer gives · turns [kinds, turned, dim] or null · kv: of the first
 * slot, in [layers, 2, all_slots, kv_heads, capacity, dim] · row, scratch: see `Kernels.layers` · rows: `sets` of them have factors,
 * with the scratch low · padded: see `Kernels.padding`; the rest as for `attend` */
void NAME(layers)(
    const struct stack *s, float *x, const int64_t *positions, const int64_t *slots, const float *turns, long turned, T *kv,
    long all_slots, long capacity, float *row, T *scratch, long n, const struct set_rows *rows, long count, T *low, T *padded,
    long threads) {
    const long q = s->heads * s->dim, k = s->kv_heads * s->dim, qkv_width = q + 2 * k, of_heads[] = {q, k, k}, of_ffn[] = {s->ffn, s->ffn};
    const long keys = all_slots * k * capacity; /* of one layer */
    T *normed = scratch, *qkv = normed + n * s->hidden, *mixed = qkv + n * qkv_width;
    T *up = qkv, *inner = up + 2 * n * s->ffn; /* attention and feed-forward take turns */
    struct sets sets = {rows, count, 0, low, padded};
    for (const struct layer *l = s->layers; l < s->layers + s->count; l++, kv += 2 * keys, sets.layer++) {
        NAME(rms_norm_wide)(x, l->norm, normed, n, s->hidden, s->eps, threads);
        NAME(product)(normed, l->qkv, l->qkv_bias, qkv, padded, qkv_width, n, s->hidden, qkv_width, 0, threads);
        for (long i = 0; i < count; i++)
            NAME(add_low_rank)(rows + i, LOW_RANK(&sets, i, qkv), normed, qkv, NULL, &sets, s->hidden, qkv_width, of_heads, 3, threads);
        NAME(attend)(
            qkv, l->qk_norm, turns ? turns + l->rope * turned * s->dim : NULL, positions, slots, kv, kv + keys, mixed, row, n, s->heads,
            s->kv_heads, s->dim, capacity, l->window, s->eps, s->scale, s->cap);
        NAME(add_product)(mixed, l->out, l->out_bias, l->out_norm, x, normed, n, q, s->hidden, s->eps, &sets, 0, threads);
        NAME(rms_norm_wide)(x, l->mlp_norm, normed, n, s->hidden, s->eps, threads);
        NAME(product)(normed, l->up, l->up_bias, up, padded, 2 * s->ffn, n, s->hidden, 2 * s->ffn, 0, threads);
        for (long i = 0; i < count; i++)
            NAME(add_low_rank)(rows + i, LOW_RANK(&sets, i, up), normed, up, NULL, &sets, s->hidden, 2 * s->ffn, of_ffn, 2, threads);
        NAME(gated)(up, inner, n, s->ffn, s->kind, threads);
        NAME(add_product)(inner, l->down, l->down_bias, l->mlp_out_norm, x, normed, n, s->ffn, s->hidden, s->eps, &sets, 1, threads);
    }
}
#endif

/* ---- training: with weights in float32, and gradients of what is float32 in float32 ---- */

/* Of float32 y = x / rms(x) * weight [n, width], given dy: dx [n, width], and dweight [threads, width], zeros before, whose sum
 * over threads is the gradient of the weight; null: it has none. */
void NAME(rms_norm_backward)(
    const T *x, const float *weight, const float *dy, T *dx, double *dweight, long n, long width, float eps, long threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && n * width > WORTH_A_TEAM)
    for (long part = 0; part < threads; part++) {
        double *sum = dweight ? dweight + part * width : NULL;
        float buffer[sizeof(T) < sizeof(float) ? width : 1];
        (void)buffer;
        for (long row = n * part / threads; row < n * (part + 1) / threads; row++) {
            const float *a = FLOATS(x + row * width, buffer, width), *d = dy + row * width;
            T *out = dx + row * width;
            float along = 0;
            const float inverse = 1.0f / sqrtf(dot(a, a, width) / (float)width + eps);
#pragma omp simd reduction(+ : along)
            for (long i = 0; i < width; i++) along += d[i] * weight[i] * a[i];
            along *= inverse * inverse / (float)width;
            for (long i = 0; i < width; i++) out[i] = STORE(inverse * (d[i] * weight[i] - a[i] * along));
            for (long i = 0; sum && i < width; i++) sum[i] += (double)(d[i] * (a[i] * inverse));
        }
    }
}

/* out [n] = gate / (1 + e^-gate) * up */
void NAME(swiglu)(const T *restrict gate, const T *restrict up, T *restrict out, long n, long threads) {
    (void)threads;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && n > WORTH_A_TEAM)
    for (long start = 0; start < n; start += RUN) {
        const long end = start + RUN < n ? start + RUN : n;
#pragma omp simd
        for (long i = start; i < end; i++) out[i] = STORE(LOAD(gate[i]) / (1.0f + exp_fast(-LOAD(gate[i]))) * LOAD(up[i]));
    }
}

void NAME(swiglu_backward)(
    const T *restrict gate, const T *restrict up, const T *restrict dy, T *restrict dgate, T *restrict dup, long n,
    long threads) {
    (void)threads;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && n > WORTH_A_TEAM)
    for (long start = 0; start < n; start += RUN) {
        const long end = start + RUN < n ? start + RUN : n;
#pragma omp simd
        for (long i = start; i < end; i++) {
            const float g = LOAD(gate[i]), share = 1.0f / (1.0f + exp_fast(-g));
            dgate[i] = STORE(LOAD(dy[i]) * LOAD(up[i]) * share * (1.0f + g * (1.0f - share)));
            dup[i] = STORE(LOAD(dy[i]) * g * share);
        }
    }
}

#endif
