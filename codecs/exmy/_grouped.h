/* The loops for groups of elements that share a scale, on one block; included by _lanes.h for each level.
 *
 * noise: with z = |y * scale| * m, adds (z - the nearest value of the format)^2 to sums[i % 16] for element i, and
 * returns the total of the sums. `sums` may be NULL, which stands for zeros. The difference is computed in the type of
 * y, in which it is exact unless z clips; squares and sums are float64. As in the loops of _lanes.h that encode, |z| +
 * g - g is the nearest value. energy: the same sums of y^2.
 */

/* Returns the total of 16 partial sums, added in a fixed order, by halves: lanes j and j + 8 first. */
static INLINE double LANE(total)(const double *sums)
{
    double eight[8], four[4];
    for (size_t j = 0; j < 8; j++)
        eight[j] = sums[j] + sums[j + 8];
    for (size_t j = 0; j < 4; j++)
        four[j] = eight[j] + eight[j + 4];
    return (four[0] + four[2]) + (four[1] + four[3]);
}

#define DEFINE_GROUPED(BITS, REAL, INT, EXPONENT)                                                            \
    static void LANE(scale_f##BITS)(const float##BITS##_value *src, size_t n, REAL m,                        \
                                    float##BITS##_value *out)                                                \
    {                                                                                                        \
        for (size_t i = 0; i < n; i++)                                                                       \
            out[i] = src[i] * m;                                                                             \
    }                                                                                                        \
    static void LANE(scale_each_f##BITS)(const float##BITS##_value *src, size_t n,                           \
                                         const float##BITS##_value *m, float##BITS##_value *out)             \
    {                                                                                                        \
        for (size_t i = 0; i < n; i++)                                                                       \
            out[i] = src[i] * m[i];                                                                          \
    }                                                                                                        \
    static INLINE double LANE(miss_f##BITS)(REAL y, REAL scale, REAL m, INT limit, INT tiny, INT lift)       \
    {                                                                                                        \
        float##BITS##_word z, c, g, near;                                                                    \
        z.f = y * scale * m;                                                                                 \
        z.i &= (INT)(((uint##BITS##_t)1 << (BITS - 1)) - 1);                                                 \
        c.i = z.i < limit ? z.i : limit;                                                                     \
        g.i = (INT)((uint##BITS##_t)((c.i > tiny ? c.i : tiny) & EXPONENT) + (uint##BITS##_t)lift);          \
        near.f = c.f + g.f;                                                                                  \
        near.f = near.f - g.f;                                                                               \
        return (double)(z.f - near.f);                                                                       \
    }                                                                                                        \
    static double LANE(noise_f##BITS)(const float##BITS##_value *y, size_t n, REAL scale, REAL m, const spec *s,\
                                      double *sums)                                                          \
    {                                                                                                        \
        const INT limit = s->limit##BITS, tiny = s->tiny##BITS, lift = s->lift##BITS;                        \
        double lane[16] = {0};                                                                               \
        size_t i = 0;                                                                                        \
        if (sums != NULL)                                                                                    \
            memcpy(lane, sums, sizeof lane);                                                                 \
        for (; i + 16 <= n; i += 16)                                                                         \
            for (size_t j = 0; j < 16; j++) {                                                                \
                const double d = LANE(miss_f##BITS)(y[i + j], scale, m, limit, tiny, lift);                  \
                lane[j] += d * d;                                                                            \
            }                                                                                                \
        for (; i < n; i++) {                                                                                 \
            const double d = LANE(miss_f##BITS)(y[i], scale, m, limit, tiny, lift);                          \
            lane[i % 16] += d * d;                                                                           \
        }                                                                                                    \
        if (sums != NULL)                                                                                    \
            memcpy(sums, lane, sizeof lane);                                                                 \
        return LANE(total)(lane);                                                                            \
    }                                                                                                        \
    static double LANE(energy_f##BITS)(const float##BITS##_value *y, size_t n, double *sums)                 \
    {                                                                                                        \
        double lane[16];                                                                                     \
        size_t i = 0;                                                                                        \
        memcpy(lane, sums, sizeof lane);                                                                     \
        for (; i + 16 <= n; i += 16)                                                                         \
            for (size_t j = 0; j < 16; j++)                                                                  \
                lane[j] += (double)y[i + j] * (double)y[i + j];                                              \
        for (; i < n; i++)                                                                                   \
            lane[i % 16] += (double)y[i] * (double)y[i];                                                     \
        memcpy(sums, lane, sizeof lane);                                                                     \
        return LANE(total)(lane);                                                                            \
    }
DEFINE_GROUPED(32, float, int32_t, 0x7f800000)
DEFINE_GROUPED(64, double, int64_t, 0x7ff0000000000000)
#undef DEFINE_GROUPED
