// Matrices of a warp on the tensor cores: ldmatrix, stmatrix, mma.sync. All 32 lanes execute each of these together.

// Loads four 8 x 8 matrices of 16-bit elements. Lane l passes the address of row l % 8 of matrix l / 8, a multiple of 16 bytes, and gets
// elements 2 (l % 4) and the next of row l / 4 of each matrix.
static __device__ __forceinline__ void ldmatrix(u32 (&r)[4], const void* s_row) {
    const u32 from = (u32)__cvta_generic_to_shared(s_row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from) : "memory");
}
// The same, each matrix transposed.
static __device__ __forceinline__ void ldmatrix_transposed(u32 (&r)[4], const void* s_row) {
    const u32 from = (u32)__cvta_generic_to_shared(s_row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from) : "memory");
}
// Stores four matrices: addresses and elements as for ldmatrix. Needs Hopper.
static __device__ __forceinline__ void stmatrix(void* s_row, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(shared_address(s_row)), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}

// c += a b of 16 x 16 and 16 x 8, sums in f32. KIND: 1 is f16, 2 is bf16, which needs Ampere. With g = lane / 4 and t = lane % 4, c holds
// (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1); a holds pairs from (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8); b pairs down
// from (2t, g), (2t + 8, g).
template <int KIND> static __device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if constexpr (KIND == 1) {
#if __CUDA_ARCH__ >= 800
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
        // Turing has the lower and the upper half of K as instructions of their own.
        asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(b0));
        asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}
// d = a b + c of 16 x 8 and 8 x 8, of f32 whose 13 lowest bits do not count: a holds (g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4); b holds
// (t, g), (t + 4, g). The matrix units round sums towards zero. Needs Ampere, as does the next.
static __device__ __forceinline__ void mma_tf32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const float (&c)[4]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}
// c += a b of 16 x 32 and 32 x 8, of i8 with exact sums: a holds four from (g, 4t), (g + 8, 4t), (g, 4t + 16), (g + 8, 4t + 16); b holds
// four down from (4t, g), (4t + 16, g).
static __device__ __forceinline__ void mma_i8(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
