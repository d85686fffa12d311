/* The crc32 of zlib by carry-less products, included by kernels.c.
 *
 * 64 bytes at a time are four remainders of 128 bits, each of which is advanced by the 64 bytes that follow it with two products;
 * at the end they are folded onto one another and onto 32 bits (Gopal et al., "Fast CRC Computation for Generic Polynomials Using
 * PCLMULQDQ Instruction", Intel 2009; bits are reflected, as in zlib). Where the CPU multiplies four of them at once, most is done
 * for 256 bytes at a time. */

#if defined(__PCLMUL__) && defined(__SSE4_1__)
#include <smmintrin.h>
#include <wmmintrin.h>
#if defined(__VPCLMULQDQ__) && defined(__AVX512F__) && defined(__AVX512VL__)
#define WIDE_CRC 1 /* four products at a time */
#else
#define WIDE_CRC 0
#endif

long folds_crc(void) { return 1; }

/* x advanced by the distance of k, plus what follows there */
static inline __m128i folded(__m128i x, __m128i k, __m128i next) {
    return _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(x, k, 0x00), _mm_clmulepi64_si128(x, k, 0x11)), next);
}

#if WIDE_CRC
static inline __m512i folded_wide(__m512i x, __m512i k, __m512i next) {
    return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(x, k, 0x00), _mm512_clmulepi64_epi128(x, k, 0x11), next, 0x96); /* xor */
}

/* x: the remainders of blocks of 256 bytes as those of the last 64 of them; state as below */
static inline void fold_wide(const __m128i *from, const __m128i *end, uint32_t state, __m128i x[4]) {
    const __m512i by_256 = _mm512_broadcast_i64x2(_mm_set_epi64x(0x01322d1430, 0x011542778a));
    const __m512i by_64 = _mm512_broadcast_i64x2(_mm_set_epi64x(0x01c6e41596, 0x0154442bd4));
    __m512i wide[4];
    for (int i = 0; i < 4; i++) wide[i] = _mm512_loadu_si512(from + 4 * i);
    wide[0] = _mm512_xor_si512(wide[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)~state)));
    for (from += 16; from < end; from += 16)
        for (int i = 0; i < 4; i++) wide[i] = folded_wide(wide[i], by_256, _mm512_loadu_si512(from + 4 * i));
    for (int i = 1; i < 4; i++) wide[i] = folded_wide(wide[i - 1], by_64, wide[i]);
    _mm512_storeu_si512(x, wide[3]);
}
#endif

/* state: the crc32 of what was before; becomes that with these bytes. length: a multiple of 16, at least 64 */
void fold_crc(const uint8_t *data, long length, uint32_t *state) {
    const __m128i by_64 = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4), by_16 = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
    const __m128i by_8 = _mm_set_epi64x(0, 0x0163cd6124), polynomial = _mm_set_epi64x(0x01f7011641, 0x01db710641);
    const __m128i low = _mm_setr_epi32(~0, 0, ~0, 0), *from = (const __m128i *)data, *const end = from + length / 16;
    __m128i x[4], rest;
#if WIDE_CRC
    if (length >= 256) {
        fold_wide(from, from + length / 256 * 16, *state, x);
        from += length / 256 * 16;
    } else
#endif
    {
        for (int i = 0; i < 4; i++) x[i] = _mm_loadu_si128(from++);
        x[0] = _mm_xor_si128(x[0], _mm_cvtsi32_si128((int)~*state));
    }
    for (; from + 4 <= end; from += 4)
        for (int i = 0; i < 4; i++) x[i] = folded(x[i], by_64, _mm_loadu_si128(from + i));
    for (int i = 1; i < 4; i++) x[i] = folded(x[i - 1], by_16, x[i]);
    for (; from < end; from++) x[3] = folded(x[3], by_16, _mm_loadu_si128(from));
    rest = _mm_xor_si128(_mm_srli_si128(x[3], 8), _mm_clmulepi64_si128(x[3], by_16, 0x10));
    rest = _mm_xor_si128(_mm_srli_si128(rest, 4), _mm_clmulepi64_si128(_mm_and_si128(rest, low), by_8, 0x00));
    const __m128i times = _mm_and_si128(_mm_clmulepi64_si128(_mm_and_si128(rest, low), polynomial, 0x10), low);
    *state = ~(uint32_t)_mm_extract_epi32(_mm_xor_si128(rest, _mm_clmulepi64_si128(times, polynomial, 0x00)), 1);
}
#else
long folds_crc(void) { return 0; }
void fold_crc(const uint8_t *data, long length, uint32_t *state) { (void)data, (void)length, (void)state; }
#endif

/* The crc32 `state` of what was before, with these bytes. Only where `folds_crc` */
static uint32_t more_crc(const uint8_t *data, long length, uint32_t state) {
    const long whole = length >= 64 ? length / 16 * 16 : 0;
    if (whole) fold_crc(data, whole, &state);
    state = ~state;
    for (long i = whole; i < length; i++) {
        state ^= data[i];
        for (int bit = 0; bit < 8; bit++) state = state >> 1 ^ (state & 1 ? 0xedb88320u : 0);
    }
    return ~state;
}
