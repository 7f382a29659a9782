// `global_memory.cuh`.
#pragma once

#include "../cuda.h"

template <int A> struct Access {
    static void load(u32* w, const char* p) {
        if ((u64)p % A) emulator::fail("a load of %d bytes that is not at a multiple of them", A);
        memcpy(w, p, A);
    }
    static void load_again(u32* w, const char* p) { load(w, p); }
    static void store(char* p, const u32* w) {
        if ((u64)p % A) emulator::fail("a store of %d bytes that is not at a multiple of them", A);
        memcpy(p, w, A);
    }
};
static u32 load_u16(const char* p) { return *(const u16*)p; }
static u32 load_u8(const char* p) { return *(const unsigned char*)p; }
static void store_u16(char* p, u32 x) { *(u16*)p = (u16)x; }
static void store_u8(char* p, u32 x) { *p = (char)x; }
