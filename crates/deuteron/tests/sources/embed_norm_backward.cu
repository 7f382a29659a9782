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
    unsigned long long n1;
    unsigned long long a2;
    unsigned long long s2_0;
    unsigned long long a3;
    unsigned long long s3_0;
    unsigned long long a4;
    unsigned long long a5;
    unsigned long long a6;
    unsigned long long a7;
    unsigned long long s7_0;
    unsigned long long a8;
    unsigned long long s8_0;
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
    const char* const g5 = (const char*)p.a5;
    Raw<Bf16> w5[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const int col = ((part * CHUNKS + c) * T + lane) * V;
        const bool in = true;
        w5[c] = load<Bf16, 16, AGAIN>(g5 + (i64)col * 2, in);
    }
    {
        int u0;
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
                const char* const g2 = (const char*)p.a2 + row * (i64)p.s2_0;
                const char* const g3 = (const char*)p.a3 + row * (i64)p.s3_0;
                const char* const g7 = (const char*)p.a7 + row * (i64)p.s7_0;
                int x1 = load_one(I32{}, g0);
                if (x1 < 0 || (u64)x1 >= p.n1) {
                    if (live && lane == 0 && part == 0) atomicMin((u64*)p.fault, (u64)row * 256 + 1);
                    x1 = 0;
                }
                const char* const g1 = (const char*)p.a1 + (i64)x1 * (i64)p.s1_0;
                Raw<Bf16>* const n1 = (Raw<Bf16>*)(s_rows + s * STAGE) + threadIdx.x;
                Raw<Bf16>* const n2 = (Raw<Bf16>*)(s_rows + s * STAGE + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>)) + threadIdx.x;
                Raw<Bf16>* const n3 = (Raw<Bf16>*)(s_rows + s * STAGE + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>) + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>)) + threadIdx.x;
                Raw<Bf16>* const n7 = (Raw<Bf16>*)(s_rows + s * STAGE + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>) + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>) + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>)) + threadIdx.x;
#pragma unroll
                for (int c = 0; c < CHUNKS; ++c) {
                    const int col = ((part * CHUNKS + c) * T + lane) * V;
                    const bool in = true;
                    copy<Bf16, 16>(n1 + c * T * ROWS, g1 + (i64)col * 2, in);
                    copy<Bf16, 16>(n2 + c * T * ROWS, g2 + (i64)col * 2, in);
                    copy<Bf16, 16>(n3 + c * T * ROWS, g3 + (i64)col * 2, in);
                    copy<Bf16, 16>(n7 + c * T * ROWS, g7 + (i64)col * 2, in);
                }
            }
            commit_copies();
        }
        {
            const bool live = ROWS == 1 || begin + group < (i64)p.rows;
            const i64 row = live ? begin + group : (i64)p.rows - 1;
            const char* const g0 = (const char*)p.a0 + row * (i64)p.s0_0;
            const char* const g2 = (const char*)p.a2 + row * (i64)p.s2_0;
            const char* const g3 = (const char*)p.a3 + row * (i64)p.s3_0;
            const char* const g7 = (const char*)p.a7 + row * (i64)p.s7_0;
            int x1 = load_one(I32{}, g0);
            if (x1 < 0 || (u64)x1 >= p.n1) {
                if (live && lane == 0 && part == 0) atomicMin((u64*)p.fault, (u64)row * 256 + 1);
                x1 = 0;
            }
            const char* const g1 = (const char*)p.a1 + (i64)x1 * (i64)p.s1_0;
            u0 = load_one(I32{}, g0);
        }
        int turn = 0, stage = 0;
        for (i64 start = (i64)(blockIdx.x / PARTS) * ROWS; start < (i64)p.rows; start += (i64)(gridDim.x / PARTS) * ROWS, turn ^= 1) {
            const i64 ahead = start + (STAGES - 1) * step;
            if (ahead < (i64)p.rows) {
                const bool live = ROWS == 1 || ahead + group < (i64)p.rows;
                const i64 row = live ? ahead + group : (i64)p.rows - 1;
                const char* const g0 = (const char*)p.a0 + row * (i64)p.s0_0;
                const char* const g2 = (const char*)p.a2 + row * (i64)p.s2_0;
                const char* const g3 = (const char*)p.a3 + row * (i64)p.s3_0;
                const char* const g7 = (const char*)p.a7 + row * (i64)p.s7_0;
                int x1 = load_one(I32{}, g0);
                if (x1 < 0 || (u64)x1 >= p.n1) {
                    if (live && lane == 0 && part == 0) atomicMin((u64*)p.fault, (u64)row * 256 + 1);
                    x1 = 0;
                }
                const char* const g1 = (const char*)p.a1 + (i64)x1 * (i64)p.s1_0;
                Raw<Bf16>* const n1 = (Raw<Bf16>*)(s_rows + (stage == 0 ? STAGES - 1 : stage - 1) * STAGE) + threadIdx.x;
                Raw<Bf16>* const n2 = (Raw<Bf16>*)(s_rows + (stage == 0 ? STAGES - 1 : stage - 1) * STAGE + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>)) + threadIdx.x;
                Raw<Bf16>* const n3 = (Raw<Bf16>*)(s_rows + (stage == 0 ? STAGES - 1 : stage - 1) * STAGE + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>) + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>)) + threadIdx.x;
                Raw<Bf16>* const n7 = (Raw<Bf16>*)(s_rows + (stage == 0 ? STAGES - 1 : stage - 1) * STAGE + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>) + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>) + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>)) + threadIdx.x;
#pragma unroll
                for (int c = 0; c < CHUNKS; ++c) {
                    const int col = ((part * CHUNKS + c) * T + lane) * V;
                    const bool in = true;
                    copy<Bf16, 16>(n1 + c * T * ROWS, g1 + (i64)col * 2, in);
                    copy<Bf16, 16>(n2 + c * T * ROWS, g2 + (i64)col * 2, in);
                    copy<Bf16, 16>(n3 + c * T * ROWS, g3 + (i64)col * 2, in);
                    copy<Bf16, 16>(n7 + c * T * ROWS, g7 + (i64)col * 2, in);
                }
            }
            commit_copies();
            int v0;
            const i64 next = start + step;
            if (next < (i64)p.rows) {
                const bool live = ROWS == 1 || next + group < (i64)p.rows;
                const i64 row = live ? next + group : (i64)p.rows - 1;
                const char* const g0 = (const char*)p.a0 + row * (i64)p.s0_0;
                const char* const g2 = (const char*)p.a2 + row * (i64)p.s2_0;
                const char* const g3 = (const char*)p.a3 + row * (i64)p.s3_0;
                const char* const g7 = (const char*)p.a7 + row * (i64)p.s7_0;
                int x1 = load_one(I32{}, g0);
                if (x1 < 0 || (u64)x1 >= p.n1) {
                    if (live && lane == 0 && part == 0) atomicMin((u64*)p.fault, (u64)row * 256 + 1);
                    x1 = 0;
                }
                const char* const g1 = (const char*)p.a1 + (i64)x1 * (i64)p.s1_0;
                v0 = load_one(I32{}, g0);
            }
            await_copies<STAGES - 1>();
            Raw<Bf16>* const w1 = (Raw<Bf16>*)(s_rows + stage * STAGE) + threadIdx.x;
            Raw<Bf16>* const w2 = (Raw<Bf16>*)(s_rows + stage * STAGE + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>)) + threadIdx.x;
            Raw<Bf16>* const w3 = (Raw<Bf16>*)(s_rows + stage * STAGE + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>) + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>)) + threadIdx.x;
            Raw<Bf16>* const w7 = (Raw<Bf16>*)(s_rows + stage * STAGE + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>) + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>) + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>)) + threadIdx.x;
            const bool live = ROWS == 1 || start + group < (i64)p.rows;
            const i64 row = live ? start + group : (i64)p.rows - 1;
            char* const g8 = (char*)p.a8 + row * (i64)p.s8_0;
            Raw<Bf16> k4[CHUNKS];
            // sweep 0
            F f0_0 = lanes<F>([](int) { return Sum::start(); });
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                const int col = ((part * CHUNKS + c) * T + lane) * V;
                const bool in = true;
                const F e1 = value(w1[c * T * ROWS]);
                const F e2 = value(w2[c * T * ROWS]);
                const F e3 = add2(e1, e2);
                const F e4 = round_bf16(e3);
                k4[c] = Packer<Bf16>::pack(e4);
                const F e15 = value(w3[c * T * ROWS]);
                if (in) f0_0 = lanes<F>([&](int i) { return Sum::both(f0_0.v[i], at(e4, i)); });
                if (live) sum0[c] = lanes<F>([&](int i) { return sum0[c].v[i] + at(e15, i); });
            }
            const float r0_all = butterfly<Sum, 32>(gather_lanes<Sum>(f0_0));
            const float r0 = r0_all;
            // sweep 1
            const float e7 = mul2(r0, 1.3020834e-3f);
            F f1_0 = lanes<F>([](int) { return Sum::start(); });
            F f1_1 = lanes<F>([](int) { return Sum::start(); });
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                const int col = ((part * CHUNKS + c) * T + lane) * V;
                const bool in = true;
                const F e4 = value(k4[c]);
                const F e8 = sub2(e4, e7);
                const F e9 = mul2(e8, e8);
                const F e15 = value(w3[c * T * ROWS]);
                const F e16 = value(w5[c]);
                const F e17 = whole2(e15, e16);
                const F e21 = mul2(e17, e8);
                if (in) f1_0 = lanes<F>([&](int i) { return Sum::both(f1_0.v[i], at(e9, i)); });
                if (in) f1_1 = lanes<F>([&](int i) { return Sum::both(f1_1.v[i], at(e21, i)); });
            }
            const float r1_all = butterfly<Sum, 32>(gather_lanes<Sum>(f1_0));
            const float r2_all = butterfly<Sum, 32>(gather_lanes<Sum>(f1_1));
            const float r1 = r1_all;
            const float r2 = r2_all;
            // sweep 2
            const float e11 = mul2(r1, 1.3020834e-3f);
            const float e13 = add2(e11, 1e-5f);
            const float e14 = rsqrt1(e13);
            const float e23 = mul2(e14, e14);
            const float e24 = mul2(e23, e14);
            const float e26 = mul2(e24, -5e-1f);
            const float e27 = mul2(r2, e26);
            const float e28 = mul2(e27, 1.3020834e-3f);
            F f2_0 = lanes<F>([](int) { return Sum::start(); });
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                const int col = ((part * CHUNKS + c) * T + lane) * V;
                const bool in = true;
                const F e4 = value(k4[c]);
                const F e8 = sub2(e4, e7);
                const F e15 = value(w3[c * T * ROWS]);
                const F e16 = value(w5[c]);
                const F e17 = whole2(e15, e16);
                const F e18 = mul2(e8, e14);
                const F e19 = mul2(e15, e18);
                const F e20 = mul2(e17, e14);
                const F e29 = whole2(e28, e8);
                const F e30 = add2(e20, e29);
                const F e31 = add2(e30, e29);
                const F e32 = neg1(e31);
                if (live) sum1[c] = lanes<F>([&](int i) { return sum1[c].v[i] + at(e19, i); });
                if (in) f2_0 = lanes<F>([&](int i) { return Sum::both(f2_0.v[i], at(e32, i)); });
            }
            const float r3_all = butterfly<Sum, 32>(gather_lanes<Sum>(f2_0));
            const float r3 = r3_all;
            // sweep 3
            const float e34 = mul2(r3, 1.3020834e-3f);
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                const int col = ((part * CHUNKS + c) * T + lane) * V;
                const bool in = true;
                const F e4 = value(k4[c]);
                const F e8 = sub2(e4, e7);
                const F e15 = value(w3[c * T * ROWS]);
                const F e16 = value(w5[c]);
                const F e17 = whole2(e15, e16);
                const F e20 = mul2(e17, e14);
                const F e29 = whole2(e28, e8);
                const F e30 = add2(e20, e29);
                const F e31 = add2(e30, e29);
                const F e35 = add2(e31, e34);
                const F e36 = round_bf16(e35);
                const F e37 = value(w7[c * T * ROWS]);
                const F e38 = add2(e37, e36);
                store<Bf16, 16>(g8 + (i64)col * 2, e38, live && in);
            }
            u0 = v0;
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
    unsigned long long a6;
};

extern "C" __global__ void __launch_bounds__(1024) finish(const __grid_constant__ FinishParameters p) {
    if (blockIdx.y == 0 && blockIdx.x * 32 < 768) finish_columns<Bf16>((const float*)p.workspace + 0 * p.blocks, p.blocks, 768, (char*)p.a4);
    if (blockIdx.y == 1 && blockIdx.x * 32 < 768) finish_columns<Bf16>((const float*)p.workspace + 768 * p.blocks, p.blocks, 768, (char*)p.a6);
}
