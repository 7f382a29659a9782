// `tma.cuh`: a copy is carried out at a drawn time after it was started.
#pragma once

#include "mbarrier.h"

// A tensor map, as `emulator::describe` writes it.
struct alignas(128) TensorMap {
    u64 opaque[16];
};

namespace emulator {

// What `opaque` holds: address, rank, sizes, strides in bytes of all axes but the innermost, sizes of a tile. Elements have two
// bytes.
TensorMap describe(const void* at, int rank, const u64 (&sizes)[5], const u64 (&strides)[4], const u64 (&tile)[5]);

// No multiplication in flight reads there.
void check_unread(const Block& block, u32 to, u32 bytes);

// Has `copy` done later.
void copy_later(Block* block, u32 to, u32 bytes, u32 barrier, std::function<void()> copy);

void fetch_tile(Block* block, u32 to, const TensorMap* map, u32 barrier, int rank, const int (&first)[5]);

// A tile of shared memory on its way to where a map says: read some time later, and written still later, one store after the other.
void store_tile(const TensorMap* map, u32 from, int rank, const int (&first)[5]);

static bool stores_are_read(const void* of, u64 count) { return ((const Thread*)of)->stores_read >= count; }
static bool stores_are_written(const void* of, u64 count) { return ((const Thread*)of)->stores_written >= count; }

}  // namespace emulator

static void prefetch_tensor_map(const TensorMap*) {}
static void tma_load_3d(u32 to, const TensorMap* map, u32 barrier, int c0, int c1, int c2) {
    emulator::fetch_tile(emulator::current->block, to, map, barrier, 3, {c0, c1, c2, 0, 0});
}
static void tma_load_4d(u32 to, const TensorMap* map, u32 barrier, int c0, int c1, int c2, int c3) {
    emulator::fetch_tile(emulator::current->block, to, map, barrier, 4, {c0, c1, c2, c3, 0});
}
static void tma_load_5d(u32 to, const TensorMap* map, u32 barrier, int c0, int c1, int c2, int c3, int c4) {
    emulator::fetch_tile(emulator::current->block, to, map, barrier, 5, {c0, c1, c2, c3, c4});
}
void tma_load_3d_to_ranks(u32 to, const TensorMap* map, u32 barrier, int c0, int c1, int c2, u16 ranks);
static void tma_prefetch_3d(const TensorMap*, int, int, int) {}
void bulk_load(u32 to, const void* g_from, u32 bytes, u32 barrier);
static void tma_store_3d(const TensorMap* map, u32 from, int c0, int c1, int c2) {
    emulator::store_tile(map, from, 3, {c0, c1, c2, 0, 0});
}
static void commit_stores() { emulator::current->stores_committed = emulator::current->stores; }
static void await_stores_read() {
    const emulator::Thread* self = emulator::current;
    emulator::wait_until("bulk stores to read shared memory", 0, emulator::stores_are_read, self, self->stores_committed);
}
static void await_stores() {
    const emulator::Thread* self = emulator::current;
    emulator::wait_until("bulk stores to be written", 0, emulator::stores_are_written, self, self->stores_committed);
}
static void fence_proxy_async_shared() {}
static void fence_proxy_async() {}
