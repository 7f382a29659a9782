// `wgmma.cuh`: a multiplication is carried out at a drawn time after all threads of the warpgroup have issued it.
#pragma once

#include "tma.h"

namespace emulator {

void issue_wgmma(int storage, float* d, int columns, const u32* registers, u64 a, u64 b, bool transposed, bool transposed_a, int add);

void wait_groups(size_t pending);

}  // namespace emulator

static void wgmma_fence() {
    emulator::sync_lanes(0xffffffffu, "wgmma_fence");
    emulator::current->fenced = true;
}
static void wgmma_commit() { emulator::current->committed.push_back(emulator::current->issued); }
template <int PENDING> static void wgmma_wait() { emulator::wait_groups(PENDING); }
template <int N> static void pin(float (&)[N]) {}
template <int N> static void pin(int (&)[N]) {}
template <int N> static void pin(u32 (&)[N][4]) {}

template <int LEADING> static u64 matrix_descriptor(u32 tile) {
    return (u64)((tile & 0x3ffff) >> 4) | (u64)(LEADING >> 4) << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}

template <int N, int KIND> struct Wgmma {
    static_assert(N % 16 == 0 && N <= 256, "columns");
    template <int TRANSPOSED, int TRANSPOSED_A = 0> static void from_shared(float (&d)[N / 2], u64 a, u64 b, int add) {
        emulator::issue_wgmma(KIND, d, N, nullptr, a, b, TRANSPOSED != 0, TRANSPOSED_A != 0, add);
    }
    template <int TRANSPOSED> static void from_registers(float (&d)[N / 2], const u32 (&a)[4], u64 b, int add) {
        emulator::issue_wgmma(KIND, d, N, a, 0, b, TRANSPOSED != 0, false, add);
    }
};
// Accumulators are words, whatever they hold.
template <int N> struct Wgmma<N, 3> {
    template <int TRANSPOSED, int TRANSPOSED_A = 0> static void from_shared(int (&d)[N / 2], u64 a, u64 b, int add) {
        emulator::issue_wgmma(3, (float*)d, N, nullptr, a, b, TRANSPOSED != 0, TRANSPOSED_A != 0, add);
    }
};
