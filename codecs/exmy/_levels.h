/* The levels: the same loops compiled for each instruction set, and the choice of a level at run time.
 *
 * A level is a table of loops (`lanes`), made by including _lanes.h with the compiler set to the level's
 * instructions. Compilers other than gcc and clang, and processors other than x86-64, get only the baseline.
 */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { TILE = 256, BLOCK = 2048 };
enum { FLOAT16, BFLOAT16, FLOAT32, FLOAT64 };

/* Elements of the caller's arrays, which may be unaligned. */
#if defined(__GNUC__)
#define UNALIGNED __attribute__((aligned(1), may_alias))
#define INLINE inline __attribute__((always_inline))
#else
#define UNALIGNED
#define INLINE inline
#endif
typedef uint16_t code16 UNALIGNED;
typedef uint32_t float32_bits UNALIGNED;
typedef uint64_t float64_bits UNALIGNED;
typedef uint64_t word64 UNALIGNED;
typedef float float32_value UNALIGNED;
typedef double float64_value UNALIGNED;
typedef int64_t integer64 UNALIGNED;
typedef union {
    int32_t i;
    float f;
} float32_word;
typedef union {
    int64_t i;
    double f;
} float64_word;

/* A format, and the constants of the loops. */
typedef struct {
    int exponent_bits, mantissa_bits, bits;
    int sum32;   /* the sums by which float32 is encoded (see _lanes.h) do not overflow float32 */
    int exact32; /* every value of the format is a float32 */
    int top32;   /* e8mY, Y > 0, with the bias of float32: codes below the highest exponent are upper bits of float32 */
    /* The bits of the largest value and of the smallest normal, and the difference between those of g and 2^E, which
     * _lanes.h explains. */
    int32_t limit32, tiny32, lift32;
    int64_t limit64, tiny64, lift64;
} spec;

typedef struct {
    uint32_t (*codes8_f32)(const float32_bits *, size_t, const spec *, uint8_t *);
    uint32_t (*codes16_f32)(const float32_bits *, size_t, const spec *, code16 *);
    uint64_t (*codes8_f64)(const float64_bits *, size_t, const spec *, uint8_t *);
    uint64_t (*codes16_f64)(const float64_bits *, size_t, const spec *, code16 *);
    void (*values8_f32)(const uint8_t *, size_t, const spec *, float32_bits *);
    void (*values16_f32)(const code16 *, size_t, const spec *, float32_bits *);
    void (*values8_f64)(const uint8_t *, size_t, const spec *, float64_bits *);
    void (*values16_f64)(const code16 *, size_t, const spec *, float64_bits *);
    void (*scaled8_f32)(const uint8_t *, size_t, const spec *, float, float32_bits *);
    void (*scaled16_f32)(const code16 *, size_t, const spec *, float, float32_bits *);
    uint32_t (*top8)(const float32_bits *, size_t, const spec *, uint8_t *);
    uint32_t (*top16)(const float32_bits *, size_t, const spec *, code16 *);
    void (*untop8)(const uint8_t *, size_t, const spec *, float32_bits *);
    void (*untop16)(const code16 *, size_t, const spec *, float32_bits *);
    void (*look_up)(const uint8_t *, size_t, const code16 *, code16 *); /* NULL if it would not pay */
    void (*halves8_f32)(const uint8_t *, size_t, const spec *, float, float32_bits *); /* NULL if there is none */
    void (*halves16_f32)(const code16 *, size_t, const spec *, float, float32_bits *);
    void (*widen_f16)(const code16 *, size_t, float32_bits *);
    void (*widen_bf16)(const code16 *, size_t, float32_bits *);
    void (*widen_f32)(const float32_value *, size_t, float64_value *);
    void (*narrow_f64)(const float64_value *, size_t, float32_value *);
    void (*narrow_f16)(const float32_bits *, size_t, const spec *, code16 *);
    void (*narrow_bf16)(const float32_bits *, size_t, code16 *);
    uint32_t (*peak16)(const code16 *, size_t);
    uint32_t (*peak32)(const float32_bits *, size_t);
    uint64_t (*peak64)(const float64_bits *, size_t);
    void (*fields32)(const float32_bits *, size_t, uint64_t *);
    void (*split16)(const code16 *, size_t, uint8_t *, uint8_t *);
    void (*join16)(const uint8_t *, const uint8_t *, size_t, code16 *);
    void (*join_at)(const uint8_t *, const uint8_t *, size_t, unsigned, code16 *);
    void (*scale_f32)(const float32_value *, size_t, float, float32_value *);
    void (*scale_f64)(const float64_value *, size_t, double, float64_value *);
    void (*scale_each_f32)(const float32_value *, size_t, const float32_value *, float32_value *);
    void (*scale_each_f64)(const float64_value *, size_t, const float64_value *, float64_value *);
    double (*noise_f32)(const float32_value *, size_t, float, float, const spec *, double *);
    double (*noise_f64)(const float64_value *, size_t, double, double, const spec *, double *);
    double (*energy_f32)(const float32_value *, size_t, double *);
    double (*energy_f64)(const float64_value *, size_t, double *);
    void (*pack_plane[3])(const uint8_t *, size_t, unsigned, size_t, uint8_t *);
    void (*unpack_plane[3])(const uint8_t *, size_t, unsigned, size_t, uint8_t *);
    void (*random_bits)(uint32_t, uint32_t, uint32_t, size_t, uint32_t *);
    uint64_t (*stochastic8)(const float64_bits *, const uint32_t *, size_t, const spec *, uint8_t *);
    uint64_t (*stochastic16)(const float64_bits *, const uint32_t *, size_t, const spec *, code16 *);
    void (*compare_f32)(const float32_value *, const float32_value *, size_t, double *);
    void (*compare_f64)(const float64_value *, const float64_value *, size_t, double *);
} lanes;

#define LANE_HAS_F16C 0
#define LANE_HAS_AVX512 0
#define LANE(name) baseline_##name
#include "_lanes.h"
#undef LANE
#undef LANE_HAS_F16C

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#include <immintrin.h>
#define MANY_LEVELS 1
#define LANE_HAS_F16C 1
#define LANE(name) avx2_##name
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#include "_lanes.h"
#pragma clang attribute pop
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#include "_lanes.h"
#pragma GCC pop_options
#endif
#undef LANE

#undef LANE_HAS_AVX512
#define LANE_HAS_AVX512 1
#define LANE(name) avx512_##name
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl"))),        \
                             apply_to = function)
#include "_lanes.h"
#pragma clang attribute pop
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#include "_lanes.h"
#pragma GCC pop_options
#endif
#undef LANE
#undef LANE_HAS_AVX512
#else
#define MANY_LEVELS 0
#endif

#if defined(__x86_64__) || defined(_M_X64)
#include <emmintrin.h>
#define HAVE_SSE2 1
#else
#define HAVE_SSE2 0
#endif

/* Finds the highest level that the processor and the operating system support. Uses cpuid directly, because not every
 * compiler can link __builtin_cpu_supports into a shared library. */
static int find_highest_level(void)
{
#if MANY_LEVELS
    unsigned a, b, c, d, states, unused;
    const unsigned one = bit_F16C | bit_AVX | bit_OSXSAVE;
    const unsigned seven = bit_AVX512F | bit_AVX512DQ | bit_AVX512BW | bit_AVX512VL;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & one) != one || !__get_cpuid_count(7, 0, &a, &b, &c, &d))
        return 0;
    __asm__ volatile("xgetbv" : "=a"(states), "=d"(unused) : "c"(0));
    if (!(b & bit_AVX2) || (states & 0x06) != 0x06) /* the system does not save xmm and ymm registers */
        return 0;
    return (b & seven) == seven && (states & 0xe0) == 0xe0 ? 2 : 1; /* 0xe0: it saves mask and zmm registers too */
#else
    return 0;
#endif
}

static int highest_level = 0; /* set at import: cpuid is slow on virtual machines */

/* The loops of a level (0 baseline, 1 AVX2, 2 AVX-512), or NULL if this machine cannot run it. */
static const lanes *level_lanes(int level)
{
    if (level < 0 || level > highest_level)
        return NULL;
#if MANY_LEVELS
    if (level > 0)
        return level == 2 ? &avx512_table : &avx2_table;
#endif
    return &baseline_table;
}

/* Sets rounding to nearest, with subnormals: the loops need this mode, and other libraries may have changed it.
 * Returns the mode to restore. */
static unsigned enter_float_mode(void)
{
#if HAVE_SSE2
    unsigned saved = _mm_getcsr();
    _mm_setcsr(0x1f80);
    return saved;
#else
    return 0;
#endif
}

static void leave_float_mode(unsigned saved)
{
#if HAVE_SSE2
    _mm_setcsr(saved);
#else
    (void)saved;
#endif
}

static double power_of_two(int exponent)
{
    float64_word w;
    w.i = (int64_t)(exponent + 1023) << 52;
    return w.f;
}

static spec spec_of(int exponent_bits, int mantissa_bits, int bias, double limit)
{
    spec s;
    const int lowest = 1 - bias;
    const int highest = (exponent_bits > 0 ? (1 << exponent_bits) - 1 : 1) - bias;
    const int top = (1 << (mantissa_bits + (exponent_bits > 0))) - 1; /* quanta of the largest value */
    float64_word max64;
    float32_word max32;
    s.exponent_bits = exponent_bits;
    s.mantissa_bits = mantissa_bits;
    s.bits = 1 + exponent_bits + mantissa_bits;
    s.exact32 = lowest >= -126 && highest <= 127;
    s.top32 = exponent_bits == 8 && bias == 127 && mantissa_bits > 0; /* for Y = 0, even quanta may have odd codes */
    s.sum32 = s.exact32 && highest + 23 - mantissa_bits <= 127;
    max64.f = limit > 0 ? limit : top * power_of_two(highest - mantissa_bits);
    s.limit64 = max64.i;
    s.tiny64 = (int64_t)(lowest + 1023) << 52;
    s.lift64 = (int64_t)(52 - mantissa_bits) << 52;
    max32.f = s.exact32 ? (float)max64.f : 0.0f;
    s.limit32 = max32.i;
    s.tiny32 = s.exact32 ? (lowest + 127) << 23 : 0;
    s.lift32 = (23 - mantissa_bits) << 23;
    return s;
}
