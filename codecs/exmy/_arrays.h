/* Kernels on whole arrays, block by block: stochastic rounding, the histogram of exponents, and the errors of an
 * approximation. */

#include "_runs.h"

enum { TO_CODES, TO_PACKED, TO_VALUES };      /* the outputs of stochastic_all */
enum { EXPONENTS = 2098, LEAST = -1074 };     /* exponents of all float64: -1074 ... 1023 */

/* Writes the random bits of n positions of an array: FORMAT.md, section 3. */
static void random_bits_at(const lanes *l, uint64_t seed, uint64_t position, size_t n, uint32_t *out)
{
    while (n > 0) {
        const uint32_t low = (uint32_t)position, high = (uint32_t)(position >> 32);
        const uint64_t left = ((uint64_t)1 << 32) - low;
        const size_t m = n < left ? n : (size_t)left;
        const uint32_t inner = baseline_mix((uint32_t)(seed >> 32) ^ baseline_mix(high + 0x9e3779b9u));
        const uint32_t k0 = baseline_mix((uint32_t)seed ^ inner), k1 = baseline_mix(k0 + 0x85ebca6bu);
        l->random_bits(low, k0, k1, m, out);
        position += m, out += m, n -= m;
    }
}

/* Rounds n elements stochastically, after multiplying them by the scales of g unless g is NULL. `position` is the
 * position of src[0] in the whole array. */
static nonfinites stochastic_all(const lanes *l, spec s, int kind, uint64_t seed, uint64_t position, int target,
                                 int saturate, const groups *g, const uint8_t *src, size_t n, uint8_t *dst)
{
    scratch r;
    nonfinites bad = {0, 0};
    uint64_t scaled[BLOCK];
    uint32_t random[BLOCK];
    const size_t size = kind_size(kind);
    const int narrow = s.bits <= 8;
    const unsigned mode = enter_float_mode();
    for (size_t i = 0; i < n; i += BLOCK) {
        const size_t m = n - i < BLOCK ? n - i : BLOCK;
        const uint8_t *from = working_block(l, g == NULL || g->wide, kind, src + i * size, m, &r);
        if (g != NULL) {
            scale_block(l, g, i, from, m, (uint8_t *)scaled);
            from = (const uint8_t *)scaled;
            if (!g->wide) {
                l->widen_f32((const float32_value *)scaled, m, (float64_value *)r.wide);
                from = (const uint8_t *)r.wide;
            }
        }
        void *codes = target == TO_CODES ? (void *)(dst + i * (narrow ? 1 : 2)) : (void *)r.codes;
        random_bits_at(l, seed, position + i, m, random);
        const uint64_t peak = narrow ? l->stochastic8((const float64_bits *)from, random, m, &s, codes)
                                     : l->stochastic16((const float64_bits *)from, random, m, &s, codes);
        if (peak >= 0x7ff0000000000000u) {
            if (!saturate) {
                count_nonfinite(kind, src + i * size, n - i, &bad.count, &bad.first);
                bad.first += i;
                break;
            }
            for (size_t j = 0; j < m; j++)
                if (nonfinite(FLOAT64, from, j) == 2) {
                    if (narrow)
                        ((uint8_t *)codes)[j] = 0;
                    else
                        ((code16 *)codes)[j] = 0;
                }
        }
        if (target == TO_PACKED)
            pack_block(l, codes, m, s.bits, &r, dst + packed_bytes(i, s.bits));
        else if (target == TO_VALUES)
            decode_block(l, &s, kind, codes, m, &r, dst + i * size);
    }
    leave_float_mode(mode);
    return bad;
}

/* Adds the exponent fields of float64 to WAYS64 interleaved histograms. Consecutive elements often have the same
 * exponent, so one histogram would wait for its own last store. */
enum { WAYS64 = 4 };
static void fields64(const float64_bits *src, size_t n, uint64_t *bins)
{
    size_t i = 0;
    for (; i + WAYS64 <= n; i += WAYS64)
        for (size_t j = 0; j < WAYS64; j++)
            bins[((src[i + j] >> 52) & 2047) * WAYS64 + j]++;
    for (; i < n; i++)
        bins[((src[i] >> 52) & 2047) * WAYS64]++;
}

/* Counts the `small` values whose exponent field is 0: zeros, and subnormals by their true exponents. */
#define DEFINE_SMALL(BITS, MANTISSA, FIELDS)                                                                 \
    static void small##BITS(const float##BITS##_bits *src, size_t n, int64_t small, integer64 *counts)       \
    {                                                                                                        \
        int64_t zeros = 0;                                                                                   \
        for (size_t i = 0; i < n; i++)                                                                       \
            zeros += (src[i] << 1) == 0;                                                                     \
        counts[EXPONENTS] += zeros;                                                                          \
        for (size_t i = 0; i < n && zeros < small; i++) {                                                    \
            uint##BITS##_t a = src[i] & (((uint##BITS##_t)1 << (BITS - 1)) - 1);                             \
            if (a != 0 && a >> MANTISSA == 0) {                                                              \
                int exponent = 1 - FIELDS / 2 + 1 - MANTISSA;                                                \
                while (a >>= 1)                                                                              \
                    exponent++;                                                                              \
                counts[exponent - LEAST]++;                                                                  \
            }                                                                                                \
        }                                                                                                    \
    }
DEFINE_SMALL(32, 23, 256)
DEFINE_SMALL(64, 52, 2048)
#undef DEFINE_SMALL

static uint64_t sum_of(const uint64_t *counters, size_t ways)
{
    uint64_t sum = 0;
    for (size_t j = 0; j < ways; j++)
        sum += counters[j];
    return sum;
}

/* Adds to counts the number of values with each exponent, then the numbers of zeros and of non-finite values. */
static void exponents_all(const lanes *l, int kind, const uint8_t *src, size_t n, integer64 *counts)
{
    uint64_t bins[2048 * WAYS64] = {0};
    uint32_t middle[BLOCK];
    const size_t size = kind_size(kind), fields = kind == FLOAT64 ? 2048 : 256, ways = kind == FLOAT64 ? WAYS64 : 1;
    uint64_t small = 0;
    for (size_t i = 0; i < n; i += BLOCK) {
        const size_t m = n - i < BLOCK ? n - i : BLOCK;
        const uint8_t *from = src + i * size;
        if (kind == FLOAT16 || kind == BFLOAT16) {
            (kind == FLOAT16 ? l->widen_f16 : l->widen_bf16)((const code16 *)from, m, middle);
            from = (const uint8_t *)middle;
        }
        if (kind == FLOAT64)
            fields64((const float64_bits *)from, m, bins);
        else
            l->fields32((const float32_bits *)from, m, bins);
        const uint64_t now = sum_of(bins, ways);
        if (now > small && kind == FLOAT64)
            small64((const float64_bits *)from, m, (int64_t)(now - small), counts);
        else if (now > small)
            small32((const float32_bits *)from, m, (int64_t)(now - small), counts);
        small = now;
    }
    for (size_t f = 1; f < fields; f++) {
        const size_t at = f == fields - 1 ? EXPONENTS + 1 : f - fields / 2 + 1 - LEAST;
        counts[at] += (int64_t)sum_of(bins + f * ways, ways);
    }
}

/* Adds the errors of a block of y as an approximation of x to `sums`, whose layout _compare.h describes. */
static void compare_block(const lanes *l, int kind, const uint8_t *x, const uint8_t *y, size_t n, double *sums)
{
    uint32_t a[BLOCK], b[BLOCK];
    if (kind == FLOAT64)
        l->compare_f64((const float64_value *)x, (const float64_value *)y, n, sums);
    else if (kind == FLOAT32)
        l->compare_f32((const float32_value *)x, (const float32_value *)y, n, sums);
    else {
        (kind == FLOAT16 ? l->widen_f16 : l->widen_bf16)((const code16 *)x, n, a);
        (kind == FLOAT16 ? l->widen_f16 : l->widen_bf16)((const code16 *)y, n, b);
        l->compare_f32((const float32_value *)a, (const float32_value *)b, n, sums);
    }
}

/* Writes the signal, noise, largest error and largest relative error to totals. */
static void add_up(const double *sums, double *totals)
{
    for (size_t k = 0; k < 3; k++) {
        totals[k] = 0;
        for (size_t j = 0; j < 8; j++)
            totals[k] = k < 2                           ? totals[k] + sums[8 * k + j]
                        : totals[k] > sums[8 * k + j] ? totals[k]
                                                      : sums[8 * k + j];
    }
    totals[3] = sums[24];
}

/* Writes the errors of y as an approximation of x to totals. */
static void compare_all(const lanes *l, int kind, const uint8_t *x, const uint8_t *y, size_t n, double *totals)
{
    double sums[25] = {0};
    const size_t size = kind_size(kind);
    const unsigned mode = enter_float_mode();
    for (size_t i = 0; i < n; i += BLOCK)
        compare_block(l, kind, x + i * size, y + i * size, n - i < BLOCK ? n - i : BLOCK, sums);
    add_up(sums, totals);
    leave_float_mode(mode);
}

/* Returns the number of elements whose magnitude exceeds a limit. */
static size_t count_above(const lanes *l, int kind, const uint8_t *src, size_t n, double limit)
{
    const size_t size = kind_size(kind);
    size_t count = 0;
    if (peak_all(l, kind, src, n) <= limit) /* false for NaN */
        return 0;
    for (size_t i = 0; i < n; i++)
        count += nonfinite(kind, src, i) < 2 && peak_all(l, kind, src + i * size, 1) > limit;
    return count;
}

/* Writes the errors of packed codes as an approximation of x to totals, as if they were decoded to the kind of x: by
 * `s` alone, or with the scales of g. No decoded value leaves the first-level cache. Returns the number of elements
 * whose magnitude exceeds the limit. */
static size_t measure_all(const lanes *l, spec s, int kind, const groups *g, double limit, const uint8_t *packed,
                          const uint8_t *x, size_t n, double *totals)
{
    size_t above = 0;
    scratch r;
    uint64_t decoded[BLOCK];
    double sums[25] = {0};
    const size_t size = kind_size(kind);
    const unsigned mode = enter_float_mode();
    const decoder d = decoder_of(l, &s, kind, g);
    for (size_t i = 0; i < n; i += BLOCK) {
        const size_t m = n - i < BLOCK ? n - i : BLOCK;
        unpack_block(l, packed + packed_bytes(i, s.bits), m, s.bits, &r, r.codes);
        if (g == NULL)
            decode_block(l, &s, kind, r.codes, m, &r, (uint8_t *)decoded);
        else
            decode_run(l, &s, kind, g, &d, r.codes, i, m, &r, (uint8_t *)decoded);
        compare_block(l, kind, x + i * size, (const uint8_t *)decoded, m, sums);
        above += count_above(l, kind, x + i * size, m, limit);
    }
    add_up(sums, totals);
    leave_float_mode(mode);
    return above;
}
