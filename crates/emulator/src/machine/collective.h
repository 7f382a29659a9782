// Operations that lanes of a warp execute together.
#pragma once

#include "schedule.h"

namespace emulator {

bool collective_is_over(const void* of, u64);

static int lane() { return current->position.x & 31; }

// Joins a collective with some words. The last lane of the mask acts for all.
Collective* join(u32 mask, const char* what, const u64* words, size_t count, void (*act)(Collective&));
template <size_t N> static Collective* join(u32 mask, const char* what, const u64 (&words)[N], void (*act)(Collective&)) {
    static_assert(N <= 10, "a collective has room for ten words of a lane");
    return join(mask, what, words, N, act);
}

void release(Collective* collective);

static void act_nothing(Collective&) {}

void sync_lanes(u32 mask, const char* what);

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

u32 ballot(u32 mask, const char* what, bool x);

}  // namespace emulator
