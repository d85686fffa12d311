/* Gradients of factors of LoRA, included in kernels.c after segments.c: of y [n, out] += scale (x [n, into] A^T) B^T in float32.
 *
 * The values between the factors are few per row (`wide`: the rank in whole vectors), which products of BLAS are slow for. They are computed
 * for a few rows at a time, and used for both gradients while these rows are in the caches. */

#define NEAR 32 /* rows at a time: they are in a cache while both gradients read them; whole blocks of a small product */

/* to [into, wide] += the products of each column of x [rows, into] with the rows of low [rows, wide] */
static void add_columns(const float *x, const float *low, float *to, long rows, long into, long wide) {
    for (long k = 0; k < into; k += SHORT)
        small_product(x + k, 1, into, low, wide, to + k * wide, wide, wide / LANES, rows, 1);
}

/* low [rows in whole blocks, wide] = x [rows, into] factor [into, wide] times scale */
static void take_low(const float *x, const float *factor, float *low, long rows, long into, long wide, float scale) {
    for (long row = 0; row < rows; row += SHORT)
        small_product(x + row * into, into, 1, factor, wide, low + row * wide, wide, wide / LANES, into, 0);
    for (long i = 0; i < rows * wide; i++) low[i] *= scale;
}

/* Floats of room of a thread */
long low_rank_room(long into, long out, long wide) { return NEAR * (into + out + 2 * wide) + 16; }

/* sums [threads, into + out, wide] are added to: the gradients of A transposed, and below those of B, of the rows of each thread.
 * a [into, wide] and b [out, wide] with zeros behind the rank; into and out are whole blocks */
void low_rank_gradients(
    const float *x, const float *dy, const float *a, const float *b, float *sums, float *room, long n, long into, long out, long wide,
    float scale, long threads) {
    const long blocks = (n + SHORT - 1) / SHORT;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (long part = 0; part < threads; part++) {
        float *da = sums + part * (into + out) * wide, *db = da + into * wide;
        float *low = (float *)(((uintptr_t)(room + part * low_rank_room(into, out, wide)) + 63) & ~(uintptr_t)63);
        float *d_low = low + NEAR * wide, *last_x = d_low + NEAR * wide, *last_dy = last_x + SHORT * into;
        const long end = blocks * (part + 1) / threads * SHORT < n ? blocks * (part + 1) / threads * SHORT : n;
        for (long row = blocks * part / threads * SHORT; row < end;) {
            const float *these = x + row * into, *theirs = dy + row * out;
            long rows = (end - row < NEAR ? end - row : NEAR) / SHORT * SHORT, next = row + rows;
            if (!rows) { /* fewer than a block: with rows of zeros, which add nothing */
                memcpy(last_x, these, sizeof(float) * (end - row) * into);
                memset(last_x + (end - row) * into, 0, sizeof(float) * (SHORT - (end - row)) * into);
                memcpy(last_dy, theirs, sizeof(float) * (end - row) * out);
                memset(last_dy + (end - row) * out, 0, sizeof(float) * (SHORT - (end - row)) * out);
                these = last_x, theirs = last_dy, rows = SHORT, next = end;
            }
            take_low(these, a, low, rows, into, wide, scale);
            take_low(theirs, b, d_low, rows, out, wide, scale);
            add_columns(these, d_low, da, rows, into, wide);
            add_columns(theirs, low, db, rows, out, wide);
            row = next;
        }
    }
}
