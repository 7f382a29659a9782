// What a kernel is launched with, read from text: `grid` with blocks along three axes, threads, bytes of shared memory and blocks of a cluster,
// then the words of the parameter up to `end`.
//
//   n VALUE                                   a number
//   a POSITION OFFSET                         the address of an argument, plus so many bytes
//   w OFFSET                                  an address in the workspace
//   k OFFSET                                  an address in what is kept from run to run
//   f OFFSET                                  the address of the fault word
//   m POSITION OFFSET RANK sizes strides tile a tensor map of an argument, of the workspace if POSITION is -1: the last three
//                                             are 5, 4 and 5 numbers
#pragma once

#include <stdio.h>

#include <string>
#include <vector>

#include "emulator.h"

namespace host {

struct Reader {
    FILE* file;

    explicit Reader(const char* path) : file(fopen(path, "r")) {
        if (!file) emulator::fail("no file %s", path);
    }
    std::string name() {
        char text[64];
        if (fscanf(file, "%63s", text) != 1) emulator::fail("the launch description is truncated");
        return text;
    }
    long long number() {
        long long x;
        if (fscanf(file, "%lld", &x) != 1) emulator::fail("the launch description: expected a number");
        return x;
    }
    void expect_name(const char* expected) {
        const std::string found = name();
        if (found != expected) emulator::fail("the launch description: got %s, expected %s", found.c_str(), expected);
    }
};

struct Word {
    char kind;
    long long position, offset;
    int rank;
    u64 sizes[5], strides[4], tile[5];
};

struct Launch {
    dim3 blocks;
    u32 threads, shared, cluster;
    std::vector<Word> words;
};

Launch read_launch(Reader& reader);

// Where the arguments of a launch are, its workspace, what it keeps, and its fault word.
struct Places {
    std::vector<char*> arguments;
    char* workspace = nullptr;
    char* kept = nullptr;
    char* fault = nullptr;
};

// The words of a launch's parameter.
std::vector<u64> words_of(const Launch& launch, const Places& places);

template <class Parameter>
static void run(void (*kernel)(Parameter), const Launch& launch, const Places& places, emulator::Settings settings) {
    settings.grid = launch.blocks;
    settings.blocks = launch.blocks.x * launch.blocks.y * launch.blocks.z;
    settings.threads = launch.threads;
    settings.shared = launch.shared;
    settings.cluster = launch.cluster;
    const std::vector<u64> words = words_of(launch, places);
    Parameter parameter;
    if (words.size() * 8 != sizeof parameter) emulator::fail("%zu words for %zu bytes", words.size(), sizeof parameter);
    memcpy((void*)&parameter, words.data(), sizeof parameter);
    emulator::run(kernel, parameter, settings);
}

// The kernels of the text, for a driver that is compiled apart from it (`entries.cpp`).
extern const char* const first_entry;
void run_entry(const char* name, const Launch& launch, const Places& places, const emulator::Settings& settings);

// Arguments of a program behind its file: blocks that run at once, `together` or `apart` for the lanes of a warp, seeds. Whether all
// seeds went well, as an exit code.
template <class Run> static int run_seeds(int count, char** arguments, Run run) {
    emulator::Settings settings;
    settings.resident = (u32)atoi(arguments[2]);
    settings.apart = std::string(arguments[3]) == "apart";
    bool ok = true;
    for (int i = 4; i < count; ++i) {
        settings.seed = (u64)atoll(arguments[i]);
        ok = run(settings) && ok;
    }
    return ok ? 0 : 1;
}

}  // namespace host
