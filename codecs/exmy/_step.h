/* The step codec: an array as the difference to an earlier one of its shape and type (FORMAT.md, section 10).
 *
 * Numbers are coded by tANS (as in Zstandard's FSE), with a table for each range of exponents of the old values, and
 * their low bits are written as they are. _step_lanes.h has the loops over elements; this file has the tables, which
 * are validated when they are read, and the layout of the bytes. Little-endian machines only, as the other kernels.
 */

#include <stdlib.h>

enum { STEP_SYMBOLS = 33, STEP_CONTEXTS = 32, STEP_CLASSES = 8, STEP_LOG = 10, STEP_LANES_FROM = 4096, STEP_BATCH = 512 };
enum { STEP_SAMPLED = 1 << 17, STEP_SPARSE_BELOW = 8, STEP_MOST = 1u << 31 };
enum { STEP_RAW, STEP_EQUAL, STEP_DENSE, STEP_SPARSE };

typedef uint8_t step8;
typedef uint16_t step16 UNALIGNED;
typedef uint32_t step32 UNALIGNED;

/* Elements of so many bytes, of which `bits` are used; the exponent lies above the mantissa bits. */
typedef struct {
    int bits, mantissa_bits;
} step_layout;

/* How the context of an element is found, and the symbol of the number 0. */
typedef struct {
    int shift, greatest;
    uint32_t mask, all; /* of the exponent, and of the sign too */
    uint8_t context[256];
    uint32_t offset[512]; /* of the states of the context, by sign and exponent */
} step_field;

typedef struct {
    uint32_t bits;
    int32_t next;
} step_put;

typedef struct {
    int log, contexts;
    uint16_t frequency[STEP_CONTEXTS][STEP_SYMBOLS];
    step_put put[STEP_CONTEXTS][STEP_SYMBOLS];
    uint16_t *next; /* states, for writing */
    uint32_t *get;  /* for reading: next state << 16 | bits of number and state << 8 | symbol */
} step_tables;

typedef struct {
    uint8_t *begin, *end;
    uint32_t state; /* and the first bit << 12 */
} step_lane;

typedef struct {
    const uint8_t *data;
    size_t size;
    uint64_t at[4]; /* in bits */
    uint32_t state[4];
} step_reader;

typedef struct {
    int count;
    uint32_t magnitude, limits[STEP_CLASSES], since[STEP_CLASSES];
} step_classes;

static size_t step_least(size_t a, size_t b)
{
    return a < b ? a : b;
}

static step_field step_field_of(step_layout l)
{
    return (step_field){.shift = l.mantissa_bits,
                        .greatest = l.bits,
                        .mask = (1u << (l.bits - 1 - l.mantissa_bits)) - 1,
                        .all = (1u << (l.bits - l.mantissa_bits)) - 1};
}

/* The classes of changes are the contexts of their gaps. */
static const step_field step_classes_field = {.greatest = 31, .mask = 255, .all = 255};

/* The memory of one call; once some cannot be had, there is no more. */
typedef struct step_memory {
    void *blocks[16];
    int count, failed;
} step_memory;

static void *step_take(step_memory *m, size_t size)
{
    void *block = m->failed || m->count == 16 ? NULL : malloc(size ? size : 1);
    if (block)
        m->blocks[m->count++] = block;
    else
        m->failed = 1;
    return block;
}

static void step_release(step_memory *m)
{
    while (m->count > 0)
        free(m->blocks[--m->count]);
}

/* The bits from a position on, with zeros after the last. */
static uint64_t step_word(const step_reader *r, uint64_t at)
{
    uint64_t word = 0;
    const size_t byte = (size_t)(at >> 3);
    if (byte < r->size)
        memcpy(&word, r->data + byte, r->size - byte < 8 ? r->size - byte : 8);
    return word >> (at & 7);
}

/* Bits of a header, from the lowest of each byte on. */
typedef struct {
    uint8_t *data;
    size_t size, at; /* at: in bits */
} step_bits;

static void put_bits(step_bits *b, unsigned value, int count)
{
    for (int i = 0; i < count; i++, b->at++) {
        if (b->at % 8 == 0)
            b->data[b->at / 8] = 0;
        b->data[b->at / 8] |= (uint8_t)((value >> i & 1) << b->at % 8);
    }
}

static unsigned get_bits(step_bits *b, int count)
{
    unsigned value = 0;
    for (int i = 0; i < count; i++, b->at++)
        if (b->at / 8 < b->size)
            value |= (unsigned)(b->data[b->at / 8] >> b->at % 8 & 1) << i;
    return value;
}

/* log2, to about 1e-5, for estimates. */
static double step_log2(double x)
{
    union {
        double f;
        uint64_t i;
    } word = {.f = x};
    const int exponent = (int)(word.i >> 52) - 1023;
    word.i = (word.i & ((1ull << 52) - 1)) | 1023ull << 52;
    const double z = (word.f - 1) / (word.f + 1), q = z * z;
    return exponent + 2.885390081777927 * z * (1 + q * (1.0 / 3 + q * (1.0 / 5 + q / 7)));
}

/* The bits in which the symbols with these counts can be told apart. */
static double step_entropy(const uint32_t *counts)
{
    uint64_t sum = 0;
    double bits = 0;
    for (int s = 0; s < STEP_SYMBOLS; s++)
        if (counts[s]) {
            sum += counts[s];
            bits -= counts[s] * step_log2(counts[s]);
        }
    return sum ? bits + (double)sum * step_log2((double)sum) : 0;
}

/* Merge neighbouring exponents whose tables would cost more than they save. Counts of the contexts come first. */
static int step_contexts(uint32_t (*counts)[STEP_SYMBOLS], size_t n, uint8_t *context)
{
    const double price = 80 + (double)n / 512;
    int last = -1;
    double last_bits = 0;
    for (int e = 0; e < 256; e++) {
        uint32_t row[STEP_SYMBOLS], together[STEP_SYMBOLS];
        uint64_t sum = 0;
        memcpy(row, counts[e], sizeof row);
        for (int s = 0; s < STEP_SYMBOLS; s++)
            sum += row[s];
        if (sum > 0) {
            const double bits = step_entropy(row);
            double both = 0;
            if (last >= 0) {
                for (int s = 0; s < STEP_SYMBOLS; s++)
                    together[s] = row[s] + counts[last][s];
                both = step_entropy(together);
            }
            if (last < 0 || (both > last_bits + bits + price && last + 1 < STEP_CONTEXTS)) {
                memcpy(counts[++last], row, sizeof row);
                last_bits = bits;
            } else {
                memcpy(counts[last], together, sizeof row);
                last_bits = both;
            }
        }
        context[e] = (uint8_t)(last < 0 ? 0 : last);
    }
    return last + 1;
}

/* Scale counts to frequencies with three significant bits, but for the most frequent symbol, which takes the rest.
 * Symbols up to `at_least` have a frequency even if their count is 0. Return the most frequent symbol, or -1 if there are
 * too many symbols.
 */
static int step_scale(const uint32_t *counts, int log, int at_least, uint16_t *frequency)
{
    uint64_t sum = 0;
    int most = 0, rest = 1 << log;
    for (int s = 0; s < STEP_SYMBOLS; s++) {
        sum += counts[s];
        if (counts[s] > counts[most])
            most = s;
    }
    for (int s = 0; s < STEP_SYMBOLS; s++) {
        uint32_t f = sum ? (uint32_t)(((uint64_t)counts[s] << log) / sum) : 0;
        if ((counts[s] || s <= at_least) && !f)
            f = 1;
        const int drop = f ? 29 - __builtin_clz(f) : 0;
        frequency[s] = (uint16_t)(drop > 0 ? f >> drop << drop : f);
        if (s != most)
            rest -= frequency[s];
    }
    frequency[most] = (uint16_t)rest;
    return rest > 0 ? most : -1;
}

/* Write the thresholds of contexts and the tables; return the number of bytes. */
static size_t step_put_tables(const step_tables *t, const int *most, const uint8_t *context, uint8_t *out)
{
    size_t at = 0;
    out[at++] = (uint8_t)t->log;
    out[at++] = (uint8_t)t->contexts;
    for (int e = 1; e < 256; e++)
        if (context[e] > context[e - 1])
            out[at++] = (uint8_t)e;
    step_bits bits = {out + at, 0, 0};
    for (int c = 0; c < t->contexts; c++) {
        int last = STEP_SYMBOLS - 1;
        while (t->frequency[c][last] == 0)
            last--;
        put_bits(&bits, (unsigned)last, 6);
        put_bits(&bits, (unsigned)most[c], 6);
        for (int s = 0; s <= last; s++)
            if (s != most[c]) {
                const unsigned f = t->frequency[c][s];
                const int length = f ? 32 - __builtin_clz(f) : 0, below = length < 3 ? length - 1 : 2;
                put_bits(&bits, (unsigned)length, 4);
                if (below > 0)
                    put_bits(&bits, f >> (length - 1 - below), below);
            }
    }
    return at + (bits.at + 7) / 8;
}

/* Read what step_put_tables wrote; return the number of bytes, or 0 if they are invalid. */
static size_t step_get_tables(const uint8_t *data, size_t size, step_tables *t, uint8_t *context)
{
    if (size < 2 || data[0] < 8 || data[0] > STEP_LOG || data[1] < 1 || data[1] > STEP_CONTEXTS)
        return 0;
    t->log = data[0], t->contexts = data[1];
    size_t at = 2 + (size_t)t->contexts - 1;
    if (size < at)
        return 0;
    for (int c = 0, e = 0; c < t->contexts; c++) {
        const int stop = c + 1 < t->contexts ? data[2 + c] : 256;
        if (stop <= e)
            return 0;
        for (; e < stop; e++)
            context[e] = (uint8_t)c;
    }
    step_bits bits = {(uint8_t *)data + at, size - at, 0};
    for (int c = 0; c < t->contexts; c++) {
        const int last = (int)get_bits(&bits, 6), most = (int)get_bits(&bits, 6);
        int rest = 1 << t->log;
        if (last >= STEP_SYMBOLS || most > last)
            return 0;
        for (int s = 0; s < STEP_SYMBOLS; s++) {
            unsigned f = 0;
            if (s <= last && s != most) {
                const int length = (int)get_bits(&bits, 4), below = length < 3 ? length - 1 : 2;
                if (length > t->log)
                    return 0;
                if (length > 0)
                    f = (1u << below | (below > 0 ? get_bits(&bits, below) & ((1u << below) - 1) : 0))
                        << (length - 1 - below);
            }
            t->frequency[c][s] = (uint16_t)f;
            rest -= (int)f;
        }
        if (rest < 1)
            return 0;
        t->frequency[c][most] = (uint16_t)rest;
    }
    at += (bits.at + 7) / 8;
    return at <= size ? at : 0;
}

/* Fill the states of a context from the frequencies: for writing if `t->next`, for reading if `t->get`. */
static void step_spread(step_tables *t, int c)
{
    const uint32_t states = 1u << t->log, stride = (states >> 1) + (states >> 3) + 3;
    uint8_t symbols[1 << STEP_LOG];
    uint32_t number[STEP_SYMBOLS], first[STEP_SYMBOLS], total = 0, position = 0;
    for (int s = 0; s < STEP_SYMBOLS; s++) {
        const uint32_t f = t->frequency[c][s];
        number[s] = f, first[s] = total;
        if (f > 0 && t->next) {
            const uint32_t most = f > 1 ? (uint32_t)(t->log - (31 - __builtin_clz(f - 1))) : (uint32_t)t->log;
            t->put[c][s] =
                (step_put){(most << 16) - (f << most), (int32_t)((uint32_t)c << t->log) + (int32_t)total - (int32_t)f};
        }
        total += f;
        for (uint32_t i = 0; i < f; i++) {
            symbols[position] = (uint8_t)s;
            position = (position + stride) & (states - 1);
        }
    }
    for (uint32_t i = 0; i < states; i++) {
        const int s = symbols[i];
        const uint32_t x = number[s]++;
        if (t->next)
            t->next[((uint32_t)c << t->log) + first[s] + x - t->frequency[c][s]] = (uint16_t)(states + i);
        if (t->get) {
            const uint32_t bits = (uint32_t)(t->log - (31 - __builtin_clz(x)));
            t->get[((uint32_t)c << t->log) + i] = ((x << bits) - states) << 16 | ((uint32_t)s + bits) << 8 | (uint32_t)s;
        }
    }
}

/* Choose the exponents at which classes begin, less the first, from a sample of old values and from all changes.
 * Return the number of classes. Starting with a class for each exponent, the two neighbours are joined that lose least.
 */
static double step_class_bits(double changed, double total)
{
    if (changed <= 0 || changed >= total)
        return 0;
    return changed * step_log2(total / changed) + (total - changed) * step_log2(total / (total - changed));
}

static int step_choose_classes(const uint32_t *sample, const uint32_t *changed, uint8_t *thresholds)
{
    double totals[256], changes[256];
    int first[256], count = 0;
    for (int e = 0; e < 256; e++)
        if (sample[e] || changed[e]) {
            changes[count] = changed[e];
            totals[count] = fmax(8.0 * sample[e], 2.0 * changed[e]);
            first[count++] = e;
        }
    while (count > 1) {
        int best = 0;
        double least = 0;
        for (int i = 0; i + 1 < count; i++) {
            const double apart = step_class_bits(changes[i], totals[i]) + step_class_bits(changes[i + 1], totals[i + 1]);
            const double loss = step_class_bits(changes[i] + changes[i + 1], totals[i] + totals[i + 1]) - apart;
            if (i == 0 || loss < least)
                least = loss, best = i;
        }
        if (count <= STEP_CLASSES && least > 100) /* bits that the table of a class takes */
            break;
        changes[best] += changes[best + 1], totals[best] += totals[best + 1];
        for (int i = best + 1; i + 1 < count; i++)
            changes[i] = changes[i + 1], totals[i] = totals[i + 1], first[i] = first[i + 1];
        count--;
    }
    for (int i = 1; i < count; i++)
        thresholds[i - 1] = (uint8_t)first[i];
    return count;
}

#define STEP(name) baseline_step_##name
#define STEP_HAS_AVX2 0
#include "_step_types.h"
#undef STEP
#undef STEP_HAS_AVX2

#if MANY_LEVELS
#define STEP(name) avx2_step_##name
#define STEP_HAS_AVX2 1
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,bmi,bmi2,lzcnt,popcnt"))), apply_to = function)
#include "_step_types.h"
#pragma clang attribute pop
#else
#pragma GCC push_options
#pragma GCC target("avx2,bmi,bmi2,lzcnt,popcnt")
#include "_step_types.h"
#pragma GCC pop_options
#endif
#undef STEP
#undef STEP_HAS_AVX2
#endif

static int step_is_fast(int level)
{
#if MANY_LEVELS
    return level > 0 && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("lzcnt") &&
           __builtin_cpu_supports("popcnt");
#else
    (void)level;
    return 0;
#endif
}
