// Shared memory of a block.
#include "memory.h"

namespace emulator {

u32 address_of(const void* at) {
    const Block& block = *current->block;
    const char* byte = (const char*)at;
    if (byte < block.arena || byte >= block.arena + block.arena_bytes) fail("%p is not in shared memory", at);
    return ARENA + (u32)(byte - block.arena);
}

char* bytes_at(const Block& block, u32 address, u32 bytes) {
    if (address < block.base || address + bytes > block.base + machine.settings.shared) {
        fail("accesses %u bytes at byte %d of %u bytes of shared memory", bytes, place(block, address), machine.settings.shared);
    }
    return block.arena + (address - ARENA);
}

void check_settled(const Block& block, u32 address, u32 bytes) {
    for (const Copy& copy : block.copies) {
        if (overlap(address, bytes, copy.to, copy.bytes)) {
            fail("reads %u bytes at byte %d of shared memory while a copy to them is in flight", bytes, place(block, address));
        }
    }
}

}  // namespace emulator
