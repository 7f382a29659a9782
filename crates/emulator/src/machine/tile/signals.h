// `signals.cuh`.
#pragma once

#include "../cuda.h"

// Other threads may run before a word is read.
static u64 load_relaxed(const u64* g_word) {
    emulator::yield(true);
    return *(const volatile u64*)g_word;
}
static void store_relaxed(u64* g_word, u64 word) {
    emulator::yield(true);
    *(volatile u64*)g_word = word;
    emulator::progress();
}
static u32 add_acq_rel(u32* g_sum, u32 more) { return atomicAdd(g_sum, more); }
static u32 load_acquire(const u32* g_sum) {
    emulator::yield(true);
    return *(const volatile u32*)g_sum;
}
static u32* shared_word(u32 s_at) {
    if (s_at % 4) emulator::fail("a word at %u", s_at);
    return (u32*)emulator::bytes_at(*emulator::current->block, s_at, 4);
}
static void store_release_shared(u32 s_at, u32 value) { atomicExch(shared_word(s_at), value); }
static u32 load_acquire_shared(u32 s_at) { return load_acquire(shared_word(s_at)); }
static void back_off() { emulator::yield(true); }
