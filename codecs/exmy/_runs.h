/* The kernels on whole arrays in which groups of elements share a scale: _kernels.c calls them for `quantize`.
 *
 * Element i of the array belongs to group i / (length * inner) * inner + i % inner. A group is a run of `length`
 * elements if inner is 1, else a column of a matrix of `length` rows and `inner` columns. The working type is
 * float32, or float64 (`wide`) if float32 would lose bits; scales are of the working type.
 */

#include "_blocks.h"

typedef struct {
    int wide;
    size_t length, inner, first; /* first: the position in the whole array of the first element given */
    const uint8_t *scales;
} groups;

/* out = src * the scale of each element's group, for n elements from `first` + i on. */
static void scale_block(const lanes *l, const groups *g, size_t i, const uint8_t *src, size_t n, uint8_t *out)
{
    const size_t size = g->wide ? 8 : 4, run = g->inner == 1 ? g->length : g->inner;
    size_t at = (g->first + i) % run, number = (g->first + i) / run;
    for (size_t m; n > 0; at = 0, number++, src += m * size, out += m * size, n -= m) {
        m = run - at < n ? run - at : n;
        if (g->inner == 1) { /* a run of the group `number` */
            if (g->wide)
                l->scale_f64((const float64_value *)src, m, ((const float64_value *)g->scales)[number],
                             (float64_value *)out);
            else
                l->scale_f32((const float32_value *)src, m, ((const float32_value *)g->scales)[number],
                             (float32_value *)out);
        } else { /* a row across groups */
            const uint8_t *scales = g->scales + (number / g->length * g->inner + at) * size;
            if (g->wide)
                l->scale_each_f64((const float64_value *)src, m, (const float64_value *)scales,
                                  (float64_value *)out);
            else
                l->scale_each_f32((const float32_value *)src, m, (const float32_value *)scales,
                                  (float32_value *)out);
        }
    }
}

/* Returns a block in the working type: src itself, or a converted copy in r. */
static const uint8_t *working_block(const lanes *l, int wide, int kind, const uint8_t *src, size_t n, scratch *r)
{
    const uint8_t *single = src;
    if (kind == FLOAT16 || kind == BFLOAT16) {
        (kind == FLOAT16 ? l->widen_f16 : l->widen_bf16)((const code16 *)src, n, r->middle);
        single = (const uint8_t *)r->middle;
    }
    if (!wide || kind == FLOAT64)
        return single;
    l->widen_f32((const float32_value *)single, n, (float64_value *)r->wide);
    return (const uint8_t *)r->wide;
}

/* Replaces the codes of -0 by those of +0. */
static void merge_zeros(void *codes, size_t n, int bits)
{
    const unsigned negative = 1u << (bits - 1);
    uint8_t *narrow = codes;
    code16 *wide = codes;
    if (bits <= 8)
        for (size_t i = 0; i < n; i++)
            narrow[i] = narrow[i] == (uint8_t)negative ? 0 : narrow[i];
    else
        for (size_t i = 0; i < n; i++)
            wide[i] = wide[i] == (uint16_t)negative ? 0 : wide[i];
}

/* Writes the packed codes of src times the scales; infinity becomes the largest value of its sign, NaN code 0, and -0
 * becomes +0 if `one_zero`. Returns whether all products were finite. */
static int encode_groups(const lanes *l, spec s, int kind, const groups *g, int one_zero, const uint8_t *src,
                          size_t n, uint8_t *dst)
{
    scratch r;
    uint64_t scaled[BLOCK];
    int finite = 1;
    const size_t size = kind_size(kind);
    const unsigned mode = enter_float_mode();
    for (size_t i = 0; i < n; i += BLOCK) {
        const size_t m = n - i < BLOCK ? n - i : BLOCK;
        scale_block(l, g, i, working_block(l, g->wide, kind, src + i * size, m, &r), m, (uint8_t *)scaled);
        finite &= encode_block(l, &s, g->wide ? FLOAT64 : FLOAT32, (uint8_t *)scaled, m, 1, &r, r.codes);
        if (one_zero)
            merge_zeros(r.codes, m, s.bits);
        pack_block(l, r.codes, m, s.bits, &r, dst + packed_bytes(i, s.bits));
    }
    leave_float_mode(mode);
    return finite;
}

/* How codes become values times scales: `fused` in one loop, or by way of float16 unless `factor` is 0. */
typedef struct {
    int fused;
    float factor;
} decoder;

static decoder decoder_of(const lanes *l, const spec *s, int kind, const groups *g)
{
    decoder d = {0};
    d.fused = g != NULL && g->inner == 1 && kind == FLOAT32 && !g->wide && s->exact32 && !s->top32;
    d.factor = d.fused ? halves_factor(l, s) : 0;
    return d;
}

/* Writes the values of n codes times the scales, of elements from `first` + i on, in at most a block. */
static void decode_run(const lanes *l, const spec *s, int kind, const groups *g, const decoder *d, const void *codes,
                       size_t i, size_t n, scratch *r, uint8_t *out)
{
    uint64_t values[BLOCK], scaled[BLOCK];
    const size_t group = (g->first + i) / g->length;
    if (d->fused && (g->first + i + n - 1) / g->length == group) {
        const float scale = ((const float32_value *)g->scales)[group], factor = scale * d->factor;
        if (factor >= 0x1p-126f && factor <= 0x1p127f) /* otherwise the product of the two may be rounded */
            decode_halves(l, s, codes, n, factor, (float32_bits *)out);
        else if (s->bits <= 8)
            l->scaled8_f32(codes, n, s, scale, (float32_bits *)out);
        else
            l->scaled16_f32(codes, n, s, scale, (float32_bits *)out);
        return;
    }
    const int direct = kind == (g->wide ? FLOAT64 : FLOAT32);
    decode_block(l, s, g->wide ? FLOAT64 : FLOAT32, codes, n, r, (uint8_t *)values);
    scale_block(l, g, i, (uint8_t *)values, n, direct ? out : (uint8_t *)scaled);
    if (!direct && g->wide)
        narrow_block(l, kind, (const float64_bits *)scaled, n, out);
    else if (!direct)
        narrow_single(l, kind, (const float32_bits *)scaled, n, out);
}

/* Writes the values of packed codes, or of codes in planes, times the scales, rounded once to the kind of dst. If that
 * is float16 or bfloat16 and not `wide`, float32 must represent every product exactly. */
static void decode_groups(const lanes *l, spec s, int kind, const groups *g, int in_planes, const uint8_t *src,
                          size_t n, uint8_t *dst)
{
    scratch r;
    uint64_t piece[TILE];
    const size_t size = kind_size(kind), code_size = s.bits <= 8 ? 1 : 2;
    const int streaming = n * size >= STREAM_BYTES;
    const unsigned mode = enter_float_mode();
    const decoder d = decoder_of(l, &s, kind, g);
    for (size_t i = 0; i < n; i += BLOCK) {
        const size_t m = n - i < BLOCK ? n - i : BLOCK, step = streaming ? TILE : BLOCK;
        const uint8_t *codes = (const uint8_t *)r.codes;
        if (s.bits == 8)
            codes = src + i;
        else if (in_planes)
            unpack_planes(l, src + i, src + packed_bytes(n, 8) + packed_bytes(i, s.bits - 8), m, s.bits, &r);
        else
            unpack_block(l, src + packed_bytes(i, s.bits), m, s.bits, &r, r.codes);
        for (size_t j = 0; j < m; j += step) {
            const size_t k = m - j < step ? m - j : step;
            uint8_t *to = dst + (i + j) * size, *out = streaming ? (uint8_t *)piece : to;
            decode_run(l, &s, kind, g, &d, codes + j * code_size, i + j, k, &r, out);
            if (streaming)
                stream(to, out, k * size);
        }
    }
    if (streaming)
        stream_end();
    leave_float_mode(mode);
}

/* Writes the largest magnitude of each run of `length` elements, as a float64; infinity or NaN if the run has one. */
static void peaks_all(const lanes *l, int kind, size_t length, const uint8_t *src, size_t runs,
                      float64_value *out)
{
    const size_t size = kind_size(kind);
    const unsigned mode = enter_float_mode();
    for (size_t i = 0; i < runs; i++)
        out[i] = peak_all(l, kind, src + i * length * size, length);
    leave_float_mode(mode);
}
