/* The least and the largest value of tensors, some of their values and their crc32, with one read of memory, included by kernels.c
 * after crc.c. */

typedef int32_t words __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

enum { NOT_A_NUMBER = 0x7f800001, MAGNITUDE = 0x7fffffff }; /* the least magnitude of bits that are NaN · all but the sign */

static inline float value_at(const void *data, long i, long half) {
    const uint32_t bits = half ? (uint32_t)((const uint16_t *)data)[i] << 16 : ((const uint32_t *)data)[i];
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static inline words bits_at(const void *data, long i, long half) {
    if (half) return __builtin_convertvector(*(const halves *)((const uint16_t *)data + i), words) << 16;
    return *(const words *)((const uint32_t *)data + i);
}

/* The lesser of each two values, the second one if x is NaN */
static inline vec lesser(vec x, vec y) {
#if defined(__AVX512F__)
    return (vec)_mm512_min_ps((__m512)x, (__m512)y);
#elif WIDE
    return (vec)_mm256_min_ps((__m256)x, (__m256)y);
#else
    const words less = x < y;
    return (vec)((less & (words)x) | (~less & (words)y));
#endif
}

static inline words larger_bits(words x, words y) {
#if defined(__AVX512F__)
    return (words)_mm512_max_epi32((__m512i)x, (__m512i)y);
#elif WIDE
    return (words)_mm256_max_epi32((__m256i)x, (__m256i)y);
#else
    const words more = x > y;
    return (more & x) | (~more & y);
#endif
}

/* With the values of `bits`: the least value, the negative of the largest one, both without NaN, and the largest magnitude */
static inline void take(words bits, vec *least, vec *most, words *magnitude) {
    *least = lesser((vec)bits, *least);
    *most = lesser(-(vec)bits, *most);
    *magnitude = larger_bits(bits & MAGNITUDE, *magnitude);
}

/* ends: the least and the largest value before these, which become those with them; both NaN if a value is */
static inline void scan_as(const void *data, long size, long half, double *ends) {
    float least = (float)ends[0], most = (float)ends[1];
    int32_t magnitude = ends[0] != ends[0] ? NOT_A_NUMBER : 0;
    const vec zeros = {0};
    vec lows[2] = {zeros + least, zeros + least}, highs[2] = {zeros - most, zeros - most};
    words magnitudes[2] = {{0}, {0}};
    long i = 0;
    for (; i + 2 * LANES <= size; i += 2 * LANES)
        for (int one = 0; one < 2; one++) take(bits_at(data, i + one * LANES, half), &lows[one], &highs[one], &magnitudes[one]);
    for (; i + LANES <= size; i += LANES) take(bits_at(data, i, half), lows, highs, magnitudes);
    for (int l = 0; l < 2 * LANES; l++) {
        const float a = lows[l / LANES][l % LANES], b = -highs[l / LANES][l % LANES];
        const int32_t bits = magnitudes[l / LANES][l % LANES];
        least = a < least ? a : least, most = b > most ? b : most;
        magnitude = bits > magnitude ? bits : magnitude;
    }
    for (; i < size; i++) {
        const float x = value_at(data, i, half);
        least = x < least ? x : least, most = x > most ? x : most;
        if (x != x) magnitude = NOT_A_NUMBER;
    }
    ends[0] = magnitude >= NOT_A_NUMBER ? NAN : least, ends[1] = magnitude >= NOT_A_NUMBER ? NAN : most;
}

enum { NEAR_BYTES = 16384 }; /* of a tensor at a time: they stay in the first-level cache between the two passes over them */

/* given [n, 6]: of each tensor its address, its size, the distance of the values that are taken, their number, if they are bfloat16
 * (else float32) and if the crc32 is computed. ends [n, 2] or null: the least and the largest value of each (both NaN if a value is);
 * null: tensors are not read whole. values: those that are taken, one tensor behind the other. sums [n]: the crc32 */
void scan(const long *given, long n, double *ends, double *values, uint32_t *sums) {
    for (long one = 0; one < n; one++, given += 6) {
        const uint8_t *data = (const uint8_t *)(uintptr_t)given[0];
        const long size = ends ? given[1] : 0, step = given[2], count = given[3], half = given[4], width = half ? 2 : 4;
        double found[2] = {INFINITY, -INFINITY};
        sums[one] = 0;
        for (long i = 0; i < size; i += NEAR_BYTES / width) {
            const long part = size - i < NEAR_BYTES / width ? size - i : NEAR_BYTES / width;
            if (half)
                scan_as(data + i * width, part, 1, found);
            else
                scan_as(data + i * width, part, 0, found);
            if (given[5]) sums[one] = more_crc(data + i * width, part * width, sums[one]);
        }
        if (ends) ends[2 * one] = found[0], ends[2 * one + 1] = found[1];
        for (long i = 0; i < count; i++) *values++ = value_at(data, i * step, half);
    }
}

/* sums [n]: the crc32 of tensors. given [n, 2]: the address and the number of bytes of each */
void sums_of(const long *given, long n, uint32_t *sums) {
    for (long i = 0; i < n; i++) sums[i] = more_crc((const uint8_t *)(uintptr_t)given[2 * i], given[2 * i + 1], 0);
}
