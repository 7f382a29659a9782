// Barriers in shared memory.
#include "mbarrier.h"

namespace emulator {

Barrier& barrier_at(Block& block, u32 address) {
    const auto found = block.barriers.find(address);
    if (found == block.barriers.end()) fail("no mbarrier was initialised at byte %d of shared memory", place(block, address));
    return found->second;
}

void end_phase(Barrier& barrier) {
    if (barrier.pending == 0 && barrier.bytes == 0) {
        ++barrier.phase;
        barrier.pending = barrier.count;
    }
    progress();
}

void arrive_in(Block& block, u32 address, u32 bytes) {
    Barrier& barrier = barrier_at(block, address);
    if (barrier.pending == 0) fail("more arrivals than expected at the mbarrier at byte %d of shared memory", place(block, address));
    barrier.bytes += bytes;
    --barrier.pending;
    end_phase(barrier);
}

}  // namespace emulator

void mbarrier_init(u32 barrier, u32 count) {
    emulator::bytes_at(*emulator::current->block, barrier, 8);
    if (barrier % 8 || count == 0) emulator::fail("an mbarrier for %u arrivals at %u", count, barrier);
    emulator::Barrier made;
    made.count = made.pending = count;
    emulator::current->block->barriers[barrier] = made;
}
