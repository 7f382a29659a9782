// `async_copy.cuh`: a copy is carried out at once, or when it is waited for.
#pragma once

#include "mbarrier.h"

static void copy_async_to(u32 s_to, const void* g_from, int bytes, int all) {
    if (s_to % all || (bytes && (u64)g_from % all)) emulator::fail("a copy of %d bytes at an unaligned address", all);
    char* to = emulator::bytes_at(*emulator::current->block, s_to, all);
    auto copy = [=] {
        memcpy(to, g_from, bytes);
        memset(to + bytes, 0, all - bytes);
    };
    if (emulator::draw(2)) {
        copy();
    } else {
        memset(to, 0xff, all);
        emulator::current->copies.push_back(copy);
    }
}
template <int BYTES> static void copy_async(u32 s_to, const void* g_from, bool in) { copy_async_to(s_to, g_from, in ? BYTES : 0, BYTES); }
static void copy_async_first(u32 s_to, const void* g_from, int bytes) {
    if (bytes < 0 || bytes > 16) emulator::fail("a copy of %d bytes of 16", bytes);
    copy_async_to(s_to, g_from, bytes, 16);
}
static void commit_copies() { emulator::current->copy_groups.push_back(emulator::current->copies.size()); }
// Carries out the first copies, of which a wait covers so many.
static void finish_copies(size_t count) {
    emulator::Thread& self = *emulator::current;
    for (size_t i = 0; i < count; ++i) self.copies[i]();
    self.copies.erase(self.copies.begin(), self.copies.begin() + count);
    for (size_t& group : self.copy_groups) group -= std::min(group, count);
}
template <int PENDING> static void await_copies() {
    auto& groups = emulator::current->copy_groups;
    if (groups.size() <= PENDING) return;
    finish_copies(groups[groups.size() - 1 - PENDING]);
    groups.erase(groups.begin(), groups.end() - PENDING);
}
// Some time later.
static void arrive_after_copies(u32 barrier) {
    emulator::Thread& self = *emulator::current;
    emulator::Block* block = self.block;
    const std::vector<std::function<void()>> copies = std::move(self.copies);
    self.copies.clear();
    self.copy_groups.clear();
    emulator::machine.events.emplace(emulator::machine.now + emulator::delay(), [=] {
        for (const auto& copy : copies) copy();
        emulator::Barrier& at = emulator::barrier_at(*block, barrier);
        if (at.pending == 0) emulator::fail("more arrivals than expected at the mbarrier at byte %d of shared memory", emulator::place(*block, barrier));
        --at.pending;
        emulator::end_phase(at);
    });
}
static void await_all_copies() {
    finish_copies(emulator::current->copies.size());
    emulator::current->copy_groups.clear();
}
