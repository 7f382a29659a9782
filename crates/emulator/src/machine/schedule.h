// Which fiber runs next, and when; blocks that start and end; deadlocks.
#pragma once

#include "state.h"

namespace emulator {

u32 draw(u32 below);
// Mostly short, at times long.
static u64 delay() { return 1 + draw(1u << draw(12)); }

[[noreturn]] void fail(const char* format, ...);

// A kernel's `printf`. It prints under the first order of threads only, and as much as the buffer that a GPU has for it.
int print(const char* format, ...);

static void progress() { machine.quiet = 0; }

// Lets other fibers run; `polls`: this alone is no progress.
void yield(bool polls);

void wait_until(const char* what, u32 address, bool (*ready)(const void*, u64), const void* of, u64 number);

void end_sync(Block* block);

// Threads that have ended are not waited for.
void end_cluster_phase(Cluster& cluster);

// Bytes from the first multiple of 1024 of shared memory on.
static int place(const Block& block, u32 address) { return (int)address - (int)((block.base + 1023) / 1024 * 1024); }

// Runs a grid of `machine.body`.
void run_grid(const Settings& settings);

template <class Parameter> static void run(void (*kernel)(Parameter), const Parameter& parameter, const Settings& settings) {
    machine.body = [=] { kernel(parameter); };
    run_grid(settings);
}

}  // namespace emulator
