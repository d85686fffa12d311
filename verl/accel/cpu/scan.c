/* The least and the largest value of a tensor and some of its values, with one read, included by kernels.c. */

typedef int32_t words __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

enum { NOT_A_NUMBER = 0x7f800001, MAGNITUDE = 0x7fffffff }; /* the least magnitude of bits that are NaN · all but the sign */

static inline float value_at(const void *data, long i, long half) {
    const uint32_t bits = half ? (uint32_t)((const uint16_t *)data)[i] << 16 : ((const uint32_t *)data)[i];
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static inline void scan_as(const void *data, long size, long half, double *ends) {
    float least = INFINITY, most = -INFINITY;
    int32_t magnitude = 0;
    const vec zeros = {0};
    words lows = (words)(zeros + least), highs = (words)(zeros + most), magnitudes = {0};
    long i = 0;
    for (; i + LANES <= size; i += LANES) {
        words bits;
        if (half)
            bits = __builtin_convertvector(*(const halves *)((const uint16_t *)data + i), words) << 16;
        else
            bits = *(const words *)((const uint32_t *)data + i);
        const words low = (vec)bits < (vec)lows, high = (vec)bits > (vec)highs, size_of = bits & MAGNITUDE, more = size_of > magnitudes;
        lows = (low & bits) | (~low & lows), highs = (high & bits) | (~high & highs);
        magnitudes = (more & size_of) | (~more & magnitudes);
    }
    for (int l = 0; l < LANES; l++) {
        const float a = ((vec)lows)[l], b = ((vec)highs)[l];
        least = a < least ? a : least, most = b > most ? b : most;
        magnitude = magnitudes[l] > magnitude ? magnitudes[l] : magnitude;
    }
    for (; i < size; i++) {
        const float x = value_at(data, i, half);
        least = x < least ? x : least, most = x > most ? x : most;
        if (x != x) magnitude = NOT_A_NUMBER;
    }
    ends[0] = magnitude >= NOT_A_NUMBER ? NAN : least, ends[1] = magnitude >= NOT_A_NUMBER ? NAN : most;
}

/* found: least, largest (both NaN if a value is), then `count` values, each `step` after the one before. half: they are bfloat16 */
void scan(const void *data, long size, long step, long count, long half, double *found) {
    if (half)
        scan_as(data, size, 1, found);
    else
        scan_as(data, size, 0, found);
    for (long i = 0; i < count; i++) found[2 + i] = value_at(data, i * step, half);
}
