/* The loops of the step codec (FORMAT.md, section 10) for one level and one type of elements.
 *
 * _step.h includes this file with T, the type of elements; N, that of their numbers; and PER_WORD, how many numbers
 * there are in any 57 bits. A difference is held as its number t: 2 * magnitude + sign, so that an element that stays
 * has t = 1, and 0 stands for the greatest magnitude, whose t would overflow. The bit length of t less 1 is its symbol;
 * the bits below the highest one are written as they are. Each lane is a stream of bits of its own, so that a processor
 * decodes four at the same time.
 */

static INLINE int TYPED(symbol)(N t, int greatest)
{
    return t ? 31 - __builtin_clz(t) : greatest;
}

#if !STEP_GAPS
/* Write the numbers of the differences; return the bits that any of them has. */
static INLINE N TYPED(numbers_of)(const T *old, const T *new, size_t n, int bits, N *numbers)
{
    const int sign_bit = bits - 1;
    const N magnitude = (N)((1ull << sign_bit) - 1), all = (N)((1ull << bits) - 1);
    N any = 0;
    for (size_t i = 0; i < n; i++) {
        const N a = old[i], b = new[i];
        const N x = a ^ ((N)(0 - (N)(a >> sign_bit)) & magnitude);
        const N y = b ^ ((N)(0 - (N)(b >> sign_bit)) & magnitude);
        const N d = (N)(y - x) & all;
        const N s = d >> sign_bit;
        const N m = (N)((N)(d ^ (N)(0 - s)) + s) & all;
        const N t = (N)((N)(m << 1) | (N)(s & (N)~(N)(m >> sign_bit)) | (N)(m == 0));
        numbers[i] = t;
        any |= (N)(t - (N)(t == 0)); /* all bits if t is 0 */
    }
    return any;
}

static N TYPED(numbers)(const T *old, const T *new, size_t n, int bits, N *numbers)
{
    if (bits == 8 * sizeof(T)) /* so that the compiler knows the shifts */
        return TYPED(numbers_of)(old, new, n, 8 * sizeof(T), numbers);
    return TYPED(numbers_of)(old, new, n, bits, numbers);
}
#endif

/* The numbers to write, with the elements that they are the differences of; those of gaps are there already. */
typedef struct {
    step_field field;
    int bits;
    const T *old;
    const void *new;
} TYPED(source);

static N TYPED(fetch)(const TYPED(source) * s, size_t start, size_t n, N *numbers)
{
#if STEP_GAPS
    memcpy(numbers, (const N *)s->new + start, n * sizeof(N));
    return 0;
#else
    return TYPED(numbers)(s->old + start, (const T *)s->new + start, n, s->bits, numbers);
#endif
}

/* Count symbols by exponent in all n numbers, or if `sampled` in a quarter; then return the greatest of all, else -1. */
static int TYPED(count)(const TYPED(source) * s, size_t n, int sampled, uint32_t (*counts)[STEP_SYMBOLS])
{
    const int shift = s->field.shift, greatest = s->field.greatest;
    const uint32_t mask = s->field.mask;
    N numbers[STEP_BATCH], any = 0;
    for (size_t start = 0; start < n; start += STEP_BATCH) {
        const size_t count = step_least(n - start, STEP_BATCH);
        const T *old = s->old + start;
        any |= TYPED(fetch)(s, start, count, numbers);
        if (!sampled || start / STEP_BATCH % 4 == 0)
            for (size_t i = 0; i < count; i++) /* in turns, so that equal neighbours do not wait for each other */
                counts[(old[i] >> shift & mask) + i % 2 * 256][TYPED(symbol)(numbers[i], greatest)]++;
    }
    for (int i = 0; i < 256; i++)
        for (int k = 0; k < STEP_SYMBOLS; k++)
            counts[i][k] += counts[i + 256][k];
    return sampled ? (any >> (8 * sizeof(N) - 1) ? greatest : TYPED(symbol)(any, greatest)) : -1;
}

/* Write the bits of two lanes at the ends of their memory, the last numbers first: `first` numbers from `start` on,
 * and `second`, which are not more, from `start + first` on. Return whether there is memory enough.
 */
static int TYPED(write)(const TYPED(source) * s, const step_put *put, const uint16_t *next, uint32_t begin,
                         size_t start, size_t first, size_t second, step_lane *lanes)
{
    enum { SHIFT = 8 * sizeof(N) };
    const int shift = s->field.shift, greatest = s->field.greatest;
    const uint32_t mask = s->field.mask;
    W words[2 * STEP_BATCH]; /* exponent, symbol, number */
    uint32_t state0 = begin, state1 = begin;
    uint64_t held0 = 0, held1 = 0; /* bits that are not written yet, at the bottom, those that are read first lowest */
    unsigned count0 = 0, count1 = 0;
    uint8_t *end0 = lanes[0].end, *end1 = lanes[1].end;
#define PUT(lane, word)                                                                                               \
    {                                                                                                                 \
        const W item = word;                                                                                          \
        const step_put *e = put + (item >> SHIFT);                                                                    \
        const unsigned k = (unsigned)(item >> SHIFT) & 63, bits = (state##lane + e->bits) >> 16;                      \
        const uint64_t value = STEP(low)(state##lane, bits) << k | STEP(low)(item, k);                                \
        held##lane = held##lane << (bits + k) | value;                                                                \
        count##lane += bits + k;                                                                                      \
        state##lane = next[(state##lane >> bits) + (uint32_t)e->next];                                                \
    }
#define FLUSH(lane)                                                                                                   \
    if (end##lane < lanes[lane].begin + 8)                                                                            \
        return 0;                                                                                                     \
    *(word64 *)(end##lane - 8) = held##lane << (63 - count##lane) << 1;                                               \
    end##lane -= count##lane >> 3;                                                                                    \
    count##lane &= 7;
    for (size_t at = (first - 1) / STEP_BATCH * STEP_BATCH;; at -= STEP_BATCH) {
        size_t n = step_least(first - at, STEP_BATCH);
        const size_t common = second > at ? step_least(second - at, STEP_BATCH) : 0;
        for (size_t lane = 0; lane < 2; lane++) {
            N numbers[STEP_BATCH];
            const size_t from = start + lane * first + at, count = lane ? common : n;
            const T *old = s->old + from;
            TYPED(fetch)(s, from, count, numbers);
            for (size_t i = 0; i < count; i++)
                words[lane * STEP_BATCH + i] =
                    (W)((old[i] >> shift & mask) << 6 | (uint32_t)TYPED(symbol)(numbers[i], greatest)) << SHIFT |
                    numbers[i];
        }
        for (; n > common; n--) {
            PUT(0, words[n - 1])
            FLUSH(0)
        }
        for (const W *w = words + n; w > words;) {
            PUT(0, w[-1])
            PUT(1, w[STEP_BATCH - 1])
            if (PER_WORD == 2 && (w -= 1) > words) {
                PUT(0, w[-1])
                PUT(1, w[STEP_BATCH - 1])
            }
            FLUSH(0)
            FLUSH(1)
            w -= w > words;
        }
        if (at == 0)
            break;
    }
#undef PUT
#undef FLUSH
    if (end0 == lanes[0].begin || end1 == lanes[1].begin)
        return 0;
    if (count0 > 0)
        *--end0 = (uint8_t)(held0 << (8 - count0));
    if (count1 > 0)
        *--end1 = (uint8_t)(held1 << (8 - count1));
    lanes[0].begin = end0, lanes[0].state = (state0 - begin) | (count0 ? 8 - count0 : 0) << 12;
    lanes[1].begin = end1, lanes[1].state = (state1 - begin) | (count1 ? 8 - count1 : 0) << 12;
    return 1;
}

/* Return the next number of a lane; `word` has its bits, and `at` is their position. */
static INLINE N TYPED(next)(const uint32_t *get, uint32_t offset, uint64_t *word, uint32_t *state, uint64_t *at)
{
    const uint32_t e = get[offset + *state];
    const unsigned k = e & 255, both = e >> 8 & 255;
    const uint64_t w = *word;
    *state = (e >> 16) + (uint32_t)(STEP(low)(w, both) >> k);
    *word = w >> both;
    *at += both;
    return (N)(STEP(low)(w, k) | 1ull << k);
}

/* Read the next n numbers of each lane, whose elements lie `part` apart; the last lane may have fewer, `shorter`. */
static void TYPED(read)(const T *old, size_t part, const step_field *f, const uint32_t *get,
                        N numbers[4][STEP_BATCH], size_t n, size_t shorter, step_reader *r, int lanes)
{
    const int shift = f->shift;
    const uint32_t all = f->all;
    for (int lane = 0; lane < lanes; lane++, old += part)
        for (size_t i = 0; i < (lane + 1 < lanes ? n : shorter); i++)
            numbers[lane][i] = (N)f->offset[old[i] >> shift & all];
    size_t i = 0;
    if (lanes == 4 && r->size >= 8) {
        const uint8_t *data = r->data;
        const uint64_t last = (uint64_t)(r->size - 8) * 8;
        N *x = numbers[0];
        uint64_t p0 = r->at[0], p1 = r->at[1], p2 = r->at[2], p3 = r->at[3];
        uint32_t s0 = r->state[0], s1 = r->state[1], s2 = r->state[2], s3 = r->state[3];
#define READ(lane, p, s)                                                                                              \
    word = *(const word64 *)(data + (p >> 3)) >> (p & 7);                                                             \
    for (int j = 0; j < PER_WORD; j++)                                                                                \
        x[lane * STEP_BATCH + j] = TYPED(next)(get, x[lane * STEP_BATCH + j], &word, &s, &p);
        for (; i + PER_WORD <= shorter && p0 <= last && p1 <= last && p2 <= last && p3 <= last; i += PER_WORD) {
            uint64_t word;
            READ(0, p0, s0)
            READ(1, p1, s1)
            READ(2, p2, s2)
            READ(3, p3, s3)
            x += PER_WORD;
        }
#undef READ
        r->at[0] = p0, r->at[1] = p1, r->at[2] = p2, r->at[3] = p3;
        r->state[0] = s0, r->state[1] = s1, r->state[2] = s2, r->state[3] = s3;
    }
    for (int lane = 0; lane < lanes; lane++)
        for (size_t j = i; j < (lane + 1 < lanes ? n : shorter); j++) {
            uint64_t word = step_word(r, r->at[lane]);
            numbers[lane][j] = TYPED(next)(get, numbers[lane][j], &word, &r->state[lane], &r->at[lane]);
        }
}

/* Write a sequence of n > 0 numbers; return its bytes, or 0 if it takes more than `room`. */
static size_t TYPED(encode)(TYPED(source) * s, size_t n, int sampled, uint8_t *out, size_t room, step_memory *memory)
{
    step_field *f = &s->field;
    uint32_t(*counts)[STEP_SYMBOLS] = step_take(memory, 512 * sizeof *counts);
    step_put(*rows)[64] = step_take(memory, 256 * sizeof *rows);
    step_tables *tables = step_take(memory, sizeof *tables);
    if (!tables)
        return 0;
    memset(counts, 0, 512 * sizeof *counts);
    const int at_least = TYPED(count)(s, n, sampled, counts);
    *tables = (step_tables){.log = n < 1024 ? 8 : n < 16384 ? 9 : n < 65536 ? 10 : STEP_LOG};
    tables->contexts = step_contexts(counts, n, f->context);
    tables->next = step_take(memory, sizeof(uint16_t) * ((size_t)tables->contexts << tables->log));
    if (!tables->next)
        return 0;
    int most[STEP_CONTEXTS];
    double bits = 0;
    for (int c = 0; c < tables->contexts; c++) {
        most[c] = step_scale(counts[c], tables->log, at_least, tables->frequency[c]);
        if (most[c] < 0)
            return 0;
        step_spread(tables, c);
        for (int k = 0; k < STEP_SYMBOLS; k++)
            if (counts[c][k])
                bits += counts[c][k] * (k + tables->log - step_log2(tables->frequency[c][k]));
    }
    for (uint32_t e = 0; e <= f->mask; e++)
        memcpy(rows[e], tables->put[f->context[e]], sizeof tables->put[0]);
    const int lanes = n < STEP_LANES_FROM ? 1 : 4;
    const size_t most_tables = 2 + STEP_CONTEXTS + (STEP_CONTEXTS * (12 + 6 * STEP_SYMBOLS) + 7) / 8;
    if (bits / 8 * (at_least < 0 ? 1 : 4) > (double)room || room < most_tables + 24) /* 24 for the lanes */
        return 0;
    size_t size = step_put_tables(tables, most, f->context, out);
    uint8_t *header = out + size;
    size += (size_t)lanes * 6;
    const size_t part = (n + (size_t)lanes - 1) / (size_t)lanes, shortest = n - part * (size_t)(lanes - 1);
    for (int i = 0; i < lanes; i += 2) {
        uint8_t *middle = out + size + (lanes == 1 ? room - size - 1 : (room - size) / 2);
        step_lane pair[2] = {{.begin = out + size, .end = middle}, {.begin = middle, .end = out + room}};
        const size_t second = lanes == 1 ? 0 : i == 0 ? part : shortest;
        if (!TYPED(write)(s, rows[0], tables->next, 1u << tables->log, part * (size_t)i, part, second, pair))
            return 0;
        for (int j = 0; j < 2 && j < lanes; j++, header += 6) {
            const size_t bytes = (size_t)(pair[j].end - pair[j].begin);
            memmove(out + size, pair[j].begin, bytes);
            const uint32_t length = (uint32_t)bytes;
            const uint16_t state = (uint16_t)pair[j].state;
            memcpy(header, &length, 4), memcpy(header + 4, &state, 2);
            size += bytes;
        }
    }
    return size;
}

typedef struct {
    step_field field;
    step_tables *tables;
    step_reader reader;
    int lanes;
    size_t part, shortest, ends[4]; /* the elements of a lane, and of the last; where lanes end, in bits */
} TYPED(sequence);

/* Read the header of a sequence of n > 0 numbers; return its bytes, or 0 if they are invalid. */
static size_t TYPED(open)(TYPED(sequence) * q, const uint8_t *data, size_t size, size_t n, step_memory *memory)
{
    q->tables = step_take(memory, sizeof *q->tables);
    if (!q->tables)
        return 0;
    *q->tables = (step_tables){0};
    size_t at = step_get_tables(data, size, q->tables, q->field.context);
    q->lanes = n < STEP_LANES_FROM ? 1 : 4;
    q->part = (n + (size_t)q->lanes - 1) / (size_t)q->lanes;
    q->shortest = n - q->part * (size_t)(q->lanes - 1);
    q->reader = (step_reader){.data = data, .size = size};
    if (at == 0 || size - at < (size_t)q->lanes * 6)
        return 0;
    const uint8_t *header = data + at;
    at += (size_t)q->lanes * 6;
    for (int i = 0; i < q->lanes; i++, header += 6) {
        uint32_t length;
        uint16_t state;
        memcpy(&length, header, 4), memcpy(&state, header + 4, 2);
        if (length > size - at || state >> 15 || (state & 0xfffu) >> q->tables->log)
            return 0;
        q->reader.at[i] = (uint64_t)at * 8 + (state >> 12);
        q->reader.state[i] = state & 0xfff;
        at += length;
        q->ends[i] = at * 8;
    }
    q->tables->get = step_take(memory, sizeof(uint32_t) * ((size_t)q->tables->contexts << q->tables->log));
    if (!q->tables->get)
        return 0;
    for (int c = 0; c < q->tables->contexts; c++)
        step_spread(q->tables, c);
    for (uint32_t i = 0; i < 512; i++)
        q->field.offset[i] = (uint32_t)q->field.context[i & q->field.mask] << q->tables->log;
    return at;
}

/* Return whether every lane ends where its bytes do, in the state in which writing began. */
static int TYPED(ended)(const TYPED(sequence) * q)
{
    for (int i = 0; i < q->lanes; i++)
        if (q->reader.at[i] != q->ends[i] || q->reader.state[i] != 0)
            return 0;
    return 1;
}

#if !STEP_GAPS
/* Write the elements that differ from `old` by these numbers. */
static INLINE void TYPED(elements_of)(const T *old, const N *numbers, size_t n, int bits, T *out)
{
    const int sign_bit = bits - 1;
    const N magnitude = (N)((1ull << sign_bit) - 1), all = (N)((1ull << bits) - 1);
    const N greatest = (N)(1ull << sign_bit);
    for (size_t i = 0; i < n; i++) {
        const N a = old[i] & all, t = numbers[i], s = t & 1;
        const N m = (N)((N)(t >> 1) | (t == 0 ? greatest : 0));
        const N x = a ^ ((N)(0 - (N)(a >> sign_bit)) & magnitude);
        const N y = (N)(x + (N)((N)(m ^ (N)(0 - s)) + s)) & all;
        out[i] = (T)(y ^ ((N)(0 - (N)(y >> sign_bit)) & magnitude));
    }
}

static void TYPED(elements)(const T *old, const N *numbers, size_t n, int bits, T *out)
{
    if (bits == 8 * sizeof(T))
        TYPED(elements_of)(old, numbers, n, 8 * sizeof(T), out);
    else
        TYPED(elements_of)(old, numbers, n, bits, out);
}

/* Decode a sequence of differences; return its bytes, or 0 if they are invalid. */
static size_t TYPED(decode)(step_layout l, const T *old, T *out, size_t n, const uint8_t *data, size_t size,
                            step_memory *memory)
{
    N numbers[4][STEP_BATCH];
    TYPED(sequence) q;
    q.field = step_field_of(l);
    const size_t end = TYPED(open)(&q, data, size, n, memory);
    for (size_t start = 0; end > 0 && start < q.part; start += STEP_BATCH) {
        const size_t count = step_least(q.part - start, STEP_BATCH);
        const size_t shorter = q.shortest > start ? step_least(q.shortest - start, STEP_BATCH) : 0;
        TYPED(read)(old + start, q.part, &q.field, q.tables->get, numbers, count, shorter, &q.reader, q.lanes);
        for (int i = 0; i < q.lanes; i++)
            TYPED(elements)(old + q.part * (size_t)i + start, numbers[i], i + 1 < q.lanes ? count : shorter, l.bits,
                            out + q.part * (size_t)i + start);
    }
    return end > 0 && TYPED(ended)(&q) ? end : 0;
}

#include "_step_sparse.h"

/* Return how many elements are equal. */
static size_t TYPED(equal)(const T *old, const T *new, size_t n)
{
    size_t result = 0;
    for (size_t start = 0; start < n; start += 128) {
        T same = 0;
        for (size_t i = start; i < start + step_least(n - start, 128); i++)
            same = (T)(same + (old[i] == new[i]));
        result += same;
    }
    return result;
}

/* Write the smallest step from `old` to `new` into out, which has room for n elements and a byte. */
static size_t TYPED(encode_step)(step_layout l, const T *old, const T *new, size_t n, uint8_t *out,
                                 step_memory *memory)
{
    const size_t raw = n * sizeof(T), changes = n - TYPED(equal)(old, new, n);
    size_t size = 0;
    if (changes == 0) {
        out[0] = STEP_EQUAL;
        return 1;
    }
    if (n < STEP_MOST) {
        if (changes <= n / STEP_SPARSE_BELOW)
            out[0] = STEP_SPARSE, size = TYPED(encode_sparse)(l, old, new, n, changes, out + 1, raw, memory);
        TYPED(source) s = {step_field_of(l), l.bits, old, new};
        if (size == 0)
            out[0] = STEP_DENSE,
            size = TYPED(encode)(&s, n, n >= STEP_SAMPLED && changes > n / 2, out + 1, raw, memory);
    }
    if (size == 0) {
        out[0] = STEP_RAW, size = raw;
        memcpy(out + 1, new, raw);
    }
    return 1 + size;
}

/* Return whether no element uses more bits than the layout has. */
static int TYPED(fits)(step_layout l, const T *x, size_t n)
{
    uint32_t any = 0;
    for (size_t i = 0; i < n; i++)
        any |= x[i];
    return l.bits == 32 || any >> l.bits == 0;
}

/* Decode a step; return whether its bytes are valid. */
static int TYPED(decode_step)(step_layout l, const T *old, T *out, size_t n, const uint8_t *data, size_t size,
                              step_memory *memory)
{
    const size_t raw = n * sizeof(T);
    size_t rest; /* the bytes that a sequence took, 0 if they are invalid */
    if (size == 0)
        return 0;
    switch (data[0]) {
    case STEP_RAW:
        if (size != 1 + raw)
            return 0;
        memcpy(out, data + 1, raw);
        return TYPED(fits)(l, out, n);
    case STEP_EQUAL:
        memcpy(out, old, raw);
        return size == 1;
    case STEP_DENSE:
        rest = n > 0 && n < STEP_MOST ? TYPED(decode)(l, old, out, n, data + 1, size - 1, memory) : 0;
        return rest > 0 && 1 + rest == size;
    case STEP_SPARSE:
        rest = n > 0 && n < STEP_MOST ? TYPED(decode_sparse)(l, old, out, n, data + 1, size - 1, memory) : 0;
        return rest > 0 && 1 + rest == size;
    default:
        return 0;
    }
}
#endif

#undef TYPED
#undef T
#undef N
#undef W
#undef PER_WORD
#undef STEP_GAPS
