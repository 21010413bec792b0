/* The kernels on whole arrays, block by block: the Python functions of _kernels.c call them without the GIL.
 *
 * A block is BLOCK elements, so that its codes and its widened values stay in the first-level cache.
 */

#include "_levels.h"

static size_t kind_size(int kind)
{
    return kind == FLOAT64 ? 8 : kind == FLOAT32 ? 4 : 2;
}

/* Returns 0 for a finite element, 1 for infinity, 2 for NaN. */
static int nonfinite(int kind, const uint8_t *src, size_t i)
{
    uint64_t magnitude, infinity;
    if (kind == FLOAT64) {
        magnitude = ((const float64_bits *)src)[i] & 0x7fffffffffffffffu;
        infinity = 0x7ff0000000000000u;
    } else if (kind == FLOAT32) {
        magnitude = ((const float32_bits *)src)[i] & 0x7fffffffu;
        infinity = 0x7f800000u;
    } else {
        magnitude = ((const code16 *)src)[i] & 0x7fffu;
        infinity = kind == FLOAT16 ? 0x7c00u : 0x7f80u;
    }
    return magnitude < infinity ? 0 : magnitude == infinity ? 1 : 2;
}

static void count_nonfinite(int kind, const uint8_t *src, size_t n, size_t *bad, size_t *first)
{
    *bad = *first = 0;
    for (size_t i = 0; i < n; i++)
        if (nonfinite(kind, src, i)) {
            if (*bad == 0)
                *first = i;
            ++*bad;
        }
}

/* Scratch memory for one block. */
typedef struct {
    uint64_t wide[BLOCK];  /* float64 */
    uint64_t exact[BLOCK]; /* float64 values of codes */
    uint32_t middle[BLOCK];
    uint16_t codes[BLOCK];
    uint8_t low[BLOCK], high[BLOCK];
} scratch;

/* Encodes a block of n elements into codes (uint8 up to 8 bits, uint16 above). Returns whether all were finite. */
static int encode_block(const lanes *l, const spec *s, int kind, const uint8_t *src, size_t n, int saturate,
                        scratch *r, void *codes)
{
    const int narrow = s->bits <= 8;
    int finite;
    if (kind == FLOAT16 || kind == BFLOAT16)
        (kind == FLOAT16 ? l->widen_f16 : l->widen_bf16)((const code16 *)src, n, r->middle);
    const float32_bits *single = kind == FLOAT32 ? (const float32_bits *)src : r->middle;
    if (kind != FLOAT64 && s->top32) {
        uint32_t peak = narrow ? l->top8(single, n, s, codes) : l->top16(single, n, s, codes);
        finite = peak < 0x7f800000u;
    } else if (kind != FLOAT64 && s->sum32) {
        uint32_t peak = narrow ? l->codes8_f32(single, n, s, codes) : l->codes16_f32(single, n, s, codes);
        finite = peak < 0x7f800000u;
    } else {
        const float64_bits *from = (const float64_bits *)src;
        if (kind != FLOAT64) {
            l->widen_f32((const float32_value *)single, n, (float64_value *)r->wide);
            from = r->wide;
        }
        uint64_t peak = narrow ? l->codes8_f64(from, n, s, codes) : l->codes16_f64(from, n, s, codes);
        finite = peak < 0x7ff0000000000000u;
    }
    if (!finite && saturate)
        for (size_t i = 0; i < n; i++)
            if (nonfinite(kind, src, i) == 2) {
                if (narrow)
                    ((uint8_t *)codes)[i] = 0;
                else
                    ((code16 *)codes)[i] = 0;
            }
    return finite;
}

/* Rounds exact float64 values once to a smaller kind. */
static void narrow_block(const lanes *l, int kind, const float64_bits *exact, size_t n, uint8_t *dst)
{
    if (kind == FLOAT32)
        l->narrow_f64((const float64_value *)exact, n, (float32_value *)dst);
    else { /* the kinds are eXmY formats with the bits of infinity as the code after that of the largest value */
        spec half = kind == FLOAT16 ? spec_of(5, 10, 15, 0x1p16) : spec_of(8, 7, 127, 0x1p128);
        l->codes16_f64(exact, n, &half, (code16 *)dst);
    }
}

/* Rounds float32 values once to float16 or bfloat16. */
static void narrow_single(const lanes *l, int kind, const float32_bits *single, size_t n, uint8_t *dst)
{
    if (kind == BFLOAT16)
        l->narrow_bf16(single, n, (code16 *)dst);
    else {
        spec half = spec_of(5, 10, 15, 0x1p16);
        l->narrow_f16(single, n, &half, (code16 *)dst);
    }
}

/* Decodes a block of n codes into dst, rounding once if dst cannot represent the value. */
static void decode_block(const lanes *l, const spec *s, int kind, const void *codes, size_t n, scratch *r,
                         uint8_t *dst)
{
    const int narrow = s->bits <= 8;
    if (kind == FLOAT64 || !(s->exact32 || s->top32)) {
        float64_bits *exact = kind == FLOAT64 ? (float64_bits *)dst : r->exact;
        if (narrow)
            l->values8_f64(codes, n, s, exact);
        else
            l->values16_f64(codes, n, s, exact);
        if (kind != FLOAT64)
            narrow_block(l, kind, exact, n, dst);
        return;
    }
    float32_bits *single = kind == FLOAT32 ? (float32_bits *)dst : r->middle;
    if (s->top32)
        narrow ? l->untop8(codes, n, s, single) : l->untop16(codes, n, s, single);
    else if (narrow)
        l->values8_f32(codes, n, s, single);
    else
        l->values16_f32(codes, n, s, single);
    if (kind != FLOAT32)
        narrow_single(l, kind, single, n, dst);
}

/* The factor with which `halves8_f32` and `halves16_f32` decode a format, or 0 if they do not. */
static float halves_factor(const lanes *l, const spec *s)
{
    const int exponent = 15 + (s->tiny32 >> 23) - 128; /* 15 - bias */
    if (l->halves8_f32 == NULL || !s->exact32 || s->exponent_bits > 4 || s->mantissa_bits > 10 || exponent < -126 ||
        exponent > 127)
        return 0;
    return (float)power_of_two(exponent);
}

static void decode_halves(const lanes *l, const spec *s, const void *codes, size_t n, float factor, float32_bits *out)
{
    if (s->bits <= 8)
        l->halves8_f32(codes, n, s, factor, out);
    else
        l->halves16_f32(codes, n, s, factor, out);
}

static size_t packed_bytes(size_t n, int bits)
{
    return n / TILE * (TILE / 8) * (size_t)bits + (n % TILE + 7) / 8 * (size_t)bits;
}

/* Packs the low `bits` bits of n codes of one byte each, with `stride` bytes from one packed tile to the next. */
static void pack_bytes(const lanes *l, uint8_t *codes, size_t n, int bits, size_t stride, uint8_t *out)
{
    const size_t tiles = n / TILE, rest = n % TILE, length = (rest + 7) / 8 * 8;
    uint8_t *last = codes + tiles * TILE, *end = out + tiles * stride;
    unsigned shift = 0;
    memset(last + rest, 0, length - rest);
    if (bits == 8) {
        for (size_t t = 0; t < tiles; t++)
            memcpy(out + t * stride, codes + t * TILE, TILE);
        memcpy(end, last, length);
        return;
    }
    for (int k = 0; k < 3; k++) {
        const unsigned p = 4u >> k;
        if (!((unsigned)bits & p))
            continue;
        l->pack_plane[k](codes, tiles, shift, stride, out);
        const size_t bytes = length / 8 * p;
        for (size_t j = 0; j < bytes; j++) {
            unsigned byte = 0;
            for (unsigned i = 0; i < 8 / p; i++)
                byte |= (((unsigned)last[j + i * bytes] >> shift) & ((1u << p) - 1)) << (i * p);
            end[j] = (uint8_t)byte;
        }
        shift += p;
        out += TILE / 8 * p;
        end += bytes;
    }
}

static void unpack_bytes(const lanes *l, const uint8_t *in, size_t n, int bits, size_t stride, uint8_t *codes)
{
    const size_t tiles = n / TILE, rest = n % TILE, length = (rest + 7) / 8 * 8;
    uint8_t *last = codes + tiles * TILE;
    const uint8_t *end = in + tiles * stride;
    unsigned shift = 0;
    if (bits == 8) {
        for (size_t t = 0; t < tiles; t++)
            memcpy(codes + t * TILE, in + t * stride, TILE);
        memcpy(last, end, length);
        return;
    }
    memset(last, 0, length);
    for (int k = 0; k < 3; k++) {
        const unsigned p = 4u >> k;
        if (!((unsigned)bits & p))
            continue;
        l->unpack_plane[k](in, tiles, shift, stride, codes);
        const size_t bytes = length / 8 * p;
        for (size_t j = 0; j < bytes; j++)
            for (unsigned i = 0; i < 8 / p; i++)
                last[j + i * bytes] |= (uint8_t)((((unsigned)end[j] >> (i * p)) & ((1u << p) - 1)) << shift);
        shift += p;
        in += TILE / 8 * p;
        end += bytes;
    }
}

/* Packs a block; `codes` must have room for BLOCK codes. Above 8 bits, every tile has the low bytes of its codes first;
 * the last tile may be shorter, so its high bits begin earlier. */
static void pack_block(const lanes *l, const void *codes, size_t n, int bits, scratch *r, uint8_t *out)
{
    const size_t stride = TILE / 8 * (size_t)bits;
    if (bits <= 8) {
        pack_bytes(l, (uint8_t *)codes, n, bits, stride, out);
        return;
    }
    l->split16(codes, n, r->low, r->high);
    pack_bytes(l, r->low, n, 8, stride, out);
    const size_t whole = n / TILE * TILE;
    pack_bytes(l, r->high, whole, bits - 8, stride, out + TILE);
    pack_bytes(l, r->high + whole, n - whole, bits - 8, stride,
               out + n / TILE * stride + (n - whole + 7) / 8 * 8);
}

static void unpack_block(const lanes *l, const uint8_t *in, size_t n, int bits, scratch *r, void *codes)
{
    const size_t stride = TILE / 8 * (size_t)bits;
    if (bits <= 8) {
        unpack_bytes(l, in, n, bits, stride, codes);
        return;
    }
    unpack_bytes(l, in, n, 8, stride, r->low);
    const size_t whole = n / TILE * TILE;
    unpack_bytes(l, in + TILE, whole, bits - 8, stride, r->high);
    unpack_bytes(l, in + n / TILE * stride + (n - whole + 7) / 8 * 8, n - whole, bits - 8, stride,
                 r->high + whole);
    l->join16(r->low, r->high, n, codes);
}

/* Unpacks a block of codes in planes into r->codes. */
static void unpack_planes(const lanes *l, const uint8_t *upper, const uint8_t *lower, size_t n, int bits, scratch *r)
{
    const int rest = bits - 8;
    unpack_bytes(l, lower, n, rest, TILE / 8 * (size_t)rest, r->low);
    l->join_at(upper, r->low, n, (unsigned)rest, r->codes);
}

/* Copy packed codes of more than 8 bits to or from two planes: the upper 8 bits of all codes and their lower bits,
 * each plane packed at its own width. */
static void split_planes(const lanes *l, int bits, const uint8_t *src, size_t n, uint8_t *upper, uint8_t *lower)
{
    scratch r;
    const int rest = bits - 8;
    for (size_t i = 0; i < n; i += BLOCK) {
        const size_t m = n - i < BLOCK ? n - i : BLOCK;
        unpack_block(l, src + packed_bytes(i, bits), m, bits, &r, r.codes);
        for (size_t j = 0; j < m; j++) {
            r.high[j] = (uint8_t)(r.codes[j] >> rest);
            r.low[j] = (uint8_t)(r.codes[j] & ((1u << rest) - 1));
        }
        pack_bytes(l, r.high, m, 8, TILE, upper + i);
        pack_bytes(l, r.low, m, rest, TILE / 8 * (size_t)rest, lower + packed_bytes(i, rest));
    }
}

static void join_planes(const lanes *l, int bits, const uint8_t *upper, const uint8_t *lower, size_t n, uint8_t *dst)
{
    scratch r;
    const int rest = bits - 8;
    for (size_t i = 0; i < n; i += BLOCK) {
        const size_t m = n - i < BLOCK ? n - i : BLOCK;
        unpack_planes(l, upper + i, lower + packed_bytes(i, rest), m, bits, &r);
        pack_block(l, r.codes, m, bits, &r, dst + packed_bytes(i, bits));
    }
}

/* Copies with non-temporal stores, for outputs too large to stay in the caches. Callers copy a tile at a time, so that
 * the stores overlap with decoding the next tile. */
static void stream(uint8_t *dst, const uint8_t *src, size_t n)
{
#if HAVE_SSE2
    size_t head = (size_t)(-(uintptr_t)dst & 63);
    head = head < n ? head : n;
    memcpy(dst, src, head);
    dst += head, src += head, n -= head;
    for (; n >= 64; n -= 64, dst += 64, src += 64)
        for (size_t i = 0; i < 64; i += 16)
            _mm_stream_si128((__m128i *)(dst + i), _mm_loadu_si128((const __m128i *)(src + i)));
#endif
    memcpy(dst, src, n);
}

static void stream_end(void)
{
#if HAVE_SSE2
    _mm_sfence();
#endif
}

/* The size from which outputs bypass the caches: more than the caches hold. Chunks are smaller: into 4 to 32 MiB, some
 * processors decode twice as fast with ordinary stores. */
static const size_t STREAM_BYTES = (size_t)32 << 20;

typedef struct {
    size_t count, first; /* the number of non-finite values, and the index of the first */
} nonfinites;

static nonfinites encode_all(const lanes *l, spec s, int kind, const uint8_t *src, size_t n, int packed,
                             int saturate, uint8_t *dst)
{
    scratch r;
    nonfinites bad = {0, 0};
    const size_t size = kind_size(kind);
    const unsigned mode = enter_float_mode();
    for (size_t i = 0; i < n; i += BLOCK) {
        const size_t m = n - i < BLOCK ? n - i : BLOCK;
        void *codes = packed ? (void *)r.codes : (void *)(dst + i * (s.bits <= 8 ? 1 : 2));
        if (!encode_block(l, &s, kind, src + i * size, m, saturate, &r, codes) && !saturate) {
            count_nonfinite(kind, src + i * size, n - i, &bad.count, &bad.first);
            bad.first += i;
            break;
        }
        if (packed)
            pack_block(l, codes, m, s.bits, &r, dst + packed_bytes(i, s.bits));
    }
    leave_float_mode(mode);
    return bad;
}

static void decode_all(const lanes *l, spec s, int kind, const uint8_t *src, size_t n, int packed, uint8_t *dst)
{
    scratch r;
    uint64_t values[TILE];
    code16 table[TILE / 2];
    const size_t size = kind_size(kind);
    const int streaming = n * size >= STREAM_BYTES;
    const float factor = kind == FLOAT32 ? halves_factor(l, &s) : 0;
    const int tabled = l->look_up != NULL && size == 2 && s.bits <= 8 && n >= BLOCK;
    const unsigned mode = enter_float_mode();
    if (tabled) {
        for (size_t i = 0; i < TILE / 2; i++)
            r.low[i] = (uint8_t)i;
        decode_block(l, &s, kind, r.low, TILE / 2, &r, (uint8_t *)table);
    }
    for (size_t i = 0; i < n; i += BLOCK) {
        const size_t m = n - i < BLOCK ? n - i : BLOCK, piece = streaming ? TILE : BLOCK;
        const uint8_t *codes = src + i * (s.bits <= 8 ? 1 : 2);
        if (packed) {
            unpack_block(l, src + packed_bytes(i, s.bits), m, s.bits, &r, r.codes);
            codes = (const uint8_t *)r.codes;
        }
        for (size_t j = 0; j < m; j += piece) {
            const size_t k = m - j < piece ? m - j : piece;
            const uint8_t *from = codes + j * (s.bits <= 8 ? 1 : 2);
            uint8_t *to = dst + (i + j) * size, *out = streaming ? (uint8_t *)values : to;
            if (tabled)
                l->look_up(from, k, table, (code16 *)out);
            else if (factor > 0)
                decode_halves(l, &s, from, k, factor, (float32_bits *)out);
            else
                decode_block(l, &s, kind, from, k, &r, out);
            if (streaming)
                stream(to, out, k * size);
        }
    }
    if (streaming)
        stream_end();
    leave_float_mode(mode);
}

static nonfinites round_all(const lanes *l, spec s, int kind, const uint8_t *src, size_t n, int saturate,
                            uint8_t *dst)
{
    scratch r;
    nonfinites bad = {0, 0};
    const size_t size = kind_size(kind);
    const unsigned mode = enter_float_mode();
    for (size_t i = 0; i < n; i += BLOCK) {
        const size_t m = n - i < BLOCK ? n - i : BLOCK;
        if (!encode_block(l, &s, kind, src + i * size, m, saturate, &r, r.codes) && !saturate) {
            count_nonfinite(kind, src + i * size, n - i, &bad.count, &bad.first);
            bad.first += i;
            break;
        }
        decode_block(l, &s, kind, r.codes, m, &r, dst + i * size);
    }
    leave_float_mode(mode);
    return bad;
}

static void pack_all(const lanes *l, int bits, const uint8_t *src, size_t n, uint8_t *dst)
{
    scratch r;
    const size_t size = bits <= 8 ? 1 : 2;
    for (size_t i = 0; i < n; i += BLOCK) {
        const size_t m = n - i < BLOCK ? n - i : BLOCK;
        memcpy(r.codes, src + i * size, m * size);
        pack_block(l, r.codes, m, bits, &r, dst + packed_bytes(i, bits));
    }
}

static void unpack_all(const lanes *l, int bits, const uint8_t *src, size_t n, uint8_t *dst)
{
    scratch r;
    const size_t size = bits <= 8 ? 1 : 2;
    for (size_t i = 0; i < n; i += BLOCK) {
        const size_t m = n - i < BLOCK ? n - i : BLOCK;
        unpack_block(l, src + packed_bytes(i, bits), m, bits, &r, r.codes);
        memcpy(dst + i * size, r.codes, m * size);
    }
}

/* Returns the largest magnitude as a float64; infinity or NaN if src has one. */
static double peak_all(const lanes *l, int kind, const uint8_t *src, size_t n)
{
    float64_word wide;
    float32_word single;
    if (kind == FLOAT64) {
        wide.i = (int64_t)l->peak64((const float64_bits *)src, n);
        return wide.f;
    }
    if (kind == FLOAT32)
        single.i = (int32_t)l->peak32((const float32_bits *)src, n);
    else {
        code16 half = (uint16_t)l->peak16((const code16 *)src, n);
        uint32_t bits;
        (kind == FLOAT16 ? l->widen_f16 : l->widen_bf16)(&half, 1, &bits);
        single.i = (int32_t)bits;
    }
    return single.f;
}
