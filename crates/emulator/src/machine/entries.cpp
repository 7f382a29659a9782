// The kernels of one text by their names: what is compiled of a text whose driver needs nothing else of it.
#include "emulator.h"
#include "launch.h"
#include "kernel.h"

#define TEXT(WORD) #WORD
#define TEXT_OF(MACRO) TEXT(MACRO)

namespace host {

const char* const first_entry = TEXT_OF(ENTRY);

void run_entry(const char* name, const Launch& launch, const Places& places, const emulator::Settings& settings) {
#define RUN(KERNEL) if (!strcmp(name, #KERNEL)) return run(::KERNEL, launch, places, settings);
#include "entries.h"
#undef RUN
    emulator::fail("no kernel %s", name);
}

}  // namespace host
