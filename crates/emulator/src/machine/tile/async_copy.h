// `async_copy.cuh`: a copy is carried out at once, or when it is waited for.
#pragma once

#include "mbarrier.h"

void copy_async_to(u32 s_to, const void* g_from, int bytes, int all);
template <int BYTES> static void copy_async(u32 s_to, const void* g_from, bool in) { copy_async_to(s_to, g_from, in ? BYTES : 0, BYTES); }
static void copy_async_first(u32 s_to, const void* g_from, int bytes) {
    if (bytes < 0 || bytes > 16) emulator::fail("a copy of %d bytes of 16", bytes);
    copy_async_to(s_to, g_from, bytes, 16);
}
static void commit_copies() { emulator::current->copy_groups.push_back(emulator::current->copies.size()); }
// Carries out the first copies, of which a wait covers so many.
void finish_copies(size_t count);
template <int PENDING> static void await_copies() {
    auto& groups = emulator::current->copy_groups;
    if (groups.size() <= PENDING) return;
    finish_copies(groups[groups.size() - 1 - PENDING]);
    groups.erase(groups.begin(), groups.end() - PENDING);
}
// Some time later.
void arrive_after_copies(u32 barrier);
void await_all_copies();
