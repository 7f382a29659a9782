// `named_barrier.cuh`.
#pragma once

#include "../cuda.h"

namespace emulator {

u64 arrive_named(int id, int threads);

static bool turn_is_over(const void* of, u64 turn) { return ((const Named*)of)->turn > turn; }

}  // namespace emulator

static void named_barrier_sync(int id, int threads) {
    const u64 turn = emulator::arrive_named(id, threads);
    emulator::wait_until("named barrier", id, emulator::turn_is_over, &emulator::current->block->named[id], turn);
}
static void named_barrier_arrive(int id, int threads) { emulator::arrive_named(id, threads); }
