// `cluster.cuh`: blocks of a cluster start together. A remote address is that of a block's shared memory with its rank, counted from 1, in
// the highest byte.
#pragma once

#include "mbarrier.h"

namespace emulator {

constexpr int RANK_SHIFT = 24;

static Block& peer(u32 there) {
    const u32 rank = (there >> RANK_SHIFT) - 1;
    const auto& blocks = current->block->cluster->blocks;
    if (rank >= blocks.size()) fail("rank %u of a cluster of %zu blocks", rank, blocks.size());
    if (!blocks[rank]) fail("an access to the shared memory of block %u of the cluster, which has ended", rank);
    return *blocks[rank];
}

static u32 own_part(u32 there) { return there & ((1u << RANK_SHIFT) - 1); }

static void arrive_at_cluster() {
    Cluster& cluster = *current->block->cluster;
    if (current->arrived_at_cluster) fail("arrives twice at the cluster barrier");
    current->arrived_at_cluster = true;
    current->cluster_phase = cluster.phase;
    ++cluster.arrived;
    end_cluster_phase(cluster);
    progress();
}

static bool cluster_phase_is_over(const void* of, u64 phase) { return ((const Cluster*)of)->phase > phase; }

static void wait_for_cluster() {
    if (!current->arrived_at_cluster) fail("waits at the cluster barrier without arriving");
    current->arrived_at_cluster = false;
    wait_until("the cluster barrier", 0, cluster_phase_is_over, current->block->cluster.get(), current->cluster_phase);
}

static void store_at(u32 there, u32 bits) { memcpy(bytes_at(peer(there), own_part(there), 4), &bits, 4); }

}  // namespace emulator

static u32 cluster_rank() {
    const auto& blocks = emulator::current->block->cluster->blocks;
    return (u32)(std::find(blocks.begin(), blocks.end(), emulator::current->block) - blocks.begin());
}
static u32 remote(const void* s, u32 rank) {
    const emulator::Block& own = *emulator::current->block;
    const emulator::Block& there = emulator::peer((rank + 1) << emulator::RANK_SHIFT);
    return (rank + 1) << emulator::RANK_SHIFT | (emulator::address_of(s) - own.base + there.base);
}
static void cluster_arrive() {
    emulator::sync_lanes(0xffffffffu, "cluster_arrive");
    emulator::arrive_at_cluster();
}
static void cluster_wait() { emulator::wait_for_cluster(); }
static void cluster_barrier() {
    emulator::arrive_at_cluster();
    emulator::wait_for_cluster();
}
static void store_remote(u32 there, float x) { emulator::store_at(there, emulator::bits_of(x)); }
static void store_remote2(u32 there, float x, float y) {
    if (there % 8) emulator::fail("two floats to %u", there);
    store_remote(there, x);
    store_remote(there + 4, y);
}
static void store_remote(u32 there, int x) { emulator::store_at(there, (u32)x); }
static void store_remote_async(float* s, float x, u32 rank, u64* s_sent) {
    const u32 to = remote(s, rank), barrier = emulator::own_part(remote(s_sent, rank)), bits = emulator::bits_of(x);
    emulator::Block* block = &emulator::peer(to);
    emulator::barrier_at(*block, barrier);
    ++block->incoming;
    emulator::machine.events.emplace(emulator::machine.now + emulator::delay(), [=] {
        memcpy(emulator::bytes_at(*block, emulator::own_part(to), 4), &bits, 4);
        --block->incoming;
        emulator::Barrier& at = emulator::barrier_at(*block, barrier);
        at.bytes -= 4;
        emulator::end_phase(at);
    });
}
static void await_remote_stores(const u64* s_sent) { mbarrier_wait(emulator::address_of(s_sent), 0); }
