// Operations that lanes of a warp execute together.
#include "collective.h"

namespace emulator {

bool collective_is_over(const void* of, u64) { return ((const Collective*)of)->over; }

Collective* join(u32 mask, const char* what, const u64* words, size_t count, void (*act)(Collective&)) {
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
    memcpy(collective->words[lane()], words, count * sizeof *words);
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

void release(Collective* collective) {
    if (--collective->left == 0) machine.collectives.push_back(collective);
}

void sync_lanes(u32 mask, const char* what) {
    const u64 words[1] = {0};
    release(join(mask, what, words, act_nothing));
}

u32 ballot(u32 mask, const char* what, bool x) {
    const u64 words[1] = {x};
    Collective* collective = join(mask, what, words, act_nothing);
    u32 all = 0;
    for (int i = 0; i < 32; ++i) all |= (u32)((mask >> i & 1) && collective->words[i][0]) << i;
    release(collective);
    return all;
}

}  // namespace emulator
