// 32 threads per row, 4 rows per block, 24 columns per thread by 8, 2 resident blocks per multiprocessor, 1 rows ahead in shared memory: a warp holds the row
constexpr int V = 8;
constexpr int T = 32;
constexpr int ROWS = 4;
constexpr int CHUNKS = 3;
constexpr int PARTS = 1;
constexpr int STAGES = 2;
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
    unsigned long long a5;
    unsigned long long a6;
    unsigned long long a7;
    unsigned long long a8;
    unsigned long long s8_0;
    unsigned long long a9;
    unsigned long long s9_0;
    unsigned long long a10;
    unsigned long long s10_0;
    unsigned long long a11;
    unsigned long long rows;
    unsigned long long fault;
    unsigned long long workspace;
};

extern "C" __global__ void __launch_bounds__(128, 2) row(const __grid_constant__ Parameters p) {
    const int lane = threadIdx.x % T, group = threadIdx.x / T;
    const int part = 0;
    F sum0[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) sum0[c] = lanes<F>([](int) { return 0.0f; });
    F sum1[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) sum1[c] = lanes<F>([](int) { return 0.0f; });
    F sum2[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) sum2[c] = lanes<F>([](int) { return 0.0f; });
    const char* const g6 = (const char*)p.a6;
    Raw<Bf16> w6[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const int col = ((part * CHUNKS + c) * T + lane) * V;
        const bool in = true;
        w6[c] = load<Bf16, 16, AGAIN>(g6 + (i64)col * 2, in);
    }
    {
        int u2;
        extern __shared__ char s_rows[];
        constexpr int STAGE = CHUNKS * T * ROWS * (int)(sizeof(Raw<Bf16>) + sizeof(Raw<Bf16>) + sizeof(Raw<Bf16>) + sizeof(Raw<Bf16>));
        const i64 step = (i64)(gridDim.x / PARTS) * ROWS;
        const i64 begin = (i64)(blockIdx.x / PARTS) * ROWS;
        for (int s = 0; s < STAGES - 1; ++s) {
            const i64 ahead = begin + s * step;
            if (ahead < (i64)p.rows) {
                const bool live = ROWS == 1 || ahead + group < (i64)p.rows;
                const i64 row = live ? ahead + group : (i64)p.rows - 1;
                const char* const g0 = (const char*)p.a0 + row * (i64)p.s0_0;
                const char* const g1 = (const char*)p.a1;
                const char* const g2 = (const char*)p.a2;
                const char* const g3 = (const char*)p.a3 + row * (i64)p.s3_0;
                const char* const g4 = (const char*)p.a4 + row * (i64)p.s4_0;
                const char* const g8 = (const char*)p.a8 + row * (i64)p.s8_0;
                Raw<Bf16>* const n0 = (Raw<Bf16>*)(s_rows + s * STAGE) + threadIdx.x;
                Raw<Bf16>* const n3 = (Raw<Bf16>*)(s_rows + s * STAGE + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>)) + threadIdx.x;
                Raw<Bf16>* const n4 = (Raw<Bf16>*)(s_rows + s * STAGE + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>) + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>)) + threadIdx.x;
                Raw<Bf16>* const n8 = (Raw<Bf16>*)(s_rows + s * STAGE + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>) + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>) + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>)) + threadIdx.x;
#pragma unroll
                for (int c = 0; c < CHUNKS; ++c) {
                    const int col = ((part * CHUNKS + c) * T + lane) * V;
                    const bool in = true;
                    copy<Bf16, 16>(n0 + c * T * ROWS, g0 + (i64)col * 2, in);
                    copy<Bf16, 16>(n3 + c * T * ROWS, g3 + (i64)col * 2, in);
                    copy<Bf16, 16>(n4 + c * T * ROWS, g4 + (i64)col * 2, in);
                    copy<Bf16, 16>(n8 + c * T * ROWS, g8 + (i64)col * 2, in);
                }
            }
            commit_copies();
        }
        {
            const bool live = ROWS == 1 || begin + group < (i64)p.rows;
            const i64 row = live ? begin + group : (i64)p.rows - 1;
            const char* const g0 = (const char*)p.a0 + row * (i64)p.s0_0;
            const char* const g1 = (const char*)p.a1;
            const char* const g2 = (const char*)p.a2;
            const char* const g3 = (const char*)p.a3 + row * (i64)p.s3_0;
            const char* const g4 = (const char*)p.a4 + row * (i64)p.s4_0;
            const char* const g8 = (const char*)p.a8 + row * (i64)p.s8_0;
            u2 = load_one(I32{}, g2);
        }
        int turn = 0, stage = 0;
        for (i64 start = (i64)(blockIdx.x / PARTS) * ROWS; start < (i64)p.rows; start += (i64)(gridDim.x / PARTS) * ROWS, turn ^= 1) {
            const i64 ahead = start + (STAGES - 1) * step;
            if (ahead < (i64)p.rows) {
                const bool live = ROWS == 1 || ahead + group < (i64)p.rows;
                const i64 row = live ? ahead + group : (i64)p.rows - 1;
                const char* const g0 = (const char*)p.a0 + row * (i64)p.s0_0;
                const char* const g1 = (const char*)p.a1;
                const char* const g2 = (const char*)p.a2;
                const char* const g3 = (const char*)p.a3 + row * (i64)p.s3_0;
                const char* const g4 = (const char*)p.a4 + row * (i64)p.s4_0;
                const char* const g8 = (const char*)p.a8 + row * (i64)p.s8_0;
                Raw<Bf16>* const n0 = (Raw<Bf16>*)(s_rows + (stage == 0 ? STAGES - 1 : stage - 1) * STAGE) + threadIdx.x;
                Raw<Bf16>* const n3 = (Raw<Bf16>*)(s_rows + (stage == 0 ? STAGES - 1 : stage - 1) * STAGE + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>)) + threadIdx.x;
                Raw<Bf16>* const n4 = (Raw<Bf16>*)(s_rows + (stage == 0 ? STAGES - 1 : stage - 1) * STAGE + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>) + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>)) + threadIdx.x;
                Raw<Bf16>* const n8 = (Raw<Bf16>*)(s_rows + (stage == 0 ? STAGES - 1 : stage - 1) * STAGE + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>) + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>) + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>)) + threadIdx.x;
#pragma unroll
                for (int c = 0; c < CHUNKS; ++c) {
                    const int col = ((part * CHUNKS + c) * T + lane) * V;
                    const bool in = true;
                    copy<Bf16, 16>(n0 + c * T * ROWS, g0 + (i64)col * 2, in);
                    copy<Bf16, 16>(n3 + c * T * ROWS, g3 + (i64)col * 2, in);
                    copy<Bf16, 16>(n4 + c * T * ROWS, g4 + (i64)col * 2, in);
                    copy<Bf16, 16>(n8 + c * T * ROWS, g8 + (i64)col * 2, in);
                }
            }
            commit_copies();
            int v2;
            const i64 next = start + step;
            if (next < (i64)p.rows) {
                const bool live = ROWS == 1 || next + group < (i64)p.rows;
                const i64 row = live ? next + group : (i64)p.rows - 1;
                const char* const g0 = (const char*)p.a0 + row * (i64)p.s0_0;
                const char* const g1 = (const char*)p.a1;
                const char* const g2 = (const char*)p.a2;
                const char* const g3 = (const char*)p.a3 + row * (i64)p.s3_0;
                const char* const g4 = (const char*)p.a4 + row * (i64)p.s4_0;
                const char* const g8 = (const char*)p.a8 + row * (i64)p.s8_0;
                v2 = load_one(I32{}, g2);
            }
            await_copies<STAGES - 1>();
            Raw<Bf16>* const w0 = (Raw<Bf16>*)(s_rows + stage * STAGE) + threadIdx.x;
            Raw<Bf16>* const w3 = (Raw<Bf16>*)(s_rows + stage * STAGE + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>)) + threadIdx.x;
            Raw<Bf16>* const w4 = (Raw<Bf16>*)(s_rows + stage * STAGE + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>) + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>)) + threadIdx.x;
            Raw<Bf16>* const w8 = (Raw<Bf16>*)(s_rows + stage * STAGE + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>) + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>) + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>)) + threadIdx.x;
            const bool live = ROWS == 1 || start + group < (i64)p.rows;
            const i64 row = live ? start + group : (i64)p.rows - 1;
            char* const g9 = (char*)p.a9 + row * (i64)p.s9_0;
            char* const g10 = (char*)p.a10 + row * (i64)p.s10_0;
            const char* const g1 = (const char*)p.a1;
            Raw<Bf16> k13[CHUNKS];
            Raw<Bool> k7[CHUNKS];
            // sweep 0
            F f0_0 = lanes<F>([](int) { return Sum::start(); });
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                const int col = ((part * CHUNKS + c) * T + lane) * V;
                const bool in = true;
                const F e0 = value(w0[c * T * ROWS]);
                const F e1 = value(load<Bf16, 16, AGAIN>(g1 + (i64)col * 2, in));
                const F e2 = add2(e0, e1);
                const F e3 = round_bf16(e2);
                const F e5 = mul2(e3, 1.1111112e0f);
                const B e7 = keep<true>((u64)row * COLS + col, (u32)u2, 0u, 429496729u);
                k7[c] = Packer<Bool>::pack(e7);
                const F e9 = select<F>(e7, e5, 0e0f);
                const F e10 = round_bf16(e9);
                const F e11 = value(w3[c * T * ROWS]);
                const F e12 = add2(e11, e10);
                const F e13 = round_bf16(e12);
                k13[c] = Packer<Bf16>::pack(e13);
                const F e24 = value(w4[c * T * ROWS]);
                if (in) f0_0 = lanes<F>([&](int i) { return Sum::both(f0_0.v[i], at(e13, i)); });
                if (live) sum0[c] = lanes<F>([&](int i) { return sum0[c].v[i] + at(e24, i); });
            }
            const float r0_all = butterfly<Sum, 32>(gather_lanes<Sum>(f0_0));
            const float r0 = r0_all;
            // sweep 1
            const float e16 = mul2(r0, 1.3020834e-3f);
            F f1_0 = lanes<F>([](int) { return Sum::start(); });
            F f1_1 = lanes<F>([](int) { return Sum::start(); });
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                const int col = ((part * CHUNKS + c) * T + lane) * V;
                const bool in = true;
                const F e13 = value(k13[c]);
                const F e17 = sub2(e13, e16);
                const F e18 = mul2(e17, e17);
                const F e24 = value(w4[c * T * ROWS]);
                const F e25 = value(w6[c]);
                const F e26 = whole2(e24, e25);
                const F e30 = mul2(e26, e17);
                if (in) f1_0 = lanes<F>([&](int i) { return Sum::both(f1_0.v[i], at(e18, i)); });
                if (in) f1_1 = lanes<F>([&](int i) { return Sum::both(f1_1.v[i], at(e30, i)); });
            }
            const float r1_all = butterfly<Sum, 32>(gather_lanes<Sum>(f1_0));
            const float r2_all = butterfly<Sum, 32>(gather_lanes<Sum>(f1_1));
            const float r1 = r1_all;
            const float r2 = r2_all;
            // sweep 2
            const float e20 = mul2(r1, 1.3020834e-3f);
            const float e22 = add2(e20, 1e-5f);
            const float e23 = rsqrt1(e22);
            const float e32 = mul2(e23, e23);
            const float e33 = mul2(e32, e23);
            const float e35 = mul2(e33, -5e-1f);
            const float e36 = mul2(r2, e35);
            const float e37 = mul2(e36, 1.3020834e-3f);
            F f2_0 = lanes<F>([](int) { return Sum::start(); });
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                const int col = ((part * CHUNKS + c) * T + lane) * V;
                const bool in = true;
                const F e13 = value(k13[c]);
                const F e17 = sub2(e13, e16);
                const F e24 = value(w4[c * T * ROWS]);
                const F e25 = value(w6[c]);
                const F e26 = whole2(e24, e25);
                const F e27 = mul2(e17, e23);
                const F e28 = mul2(e24, e27);
                const F e29 = mul2(e26, e23);
                const F e38 = whole2(e37, e17);
                const F e39 = add2(e29, e38);
                const F e40 = add2(e39, e38);
                const F e41 = neg1(e40);
                if (live) sum1[c] = lanes<F>([&](int i) { return sum1[c].v[i] + at(e28, i); });
                if (in) f2_0 = lanes<F>([&](int i) { return Sum::both(f2_0.v[i], at(e41, i)); });
            }
            const float r3_all = butterfly<Sum, 32>(gather_lanes<Sum>(f2_0));
            const float r3 = r3_all;
            // sweep 3
            const float e43 = mul2(r3, 1.3020834e-3f);
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                const int col = ((part * CHUNKS + c) * T + lane) * V;
                const bool in = true;
                const F e13 = value(k13[c]);
                const F e17 = sub2(e13, e16);
                const F e24 = value(w4[c * T * ROWS]);
                const F e25 = value(w6[c]);
                const F e26 = whole2(e24, e25);
                const F e29 = mul2(e26, e23);
                const F e38 = whole2(e37, e17);
                const F e39 = add2(e29, e38);
                const F e40 = add2(e39, e38);
                const F e44 = add2(e40, e43);
                const F e45 = round_bf16(e44);
                const F e46 = value(w8[c * T * ROWS]);
                const F e47 = add2(e46, e45);
                const F e48 = round_bf16(e47);
                const B e7 = value(k7[c]);
                const F e49 = select<F>(e7, e48, 0e0f);
                const F e50 = whole2(e49, 1.1111112e0f);
                const F e51 = round_bf16(e50);
                store<Bf16, 16>(g9 + (i64)col * 2, e47, live && in);
                store<Bf16, 16>(g10 + (i64)col * 2, e50, live && in);
                if (live) sum2[c] = lanes<F>([&](int i) { return sum2[c].v[i] + at(e51, i); });
            }
            u2 = v2;
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
    }
    {
        __shared__ float s_sum[COLS];
        for (int turn = 0; turn < ROWS; ++turn) {
            if (group == turn) {
#pragma unroll
                for (int c = 0; c < CHUNKS; ++c) {
                    const int col = (c * T + lane) * V;
#pragma unroll
                    for (int i = 0; i < V; ++i) {
                        if (col < COLS) s_sum[col + i] = turn == 0 ? sum0[c].v[i] : s_sum[col + i] + sum0[c].v[i];
                    }
                }
            }
            __syncthreads();
        }
        float* const g_sum = (float*)p.workspace + (i64)0 * (gridDim.x / PARTS) + (i64)(blockIdx.x / PARTS) * 768;
        for (int i = threadIdx.x; i < COLS; i += T * ROWS) g_sum[i] = s_sum[i];
        __syncthreads();
    }
    {
        __shared__ float s_sum[COLS];
        for (int turn = 0; turn < ROWS; ++turn) {
            if (group == turn) {
#pragma unroll
                for (int c = 0; c < CHUNKS; ++c) {
                    const int col = (c * T + lane) * V;
#pragma unroll
                    for (int i = 0; i < V; ++i) {
                        if (col < COLS) s_sum[col + i] = turn == 0 ? sum1[c].v[i] : s_sum[col + i] + sum1[c].v[i];
                    }
                }
            }
            __syncthreads();
        }
        float* const g_sum = (float*)p.workspace + (i64)768 * (gridDim.x / PARTS) + (i64)(blockIdx.x / PARTS) * 768;
        for (int i = threadIdx.x; i < COLS; i += T * ROWS) g_sum[i] = s_sum[i];
        __syncthreads();
    }
    {
        __shared__ float s_sum[COLS];
        for (int turn = 0; turn < ROWS; ++turn) {
            if (group == turn) {
#pragma unroll
                for (int c = 0; c < CHUNKS; ++c) {
                    const int col = (c * T + lane) * V;
#pragma unroll
                    for (int i = 0; i < V; ++i) {
                        if (col < COLS) s_sum[col + i] = turn == 0 ? sum2[c].v[i] : s_sum[col + i] + sum2[c].v[i];
                    }
                }
            }
            __syncthreads();
        }
        float* const g_sum = (float*)p.workspace + (i64)1536 * (gridDim.x / PARTS) + (i64)(blockIdx.x / PARTS) * 768;
        for (int i = threadIdx.x; i < COLS; i += T * ROWS) g_sum[i] = s_sum[i];
        __syncthreads();
    }
}

struct FinishParameters {
    unsigned long long workspace, blocks;
    unsigned long long a5;
    unsigned long long a7;
    unsigned long long a11;
};

extern "C" __global__ void __launch_bounds__(1024) finish(const __grid_constant__ FinishParameters p) {
    if (blockIdx.y == 0 && blockIdx.x * 32 < 768) finish_columns<Bf16>((const float*)p.workspace + 0 * p.blocks, p.blocks, 768, (char*)p.a5);
    if (blockIdx.y == 1 && blockIdx.x * 32 < 768) finish_columns<Bf16>((const float*)p.workspace + 768 * p.blocks, p.blocks, 768, (char*)p.a7);
    if (blockIdx.y == 2 && blockIdx.x * 32 < 768) finish_columns<Bf16>((const float*)p.workspace + 1536 * p.blocks, p.blocks, 768, (char*)p.a11);
}
