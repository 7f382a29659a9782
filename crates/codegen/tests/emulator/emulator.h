// A machine that runs Hopper's kernels on a CPU. It stands in for `instructions.cuh` and `hopper_instructions.cuh`: every
// function of theirs is here under the same name. It comes before the text of a kernel, which those files are cut out of.
//
// - A thread of a kernel is a fiber; all of them run on one thread of the CPU. Who runs next is drawn from a seeded generator.
//   The lanes of a warp run one after another before another warp does, in an order that is drawn too; with `apart` every lane
//   runs by itself.
// - At most `resident` blocks run at a time. Another starts when one has ended.
// - Copies and products of warpgroups are carried out at a drawn time later. A sum is NaN in its registers from the product's
//   issue to the wait that covers it. A copy to where a product still reads, and a product of what is still on its way, are
//   errors; so is a product's register that changes meanwhile.
// - What can never go on is an error that says what every warp waits for.
//
// Memory is coherent and in order here. Fences of memory do nothing: that one is missing does not show.
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

// What the unit that copies knows of a tensor, as `emulator::describe` writes it.
struct alignas(128) TensorMap {
    u64 opaque[16];
};

namespace emulator {

struct Settings {
    u32 blocks = 1, threads = 32, shared = 0;
    u32 resident = 1;       // blocks at a time
    u64 seed = 1;
    bool apart = false;     // lanes of a warp do not run together
    bool shuffled = false;  // blocks start in any order, else from the first on
    bool aligned = false;   // shared memory starts at a multiple of 1024
};

constexpr u32 ARENA = 1024;      // the address at which shared memory's allocation starts
constexpr u32 ZONE = 1024;       // bytes before and after shared memory that nobody may write
constexpr size_t STACK = 96 << 10;
constexpr u64 QUIET = 500000;    // steps without progress after which nothing will happen any more
constexpr u32 POISON = 0x7fc0dead;
constexpr int ZONE_BYTE = 0xa5;

struct Barrier {
    u32 count = 0, pending = 0;
    long long bytes = 0;
    u64 phase = 0;
};

// A barrier of threads that is known by a number.
struct Named {
    u32 arrived = 0, expected = 0;
    u64 turn = 0;
};

// Lanes of a warp that do one thing together: the last to come does it for all.
struct Meeting {
    u32 mask = 0, arrived = 0;
    int left = 0;
    bool over = false;
    const char* what = "";
    u64 words[32][10];
    u64 results[32][4];
};

// Registers that products of one thread add to.
struct Flight {
    float* d;
    int count;
    std::vector<float> sums;
    u64 last;  // product, counted from 1
};

// A product of a warpgroup.
struct Issue {
    u64 a = 0, b = 0;
    int columns = 0, storage = 0, add = 0;
    bool of_registers = false, turned = false;
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
    // Products.
    u64 issued = 0;
    bool fenced = false;
    std::deque<u64> committed;  // products up to the end of each group that was not waited for
    std::vector<std::unique_ptr<Flight>> flights;
    std::vector<int> registers;  // counts it was given
    std::vector<std::function<void()>> copies;
    // Stores from shared memory: how many there were, are committed, are read, and are written; when the last one will be.
    u64 stores = 0, stores_committed = 0, stores_read = 0, stores_written = 0, last_store = 0;
};

struct Warp {
    std::vector<Meeting*> open;
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
    u64 syncs = 0;
    std::vector<std::unique_ptr<Thread>> threads;
    std::vector<Warp> warps;
    std::deque<Group> groups;  // not a vector: products on their way point at them
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
    std::multimap<u64, std::function<void()>> events;
    std::vector<std::unique_ptr<Block>> blocks;
    std::vector<Unit> units;
    std::vector<char*> stacks;
    std::vector<Meeting*> meetings;
};

// Not static: the compiler may not think that nobody else changes them.
Machine machine;
Thread* current = nullptr;

static u32 draw(u32 below) {
    machine.state += 0x9e3779b97f4a7c15ull;
    u64 x = machine.state;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return (u32)((x ^ x >> 31) >> 32) % below;
}
// Mostly short, at times long.
static u64 delay() { return 1 + draw(1u << draw(12)); }

[[noreturn]] static void fail(const char* format, ...) {
    fflush(stdout);
    if (current) fprintf(stderr, "block %u, thread %u: ", current->block->index.x, current->position.x);
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fprintf(stderr, "\nFAILED: seed %llu\n", machine.settings.seed);
    fflush(stderr);
    _Exit(1);
}

static void progress() { machine.quiet = 0; }

// ---- fibers

__attribute__((noinline)) static void leave() {
    if (!_setjmp(current->place)) _longjmp(machine.place, 1);
}

__attribute__((noinline)) static void resume(Thread* thread) {
    current = thread;
    if (!_setjmp(machine.place)) {
        if (thread->started) _longjmp(thread->place, 1);
        thread->started = true;
        setcontext(&thread->context);
    }
    current = nullptr;
}

// Others may run; `polls`: this alone is no progress.
static void yield(bool polls) {
    current->polls = polls;
    leave();
}

static void wait_until(const char* what, u32 address, bool (*ready)(const void*, u64), const void* of, u64 number) {
    Thread* thread = current;
    if (machine.settings.apart) yield(false);
    if (ready(of, number)) return;
    thread->ready = ready;
    thread->of = of;
    thread->number = number;
    thread->what = what;
    thread->address = address;
    leave();
}

static void end_sync(Block* block) {
    if (block->at_sync > 0 && block->at_sync == block->live) {
        block->at_sync = 0;
        ++block->syncs;
    }
}

static void enter() {
    machine.body();
    Thread* thread = current;
    for (auto& copy : thread->copies) copy();
    if (!thread->flights.empty()) fail("ended with products on their way");
    if (thread->stores_read < thread->stores) fail("ended with stores that are not read");
    thread->ended = true;
    --thread->block->live;
    end_sync(thread->block);
    leave();
}

static void start_block(u32 index) {
    const Settings& settings = machine.settings;
    auto block = std::make_unique<Block>();
    block->index.x = index;
    // At an odd multiple of 16 bytes, if that is not asked for otherwise.
    block->base = ARENA + ZONE + (settings.aligned ? 0 : 16 * (2 * draw(32) + 1));
    block->arena_bytes = (settings.shared + 3 * ZONE + 1023) / 1024 * 1024;
    if (block->arena_bytes + ARENA > 1 << 18) fail("%u bytes of shared memory", settings.shared);
    block->arena = (char*)aligned_alloc(1024, block->arena_bytes);
    memset(block->arena, ZONE_BYTE, block->arena_bytes);
    memset(block->arena + block->base - ARENA, 0xff, settings.shared);
    block->live = settings.threads;
    block->warps.resize((settings.threads + 31) / 32);
    block->groups.resize((settings.threads + 127) / 128);
    for (u32 i = 0; i < settings.threads; ++i) {
        auto thread = std::make_unique<Thread>();
        if (machine.stacks.empty()) machine.stacks.push_back((char*)malloc(STACK));
        thread->stack = machine.stacks.back();
        machine.stacks.pop_back();
        memset(thread->stack, ZONE_BYTE, 64);
        thread->block = block.get();
        thread->position.x = i;
        getcontext(&thread->context);
        thread->context.uc_stack.ss_sp = thread->stack;
        thread->context.uc_stack.ss_size = STACK;
        thread->context.uc_link = nullptr;
        makecontext(&thread->context, enter, 0);
        block->threads.push_back(std::move(thread));
    }
    const u32 together = settings.apart ? 1 : 32;
    for (u32 i = 0; i < settings.threads; i += together) {
        machine.units.push_back({block.get(), i, std::min(together, settings.threads - i), 0});
    }
    machine.blocks.push_back(std::move(block));
}

// Bytes from the first multiple of 1024 of shared memory on.
static int place(const Block& block, u32 address) { return (int)address - (int)((block.base + 1023) / 1024 * 1024); }

static void check_zone(const Block& block, u32 begin, u32 end) {
    for (u32 i = begin; i < end; ++i) {
        if ((unsigned char)block.arena[i] != ZONE_BYTE) fail("block %u wrote beside its shared memory", block.index.x);
    }
}

static void end_block(Block& block) {
    const u32 begin = block.base - ARENA, end = begin + machine.settings.shared;
    check_zone(block, 0, begin);
    check_zone(block, end, block.arena_bytes);
    if (!block.copies.empty()) fail("block %u ended with copies on their way", block.index.x);
    for (const auto& [address, barrier] : block.barriers) {
        if (barrier.bytes) fail("block %u ended with bytes missing at the barrier at %d", block.index.x, place(block, address));
    }
    for (int id = 0; id < 16; ++id) {
        if (block.named[id].arrived % 32) fail("block %u ended with part of a warp at barrier %d", block.index.x, id);
    }
    for (auto& thread : block.threads) {
        const Thread& first = *block.threads[thread->position.x / 128 * 128];
        if (thread->registers != first.registers) fail("block %u: part of a warpgroup gave or took registers", block.index.x);
        for (int i = 0; i < 64; ++i) {
            if ((unsigned char)thread->stack[i] != ZONE_BYTE) fail("the stack of a fiber is too small");
        }
        machine.stacks.push_back(thread->stack);
    }
    free(block.arena);
}

static bool is_runnable(const Thread& thread) {
    return !thread.ended && (!thread.ready || thread.ready(thread.of, thread.number));
}

// Lanes that wait for each other may do so in a loop that looks for something.
static bool meeting_is_over(const void* of, u64);

// True if some thread ran.
static bool step(Unit& unit) {
    u32 order[32], count = 0;
    for (u32 i = 0; i < unit.count; ++i) {
        if (is_runnable(*unit.block->threads[unit.first + i])) order[count++] = unit.first + i;
    }
    for (u32 i = count; i > 1; --i) std::swap(order[i - 1], order[draw(i)]);
    for (u32 i = 0; i < count; ++i) {
        Thread* thread = unit.block->threads[order[i]].get();
        if (thread->ready ? thread->ready != meeting_is_over : !thread->polls) progress();
        thread->ready = nullptr;
        thread->polls = false;
        resume(thread);
        if (thread->ended) progress();
    }
    return count > 0;
}

[[noreturn]] static void report_deadlock() {
    fflush(stdout);
    for (auto& block : machine.blocks) {
        for (u32 first = 0; first < block->threads.size(); first += 32) {
            std::map<std::string, std::vector<u32>> waits;
            for (u32 i = first; i < first + 32 && i < block->threads.size(); ++i) {
                const Thread& thread = *block->threads[i];
                if (thread.ended) continue;
                char text[160] = "polls";
                if (thread.ready && thread.address >= ARENA) {
                    const int at = place(*block, thread.address);
                    snprintf(text, sizeof text, "%s at %d, number %llu", thread.what, at, thread.number);
                } else if (thread.ready) {
                    snprintf(text, sizeof text, "%s %u, number %llu", thread.what, thread.address, thread.number);
                }
                waits[text].push_back(i - first);
            }
            for (auto& [text, lanes] : waits) {
                fprintf(stderr, "block %u, warp %u, %zu lanes from %u on: %s\n", block->index.x, first / 32, lanes.size(),
                        lanes[0], text.c_str());
            }
        }
    }
    fail("nothing goes on");
}

static void run_events() {
    while (!machine.events.empty() && machine.events.begin()->first <= machine.now) {
        auto event = std::move(machine.events.begin()->second);
        machine.events.erase(machine.events.begin());
        event();
        progress();
    }
}

// Nothing could run: to the next time at which something may.
static void skip_time() {
    u64 next = ~0ull;
    if (!machine.events.empty()) next = machine.events.begin()->first;
    for (const Unit& unit : machine.units) {
        if (unit.asleep > machine.now && unit.asleep < next) next = unit.asleep;
    }
    if (next == ~0ull) report_deadlock();
    machine.now = std::max(machine.now, next);
}

static void end_blocks() {
    for (size_t i = machine.blocks.size(); i-- > 0;) {
        Block* block = machine.blocks[i].get();
        if (block->live > 0) continue;
        end_block(*block);
        for (size_t j = machine.units.size(); j-- > 0;) {
            if (machine.units[j].block == block) machine.units.erase(machine.units.begin() + j);
        }
        machine.blocks.erase(machine.blocks.begin() + i);
    }
}

// Runs a grid.
template <class Parameter> static void run(void (*kernel)(Parameter), const Parameter& parameter, const Settings& settings) {
    machine.settings = settings;
    machine.body = [=] { kernel(parameter); };
    machine.state = settings.seed;
    machine.now = machine.quiet = 0;
    std::vector<u32> waiting;
    for (u32 i = settings.blocks; i-- > 0;) waiting.push_back(i);
    if (settings.shuffled) {
        for (u32 i = settings.blocks; i > 1; --i) std::swap(waiting[i - 1], waiting[draw(i)]);
    }
    for (;;) {
        while (machine.blocks.size() < settings.resident && !waiting.empty()) {
            start_block(waiting.back());
            waiting.pop_back();
        }
        if (machine.blocks.empty()) break;
        ++machine.now;
        run_events();
        // The first unit from a drawn one on that can run.
        const u32 count = (u32)machine.units.size(), from = draw(count);
        bool ran = false;
        for (u32 i = 0; i < count && !ran; ++i) {
            Unit& unit = machine.units[(from + i) % count];
            if (unit.asleep > machine.now) continue;
            ran = step(unit);
            if (ran && draw(32) == 0) unit.asleep = machine.now + delay();
        }
        if (!ran) skip_time();
        if (++machine.quiet > QUIET) report_deadlock();
        end_blocks();
    }
    run_events();
}

// ---- shared memory

static u32 address_of(const void* at) {
    const Block& block = *current->block;
    const char* byte = (const char*)at;
    if (byte < block.arena || byte >= block.arena + block.arena_bytes) fail("%p is not in shared memory", at);
    return ARENA + (u32)(byte - block.arena);
}

static char* bytes_at(const Block& block, u32 address, u32 bytes) {
    if (address < block.base || address + bytes > block.base + machine.settings.shared) {
        fail("%u bytes at %d of %u bytes of shared memory", bytes, place(block, address), machine.settings.shared);
    }
    return block.arena + (address - ARENA);
}

// In eight rows of 128 bytes, 16 bytes lie at their place xor the row.
static u32 swizzled(u32 address) { return address ^ (address >> 7 & 7) << 4; }

static bool overlap(u32 a, u32 a_bytes, u32 b, u32 b_bytes) { return a < b + b_bytes && b < a + a_bytes; }

// Nothing is on its way to there.
static void check_settled(const Block& block, u32 address, u32 bytes) {
    for (const Copy& copy : block.copies) {
        if (overlap(address, bytes, copy.to, copy.bytes)) {
            fail("reads %u bytes at %d of shared memory that are on their way", bytes, place(block, address));
        }
    }
}

// ---- numbers

static float of_bits(u32 bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
static u32 bits_of(float x) {
    u32 bits;
    memcpy(&bits, &x, 4);
    return bits;
}

// Storage: 1 is f16, 2 is bf16.
static float widened(int storage, u16 x) {
    if (storage == 2) return of_bits((u32)x << 16);
    const u32 sign = (u32)(x & 0x8000) << 16, exponent = x >> 10 & 31, fraction = x & 1023;
    if (exponent == 31) return of_bits(sign | 0x7f800000 | fraction << 13);
    if (exponent == 0) return (sign ? -1.0f : 1.0f) * (float)fraction * 0x1p-24f;
    return of_bits(sign | (exponent + 112) << 23 | fraction << 13);
}

// To the nearest, ties to even.
static u16 narrowed(int storage, float x) {
    const u32 bits = bits_of(x);
    if (storage == 2) return (u16)(x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    const u16 sign = (u16)(bits >> 16 & 0x8000);
    if (x != x) return 0x7fff;
    const float size = fabsf(x);
    if (size >= 65520.0f) return sign | 0x7c00;
    // Below the normal numbers the last place is 2^-24; rounding may reach the first of them.
    if (size < 0x1p-14f) return sign | (u16)nearbyintf(size * 0x1p24f);
    const u32 rest = (bits & 0x7fffffff) + 0xfff + (bits >> 13 & 1);
    return sign | (u16)((rest >> 13) - (112 << 10));
}

// ---- barriers in shared memory

static Barrier& barrier_at(Block& block, u32 address) {
    const auto found = block.barriers.find(address);
    if (found == block.barriers.end()) fail("no barrier was made at %d", place(block, address));
    return found->second;
}

static void end_phase(Barrier& barrier) {
    if (barrier.pending == 0 && barrier.bytes == 0) {
        ++barrier.phase;
        barrier.pending = barrier.count;
    }
    progress();
}

static void arrive_at(u32 address, u32 bytes) {
    Barrier& barrier = barrier_at(*current->block, address);
    if (barrier.pending == 0) fail("more arrivals at the barrier at %d than it takes", place(*current->block, address));
    barrier.bytes += bytes;
    --barrier.pending;
    end_phase(barrier);
}

static bool phase_is_over(const void* of, u64 parity) { return (((const Barrier*)of)->phase & 1) != parity; }

// ---- barriers of threads

static u64 arrive_named(int id, int threads) {
    if (id < 0 || id > 15 || threads <= 0 || threads % 32) fail("barrier %d of %d threads", id, threads);
    Named& named = current->block->named[id];
    if (named.arrived == 0) named.expected = threads;
    if (named.expected != (u32)threads) fail("barrier %d of %u threads and of %d", id, named.expected, threads);
    const u64 turn = named.turn;
    if (++named.arrived == named.expected) {
        named.arrived = 0;
        ++named.turn;
    }
    progress();
    return turn;
}

static bool turn_is_over(const void* of, u64 turn) { return ((const Named*)of)->turn > turn; }
static bool sync_is_over(const void* of, u64 sync) { return ((const Block*)of)->syncs > sync; }

// ---- lanes that meet

static bool meeting_is_over(const void* of, u64) { return ((const Meeting*)of)->over; }

static int lane() { return current->position.x & 31; }

// Comes to a meeting with some words. The last lane of the mask acts for all.
template <size_t N> static Meeting* meet(u32 mask, const char* what, const u64 (&words)[N], void (*act)(Meeting&)) {
    static_assert(N <= 10, "a meeting has room for ten words of a lane");
    if (!(mask >> lane() & 1)) fail("%s: a lane that its mask leaves out", what);
    Warp& warp = current->block->warps[current->position.x / 32];
    Meeting* meeting = nullptr;
    for (Meeting* open : warp.open) {
        if (!(open->mask & mask)) continue;
        if (open->mask != mask || strcmp(open->what, what)) fail("%s, while other lanes are at %s", what, open->what);
        meeting = open;
    }
    if (!meeting) {
        if (machine.meetings.empty()) machine.meetings.push_back(new Meeting);
        meeting = machine.meetings.back();
        machine.meetings.pop_back();
        meeting->mask = mask;
        meeting->arrived = 0;
        meeting->left = __builtin_popcount(mask);
        meeting->over = false;
        meeting->what = what;
        warp.open.push_back(meeting);
    }
    memcpy(meeting->words[lane()], words, sizeof words);
    meeting->arrived |= 1u << lane();
    if (meeting->arrived == mask) {
        act(*meeting);
        meeting->over = true;
        for (size_t i = 0; i < warp.open.size(); ++i) {
            if (warp.open[i] == meeting) warp.open.erase(warp.open.begin() + i--);
        }
    }
    wait_until(what, 0, meeting_is_over, meeting, meeting->arrived);
    return meeting;
}

static void part(Meeting* meeting) {
    if (--meeting->left == 0) machine.meetings.push_back(meeting);
}

static void act_nothing(Meeting&) {}

static void meet_warp(u32 mask, const char* what) {
    const u64 words[1] = {0};
    part(meet(mask, what, words, act_nothing));
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
    Meeting* meeting = meet(mask, what, words, act_nothing);
    if (!(mask >> (from & 31) & 1)) fail("%s from a lane that the mask leaves out", what);
    const T taken = from_word<T>(meeting->words[from & 31][0]);
    part(meeting);
    return taken;
}

static u32 ballot(u32 mask, const char* what, bool x) {
    const u64 words[1] = {x};
    Meeting* meeting = meet(mask, what, words, act_nothing);
    u32 all = 0;
    for (int i = 0; i < 32; ++i) all |= (u32)((mask >> i & 1) && meeting->words[i][0]) << i;
    part(meeting);
    return all;
}

// ---- copies

// What `opaque` holds: address, rank, sizes, strides in bytes of all axes but the innermost, sizes of a tile. Elements have two
// bytes.
static TensorMap describe(const void* at, int rank, const u64 (&sizes)[5], const u64 (&strides)[4], const u64 (&tile)[5]) {
    if ((u64)at % 16) fail("a map of what is not at a multiple of 16 bytes");
    TensorMap map;
    map.opaque[0] = (u64)at;
    map.opaque[1] = rank;
    for (int i = 0; i < 5; ++i) map.opaque[2 + i] = sizes[i];
    for (int i = 0; i < 4; ++i) {
        if (strides[i] % 16) fail("a map with a stride of %llu bytes", strides[i]);
        map.opaque[7 + i] = strides[i];
    }
    for (int i = 0; i < 5; ++i) map.opaque[11 + i] = tile[i];
    if (tile[0] * 2 > 128) fail("a swizzled tile of more than 128 bytes");
    return map;
}

static void check_unread(const Block& block, u32 to, u32 bytes);

// Has `copy` done later.
static void copy_later(u32 to, u32 bytes, u32 barrier, std::function<void()> copy) {
    Block* block = current->block;
    bytes_at(*block, to, bytes);
    barrier_at(*block, barrier);
    check_unread(*block, to, bytes);
    for (const Copy& other : block->copies) {
        if (overlap(to, bytes, other.to, other.bytes)) fail("two copies to one place");
    }
    const u64 id = ++machine.copies;
    block->copies.push_back({to, bytes, id});
    auto event = [=] {
        copy();
        for (size_t i = 0; i < block->copies.size(); ++i) {
            if (block->copies[i].id == id) block->copies.erase(block->copies.begin() + i--);
        }
        Barrier& at = barrier_at(*block, barrier);
        at.bytes -= bytes;
        end_phase(at);
    };
    machine.events.emplace(machine.now + delay(), event);
}

// Elements of a tile in order: which it is, where it is, and whether it is one of the tensor.
template <class Visit> static void each_of_tile(const TensorMap& map, const int (&first)[5], Visit visit) {
    const u64* sizes = map.opaque + 2;
    const u64* strides = map.opaque + 7;
    const u64* tile = map.opaque + 11;
    u64 at[5] = {};
    for (size_t index = 0;;) {
        bool in = true;
        char* g_row = (char*)map.opaque[0];
        for (int axis = 1; axis < 5; ++axis) {
            const long long position = first[axis] + (long long)at[axis];
            in = in && position >= 0 && position < (long long)sizes[axis];
            g_row += position * (long long)strides[axis - 1];
        }
        for (u32 i = 0; i < tile[0]; ++i) {
            const long long column = first[0] + (long long)i;
            visit(index++, g_row + 2 * column, in && column >= 0 && column < (long long)sizes[0]);
        }
        int axis = 1;
        while (axis < 5 && ++at[axis] == tile[axis]) at[axis++] = 0;
        if (axis == 5) return;
    }
}

static void copy_tile(Block& block, u32 to, const TensorMap& map, const int (&first)[5]) {
    each_of_tile(map, first, [&](size_t index, const char* g_at, bool in) {
        u16 x = 0;
        if (in) memcpy(&x, g_at, 2);
        memcpy(bytes_at(block, swizzled(to + 2 * (u32)index), 2), &x, 2);
    });
}

static void fetch_tile(u32 to, const TensorMap* map, u32 barrier, int rank, const int (&first)[5]) {
    if (map->opaque[1] != (u64)rank) fail("a map of rank %llu as one of %d", map->opaque[1], rank);
    if (to % 1024) fail("a tile at %u bytes from a multiple of 1024", to % 1024);
    u32 bytes = 2;
    for (int axis = 0; axis < 5; ++axis) bytes *= (u32)map->opaque[11 + axis];
    Block* block = current->block;
    const TensorMap kept = *map;
    struct First { int of[5]; } from;
    memcpy(from.of, first, sizeof first);
    copy_later(to, bytes, barrier, [=] { copy_tile(*block, to, kept, from.of); });
}

// A tile of shared memory on its way to where a map says: read some time later, and written still later, one store after the other.
static void store_tile(const TensorMap* map, u32 from, int rank, const int (&first)[5]) {
    if (map->opaque[1] != (u64)rank) fail("a map of rank %llu as one of %d", map->opaque[1], rank);
    if (from % 1024) fail("a tile at %u bytes from a multiple of 1024", from % 1024);
    Thread* thread = current;
    Block* block = thread->block;
    const TensorMap kept = *map;
    struct First { int of[5]; } to;
    memcpy(to.of, first, sizeof first);
    u32 bytes = 2;
    for (int axis = 0; axis < 5; ++axis) bytes *= (u32)map->opaque[11 + axis];
    bytes_at(*block, from, bytes);
    check_settled(*block, from, bytes);
    ++thread->stores;
    const u64 reading = std::max(machine.now, thread->last_store) + delay();
    thread->last_store = reading + delay();
    auto read = std::make_shared<std::vector<u16>>();
    machine.events.emplace(reading, [=] {
        for (u32 offset = 0; offset < bytes; offset += 2) {
            u16 x;
            memcpy(&x, bytes_at(*block, swizzled(from + offset), 2), 2);
            read->push_back(x);
        }
        ++thread->stores_read;
        progress();
    });
    machine.events.emplace(thread->last_store, [=] {
        each_of_tile(kept, to.of, [&](size_t index, char* g_at, bool in) {
            if (in) memcpy(g_at, &(*read)[index], 2);
        });
        ++thread->stores_written;
        progress();
    });
}

static bool stores_are_read(const void* of, u64 count) { return ((const Thread*)of)->stores_read >= count; }
static bool stores_are_written(const void* of, u64 count) { return ((const Thread*)of)->stores_written >= count; }

// ---- products of warpgroups

// A tile of shared memory, as a descriptor says it lies.
struct Operand {
    u32 start, beyond;
    bool turned;

    Operand(u64 descriptor, bool turned) : turned(turned) {
        start = (u32)(descriptor & 0x3fff) << 4;
        beyond = (u32)(descriptor >> 16 & 0x3fff) << 4;
        if ((descriptor >> 32 & 0x3fff) != 1024 >> 4 || descriptor >> 62 != 1 || (descriptor >> 49 & 7)) {
            fail("a descriptor that is not of eight rows of 128 bytes, swizzled");
        }
    }
    // Row or column `i`, and `k` along the sum.
    u32 address(int i, int k) const {
        if (turned) return swizzled(start + i / 64 * beyond + k / 8 * 1024 + k % 8 * 128 + i % 64 * 2);
        return swizzled(start + i / 8 * 1024 + i % 8 * 128 + k * 2);
    }
    bool meets(int count, u32 to, u32 bytes) const {
        const u32 from = start & ~127u;
        if (!turned) return overlap(from, count / 8 * 1024, to, bytes);
        for (int i = 0; i < count; i += 64) {
            if (overlap(from + i / 64 * beyond, 2048, to, bytes)) return true;
        }
        return false;
    }
};

static bool reads(const Issue& issue, u32 to, u32 bytes) {
    if (!issue.of_registers && Operand(issue.a, false).meets(64, to, bytes)) return true;
    return Operand(issue.b, issue.turned).meets(issue.columns, to, bytes);
}

// No product that is on its way reads there.
static void check_unread(const Block& block, u32 to, u32 bytes) {
    for (const Group& group : block.groups) {
        for (const auto& issue : group.issues) {
            if (reads(*issue, to, bytes)) fail("a copy to %d, which a product on its way reads", place(block, to));
        }
    }
}

static float element(const Block& block, int storage, u32 address) {
    u16 x;
    memcpy(&x, bytes_at(block, address, 2), 2);
    return widened(storage, x);
}

// The next product of a warpgroup.
static void multiply(Block& block, Group& group) {
    const std::unique_ptr<Issue> owned = std::move(group.issues.front());
    group.issues.pop_front();
    const Issue& issue = *owned;
    static float a[64][16], b[16][128], d[64][128];
    for (int row = 0; row < 64 && !issue.of_registers; ++row) {
        const Operand left(issue.a, false);
        for (int k = 0; k < 16; ++k) a[row][k] = element(block, issue.storage, left.address(row, k));
    }
    for (int thread = 0; thread < 128 && issue.of_registers; ++thread) {
        const Issue::Part& part = issue.parts[thread];
        if (memcmp(part.at, part.a, sizeof part.a)) {
            fail("block %u: registers of a product on its way were written", block.index.x);
        }
        const int row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
        for (int i = 0; i < 8; ++i) {
            a[row + i / 2 % 2 * 8][column + i / 4 * 8 + i % 2] = widened(issue.storage, (u16)(part.a[i / 2] >> i % 2 * 16));
        }
    }
    const Operand right(issue.b, issue.turned);
    for (int k = 0; k < 16; ++k) {
        for (int i = 0; i < issue.columns; ++i) b[k][i] = element(block, issue.storage, right.address(i, k));
    }
    for (int row = 0; row < 64; ++row) {
        for (int i = 0; i < issue.columns; ++i) d[row][i] = 0.0f;
        for (int k = 0; k < 16; ++k) {
            const float factor = a[row][k];
            for (int i = 0; i < issue.columns; ++i) d[row][i] += factor * b[k][i];
        }
    }
    for (int thread = 0; thread < 128; ++thread) {
        const int row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
        std::vector<float>& sums = issue.parts[thread].flight->sums;
        for (int i = 0; i < issue.columns / 2; ++i) {
            const float share = d[row + i / 2 % 2 * 8][column + i / 4 * 8 + i % 2];
            sums[i] = issue.add ? sums[i] + share : share;
        }
    }
    ++group.done;
}

// The registers of a sum are taken from its thread until it has waited.
static Flight* take_off(float* d, int count) {
    for (auto& flight : current->flights) {
        if (flight->d == d && flight->count == count) return flight.get();
        if (d < flight->d + flight->count && flight->d < d + count) fail("two products of parts of the same registers");
    }
    current->flights.push_back(std::make_unique<Flight>(Flight{d, count, std::vector<float>(d, d + count), 0}));
    for (int i = 0; i < count; ++i) d[i] = of_bits(POISON);
    return current->flights.back().get();
}

static void issue_product(int storage, float* d, int columns, const u32* registers, u64 a, u64 b, bool turned, int add) {
    Thread* thread = current;
    Block* block = thread->block;
    Group* group = &block->groups[thread->position.x / 128];
    if (!thread->fenced) fail("a product without a fence before it");
    if (thread->position.x / 128 >= block->threads.size() / 128) fail("a product of part of a warpgroup");
    const u64 position = thread->issued++ - group->done;
    if (position == group->issues.size()) group->issues.push_back(std::make_unique<Issue>());
    Issue& issue = *group->issues[position];
    if (issue.arrived++ == 0) {
        issue.a = a;
        issue.b = b;
        issue.columns = columns;
        issue.storage = storage;
        issue.add = add != 0;
        issue.of_registers = registers != nullptr;
        issue.turned = turned;
        for (const Copy& copy : block->copies) {
            if (reads(issue, copy.to, copy.bytes)) fail("a product of what is on its way to %d", place(*block, copy.to));
        }
    } else if (issue.a != a || issue.b != b || issue.columns != columns || issue.add != (add != 0) || issue.turned != turned ||
               issue.of_registers != (registers != nullptr)) {
        fail("threads of a warpgroup do not agree on a product");
    }
    Issue::Part& part = issue.parts[thread->position.x % 128];
    part.flight = take_off(d, columns / 2);
    part.flight->last = thread->issued;
    part.at = registers;
    if (registers) memcpy(part.a, registers, sizeof part.a);
    if (issue.arrived == 128) {
        // One after another.
        group->last_due = std::max(machine.now, group->last_due) + delay() / 4;
        machine.events.emplace(group->last_due, [=] { multiply(*block, *group); });
    }
    progress();
}

static bool products_are_done(const void* of, u64 number) { return ((const Group*)of)->done >= number; }

static void wait_groups(size_t pending) {
    Thread* thread = current;
    meet_warp(0xffffffffu, "wait_products");
    if (thread->committed.size() > pending) {
        const u64 last = thread->committed[thread->committed.size() - 1 - pending];
        thread->committed.erase(thread->committed.begin(), thread->committed.end() - pending);
        wait_until("products", 0, products_are_done, &thread->block->groups[thread->position.x / 128], last);
        auto& flights = thread->flights;
        for (size_t i = flights.size(); i-- > 0;) {
            Flight& flight = *flights[i];
            if (flight.last > last) continue;
            for (int j = 0; j < flight.count; ++j) {
                if (bits_of(flight.d[j]) != POISON) fail("a sum was written while products added to it");
                flight.d[j] = flight.sums[j];
            }
            flights.erase(flights.begin() + i);
        }
    }
    thread->fenced = false;
}

// ---- matrices of a warp

static u16 matrix_element(const Meeting& meeting, int matrix, int row, int column) {
    u16 x;
    memcpy(&x, bytes_at(*current->block, (u32)meeting.words[8 * matrix + row][0], 16) + 2 * column, 2);
    return x;
}

template <bool TURNED> static void act_load(Meeting& meeting) {
    for (int lane = 0; lane < 32; ++lane) {
        const u32 address = (u32)meeting.words[lane][0];
        if (address % 16) fail("a row of a matrix at %u", address);
        check_settled(*current->block, address, 16);
        const int g = lane / 4, t = lane % 4 * 2;
        for (int i = 0; i < 4; ++i) {
            const u16 low = TURNED ? matrix_element(meeting, i, t, g) : matrix_element(meeting, i, g, t);
            const u16 high = TURNED ? matrix_element(meeting, i, t + 1, g) : matrix_element(meeting, i, g, t + 1);
            meeting.results[lane][i] = low | (u32)high << 16;
        }
    }
}

static void act_store(Meeting& meeting) {
    for (int lane = 0; lane < 32; ++lane) {
        for (int i = 0; i < 4; ++i) {
            const u32 address = (u32)meeting.words[8 * i + lane / 4][0], pair = (u32)meeting.words[lane][1 + i];
            if (address % 16) fail("a row of a matrix at %u", address);
            memcpy(bytes_at(*current->block, address, 16) + lane % 4 * 4, &pair, 4);
        }
    }
}

// Words: four pairs of a, two of b, four sums.
template <int KIND> static void act_multiply(Meeting& meeting) {
    static float a[16][16], b[16][8], c[16][8];
    for (int lane = 0; lane < 32; ++lane) {
        const int g = lane / 4, t = lane % 4 * 2;
        const u64* words = meeting.words[lane];
        for (int e = 0; e < 2; ++e) {
            for (int i = 0; i < 4; ++i) a[g + i % 2 * 8][t + i / 2 * 8 + e] = widened(KIND, (u16)(words[i] >> 16 * e));
            for (int i = 0; i < 2; ++i) b[t + i * 8 + e][g] = widened(KIND, (u16)(words[4 + i] >> 16 * e));
            for (int i = 0; i < 2; ++i) c[g + i * 8][t + e] = of_bits((u32)words[6 + 2 * i + e]);
        }
    }
    for (int row = 0; row < 16; ++row) {
        for (int k = 0; k < 16; ++k) {
            for (int i = 0; i < 8; ++i) c[row][i] += a[row][k] * b[k][i];
        }
    }
    for (int lane = 0; lane < 32; ++lane) {
        for (int i = 0; i < 4; ++i) meeting.results[lane][i] = bits_of(c[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2]);
    }
}

static void give_or_take(int count) {
    if (count < 24 || count > 256 || count % 8) fail("%d registers", count);
    current->registers.push_back(count);
    meet_warp(0xffffffffu, "setmaxnreg");
}

}  // namespace emulator

// ---- what every kernel finds

#define __device__
#define __host__
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)
#define threadIdx (emulator::current->position)
#define blockIdx (emulator::current->block->index)
#define blockDim (dim3{emulator::machine.settings.threads, 1, 1})
#define gridDim (dim3{emulator::machine.settings.blocks, 1, 1})
// Some systems have a function of this name.
#define pause emulated_pause

#define __align__(bytes)
// The dynamic shared memory of a block: what stands for `extern __shared__ T name[];`.
static void* shared_memory() { return emulator::current->block->arena + emulator::current->block->base - emulator::ARENA; }

static void __syncthreads() {
    emulator::Block* block = emulator::current->block;
    const u64 sync = block->syncs;
    ++block->at_sync;
    emulator::end_sync(block);
    emulator::progress();
    emulator::wait_until("__syncthreads", 0, emulator::sync_is_over, block, sync);
}
static void __syncwarp(u32 mask = 0xffffffffu) { emulator::meet_warp(mask, "__syncwarp"); }
template <class T> static T __shfl_sync(u32 mask, T x, int lane) { return emulator::take(mask, "__shfl_sync", x, lane); }
template <class T> static T __shfl_xor_sync(u32 mask, T x, int bits) {
    return emulator::take(mask, "__shfl_xor_sync", x, emulator::lane() ^ bits);
}
static int __any_sync(u32 mask, int x) { return emulator::ballot(mask, "__any_sync", x != 0) != 0; }
static int __all_sync(u32 mask, int x) { return emulator::ballot(mask, "__all_sync", x != 0) == mask; }
static u32 __ballot_sync(u32 mask, int x) { return emulator::ballot(mask, "__ballot_sync", x != 0); }
static size_t __cvta_generic_to_shared(const void* at) { return emulator::address_of(at); }
static void __threadfence() {}
static void __threadfence_block() {}
static void __nanosleep(u32) { emulator::yield(true); }

static u32 __float_as_uint(float x) { return emulator::bits_of(x); }
static int __float_as_int(float x) { return (int)emulator::bits_of(x); }
static float __uint_as_float(u32 x) { return emulator::of_bits(x); }
static float __int_as_float(int x) { return emulator::of_bits((u32)x); }
static float rsqrtf(float x) { return 1.0f / sqrtf(x); }
template <class A, class B> static std::common_type_t<A, B> min(A a, B b) {
    return (std::common_type_t<A, B>)b < (std::common_type_t<A, B>)a ? b : a;
}
template <class A, class B> static std::common_type_t<A, B> max(A a, B b) {
    return (std::common_type_t<A, B>)a < (std::common_type_t<A, B>)b ? b : a;
}
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }

template <class T> static T __ldg(const T* from) { return *from; }
template <class T> static T __ldcg(const T* from) { return *from; }
template <class T> static void __stcg(T* to, T x) { *to = x; }

// Others may run before an atomic operation. It tells what was there.
template <class T, class Change> static T exchanged(T* at, Change change) {
    emulator::yield(true);
    const T before = *at;
    *at = change(before);
    if (*at != before) emulator::progress();
    return before;
}
template <class T> static T atomicAdd(T* at, std::common_type_t<T> x) { return exchanged(at, [=](T old) { return old + x; }); }
template <class T> static T atomicExch(T* at, std::common_type_t<T> x) { return exchanged(at, [=](T) { return x; }); }
template <class T> static T atomicMax(T* at, std::common_type_t<T> x) {
    return exchanged(at, [=](T old) { return old < x ? x : old; });
}
template <class T> static T atomicMin(T* at, std::common_type_t<T> x) {
    return exchanged(at, [=](T old) { return x < old ? x : old; });
}
template <class T> static T atomicCAS(T* at, std::common_type_t<T> is, std::common_type_t<T> x) {
    return exchanged(at, [=](T old) { return old == is ? x : old; });
}
static u32 atomicInc(u32* at, u32 last) { return exchanged(at, [=](u32 old) { return old >= last ? 0 : old + 1; }); }

// ---- `instructions.cuh`

static float ex2(float x) {
    // Results below the normal numbers are 0.
    const float y = exp2f(x);
    return y < 0x1p-126f ? 0.0f : y;
}

template <int KIND> struct Stored { typedef u16 Element; };
template <> struct Stored<0> { typedef float Element; };

template <int KIND> static float widen(typename Stored<KIND>::Element x) {
    if constexpr (KIND == 0) {
        return x;
    } else {
        return emulator::widened(KIND, x);
    }
}
template <int KIND> static typename Stored<KIND>::Element narrow(float x) {
    if constexpr (KIND == 0) {
        return x;
    } else {
        return emulator::narrowed(KIND, x);
    }
}
template <int KIND> static u32 narrow2(float low, float high) {
    constexpr int storage = KIND == 1 ? 1 : 2;
    return emulator::narrowed(storage, low) | (u32)emulator::narrowed(storage, high) << 16;
}

static float neighbour(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
static u32 from_lane(u32 x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
static bool any_of_warp(bool x) { return __any_sync(0xffffffffu, x); }

// At once, or when they are waited for.
static void copy_some_async(void* s_to, const void* g_from, size_t bytes, bool in) {
    if ((u64)s_to % bytes || (in && (u64)g_from % bytes)) emulator::fail("a copy of what is not at a multiple of its size");
    char* to = emulator::bytes_at(*emulator::current->block, emulator::address_of(s_to), (u32)bytes);
    auto copy = [=] {
        if (in) memcpy(to, g_from, bytes);
        if (!in) memset(to, 0, bytes);
    };
    if (emulator::draw(2)) {
        copy();
    } else {
        memset(to, 0xff, bytes);
        emulator::current->copies.push_back(copy);
    }
}
static void copy_async(void* s_to, const void* g_from, bool in) { copy_some_async(s_to, g_from, 16, in); }
static void copy_two_async(float2* s_to, const float2* g_from, bool in) { copy_some_async(s_to, g_from, 8, in); }
static void wait_copies() {
    for (auto& copy : emulator::current->copies) copy();
    emulator::current->copies.clear();
}

static void take_results(u32 (&r)[4], emulator::Meeting* meeting) {
    for (int i = 0; i < 4; ++i) r[i] = (u32)meeting->results[emulator::lane()][i];
    emulator::part(meeting);
}
static void load_matrices(u32 (&r)[4], const void* s_row) {
    const u64 words[1] = {emulator::address_of(s_row)};
    take_results(r, emulator::meet(0xffffffffu, "load_matrices", words, emulator::act_load<false>));
}
static void load_turned_matrices(u32 (&r)[4], const void* s_row) {
    const u64 words[1] = {emulator::address_of(s_row)};
    take_results(r, emulator::meet(0xffffffffu, "load_turned_matrices", words, emulator::act_load<true>));
}

template <int KIND> static void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    u64 words[10] = {a[0], a[1], a[2], a[3], b0, b1};
    for (int i = 0; i < 4; ++i) words[6 + i] = emulator::bits_of(c[i]);
    u32 sums[4];
    take_results(sums, emulator::meet(0xffffffffu, "multiply_add", words, emulator::act_multiply<KIND == 1 ? 1 : 2>));
    for (int i = 0; i < 4; ++i) c[i] = emulator::of_bits(sums[i]);
}

// ---- `hopper_instructions.cuh`

static u32 shared_address(const void* s_at) { return emulator::address_of(s_at); }

static void init_barrier(u32 barrier, u32 count) {
    emulator::bytes_at(*emulator::current->block, barrier, 8);
    if (barrier % 8 || count == 0) emulator::fail("a barrier of %u at %u", count, barrier);
    emulator::Barrier made;
    made.count = made.pending = count;
    emulator::current->block->barriers[barrier] = made;
}
static void fence_barriers() {}
static void arrive(u32 barrier) { emulator::arrive_at(barrier, 0); }
static void expect(u32 barrier, u32 bytes) { emulator::arrive_at(barrier, bytes); }
static bool is_over(u32 barrier, u32 parity) {
    const emulator::Barrier& at = emulator::barrier_at(*emulator::current->block, barrier);
    if (emulator::phase_is_over(&at, parity)) return true;
    emulator::yield(true);
    return emulator::phase_is_over(&at, parity);
}
static bool is_over_now(u32 barrier, u32 parity) { return is_over(barrier, parity); }
static void wait(u32 barrier, u32 parity) {
    const emulator::Barrier& at = emulator::barrier_at(*emulator::current->block, barrier);
    emulator::wait_until("the phase whose parity is the number, of the barrier", barrier, emulator::phase_is_over, &at, parity);
}

static void named_sync(int id, int threads) {
    const u64 turn = emulator::arrive_named(id, threads);
    emulator::wait_until("a named barrier", id, emulator::turn_is_over, &emulator::current->block->named[id], turn);
}
static void named_arrive(int id, int threads) { emulator::arrive_named(id, threads); }

static void expect_map(const TensorMap*) {}
template <int PIECES> static void fetch(u32 to, const TensorMap* map, u32 barrier, int row, int head, int sequence) {
    if constexpr (PIECES == 1) {
        emulator::fetch_tile(to, map, barrier, 4, {0, row, head, sequence, 0});
    } else {
        emulator::fetch_tile(to, map, barrier, 5, {0, row, 0, head, sequence});
    }
}
static void fetch_bytes(u32 to, const void* g_from, u32 bytes, u32 barrier) {
    if (to % 16 || bytes % 16 || (u64)g_from % 16) emulator::fail("a copy of %u bytes that are not whole pieces of 16", bytes);
    char* s_to = emulator::bytes_at(*emulator::current->block, to, bytes);
    emulator::copy_later(to, bytes, barrier, [=] { memcpy(s_to, g_from, bytes); });
}
static void fence_copies() {}
static void fence_all_copies() {}
static void fence_device() {}

static void fetch_piece(u32 to, const TensorMap* map, u32 barrier, int column, int row, int sequence) {
    emulator::fetch_tile(to, map, barrier, 3, {column, row, sequence, 0, 0});
}
static void store_piece(const TensorMap* map, u32 from, int column, int row, int sequence) {
    emulator::store_tile(map, from, 3, {column, row, sequence, 0, 0});
}
static void commit_stores() { emulator::current->stores_committed = emulator::current->stores; }
static void wait_stores_read() {
    const emulator::Thread* self = emulator::current;
    emulator::wait_until("stores that are read", 0, emulator::stores_are_read, self, self->stores_committed);
}
static void wait_stores() {
    const emulator::Thread* self = emulator::current;
    emulator::wait_until("stores that are written", 0, emulator::stores_are_written, self, self->stores_committed);
}

// Others may run before a look at a word.
static u64 read_word(const u64* g_word) {
    emulator::yield(true);
    return *(const volatile u64*)g_word;
}
static void write_word(u64* g_word, u64 word) {
    emulator::yield(true);
    *(volatile u64*)g_word = word;
    emulator::progress();
}
static u32 add_released(u32* g_sum, u32 more) { return atomicAdd(g_sum, more); }
static u32 load_acquired(const u32* g_sum) {
    emulator::yield(true);
    return *(const volatile u32*)g_sum;
}
static u32* shared_word(u32 s_at) {
    if (s_at % 4) emulator::fail("a word at %u", s_at);
    return (u32*)emulator::bytes_at(*emulator::current->block, s_at, 4);
}
static void store_released_shared(u32 s_at, u32 value) { atomicExch(shared_word(s_at), value); }
static u32 load_acquired_shared(u32 s_at) { return load_acquired(shared_word(s_at)); }
static int thread_anew() { return (int)threadIdx.x; }
static void pause() { emulator::yield(true); }

template <int KIND> static u32 add_pairs(u32 a, u32 b) {
    const auto sum = [](u32 x, u32 y) { return emulator::narrowed(KIND, emulator::widened(KIND, (u16)x) + emulator::widened(KIND, (u16)y)); };
    return sum(a, b) | (u32)sum(a >> 16, b >> 16) << 16;
}

template <int COUNT> static void give_registers() { emulator::give_or_take(COUNT); }
template <int COUNT> static void take_registers() { emulator::give_or_take(COUNT); }

static void store_matrices(void* s_row, const u32 (&r)[4]) {
    const u64 words[5] = {emulator::address_of(s_row), r[0], r[1], r[2], r[3]};
    emulator::part(emulator::meet(0xffffffffu, "store_matrices", words, emulator::act_store));
}

static void fence_products() {
    emulator::meet_warp(0xffffffffu, "fence_products");
    emulator::current->fenced = true;
}
static void commit_products() { emulator::current->committed.push_back(emulator::current->issued); }
template <int PENDING> static void wait_products() { emulator::wait_groups(PENDING); }
template <int N> static void pin(float (&)[N]) {}
template <int N> static void pin(u32 (&)[N][4]) {}

template <int BEYOND> static u64 descriptor(u32 tile) {
    return (u64)((tile & 0x3ffff) >> 4) | (u64)(BEYOND >> 4) << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}

// `Product` of the text's STORAGE.
template <int N, int STORAGE> struct ProductOf {
    static_assert(N == 64 || N == 128, "columns");
    template <int TURNED = 0> static void of_shared(float (&d)[N / 2], u64 a, u64 b, int add) {
        emulator::issue_product(STORAGE, d, N, nullptr, a, b, TURNED != 0, add);
    }
    template <int TURNED> static void of_registers(float (&d)[N / 2], const u32 (&a)[4], u64 b, int add) {
        emulator::issue_product(STORAGE, d, N, a, 0, b, TURNED != 0, add);
    }
};
