/* The loops of _step_typed.h for one level: for the gaps between changes, and for elements of 8, 16 and 32 bits. */

static INLINE uint64_t STEP(low)(uint64_t word, unsigned bits)
{
#if STEP_HAS_AVX2
    return _bzhi_u64(word, bits);
#else
    return word & ((1ull << bits) - 1);
#endif
}

#define TYPED(name) STEP(gaps_##name)
#define T step8
#define N uint32_t
#define W uint64_t
#define PER_WORD 1
#define STEP_GAPS 1
#include "_step_typed.h"

#define TYPED(name) STEP(8_##name)
#define T step8
#define N uint16_t
#define W uint32_t
#define PER_WORD 2
#define STEP_GAPS 0
#include "_step_typed.h"

#define TYPED(name) STEP(16_##name)
#define T step16
#define N uint16_t
#define W uint32_t
#define PER_WORD 2
#define STEP_GAPS 0
#include "_step_typed.h"

#define TYPED(name) STEP(32_##name)
#define T step32
#define N uint32_t
#define W uint64_t
#define PER_WORD 1
#define STEP_GAPS 0
#include "_step_typed.h"
