/* Products with weights of 4 bits (NF4) and of 8 bits (int8), included by kernels.c.
 *
 * A weight W [width, depth] is read as bitsandbytes stores it: codes of two values per byte, the first in the upper half, and
 * scales of blocks of 64 values: float32, or codes of 8 bits of a table, times the scale of their own block of 256, plus an
 * offset. The lanes of a vector are values of one row, all of one block: its 16 levels are multiplied by the scale once, and
 * codes are looked up among them; with AVX2, which has no such look-up of 32 bits, the scale multiplies the sum of a block.
 * Upper and lower halves of bytes are the columns 0, 2, .. and 1, 3, .., so x is brought into this order first. int8 has a scale
 * per row of W; a few rows are dequantised, in their own order, before they are multiplied. The bits of a row of y depend on that row of x alone. */

#define OF_127 7.874015718698502e-3f /* the reciprocal of 127, as in quant.py */
#define NF4_BLOCK 64
#define NF4_CHUNK 64    /* blocks whose scales are computed together */
#define NF4_AT_ONCE 48  /* rows of x that stay in the second-level cache while the weight passes */
#define NF4_RUN 16      /* rows of W per turn of a parallel loop */
#define NF4_GROUP (2 * LANES) /* columns whose halves are put apart */
#define NF4_WIDE 4 /* rows of W at a time for one row of x */
#if LANES == 16
#define NF4_TILE 4 /* rows of W at a time for more rows of x: as many sums as there are registers */
#else
#define NF4_TILE 2
#endif
#define NF4_MOST 6   /* rows of x at a time */
#define NF4_DIRECT 4 /* rows of x for which codes are looked up during the product; for more, rows of W are dequantised before */
#define NF4_BY_BYTES (WIDE && LANES == 8) /* with AVX2 codes are looked up during the product for all rows, so many at a time */

static const float nf4_levels[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f, -0.18477343022823334f,
    -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
    0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};
#if NF4_BY_BYTES
static const uint8_t nf4_bytes[4][16] __attribute__((aligned(16))) = { /* of the levels, the lowest first */
    {0x00, 0xb1, 0x30, 0xa0, 0x4d, 0x3f, 0x71, 0x00, 0xff, 0xe3, 0xdd, 0x3a, 0xb8, 0xab, 0xb3, 0x00},
    {0x00, 0x39, 0x6b, 0x32, 0xa2, 0x35, 0x78, 0x00, 0xfa, 0xca, 0x04, 0x03, 0xa4, 0x07, 0x13, 0x00},
    {0x80, 0x32, 0x06, 0xca, 0x91, 0x3d, 0xba, 0x00, 0xa2, 0x24, 0x7c, 0xad, 0xe1, 0x10, 0x39, 0x80},
    {0xbf, 0xbf, 0xbf, 0xbe, 0xbe, 0xbe, 0xbd, 0x00, 0x3d, 0x3e, 0x3e, 0x3e, 0x3e, 0x3f, 0x3f, 0x3f}};
#endif

struct nf4 { /* as `Codes` in kernels.py */
    const uint8_t *codes;         /* int8: int8_t [width, depth] */
    const void *scales;           /* [ceil(width * depth / 64)]: uint8_t, or float if `nested` is null; int8: float [width] */
    const float *nested, *values; /* [ceil(scales / 256)] and [256] */
    float offset;
    long width, depth, bits; /* bits: 4, 8 (int8), or 32: `codes` are the values, float [width, depth] */
};

/* out [depth] = the values of a row of int8. Products are rounded one by one, as in torch. */
static void int8_values(const struct nf4 *w, long row, float *out) {
    const int8_t *codes = (const int8_t *)w->codes + row * w->depth;
    const float scale = ((const float *)w->scales)[row];
#pragma omp simd
    for (long i = 0; i < w->depth; i++) out[i] = (float)codes[i] * scale * OF_127;
}

/* out [count] = the scales of blocks. Products and sums are rounded one by one, as in torch: not fused. */
#if defined(__GNUC__) && !defined(__clang__)
__attribute__((noinline, optimize("fp-contract=off")))
#endif
static void nf4_scales(const struct nf4 *w, long block, long count, float *out) {
    if (w->nested) {
        const uint8_t *codes = (const uint8_t *)w->scales + block;
        for (long i = 0; i < count; i++) out[i] = w->values[codes[i]] * w->nested[(block + i) >> 8];
        for (long i = 0; i < count; i++) out[i] += w->offset;
    } else
        memcpy(out, (const float *)w->scales + block, sizeof(float) * count);
}

/* ---- blocks that are whole rows' own: depth is a multiple of 64 ---- */

#if defined(__AVX512F__)
typedef struct { __m512 all; } nf4_table;
static inline nf4_table nf4_scaled(float scale) {
    return (nf4_table){_mm512_mul_ps(_mm512_loadu_ps(nf4_levels), _mm512_set1_ps(scale))};
}
static inline __attribute__((always_inline)) void nf4_lookup(const uint8_t *codes, const nf4_table *t, vec *even, vec *odd) {
    const __m512i both = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)codes));
    *odd = (vec)_mm512_permutexvar_ps(both, t->all);
    *even = (vec)_mm512_permutexvar_ps(_mm512_srli_epi32(both, 4), t->all);
}
static inline float nf4_sum(vec v) { return _mm512_reduce_add_ps((__m512)v); }
#elif NF4_BY_BYTES
static inline float nf4_sum(vec v) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
#else
typedef struct { float all[16]; } nf4_table;
static inline nf4_table nf4_scaled(float scale) {
    nf4_table t;
    for (int i = 0; i < 16; i++) t.all[i] = nf4_levels[i] * scale;
    return t;
}
static inline void nf4_lookup(const uint8_t *codes, const nf4_table *t, vec *even, vec *odd) {
    for (int i = 0; i < LANES; i++) {
        (*even)[i] = t->all[codes[i] >> 4];
        (*odd)[i] = t->all[codes[i] & 15];
    }
}
static inline float nf4_sum(vec v) {
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += v[i];
    return sum;
}
#endif

/* The column of a block that is at this place in the order in which its values are multiplied */
static inline int nf4_column(int place) {
    if (NF4_BY_BYTES) return place % 32 / 8 * 8 + place % 8 / 4 * 32 + place % 4 * 2 + place / 32;
    return place / NF4_GROUP * NF4_GROUP + place % LANES * 2 + place % NF4_GROUP / LANES;
}

/* out = x [n, depth] with the columns of each block in that order: row by row, or NF4_BY_BYTES block by block, of all rows */
static void nf4_arrange(const float *x, float *out, long depth, long n) {
    for (long m = 0; m < n; m++)
        for (long k = 0; k < depth; k += NF4_BLOCK) {
            float *to = NF4_BY_BYTES ? out + k * n + m * NF4_BLOCK : out + m * depth + k;
#pragma GCC unroll 64
            for (int place = 0; place < NF4_BLOCK; place++) to[place] = x[m * depth + k + nf4_column(place)];
        }
}

#if NF4_BY_BYTES
typedef struct { __m256i bytes[4]; } nf4_planes;
static inline __attribute__((always_inline)) nf4_planes nf4_load_planes(void) {
    nf4_planes p;
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) p.bytes[i] = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i *)nf4_bytes[i]));
    return p;
}

/* out: the levels of the upper halves of 32 bytes, or of the lower ones. Among 16 bytes 32 codes are looked up at once: each byte of
 * the levels is looked up apart, and the four are put together. */
static inline __attribute__((always_inline)) void nf4_half(const nf4_planes *p, __m256i codes, int lower, __m256 out[4]) {
    const __m256i each = _mm256_and_si256(lower ? codes : _mm256_srli_epi16(codes, 4), _mm256_set1_epi8(15));
    const __m256i first = _mm256_shuffle_epi8(p->bytes[0], each), second = _mm256_shuffle_epi8(p->bytes[1], each);
    const __m256i third = _mm256_shuffle_epi8(p->bytes[2], each), fourth = _mm256_shuffle_epi8(p->bytes[3], each);
    const __m256i a = _mm256_unpacklo_epi8(first, second), b = _mm256_unpacklo_epi8(third, fourth);
    const __m256i c = _mm256_unpackhi_epi8(first, second), d = _mm256_unpackhi_epi8(third, fourth);
    out[0] = (__m256)_mm256_unpacklo_epi16(a, b), out[1] = (__m256)_mm256_unpackhi_epi16(a, b);
    out[2] = (__m256)_mm256_unpacklo_epi16(c, d), out[3] = (__m256)_mm256_unpackhi_epi16(c, d);
}

/* sums [last - first, n] of rows of W times x [n, depth], arranged block by block */
static inline __attribute__((always_inline)) void nf4_dots(
    const float *x, const struct nf4 *w, long first, long last, float *sums, const int n) {
    const long blocks = w->depth / NF4_BLOCK;
    const nf4_planes planes = nf4_load_planes();
    float scales[NF4_CHUNK];
    for (long row = first; row < last; row++, sums += n) {
        __m256 total[NF4_DIRECT];
#pragma GCC unroll 4
        for (int m = 0; m < n; m++) total[m] = _mm256_setzero_ps();
        for (long start = 0; start < blocks; start += NF4_CHUNK) {
            const long count = blocks - start < NF4_CHUNK ? blocks - start : NF4_CHUNK;
            const uint8_t *codes = w->codes + (row * blocks + start) * (NF4_BLOCK / 2);
            const float *at = x + start * NF4_BLOCK * n;
            nf4_scales(w, row * blocks + start, count, scales);
            for (long b = 0; b < count; b++, codes += NF4_BLOCK / 2, at += NF4_BLOCK * n) {
                const __m256i block = _mm256_loadu_si256((const __m256i *)codes);
                __m256 sum[NF4_DIRECT], levels[4];
                __builtin_prefetch(codes + 1024);
#pragma GCC unroll 2
                for (int lower = 0; lower < 2; lower++) {
                    nf4_half(&planes, block, lower, levels);
#pragma GCC unroll 4
                    for (int i = 0; i < 4; i++)
#pragma GCC unroll 4
                        for (int m = 0; m < n; m++) {
                            const __m256 values = _mm256_loadu_ps(at + NF4_BLOCK * m + 32 * lower + 8 * i);
                            sum[m] = lower || i ? _mm256_fmadd_ps(levels[i], values, sum[m]) : _mm256_mul_ps(levels[i], values);
                        }
                }
                const __m256 scale = _mm256_set1_ps(scales[b]);
#pragma GCC unroll 4
                for (int m = 0; m < n; m++) total[m] = _mm256_fmadd_ps(scale, sum[m], total[m]);
            }
        }
#pragma GCC unroll 4
        for (int m = 0; m < n; m++) sums[m] = nf4_sum((vec)total[m]);
    }
}

/* The same for n up to NF4_DIRECT */
static void nf4_looked_up(const float *x, const struct nf4 *w, long first, long last, float *sums, long n) {
    switch (n) {
        case 1: nf4_dots(x, w, first, last, sums, 1); break;
        case 2: nf4_dots(x, w, first, last, sums, 2); break;
        case 3: nf4_dots(x, w, first, last, sums, 3); break;
        case 4: nf4_dots(x, w, first, last, sums, 4); break;
    }
}
#endif

/* tile [rows, depth] = rows of W, dequantised and arranged */
static void nf4_tile(const struct nf4 *w, long row, float *tile, long rows) {
    if (w->bits == 8) {
        for (long r = 0; r < rows; r++) int8_values(w, row + r, tile + r * w->depth);
        return;
    }
#if !NF4_BY_BYTES
    const long blocks = w->depth / NF4_BLOCK;
    float scales[NF4_CHUNK];
    for (long b = row * blocks; b < (row + rows) * blocks; b++) {
        const long done = (b - row * blocks) % NF4_CHUNK, left = (row + rows) * blocks - b;
        if (done == 0) nf4_scales(w, b, left < NF4_CHUNK ? left : NF4_CHUNK, scales);
        const nf4_table table = nf4_scaled(scales[done]);
        __builtin_prefetch(w->codes + b * (NF4_BLOCK / 2) + 4096);
#pragma GCC unroll 4
        for (int g = 0; g < NF4_BLOCK / NF4_GROUP; g++, tile += NF4_GROUP)
            nf4_lookup(w->codes + b * (NF4_BLOCK / 2) + g * LANES, &table, (vec *)tile, (vec *)(tile + LANES));
    }
#endif
}

/* sum [rows][n] += a vector of rows of W times that of x [n, depth] */
static inline __attribute__((always_inline)) void nf4_add(
    const float *x, long depth, const vec *w, vec sum[NF4_WIDE][NF4_MOST], const int rows, const int n) {
#pragma GCC unroll 8
    for (int m = 0; m < n; m++) {
        const vec values = *(const vec *)(x + m * depth);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) sum[r][m] += w[r] * values;
    }
}

/* sums [rows, n] of rows of W from `row` on times x [n, depth], arranged; tiled: of those rows in `tile`, from `nf4_tile` */
static inline __attribute__((always_inline)) void nf4_sums(
    const float *x, const struct nf4 *w, long row, const float *tile, float *sums, const int tiled, const int rows, const int n) {
    const long depth = w->depth, blocks = depth / NF4_BLOCK;
    vec sum[NF4_WIDE][NF4_MOST];
#if !NF4_BY_BYTES
    float scales[NF4_WIDE][NF4_CHUNK];
#endif
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int m = 0; m < n; m++) sum[r][m] = (vec){0};
    for (long b = 0; b < blocks; b++) {
        const float *at = x + b * NF4_BLOCK;
        if (tiled) {
#pragma GCC unroll 1
            for (int g = 0; g < NF4_BLOCK; g += LANES) {
                vec values[NF4_WIDE];
#pragma GCC unroll 4
                for (int r = 0; r < rows; r++) values[r] = *(const vec *)(tile + r * depth + b * NF4_BLOCK + g);
                nf4_add(at + g, depth, values, sum, rows, n);
            }
            continue;
        }
#if !NF4_BY_BYTES
        if (b % NF4_CHUNK == 0)
            for (int r = 0; r < rows; r++)
                nf4_scales(w, (row + r) * blocks + b, blocks - b < NF4_CHUNK ? blocks - b : NF4_CHUNK, scales[r]);
        nf4_table tables[NF4_WIDE];
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) tables[r] = nf4_scaled(scales[r][b % NF4_CHUNK]);
        const uint8_t *codes = w->codes + (row * blocks + b) * (NF4_BLOCK / 2);
#pragma GCC unroll 4
        for (int g = 0; g < NF4_BLOCK; g += NF4_GROUP) {
            vec even[NF4_WIDE], odd[NF4_WIDE];
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) nf4_lookup(codes + r * (depth / 2) + g / 2, tables + r, even + r, odd + r);
            if (g == 0)
#pragma GCC unroll 4
                for (int r = 0; r < rows; r++) __builtin_prefetch(codes + (r + rows) * (depth / 2));
            nf4_add(at + g, depth, even, sum, rows, n);
            nf4_add(at + g + LANES, depth, odd, sum, rows, n);
        }
#endif
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int m = 0; m < n; m++) sums[r * n + m] = nf4_sum(sum[r][m]);
}

/* As nf4_sums; rows is 1 or, with `wide`, as many as there are registers for */
static void nf4_some(const float *x, const struct nf4 *w, long row, const float *tile, float *sums, long wide, long n) {
    switch (n + (wide ? 8 : 0) + (tile ? 16 : 0)) {
#if !NF4_BY_BYTES
#define CODES(n_, rows_) \
    case n_: nf4_sums(x, w, row, tile, sums, 0, 1, n_); break; \
    case n_ + 8: nf4_sums(x, w, row, tile, sums, 0, rows_, n_); break;
        CODES(1, NF4_WIDE) CODES(2, NF4_TILE) CODES(3, NF4_TILE) CODES(4, NF4_TILE)
#endif
#define TILED(n_) \
    case n_ + 16: nf4_sums(x, w, row, tile, sums, 1, 1, n_); break; \
    case n_ + 24: nf4_sums(x, w, row, tile, sums, 1, NF4_TILE, n_); break;
        TILED(1) TILED(2) TILED(3) TILED(4) TILED(5) TILED(6)
    }
}

/* ---- any depth ---- */

/* out [count] = the values of W from the flat index `at` on */
static void nf4_values(const struct nf4 *w, long at, long count, float *out) {
    float scale = 0;
    for (long i = 0; i < count; i++, at++) {
        if (i == 0 || at % NF4_BLOCK == 0) nf4_scales(w, at / NF4_BLOCK, 1, &scale);
        out[i] = nf4_levels[at & 1 ? w->codes[at >> 1] & 15 : w->codes[at >> 1] >> 4] * scale;
    }
}

/* sums [n] of a row of W times x [n, depth] */
static void nf4_any(const float *x, const struct nf4 *w, long row, float *sums, long n) {
    float tile[NF4_BLOCK];
    memset(sums, 0, sizeof(float) * n);
    for (long k = 0; k < w->depth; k += NF4_BLOCK) {
        const long count = w->depth - k < NF4_BLOCK ? w->depth - k : NF4_BLOCK;
        nf4_values(w, row * w->depth + k, count, tile);
        for (long m = 0; m < n; m++) sums[m] += dot(x + m * w->depth + k, tile, count);
    }
}

struct nf4_out { /* y [n, ld] = sums + bias, or with add: y += that; pairs: see nf4_linear */
    float *y;
    const float *bias;
    long ld, pairs, add;
};

static inline void nf4_store(const struct nf4_out *o, const float *sums, long row, long rows, long from, long n) {
    for (long r = 0; r < rows; r++) {
        const long within = o->pairs ? (row + r) % (2 * o->pairs) : 0;
        const long to = row + r + (within < o->pairs ? within : o->pairs ? within - 2 * o->pairs + 1 : 0);
        for (long m = 0; m < n; m++) {
            float *out = o->y + (from + m) * o->ld + to;
            *out = (o->add ? *out : 0.0f) + (o->bias ? o->bias[to] : 0.0f) + sums[r * n + m];
        }
    }
}

/* Of n rows those that are computed together next: parts of about one size */
static inline long nf4_next(long n, long most) {
    const long parts = (n + most - 1) / most;
    return parts ? (n + parts - 1) / parts : 0;
}

/* Rows first .. last of W times x [n, depth], whose first row is `start` of y */
static void nf4_run(const float *x, const struct nf4 *w, const struct nf4_out *o, long first, long last, long start, long n) {
    const long whole = w->depth % NF4_BLOCK == 0, exact = w->bits == 32, tiled = w->bits > 4 || (whole && n > NF4_DIRECT);
    float space[tiled && !exact ? NF4_TILE * w->depth + LINE : 1], sums[NF4_WIDE * NF4_MOST];
    float *made = (float *)(((uintptr_t)space + 4 * LINE - 1) & ~(uintptr_t)(4 * LINE - 1)); /* no vector in two lines */
    const long most = !whole ? 1 : n == 1 && !tiled ? NF4_WIDE : NF4_TILE;
#if NF4_BY_BYTES
    if (whole && w->bits == 4) {
        float found[NF4_RUN * NF4_DIRECT];
        for (long m = 0, some; (some = nf4_next(n - m, NF4_DIRECT)); m += some) {
            nf4_looked_up(x + m * w->depth, w, first, last, found, some);
            nf4_store(o, found, first, last - first, start + m, some);
        }
        return;
    }
#endif
    for (long row = first, rows; row < last; row += rows) {
        rows = row + most <= last ? most : 1;
        const float *tile = exact ? (const float *)w->codes + row * w->depth : made;
        if (tiled && !exact) nf4_tile(w, row, made, rows);
        for (long m = 0, some; (some = nf4_next(n - m, NF4_MOST)); m += some) {
            if (whole)
                nf4_some(x + m * w->depth, w, row, tiled ? tile : NULL, sums, rows > 1, some);
            else if (tiled)
                for (long i = 0; i < some; i++) sums[i] = dot(x + (m + i) * w->depth, tile, w->depth);
            else
                nf4_any(x + m * w->depth, w, row, sums, some);
            nf4_store(o, sums, row, rows, start + m, some);
        }
    }
}

/* y [n, width of `ld`] = x [n, depth] W^T + bias, or with add: y += that. pairs: row r of W is the column in which
 * `source_row` has r, as in `pack`. scratch [min(n, NF4_AT_ONCE), depth] */
void nf4_linear(
    const float *x, const struct nf4 *w, const float *bias, float *y, float *scratch, long n, long ld, long pairs, long add, long threads) {
    const struct nf4_out out = {y, bias, ld, pairs, add};
    (void)threads;
    for (long start = 0; start < n; start += NF4_AT_ONCE) {
        const long count = n - start < NF4_AT_ONCE ? n - start : NF4_AT_ONCE;
        const float *some = x + start * w->depth;
        if (w->depth % NF4_BLOCK == 0 && w->bits == 4) {
            for (long m = 0, part; (part = nf4_next(count - m, NF4_BY_BYTES ? NF4_DIRECT : count)); m += part)
                nf4_arrange(some + m * w->depth, scratch + m * w->depth, w->depth, part);
            some = scratch;
        }
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
        for (long first = 0; first < w->width; first += NF4_RUN)
            nf4_run(some, w, &out, first, first + NF4_RUN < w->width ? first + NF4_RUN : w->width, start, count);
    }
}

/* to: the values of a block, in their own order */
static inline void nf4_block(const uint8_t *codes, float scale, float *to) {
#if NF4_BY_BYTES
    const nf4_planes planes = nf4_load_planes();
    const __m256i block = _mm256_loadu_si256((const __m256i *)codes);
    const __m256 times = _mm256_set1_ps(scale);
    __m256 even[4], odd[4];
    nf4_half(&planes, block, 0, even);
    nf4_half(&planes, block, 1, odd);
    for (int i = 0; i < 4; i++, to += 8) {
        const __m256 e = _mm256_mul_ps(even[i], times), o = _mm256_mul_ps(odd[i], times);
        const __m256 low = _mm256_unpacklo_ps(e, o), high = _mm256_unpackhi_ps(e, o);
        _mm256_storeu_ps(to, _mm256_permute2f128_ps(low, high, 0x20));
        _mm256_storeu_ps(to + 32, _mm256_permute2f128_ps(low, high, 0x31));
    }
#else
    const nf4_table table = nf4_scaled(scale);
    for (int g = 0; g < NF4_BLOCK / NF4_GROUP; g++, to += NF4_GROUP) {
        vec even, odd;
        nf4_lookup(codes + g * LANES, &table, &even, &odd);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) to[2 * i] = even[i], to[2 * i + 1] = odd[i];
    }
#endif
}

/* out [count, depth]: the rows of W from `first` on, dequantised */
void nf4_rows(const struct nf4 *w, float *out, long first, long count, long threads) {
    (void)threads;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (long row = 0; row < count; row++) {
        float *to = out + row * w->depth;
        const long at = (first + row) * w->depth;
        if (w->bits == 8) {
            int8_values(w, first + row, to);
            continue;
        }
        if (w->depth % NF4_BLOCK) {
            nf4_values(w, at, w->depth, to);
            continue;
        }
        float scales[NF4_CHUNK];
        for (long b = 0; b < w->depth / NF4_BLOCK; b++) {
            const long left = w->depth / NF4_BLOCK - b;
            if (b % NF4_CHUNK == 0) nf4_scales(w, at / NF4_BLOCK + b, left < NF4_CHUNK ? left : NF4_CHUNK, scales);
            nf4_block(w->codes + (at + b * NF4_BLOCK) / 2, scales[b % NF4_CHUNK], to + b * NF4_BLOCK);
        }
    }
}
