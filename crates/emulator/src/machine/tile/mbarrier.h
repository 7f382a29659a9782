// `mbarrier.cuh`.
#pragma once

#include "../cuda.h"

namespace emulator {

Barrier& barrier_at(Block& block, u32 address);

void end_phase(Barrier& barrier);

void arrive_in(Block& block, u32 address, u32 bytes);

static void arrive_at(u32 address, u32 bytes) { arrive_in(*current->block, address, bytes); }

static bool phase_is_over(const void* of, u64 parity) { return (((const Barrier*)of)->phase & 1) != parity; }

}  // namespace emulator

void mbarrier_init(u32 barrier, u32 count);
static void fence_mbarrier_init() {}
static void mbarrier_arrive(u32 barrier) { emulator::arrive_at(barrier, 0); }
static void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) { emulator::arrive_at(barrier, bytes); }
static bool mbarrier_try_wait(u32 barrier, u32 parity) {
    const emulator::Barrier& at = emulator::barrier_at(*emulator::current->block, barrier);
    if (emulator::phase_is_over(&at, parity)) return true;
    emulator::yield(true);
    return emulator::phase_is_over(&at, parity);
}
static bool mbarrier_test_wait(u32 barrier, u32 parity) { return mbarrier_try_wait(barrier, parity); }
static void mbarrier_wait(u32 barrier, u32 parity) {
    const emulator::Barrier& at = emulator::barrier_at(*emulator::current->block, barrier);
    emulator::wait_until("the mbarrier", barrier, emulator::phase_is_over, &at, parity);
}
