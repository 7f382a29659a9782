// wgmma: matrix multiply-accumulate of a warpgroup, 128 threads, on operands in shared memory (sm_90a).
//
// Multiplications run asynchronously. Between the fence before them and the wait after them their registers and the shared memory that
// they read may not be touched. All warps of the warpgroup execute each of these together.

// Orders earlier accesses of registers and shared memory before later multiplications.
static __device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Ends a commit group: all multiplications that were started since the last one.
static __device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most PENDING of the latest commit groups are incomplete.
template <int PENDING> static __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// The compiler does not know that multiplications are in flight: it reads and writes pinned registers not across this line.
template <int N> static __device__ __forceinline__ void pin(float (&r)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(r[i])::"memory");
}
template <int N> static __device__ __forceinline__ void pin(int (&r)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+r"(r[i])::"memory");
}
template <int N> static __device__ __forceinline__ void pin(u32 (&r)[N][4]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+r"(r[i][0]), "+r"(r[i][1]), "+r"(r[i][2]), "+r"(r[i][3])::"memory");
}

// The descriptor of a matrix in shared memory, at a multiple of 16 bytes, in the 128-byte swizzle: eight rows take 1024 bytes (the stride
// dimension byte offset). LEADING: bytes to the next 64 columns (the leading dimension byte offset), for a transposed operand.
// Adding to a descriptor moves it by units of 16 bytes.
template <int LEADING> static __device__ __forceinline__ u64 matrix_descriptor(u32 tile) {
    return (u64)((tile & 0x3ffff) >> 4) | (u64)(LEADING >> 4) << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}

// d += a b of 64 x 16 and 16 x N, sums in f32; d = a b where `add` is 0. KIND: 1 is f16, 2 is bf16. In d, warp w of the warpgroup has rows
// 16 w on; with g = lane / 4 and t = lane % 4 its registers 4 j on are (g, 8 j + 2 t), the next column, and both of row g + 8. Each d is
// one instruction, so its registers stand in a list.
// - from_shared: a is a descriptor, its rows along the sum, or where TRANSPOSED_A its columns.
// - from_registers: a is in registers as d lies, narrowed to pairs. N is at most 128, 192 or 256.
// N of 16, 32, 48, 80 and 112 are there for heads of attention, from registers alone.
// TRANSPOSED: columns of b are contiguous, not the axis of the sum.
// KIND 3 is bytes with a sign: 64 x 32 and 32 x N, so as many bytes, with exact sums of 32 bits. The axis of the sum is contiguous in both.
// KIND 0 is TF32, f32 without its 13 lowest bits: 64 x 8 and 8 x N, likewise contiguous. N is at most 160: sums of a stage and of all K share the registers.
template <int N, int KIND> struct Wgmma;
#define WGMMA(TYPES, N, D, REST, ADD, ...) \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ADD ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPES " {" D \
                 "}, " REST ";\n}" : __VA_ARGS__)
#define WGMMA_OF_KIND(...) \
    if constexpr (KIND == 2) WGMMA("bf16.bf16", __VA_ARGS__); else WGMMA("f16.f16", __VA_ARGS__)
#define FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SIXTEEN(i) FOUR(i), FOUR(i + 4), FOUR(i + 8), FOUR(i + 12)
#define SIXTY_FOUR(i) SIXTEEN(i), SIXTEEN(i + 16), SIXTEEN(i + 32), SIXTEEN(i + 48)
#define SUMS_16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define SUMS_32 SUMS_16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define SUMS_48 SUMS_32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define SUMS_64 SUMS_48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define SUMS_80 SUMS_64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define SUMS_96 SUMS_80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define SUMS_112 SUMS_96 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define SUMS_128 SUMS_112 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define SUMS_144 SUMS_128 ", " \
    "%64, %65, %66, %67, %68, %69, %70, %71"
#define SUMS_160 SUMS_144 ", " \
    "%72, %73, %74, %75, %76, %77, %78, %79"
#define SUMS_192 SUMS_160 ", " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define SUMS_224 SUMS_192 ", " \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define SUMS_256 SUMS_224 ", " \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

template <int KIND> struct Wgmma<16, KIND> {
    template <int TRANSPOSED> static __device__ __forceinline__ void from_registers(float (&d)[8], const u32 (&a)[4], u64 b, int add) {
        WGMMA_OF_KIND(16, SUMS_16, "{%8, %9, %10, %11}, %12, p, 1, 1, %14", "%13", FOUR(0), FOUR(4)
                      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(TRANSPOSED));
    }
};
template <int KIND> struct Wgmma<32, KIND> {
    template <int TRANSPOSED> static __device__ __forceinline__ void from_registers(float (&d)[16], const u32 (&a)[4], u64 b, int add) {
        WGMMA_OF_KIND(32, SUMS_32, "{%16, %17, %18, %19}, %20, p, 1, 1, %22", "%21", SIXTEEN(0)
                      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(TRANSPOSED));
    }
};
template <int KIND> struct Wgmma<48, KIND> {
    template <int TRANSPOSED> static __device__ __forceinline__ void from_registers(float (&d)[24], const u32 (&a)[4], u64 b, int add) {
        WGMMA_OF_KIND(48, SUMS_48, "{%24, %25, %26, %27}, %28, p, 1, 1, %30", "%29", SIXTEEN(0), FOUR(16), FOUR(20)
                      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(TRANSPOSED));
    }
};
template <int KIND> struct Wgmma<64, KIND> {
    template <int TRANSPOSED, int TRANSPOSED_A = 0> static __device__ __forceinline__ void from_shared(float (&d)[32], u64 a, u64 b, int add) {
        WGMMA_OF_KIND(64, SUMS_64, "%32, %33, p, 1, 1, %36, %35", "%34", SIXTEEN(0), SIXTEEN(16)
                      : "l"(a), "l"(b), "r"(add), "n"(TRANSPOSED), "n"(TRANSPOSED_A));
    }
    template <int TRANSPOSED> static __device__ __forceinline__ void from_registers(float (&d)[32], const u32 (&a)[4], u64 b, int add) {
        WGMMA_OF_KIND(64, SUMS_64, "{%32, %33, %34, %35}, %36, p, 1, 1, %38", "%37", SIXTEEN(0), SIXTEEN(16)
                      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(TRANSPOSED));
    }
};
template <int KIND> struct Wgmma<80, KIND> {
    template <int TRANSPOSED> static __device__ __forceinline__ void from_registers(float (&d)[40], const u32 (&a)[4], u64 b, int add) {
        WGMMA_OF_KIND(80, SUMS_80, "{%40, %41, %42, %43}, %44, p, 1, 1, %46", "%45", SIXTEEN(0), SIXTEEN(16), FOUR(32), FOUR(36)
                      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(TRANSPOSED));
    }
};
template <int KIND> struct Wgmma<96, KIND> {
    template <int TRANSPOSED, int TRANSPOSED_A = 0> static __device__ __forceinline__ void from_shared(float (&d)[48], u64 a, u64 b, int add) {
        WGMMA_OF_KIND(96, SUMS_96, "%48, %49, p, 1, 1, %52, %51", "%50", SIXTEEN(0), SIXTEEN(16), SIXTEEN(32)
                      : "l"(a), "l"(b), "r"(add), "n"(TRANSPOSED), "n"(TRANSPOSED_A));
    }
    template <int TRANSPOSED> static __device__ __forceinline__ void from_registers(float (&d)[48], const u32 (&a)[4], u64 b, int add) {
        WGMMA_OF_KIND(96, SUMS_96, "{%48, %49, %50, %51}, %52, p, 1, 1, %54", "%53", SIXTEEN(0), SIXTEEN(16), SIXTEEN(32)
                      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(TRANSPOSED));
    }
};
template <int KIND> struct Wgmma<112, KIND> {
    template <int TRANSPOSED> static __device__ __forceinline__ void from_registers(float (&d)[56], const u32 (&a)[4], u64 b, int add) {
        WGMMA_OF_KIND(112, SUMS_112, "{%56, %57, %58, %59}, %60, p, 1, 1, %62", "%61", SIXTEEN(0), SIXTEEN(16), SIXTEEN(32), FOUR(48), FOUR(52)
                      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(TRANSPOSED));
    }
};
template <int KIND> struct Wgmma<128, KIND> {
    template <int TRANSPOSED, int TRANSPOSED_A = 0> static __device__ __forceinline__ void from_shared(float (&d)[64], u64 a, u64 b, int add) {
        WGMMA_OF_KIND(128, SUMS_128, "%64, %65, p, 1, 1, %68, %67", "%66", SIXTY_FOUR(0)
                      : "l"(a), "l"(b), "r"(add), "n"(TRANSPOSED), "n"(TRANSPOSED_A));
    }
    template <int TRANSPOSED> static __device__ __forceinline__ void from_registers(float (&d)[64], const u32 (&a)[4], u64 b, int add) {
        WGMMA_OF_KIND(128, SUMS_128, "{%64, %65, %66, %67}, %68, p, 1, 1, %70", "%69", SIXTY_FOUR(0)
                      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(TRANSPOSED));
    }
};
template <int KIND> struct Wgmma<144, KIND> {
    template <int TRANSPOSED, int TRANSPOSED_A = 0> static __device__ __forceinline__ void from_shared(float (&d)[72], u64 a, u64 b, int add) {
        WGMMA_OF_KIND(144, SUMS_144, "%72, %73, p, 1, 1, %76, %75", "%74", SIXTY_FOUR(0), FOUR(64), FOUR(68)
                      : "l"(a), "l"(b), "r"(add), "n"(TRANSPOSED), "n"(TRANSPOSED_A));
    }
};
template <int KIND> struct Wgmma<160, KIND> {
    template <int TRANSPOSED, int TRANSPOSED_A = 0> static __device__ __forceinline__ void from_shared(float (&d)[80], u64 a, u64 b, int add) {
        WGMMA_OF_KIND(160, SUMS_160, "%80, %81, p, 1, 1, %84, %83", "%82", SIXTY_FOUR(0), SIXTEEN(64)
                      : "l"(a), "l"(b), "r"(add), "n"(TRANSPOSED), "n"(TRANSPOSED_A));
    }
};
template <int KIND> struct Wgmma<192, KIND> {
    template <int TRANSPOSED, int TRANSPOSED_A = 0> static __device__ __forceinline__ void from_shared(float (&d)[96], u64 a, u64 b, int add) {
        WGMMA_OF_KIND(192, SUMS_192, "%96, %97, p, 1, 1, %100, %99", "%98", SIXTY_FOUR(0), SIXTEEN(64), SIXTEEN(80)
                      : "l"(a), "l"(b), "r"(add), "n"(TRANSPOSED), "n"(TRANSPOSED_A));
    }
    template <int TRANSPOSED> static __device__ __forceinline__ void from_registers(float (&d)[96], const u32 (&a)[4], u64 b, int add) {
        WGMMA_OF_KIND(192, SUMS_192, "{%96, %97, %98, %99}, %100, p, 1, 1, %102", "%101", SIXTY_FOUR(0), SIXTEEN(64), SIXTEEN(80)
                      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(TRANSPOSED));
    }
};
template <int KIND> struct Wgmma<224, KIND> {
    template <int TRANSPOSED, int TRANSPOSED_A = 0> static __device__ __forceinline__ void from_shared(float (&d)[112], u64 a, u64 b, int add) {
        WGMMA_OF_KIND(224, SUMS_224, "%112, %113, p, 1, 1, %116, %115", "%114", SIXTY_FOUR(0), SIXTEEN(64), SIXTEEN(80), SIXTEEN(96)
                      : "l"(a), "l"(b), "r"(add), "n"(TRANSPOSED), "n"(TRANSPOSED_A));
    }
};
template <int KIND> struct Wgmma<256, KIND> {
    template <int TRANSPOSED, int TRANSPOSED_A = 0> static __device__ __forceinline__ void from_shared(float (&d)[128], u64 a, u64 b, int add) {
        WGMMA_OF_KIND(256, SUMS_256, "%128, %129, p, 1, 1, %132, %131", "%130", SIXTY_FOUR(0), SIXTY_FOUR(64)
                      : "l"(a), "l"(b), "r"(add), "n"(TRANSPOSED), "n"(TRANSPOSED_A));
    }
    template <int TRANSPOSED> static __device__ __forceinline__ void from_registers(float (&d)[128], const u32 (&a)[4], u64 b, int add) {
        WGMMA_OF_KIND(256, SUMS_256, "{%128, %129, %130, %131}, %132, p, 1, 1, %134", "%133", SIXTY_FOUR(0), SIXTY_FOUR(64)
                      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(TRANSPOSED));
    }
};

#define FOUR_INTS(i) "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3])
#define SIXTEEN_INTS(i) FOUR_INTS(i), FOUR_INTS(i + 4), FOUR_INTS(i + 8), FOUR_INTS(i + 12)
#define SIXTY_FOUR_INTS(i) SIXTEEN_INTS(i), SIXTEEN_INTS(i + 16), SIXTEEN_INTS(i + 32), SIXTEEN_INTS(i + 48)
#define WGMMA_OF_BYTES(N, D, REST, ADD, ...) \
    template <> struct Wgmma<N, 3> { \
        template <int TRANSPOSED, int TRANSPOSED_A = 0> static __device__ __forceinline__ void from_shared(int (&d)[N / 2], u64 a, u64 b, int add) { \
            static_assert(TRANSPOSED == 0 && TRANSPOSED_A == 0, "the axis of the sum is contiguous"); \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ADD ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k32.s32.s8.s8 {" D \
                         "}, " REST ", p;\n}" : __VA_ARGS__ : "l"(a), "l"(b), "r"(add)); \
        } \
    }
WGMMA_OF_BYTES(64, SUMS_64, "%32, %33", "%34", SIXTEEN_INTS(0), SIXTEEN_INTS(16));
WGMMA_OF_BYTES(96, SUMS_96, "%48, %49", "%50", SIXTEEN_INTS(0), SIXTEEN_INTS(16), SIXTEEN_INTS(32));
WGMMA_OF_BYTES(128, SUMS_128, "%64, %65", "%66", SIXTY_FOUR_INTS(0));
WGMMA_OF_BYTES(144, SUMS_144, "%72, %73", "%74", SIXTY_FOUR_INTS(0), FOUR_INTS(64), FOUR_INTS(68));
WGMMA_OF_BYTES(160, SUMS_160, "%80, %81", "%82", SIXTY_FOUR_INTS(0), SIXTEEN_INTS(64));
WGMMA_OF_BYTES(192, SUMS_192, "%96, %97", "%98", SIXTY_FOUR_INTS(0), SIXTEEN_INTS(64), SIXTEEN_INTS(80));
WGMMA_OF_BYTES(224, SUMS_224, "%112, %113", "%114", SIXTY_FOUR_INTS(0), SIXTEEN_INTS(64), SIXTEEN_INTS(80), SIXTEEN_INTS(96));
WGMMA_OF_BYTES(256, SUMS_256, "%128, %129", "%130", SIXTY_FOUR_INTS(0), SIXTY_FOUR_INTS(64));
#define WGMMA_OF_TF32(N, D, REST, ADD, ...) template <> struct Wgmma<N, 0> { \
    template <int TRANSPOSED, int TRANSPOSED_A = 0> static __device__ __forceinline__ void from_shared(float (&d)[N / 2], u64 a, u64 b, int add) { \
        static_assert(TRANSPOSED == 0 && TRANSPOSED_A == 0, "the axis of the sum is contiguous"); \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ADD ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k8.f32.tf32.tf32 {" D \
                     "}, " REST ", p, 1, 1;\n}" : __VA_ARGS__ : "l"(a), "l"(b), "r"(add)); \
    } }
WGMMA_OF_TF32(64, SUMS_64, "%32, %33", "%34", SIXTEEN(0), SIXTEEN(16)); WGMMA_OF_TF32(96, SUMS_96, "%48, %49", "%50", SIXTEEN(0), SIXTEEN(16), SIXTEEN(32));
WGMMA_OF_TF32(128, SUMS_128, "%64, %65", "%66", SIXTY_FOUR(0));
WGMMA_OF_TF32(144, SUMS_144, "%72, %73", "%74", SIXTY_FOUR(0), FOUR(64), FOUR(68));
WGMMA_OF_TF32(160, SUMS_160, "%80, %81", "%82", SIXTY_FOUR(0), SIXTEEN(64));
