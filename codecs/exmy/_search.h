/* The search for the offset or scale of least squared error: _kernels.c calls it for `fit` and `quantize`.
 *
 * Errors of a run are sums of squares in the fixed order of _grouped.h, so all levels return the same result.
 */

#include "_arrays.h"

enum { MOST_FACTORS = 64 }; /* per call */

/* Scratch memory for the sums of one run. */
typedef struct {
    scratch block;
    double sums[16];
} noise_scratch;

/* The same as noise_f32, for a format whose values are float32 but whose sums for rounding exceed float32: those are
 * float64. */
static double noise_top(const spec *s, const float32_value *y, size_t n, float scale, float factor, double *sums)
{
    double lane[16] = {0};
    if (sums != NULL)
        memcpy(lane, sums, sizeof lane);
    for (size_t i = 0; i < n; i++) {
        float32_word z, c;
        z.f = y[i] * scale * factor;
        z.i &= 0x7fffffff;
        c.i = z.i < s->limit32 ? z.i : s->limit32;
        const int exponent = ((c.i > s->tiny32 ? c.i : s->tiny32) >> 23) - 127;
        const double g = power_of_two(exponent + 52 - s->mantissa_bits), near = (double)c.f + g - g;
        const double d = (double)(z.f - (float)near);
        lane[i % 16] += d * d;
    }
    if (sums != NULL)
        memcpy(sums, lane, sizeof lane);
    return baseline_total(lane);
}

/* Returns the sum of (z - nearest value to z)^2 with z = |src * scale| * factor over a run. Stops early and returns a
 * partial sum once the partial sum exceeds `enough`. */
static double run_noise(const lanes *l, const spec *s, int kind, int wide, const uint8_t *src, size_t n, double scale,
                        double factor, double enough, noise_scratch *t)
{
    const size_t size = kind_size(kind), step = BLOCK / 2;
    double total = 0, *sums = n <= step ? NULL : t->sums;
    memset(t->sums, 0, n <= step ? 0 : sizeof t->sums);
    for (size_t i = 0; i < n && total <= enough; i += step) {
        const size_t m = n - i < step ? n - i : step;
        const uint8_t *y = working_block(l, wide, kind, src + i * size, m, &t->block);
        if (wide)
            total = l->noise_f64((const float64_value *)y, m, scale, factor, s, sums);
        else if (!s->sum32)
            total = noise_top(s, (const float32_value *)y, m, (float)scale, (float)factor, sums);
        else
            total = l->noise_f32((const float32_value *)y, m, (float)scale, (float)factor, s, sums);
    }
    return total;
}

static double scale_of(int wide, const uint8_t *scales, size_t i)
{
    return wide ? ((const float64_value *)scales)[i] : (double)((const float32_value *)scales)[i];
}

/* out[i][k] = the noise of run i with factors[k], in units of the scaled run. */
static void noise_all(const lanes *l, spec s, int kind, int wide, size_t length, const uint8_t *scales,
                      const float64_value *factors, size_t count, const uint8_t *src, size_t runs,
                      float64_value *out)
{
    noise_scratch t;
    const size_t size = kind_size(kind);
    const unsigned mode = enter_float_mode();
    for (size_t i = 0; i < runs; i++, src += length * size)
        for (size_t k = 0; k < count; k++)
            *out++ = run_noise(l, &s, kind, wide, src, length, scale_of(wide, scales, i), factors[k], HUGE_VAL, &t);
    leave_float_mode(mode);
}

/* best[i] = the k < tries[i] with the least noise / factors[k]^2 of run i, and least[i] = that error. Ties go to the
 * smallest factor.
 *
 * With `rising`, the factors are 1, 2, 4 ..., and nothing clips with factor 1. A larger factor rounds the values that it
 * does not clip no worse than a smaller one. So where an error exceeds the least so far, the clipped values account for
 * at least the difference, and larger factors clip no less. Once an error is twice the least so far, no larger factor
 * can be better. */
static void least_all(const lanes *l, spec s, int kind, int wide, int rising, size_t length, const uint8_t *scales,
                      const float64_value *factors, int64_t count, const volatile integer64 *tries,
                      const uint8_t *src, size_t runs, integer64 *best, float64_value *least)
{
    noise_scratch t;
    const double margin = rising ? 2.001 : 1.001; /* the margin exceeds the rounding errors of the sums */
    const size_t size = kind_size(kind);
    const unsigned mode = enter_float_mode();
    for (size_t i = 0; i < runs; i++, src += length * size) {
        const double scale = scale_of(wide, scales, i);
        int64_t tried = tries[i], best_k = 0; /* in local variables: other threads may write to the arguments */
        tried = tried < count ? tried : count;
        double least_error = HUGE_VAL;
        for (int64_t k = 0; k < tried; k++) {
            const double unit = factors[k] * factors[k], most = margin * least_error;
            const double enough = most * unit;
            const double error = run_noise(l, &s, kind, wide, src, length, scale, factors[k], enough, &t) / unit;
            if (error < least_error || (error == least_error && factors[k] < factors[best_k]))
                best_k = k, least_error = error;
            if (rising && error >= most)
                break;
        }
        best[i] = best_k, least[i] = least_error;
    }
    leave_float_mode(mode);
}

/* Sums of the squared errors of the formats of `specs`, whose biases are consecutive. */
static void squared_errors_all(const lanes *l, const spec *specs, size_t biases, int kind, int wide,
                               const uint8_t *src, size_t n, float64_value *out)
{
    scratch r;
    double sums[MOST_FACTORS][16] = {{0}};
    const size_t size = kind_size(kind);
    const unsigned mode = enter_float_mode();
    memset(out, 0, biases * sizeof *out);
    for (size_t i = 0; i < n; i += BLOCK) {
        const size_t m = n - i < BLOCK ? n - i : BLOCK;
        const uint8_t *y = working_block(l, wide, kind, src + i * size, m, &r);
        for (size_t k = 0; k < biases; k++)
            if (wide)
                out[k] = l->noise_f64((const float64_value *)y, m, 1.0, 1.0, &specs[k], sums[k]);
            else
                out[k] = l->noise_f32((const float32_value *)y, m, 1.0f, 1.0f, &specs[k], sums[k]);
    }
    leave_float_mode(mode);
}

/* Returns the sum of squares. */
static double energy_all(const lanes *l, int kind, const uint8_t *src, size_t n)
{
    scratch r;
    double sums[16] = {0}, energy = 0;
    const size_t size = kind_size(kind);
    const unsigned mode = enter_float_mode();
    for (size_t i = 0; i < n; i += BLOCK) {
        const size_t m = n - i < BLOCK ? n - i : BLOCK;
        const uint8_t *y = working_block(l, kind == FLOAT64, kind, src + i * size, m, &r);
        if (kind == FLOAT64)
            energy = l->energy_f64((const float64_value *)y, m, sums);
        else
            energy = l->energy_f32((const float32_value *)y, m, sums);
    }
    leave_float_mode(mode);
    return energy;
}

/* out = the `width` columns of a matrix that begin at src, as rows; `stride` elements from row to row. */
#define DEFINE_COLUMNS(NAME, WORD)                                                                           \
    static void NAME(const WORD *src, size_t stride, size_t rows, size_t width, WORD *out)                   \
    {                                                                                                        \
        enum { SIDE = 16 };                                                                                  \
        for (size_t i = 0; i < rows; i += SIDE)                                                              \
            for (size_t j = 0; j < width; j += SIDE) {                                                       \
                const WORD *from = src + i * stride + j;                                                     \
                WORD *to = out + j * rows + i;                                                               \
                const size_t h = rows - i < SIDE ? rows - i : SIDE, w = width - j < SIDE ? width - j : SIDE; \
                if (h == SIDE && w == SIDE)                                                                  \
                    for (size_t b = 0; b < SIDE; b++)                                                        \
                        for (size_t a = 0; a < SIDE; a++)                                                    \
                            to[b * rows + a] = from[a * stride + b];                                         \
                else                                                                                         \
                    for (size_t b = 0; b < w; b++)                                                           \
                        for (size_t a = 0; a < h; a++)                                                       \
                            to[b * rows + a] = from[a * stride + b];                                         \
            }                                                                                                \
    }
DEFINE_COLUMNS(columns16, code16)
DEFINE_COLUMNS(columns32, float32_bits)
DEFINE_COLUMNS(columns64, float64_bits)
#undef DEFINE_COLUMNS
