// What CUDA C++ has of itself: keywords, built-in variables and functions.
#pragma once

#include "collective.h"
#include "memory.h"

#define __device__
#define __host__
#define __global__
#define __grid_constant__
#ifdef COUNT_ACCESSES
// Accesses of a function are told apart by where it is called.
#define __forceinline__ inline __attribute__((always_inline))
#else
#define __forceinline__ inline
#endif
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __CUDA_ARCH__ 900
#define __align__(bytes) alignas(bytes)
#define threadIdx (emulator::current->position)
#define blockIdx (emulator::current->block->index)
#define blockDim (dim3{emulator::machine.settings.threads, 1, 1})
#define gridDim (emulator::grid_of(emulator::machine.settings))

// The dynamic shared memory of a block: what stands for `extern __shared__ T name[];`.
static void* shared_memory() { return emulator::current->block->arena + emulator::current->block->base - emulator::ARENA; }
namespace emulator {
static u32 reserve_statics(size_t bytes) {
    const u32 offset = machine.statics;
    machine.statics += (u32)(bytes + 15) / 16 * 16;
    if (machine.statics > machine.settings.statics) fail("%u bytes of static shared memory", machine.statics);
    return offset;
}
}  // namespace emulator
// A variable in shared memory: what stands for `__shared__ T name;`, of which each has a number. Every grid has its own.
template <int NUMBER, class T> static T& shared_variable() {
    static u64 grid = 0;
    static u32 offset = 0;
    if (grid != emulator::machine.grid) {
        grid = emulator::machine.grid;
        offset = emulator::reserve_statics(sizeof(T));
    }
    const emulator::Settings& settings = emulator::machine.settings;
    return *(T*)((char*)shared_memory() + settings.shared - settings.statics + offset);
}
static float __fmul_rn(float a, float b) { return a * b; }

namespace emulator {
static bool sync_is_over(const void* of, u64 sync) { return ((const Block*)of)->syncs > sync; }
}  // namespace emulator

static void __syncthreads() {
    emulator::Block* block = emulator::current->block;
    const u64 sync = block->syncs;
    ++block->at_sync;
    emulator::end_sync(block);
    emulator::progress();
    emulator::wait_until("__syncthreads", 0, emulator::sync_is_over, block, sync);
}
static void __syncwarp(u32 mask = 0xffffffffu) { emulator::sync_lanes(mask, "__syncwarp"); }
template <class T> static T __shfl_sync(u32 mask, T x, int lane) { return emulator::take(mask, "__shfl_sync", x, lane); }
template <class T> static T __shfl_xor_sync(u32 mask, T x, int bits) {
    return emulator::take(mask, "__shfl_xor_sync", x, emulator::lane() ^ bits);
}
static int __any_sync(u32 mask, int x) { return emulator::ballot(mask, "__any_sync", x != 0) != 0; }
static int __all_sync(u32 mask, int x) { return emulator::ballot(mask, "__all_sync", x != 0) == mask; }
static u32 __ballot_sync(u32 mask, int x) { return emulator::ballot(mask, "__ballot_sync", x != 0); }
static size_t __cvta_generic_to_shared(const void* at) { return emulator::address_of(at); }
static void __threadfence() {}
static void __threadfence_block() {}
static void __nanosleep(u32) { emulator::yield(true); }

static u32 __float_as_uint(float x) { return emulator::bits_of(x); }
static int __float_as_int(float x) { return (int)emulator::bits_of(x); }
static float __uint_as_float(u32 x) { return emulator::of_bits(x); }
static float __int_as_float(int x) { return emulator::of_bits((u32)x); }
static int __popc(u32 x) { return __builtin_popcount(x); }
static int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 32; i += 8) c += (signed char)(a >> i) * (signed char)(b >> i);
    return c;
}
// The lowest word of two, shifted right by up to 31 bits.
static u32 __funnelshift_r(u32 low, u32 high, u32 bits) { return (u32)(((u64)high << 32 | low) >> (bits & 31)); }
// Four bytes of eight, picked by the digits of `digits`.
static u32 __byte_perm(u32 low, u32 high, u32 digits) {
    const u64 all = (u64)high << 32 | low;
    u32 picked = 0;
    for (int i = 0; i < 4; ++i) picked |= (u32)(all >> 8 * (digits >> 4 * i & 7) & 0xff) << 8 * i;
    return picked;
}
static float rsqrtf(float x) { return 1.0f / sqrtf(x); }
template <class A, class B> static std::common_type_t<A, B> min(A a, B b) {
    return (std::common_type_t<A, B>)b < (std::common_type_t<A, B>)a ? b : a;
}
template <class A, class B> static std::common_type_t<A, B> max(A a, B b) {
    return (std::common_type_t<A, B>)a < (std::common_type_t<A, B>)b ? b : a;
}
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }

template <class T> static T __ldg(const T* from) { return *from; }
template <class T> static T __ldcg(const T* from) { return *from; }
template <class T> static void __stcg(T* to, T x) { *to = x; }
template <class T> static void __stcs(T* to, T x) { *to = x; }

// Other threads may run before an atomic operation. It returns the value before.
template <class T, class Change> static T exchanged(T* at, Change change) {
    emulator::yield(true);
    const T before = *at;
    *at = change(before);
    if (*at != before) emulator::progress();
    return before;
}
template <class T> static T atomicAdd(T* at, std::common_type_t<T> x) { return exchanged(at, [=](T old) { return old + x; }); }
template <class T> static T atomicExch(T* at, std::common_type_t<T> x) { return exchanged(at, [=](T) { return x; }); }
template <class T> static T atomicMax(T* at, std::common_type_t<T> x) {
    return exchanged(at, [=](T old) { return old < x ? x : old; });
}
template <class T> static T atomicMin(T* at, std::common_type_t<T> x) {
    return exchanged(at, [=](T old) { return x < old ? x : old; });
}
template <class T> static T atomicCAS(T* at, std::common_type_t<T> is, std::common_type_t<T> x) {
    return exchanged(at, [=](T old) { return old == is ? x : old; });
}
static u32 atomicInc(u32* at, u32 last) { return exchanged(at, [=](u32 old) { return old >= last ? 0 : old + 1; }); }
