/* The loop of `compare` on one block; included by _lanes.h for each level.
 *
 * Element i goes to lane i % 16: the sums of x^2 and of (x - y)^2, the largest |x - y| and the largest
 * |x - y| / |x| over x != 0. All in float64, so the result is the same at every level. Maxima ignore NaN; the sums
 * propagate it.
 */

#define DEFINE_COMPARE(NAME, VALUE)                                                                          \
    static INLINE void LANE(NAME##_sums)(VALUE of, VALUE to, double *lanes)                                  \
    {                                                                                                        \
        const double x = (double)of, d = x - (double)to, ad = fabs(d);                                       \
        lanes[0] += x * x;                                                                                   \
        lanes[16] += d * d;                                                                                  \
        lanes[32] = ad > lanes[32] ? ad : lanes[32];                                                         \
    }                                                                                                        \
    static INLINE void LANE(NAME##_ratio)(VALUE of, VALUE to, double *lanes)                                 \
    {                                                                                                        \
        const double x = (double)of, ax = fabs(x), ad = fabs(x - (double)to);                                \
        const double ratio = ax > 0 ? ad / ax : 0;                                                           \
        lanes[48] = ratio > lanes[48] ? ratio : lanes[48];                                                   \
    }                                                                                                        \
    static void LANE(NAME)(const VALUE *x, const VALUE *y, size_t n, double *lanes)                          \
    {                                                                                                        \
        double lane[64];                                                                                     \
        size_t i = 0;                                                                                        \
        memcpy(lane, lanes, sizeof lane);                                                                    \
        for (; i + 16 <= n; i += 16) {                                                                       \
            for (size_t j = 0; j < 16; j++)                                                                  \
                LANE(NAME##_sums)(x[i + j], y[i + j], lane + j);                                             \
            if (LANE(NAME##_may_rise)(x + i, y + i, lane + 48))                                              \
                for (size_t j = 0; j < 16; j++)                                                              \
                    LANE(NAME##_ratio)(x[i + j], y[i + j], lane + j);                                        \
        }                                                                                                    \
        for (; i < n; i++) {                                                                                 \
            LANE(NAME##_sums)(x[i], y[i], lane + i % 16);                                                    \
            LANE(NAME##_ratio)(x[i], y[i], lane + i % 16);                                                   \
        }                                                                                                    \
        memcpy(lanes, lane, sizeof lane);                                                                    \
    }

/* Returns whether one of 16 ratios can exceed the largest of its lane. Divisions take most of the time, and few elements
 * need one: not those whose difference is below the largest ratio, less a margin for the rounding of the product,
 * times |x|; nor those that become 0, whose ratio is 1. No product of a float32 underflows. */
static INLINE int LANE(compare_f32_may_rise)(const float32_value *x, const float32_value *y, const double *largest)
{
    int64_t any = 0;
    for (size_t j = 0; j < 16; j++) {
        const double of = (double)x[j], ax = fabs(of), ad = fabs(of - (double)y[j]);
        const double bound = largest[j] * (1 - 0x1p-40) * ax;
        const int64_t above = ad > bound ? -1 : 0, other = ad != ax ? -1 : 0, below = largest[j] < 1 ? -1 : 0;
        any |= above & (other | below);
    }
    return any != 0;
}

static INLINE int LANE(compare_f64_may_rise)(const float64_value *x, const float64_value *y, const double *largest)
{
    (void)x, (void)y, (void)largest;
    return 1;
}

DEFINE_COMPARE(compare_f32, float32_value)
DEFINE_COMPARE(compare_f64, float64_value)
#undef DEFINE_COMPARE
