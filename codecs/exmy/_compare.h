/* The loop of `compare` on one block; included by _lanes.h for each level.
 *
 * Element i goes to lane i % 8: the sums of x^2 and of (x - y)^2, and the largest |x - y|; totals[24] is the largest
 * |x - y| / |x| over x != 0. All in float64, so the result is the same at every level. Maxima ignore NaN; the sums
 * propagate it. Eight lanes of three numbers stay in the registers of AVX2.
 */

#define DEFINE_RATIO(NAME, VALUE)                                                                            \
    static double LANE(NAME##_ratio)(const VALUE *x, const VALUE *y, size_t n, double largest)               \
    {                                                                                                        \
        for (size_t i = 0; i < n; i++) {                                                                     \
            const double of = (double)x[i], ax = fabs(of);                                                   \
            const double ratio = ax > 0 ? fabs(of - (double)y[i]) / ax : 0;                                  \
            largest = ratio > largest ? ratio : largest;                                                     \
        }                                                                                                    \
        return largest;                                                                                      \
    }
DEFINE_RATIO(compare_f32, float32_value)
DEFINE_RATIO(compare_f64, float64_value)
#undef DEFINE_RATIO

/* Compares as many elements as vectors of eight hold, and returns their number. Divisions would take most of the time, and
 * few elements need one: not those whose difference is below the largest ratio, less a margin for the rounding of the
 * product, times |x|. A value that became 0 has the ratio 1 exactly. No product of a float32 underflows. */
static size_t LANE(compare_f32_whole)(const float32_value *x, const float32_value *y, size_t n, double *totals)
{
    size_t i = 0;
#if LANE_HAS_F16C
    const __m256d magnitude = _mm256_castsi256_pd(_mm256_set1_epi64x(0x7fffffffffffffff));
    __m256d signal[2], noise[2], largest[2], bound = _mm256_setzero_pd();
    double ratio = -1;
    for (size_t h = 0; h < 2; h++) {
        signal[h] = _mm256_loadu_pd(totals + 4 * h);
        noise[h] = _mm256_loadu_pd(totals + 8 + 4 * h);
        largest[h] = _mm256_loadu_pd(totals + 16 + 4 * h);
    }
    for (; i + 8 <= n; i += 8) {
        __m256d above = _mm256_setzero_pd();
        if (ratio != totals[24]) {
            ratio = totals[24];
            bound = _mm256_set1_pd(ratio == 1 ? 1 : ratio * (1 - 0x1p-40));
        }
        for (size_t h = 0; h < 2; h++) {
            const __m256d of = _mm256_cvtps_pd(_mm_loadu_ps((const float *)(x + i + 4 * h)));
            const __m256d d = _mm256_sub_pd(of, _mm256_cvtps_pd(_mm_loadu_ps((const float *)(y + i + 4 * h))));
            const __m256d ad = _mm256_and_pd(d, magnitude), most = _mm256_mul_pd(_mm256_and_pd(of, magnitude), bound);
            signal[h] = _mm256_add_pd(signal[h], _mm256_mul_pd(of, of));
            noise[h] = _mm256_add_pd(noise[h], _mm256_mul_pd(d, d));
            largest[h] = _mm256_max_pd(ad, largest[h]); /* the second if one is NaN */
            above = _mm256_or_pd(above, _mm256_cmp_pd(ad, most, _CMP_GT_OQ));
        }
        if (_mm256_movemask_pd(above))
            totals[24] = LANE(compare_f32_ratio)(x + i, y + i, 8, ratio);
    }
    for (size_t h = 0; h < 2; h++) {
        _mm256_storeu_pd(totals + 4 * h, signal[h]);
        _mm256_storeu_pd(totals + 8 + 4 * h, noise[h]);
        _mm256_storeu_pd(totals + 16 + 4 * h, largest[h]);
    }
#else
    (void)x, (void)y, (void)n, (void)totals;
#endif
    return i;
}

#define DEFINE_COMPARE(NAME, VALUE, WHOLE)                                                                   \
    static void LANE(NAME)(const VALUE *x, const VALUE *y, size_t n, double *totals)                         \
    {                                                                                                        \
        const size_t whole = WHOLE;                                                                          \
        for (size_t i = whole; i < n; i++) {                                                                 \
            const double of = (double)x[i], d = of - (double)y[i], ad = fabs(d);                             \
            double *lane = totals + i % 8;                                                                   \
            lane[0] += of * of;                                                                              \
            lane[8] += d * d;                                                                                \
            lane[16] = ad > lane[16] ? ad : lane[16];                                                        \
        }                                                                                                    \
        totals[24] = LANE(NAME##_ratio)(x + whole, y + whole, n - whole, totals[24]);                        \
    }
DEFINE_COMPARE(compare_f32, float32_value, LANE(compare_f32_whole)(x, y, n, totals))
DEFINE_COMPARE(compare_f64, float64_value, 0)
#undef DEFINE_COMPARE
