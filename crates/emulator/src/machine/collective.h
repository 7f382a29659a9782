// Operations that lanes of a warp execute together.
#pragma once

#include "schedule.h"

namespace emulator {

static bool collective_is_over(const void* of, u64) { return ((const Collective*)of)->over; }

static int lane() { return current->position.x & 31; }

// Joins a collective with some words. The last lane of the mask acts for all.
template <size_t N> static Collective* join(u32 mask, const char* what, const u64 (&words)[N], void (*act)(Collective&)) {
    static_assert(N <= 10, "a collective has room for ten words of a lane");
    if (!(mask >> lane() & 1)) fail("%s: called by a lane that is not in its mask", what);
    ++current->joined;
    Warp& warp = current->block->warps[current->position.x / 32];
    Collective* collective = nullptr;
    for (Collective* open : warp.open) {
        if (!(open->mask & mask)) continue;
        if (open->mask != mask || strcmp(open->what, what)) fail("%s, while other lanes are at %s", what, open->what);
        collective = open;
    }
    if (!collective) {
        if (machine.collectives.empty()) machine.collectives.push_back(new Collective);
        collective = machine.collectives.back();
        machine.collectives.pop_back();
        collective->mask = mask;
        collective->arrived = 0;
        collective->left = __builtin_popcount(mask);
        collective->over = false;
        collective->what = what;
        warp.open.push_back(collective);
    }
    memcpy(collective->words[lane()], words, sizeof words);
    collective->arrived |= 1u << lane();
    if (collective->arrived == mask) {
        machine.acting = true;
        act(*collective);
        machine.acting = false;
        collective->over = true;
        for (size_t i = 0; i < warp.open.size(); ++i) {
            if (warp.open[i] == collective) warp.open.erase(warp.open.begin() + i--);
        }
    }
    wait_until(what, 0, collective_is_over, collective, collective->arrived);
    return collective;
}

static void release(Collective* collective) {
    if (--collective->left == 0) machine.collectives.push_back(collective);
}

static void act_nothing(Collective&) {}

static void sync_lanes(u32 mask, const char* what) {
    const u64 words[1] = {0};
    release(join(mask, what, words, act_nothing));
}

template <class T> static u64 to_word(T x) {
    static_assert(sizeof(T) <= 8, "a word");
    u64 word = 0;
    memcpy(&word, &x, sizeof x);
    return word;
}
template <class T> static T from_word(u64 word) {
    T x;
    memcpy(&x, &word, sizeof x);
    return x;
}

// What another lane has.
template <class T> static T take(u32 mask, const char* what, T x, u32 from) {
    const u64 words[1] = {to_word(x)};
    Collective* collective = join(mask, what, words, act_nothing);
    if (!(mask >> (from & 31) & 1)) fail("%s from a lane that is not in the mask", what);
    const T taken = from_word<T>(collective->words[from & 31][0]);
    release(collective);
    return taken;
}

static u32 ballot(u32 mask, const char* what, bool x) {
    const u64 words[1] = {x};
    Collective* collective = join(mask, what, words, act_nothing);
    u32 all = 0;
    for (int i = 0; i < 32; ++i) all |= (u32)((mask >> i & 1) && collective->words[i][0]) << i;
    release(collective);
    return all;
}

}  // namespace emulator
