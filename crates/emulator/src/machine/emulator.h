// A machine that runs CUDA kernels on a CPU. It implements the parts of the device-side library (`codegen/src/tile/`) that have instructions of a
// GPU: `tile/X.h` stands for `X.cuh`, with every function under the same name. It comes before the text of a kernel, out of which those
// parts are cut.
//
// - A thread of a kernel is a fiber; all of them run on one thread of the CPU. The next one to run is drawn from a seeded generator.
//   The lanes of a warp run one after another before another warp does, in an order that is drawn too; with `apart` every lane
//   runs by itself.
// - At most `resident` blocks run at a time. Another starts when one has ended; the blocks of a cluster start together.
// - Copies and multiplications of warpgroups are carried out at a drawn time later. An accumulator is NaN in its registers from the
//   multiplication's issue to the wait that covers it. A copy to memory that a multiplication in flight still reads, and a multiplication
//   of bytes in flight, are errors; so is an operand register that changes meanwhile.
// - A deadlock is an error that lists what every warp waits for.
//
// Memory is coherent and in order here. Fences of memory do nothing: a missing one goes unnoticed.
#pragma once

#include "state.h"
#include "schedule.h"
#include "memory.h"
#include "collective.h"
#include "cuda.h"

#include "tile/shared_address.h"
#include "tile/dependent_launch.h"
#include "tile/conversions.h"
#include "tile/global_memory.h"
#include "tile/async_copy.h"
#include "tile/matrix.h"
#include "tile/mbarrier.h"
#include "tile/named_barrier.h"
#include "tile/cluster.h"
#include "tile/tma.h"
#include "tile/signals.h"
#include "tile/registers.h"
#include "tile/wgmma.h"
