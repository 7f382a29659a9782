// Counts what the accesses of a kernel cost a GPU: sectors of global memory, and wavefronts of shared memory.
//
// The kernel is compiled with `-fsanitize=thread`, which calls a function before each load and store; these functions are here, in place of
// those of the sanitizer. The n-th time since they last met that lanes of a warp come to one instruction is one access of the warp; they
// meet at barriers and at instructions that a warp executes together.
//
// - Global memory is moved in sectors of 32 bytes. An access needs as many as its lanes touch; bytes that no lane wants are moved in vain.
// - Shared memory has 32 banks of 4 bytes. Lanes that want different words of one bank are served in one wavefront each. An access of 8 bytes
//   per lane is served by half warps, of 16 bytes by quarters.
// - Instructions that copy without the registers of a thread (cp.async, TMA, stmatrix, wgmma) are not counted.
#pragma once

#include <tuple>
#include <unordered_map>

#include "state.h"

namespace accesses {

enum Kind { GLOBAL_READ, GLOBAL_WRITE, SHARED_READ, SHARED_WRITE, KINDS };

// Memory that is global to a kernel, as if it started at a multiple of 256 bytes.
struct Range {
    const char* first;
    size_t bytes;
    u64 address;
};

struct Total {
    u64 accesses = 0;  // of warps
    u64 served = 0;    // sectors or wavefronts
    u64 least = 0;     // wavefronts without conflicts
    u64 wanted = 0;    // bytes of sectors that some lane wants
};

// An access of a warp of which some lanes came by.
struct Open {
    Kind kind;
    u32 bytes, lanes = 0;
    u64 addresses[32];
};

// An instruction, how often the lane met others before, and how often it came to the instruction since.
typedef std::tuple<const void*, u64, u32> Visit;

struct Warp {
    std::map<Visit, Open> open;
    std::unordered_map<const void*, std::pair<u64, u32>> visits[32];  // the last of a lane
};

static std::vector<Range> ranges;
static std::map<std::pair<const emulator::Block*, u32>, Warp> warps;
static Total totals[KINDS];
static bool is_busy = false;  // what is below is compiled with the same calls
static bool is_counted = false;

static u32 sectors_of(const std::vector<u64>& addresses, u32 bytes, u64& wanted) {
    std::vector<u64> sectors, all;
    for (const u64 address : addresses) {
        for (u64 byte = address; byte < address + bytes; ++byte) all.push_back(byte);
        for (u64 sector = address / 32; sector <= (address + bytes - 1) / 32; ++sector) sectors.push_back(sector);
    }
    const auto distinct = [](std::vector<u64>& list) {
        std::sort(list.begin(), list.end());
        return std::unique(list.begin(), list.end()) - list.begin();
    };
    wanted = (u64)distinct(all);
    return (u32)distinct(sectors);
}

// Lanes that want the same word are served together.
static u32 wavefronts_of(const std::vector<u64>& addresses, u32 bytes) {
    std::vector<u64> banks[32];
    for (const u64 address : addresses) {
        for (u64 word = address / 4; word <= (address + bytes - 1) / 4; ++word) {
            std::vector<u64>& bank = banks[word % 32];
            if (std::find(bank.begin(), bank.end(), word) == bank.end()) bank.push_back(word);
        }
    }
    size_t most = 0;
    for (const auto& bank : banks) most = std::max(most, bank.size());
    return (u32)most;
}

static void close(const Open& open) {
    Total& total = totals[open.kind];
    ++total.accesses;
    const bool shared = open.kind == SHARED_READ || open.kind == SHARED_WRITE;
    const u32 together = !shared || open.bytes <= 4 ? 32 : 128 / open.bytes;
    for (u32 first = 0; first < 32; first += together) {
        std::vector<u64> addresses;
        for (u32 lane = first; lane < first + together; ++lane) {
            if (open.lanes >> lane & 1) addresses.push_back(open.addresses[lane]);
        }
        if (addresses.empty()) continue;
        u64 wanted = 0;
        total.served += shared ? wavefronts_of(addresses, open.bytes) : sectors_of(addresses, open.bytes, wanted);
        total.wanted += wanted;
        ++total.least;
    }
}

// What lies open of the warps of a block that ends: accesses that not all lanes came to.
static void close_block(const emulator::Block* block) {
    is_busy = true;
    const auto first = warps.lower_bound({block, 0}), last = warps.upper_bound({block, ~0u});
    for (auto warp = first; warp != last; ++warp) {
        for (auto& [at, open] : warp->second.open) close(open);
    }
    warps.erase(first, last);
    is_busy = false;
}

static bool find(const char* at, bool written, Kind& kind, u64& address) {
    const emulator::Block& block = *emulator::current->block;
    const u64 offset = (u64)(at - block.arena);
    if (at >= block.arena && offset < block.arena_bytes) {
        kind = written ? SHARED_WRITE : SHARED_READ;
        address = offset + emulator::ARENA - block.base;
        return true;
    }
    for (const Range& range : ranges) {
        if (at < range.first || at >= range.first + range.bytes) continue;
        kind = written ? GLOBAL_WRITE : GLOBAL_READ;
        address = range.address + (u64)(at - range.first);
        return true;
    }
    return false;  // registers that the compiler put on the stack
}

static void count(const char* at, u32 bytes, bool written, const void* instruction) {
    Kind kind;
    u64 address;
    if (!find(at, written, kind, address)) return;
    const u32 thread = emulator::current->position.x, lane = thread % 32;
    Warp& warp = warps[{emulator::current->block, thread / 32}];
    const u64 met = emulator::current->block->syncs + emulator::current->joined;
    auto& [last, times] = warp.visits[lane][instruction];
    times = last == met ? times + 1 : 0;
    last = met;
    const Visit visit = {instruction, met, times};
    Open& open = warp.open[visit];
    open.kind = kind;
    open.bytes = bytes;
    open.lanes |= 1u << lane;
    open.addresses[lane] = address;
    if (open.lanes == ~0u) {
        close(open);
        warp.open.erase(visit);
    }
}

// Counts from here on, in no global memory yet.
static void start() {
    is_counted = true;
    ranges.clear();
    emulator::machine.at_end = close_block;
}

static void stop() { is_counted = false; }

static void add_range(const char* first, size_t bytes) {
    const u64 address = ranges.empty() ? 0 : (ranges.back().address + ranges.back().bytes + 255) / 256 * 256;
    ranges.push_back({first, bytes, address});
}

// Writes the totals of all grids that were run.
static void write(const char* path) {
    FILE* file = fopen(path, "w");
    if (!file) emulator::fail("%s cannot be written", path);
    for (const Total& total : totals) {
        fprintf(file, "%llu %llu %llu %llu\n", total.accesses, total.served, total.least, total.wanted);
    }
    fclose(file);
}

}  // namespace accesses

// These are not compiled with such calls themselves.
#define COUNTED extern "C" __attribute__((noinline, no_sanitize("thread")))

COUNTED void emulator_count(const void* at, u32 bytes, bool written, const void* instruction) {
    if (!accesses::is_counted || accesses::is_busy || !emulator::current || emulator::machine.acting) return;
    accesses::is_busy = true;
    accesses::count((const char*)at, bytes, written, instruction);
    accesses::is_busy = false;
}

#define COUNT_ONE(NAME, BYTES, WRITTEN) \
    COUNTED void __tsan_##NAME(void* at) { emulator_count(at, BYTES, WRITTEN, __builtin_return_address(0)); }
#define COUNT(BYTES)                                  \
    COUNT_ONE(read##BYTES, BYTES, false)              \
    COUNT_ONE(write##BYTES, BYTES, true)              \
    COUNT_ONE(unaligned_read##BYTES, BYTES, false)    \
    COUNT_ONE(unaligned_write##BYTES, BYTES, true)
COUNT(1)
COUNT(2)
COUNT(4)
COUNT(8)
COUNT(16)

// What else the compiler calls.
COUNTED void __tsan_init() {}
COUNTED void __tsan_func_entry(void*) {}
COUNTED void __tsan_func_exit() {}
COUNTED void __tsan_vptr_update(void**, void*) {}
COUNTED void __tsan_vptr_read(void**) {}
COUNTED void __tsan_read_range(void*, unsigned long) {}
COUNTED void __tsan_write_range(void*, unsigned long) {}
COUNTED void* __tsan_memcpy(void* to, const void* from, unsigned long bytes) { return memcpy(to, from, bytes); }
COUNTED void* __tsan_memmove(void* to, const void* from, unsigned long bytes) { return memmove(to, from, bytes); }
COUNTED void* __tsan_memset(void* to, int byte, unsigned long bytes) { return memset(to, byte, bytes); }
COUNTED unsigned char __tsan_atomic8_load(const volatile unsigned char* at, int) { return *at; }
COUNTED void __tsan_atomic8_store(volatile unsigned char* at, unsigned char x, int) { *at = x; }
COUNTED u32 __tsan_atomic32_load(const volatile u32* at, int) { return *at; }
COUNTED u32 __tsan_atomic32_fetch_add(volatile u32* at, u32 x, int) { return __atomic_fetch_add(at, x, __ATOMIC_SEQ_CST); }
#undef COUNT
#undef COUNT_ONE
#undef COUNTED
