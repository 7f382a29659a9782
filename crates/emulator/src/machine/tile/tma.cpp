// Bulk copies.
#include "cluster.h"
#include "tma.h"

namespace emulator {

TensorMap describe(const void* at, int rank, const u64 (&sizes)[5], const u64 (&strides)[4], const u64 (&tile)[5]) {
    if ((u64)at % 16) fail("a tensor map of an address that is not a multiple of 16 bytes");
    TensorMap map;
    map.opaque[0] = (u64)at;
    map.opaque[1] = rank;
    for (int i = 0; i < 5; ++i) map.opaque[2 + i] = sizes[i];
    for (int i = 0; i < 4; ++i) {
        if (strides[i] % 16) fail("a tensor map with a stride of %llu bytes, which is not a multiple of 16", strides[i]);
        map.opaque[7 + i] = strides[i];
    }
    for (int i = 0; i < 5; ++i) map.opaque[11 + i] = tile[i];
    if (tile[0] * 2 > 128) fail("a swizzled tile of more than 128 bytes");
    return map;
}

void copy_later(Block* block, u32 to, u32 bytes, u32 barrier, std::function<void()> copy) {
    bytes_at(*block, to, bytes);
    barrier_at(*block, barrier);
    check_unread(*block, to, bytes);
    for (const Copy& other : block->copies) {
        if (overlap(to, bytes, other.to, other.bytes)) fail("two copies in flight to the same bytes");
    }
    const u64 id = ++machine.copies;
    block->copies.push_back({to, bytes, id});
    auto event = [=] {
        copy();
        for (size_t i = 0; i < block->copies.size(); ++i) {
            if (block->copies[i].id == id) block->copies.erase(block->copies.begin() + i--);
        }
        Barrier& at = barrier_at(*block, barrier);
        at.bytes -= bytes;
        end_phase(at);
    };
    machine.events.emplace(machine.now + delay(), event);
}

// Elements of a tile in order: which it is, where it is, and whether it is one of the tensor.
template <class Visit> static void each_of_tile(const TensorMap& map, const int (&first)[5], Visit visit) {
    const u64* sizes = map.opaque + 2;
    const u64* strides = map.opaque + 7;
    const u64* tile = map.opaque + 11;
    u64 at[5] = {};
    for (size_t index = 0;;) {
        bool in = true;
        char* g_row = (char*)map.opaque[0];
        for (int axis = 1; axis < 5; ++axis) {
            const long long position = first[axis] + (long long)at[axis];
            in = in && position >= 0 && position < (long long)sizes[axis];
            g_row += position * (long long)strides[axis - 1];
        }
        for (u32 i = 0; i < tile[0]; ++i) {
            const long long column = first[0] + (long long)i;
            visit(index++, g_row + 2 * column, in && column >= 0 && column < (long long)sizes[0]);
        }
        int axis = 1;
        while (axis < 5 && ++at[axis] == tile[axis]) at[axis++] = 0;
        if (axis == 5) return;
    }
}

static void copy_tile(Block& block, u32 to, const TensorMap& map, const int (&first)[5]) {
    each_of_tile(map, first, [&](size_t index, const char* g_at, bool in) {
        u16 x = 0;
        if (in) memcpy(&x, g_at, 2);
        memcpy(bytes_at(block, swizzled(to + 2 * (u32)index), 2), &x, 2);
    });
}

void fetch_tile(Block* block, u32 to, const TensorMap* map, u32 barrier, int rank, const int (&first)[5]) {
    if (map->opaque[1] != (u64)rank) fail("a tensor map of rank %llu used as one of rank %d", map->opaque[1], rank);
    if (to % 1024) fail("a tile that starts %u bytes after a multiple of 1024", to % 1024);
    u32 bytes = 2;
    for (int axis = 0; axis < 5; ++axis) bytes *= (u32)map->opaque[11 + axis];
    const TensorMap kept = *map;
    struct First { int of[5]; } from;
    memcpy(from.of, first, sizeof first);
    copy_later(block, to, bytes, barrier, [=] { copy_tile(*block, to, kept, from.of); });
}

void store_tile(const TensorMap* map, u32 from, int rank, const int (&first)[5]) {
    if (map->opaque[1] != (u64)rank) fail("a tensor map of rank %llu used as one of rank %d", map->opaque[1], rank);
    if (from % 1024) fail("a tile that starts %u bytes after a multiple of 1024", from % 1024);
    Thread* thread = current;
    Block* block = thread->block;
    const TensorMap kept = *map;
    struct First { int of[5]; } to;
    memcpy(to.of, first, sizeof first);
    u32 bytes = 2;
    for (int axis = 0; axis < 5; ++axis) bytes *= (u32)map->opaque[11 + axis];
    bytes_at(*block, from, bytes);
    check_settled(*block, from, bytes);
    ++thread->stores;
    const u64 reading = std::max(machine.now, thread->last_store) + delay();
    thread->last_store = reading + delay();
    auto read = std::make_shared<std::vector<u16>>();
    machine.events.emplace(reading, [=] {
        for (u32 offset = 0; offset < bytes; offset += 2) {
            u16 x;
            memcpy(&x, bytes_at(*block, swizzled(from + offset), 2), 2);
            read->push_back(x);
        }
        ++thread->stores_read;
        progress();
    });
    machine.events.emplace(thread->last_store, [=] {
        each_of_tile(kept, to.of, [&](size_t index, char* g_at, bool in) {
            if (in) memcpy(g_at, &(*read)[index], 2);
        });
        ++thread->stores_written;
        progress();
    });
}

}  // namespace emulator

void bulk_load(u32 to, const void* g_from, u32 bytes, u32 barrier) {
    if (to % 16 || bytes % 16 || (u64)g_from % 16) emulator::fail("a copy of %u bytes: address and size must be multiples of 16", bytes);
    char* s_to = emulator::bytes_at(*emulator::current->block, to, bytes);
    emulator::copy_later(emulator::current->block, to, bytes, barrier, [=] { memcpy(s_to, g_from, bytes); });
}

// It comes to each block at a time of its own.
void tma_load_3d_to_ranks(u32 to, const TensorMap* map, u32 barrier, int c0, int c1, int c2, u16 ranks) {
    const u32 base = emulator::current->block->base;
    for (u32 rank = 0; rank < 16; ++rank) {
        if ((ranks >> rank & 1) == 0) continue;
        emulator::Block& there = emulator::peer((rank + 1) << emulator::RANK_SHIFT);
        emulator::fetch_tile(&there, to - base + there.base, map, barrier - base + there.base, 3, {c0, c1, c2, 0, 0});
    }
}
