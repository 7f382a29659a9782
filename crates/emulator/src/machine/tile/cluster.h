// `cluster.cuh`: blocks of a cluster start together. A remote address is that of a block's shared memory with its rank, counted from 1, in
// the highest byte.
#pragma once

#include "mbarrier.h"

namespace emulator {

constexpr int RANK_SHIFT = 24;

Block& peer(u32 there);

static u32 own_part(u32 there) { return there & ((1u << RANK_SHIFT) - 1); }

void arrive_at_cluster();

static bool cluster_phase_is_over(const void* of, u64 phase) { return ((const Cluster*)of)->phase > phase; }

void wait_for_cluster();

void store_at(u32 there, u32 bits);

}  // namespace emulator

u32 cluster_rank();
u32 remote(const void* s, u32 rank);
static void cluster_arrive() {
    emulator::sync_lanes(0xffffffffu, "cluster_arrive");
    emulator::arrive_at_cluster();
}
static void cluster_wait() { emulator::wait_for_cluster(); }
static void cluster_barrier() {
    emulator::arrive_at_cluster();
    emulator::wait_for_cluster();
}
void mbarrier_arrive_at(u32 barrier, u32 rank);
static void store_remote(u32 there, float x) { emulator::store_at(there, emulator::bits_of(x)); }
static void store_remote2(u32 there, float x, float y) {
    if (there % 8) emulator::fail("two floats to %u", there);
    store_remote(there, x);
    store_remote(there + 4, y);
}
static void store_remote(u32 there, int x) { emulator::store_at(there, (u32)x); }
void store_remote_async(float* s, float x, u32 rank, u64* s_sent);
static void await_remote_stores(const u64* s_sent, u32 parity = 0) { mbarrier_wait(emulator::address_of(s_sent), parity); }
