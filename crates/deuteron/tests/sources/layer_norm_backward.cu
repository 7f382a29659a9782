// 32 threads per row, 4 rows per block, 24 columns per thread by 8, 3 resident blocks per multiprocessor, 2 rows ahead in shared memory: a warp holds the row
constexpr int V = 8;
constexpr int T = 32;
constexpr int ROWS = 4;
constexpr int CHUNKS = 3;
constexpr int PARTS = 1;
constexpr int STAGES = 3;
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
    unsigned long long s5_0;
    unsigned long long a6;
    unsigned long long a7;
    unsigned long long s7_0;
    unsigned long long rows;
    unsigned long long fault;
    unsigned long long workspace;
};

extern "C" __global__ void __launch_bounds__(128, 3) row(const __grid_constant__ Parameters p) {
    const int lane = threadIdx.x % T, group = threadIdx.x / T;
    const int part = 0;
    F sum0[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) sum0[c] = lanes<F>([](int) { return 0.0f; });
    F sum1[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) sum1[c] = lanes<F>([](int) { return 0.0f; });
    const char* const g2 = (const char*)p.a2;
    Raw<Bf16> w2[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const int col = ((part * CHUNKS + c) * T + lane) * V;
        const bool in = true;
        w2[c] = load<Bf16, 16, AGAIN>(g2 + (i64)col * 2, in);
    }
    {
        float u4;
        float u5;
        extern __shared__ char s_rows[];
        constexpr int STAGE = CHUNKS * T * ROWS * (int)(sizeof(Raw<Bf16>) + sizeof(Raw<Bf16>));
        const i64 step = (i64)(gridDim.x / PARTS) * ROWS;
        const i64 begin = (i64)(blockIdx.x / PARTS) * ROWS;
        for (int s = 0; s < STAGES - 1; ++s) {
            const i64 ahead = begin + s * step;
            if (ahead < (i64)p.rows) {
                const bool live = ROWS == 1 || ahead + group < (i64)p.rows;
                const i64 row = live ? ahead + group : (i64)p.rows - 1;
                const char* const g0 = (const char*)p.a0 + row * (i64)p.s0_0;
                const char* const g3 = (const char*)p.a3 + row * (i64)p.s3_0;
                const char* const g4 = (const char*)p.a4 + row * (i64)p.s4_0;
                const char* const g5 = (const char*)p.a5 + row * (i64)p.s5_0;
                Raw<Bf16>* const n0 = (Raw<Bf16>*)(s_rows + s * STAGE) + threadIdx.x;
                Raw<Bf16>* const n3 = (Raw<Bf16>*)(s_rows + s * STAGE + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>)) + threadIdx.x;
#pragma unroll
                for (int c = 0; c < CHUNKS; ++c) {
                    const int col = ((part * CHUNKS + c) * T + lane) * V;
                    const bool in = true;
                    copy<Bf16, 16>(n0 + c * T * ROWS, g0 + (i64)col * 2, in);
                    copy<Bf16, 16>(n3 + c * T * ROWS, g3 + (i64)col * 2, in);
                }
            }
            commit_copies();
        }
        {
            const bool live = ROWS == 1 || begin + group < (i64)p.rows;
            const i64 row = live ? begin + group : (i64)p.rows - 1;
            const char* const g0 = (const char*)p.a0 + row * (i64)p.s0_0;
            const char* const g3 = (const char*)p.a3 + row * (i64)p.s3_0;
            const char* const g4 = (const char*)p.a4 + row * (i64)p.s4_0;
            const char* const g5 = (const char*)p.a5 + row * (i64)p.s5_0;
            u4 = load_one(F32{}, g4);
            u5 = load_one(F32{}, g5);
        }
        int turn = 0, stage = 0;
        for (i64 start = (i64)(blockIdx.x / PARTS) * ROWS; start < (i64)p.rows; start += (i64)(gridDim.x / PARTS) * ROWS, turn ^= 1) {
            const i64 ahead = start + (STAGES - 1) * step;
            if (ahead < (i64)p.rows) {
                const bool live = ROWS == 1 || ahead + group < (i64)p.rows;
                const i64 row = live ? ahead + group : (i64)p.rows - 1;
                const char* const g0 = (const char*)p.a0 + row * (i64)p.s0_0;
                const char* const g3 = (const char*)p.a3 + row * (i64)p.s3_0;
                const char* const g4 = (const char*)p.a4 + row * (i64)p.s4_0;
                const char* const g5 = (const char*)p.a5 + row * (i64)p.s5_0;
                Raw<Bf16>* const n0 = (Raw<Bf16>*)(s_rows + (stage == 0 ? STAGES - 1 : stage - 1) * STAGE) + threadIdx.x;
                Raw<Bf16>* const n3 = (Raw<Bf16>*)(s_rows + (stage == 0 ? STAGES - 1 : stage - 1) * STAGE + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>)) + threadIdx.x;
#pragma unroll
                for (int c = 0; c < CHUNKS; ++c) {
                    const int col = ((part * CHUNKS + c) * T + lane) * V;
                    const bool in = true;
                    copy<Bf16, 16>(n0 + c * T * ROWS, g0 + (i64)col * 2, in);
                    copy<Bf16, 16>(n3 + c * T * ROWS, g3 + (i64)col * 2, in);
                }
            }
            commit_copies();
            float v4;
            float v5;
            const i64 next = start + step;
            if (next < (i64)p.rows) {
                const bool live = ROWS == 1 || next + group < (i64)p.rows;
                const i64 row = live ? next + group : (i64)p.rows - 1;
                const char* const g0 = (const char*)p.a0 + row * (i64)p.s0_0;
                const char* const g3 = (const char*)p.a3 + row * (i64)p.s3_0;
                const char* const g4 = (const char*)p.a4 + row * (i64)p.s4_0;
                const char* const g5 = (const char*)p.a5 + row * (i64)p.s5_0;
                v4 = load_one(F32{}, g4);
                v5 = load_one(F32{}, g5);
            }
            await_copies<STAGES - 1>();
            Raw<Bf16>* const w0 = (Raw<Bf16>*)(s_rows + stage * STAGE) + threadIdx.x;
            Raw<Bf16>* const w3 = (Raw<Bf16>*)(s_rows + stage * STAGE + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>)) + threadIdx.x;
            const bool live = ROWS == 1 || start + group < (i64)p.rows;
            const i64 row = live ? start + group : (i64)p.rows - 1;
            char* const g7 = (char*)p.a7 + row * (i64)p.s7_0;
            // sweep 0
            const float e12 = mul2(u5, u5);
            const float e13 = mul2(e12, u5);
            const float e15 = mul2(e13, -5e-1f);
            F f0_0 = lanes<F>([](int) { return Sum::start(); });
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                const int col = ((part * CHUNKS + c) * T + lane) * V;
                const bool in = true;
                const F e0 = value(w0[c * T * ROWS]);
                const F e1 = value(w2[c]);
                const F e2 = whole2(e0, e1);
                const F e3 = value(w3[c * T * ROWS]);
                const F e5 = sub2(e3, u4);
                const F e7 = mul2(e5, u5);
                const F e8 = mul2(e0, e7);
                const F e10 = mul2(e2, e5);
                if (live) sum0[c] = lanes<F>([&](int i) { return sum0[c].v[i] + at(e0, i); });
                if (live) sum1[c] = lanes<F>([&](int i) { return sum1[c].v[i] + at(e8, i); });
                if (in) f0_0 = lanes<F>([&](int i) { return Sum::both(f0_0.v[i], at(e10, i)); });
            }
            const float r0_all = butterfly<Sum, 32>(gather_lanes<Sum>(f0_0));
            const float r0 = r0_all;
            // sweep 1
            const float e16 = mul2(r0, e15);
            const float e18 = mul2(e16, 1.3020834e-3f);
            F f1_0 = lanes<F>([](int) { return Sum::start(); });
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                const int col = ((part * CHUNKS + c) * T + lane) * V;
                const bool in = true;
                const F e0 = value(w0[c * T * ROWS]);
                const F e1 = value(w2[c]);
                const F e2 = whole2(e0, e1);
                const F e3 = value(w3[c * T * ROWS]);
                const F e5 = sub2(e3, u4);
                const F e9 = mul2(e2, u5);
                const F e19 = whole2(e18, e5);
                const F e20 = add2(e9, e19);
                const F e21 = add2(e20, e19);
                const F e22 = neg1(e21);
                if (in) f1_0 = lanes<F>([&](int i) { return Sum::both(f1_0.v[i], at(e22, i)); });
            }
            const float r1_all = butterfly<Sum, 32>(gather_lanes<Sum>(f1_0));
            const float r1 = r1_all;
            // sweep 2
            const float e24 = mul2(r1, 1.3020834e-3f);
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                const int col = ((part * CHUNKS + c) * T + lane) * V;
                const bool in = true;
                const F e0 = value(w0[c * T * ROWS]);
                const F e1 = value(w2[c]);
                const F e2 = whole2(e0, e1);
                const F e3 = value(w3[c * T * ROWS]);
                const F e5 = sub2(e3, u4);
                const F e9 = mul2(e2, u5);
                const F e19 = whole2(e18, e5);
                const F e20 = add2(e9, e19);
                const F e21 = add2(e20, e19);
                const F e25 = add2(e21, e24);
                store<Bf16, 16>(g7 + (i64)col * 2, e25, live && in);
            }
            u4 = v4;
            u5 = v5;
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
}

struct FinishParameters {
    unsigned long long workspace, blocks;
    unsigned long long a1;
    unsigned long long a6;
};

extern "C" __global__ void __launch_bounds__(1024) finish(const __grid_constant__ FinishParameters p) {
    if (blockIdx.y == 0 && blockIdx.x * 32 < 768) finish_columns<Bf16>((const float*)p.workspace + 0 * p.blocks, p.blocks, 768, (char*)p.a1);
    if (blockIdx.y == 1 && blockIdx.x * 32 < 768) finish_columns<Bf16>((const float*)p.workspace + 768 * p.blocks, p.blocks, 768, (char*)p.a6);
}
