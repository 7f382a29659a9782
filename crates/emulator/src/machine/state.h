// The state of the machine: the grid, blocks, warps, threads, and what they have in flight.
#pragma once

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(16) int4 { int x, y, z, w; };
struct dim3 { u32 x = 0, y = 0, z = 0; };

namespace emulator {

struct Settings {
    u32 blocks = 1, threads = 32, shared = 0;  // blocks in all
    dim3 grid;              // blocks along each axis; all along the first where it is zeros
    u32 statics = 0;        // bytes for variables in shared memory, behind the dynamic ones
    u32 cluster = 1;        // blocks of a cluster
    u32 resident = 1;       // blocks at a time
    u64 seed = 1;
    bool apart = false;     // lanes of a warp do not run together
    bool shuffled = false;  // blocks start in any order, else from the first on
    bool aligned = false;   // shared memory starts at a multiple of 1024
};

static dim3 grid_of(const Settings& settings) { return settings.grid.x ? settings.grid : dim3{settings.blocks, 1, 1}; }

constexpr u32 ARENA = 1024;      // the address at which shared memory's allocation starts
constexpr u32 ZONE = 1024;       // bytes before and after shared memory that nobody may write
constexpr size_t STACK = 96 << 10;
constexpr u64 QUIET = 500000;    // steps without progress after which nothing will happen any more
constexpr u32 POISON = 0x7fc0dead;
constexpr int ZONE_BYTE = 0xa5;

// An mbarrier.
struct Barrier {
    u32 count = 0, pending = 0;
    long long bytes = 0;
    u64 phase = 0;
};

// A named barrier.
struct Named {
    u32 arrived = 0, expected = 0;
    u64 turn = 0;
};

// An operation that lanes of a warp execute together: the last to arrive carries it out for all.
struct Collective {
    u32 mask = 0, arrived = 0;
    int left = 0;
    bool over = false;
    const char* what = "";
    u64 words[32][10];
    u64 results[32][4];
};

// The accumulator registers of one thread.
struct Flight {
    float* d;
    int count;
    std::vector<float> sums;
    u64 last;  // multiplication, counted from 1
};

// A multiplication of a warpgroup.
struct Issue {
    u64 a = 0, b = 0;
    int columns = 0, storage = 0, add = 0;
    bool of_registers = false, transposed = false, transposed_a = false;
    int arrived = 0;
    u64 due = 0;
    struct Part {
        Flight* flight;
        const u32* at;
        u32 a[4];
    } parts[128];
};

struct Group {
    std::deque<std::unique_ptr<Issue>> issues;  // that are not done
    u64 done = 0;
    u64 last_due = 0;
};

struct Block;

// Blocks that start together, and their barrier.
struct Cluster {
    std::vector<Block*> blocks;  // by rank; null where one has ended
    u32 arrived = 0, live = 0;   // threads
    u64 phase = 0;
};

struct Thread {
    jmp_buf place;
    ucontext_t context;
    char* stack = nullptr;
    Block* block = nullptr;
    dim3 position;
    bool started = false, ended = false, polls = false;
    // What it waits for; nothing where there is no function.
    bool (*ready)(const void*, u64) = nullptr;
    const void* of = nullptr;
    u64 number = 0;
    const char* what = "";
    u32 address = 0;
    u64 joined = 0;  // operations executed together with other lanes
    // Multiplications.
    u64 issued = 0;
    bool fenced = false;
    std::deque<u64> committed;  // multiplications up to the end of each group that was not waited for
    std::vector<std::unique_ptr<Flight>> flights;
    std::vector<int> registers;  // counts it was given
    bool arrived_at_cluster = false;
    u64 cluster_phase = 0;
    // Copies by cp.async that are not carried out, and how many there were at the end of each commit group.
    std::vector<std::function<void()>> copies;
    std::vector<size_t> copy_groups;
    // Stores from shared memory: how many there were, are committed, are read, and are written; when the last one will be.
    u64 stores = 0, stores_committed = 0, stores_read = 0, stores_written = 0, last_store = 0;
};

struct Warp {
    std::vector<Collective*> open;
};

struct Copy {
    u32 to, bytes;
    u64 id;
};

struct Block {
    dim3 index;
    char* arena = nullptr;
    u32 base = 0, arena_bytes = 0;
    u32 live = 0, at_sync = 0;
    u32 incoming = 0;  // remote stores in flight
    std::shared_ptr<Cluster> cluster;
    u64 syncs = 0;
    std::vector<std::unique_ptr<Thread>> threads;
    std::vector<Warp> warps;
    std::deque<Group> groups;  // not a vector: multiplications in flight point at them
    std::map<u32, Barrier> barriers;
    Named named[16];
    std::vector<Copy> copies;
};

// Threads that run one after another without a break: a warp, or a lane by itself.
struct Unit {
    Block* block;
    u32 first, count;
    u64 asleep;
};

struct Machine {
    Settings settings;
    std::function<void()> body;
    jmp_buf place;
    u64 state = 1, now = 0, quiet = 0, copies = 0;
    u64 grid = 0;     // counted from 1
    u32 statics = 0;  // bytes of variables in shared memory
    std::multimap<u64, std::function<void()>> events;
    std::vector<std::unique_ptr<Block>> blocks;
    std::vector<Unit> units;
    std::vector<char*> stacks;
    std::vector<Collective*> collectives;
    std::function<void(const Block*)> at_end;  // is told of each block that ends, if it is there
    bool acting = false;  // a lane carries out what the lanes of its warp execute together
};

extern Machine machine;
extern Thread* current;

}  // namespace emulator
