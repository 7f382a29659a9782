// `async_copy.cuh`: a copy is carried out at once, or when it is waited for.
#pragma once

#include "mbarrier.h"

template <int BYTES> static void copy_async(u32 s_to, const void* g_from, bool in) {
    if (s_to % BYTES || (in && (u64)g_from % BYTES)) emulator::fail("a copy of %d bytes that is not at a multiple of them", BYTES);
    char* to = emulator::bytes_at(*emulator::current->block, s_to, BYTES);
    auto copy = [=] {
        if (in) memcpy(to, g_from, BYTES);
        if (!in) memset(to, 0, BYTES);
    };
    if (emulator::draw(2)) {
        copy();
    } else {
        memset(to, 0xff, BYTES);
        emulator::current->copies.push_back(copy);
    }
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
        if (at.pending == 0) emulator::fail("more arrivals at the barrier at %d than it takes", emulator::place(*block, barrier));
        --at.pending;
        emulator::end_phase(at);
    });
}
static void await_all_copies() {
    finish_copies(emulator::current->copies.size());
    emulator::current->copy_groups.clear();
}
