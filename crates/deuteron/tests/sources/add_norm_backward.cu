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
    unsigned long long s1_0;
    unsigned long long a2;
    unsigned long long s2_0;
    unsigned long long a3;
    unsigned long long a4;
    unsigned long long a5;
    unsigned long long a6;
    unsigned long long s6_0;
    unsigned long long a7;
    unsigned long long s7_0;
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
    const char* const g4 = (const char*)p.a4;
    Raw<Bf16> w4[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const int col = ((part * CHUNKS + c) * T + lane) * V;
        const bool in = true;
        w4[c] = load<Bf16, 16, AGAIN>(g4 + (i64)col * 2, in);
    }
    {
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
                const char* const g1 = (const char*)p.a1 + row * (i64)p.s1_0;
                const char* const g2 = (const char*)p.a2 + row * (i64)p.s2_0;
                const char* const g6 = (const char*)p.a6 + row * (i64)p.s6_0;
                Raw<Bf16>* const n0 = (Raw<Bf16>*)(s_rows + s * STAGE) + threadIdx.x;
                Raw<Bf16>* const n1 = (Raw<Bf16>*)(s_rows + s * STAGE + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>)) + threadIdx.x;
                Raw<Bf16>* const n2 = (Raw<Bf16>*)(s_rows + s * STAGE + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>) + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>)) + threadIdx.x;
                Raw<Bf16>* const n6 = (Raw<Bf16>*)(s_rows + s * STAGE + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>) + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>) + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>)) + threadIdx.x;
#pragma unroll
                for (int c = 0; c < CHUNKS; ++c) {
                    const int col = ((part * CHUNKS + c) * T + lane) * V;
                    const bool in = true;
                    copy<Bf16, 16>(n0 + c * T * ROWS, g0 + (i64)col * 2, in);
                    copy<Bf16, 16>(n1 + c * T * ROWS, g1 + (i64)col * 2, in);
                    copy<Bf16, 16>(n2 + c * T * ROWS, g2 + (i64)col * 2, in);
                    copy<Bf16, 16>(n6 + c * T * ROWS, g6 + (i64)col * 2, in);
                }
            }
            commit_copies();
        }
        {
            const bool live = ROWS == 1 || begin + group < (i64)p.rows;
            const i64 row = live ? begin + group : (i64)p.rows - 1;
            const char* const g0 = (const char*)p.a0 + row * (i64)p.s0_0;
            const char* const g1 = (const char*)p.a1 + row * (i64)p.s1_0;
            const char* const g2 = (const char*)p.a2 + row * (i64)p.s2_0;
            const char* const g6 = (const char*)p.a6 + row * (i64)p.s6_0;
        }
        int turn = 0, stage = 0;
        for (i64 start = (i64)(blockIdx.x / PARTS) * ROWS; start < (i64)p.rows; start += (i64)(gridDim.x / PARTS) * ROWS, turn ^= 1) {
            const i64 ahead = start + (STAGES - 1) * step;
            if (ahead < (i64)p.rows) {
                const bool live = ROWS == 1 || ahead + group < (i64)p.rows;
                const i64 row = live ? ahead + group : (i64)p.rows - 1;
                const char* const g0 = (const char*)p.a0 + row * (i64)p.s0_0;
                const char* const g1 = (const char*)p.a1 + row * (i64)p.s1_0;
                const char* const g2 = (const char*)p.a2 + row * (i64)p.s2_0;
                const char* const g6 = (const char*)p.a6 + row * (i64)p.s6_0;
                Raw<Bf16>* const n0 = (Raw<Bf16>*)(s_rows + (stage == 0 ? STAGES - 1 : stage - 1) * STAGE) + threadIdx.x;
                Raw<Bf16>* const n1 = (Raw<Bf16>*)(s_rows + (stage == 0 ? STAGES - 1 : stage - 1) * STAGE + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>)) + threadIdx.x;
                Raw<Bf16>* const n2 = (Raw<Bf16>*)(s_rows + (stage == 0 ? STAGES - 1 : stage - 1) * STAGE + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>) + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>)) + threadIdx.x;
                Raw<Bf16>* const n6 = (Raw<Bf16>*)(s_rows + (stage == 0 ? STAGES - 1 : stage - 1) * STAGE + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>) + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>) + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>)) + threadIdx.x;
#pragma unroll
                for (int c = 0; c < CHUNKS; ++c) {
                    const int col = ((part * CHUNKS + c) * T + lane) * V;
                    const bool in = true;
                    copy<Bf16, 16>(n0 + c * T * ROWS, g0 + (i64)col * 2, in);
                    copy<Bf16, 16>(n1 + c * T * ROWS, g1 + (i64)col * 2, in);
                    copy<Bf16, 16>(n2 + c * T * ROWS, g2 + (i64)col * 2, in);
                    copy<Bf16, 16>(n6 + c * T * ROWS, g6 + (i64)col * 2, in);
                }
            }
            commit_copies();
            await_copies<STAGES - 1>();
            Raw<Bf16>* const w0 = (Raw<Bf16>*)(s_rows + stage * STAGE) + threadIdx.x;
            Raw<Bf16>* const w1 = (Raw<Bf16>*)(s_rows + stage * STAGE + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>)) + threadIdx.x;
            Raw<Bf16>* const w2 = (Raw<Bf16>*)(s_rows + stage * STAGE + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>) + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>)) + threadIdx.x;
            Raw<Bf16>* const w6 = (Raw<Bf16>*)(s_rows + stage * STAGE + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>) + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>) + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>)) + threadIdx.x;
            const bool live = ROWS == 1 || start + group < (i64)p.rows;
            const i64 row = live ? start + group : (i64)p.rows - 1;
            char* const g7 = (char*)p.a7 + row * (i64)p.s7_0;
            Raw<Bf16> k3[CHUNKS];
            // sweep 0
            F f0_0 = lanes<F>([](int) { return Sum::start(); });
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                const int col = ((part * CHUNKS + c) * T + lane) * V;
                const bool in = true;
                const F e0 = value(w0[c * T * ROWS]);
                const F e1 = value(w1[c * T * ROWS]);
                const F e2 = add2(e0, e1);
                const F e3 = round_bf16(e2);
                k3[c] = Packer<Bf16>::pack(e3);
                const F e14 = value(w2[c * T * ROWS]);
                if (in) f0_0 = lanes<F>([&](int i) { return Sum::both(f0_0.v[i], at(e3, i)); });
                if (live) sum0[c] = lanes<F>([&](int i) { return sum0[c].v[i] + at(e14, i); });
            }
            const float r0_all = butterfly<Sum, 32>(gather_lanes<Sum>(f0_0));
            const float r0 = r0_all;
            // sweep 1
            const float e6 = mul2(r0, 1.3020834e-3f);
            F f1_0 = lanes<F>([](int) { return Sum::start(); });
            F f1_1 = lanes<F>([](int) { return Sum::start(); });
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                const int col = ((part * CHUNKS + c) * T + lane) * V;
                const bool in = true;
                const F e3 = value(k3[c]);
                const F e7 = sub2(e3, e6);
                const F e8 = mul2(e7, e7);
                const F e14 = value(w2[c * T * ROWS]);
                const F e15 = value(w4[c]);
                const F e16 = whole2(e14, e15);
                const F e20 = mul2(e16, e7);
                if (in) f1_0 = lanes<F>([&](int i) { return Sum::both(f1_0.v[i], at(e8, i)); });
                if (in) f1_1 = lanes<F>([&](int i) { return Sum::both(f1_1.v[i], at(e20, i)); });
            }
            const float r1_all = butterfly<Sum, 32>(gather_lanes<Sum>(f1_0));
            const float r2_all = butterfly<Sum, 32>(gather_lanes<Sum>(f1_1));
            const float r1 = r1_all;
            const float r2 = r2_all;
            // sweep 2
            const float e10 = mul2(r1, 1.3020834e-3f);
            const float e12 = add2(e10, 1e-5f);
            const float e13 = rsqrt1(e12);
            const float e22 = mul2(e13, e13);
            const float e23 = mul2(e22, e13);
            const float e25 = mul2(e23, -5e-1f);
            const float e26 = mul2(r2, e25);
            const float e27 = mul2(e26, 1.3020834e-3f);
            F f2_0 = lanes<F>([](int) { return Sum::start(); });
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                const int col = ((part * CHUNKS + c) * T + lane) * V;
                const bool in = true;
                const F e3 = value(k3[c]);
                const F e7 = sub2(e3, e6);
                const F e14 = value(w2[c * T * ROWS]);
                const F e15 = value(w4[c]);
                const F e16 = whole2(e14, e15);
                const F e17 = mul2(e7, e13);
                const F e18 = mul2(e14, e17);
                const F e19 = mul2(e16, e13);
                const F e28 = whole2(e27, e7);
                const F e29 = add2(e19, e28);
                const F e30 = add2(e29, e28);
                const F e31 = neg1(e30);
                if (live) sum1[c] = lanes<F>([&](int i) { return sum1[c].v[i] + at(e18, i); });
                if (in) f2_0 = lanes<F>([&](int i) { return Sum::both(f2_0.v[i], at(e31, i)); });
            }
            const float r3_all = butterfly<Sum, 32>(gather_lanes<Sum>(f2_0));
            const float r3 = r3_all;
            // sweep 3
            const float e33 = mul2(r3, 1.3020834e-3f);
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                const int col = ((part * CHUNKS + c) * T + lane) * V;
                const bool in = true;
                const F e3 = value(k3[c]);
                const F e7 = sub2(e3, e6);
                const F e14 = value(w2[c * T * ROWS]);
                const F e15 = value(w4[c]);
                const F e16 = whole2(e14, e15);
                const F e19 = mul2(e16, e13);
                const F e28 = whole2(e27, e7);
                const F e29 = add2(e19, e28);
                const F e30 = add2(e29, e28);
                const F e34 = add2(e30, e33);
                const F e35 = round_bf16(e34);
                const F e36 = value(w6[c * T * ROWS]);
                const F e37 = add2(e36, e35);
                store<Bf16, 16>(g7 + (i64)col * 2, e37, live && in);
            }
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
    unsigned long long a3;
    unsigned long long a5;
};

extern "C" __global__ void __launch_bounds__(1024) finish(const __grid_constant__ FinishParameters p) {
    if (blockIdx.y == 0 && blockIdx.x * 32 < 768) finish_columns<Bf16>((const float*)p.workspace + 0 * p.blocks, p.blocks, 768, (char*)p.a3);
    if (blockIdx.y == 1 && blockIdx.x * 32 < 768) finish_columns<Bf16>((const float*)p.workspace + 768 * p.blocks, p.blocks, 768, (char*)p.a5);
}
