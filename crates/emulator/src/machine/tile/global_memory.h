// `global_memory.cuh`.
#pragma once

#include "../cuda.h"

// One access of all bytes: a compiler that counts accesses does not see those of memcpy.
template <int A> struct Access {
    struct alignas(A) [[gnu::may_alias]] Bytes { char bytes[A]; };
    static __forceinline__ void load(u32* w, const char* p) {
        if ((u64)p % A) emulator::fail("a load of %d bytes at an unaligned address", A);
        const Bytes all = *(const Bytes*)p;
        memcpy(w, &all, A);
    }
    static __forceinline__ void load_again(u32* w, const char* p) { load(w, p); }
    static __forceinline__ void store(char* p, const u32* w) {
        if ((u64)p % A) emulator::fail("a store of %d bytes at an unaligned address", A);
        Bytes all;
        memcpy(&all, w, A);
        *(Bytes*)p = all;
    }
};
static __forceinline__ u32 load_u16(const char* p) { return *(const u16*)p; }
static __forceinline__ u32 load_u8(const char* p) { return *(const unsigned char*)p; }
static __forceinline__ void store_u16(char* p, u32 x) { *(u16*)p = (u16)x; }
static __forceinline__ void store_u8(char* p, u32 x) { *p = (char)x; }
