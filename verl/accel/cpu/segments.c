/* Attention of training and its gradients, included in kernels.c: causal, over the segments of packed rows, in float32.
 *
 * The queries of a segment are the last of its keys. The scores of one segment and head are in memory at once, and computed again for the
 * gradients. What is computed of a segment does not depend on others, but for the sums of gradients of keys that several of them have:
 * such segments are one part, which a thread computes in order. So all bits are the same for any number of threads. */

#if defined(_OPENMP)
#include <omp.h>
#define THREAD omp_get_thread_num()
#else
#define THREAD 0
#endif
#define SHORT (LANES / 2) /* rows of a block of a small product */
#define STRIP 3           /* its vectors per row, at most */

static inline long whole(long n, long of) { return (n + of - 1) / of * of; }

/* c [SHORT, LANES wide] = a b, or with add c += a b: a [SHORT, depth] of steps ar and ak, b [depth, ldb] */
static inline __attribute__((always_inline)) void small_block(
    const float *a, long ar, long ak, const float *b, long ldb, float *c, long ldc, long depth, long add, const int wide) {
    vec sum[SHORT][STRIP];
#pragma GCC unroll 8
    for (int r = 0; r < SHORT; r++)
#pragma GCC unroll 3
        for (int w = 0; w < wide; w++) sum[r][w] = add ? *(const vec *)(c + r * ldc + w * LANES) : (vec){0};
    for (long d = 0; d < depth; d++, a += ak, b += ldb) {
        vec row[STRIP];
#pragma GCC unroll 3
        for (int w = 0; w < wide; w++) row[w] = *(const vec *)(b + w * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < SHORT; r++)
#pragma GCC unroll 3
            for (int w = 0; w < wide; w++) sum[r][w] += a[r * ar] * row[w];
    }
#pragma GCC unroll 8
    for (int r = 0; r < SHORT; r++)
#pragma GCC unroll 3
        for (int w = 0; w < wide; w++) *(vec *)(c + r * ldc + w * LANES) = sum[r][w];
}

static void small_product(
    const float *a, long ar, long ak, const float *b, long ldb, float *c, long ldc, long vectors, long depth, long add) {
    for (; vectors >= STRIP; vectors -= STRIP, b += STRIP * LANES, c += STRIP * LANES)
        small_block(a, ar, ak, b, ldb, c, ldc, depth, add, STRIP);
    if (vectors == 2) small_block(a, ar, ak, b, ldb, c, ldc, depth, add, 2);
    if (vectors == 1) small_block(a, ar, ak, b, ldb, c, ldc, depth, add, 1);
}

struct forest { /* index: the rows of k and v that are keys, one segment after the other; null: all in order */
    const float *q, *k, *v;
    const int32_t *starts, *key_starts;
    const int64_t *index;
    long count, heads, kv_heads, dim, window;
    float scale;
};

struct segment { /* rows of tensors in `room` are `wide` apart, rows of scores `deep` apart */
    long first, queries, first_key, keys, wide, deep;
    float *q, *d_out, *block, *k, *k_turned, *v, *v_turned, *d_k, *d_v, *p, *d_p;
};

/* Floats of room for segments of up to so many queries and keys */
long segment_room(long queries, long keys, long dim) {
    const long tall = whole(queries, SHORT), deep = whole(keys, LANES), wide = whole(dim, LANES);
    return (2 * tall + SHORT + 6 * deep) * wide + 2 * tall * deep + 16;
}

static struct segment segment_of(const struct forest *f, long s, float *room) {
    struct segment at = {.first = f->starts[s], .first_key = f->key_starts[s]};
    at.queries = f->starts[s + 1] - at.first, at.keys = f->key_starts[s + 1] - at.first_key;
    const long tall = whole(at.queries, SHORT);
    at.wide = whole(f->dim, LANES), at.deep = whole(at.keys, LANES);
    at.q = (float *)(((uintptr_t)room + 63) & ~(uintptr_t)63);
    at.d_out = at.q + tall * at.wide, at.block = at.d_out + tall * at.wide, at.k = at.block + SHORT * at.wide;
    at.k_turned = at.k + at.deep * at.wide, at.v = at.k_turned + at.deep * at.wide, at.v_turned = at.v + at.deep * at.wide;
    at.d_k = at.v_turned + at.deep * at.wide, at.d_v = at.d_k + at.deep * at.wide;
    at.p = at.d_v + at.deep * at.wide, at.d_p = at.p + tall * at.deep;
    return at;
}

/* to [padded, wide] = `count` rows of a head of x [rows, heads, dim] times scale, and zeros */
static void take_rows(
    const float *x, long heads, long head, long dim, const int64_t *index, long first, long count, long padded, float scale, float *to,
    long wide) {
    for (long i = 0; i < padded; i++, to += wide) {
        const float *from = x + ((i < count ? index ? index[first + i] : first + i : 0) * heads + head) * dim;
        const long kept = i < count ? dim : 0;
        for (long c = 0; c < kept; c++) to[c] = from[c] * scale;
        for (long c = kept; c < wide; c++) to[c] = 0;
    }
}

/* to [wide, rows] = from [rows, wide] turned, both sizes in whole vectors */
static void turn(const float *from, long rows, long wide, float *to) {
    for (long r = 0; r < rows; r += LANES)
        for (long c = 0; c < wide; c += LANES) {
            vec t[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) t[i] = *(const vec *)(from + (r + i) * wide + c);
            transpose(t);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) *(vec *)(to + (c + i) * rows + r) = t[i];
        }
}

static void take_keys(const struct forest *f, const struct segment *at, long head, int gradients) {
    take_rows(f->k, f->kv_heads, head, f->dim, f->index, at->first_key, at->keys, at->deep, 1, at->k, at->wide);
    take_rows(f->v, f->kv_heads, head, f->dim, f->index, at->first_key, at->keys, at->deep, 1, at->v, at->wide);
    turn(at->k, at->deep, at->wide, at->k_turned);
    if (gradients) turn(at->v, at->deep, at->wide, at->v_turned);
}

/* Keys up to the last one that a block of queries from `row` sees */
static inline long seen(const struct segment *at, long row) {
    const long end = row + SHORT < at->queries ? row + SHORT : at->queries;
    return at->keys - at->queries + end;
}

/* p = the shares of all keys for the queries of a head; 0 for keys that a query does not see */
static void find_shares(const struct forest *f, const struct segment *at, long head) {
    take_rows(f->q, f->heads, head, f->dim, NULL, at->first, at->queries, whole(at->queries, SHORT), f->scale, at->q, at->wide);
    for (long row = 0; row < at->queries; row += SHORT) {
        float *p = at->p + row * at->deep;
        small_product(
            at->q + row * at->wide, at->wide, 1, at->k_turned, at->deep, p, at->deep, whole(seen(at, row), LANES) / LANES, f->dim, 0);
        for (long r = row; r < row + SHORT; r++, p += at->deep) {
            const long end = r < at->queries ? at->keys - at->queries + r + 1 : 0;
            const long begin = f->window && end > f->window ? end - f->window : 0;
            for (long j = 0; j < begin; j++) p[j] = 0;
            for (long j = end; j < at->deep; j++) p[j] = 0;
            if (end == begin) continue;
            const float share = 1.0f / exponentiate(p + begin, end - begin, 1, 0);
            for (long j = begin; j < end; j++) p[j] *= share;
        }
    }
}

/* Of rows of a head of out [rows, heads, dim], those of a block of queries = the block times scale */
static void put_block(const struct segment *at, long row, float *out, long heads, long head, long dim, float scale) {
    for (long r = row; r < row + SHORT && r < at->queries; r++)
        for (long c = 0; c < dim; c++) out[((at->first + r) * heads + head) * dim + c] = at->block[(r - row) * at->wide + c] * scale;
}

/* out [T, heads, dim], for q of that shape and k and v [U, kv_heads, dim]; room [threads, room_floats] */
void segments(
    const float *q, const float *k, const float *v, const int32_t *starts, const int32_t *key_starts, const int64_t *index, float *out,
    float *room, long room_floats, long count, long heads, long kv_heads, long dim, long window, float scale, long threads) {
    const struct forest f = {q, k, v, starts, key_starts, index, count, heads, kv_heads, dim, window, scale};
    const long group = heads / kv_heads;
    (void)threads;
#pragma omp parallel for schedule(dynamic, 8) num_threads(threads) if (threads > 1)
    for (long job = 0; job < count * kv_heads; job++) {
        const struct segment at = segment_of(&f, job / kv_heads, room + THREAD * room_floats);
        if (!at.queries) continue;
        take_keys(&f, &at, job % kv_heads, 0);
        for (long head = job % kv_heads * group; head < (job % kv_heads + 1) * group; head++) {
            find_shares(&f, &at, head);
            for (long row = 0; row < at.queries; row += SHORT) {
                small_product(
                    at.p + row * at.deep, at.deep, 1, at.v, at.wide, at.block, at.wide, at.wide / LANES, seen(&at, row), 0);
                put_block(&at, row, out, heads, head, dim, 1);
            }
        }
    }
}

/* Writes d_q of the queries of one head, and adds to d_k and d_v of the segment. */
static void head_gradients(const struct forest *f, const struct segment *at, long head, const float *d_out, float *d_q) {
    const long before = at->keys - at->queries;
    find_shares(f, at, head);
    take_rows(d_out, f->heads, head, f->dim, NULL, at->first, at->queries, whole(at->queries, SHORT), 1, at->d_out, at->wide);
    for (long key = 0; key < at->keys; key += SHORT) { /* the queries that see one of these keys */
        const long from = key > before ? key - before : 0;
        small_product(
            at->p + from * at->deep + key, 1, at->deep, at->d_out + from * at->wide, at->wide, at->d_v + key * at->wide, at->wide,
            at->wide / LANES, at->queries - from, 1);
    }
    for (long row = 0; row < at->queries; row += SHORT) {
        const long end = seen(at, row);
        float *p = at->p + row * at->deep, *d_p = at->d_p + row * at->deep;
        small_product(at->d_out + row * at->wide, at->wide, 1, at->v_turned, at->deep, d_p, at->deep, whole(end, LANES) / LANES, f->dim, 0);
        for (long r = row; r < row + SHORT && r < at->queries; r++) {
            float *share = at->p + r * at->deep, *slope = at->d_p + r * at->deep;
            const long own = before + r + 1, begin = f->window && own > f->window ? own - f->window : 0;
            const float along = dot(share + begin, slope + begin, own - begin);
            for (long j = begin; j < own; j++) share[j] *= slope[j] - along;
        }
        small_product(p, at->deep, 1, at->k, at->wide, at->block, at->wide, at->wide / LANES, end, 0);
        put_block(at, row, d_q, f->heads, head, f->dim, f->scale);
    }
    for (long key = 0; key < at->keys; key += SHORT) {
        const long from = key > before ? key - before : 0;
        small_product(
            at->p + from * at->deep + key, 1, at->deep, at->q + from * at->wide, at->wide, at->d_k + key * at->wide, at->wide,
            at->wide / LANES, at->queries - from, 1);
    }
}

static void add_rows(const struct forest *f, const struct segment *at, long head, const float *from, float *to) {
    for (long i = 0; i < at->keys; i++) {
        const long row = f->index ? f->index[at->first_key + i] : at->first_key + i;
        for (long c = 0; c < f->dim; c++) to[(row * f->kv_heads + head) * f->dim + c] += from[i * at->wide + c];
    }
}

/* parts [count + 1] = the first segment of each part, which has no key of another part; before [count] is room. Returns their number. */
static long find_parts(const struct forest *f, long *parts, long *before) {
    long found = 0, reached = -1; /* the largest key of the segments until now; before: at the begin of each part */
    for (long s = 0; s < f->count; s++) {
        long least = reached + 1, most = reached;
        for (long i = f->key_starts[s]; i < f->key_starts[s + 1]; i++) {
            const long row = f->index ? f->index[i] : i;
            least = row < least ? row : least;
            most = row > most ? row : most;
        }
        if (least > reached) parts[found] = s, before[found++] = reached;
        while (least <= before[found - 1]) found--;
        reached = most;
    }
    parts[found] = f->count;
    return found;
}

/* As `find_parts`, by the keys alone; parts [2 count + 1] is room */
long segment_parts(const int32_t *key_starts, const int64_t *index, long *parts, long count) {
    const struct forest f = {.key_starts = key_starts, .index = index, .count = count};
    return find_parts(&f, parts, parts + count + 1);
}

/* The gradients of `segments`: d_q [T, heads, dim] is written, d_k and d_v [U, kv_heads, dim] are added to; parts [2 count + 1] is room */
void segments_backward(
    const float *q, const float *k, const float *v, const int32_t *starts, const int32_t *key_starts, const int64_t *index,
    const float *d_out, float *d_q, float *d_k, float *d_v, float *room, long *parts, long room_floats, long count, long heads, long kv_heads,
    long dim, long window, float scale, long threads) {
    const struct forest f = {q, k, v, starts, key_starts, index, count, heads, kv_heads, dim, window, scale};
    const long group = heads / kv_heads, jobs = find_parts(&f, parts, parts + count + 1) * kv_heads;
    (void)threads;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (long job = 0; job < jobs; job++)
        for (long s = parts[job / kv_heads]; s < parts[job / kv_heads + 1]; s++) {
            const struct segment at = segment_of(&f, s, room + THREAD * room_floats);
            if (!at.queries) continue;
            take_keys(&f, &at, job % kv_heads, 1);
            memset(at.d_k, 0, 2 * sizeof(float) * at.deep * at.wide);
            for (long head = job % kv_heads * group; head < (job % kv_heads + 1) * group; head++)
                head_gradients(&f, &at, head, d_out, d_q);
            add_rows(&f, &at, job % kv_heads, at.d_k, d_k);
            add_rows(&f, &at, job % kv_heads, at.d_v, d_v);
        }
}
