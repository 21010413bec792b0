/* The loops of eXmY on one block: plain C that the compiler vectorises.
 *
 * _levels.h includes this file once for each level (baseline, AVX2, AVX-512); LANE(name) adds the level to the
 * name of a function. Every loop is branch-free, has no dependence between elements other than a maximum, and
 * works on unaligned pointers. The arithmetic is explained in FORMAT.md and in reference.py:
 *
 *   quanta  n = round(|x| / 2^(E - mantissa_bits)),  E = max(exponent of |x|, exponent of the smallest normal)
 *   code      = n + (E - exponent of the smallest normal) * 2^mantissa_bits
 *
 * The rounding is one floating-point addition: with g = 2^(E - mantissa_bits) * 2^(significand bits - 1), the
 * sum |x| + g has its last bit worth one quantum, so the processor rounds to nearest, ties to even, and the
 * difference of the bit patterns of the sum and of g is n.
 */

/* Encodes n float32 given as bits. Returns the largest magnitude seen, as bits. */
#define DEFINE_CODES32(NAME, CODE)                                                                           \
    static uint32_t LANE(NAME)(const float32_bits *src, size_t n, const spec *s, CODE *out)                  \
    {                                                                                                        \
        const int32_t limit = s->limit32, tiny = s->tiny32, lift = s->lift32;                                \
        const uint32_t drop = 23u - (uint32_t)s->mantissa_bits;                                              \
        const uint32_t sign_shift = 32u - (uint32_t)s->bits, sign = 1u << (s->bits - 1);                     \
        int32_t peak = 0;                                                                                    \
        for (size_t i = 0; i < n; i++) {                                                                     \
            uint32_t word = src[i];                                                                          \
            int32_t a = (int32_t)(word & 0x7fffffffu);                                                       \
            peak = a > peak ? a : peak;                                                                      \
            int32_t c = a < limit ? a : limit;                                                               \
            int32_t e = (c > tiny ? c : tiny) & 0x7f800000;                                                  \
            int32_t g = e + lift;                                                                            \
            float32_word sum, quantum;                                                                       \
            sum.i = c;                                                                                       \
            quantum.i = g;                                                                                   \
            sum.f += quantum.f;                                                                              \
            uint32_t code = (uint32_t)(sum.i - g) + ((uint32_t)(e - tiny) >> drop);                          \
            out[i] = (CODE)(code | ((word >> sign_shift) & sign));                                           \
        }                                                                                                    \
        return (uint32_t)peak;                                                                               \
    }
DEFINE_CODES32(codes8_f32, uint8_t)
DEFINE_CODES32(codes16_f32, code16)
#undef DEFINE_CODES32

/* The same for n float64, which suffice for every bias and every input. */
#define DEFINE_CODES64(NAME, CODE)                                                                           \
    static uint64_t LANE(NAME)(const float64_bits *src, size_t n, const spec *s, CODE *out)                  \
    {                                                                                                        \
        const int64_t limit = s->limit64, tiny = s->tiny64, lift = s->lift64;                                \
        const uint32_t drop = 52u - (uint32_t)s->mantissa_bits;                                              \
        const uint32_t sign_shift = 64u - (uint32_t)s->bits, sign = 1u << (s->bits - 1);                     \
        int64_t peak = 0;                                                                                    \
        for (size_t i = 0; i < n; i++) {                                                                     \
            uint64_t word = src[i];                                                                          \
            int64_t a = (int64_t)(word & 0x7fffffffffffffffu);                                               \
            peak = a > peak ? a : peak;                                                                      \
            int64_t c = a < limit ? a : limit;                                                               \
            int64_t e = (c > tiny ? c : tiny) & 0x7ff0000000000000;                                          \
            int64_t g = e + lift;                                                                            \
            float64_word sum, quantum;                                                                       \
            sum.i = c;                                                                                       \
            quantum.i = g;                                                                                   \
            sum.f += quantum.f;                                                                              \
            uint64_t code = (uint64_t)(sum.i - g) + ((uint64_t)(e - tiny) >> drop);                          \
            out[i] = (CODE)(code | ((word >> sign_shift) & sign));                                           \
        }                                                                                                    \
        return (uint64_t)peak;                                                                               \
    }
DEFINE_CODES64(codes8_f64, uint8_t)
DEFINE_CODES64(codes16_f64, code16)
#undef DEFINE_CODES64

/* Decodes n codes to float32, exact where the format lies within float32 (spec.exact32). `scaled` also multiplies the
 * values by a factor, which rounds each product once. */
#define DEFINE_VALUES32(NAME, CODE, PARAMETERS, PRODUCT)                                                     \
    static void LANE(NAME)PARAMETERS                                                                         \
    {                                                                                                        \
        const uint32_t rise = 23u - (uint32_t)s->mantissa_bits;                                              \
        const int32_t magnitude = (1 << (s->bits - 1)) - 1, normal = 1 << s->mantissa_bits;                  \
        const int32_t tiny = s->tiny32, one = 1 << 23;                                                       \
        const uint32_t sign_shift = 32u - (uint32_t)s->bits;                                                 \
        for (size_t i = 0; i < n; i++) {                                                                     \
            uint32_t code = codes[i];                                                                        \
            int32_t w = (int32_t)code & magnitude;                                                           \
            int32_t below = w < normal ? -1 : 0;                                                             \
            float32_word value, implicit;                                                                    \
            value.i = (int32_t)((uint32_t)w << rise) + tiny - (one & ~below);                                \
            implicit.i = tiny & below;                                                                       \
            value.f = (value.f - implicit.f)PRODUCT;                                                         \
            out[i] = (uint32_t)value.i | ((code << sign_shift) & 0x80000000u);                               \
        }                                                                                                    \
    }
DEFINE_VALUES32(values8_f32, uint8_t, (const uint8_t *codes, size_t n, const spec *s, float32_bits *out), )
DEFINE_VALUES32(values16_f32, code16, (const code16 *codes, size_t n, const spec *s, float32_bits *out), )
DEFINE_VALUES32(scaled8_f32, uint8_t,
                (const uint8_t *codes, size_t n, const spec *s, float factor, float32_bits *out), * factor)
DEFINE_VALUES32(scaled16_f32, code16,
                (const code16 *codes, size_t n, const spec *s, float factor, float32_bits *out), * factor)
#undef DEFINE_VALUES32

/* Encode and decode e8mY with the bias of float32. Values with the highest exponent exceed float32: they decode to
 * infinity. */
#define DEFINE_TOP(WIDTH, CODE)                                                                              \
    static uint32_t LANE(top##WIDTH)(const float32_bits *src, size_t n, const spec *s, CODE *out)            \
    {                                                                                                        \
        const uint32_t drop = 23u - (uint32_t)s->mantissa_bits, below = (1u << (drop - 1)) - 1;              \
        const uint32_t sign_shift = 32u - (uint32_t)s->bits, sign = 1u << (s->bits - 1), largest = sign - 1; \
        int32_t peak = 0;                                                                                    \
        for (size_t i = 0; i < n; i++) {                                                                     \
            uint32_t word = src[i], a = word & 0x7fffffffu;                                                  \
            peak = (int32_t)a > peak ? (int32_t)a : peak;                                                    \
            uint32_t code = (a + below + ((a >> drop) & 1u)) >> drop;                                        \
            code = (int32_t)a >= 0x7f800000 ? largest : code;                                                \
            out[i] = (CODE)(code | ((word >> sign_shift) & sign));                                           \
        }                                                                                                    \
        return (uint32_t)peak;                                                                               \
    }                                                                                                        \
    static void LANE(untop##WIDTH)(const CODE *codes, size_t n, const spec *s, float32_bits *out)            \
    {                                                                                                        \
        const uint32_t drop = 23u - (uint32_t)s->mantissa_bits, sign_shift = 32u - (uint32_t)s->bits;        \
        for (size_t i = 0; i < n; i++) {                                                                     \
            uint32_t code = codes[i];                                                                        \
            int32_t a = (int32_t)((code << drop) & 0x7fffffffu);                                             \
            a = a < 0x7f800000 ? a : 0x7f800000;                                                             \
            out[i] = (uint32_t)a | ((code << sign_shift) & 0x80000000u);                                     \
        }                                                                                                    \
    }
DEFINE_TOP(8, uint8_t)
DEFINE_TOP(16, code16)
#undef DEFINE_TOP

/* Decodes n codes to float64: exact for every format. */
#define DEFINE_VALUES64(NAME, CODE)                                                                          \
    static void LANE(NAME)(const CODE *codes, size_t n, const spec *s, float64_bits *out)                    \
    {                                                                                                        \
        const uint32_t rise = 52u - (uint32_t)s->mantissa_bits;                                              \
        const int64_t magnitude = (1 << (s->bits - 1)) - 1, normal = 1 << s->mantissa_bits;                  \
        const int64_t tiny = s->tiny64, one = (int64_t)1 << 52;                                              \
        const uint32_t sign_shift = 64u - (uint32_t)s->bits;                                                 \
        for (size_t i = 0; i < n; i++) {                                                                     \
            uint64_t code = codes[i];                                                                        \
            int64_t w = (int64_t)code & magnitude;                                                           \
            int64_t below = w < normal ? -1 : 0;                                                             \
            float64_word value, implicit;                                                                    \
            value.i = (int64_t)((uint64_t)w << rise) + tiny - (one & ~below);                                \
            implicit.i = tiny & below;                                                                       \
            value.f -= implicit.f;                                                                           \
            out[i] = (uint64_t)value.i | ((code << sign_shift) & 0x8000000000000000u);                       \
        }                                                                                                    \
    }
DEFINE_VALUES64(values8_f64, uint8_t)
DEFINE_VALUES64(values16_f64, code16)
#undef DEFINE_VALUES64

/* Decodes n codes of up to 8 bits to float16 or bfloat16, whose bits for the codes 0 ... 127 are in the table. */
#if LANE_HAS_AVX512
static void LANE(look_up)(const uint8_t *codes, size_t n, const code16 *table, code16 *out)
{
    const __m512i a = _mm512_loadu_si512(table), b = _mm512_loadu_si512(table + 32);
    const __m512i c = _mm512_loadu_si512(table + 64), d = _mm512_loadu_si512(table + 96);
    const __m512i half = _mm512_set1_epi16(64), sign = _mm512_set1_epi16(128);
    size_t i = 0;
    for (; i + 32 <= n; i += 32) {
        const __m512i code = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(codes + i)));
        const __m512i low = _mm512_permutex2var_epi16(a, code, b), high = _mm512_permutex2var_epi16(c, code, d);
        const __m512i value = _mm512_mask_blend_epi16(_mm512_test_epi16_mask(code, half), low, high);
        const __m512i minus = _mm512_slli_epi16(_mm512_and_si512(code, sign), 8);
        _mm512_storeu_si512(out + i, _mm512_or_si512(value, minus));
    }
    for (; i < n; i++)
        out[i] = (uint16_t)(table[codes[i] & 127] | (codes[i] & 128) << 8);
}
#endif

/* Decode n codes to float32, times a factor, by way of float16: its fields have room for up to 4 exponent and 10 mantissa
 * bits, and a difference of biases is part of the factor. */
#if LANE_HAS_F16C
#define DEFINE_HALVES(NAME, CODE, LOAD)                                                                      \
    static INLINE void LANE(NAME##_16)(const CODE *from, __m128i rise, __m128i drop, __m256i fields, __m256 by, float *to) \
    {                                                                                                        \
        const __m256i half = _mm256_and_si256(_mm256_sra_epi16(_mm256_sll_epi16(LOAD, rise), drop), fields); \
        const __m256 low = _mm256_cvtph_ps(_mm256_castsi256_si128(half));                                    \
        const __m256 high = _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1));                              \
        _mm256_storeu_ps(to, _mm256_mul_ps(low, by));                                                        \
        _mm256_storeu_ps(to + 8, _mm256_mul_ps(high, by));                                                   \
    }                                                                                                        \
    static void LANE(NAME)(const CODE *codes, size_t n, const spec *s, float factor, float32_bits *out)      \
    {                                                                                                        \
        const __m128i rise = _mm_cvtsi32_si128(16 - s->bits), drop = _mm_cvtsi32_si128(5 - s->exponent_bits); \
        const __m256i fields = _mm256_set1_epi16((short)(0x8000 | ((1 << (10 + s->exponent_bits)) - 1)));    \
        const __m256 by = _mm256_set1_ps(factor);                                                            \
        const size_t whole = n / 16 * 16;                                                                    \
        for (size_t i = 0; i < whole; i += 16)                                                               \
            LANE(NAME##_16)(codes + i, rise, drop, fields, by, (float *)(out + i));                          \
        if (whole < n) {                                                                                     \
            CODE last[16] = {0};                                                                             \
            float values[16];                                                                                \
            memcpy(last, codes + whole, (n - whole) * sizeof *last);                                         \
            LANE(NAME##_16)(last, rise, drop, fields, by, values);                                           \
            memcpy(out + whole, values, (n - whole) * sizeof *values);                                       \
        }                                                                                                    \
    }
DEFINE_HALVES(halves8_f32, uint8_t, _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)from)))
DEFINE_HALVES(halves16_f32, code16, _mm256_loadu_si256((const __m256i *)from))
#undef DEFINE_HALVES
#endif

/* Converts float16 bits to float32 bits, exactly; infinities and NaNs are preserved. */
static void LANE(widen_f16)(const code16 *src, size_t n, float32_bits *out)
{
    size_t i = 0;
#if LANE_HAS_F16C
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps((float *)(out + i), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(src + i))));
#endif
    for (; i < n; i++) {
        uint32_t half = src[i];
        int32_t a = (int32_t)(half & 0x7fffu);
        float32_word small;
        small.f = (float)a * 0x1p-24f; /* the value of a subnormal */
        int32_t normal = (a << 13) + (112 << 23) + (a >= 0x7c00 ? 112 << 23 : 0);
        int32_t below = a < 0x0400 ? -1 : 0;
        out[i] = (uint32_t)((small.i & below) | (normal & ~below)) | ((half & 0x8000u) << 16);
    }
}

/* Converts bfloat16 bits to float32 bits. */
static void LANE(widen_bf16)(const code16 *src, size_t n, float32_bits *out)
{
    for (size_t i = 0; i < n; i++)
        out[i] = (uint32_t)src[i] << 16;
}

/* Converts float32 to float64. */
static void LANE(widen_f32)(const float32_value *src, size_t n, float64_value *out)
{
    for (size_t i = 0; i < n; i++)
        out[i] = (double)src[i];
}

/* Rounds float64 to the nearest float32; overflow gives infinity. */
static void LANE(narrow_f64)(const float64_value *src, size_t n, float32_value *out)
{
    for (size_t i = 0; i < n; i++)
        out[i] = (float)src[i];
}

/* Rounds finite float32 to the nearest float16 bits, ties to even; overflow gives infinity. `half` is e5m10 with the
 * limit 2^16, whose code has the bits of infinity. */
static void LANE(narrow_f16)(const float32_bits *src, size_t n, const spec *half, code16 *out)
{
    size_t i = 0;
#if LANE_HAS_F16C
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(out + i),
                         _mm256_cvtps_ph(_mm256_loadu_ps((const float *)(src + i)), _MM_FROUND_TO_NEAREST_INT));
#endif
    LANE(codes16_f32)(src + i, n - i, half, out + i);
}

/* Rounds finite float32 bits to the nearest bfloat16 bits, ties to even; overflow gives infinity. */
static void LANE(narrow_bf16)(const float32_bits *src, size_t n, code16 *out)
{
    for (size_t i = 0; i < n; i++) {
        uint32_t word = src[i];
        out[i] = (uint16_t)((word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
    }
}

/* Return the largest magnitude, as bits. */
static uint32_t LANE(peak16)(const code16 *src, size_t n)
{
    int16_t peak = 0;
    for (size_t i = 0; i < n; i++) {
        int16_t a = (int16_t)(src[i] & 0x7fffu);
        peak = a > peak ? a : peak;
    }
    return (uint32_t)peak;
}

static uint32_t LANE(peak32)(const float32_bits *src, size_t n)
{
    int32_t peak = 0;
    for (size_t i = 0; i < n; i++) {
        int32_t a = (int32_t)(src[i] & 0x7fffffffu);
        peak = a > peak ? a : peak;
    }
    return (uint32_t)peak;
}

static uint64_t LANE(peak64)(const float64_bits *src, size_t n)
{
    int64_t peak = 0;
    for (size_t i = 0; i < n; i++) {
        int64_t a = (int64_t)(src[i] & 0x7fffffffffffffffu);
        peak = a > peak ? a : peak;
    }
    return (uint64_t)peak;
}

/* Adds to bins[f] the number of values with exponent field f, of n <= BLOCK float32. The fields of most arrays are close
 * together: those of 0, of the largest, and of the next lower ones are each counted by comparing all fields with them.
 * Where that counts too few values, the others are counted one by one. */
static void LANE(fields32)(const float32_bits *src, size_t n, uint64_t *bins)
{
    enum { WIDTH = 64, COMPARED = 24, WAYS = 8 };
    uint8_t fields[BLOCK], field = 0, largest = 0;
    const uint32_t end = (uint32_t)(n + WIDTH - 1) / WIDTH * WIDTH;
    uint32_t counted = 0;
    for (size_t i = 0; i < n; i++) {
        fields[i] = (uint8_t)(src[i] >> 23);
        largest = fields[i] > largest ? fields[i] : largest;
    }
    memset(fields + n, 0, end - n);
    for (unsigned round = 0; counted < end && round <= COMPARED && (round < 6 || counted > end / 4 * 3); round++) {
        uint8_t counts[WIDTH] = {0}; /* none exceeds BLOCK / WIDTH */
        uint16_t count = 0;
        for (size_t i = 0; i < end; i += WIDTH)
            for (size_t j = 0; j < WIDTH; j++)
                counts[j] = (uint8_t)(counts[j] + (fields[i + j] == field));
        for (size_t j = 0; j < WIDTH; j++)
            count = (uint16_t)(count + counts[j]);
        counted += count;
        bins[field] += count;
        field = (uint8_t)(round == 0 ? largest : field - 1);
    }
    bins[0] -= end - n;
    if (counted < end) { /* in several histograms: one would wait for its own last store where neighbours are equal */
        uint32_t others[256][WAYS] = {{0}};
        for (size_t i = 0; i < end; i += WAYS)
            for (size_t j = 0; j < WAYS; j++)
                others[fields[i + j]][j]++;
        for (unsigned f = 1; f <= field; f++)
            for (size_t j = 0; j < WAYS; j++)
                bins[f] += others[f][j];
    }
}

static void LANE(split16)(const code16 *src, size_t n, uint8_t *low, uint8_t *high)
{
    for (size_t i = 0; i < n; i++) {
        low[i] = (uint8_t)src[i];
        high[i] = (uint8_t)(src[i] >> 8);
    }
}

static void LANE(join16)(const uint8_t *low, const uint8_t *high, size_t n, code16 *out)
{
    for (size_t i = 0; i < n; i++)
        out[i] = (uint16_t)(low[i] | (uint16_t)(high[i] << 8));
}

/* Joins codes from their upper 8 bits and their `rest` lower bits. */
static void LANE(join_at)(const uint8_t *upper, const uint8_t *lower, size_t n, unsigned rest, code16 *out)
{
    size_t i = 0;
#if LANE_HAS_F16C
    const __m128i rise = _mm_cvtsi32_si128((int)rest);
    for (; i + 16 <= n; i += 16) {
        const __m256i high = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(upper + i)));
        const __m256i low = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(lower + i)));
        _mm256_storeu_si256((__m256i *)(out + i), _mm256_or_si256(_mm256_sll_epi16(high, rise), low));
    }
#endif
    for (; i < n; i++)
        out[i] = (uint16_t)((uint16_t)(upper[i] << rest) | lower[i]);
}

/* Pack and unpack a plane of whole tiles: bits shift … shift+P-1 of 256 codes, in 32*P bytes. They work on words of
 * eight bytes, because a mask after each shift removes the bits that enter from a neighbouring byte. */
#define DEFINE_PLANE(P, FIELD)                                                                               \
    static void LANE(pack_plane##P)(const uint8_t *codes, size_t tiles, unsigned shift, size_t stride,       \
                                    uint8_t *out)                                                            \
    {                                                                                                        \
        enum { WORDS = 4 * P, PARTS = 8 / P };                                                               \
        for (size_t t = 0; t < tiles; t++, codes += TILE, out += stride) {                                   \
            const word64 *from = (const word64 *)codes;                                                      \
            word64 *to = (word64 *)out;                                                                      \
            for (size_t j = 0; j < WORDS; j++) {                                                             \
                uint64_t word = 0;                                                                           \
                for (size_t i = 0; i < PARTS; i++)                                                           \
                    word |= ((from[j + i * WORDS] >> shift) & FIELD) << (i * P);                             \
                to[j] = word;                                                                                \
            }                                                                                                \
        }                                                                                                    \
    }                                                                                                        \
    static void LANE(unpack_plane##P)(const uint8_t *in, size_t tiles, unsigned shift, size_t stride,        \
                                      uint8_t *codes)                                                        \
    {                                                                                                        \
        enum { WORDS = 4 * P, PARTS = 8 / P };                                                               \
        const uint64_t keep = ((uint64_t)1 << shift) - 1;                                                    \
        const uint64_t kept = keep * 0x0101010101010101u; /* the bits of earlier planes */                   \
        for (size_t t = 0; t < tiles; t++, codes += TILE, in += stride) {                                    \
            const word64 *from = (const word64 *)in;                                                         \
            word64 *to = (word64 *)codes;                                                                    \
            for (size_t j = 0; j < WORDS; j++) {                                                             \
                uint64_t word = from[j];                                                                     \
                for (size_t i = 0; i < PARTS; i++)                                                           \
                    to[j + i * WORDS] = (to[j + i * WORDS] & kept) | (((word >> (i * P)) & FIELD) << shift); \
            }                                                                                                \
        }                                                                                                    \
    }
DEFINE_PLANE(4, 0x0f0f0f0f0f0f0f0fu)
DEFINE_PLANE(2, 0x0303030303030303u)
DEFINE_PLANE(1, 0x0101010101010101u)
#undef DEFINE_PLANE

#include "_grouped.h"
#include "_stochastic.h"
#include "_compare.h"

static const lanes LANE(table) = {
    LANE(codes8_f32),   LANE(codes16_f32),  LANE(codes8_f64),  LANE(codes16_f64),
    LANE(values8_f32),  LANE(values16_f32), LANE(values8_f64), LANE(values16_f64),
    LANE(scaled8_f32),  LANE(scaled16_f32),
    LANE(top8),         LANE(top16),        LANE(untop8),      LANE(untop16),
#if LANE_HAS_AVX512
    LANE(look_up),
#else
    NULL,
#endif
#if LANE_HAS_F16C
    LANE(halves8_f32),  LANE(halves16_f32),
#else
    NULL,               NULL,
#endif
    LANE(widen_f16),    LANE(widen_bf16),   LANE(widen_f32),   LANE(narrow_f64),
    LANE(narrow_f16),   LANE(narrow_bf16),  LANE(peak16),       LANE(peak32),      LANE(peak64),
    LANE(fields32),
    LANE(split16),      LANE(join16),      LANE(join_at),
    LANE(scale_f32),    LANE(scale_f64),    LANE(scale_each_f32), LANE(scale_each_f64),
    LANE(noise_f32),    LANE(noise_f64),    LANE(energy_f32),  LANE(energy_f64),
    {LANE(pack_plane4), LANE(pack_plane2), LANE(pack_plane1)},
    {LANE(unpack_plane4), LANE(unpack_plane2), LANE(unpack_plane1)},
    LANE(random_bits),  LANE(stochastic8),  LANE(stochastic16), LANE(compare_f32), LANE(compare_f64),
};
