// The machine on small kernels: blocks that wait for each other, blocks of a cluster, bulk copies, multiplications of shared memory alone with a transposed
// right operand, and of f32. Arguments of the program: which, blocks that run at once, a seed.
#include "emulator.h"

struct Waiting {
    u64* g_words;
    u32* g_sum;
};

// Block 0 waits for signals of all others.
static void wait_for_others(Waiting p) {
    if (threadIdx.x == 0) {
        if (blockIdx.x == 0) {
            for (u32 i = 1; i < gridDim.x; ++i) {
                while (load_relaxed(p.g_words + i) != i) back_off();
            }
            while (load_acquire(p.g_sum) != gridDim.x - 1) back_off();
            store_relaxed(p.g_words, 1);
        } else {
            store_relaxed(p.g_words + blockIdx.x, blockIdx.x);
            add_acq_rel(p.g_sum, 1);
        }
    }
    __syncthreads();
}

struct Multiplied {
    TensorMap a, b;
    float* g_d;
};

// d = a b of 64 x 64 and 64 x 128, rows of a and of b one after another.
static void multiply_tiles(Multiplied p) {
    char* s_memory = (char*)shared_memory();
    const u32 a = shared_address(s_memory) + (-shared_address(s_memory) & 1023), b = a + 8192, barrier = b + 16384;
    if (threadIdx.x == 0) {
        mbarrier_init(barrier, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(barrier, 8192 + 16384);
        tma_load_3d(a, &p.a, barrier, 0, 0, 1);
        tma_load_3d(b, &p.b, barrier, 0, 0, 1);
        tma_load_3d(b + 8192, &p.b, barrier, 64, 0, 1);
    }
    __syncthreads();
    mbarrier_wait(barrier, 0);
    float d[64];
    wgmma_fence();
    for (int step = 0; step < 4; ++step) {
        Wgmma<128, 1>::from_shared<1>(d, matrix_descriptor<16>(a) + step * 2, matrix_descriptor<8192>(b) + step * 128, step > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    for (int i = 0; i < 64; ++i) {
        const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + i / 2 % 2 * 8;
        const int column = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
        p.g_d[row * 128 + column] = d[i];
    }
}

// The same of f32 whose lowest bits do not count, 64 x 32 and 32 x 96: rows of a, and columns of b.
static void multiply_cut_tiles(Multiplied p) {
    char* s_memory = (char*)shared_memory();
    const u32 a = shared_address(s_memory) + (-shared_address(s_memory) & 1023), b = a + 8192, barrier = b + 12288;
    if (threadIdx.x == 0) {
        mbarrier_init(barrier, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(barrier, 8192 + 12288);
        tma_load_3d(a, &p.a, barrier, 0, 0, 1);
        tma_load_3d(b, &p.b, barrier, 0, 0, 1);
    }
    __syncthreads();
    mbarrier_wait(barrier, 0);
    float d[48];
    wgmma_fence();
    for (int step = 0; step < 4; ++step) {
        Wgmma<96, 0>::from_shared<0>(d, matrix_descriptor<16>(a) + step * 2, matrix_descriptor<16>(b) + step * 2, step > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    for (int i = 0; i < 48; ++i) {
        const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + i / 2 % 2 * 8;
        const int column = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
        p.g_d[row * 96 + column] = d[i];
    }
}

struct Exchange {
    float* g_sums;
    int skipped;  // sends that are left out
};

// Every block of a cluster sends a number to all of them, and adds up what it receives. What is left out is expected all the same.
static void exchange(Exchange p) {
    struct Received {
        u64 sent;
        float numbers[8];
    }& s = *(Received*)shared_memory();
    if (threadIdx.x == 0) {
        mbarrier_init(shared_address(&s.sent), 1);
        fence_mbarrier_init();
    }
    cluster_arrive();
    cluster_wait();
    const u32 rank = cluster_rank(), ranks = emulator::machine.settings.cluster;
    if (threadIdx.x == 0) mbarrier_arrive_expect_tx(shared_address(&s.sent), ranks * 4);
    if (threadIdx.x >= (u32)p.skipped && threadIdx.x < ranks) {
        store_remote_async(s.numbers + rank, (float)(1 << blockIdx.x), threadIdx.x, &s.sent);
    }
    await_remote_stores(&s.sent);
    if (threadIdx.x != 0) return;
    float sum = 0.0f;
    for (u32 i = 0; i < ranks; ++i) sum += s.numbers[i];
    p.g_sums[blockIdx.x] = sum;
}

static bool check_cluster(emulator::Settings settings, int skipped) {
    float sums[8] = {};
    settings.blocks = 8;
    settings.cluster = 4;
    settings.threads = 64;
    settings.shared = 64;
    emulator::run(exchange, Exchange{sums, skipped}, settings);
    for (int i = 0; i < 8; ++i) {
        if (sums[i] != (i < 4 ? 15.0f : 240.0f)) return false;
    }
    return true;
}

static bool check_waiting(emulator::Settings settings) {
    std::vector<u64> words(8);
    u32 sum = 0;
    settings.blocks = 8;
    settings.threads = 64;
    emulator::run(wait_for_others, Waiting{words.data(), &sum}, settings);
    return words[0] == 1;
}

// The maps have 60 rows: what is beyond them is zeros.
static bool check_products(emulator::Settings settings) {
    alignas(16) static u16 a[2][60][64], b[2][60][128];
    static float d[64][128];
    for (int i = 0; i < 2 * 60 * 64; ++i) a[0][0][i] = emulator::narrowed(1, (float)(i * 7 % 23 - 11));
    for (int i = 0; i < 2 * 60 * 128; ++i) b[0][0][i] = emulator::narrowed(1, (float)(i * 5 % 19 - 9));
    Multiplied p;
    p.a = emulator::describe(a, 3, {64, 60, 2, 1, 1}, {128, 60 * 128, 16, 16}, {64, 64, 1, 1, 1});
    p.b = emulator::describe(b, 3, {128, 60, 2, 1, 1}, {256, 60 * 256, 16, 16}, {64, 64, 1, 1, 1});
    p.g_d = d[0];
    settings.threads = 128;
    settings.shared = 1024 + 8192 + 16384 + 8;
    emulator::run(multiply_tiles, p, settings);
    for (int row = 0; row < 64; ++row) {
        for (int column = 0; column < 128; ++column) {
            float sum = 0.0f;
            for (int k = 0; k < 60 && row < 60; ++k) {
                sum += emulator::widened(1, a[1][row][k]) * emulator::widened(1, b[1][k][column]);
            }
            if (d[row][column] != sum) return false;
        }
    }
    return true;
}

// Whole numbers with something in the bits that are cut off.
static bool check_cut_products(emulator::Settings settings) {
    alignas(16) static u32 a[2][60][32], b[2][96][32];
    static float d[64][96];
    for (int i = 0; i < 2 * 60 * 32; ++i) a[0][0][i] = emulator::bits_of((float)(i * 7 % 23 - 11)) | (i * 37 & 0x1fff);
    for (int i = 0; i < 2 * 96 * 32; ++i) b[0][0][i] = emulator::bits_of((float)(i * 5 % 19 - 9)) | (i * 41 & 0x1fff);
    Multiplied p;
    p.a = emulator::describe(a, 3, {64, 60, 2, 1, 1}, {128, 60 * 128, 16, 16}, {64, 64, 1, 1, 1});
    p.b = emulator::describe(b, 3, {64, 96, 2, 1, 1}, {128, 96 * 128, 16, 16}, {64, 96, 1, 1, 1});
    p.g_d = d[0];
    settings.threads = 128;
    settings.shared = 1024 + 8192 + 12288 + 8;
    emulator::run(multiply_cut_tiles, p, settings);
    for (int row = 0; row < 64; ++row) {
        for (int column = 0; column < 96; ++column) {
            int sum = 0;
            for (int k = 0; k < 32 && row < 60; ++k) sum += ((60 * 32 + row * 32 + k) * 7 % 23 - 11) * ((96 * 32 + column * 32 + k) * 5 % 19 - 9);
            if (d[row][column] != (float)sum) return false;
        }
    }
    return true;
}

int main(int count, char** arguments) {
    if (count != 4) emulator::fail("expected what to run, blocks at once, a seed");
    emulator::Settings settings;
    settings.resident = (u32)atoi(arguments[2]);
    settings.seed = (u64)atoll(arguments[3]);
    const std::string which = arguments[1];
    const bool ok = which == "waiting"   ? check_waiting(settings)
                    : which == "cluster" ? check_cluster(settings, 0)
                    : which == "missing" ? check_cluster(settings, 1)
                    : which == "cut"     ? check_cut_products(settings)
                                         : check_products(settings);
    printf("%s: %s\n", arguments[1], ok ? "ok" : "FAILED");
    return ok ? 0 : 1;
}
