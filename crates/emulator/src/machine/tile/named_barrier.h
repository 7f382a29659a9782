// `named_barrier.cuh`.
#pragma once

#include "../cuda.h"

namespace emulator {

static u64 arrive_named(int id, int threads) {
    if (id < 0 || id > 15 || threads <= 0 || threads % 32) fail("named barrier %d of %d threads", id, threads);
    Named& named = current->block->named[id];
    if (named.arrived == 0) named.expected = threads;
    if (named.expected != (u32)threads) fail("named barrier %d is used with %u threads and with %d", id, named.expected, threads);
    const u64 turn = named.turn;
    if (++named.arrived == named.expected) {
        named.arrived = 0;
        ++named.turn;
    }
    progress();
    return turn;
}

static bool turn_is_over(const void* of, u64 turn) { return ((const Named*)of)->turn > turn; }

}  // namespace emulator

static void named_barrier_sync(int id, int threads) {
    const u64 turn = emulator::arrive_named(id, threads);
    emulator::wait_until("named barrier", id, emulator::turn_is_over, &emulator::current->block->named[id], turn);
}
static void named_barrier_arrive(int id, int threads) { emulator::arrive_named(id, threads); }
