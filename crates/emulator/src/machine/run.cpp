// Runs the grids of one kernel on arguments from files, under one seed after another. Arguments of the program: see `host::run_seeds`.
//
// The launch, as text: `arguments N`, then for each its bytes, whether it is written, and the argument whose memory it takes or -1;
// `memory WORKSPACE KEPT ALIGNED`; `grids N`, then for each the name of its kernel and a grid. The files `argument0`, .. hold bytes, `result0`, .. get them.
// Under COUNT_ACCESSES the file `accesses` gets what `accesses.h` counts under the first seed.
#include "emulator.h"

#include <signal.h>
#include <sys/mman.h>

#ifdef COUNT_ACCESSES
#include "accesses.h"
#endif
#include "launch.h"

// Bytes that end at a page which nobody may touch. Bytes before them may not change.
struct Fenced {
    static constexpr size_t PAGE = 4096;
    const unsigned char around;  // other bytes around each argument: a copy of one beside another shows
    char* all;
    char* first;
    size_t bytes, room;

    Fenced(size_t bytes, int number) : around((unsigned char)(0xa5 + 29 * number)), bytes(bytes), room((bytes + PAGE - 1) / PAGE * PAGE + PAGE) {
        all = (char*)mmap(nullptr, room + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (all == MAP_FAILED) emulator::fail("no memory for %zu bytes", bytes);
        mprotect(all + room, PAGE, PROT_NONE);
        memset(all, around, room);
        // Vectors of 16 bytes start at multiples of 16.
        first = all + (room - bytes) / 16 * 16;
    }
    void check(int position) const {
        for (const char* at = all; at < all + room; ++at) {
            if ((at < first || at >= first + bytes) && (unsigned char)*at != around) {
                emulator::fail("argument %d has %zu bytes, and byte %td was written", position, bytes, at - first);
            }
        }
    }
};

struct Argument {
    std::unique_ptr<Fenced> memory;
    std::vector<char> given;
    bool written;
    int place;
};

struct Grid {
    std::string name;
    host::Launch launch;
};

static std::vector<Argument> arguments;

static void report_access(int, siginfo_t* info, void*) {
    const char* at = (const char*)info->si_addr;
    for (size_t i = 0; i < arguments.size(); ++i) {
        const Fenced* memory = arguments[i].memory.get();
        if (!memory || at < memory->all || at >= memory->all + memory->room + Fenced::PAGE) continue;
        emulator::fail("argument %zu has %zu bytes, and byte %td was accessed", i, memory->bytes, at - memory->first);
    }
    emulator::fail("an access to memory outside of all arguments, at %p", (const void*)at);
}

static void watch_accesses() {
    static char stack[1 << 16];
    stack_t own = {};
    own.ss_sp = stack;
    own.ss_size = sizeof stack;
    sigaltstack(&own, nullptr);
    struct sigaction action = {};
    action.sa_sigaction = report_access;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, nullptr);
    sigaction(SIGBUS, &action, nullptr);
}

static std::vector<char> read_bytes(const std::string& path, size_t bytes) {
    std::vector<char> all(bytes);
    FILE* file = fopen(path.c_str(), "rb");
    if (!file || fread(all.data(), 1, bytes, file) != bytes) emulator::fail("%s has no %zu bytes", path.c_str(), bytes);
    fclose(file);
    return all;
}

static char* memory_of(const Argument& argument) {
    return (argument.place < 0 ? argument : arguments[argument.place]).memory->first;
}

static bool run_seed(const std::vector<Grid>& grids, size_t workspace, size_t kept, emulator::Settings settings, std::vector<char>& bits) {
    host::Places places;
    for (Argument& argument : arguments) {
        if (argument.memory) memcpy(argument.memory->first, argument.given.data(), argument.given.size());
        places.arguments.push_back(memory_of(argument));
    }
    Fenced scratch(workspace, -1), own(kept, -2), fault(8, -3);
    memset(scratch.first, 0xff, workspace);
    memset(own.first, 0, kept);
    memset(fault.first, 0xff, 8);
    places.workspace = scratch.first;
    places.kept = own.first;
    places.fault = fault.first;
#ifdef COUNT_ACCESSES
    if (bits.empty()) accesses::start(); else accesses::stop();
    for (const Argument& argument : arguments) {
        if (argument.memory) accesses::add_range(argument.memory->first, argument.memory->bytes);
    }
    accesses::add_range(scratch.first, workspace);
    accesses::add_range(own.first, kept);
#endif
    for (const Grid& grid : grids) {
        settings.statics = grid.launch.shared <= 128 << 10 ? 48 << 10 : 4096;
        host::run_entry(grid.name.c_str(), grid.launch, places, settings);
    }
    if (*(u64*)fault.first != ~0ull) emulator::fail("an index out of range of its table in row %llu", *(u64*)fault.first / 256);
    std::vector<char> now;
    for (size_t i = 0; i < arguments.size(); ++i) {
        const Argument& argument = arguments[i];
        const char* at = memory_of(argument);
        if (argument.memory) argument.memory->check((int)i);
        bool written = false;
        for (const Argument& other : arguments) written = written || (other.written && memory_of(other) == at);
        if (!written && memcmp(at, argument.given.data(), argument.given.size())) {
            emulator::fail("argument %zu is read-only, but was written", i);
        }
        now.insert(now.end(), at, at + argument.given.size());
    }
    const bool same = bits.empty() || bits == now;
    if (!same) fprintf(stderr, "different bits than under the first seed\nFAILED: seed %llu\n", settings.seed);
    bits = now;
    return same;
}

int main(int count, char** words) {
    if (count < 5) emulator::fail("expected a file, blocks at once, together or apart, seeds");
    host::Reader reader(words[1]);
    reader.expect_name("arguments");
    const long long number = reader.number();
    for (long long i = 0; i < number; ++i) {
        Argument argument;
        const size_t bytes = (size_t)reader.number();
        argument.written = reader.number() != 0;
        argument.place = (int)reader.number();
        argument.given = read_bytes("argument" + std::to_string(i), bytes);
        if (argument.place < 0) argument.memory = std::make_unique<Fenced>(bytes, (int)i);
        arguments.push_back(std::move(argument));
    }
    reader.expect_name("memory");
    const size_t workspace = (size_t)reader.number(), kept = (size_t)reader.number();
    const bool aligned = reader.number() != 0;
    reader.expect_name("grids");
    std::vector<Grid> grids((size_t)reader.number());
    for (Grid& grid : grids) {
        grid.name = reader.name();
        grid.launch = host::read_launch(reader);
    }
    watch_accesses();
    std::vector<char> bits;
    const int code = host::run_seeds(count, words, [&](emulator::Settings settings) {
        settings.aligned = aligned;
        return run_seed(grids, workspace, kept, settings, bits);
    });
#ifdef COUNT_ACCESSES
    accesses::write("accesses");
#endif
    size_t at = 0;
    for (size_t i = 0; i < arguments.size(); ++i) {
        FILE* file = fopen(("result" + std::to_string(i)).c_str(), "wb");
        const size_t bytes = arguments[i].given.size();
        if (!file || fwrite(bits.data() + at, 1, bytes, file) != bytes || fclose(file)) emulator::fail("result %zu cannot be written", i);
        at += bytes;
    }
    return code;
}
