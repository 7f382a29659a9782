// Loads and stores of global memory by pieces of 2 to 16 bytes at multiples of their size, with cache hints.
//
// - Loads are volatile: otherwise the compiler may execute one that a condition forbids, and select afterwards.
// - `load` and `store` do not allocate in the L1, for data that is used once; `load_again` does.
// - Loads are of constant memory (`.nc`), which the compiler moves across barriers. A grid that may run while earlier ones still write
//   (WAITS), or whose blocks read what other blocks of it wrote (MEETS), defines that name before this file and gets ordinary loads.
#if defined(MEETS) || defined(WAITS) && __CUDA_ARCH__ >= 900
#define READ "ld.global"
#else
#define READ "ld.global.nc"
#endif

// A piece of A bytes, as words. `p` is a multiple of A.
template <int A> struct Access;
template <> struct Access<16> {
    static __device__ __forceinline__ void load(u32* w, const char* p) {
        asm volatile(READ ".L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "l"(p));
    }
    static __device__ __forceinline__ void load_again(u32* w, const char* p) {
        asm volatile(READ ".v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "l"(p));
    }
    static __device__ __forceinline__ void store(char* p, const u32* w) {
        asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
    }
};
template <> struct Access<8> {
    static __device__ __forceinline__ void load(u32* w, const char* p) {
        asm volatile(READ ".L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "l"(p));
    }
    static __device__ __forceinline__ void load_again(u32* w, const char* p) {
        asm volatile(READ ".v2.u32 {%0, %1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "l"(p));
    }
    static __device__ __forceinline__ void store(char* p, const u32* w) {
        asm volatile("st.global.L1::no_allocate.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(w[0]), "r"(w[1]) : "memory");
    }
};
template <> struct Access<4> {
    static __device__ __forceinline__ void load(u32* w, const char* p) {
        asm volatile(READ ".L1::no_allocate.u32 %0, [%1];" : "=r"(w[0]) : "l"(p));
    }
    static __device__ __forceinline__ void load_again(u32* w, const char* p) { asm volatile(READ ".u32 %0, [%1];" : "=r"(w[0]) : "l"(p)); }
    static __device__ __forceinline__ void store(char* p, const u32* w) { asm volatile("st.global.L1::no_allocate.u32 [%0], %1;" ::"l"(p), "r"(w[0]) : "memory"); }
};

// Two bytes or one, zero-extended.
static __device__ __forceinline__ u32 load_u16(const char* p) {
    u16 x;
    asm volatile(READ ".u16 %0, [%1];" : "=h"(x) : "l"(p));
    return x;
}
static __device__ __forceinline__ u32 load_u8(const char* p) {
    u32 x;
    asm volatile(READ ".u8 %0, [%1];" : "=r"(x) : "l"(p));
    return x;
}
// The lowest two bytes or one of a word.
static __device__ __forceinline__ void store_u16(char* p, u32 x) { asm volatile("st.global.L1::no_allocate.u16 [%0], %1;" ::"l"(p), "h"((u16)x) : "memory"); }
static __device__ __forceinline__ void store_u8(char* p, u32 x) { asm volatile("st.global.L1::no_allocate.u8 [%0], %1;" ::"l"(p), "r"(x) : "memory"); }
