/* The loops of stochastic rounding on one block; included by _lanes.h for each level.
 *
 * With a = |x| / quantum and r the 32 random bits of an element's position, the quanta are
 * (floor(a 2^32) + r) >> 32. floor(a 2^32) is below 2^48; it is computed by adding 2^52 and undoing the rounding up of
 * that addition. FORMAT.md defines the random bits; k0 and k1 are the keys of 2^32 positions.
 */

static INLINE uint32_t LANE(mix)(uint32_t h)
{
    h = (h ^ (h >> 16)) * 0x7feb352du;
    h = (h ^ (h >> 15)) * 0x846ca68bu;
    return h ^ (h >> 16);
}

/* Writes the random bits of the positions low ... low+n-1. */
static void LANE(random_bits)(uint32_t low, uint32_t k0, uint32_t k1, size_t n, uint32_t *out)
{
    for (size_t i = 0; i < n; i++)
        out[i] = LANE(mix)(LANE(mix)((low + (uint32_t)i) ^ k0) + k1);
}

#define DEFINE_STOCHASTIC(NAME, CODE)                                                                        \
    static uint64_t LANE(NAME)(const float64_bits *src, const uint32_t *random, size_t n, const spec *s,     \
                               CODE *out)                                                                    \
    {                                                                                                        \
        const int64_t limit = s->limit64, tiny = s->tiny64, infinite = 0x7ff0000000000000;                   \
        const uint64_t rise = (uint64_t)(2 * 1023 + 32 + s->mantissa_bits) << 52;                            \
        const int64_t integers = (int64_t)(1023 + 52) << 52; /* 2^52, whose last bit is worth 1 */           \
        const uint32_t drop = 52u - (uint32_t)s->mantissa_bits;                                              \
        const uint32_t sign_shift = 64u - (uint32_t)s->bits, sign = 1u << (s->bits - 1);                     \
        int64_t peak = 0;                                                                                    \
        for (size_t i = 0; i < n; i++) {                                                                     \
            uint64_t word = src[i];                                                                          \
            int64_t a = (int64_t)(word & 0x7fffffffffffffffu);                                               \
            peak = a > peak ? a : peak;                                                                      \
            float64_word c, factor, sum, back;                                                               \
            c.i = a < limit ? a : limit;                                                                     \
            int64_t e = (c.i > tiny ? c.i : tiny) & infinite;                                                \
            factor.i = (int64_t)(rise - (uint64_t)e);                                                        \
            c.f *= factor.f;                                                                                 \
            sum.f = c.f + 0x1p52;                                                                            \
            back.f = sum.f - 0x1p52;                                                                         \
            int64_t whole = sum.i - integers - (back.f > c.f ? 1 : 0);                                       \
            uint64_t code = (((uint64_t)whole + random[i]) >> 32) + ((uint64_t)(e - tiny) >> drop);          \
            out[i] = (CODE)(code | ((word >> sign_shift) & sign));                                           \
        }                                                                                                    \
        return (uint64_t)peak;                                                                               \
    }
DEFINE_STOCHASTIC(stochastic8, uint8_t)
DEFINE_STOCHASTIC(stochastic16, code16)
#undef DEFINE_STOCHASTIC
