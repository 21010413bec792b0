/* The loop of `compare` on one block; included by _lanes.h for each level.
 *
 * Element i goes to lane i % 16: the sums of x^2 and of (x - y)^2, the largest |x - y| and the largest
 * |x - y| / |x| over x != 0. All in float64, so the result is the same at every level. Maxima ignore NaN; the sums
 * propagate it.
 */

#define DEFINE_COMPARE(NAME, VALUE)                                                                          \
    static INLINE void LANE(NAME##_one)(VALUE of, VALUE to, double *lanes)                                   \
    {                                                                                                        \
        const double x = (double)of, d = x - (double)to, ax = fabs(x), ad = fabs(d);                         \
        const double ratio = ax > 0 ? ad / ax : 0;                                                           \
        lanes[0] += x * x;                                                                                   \
        lanes[16] += d * d;                                                                                  \
        lanes[32] = ad > lanes[32] ? ad : lanes[32];                                                         \
        lanes[48] = ratio > lanes[48] ? ratio : lanes[48];                                                   \
    }                                                                                                        \
    static void LANE(NAME)(const VALUE *x, const VALUE *y, size_t n, double *lanes)                          \
    {                                                                                                        \
        double lane[64];                                                                                     \
        size_t i = 0;                                                                                        \
        memcpy(lane, lanes, sizeof lane);                                                                    \
        for (; i + 16 <= n; i += 16)                                                                         \
            for (size_t j = 0; j < 16; j++)                                                                  \
                LANE(NAME##_one)(x[i + j], y[i + j], lane + j);                                              \
        for (; i < n; i++)                                                                                   \
            LANE(NAME##_one)(x[i], y[i], lane + i % 16);                                                     \
        memcpy(lanes, lane, sizeof lane);                                                                    \
    }
DEFINE_COMPARE(compare_f32, float32_value)
DEFINE_COMPARE(compare_f64, float64_value)
#undef DEFINE_COMPARE
