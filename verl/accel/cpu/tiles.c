/* Products of bfloat16 on AMX tiles, included in kernels.c: y [n, width] = x [n, depth] W^T, sums in float32.
 *
 * W is packed in panels [panels, K / 2, PANEL, 2] of its rows, with K = depth rounded up to DEEP and zeros behind it:
 * pairs of neighbouring columns, as the tiles multiply them. A row's bits do not depend on n. */

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__AVX512BF16__) && defined(__linux__)
#define TILES 1
#else
#define TILES 0
#endif

#if TILES
#include <sys/syscall.h>
#include <unistd.h>

#define DEEP 32 /* columns of x in a tile */
#define TALL 16 /* its rows */
#define CACHED_HALVES (8 * CACHED) /* values of x that stay in the second-level cache while a panel passes */
#define NEAR 256    /* columns of a panel that stay in the first-level cache while rows pass */
#define PASSING 128 /* those rows; the sums of a row do not depend on them, since they are in float32 in tiles and memory */
#define ALLOW_STATE 0x1023 /* ARCH_REQ_XCOMP_PERM */
#define TILE_DATA 18       /* the state of the tiles */

/* What was written before it is in memory: compilers do not see which memory the instructions of tiles read. */
#define WRITTEN(from) __asm__ volatile("" : : "r"(from) : "memory")

/* 1 if this process may use tiles: the system gives them on request. */
long has_tiles(void) { return syscall(SYS_arch_prctl, ALLOW_STATE, TILE_DATA) == 0; }

struct shapes_of_tiles {
    uint8_t palette, start, unused[14];
    uint16_t bytes[16];
    uint8_t rows[16];
};

static inline void take_tiles(void) {
    struct shapes_of_tiles all = {.palette = 1};
    for (int i = 0; i < 8; i++) all.bytes[i] = 64, all.rows[i] = TALL;
    WRITTEN(&all);
    _tile_loadconfig(&all);
}

static inline long whole_depth(long depth) { return (depth + DEEP - 1) / DEEP * DEEP; }

/* The next 16 pairs of a row of W, as they are in a panel */
static inline __m512i pairs_of(const float *from) {
    return (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + 16), _mm512_loadu_ps(from));
}

/* W [width, depth], of float32 that bfloat16 holds or of bfloat16 -> rows first .. first + width of the panels, as `pack` */
static inline __attribute__((always_inline)) void pack_pairs(
    const float *wide, const bf16 *half, bf16 *panels, long first, long width, long depth, long pairs, long threads) {
    const long end = first + width, deep = whole_depth(depth);
    (void)threads;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (long group = first / TALL; group < (end + TALL - 1) / TALL; group++) { /* 16 rows */
        const long row = group * TALL, p = row / PANEL;
        bf16 *to = panels + p * deep * PANEL + row % PANEL * 2;
        long k = 0;
        if (row >= first && row + TALL <= end) {
            long from[TALL];
            for (long r = 0; r < TALL; r++) from[r] = source_row(row + r - first, pairs) * depth;
            for (; k + DEEP <= depth; k += DEEP) {
                vec t[LANES];
#pragma GCC unroll 16
                for (int r = 0; r < TALL; r++)
                    t[r] = (vec)(wide ? pairs_of(wide + from[r] + k) : _mm512_loadu_si512(half + from[r] + k));
                transpose(t);
#pragma GCC unroll 16
                for (int c = 0; c < TALL; c++) *(vec *)(to + (k / 2 + c) * 2 * PANEL) = t[c];
            }
        }
        for (long r = 0; r < TALL; r++) {
            if (row + r < first || row + r >= end) continue;
            const long from = source_row(row + r - first, pairs) * depth;
            for (long c = k; c < depth; c++)
                to[c / 2 * 2 * PANEL + 2 * r + c % 2] = wide ? narrow(wide[from + c]) : half[from + c];
        }
    }
}

void pack_bfloat16(const float *weight, bf16 *panels, long first, long width, long depth, long pairs, long threads) {
    pack_pairs(weight, NULL, panels, first, width, depth, pairs, threads);
}

void repack_bfloat16(const bf16 *weight, bf16 *panels, long first, long width, long depth, long pairs, long threads) {
    pack_pairs(NULL, weight, panels, first, width, depth, pairs, threads);
}

/* sums [2 TALL, PANEL] = x W^T for 32 rows, or for 16 without `second`, and the PANEL rows of a panel; more: sums += that */
static inline __attribute__((always_inline)) void multiply_tiles(
    const bf16 *first, const bf16 *second, long ld, const bf16 *w, float *sums, long more, long deep) {
    WRITTEN(first);
    if (more) {
        _tile_loadd(0, sums, 4 * PANEL);
        _tile_loadd(1, sums + LANES, 4 * PANEL);
        _tile_loadd(2, sums + TALL * PANEL, 4 * PANEL);
        _tile_loadd(3, sums + TALL * PANEL + LANES, 4 * PANEL);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (long k = 0; k < deep; k += DEEP, w += DEEP * PANEL) {
        _tile_loadd(6, w, 4 * PANEL);
        _tile_loadd(7, w + PANEL, 4 * PANEL);
        _tile_loadd(4, first + k, 2 * ld);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (second) {
            _tile_loadd(5, second + k, 2 * ld);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, 4 * PANEL);
    _tile_stored(1, sums + LANES, 4 * PANEL);
    if (second) {
        _tile_stored(2, sums + TALL * PANEL, 4 * PANEL);
        _tile_stored(3, sums + TALL * PANEL + LANES, 4 * PANEL);
    }
}

static inline __m512 widened_16(const bf16 *from, __mmask16 mask) {
    return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from)), 16);
}

/* Writes rows of sums into y in bfloat16 or into `wide` in float32, or with add adds them. */
static inline void put_sums(
    const float *sums, const bf16 *bias, bf16 *y, float *wide, long ld, long rows, long columns, long add) {
    const __mmask16 low = columns < LANES ? (__mmask16)((1u << columns) - 1) : (__mmask16)0xffff;
    const __mmask16 high = columns < LANES ? 0 : (__mmask16)((1u << (columns - LANES)) - 1);
    const __m512 bias_low = bias ? widened_16(bias, low) : _mm512_setzero_ps();
    const __m512 bias_high = bias ? widened_16(bias + LANES, high) : _mm512_setzero_ps();
    for (long r = 0; r < rows; r++, sums += PANEL) { /* a whole line of y at once */
        __m512 a = _mm512_add_ps(_mm512_load_ps(sums), bias_low), b = _mm512_add_ps(_mm512_load_ps(sums + LANES), bias_high);
        if (wide) {
            float *to = wide + r * ld;
            if (add) {
                a = _mm512_add_ps(a, _mm512_maskz_loadu_ps(low, to));
                b = _mm512_add_ps(b, _mm512_maskz_loadu_ps(high, to + LANES));
            }
            _mm512_mask_storeu_ps(to, low, a);
            _mm512_mask_storeu_ps(to + LANES, high, b);
        } else {
            bf16 *to = y + r * ld;
            if (add) a = _mm512_add_ps(a, widened_16(to, low)), b = _mm512_add_ps(b, widened_16(to + LANES, high));
            _mm512_mask_storeu_epi16(to, (__mmask32)high << LANES | low, (__m512i)_mm512_cvtne2ps_pbh(b, a));
        }
    }
}

/* out = the rows of x [count, depth], with zeros behind each and below the last, up to whole tiles */
static void pad_rows(const bf16 *x, bf16 *out, long count, long depth) {
    const long deep = whole_depth(depth), rows = (count + TALL - 1) / TALL * TALL;
    for (long r = 0; r < rows; r++) {
        const long kept = r < count ? depth : 0;
        if (kept) memcpy(out + r * deep, x + r * depth, sizeof(bf16) * kept);
        memset(out + r * deep + kept, 0, sizeof(bf16) * (deep - kept));
    }
}

/* Into y in bfloat16 or, if it is not null, into `wide` in float32; rows are ld apart. padded: see `Kernels.padding`.
 * Otherwise as `product` */
static void product_of_halves(
    const bf16 *x, const bf16 *panels, const bf16 *bias, bf16 *y, float *wide, bf16 *padded, long ld, long n, long depth, long width,
    long add, long threads) {
    const long deep = whole_depth(depth), whole = deep == depth ? n / TALL * TALL : 0; /* rows that are read where they are */
    const long step = CACHED_HALVES / deep / PASSING > 0 ? CACHED_HALVES / deep / PASSING * PASSING : PASSING;
    pad_rows(x + whole * depth, padded, n - whole, depth);
    (void)threads;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        float sums[PASSING * PANEL] __attribute__((aligned(64)));
        take_tiles();
        for (long start = 0; start < n; start += step) {
            const long end = start + step < n ? start + step : n;
#pragma omp for schedule(static)
            for (long p = 0; p < (width + PANEL - 1) / PANEL; p++) {
                const bf16 *w = panels + p * deep * PANEL, *b = bias ? bias + p * PANEL : NULL;
                const long columns = width - p * PANEL < PANEL ? width - p * PANEL : PANEL;
                for (long row = start; row < end; row += PASSING) {
                    const long rows = end - row < PASSING ? end - row : PASSING, near = rows > 2 * TALL ? NEAR : deep;
                    for (long k = 0; k < deep; k += near) {
                        const long columns_here = deep - k < near ? deep - k : near;
                        for (long r = 0; r < rows; r += 2 * TALL) {
                            const long at = row + r, below = at + TALL;
                            const bf16 *first = (at < whole ? x + at * depth : padded + (at - whole) * deep) + k;
                            const bf16 *second = (below < whole ? x + below * depth : padded + (below - whole) * deep) + k;
                            float *to = sums + r * PANEL;
                            if (rows - r > TALL) multiply_tiles(first, second, deep, w + k * PANEL, to, k, columns_here);
                            else multiply_tiles(first, NULL, deep, w + k * PANEL, to, k, columns_here);
                        }
                    }
                    const long at = row * ld + p * PANEL;
                    put_sums(sums, b, y ? y + at : NULL, wide ? wide + at : NULL, ld, rows, columns, add);
                }
            }
        }
        _tile_release();
    }
}

static void product_bfloat16(
    const bf16 *x, const bf16 *panels, const bf16 *bias, bf16 *y, bf16 *padded, long ld, long n, long depth, long width, long add,
    long threads) {
    product_of_halves(x, panels, bias, y, NULL, padded, ld, n, depth, width, add, threads);
}

static void product_wide_bfloat16(
    const bf16 *x, const bf16 *panels, const bf16 *bias, float *y, bf16 *padded, long ld, long n, long depth, long width, long add,
    long threads) {
    product_of_halves(x, panels, bias, NULL, y, padded, ld, n, depth, width, add, threads);
}

void linear_wide_bfloat16(
    const bf16 *x, const bf16 *panels, const bf16 *bias, float *y, bf16 *padded, long n, long depth, long width, long add, long threads) {
    product_of_halves(x, panels, bias, NULL, y, padded, width, n, depth, width, add, threads);
}
#else
long has_tiles(void) { return 0; }
#endif
