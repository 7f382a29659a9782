// `conversions.cuh`.
#pragma once

#include "../cuda.h"

static float ex2(float x) {
    // Results below the normal numbers are 0.
    const float y = exp2f(x);
    return y < 0x1p-126f ? 0.0f : y;
}
static float rcp(float x) { return 1.0f / x; }
static float sqrt_approx(float x) { return sqrtf(x); }
static float max_nan(float a, float b) { return a > b || a != a ? a : b; }

static u32 bf16x2(float low, float high) { return emulator::narrowed(2, low) | (u32)emulator::narrowed(2, high) << 16; }
static u32 f16x2(float low, float high) { return emulator::narrowed(1, low) | (u32)emulator::narrowed(1, high) << 16; }
static float f16_low(u32 w) { return emulator::widened(1, (u16)w); }
static float f16_high(u32 w) { return emulator::widened(1, (u16)(w >> 16)); }
static float bf16_low(u32 w) { return emulator::widened(2, (u16)w); }
static float bf16_high(u32 w) { return emulator::widened(2, (u16)(w >> 16)); }
static float from_f16(u16 x) { return emulator::widened(1, x); }
static u16 to_f16(float x) { return emulator::narrowed(1, x); }

static int nearest(float x) {
    if (x != x) return 0;
    return x >= 0x1p31f ? 0x7fffffff : x <= -0x1p31f ? (int)0x80000000 : (int)nearbyintf(x);
}
static u32 i8x2(int low, int high, u32 above) {
    const auto byte = [](int x) { return (u32)(x < -128 ? -128 : x > 127 ? 127 : x) & 0xff; };
    return byte(low) | byte(high) << 8 | above << 16;
}
static u32 to_f8(float x) {
    const u32 sign = emulator::bits_of(x) >> 24 & 0x80;
    const float size = fabsf(x);
    if (size != size) return 0x7f | sign;
    if (size >= 464.0f) return sign | 0x7e;
    // Below the normal numbers the last place is 2^-9; rounding may reach the first of them.
    if (size < 0x1p-6f) return sign | (u32)nearbyintf(size * 0x1p9f);
    const u32 bits = emulator::bits_of(size), rounded = bits + 0x7ffff + (bits >> 20 & 1);
    return sign | std::min((rounded >> 20) - (120u << 3), 0x7eu);
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
    return KIND == 1 ? f16x2(low, high) : bf16x2(low, high);
}
template <int KIND> static u32 add_packed(u32 a, u32 b) {
    const auto sum = [](u32 x, u32 y) { return emulator::narrowed(KIND, emulator::widened(KIND, (u16)x) + emulator::widened(KIND, (u16)y)); };
    return sum(a, b) | (u32)sum(a >> 16, b >> 16) << 16;
}
