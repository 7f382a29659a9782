// Blocks of a cluster.
#include "cluster.h"

namespace emulator {

Block& peer(u32 there) {
    const u32 rank = (there >> RANK_SHIFT) - 1;
    const auto& blocks = current->block->cluster->blocks;
    if (rank >= blocks.size()) fail("rank %u of a cluster of %zu blocks", rank, blocks.size());
    if (!blocks[rank]) fail("an access to the shared memory of block %u of the cluster, which has ended", rank);
    return *blocks[rank];
}

void arrive_at_cluster() {
    Cluster& cluster = *current->block->cluster;
    if (current->arrived_at_cluster) fail("arrives twice at the cluster barrier");
    current->arrived_at_cluster = true;
    current->cluster_phase = cluster.phase;
    ++cluster.arrived;
    end_cluster_phase(cluster);
    progress();
}

void wait_for_cluster() {
    if (!current->arrived_at_cluster) fail("waits at the cluster barrier without arriving");
    current->arrived_at_cluster = false;
    wait_until("the cluster barrier", 0, cluster_phase_is_over, current->block->cluster.get(), current->cluster_phase);
}

void store_at(u32 there, u32 bits) { memcpy(bytes_at(peer(there), own_part(there), 4), &bits, 4); }

}  // namespace emulator

u32 cluster_rank() {
    const auto& blocks = emulator::current->block->cluster->blocks;
    return (u32)(std::find(blocks.begin(), blocks.end(), emulator::current->block) - blocks.begin());
}

u32 remote(const void* s, u32 rank) {
    const emulator::Block& own = *emulator::current->block;
    const emulator::Block& there = emulator::peer((rank + 1) << emulator::RANK_SHIFT);
    return (rank + 1) << emulator::RANK_SHIFT | (emulator::address_of(s) - own.base + there.base);
}

void mbarrier_arrive_at(u32 barrier, u32 rank) {
    emulator::Block& there = emulator::peer((rank + 1) << emulator::RANK_SHIFT);
    emulator::arrive_in(there, barrier - emulator::current->block->base + there.base, 0);
}

void store_remote_async(float* s, float x, u32 rank, u64* s_sent) {
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
