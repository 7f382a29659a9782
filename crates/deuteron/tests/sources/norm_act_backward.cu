// 32 threads per row, 4 rows per block, 24 columns per thread by 8, 2 resident blocks per multiprocessor, 2 rows ahead in shared memory: a warp holds the row
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
    unsigned long long a5;
    unsigned long long a6;
    unsigned long long s6_0;
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
    const char* const g1 = (const char*)p.a1;
    Raw<Bf16> w1[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const int col = ((part * CHUNKS + c) * T + lane) * V;
        const bool in = true;
        w1[c] = load<Bf16, 16, AGAIN>(g1 + (i64)col * 2, in);
    }
    {
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
                const char* const g2 = (const char*)p.a2;
                const char* const g3 = (const char*)p.a3 + row * (i64)p.s3_0;
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
            const char* const g2 = (const char*)p.a2;
            const char* const g3 = (const char*)p.a3 + row * (i64)p.s3_0;
        }
        int turn = 0, stage = 0;
        for (i64 start = (i64)(blockIdx.x / PARTS) * ROWS; start < (i64)p.rows; start += (i64)(gridDim.x / PARTS) * ROWS, turn ^= 1) {
            const i64 ahead = start + (STAGES - 1) * step;
            if (ahead < (i64)p.rows) {
                const bool live = ROWS == 1 || ahead + group < (i64)p.rows;
                const i64 row = live ? ahead + group : (i64)p.rows - 1;
                const char* const g0 = (const char*)p.a0 + row * (i64)p.s0_0;
                const char* const g2 = (const char*)p.a2;
                const char* const g3 = (const char*)p.a3 + row * (i64)p.s3_0;
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
            await_copies<STAGES - 1>();
            Raw<Bf16>* const w0 = (Raw<Bf16>*)(s_rows + stage * STAGE) + threadIdx.x;
            Raw<Bf16>* const w3 = (Raw<Bf16>*)(s_rows + stage * STAGE + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>)) + threadIdx.x;
            const bool live = ROWS == 1 || start + group < (i64)p.rows;
            const i64 row = live ? start + group : (i64)p.rows - 1;
            char* const g6 = (char*)p.a6 + row * (i64)p.s6_0;
            const char* const g2 = (const char*)p.a2;
            Raw<Bf16> k40[CHUNKS];
            // sweep 0
            F f0_0 = lanes<F>([](int) { return Sum::start(); });
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                const int col = ((part * CHUNKS + c) * T + lane) * V;
                const bool in = true;
                const F e0 = value(w0[c * T * ROWS]);
                if (in) f0_0 = lanes<F>([&](int i) { return Sum::both(f0_0.v[i], at(e0, i)); });
            }
            const float r0_all = butterfly<Sum, 32>(gather_lanes<Sum>(f0_0));
            const float r0 = r0_all;
            // sweep 1
            const float e3 = mul2(r0, 1.3020834e-3f);
            F f1_0 = lanes<F>([](int) { return Sum::start(); });
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                const int col = ((part * CHUNKS + c) * T + lane) * V;
                const bool in = true;
                const F e0 = value(w0[c * T * ROWS]);
                const F e4 = sub2(e0, e3);
                const F e5 = mul2(e4, e4);
                if (in) f1_0 = lanes<F>([&](int i) { return Sum::both(f1_0.v[i], at(e5, i)); });
            }
            const float r1_all = butterfly<Sum, 32>(gather_lanes<Sum>(f1_0));
            const float r1 = r1_all;
            // sweep 2
            const float e7 = mul2(r1, 1.3020834e-3f);
            const float e9 = add2(e7, 1e-5f);
            const float e10 = rsqrt1(e9);
            const float e46 = mul2(e10, e10);
            const float e47 = mul2(e46, e10);
            const float e49 = mul2(e47, -5e-1f);
            F f2_0 = lanes<F>([](int) { return Sum::start(); });
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                const int col = ((part * CHUNKS + c) * T + lane) * V;
                const bool in = true;
                const F e0 = value(w0[c * T * ROWS]);
                const F e4 = sub2(e0, e3);
                const F e11 = whole2(e4, e10);
                const F e12 = value(w1[c]);
                const F e13 = mul2(e11, e12);
                const F e14 = value(load<Bf16, 16, AGAIN>(g2 + (i64)col * 2, in));
                const F e15 = add2(e13, e14);
                const F e16 = round_bf16(e15);
                const F e26 = value(w3[c * T * ROWS]);
                const F e39 = gelu_tanh_gradient2(e26, e16);
                const F e40 = round_bf16(e39);
                k40[c] = Packer<Bf16>::pack(e40);
                const F e41 = whole2(e40, e12);
                const F e42 = mul2(e40, e11);
                const F e44 = mul2(e41, e4);
                if (live) sum0[c] = lanes<F>([&](int i) { return sum0[c].v[i] + at(e40, i); });
                if (live) sum1[c] = lanes<F>([&](int i) { return sum1[c].v[i] + at(e42, i); });
                if (in) f2_0 = lanes<F>([&](int i) { return Sum::both(f2_0.v[i], at(e44, i)); });
            }
            const float r2_all = butterfly<Sum, 32>(gather_lanes<Sum>(f2_0));
            const float r2 = r2_all;
            // sweep 3
            const float e50 = mul2(r2, e49);
            const float e51 = mul2(e50, 1.3020834e-3f);
            F f3_0 = lanes<F>([](int) { return Sum::start(); });
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                const int col = ((part * CHUNKS + c) * T + lane) * V;
                const bool in = true;
                const F e0 = value(w0[c * T * ROWS]);
                const F e4 = sub2(e0, e3);
                const F e12 = value(w1[c]);
                const F e40 = value(k40[c]);
                const F e41 = whole2(e40, e12);
                const F e43 = mul2(e41, e10);
                const F e52 = whole2(e51, e4);
                const F e53 = add2(e43, e52);
                const F e54 = add2(e53, e52);
                const F e55 = neg1(e54);
                if (in) f3_0 = lanes<F>([&](int i) { return Sum::both(f3_0.v[i], at(e55, i)); });
            }
            const float r3_all = butterfly<Sum, 32>(gather_lanes<Sum>(f3_0));
            const float r3 = r3_all;
            // sweep 4
            const float e57 = mul2(r3, 1.3020834e-3f);
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                const int col = ((part * CHUNKS + c) * T + lane) * V;
                const bool in = true;
                const F e0 = value(w0[c * T * ROWS]);
                const F e4 = sub2(e0, e3);
                const F e12 = value(w1[c]);
                const F e40 = value(k40[c]);
                const F e41 = whole2(e40, e12);
                const F e43 = mul2(e41, e10);
                const F e52 = whole2(e51, e4);
                const F e53 = add2(e43, e52);
                const F e54 = add2(e53, e52);
                const F e58 = add2(e54, e57);
                store<Bf16, 16>(g6 + (i64)col * 2, e58, live && in);
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
    unsigned long long a4;
    unsigned long long a5;
};

extern "C" __global__ void __launch_bounds__(1024) finish(const __grid_constant__ FinishParameters p) {
    if (blockIdx.y == 0 && blockIdx.x * 32 < 768) finish_columns<Bf16>((const float*)p.workspace + 0 * p.blocks, p.blocks, 768, (char*)p.a4);
    if (blockIdx.y == 1 && blockIdx.x * 32 < 768) finish_columns<Bf16>((const float*)p.workspace + 768 * p.blocks, p.blocks, 768, (char*)p.a5);
}
