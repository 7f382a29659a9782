// `registers.cuh`: counts are checked, not enforced.
#pragma once

#include "../cuda.h"

namespace emulator {

static void set_registers(int count) {
    if (count < 24 || count > 256 || count % 8) fail("%d registers", count);
    current->registers.push_back(count);
    sync_lanes(0xffffffffu, "setmaxnreg");
}

}  // namespace emulator

template <int COUNT> static void setmaxnreg_dec() { emulator::set_registers(COUNT); }
template <int COUNT> static void setmaxnreg_inc() { emulator::set_registers(COUNT); }
static int reread_thread() { return (int)threadIdx.x; }
static int opaque(int x) { return x; }
