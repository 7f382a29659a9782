// Shared memory of a block, and numbers in 16 bits.
#pragma once

#include "schedule.h"

namespace emulator {

u32 address_of(const void* at);

char* bytes_at(const Block& block, u32 address, u32 bytes);

// In eight rows of 128 bytes, 16 bytes lie at their place xor the row.
static u32 swizzled(u32 address) { return address ^ (address >> 7 & 7) << 4; }

static bool overlap(u32 a, u32 a_bytes, u32 b, u32 b_bytes) { return a < b + b_bytes && b < a + a_bytes; }

// No copy in flight writes there.
void check_settled(const Block& block, u32 address, u32 bytes);

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

}  // namespace emulator
