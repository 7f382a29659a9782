// Fibers, blocks that start and end, deadlocks.
#include "schedule.h"

#include "collective.h"

namespace emulator {

Machine machine;
Thread* current = nullptr;

u32 draw(u32 below) {
    machine.state += 0x9e3779b97f4a7c15ull;
    u64 x = machine.state;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return (u32)((x ^ x >> 31) >> 32) % below;
}

void fail(const char* format, ...) {
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

int print(const char* format, ...) {
    static const u64 first = machine.settings.seed;
    static int left = 1 << 20;
    if (machine.settings.seed != first || left <= 0) return 0;
    va_list arguments;
    va_start(arguments, format);
    const int bytes = vprintf(format, arguments);
    va_end(arguments);
    left -= bytes;
    if (left <= 0) printf("\n(printf: no more is shown, as on a GPU)\n");
    return bytes;
}

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

void yield(bool polls) {
    current->polls = polls;
    leave();
}

void wait_until(const char* what, u32 address, bool (*ready)(const void*, u64), const void* of, u64 number) {
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

void end_sync(Block* block) {
    if (block->at_sync > 0 && block->at_sync == block->live) {
        block->at_sync = 0;
        ++block->syncs;
    }
}

void end_cluster_phase(Cluster& cluster) {
    if (cluster.arrived > 0 && cluster.arrived == cluster.live) {
        cluster.arrived = 0;
        ++cluster.phase;
    }
}

static void enter() {
    machine.body();
    Thread* thread = current;
    for (auto& copy : thread->copies) copy();
    if (!thread->flights.empty()) fail("ended with wgmma instructions in flight");
    if (thread->stores_read < thread->stores) fail("ended before its bulk stores had read shared memory");
    if (thread->arrived_at_cluster) fail("ended between arriving and waiting at the cluster barrier");
    thread->ended = true;
    --thread->block->live;
    --thread->block->cluster->live;
    end_sync(thread->block);
    end_cluster_phase(*thread->block->cluster);
    leave();
}

static void start_block(u32 index, const std::shared_ptr<Cluster>& cluster) {
    const Settings& settings = machine.settings;
    auto block = std::make_unique<Block>();
    const dim3 grid = grid_of(settings);
    block->index = {index % grid.x, index / grid.x % grid.y, index / grid.x / grid.y};
    // At an odd multiple of 16 bytes, if that is not asked for otherwise; the same in all blocks of a cluster.
    block->base = ARENA + ZONE + (settings.aligned ? 0 : 16 * (2 * draw(32) + 1));
    if (!cluster->blocks.empty()) block->base = cluster->blocks[0]->base;
    block->arena_bytes = (settings.shared + 3 * ZONE + 1023) / 1024 * 1024;
    if (block->arena_bytes + ARENA > 1 << 18) fail("%u bytes of shared memory", settings.shared);
    block->arena = (char*)aligned_alloc(1024, block->arena_bytes);
    memset(block->arena, ZONE_BYTE, block->arena_bytes);
    memset(block->arena + block->base - ARENA, 0xff, settings.shared);
    block->live = settings.threads;
    block->cluster = cluster;
    cluster->blocks.push_back(block.get());
    cluster->live += settings.threads;
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

static void check_zone(const Block& block, u32 begin, u32 end) {
    for (u32 i = begin; i < end; ++i) {
        if ((unsigned char)block.arena[i] != ZONE_BYTE) fail("block %u wrote outside of its shared memory", block.index.x);
    }
}

static void end_block(Block& block) {
    const u32 begin = block.base - ARENA, end = begin + machine.settings.shared;
    check_zone(block, 0, begin);
    check_zone(block, end, block.arena_bytes);
    if (block.incoming) fail("block %u ended with remote stores in flight", block.index.x);
    if (!block.copies.empty()) fail("block %u ended with copies in flight", block.index.x);
    for (const auto& [address, barrier] : block.barriers) {
        if (barrier.bytes) fail("block %u ended with bytes missing at the barrier at %d", block.index.x, place(block, address));
    }
    for (int id = 0; id < 16; ++id) {
        if (block.named[id].arrived % 32) fail("block %u ended with part of a warp at named barrier %d", block.index.x, id);
    }
    for (auto& thread : block.threads) {
        const Thread& first = *block.threads[thread->position.x / 128 * 128];
        if (thread->registers != first.registers) fail("block %u: only part of a warpgroup changed its register count", block.index.x);
        for (int i = 0; i < 64; ++i) {
            if ((unsigned char)thread->stack[i] != ZONE_BYTE) fail("the stack of a fiber is too small");
        }
        machine.stacks.push_back(thread->stack);
    }
    auto& peers = block.cluster->blocks;
    std::replace(peers.begin(), peers.end(), &block, (Block*)nullptr);
    free(block.arena);
}

static bool is_runnable(const Thread& thread) {
    return !thread.ended && (!thread.ready || thread.ready(thread.of, thread.number));
}

// True if some thread ran. Lanes that wait for each other may do so in a loop that looks for something.
static bool step(Unit& unit) {
    u32 order[32], count = 0;
    for (u32 i = 0; i < unit.count; ++i) {
        if (is_runnable(*unit.block->threads[unit.first + i])) order[count++] = unit.first + i;
    }
    for (u32 i = count; i > 1; --i) std::swap(order[i - 1], order[draw(i)]);
    for (u32 i = 0; i < count; ++i) {
        Thread* thread = unit.block->threads[order[i]].get();
        if (thread->ready ? thread->ready != collective_is_over : !thread->polls) progress();
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
                char text[160] = "polls memory";
                if (thread.ready && thread.address >= ARENA) {
                    const int at = place(*block, thread.address);
                    snprintf(text, sizeof text, "waits for %s at byte %d of shared memory, phase parity %llu", thread.what, at, thread.number);
                } else if (thread.ready && thread.address) {
                    snprintf(text, sizeof text, "waits for %s %u", thread.what, thread.address);
                } else if (thread.ready) {
                    snprintf(text, sizeof text, "waits for %s", thread.what);
                }
                waits[text].push_back(i - first);
            }
            for (auto& [text, lanes] : waits) {
                const u32 last = lanes.back();
                fprintf(stderr, "block %u, warp %u, ", block->index.x, first / 32);
                if (last == lanes[0]) fprintf(stderr, "lane %u", last);
                else if (last - lanes[0] + 1 == lanes.size()) fprintf(stderr, "lanes %u to %u", lanes[0], last);
                else fprintf(stderr, "%zu lanes from %u to %u", lanes.size(), lanes[0], last);
                fprintf(stderr, ": %s\n", text.c_str());
            }
        }
    }
    fail("deadlock");
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
        if (machine.at_end) machine.at_end(block);
        for (size_t j = machine.units.size(); j-- > 0;) {
            if (machine.units[j].block == block) machine.units.erase(machine.units.begin() + j);
        }
        machine.blocks.erase(machine.blocks.begin() + i);
    }
}

void run_grid(const Settings& settings) {
    machine.settings = settings;
    machine.settings.shared += settings.statics;
    machine.state = settings.seed;
    machine.now = machine.quiet = 0;
    ++machine.grid;
    machine.statics = 0;
    if (settings.blocks % settings.cluster) fail("%u blocks in clusters of %u", settings.blocks, settings.cluster);
    std::vector<u32> waiting;  // clusters
    const u32 clusters = settings.blocks / settings.cluster, resident = std::max(settings.resident, settings.cluster);
    for (u32 i = clusters; i-- > 0;) waiting.push_back(i);
    if (settings.shuffled) {
        for (u32 i = clusters; i > 1; --i) std::swap(waiting[i - 1], waiting[draw(i)]);
    }
    for (;;) {
        while (machine.blocks.size() + settings.cluster <= resident && !waiting.empty()) {
            const auto cluster = std::make_shared<Cluster>();
            for (u32 i = 0; i < settings.cluster; ++i) start_block(waiting.back() * settings.cluster + i, cluster);
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

}  // namespace emulator
