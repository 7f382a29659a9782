// Named barriers.
#include "named_barrier.h"

namespace emulator {

u64 arrive_named(int id, int threads) {
    if (id < 0 || id > 15 || threads <= 0 || threads % 32) fail("named barrier %d of %d threads", id, threads);
    Named& named = current->block->named[id];
    if (named.arrived == 0) named.expected = threads;
    if (named.expected != (u32)threads) fail("named barrier %d is used with %u threads and with %d", id, named.expected, threads);
    const u64 turn = named.turn;
    if (++named.arrived == named.expected) {
        named.arrived = 0;
        ++named.turn;
    }
    progress();
    return turn;
}

}  // namespace emulator
