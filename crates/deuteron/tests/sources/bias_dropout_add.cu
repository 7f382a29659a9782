// 96 threads per row, 1 rows per block, 8 columns per thread by 8: columns do not depend on each other
#define WAITS
constexpr int V = 8;
constexpr int T = 96;
constexpr int ROWS = 1;
constexpr int CHUNKS = 1;
constexpr int PARTS = 1;
constexpr int COLS = 768;

struct Parameters {
    unsigned long long a0;
    unsigned long long s0_0;
    unsigned long long a1;
    unsigned long long a2;
    unsigned long long a3;
    unsigned long long s3_0;
    unsigned long long a4;
    unsigned long long s4_0;
    unsigned long long rows;
    unsigned long long fault;
    unsigned long long workspace;
};

extern "C" __global__ void __launch_bounds__(96) row(const __grid_constant__ Parameters p) {
    const int lane = threadIdx.x % T, group = threadIdx.x / T;
    const int part = 0;
    start_next();
    wait_for_previous();
    const i64 start = (i64)(blockIdx.x / PARTS) * ROWS;
    const int turn = 0;
    {
        const bool live = ROWS == 1 || start + group < (i64)p.rows;
        const i64 row = live ? start + group : (i64)p.rows - 1;
        const char* const g0 = (const char*)p.a0 + row * (i64)p.s0_0;
        const char* const g1 = (const char*)p.a1;
        const char* const g2 = (const char*)p.a2;
        const char* const g3 = (const char*)p.a3 + row * (i64)p.s3_0;
        char* const g4 = (char*)p.a4 + row * (i64)p.s4_0;
        Raw<Bf16> w0[CHUNKS];
        Raw<Bf16> w1[CHUNKS];
        Raw<Bf16> w3[CHUNKS];
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const int col = ((part * CHUNKS + c) * T + lane) * V;
            const bool in = true;
            w0[c] = load<Bf16, 16, STREAM>(g0 + (i64)col * 2, in);
            w1[c] = load<Bf16, 16, AGAIN>(g1 + (i64)col * 2, in);
            w3[c] = load<Bf16, 16, STREAM>(g3 + (i64)col * 2, in);
        }
        // sweep 0
        const int e6 = load_one(I32{}, g2);
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const int col = ((part * CHUNKS + c) * T + lane) * V;
            const bool in = true;
            const F e0 = value(w0[c]);
            const F e1 = value(w1[c]);
            const F e2 = add2(e0, e1);
            const F e3 = round_bf16(e2);
            const F e5 = mul2(e3, 1.1111112e0f);
            const B e7 = keep<true>((u64)row * COLS + col, (u32)e6, 0u, 429496729u);
            const F e9 = select<F>(e7, e5, 0e0f);
            const F e10 = round_bf16(e9);
            const F e11 = value(w3[c]);
            const F e12 = add2(e10, e11);
            store<Bf16, 16>(g4 + (i64)col * 2, e12, live && in);
        }
    }
}
