// Copies by threads.
#include "async_copy.h"

void copy_async_to(u32 s_to, const void* g_from, int bytes, int all) {
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

void finish_copies(size_t count) {
    emulator::Thread& self = *emulator::current;
    for (size_t i = 0; i < count; ++i) self.copies[i]();
    self.copies.erase(self.copies.begin(), self.copies.begin() + count);
    for (size_t& group : self.copy_groups) group -= std::min(group, count);
}

void arrive_after_copies(u32 barrier) {
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

void await_all_copies() {
    finish_copies(emulator::current->copies.size());
    emulator::current->copy_groups.clear();
}
