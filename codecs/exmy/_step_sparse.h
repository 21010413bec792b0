/* Sparse steps, for one level and type of elements; _step_typed.h includes this file.
 *
 * Small values change more often than large ones, so positions are told by classes of the magnitude in the base: the gap
 * of a change is how many elements of its class lie between it and the change before, and its number is gap + 1. Blocks
 * of 64 elements are handled as masks of bits; zeros follow a shorter last block, which `valid` leaves out.
 */

/* Bits of 64 elements: those that differ, those with a magnitude below a limit; and the position of a bit by rank. */
#if STEP_HAS_AVX2
static INLINE uint32_t TYPED(bits)(const __m256i *flags)
{
    if (sizeof(T) == 1)
        return (uint32_t)_mm256_movemask_epi8(flags[0]);
    __m256i low = flags[0], high = flags[1];
    if (sizeof(T) == 4)
        low = _mm256_permute4x64_epi64(_mm256_packs_epi32(flags[0], flags[1]), 0xd8),
        high = _mm256_permute4x64_epi64(_mm256_packs_epi32(flags[2], flags[3]), 0xd8);
    return (uint32_t)_mm256_movemask_epi8(_mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xd8));
}

static INLINE __m256i TYPED(wide)(T x)
{
    return sizeof(T) == 1   ? _mm256_set1_epi8((char)x)
           : sizeof(T) == 2 ? _mm256_set1_epi16((short)x)
                            : _mm256_set1_epi32((int)x);
}

static INLINE uint64_t TYPED(differ)(const T *a, const T *b)
{
    uint32_t result[2];
    for (int half = 0; half < 2; half++) {
        __m256i same[sizeof(T)];
        for (size_t i = 0; i < sizeof(T); i++) {
            const __m256i x = _mm256_loadu_si256((const __m256i *)(a + 32 * half) + i);
            const __m256i y = _mm256_loadu_si256((const __m256i *)(b + 32 * half) + i);
            same[i] = sizeof(T) == 1   ? _mm256_cmpeq_epi8(x, y)
                      : sizeof(T) == 2 ? _mm256_cmpeq_epi16(x, y)
                                       : _mm256_cmpeq_epi32(x, y);
        }
        result[half] = ~TYPED(bits)(same);
    }
    return result[0] | (uint64_t)result[1] << 32;
}

static INLINE uint64_t TYPED(below)(const T *a, T magnitude, T limit)
{
    const __m256i keep = TYPED(wide)(magnitude), bound = TYPED(wide)(limit);
    uint32_t result[2];
    for (int half = 0; half < 2; half++) {
        __m256i less[sizeof(T)];
        for (size_t i = 0; i < sizeof(T); i++) {
            const __m256i x = _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(a + 32 * half) + i), keep);
            less[i] = sizeof(T) == 1   ? _mm256_cmpgt_epi8(bound, x)
                      : sizeof(T) == 2 ? _mm256_cmpgt_epi16(bound, x)
                                       : _mm256_cmpgt_epi32(bound, x);
        }
        result[half] = TYPED(bits)(less);
    }
    return result[0] | (uint64_t)result[1] << 32;
}

static INLINE int TYPED(select)(uint64_t mask, uint32_t rank)
{
    return __builtin_ctzll(_pdep_u64(1ull << rank, mask));
}
#else
static uint64_t TYPED(differ)(const T *a, const T *b)
{
    uint64_t result = 0;
    for (int i = 0; i < 64; i++)
        result |= (uint64_t)(a[i] != b[i]) << i;
    return result;
}

static uint64_t TYPED(below)(const T *a, T magnitude, T limit)
{
    uint64_t result = 0;
    for (int i = 0; i < 64; i++)
        result |= (uint64_t)((a[i] & magnitude) < limit) << i;
    return result;
}

static int TYPED(select)(uint64_t mask, uint32_t rank)
{
    for (; rank > 0; rank--)
        mask &= mask - 1;
    return __builtin_ctzll(mask);
}
#endif

/* Set a mask for each class of 64 elements, less those that are not valid. */
static INLINE void TYPED(classify)(const T *old, const step_classes *c, uint64_t valid, uint64_t *masks)
{
    uint64_t lower = 0;
    for (int j = 0; j + 1 < c->count; j++) {
        const uint64_t below = TYPED(below)(old, (T)c->magnitude, (T)c->limits[j]) & valid;
        masks[j] = below & ~lower;
        lower = below;
    }
    masks[c->count - 1] = valid & ~lower;
}

/* Append the numbers of the gaps before the changes of 64 elements to those of their classes. */
static INLINE void TYPED(measure)(const T *old, step_classes *c, uint64_t valid, uint64_t changed, uint32_t **gaps)
{
    uint64_t masks[STEP_CLASSES];
    TYPED(classify)(old, c, valid, masks);
    for (int j = 0; j < c->count; j++) {
        for (uint64_t of = masks[j] & changed; of; of &= of - 1) {
            const uint32_t rank = (uint32_t)__builtin_popcountll(masks[j] & ((of & (0 - of)) - 1));
            *gaps[j]++ = c->since[j] + rank + 1;
            c->since[j] = 0 - rank - 1;
        }
        c->since[j] += (uint32_t)__builtin_popcountll(masks[j]);
    }
}

/* Return which of 64 elements changed; since[j] is the rank of the next change of class j. */
static INLINE uint64_t TYPED(locate)(const T *old, step_classes *c, uint64_t valid, const uint32_t **gaps,
                                     const uint32_t *const *ends)
{
    uint64_t masks[STEP_CLASSES], changed = 0;
    TYPED(classify)(old, c, valid, masks);
    for (int j = 0; j < c->count; j++) {
        const uint32_t count = (uint32_t)__builtin_popcountll(masks[j]);
        uint64_t next = c->since[j];
        while (next < count) {
            changed |= 1ull << TYPED(select)(masks[j], (uint32_t)next);
            next = gaps[j] < ends[j] ? next + *gaps[j]++ : UINT32_MAX;
        }
        c->since[j] = next >= UINT32_MAX ? UINT32_MAX : (uint32_t)next - count;
    }
    return changed;
}

/* Write a sparse step, whose `changes` of n elements are few; return its bytes, or 0 if it takes more than `room`. */
static size_t TYPED(encode_sparse)(step_layout l, const T *old, const T *new, size_t n, size_t changes, uint8_t *out,
                                   size_t room, step_memory *memory)
{
    T *from = step_take(memory, changes * sizeof(T)), *to = step_take(memory, changes * sizeof(T));
    uint32_t *positions = step_take(memory, changes * sizeof *positions + 256);
    uint32_t(*counts)[256] = step_take(memory, 2 * sizeof *counts);
    uint64_t *masks = step_take(memory, (n / 64 + 1) * 8);
    if (!masks)
        return 0;
    memset(counts, 0, 2 * sizeof *counts);
    step_field f = step_field_of(l);
    const T magnitude = (T)((1ull << (l.bits - 1)) - 1);
    T padded[64] = {0}, padded_new[64] = {0};
    size_t found = 0;
    for (size_t i = 0; i < n; i += 64) {
        const T *a = old + i, *b = new + i;
        uint64_t changed;
        if (n - i < 64) {
            memcpy(padded, a, (n - i) * sizeof(T)), memcpy(padded_new, b, (n - i) * sizeof(T));
            changed = TYPED(differ)(padded, padded_new);
        } else
            changed = TYPED(differ)(a, b);
        masks[i / 64] = changed;
        for (; changed; changed &= changed - 1, found++) {
            const int j = __builtin_ctzll(changed);
            from[found] = a[j], to[found] = b[j];
            counts[1][a[j] >> f.shift & f.mask]++;
        }
        if (i / 64 % 8 == 0) /* a sample is enough to choose classes */
            for (size_t j = i; j < i + 64 && j < n; j++)
                counts[0][old[j] >> f.shift & f.mask]++;
    }
    uint8_t thresholds[STEP_CLASSES];
    step_classes c = {.count = step_choose_classes(counts[0], counts[1], thresholds), .magnitude = magnitude};
    for (int j = 0; j + 1 < c.count; j++)
        c.limits[j] = (uint32_t)thresholds[j] << f.shift;
    uint32_t *gaps[STEP_CLASSES], class_changes[STEP_CLASSES] = {0};
    for (int e = 0, j = 0; e < 256; e++) {
        while (j + 1 < c.count && e >= thresholds[j])
            j++;
        class_changes[j] += counts[1][e];
    }
    uint32_t *next = positions;
    for (int j = 0; j < c.count; next += class_changes[j++])
        gaps[j] = next;
    for (size_t i = 0; i < n; i += 64) {
        const int whole = n - i >= 64;
        if (!whole)
            memcpy(padded, old + i, (n - i) * sizeof(T));
        TYPED(measure)(whole ? old + i : padded, &c, whole ? ~0ull : (1ull << (n - i)) - 1, masks[i / 64], gaps);
    }
    size_t size = 0;
    if (room < 1 + 5 * STEP_CLASSES)
        return 0;
    out[size++] = (uint8_t)c.count;
    memcpy(out + size, thresholds, (size_t)c.count - 1);
    size += (size_t)c.count - 1;
    uint8_t *classes = step_take(memory, changes);
    if (!classes)
        return 0;
    size_t at = 0;
    for (int j = 0; j < c.count; at += class_changes[j++]) {
        memcpy(out + size, &class_changes[j], 4);
        size += 4;
        memset(classes + at, j, class_changes[j]);
    }
    STEP(gaps_source) by_class = {step_classes_field, 0, classes, positions};
    size_t part = STEP(gaps_encode)(&by_class, changes, 0, out + size, room - size, memory);
    if (part == 0)
        return 0;
    size += part;
    TYPED(source) s = {f, l.bits, from, to};
    part = TYPED(encode)(&s, changes, 0, out + size, room - size, memory);
    return part ? size + part : 0;
}

/* Decode a sparse step; return its bytes, or 0 if they are invalid. */
static size_t TYPED(decode_sparse)(step_layout l, const T *old, T *out, size_t n, const uint8_t *data, size_t size,
                                   step_memory *memory)
{
    const step_field f = step_field_of(l);
    const T magnitude = (T)((1ull << (l.bits - 1)) - 1);
    step_classes c = {.count = size ? data[0] : 0, .magnitude = magnitude};
    if (c.count < 1 || c.count > STEP_CLASSES || size < (size_t)c.count * 5)
        return 0;
    for (int j = 0; j + 1 < c.count; j++) {
        c.limits[j] = (uint32_t)data[1 + j] << f.shift;
        if (data[1 + j] > f.mask || data[1 + j] == 0 || (j > 0 && data[1 + j] <= data[j]))
            return 0;
    }
    size_t at = (size_t)c.count, changes = 0;
    uint32_t class_changes[STEP_CLASSES];
    for (int j = 0; j < c.count; j++, at += 4) {
        memcpy(&class_changes[j], data + at, 4);
        if (class_changes[j] > n - changes)
            return 0;
        changes += class_changes[j];
    }
    if (changes == 0 || changes > n / STEP_SPARSE_BELOW)
        return 0;
    uint8_t *classes = step_take(memory, changes);
    uint32_t *gaps = step_take(memory, changes * 4);
    uint32_t *positions = step_take(memory, changes * 4);
    T *from = step_take(memory, changes * sizeof(T)), *to = step_take(memory, changes * sizeof(T));
    if (!to)
        return 0;
    const uint32_t *next[STEP_CLASSES], *ends[STEP_CLASSES];
    size_t first = 0;
    for (int j = 0; j < c.count; j++) {
        memset(classes + first, j, class_changes[j]);
        next[j] = gaps + first;
        first += class_changes[j];
        ends[j] = gaps + first;
    }
    STEP(gaps_sequence) q;
    q.field = step_classes_field;
    size_t part = STEP(gaps_open)(&q, data + at, size - at, changes, memory);
    if (part == 0)
        return 0;
    at += part;
    uint32_t numbers[4][STEP_BATCH];
    for (size_t start = 0; start < q.part; start += STEP_BATCH) {
        const size_t count = step_least(q.part - start, STEP_BATCH);
        const size_t shorter = q.shortest > start ? step_least(q.shortest - start, STEP_BATCH) : 0;
        STEP(gaps_read)(classes + start, q.part, &q.field, q.tables->get, numbers, count, shorter, &q.reader, q.lanes);
        for (int i = 0; i < q.lanes; i++)
            memcpy(gaps + q.part * (size_t)i + start, numbers[i], 4 * (i + 1 < q.lanes ? count : shorter));
    }
    if (!STEP(gaps_ended)(&q))
        return 0;
    for (int j = 0; j < c.count; j++)
        c.since[j] = next[j] < ends[j] ? *next[j]++ - 1 : UINT32_MAX;
    T padded[64] = {0};
    size_t found = 0;
    for (size_t i = 0; i < n; i += 64) {
        const size_t count = n - i < 64 ? n - i : 64;
        const T *a = old + i;
        if (count < 64)
            a = memcpy(padded, a, count * sizeof(T));
        uint64_t changed = TYPED(locate)(a, &c, count < 64 ? (1ull << count) - 1 : ~0ull, next, ends);
        memcpy(out + i, a, count * sizeof(T));
        for (; changed; changed &= changed - 1) {
            const int j = __builtin_ctzll(changed);
            if (found == changes)
                return 0;
            from[found] = a[j], positions[found++] = (uint32_t)(i + (size_t)j);
        }
    }
    if (found != changes)
        return 0;
    part = TYPED(decode)(l, from, to, changes, data + at, size - at, memory);
    if (part == 0)
        return 0;
    for (size_t i = 0; i < changes; i++)
        out[positions[i]] = to[i];
    return at + part;
}
