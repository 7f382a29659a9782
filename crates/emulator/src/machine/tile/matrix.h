// `matrix.cuh`.
#pragma once

#include "../cuda.h"

namespace emulator {

static u16 matrix_element(const Collective& collective, int matrix, int row, int column) {
    u16 x;
    memcpy(&x, bytes_at(*current->block, (u32)collective.words[8 * matrix + row][0], 16) + 2 * column, 2);
    return x;
}

template <bool TRANSPOSED> static void act_load(Collective& collective) {
    for (int lane = 0; lane < 32; ++lane) {
        const u32 address = (u32)collective.words[lane][0];
        if (address % 16) fail("a row of a matrix at %u", address);
        check_settled(*current->block, address, 16);
        const int g = lane / 4, t = lane % 4 * 2;
        for (int i = 0; i < 4; ++i) {
            const u16 low = TRANSPOSED ? matrix_element(collective, i, t, g) : matrix_element(collective, i, g, t);
            const u16 high = TRANSPOSED ? matrix_element(collective, i, t + 1, g) : matrix_element(collective, i, g, t + 1);
            collective.results[lane][i] = low | (u32)high << 16;
        }
    }
}

static void act_store(Collective& collective) {
    for (int lane = 0; lane < 32; ++lane) {
        for (int i = 0; i < 4; ++i) {
            const u32 address = (u32)collective.words[8 * i + lane / 4][0], pair = (u32)collective.words[lane][1 + i];
            if (address % 16) fail("a row of a matrix at %u", address);
            memcpy(bytes_at(*current->block, address, 16) + lane % 4 * 4, &pair, 4);
        }
    }
}

// Words: four pairs of a, two of b, four sums.
template <int KIND> static void act_multiply(Collective& collective) {
    static float a[16][16], b[16][8], c[16][8];
    for (int lane = 0; lane < 32; ++lane) {
        const int g = lane / 4, t = lane % 4 * 2;
        const u64* words = collective.words[lane];
        for (int e = 0; e < 2; ++e) {
            for (int i = 0; i < 4; ++i) a[g + i % 2 * 8][t + i / 2 * 8 + e] = widened(KIND, (u16)(words[i] >> 16 * e));
            for (int i = 0; i < 2; ++i) b[t + i * 8 + e][g] = widened(KIND, (u16)(words[4 + i] >> 16 * e));
            for (int i = 0; i < 2; ++i) c[g + i * 8][t + e] = of_bits((u32)words[6 + 2 * i + e]);
        }
    }
    for (int row = 0; row < 16; ++row) {
        for (int k = 0; k < 16; ++k) {
            for (int i = 0; i < 8; ++i) c[row][i] += a[row][k] * b[k][i];
        }
    }
    for (int lane = 0; lane < 32; ++lane) {
        for (int i = 0; i < 4; ++i) collective.results[lane][i] = bits_of(c[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2]);
    }
}

// The same words, whose rows are of 32-bit numbers that are cut off.
static void act_multiply_tf32(Collective& collective) {
    static float a[16][8], b[8][8], c[16][8];
    const auto cut = [](u64 word) { return of_bits((u32)word & 0xffffe000); };
    for (int lane = 0; lane < 32; ++lane) {
        const int g = lane / 4, t = lane % 4;
        const u64* words = collective.words[lane];
        for (int i = 0; i < 4; ++i) a[g + i % 2 * 8][t + i / 2 * 4] = cut(words[i]);
        for (int i = 0; i < 2; ++i) b[t + i * 4][g] = cut(words[4 + i]);
        for (int i = 0; i < 4; ++i) c[g + i / 2 * 8][2 * t + i % 2] = of_bits((u32)words[6 + i]);
    }
    for (int row = 0; row < 16; ++row) {
        for (int k = 0; k < 8; ++k) {
            for (int i = 0; i < 8; ++i) c[row][i] += a[row][k] * b[k][i];
        }
    }
    for (int lane = 0; lane < 32; ++lane) {
        for (int i = 0; i < 4; ++i) collective.results[lane][i] = bits_of(c[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2]);
    }
}

// The same words, each of four bytes.
static void act_multiply_i8(Collective& collective) {
    static int a[16][32], b[32][8], c[16][8];
    for (int lane = 0; lane < 32; ++lane) {
        const int g = lane / 4, t = lane % 4;
        const u64* words = collective.words[lane];
        for (int e = 0; e < 4; ++e) {
            for (int i = 0; i < 4; ++i) a[g + i % 2 * 8][4 * t + i / 2 * 16 + e] = (signed char)(words[i] >> 8 * e);
            for (int i = 0; i < 2; ++i) b[4 * t + i * 16 + e][g] = (signed char)(words[4 + i] >> 8 * e);
        }
        for (int i = 0; i < 4; ++i) c[g + i / 2 * 8][2 * t + i % 2] = (int)words[6 + i];
    }
    for (int row = 0; row < 16; ++row) {
        for (int k = 0; k < 32; ++k) {
            for (int i = 0; i < 8; ++i) c[row][i] += a[row][k] * b[k][i];
        }
    }
    for (int lane = 0; lane < 32; ++lane) {
        for (int i = 0; i < 4; ++i) collective.results[lane][i] = (u32)c[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
    }
}

}  // namespace emulator

static void take_results(u32 (&r)[4], emulator::Collective* collective) {
    for (int i = 0; i < 4; ++i) r[i] = (u32)collective->results[emulator::lane()][i];
    emulator::release(collective);
}
static void ldmatrix(u32 (&r)[4], const void* s_row) {
    const u64 words[1] = {emulator::address_of(s_row)};
    take_results(r, emulator::join(0xffffffffu, "ldmatrix", words, emulator::act_load<false>));
}
static void ldmatrix_transposed(u32 (&r)[4], const void* s_row) {
    const u64 words[1] = {emulator::address_of(s_row)};
    take_results(r, emulator::join(0xffffffffu, "ldmatrix_transposed", words, emulator::act_load<true>));
}

static void multiply_add(u32 (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, const char* name, void (*act)(emulator::Collective&)) {
    const u64 words[10] = {a[0], a[1], a[2], a[3], b0, b1, c[0], c[1], c[2], c[3]};
    take_results(c, emulator::join(0xffffffffu, name, words, act));
}
static void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, const char* name, void (*act)(emulator::Collective&)) {
    u32 sums[4];
    for (int i = 0; i < 4; ++i) sums[i] = emulator::bits_of(c[i]);
    multiply_add(sums, a, b0, b1, name, act);
    for (int i = 0; i < 4; ++i) c[i] = emulator::of_bits(sums[i]);
}
template <int KIND> static void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    multiply_add(c, a, b0, b1, "mma", emulator::act_multiply<KIND == 1 ? 1 : 2>);
}
static void mma_tf32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const float (&c)[4]) {
    for (int i = 0; i < 4; ++i) d[i] = c[i];
    multiply_add(d, a, b0, b1, "mma_tf32", emulator::act_multiply_tf32);
}
static void mma_i8(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { multiply_add((u32(&)[4])c, a, b0, b1, "mma_i8", emulator::act_multiply_i8); }

static void stmatrix(void* s_row, const u32 (&r)[4]) {
    const u64 words[5] = {emulator::address_of(s_row), r[0], r[1], r[2], r[3]};
    emulator::release(emulator::join(0xffffffffu, "stmatrix", words, emulator::act_store));
}
