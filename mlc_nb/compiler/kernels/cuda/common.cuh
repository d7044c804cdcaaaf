// What every kernel uses: 16-bit floats as bit patterns, tensor-core products, cache hints, and launching early.
// Nothing is included, so NVRTC needs no toolkit headers.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define INLINE __device__ __forceinline__

struct alignas(16) Words4 {
    u32 word[4];
};
struct alignas(8) Words2 {
    u32 word[2];
};

// The kernel before this one in the stream has ended, and what it wrote is visible.
INLINE void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The kernel after this one may start; it waits by itself before it reads what this one writes.
INLINE void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// 16-bit floats: float16, or bfloat16 where BF16 is true. "pair" is two of them in a word, the first in the low half.
template <bool BF16>
INLINE float to_float(u16 bits) {
    float value;
    if (BF16) {
        value = __uint_as_float((u32)bits << 16);
    } else {
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    }
    return value;
}

template <bool BF16>
INLINE u16 from_float(float value) {
    u16 bits;
    if (BF16) {
        u32 word = __float_as_uint(value);
        bits = (u16)((word & 0x7fffffff) > 0x7f800000 ? 0x7fff : (word + 0x7fff + ((word >> 16) & 1)) >> 16);
    } else {
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    }
    return bits;
}

template <bool BF16>
INLINE u32 pack_pair(float first, float second) {
    u32 pair;
#if __CUDA_ARCH__ >= 800
    if (BF16) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    }
#else
    pair = from_float<BF16>(first) | (u32)from_float<BF16>(second) << 16;
#endif
    return pair;
}

template <bool BF16>
INLINE float first_of(u32 pair) {
    return to_float<BF16>((u16)(pair & 0xffff));
}

template <bool BF16>
INLINE float second_of(u32 pair) {
    return to_float<BF16>((u16)(pair >> 16));
}

INLINE u32 half2_fma(u32 a, u32 b, u32 c) {
    u32 result;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
    return result;
}

INLINE u32 half2_subtract(u32 a, u32 b) {
    u32 result;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}

INLINE u32 half2_multiply(u32 a, u32 b) {
    u32 result;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}

// c[16 x 8] += a[16 x 16] b[16 x 8]. With g = lane / 4 and t = lane % 4 a lane holds: a = rows g, g + 8, g, g + 8 at
// columns 2t, 2t, 2t + 8, 2t + 8 (pairs); b = column g at rows 2t and 2t + 8; c = row g at columns 2t and 2t + 1, then
// row g + 8.
template <bool BF16>
INLINE void multiply_accumulate(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 800
    if (BF16) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }
#else
    static_assert(!BF16, "bfloat16 products need compute capability 8.0");
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(b0));
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a2), "r"(a3), "r"(b1));
#endif
}

// c = a b.
template <bool BF16>
INLINE void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 800
    if (BF16) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%10, %10, %10, %10};"
            : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.0f));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%10, %10, %10, %10};"
            : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.0f));
    }
#else
    c[0] = c[1] = c[2] = c[3] = 0;
    multiply_accumulate<BF16>(c, a0, a1, a2, a3, b0, b1);
#endif
}

// The 8 x 8 matrix of 16-bit elements that a warp holds (row g at columns 2t and 2t + 1), transposed.
INLINE u32 transpose_8x8(u32 pair) {
    u32 result;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
    return result;
}

// Weights: constant while the step runs, read once, so they may be loaded early and must not push others out of L1.
INLINE Words4 load_weights(const void* address) {
    Words4 value;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.word[0]), "=r"(value.word[1]), "=r"(value.word[2]), "=r"(value.word[3])
                 : "l"(address));
    return value;
}

INLINE Words2 load_scales(const void* address) {
    Words2 value;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                 : "=r"(value.word[0]), "=r"(value.word[1])
                 : "l"(address));
    return value;
}

// 2 to the power of value; results below 2^-126 are zero.
INLINE float power_of_two(float value) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
}

INLINE void copy_16_bytes(void* shared, const void* global) {
#if __CUDA_ARCH__ >= 800
    u32 address = (u32)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(address), "l"(global) : "memory");
#else
    *(Words4*)shared = *(const Words4*)global;
#endif
}

INLINE void commit_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

template <int PENDING>
INLINE void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

INLINE float warp_sum(float value) {
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffff, value, offset);
    return value;
}

INLINE float warp_max(float value) {
    for (int offset = 16; offset > 0; offset /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffff, value, offset));
    return value;
}
