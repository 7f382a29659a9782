// `mbarrier.cuh`.
#pragma once

#include "../cuda.h"

namespace emulator {

static Barrier& barrier_at(Block& block, u32 address) {
    const auto found = block.barriers.find(address);
    if (found == block.barriers.end()) fail("no mbarrier was initialised at byte %d of shared memory", place(block, address));
    return found->second;
}

static void end_phase(Barrier& barrier) {
    if (barrier.pending == 0 && barrier.bytes == 0) {
        ++barrier.phase;
        barrier.pending = barrier.count;
    }
    progress();
}

static void arrive_at(u32 address, u32 bytes) {
    Barrier& barrier = barrier_at(*current->block, address);
    if (barrier.pending == 0) fail("more arrivals than expected at the mbarrier at byte %d of shared memory", place(*current->block, address));
    barrier.bytes += bytes;
    --barrier.pending;
    end_phase(barrier);
}

static bool phase_is_over(const void* of, u64 parity) { return (((const Barrier*)of)->phase & 1) != parity; }

}  // namespace emulator

static void mbarrier_init(u32 barrier, u32 count) {
    emulator::bytes_at(*emulator::current->block, barrier, 8);
    if (barrier % 8 || count == 0) emulator::fail("an mbarrier for %u arrivals at %u", count, barrier);
    emulator::Barrier made;
    made.count = made.pending = count;
    emulator::current->block->barriers[barrier] = made;
}
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
