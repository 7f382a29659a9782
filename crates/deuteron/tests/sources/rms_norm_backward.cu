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
    unsigned long long s2_0;
    unsigned long long a3;
    unsigned long long s3_0;
    unsigned long long a4;
    unsigned long long a5;
    unsigned long long s5_0;
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
    const char* const g1 = (const char*)p.a1;
    Raw<Bf16> w1[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const int col = ((part * CHUNKS + c) * T + lane) * V;
        const bool in = true;
        w1[c] = load<Bf16, 16, AGAIN>(g1 + (i64)col * 2, in);
    }
    {
        float u3;
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
                const char* const g2 = (const char*)p.a2 + row * (i64)p.s2_0;
                const char* const g3 = (const char*)p.a3 + row * (i64)p.s3_0;
                Raw<Bf16>* const n0 = (Raw<Bf16>*)(s_rows + s * STAGE) + threadIdx.x;
                Raw<Bf16>* const n2 = (Raw<Bf16>*)(s_rows + s * STAGE + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>)) + threadIdx.x;
#pragma unroll
                for (int c = 0; c < CHUNKS; ++c) {
                    const int col = ((part * CHUNKS + c) * T + lane) * V;
                    const bool in = true;
                    copy<Bf16, 16>(n0 + c * T * ROWS, g0 + (i64)col * 2, in);
                    copy<Bf16, 16>(n2 + c * T * ROWS, g2 + (i64)col * 2, in);
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
            u3 = load_one(F32{}, g3);
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
                Raw<Bf16>* const n0 = (Raw<Bf16>*)(s_rows + (stage == 0 ? STAGES - 1 : stage - 1) * STAGE) + threadIdx.x;
                Raw<Bf16>* const n2 = (Raw<Bf16>*)(s_rows + (stage == 0 ? STAGES - 1 : stage - 1) * STAGE + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>)) + threadIdx.x;
#pragma unroll
                for (int c = 0; c < CHUNKS; ++c) {
                    const int col = ((part * CHUNKS + c) * T + lane) * V;
                    const bool in = true;
                    copy<Bf16, 16>(n0 + c * T * ROWS, g0 + (i64)col * 2, in);
                    copy<Bf16, 16>(n2 + c * T * ROWS, g2 + (i64)col * 2, in);
                }
            }
            commit_copies();
            float v3;
            const i64 next = start + step;
            if (next < (i64)p.rows) {
                const bool live = ROWS == 1 || next + group < (i64)p.rows;
                const i64 row = live ? next + group : (i64)p.rows - 1;
                const char* const g0 = (const char*)p.a0 + row * (i64)p.s0_0;
                const char* const g2 = (const char*)p.a2 + row * (i64)p.s2_0;
                const char* const g3 = (const char*)p.a3 + row * (i64)p.s3_0;
                v3 = load_one(F32{}, g3);
            }
            await_copies<STAGES - 1>();
            Raw<Bf16>* const w0 = (Raw<Bf16>*)(s_rows + stage * STAGE) + threadIdx.x;
            Raw<Bf16>* const w2 = (Raw<Bf16>*)(s_rows + stage * STAGE + CHUNKS * T * ROWS * (int)sizeof(Raw<Bf16>)) + threadIdx.x;
            const bool live = ROWS == 1 || start + group < (i64)p.rows;
            const i64 row = live ? start + group : (i64)p.rows - 1;
            char* const g5 = (char*)p.a5 + row * (i64)p.s5_0;
            // sweep 0
            const float e10 = mul2(u3, u3);
            const float e11 = mul2(e10, u3);
            const float e13 = mul2(e11, -5e-1f);
            F f0_0 = lanes<F>([](int) { return Sum::start(); });
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                const int col = ((part * CHUNKS + c) * T + lane) * V;
                const bool in = true;
                const F e0 = value(w0[c * T * ROWS]);
                const F e1 = value(w1[c]);
                const F e2 = whole2(e0, e1);
                const F e3 = value(w2[c * T * ROWS]);
                const F e5 = mul2(e3, u3);
                const F e6 = mul2(e0, e5);
                const F e8 = mul2(e2, e3);
                if (live) sum0[c] = lanes<F>([&](int i) { return sum0[c].v[i] + at(e6, i); });
                if (in) f0_0 = lanes<F>([&](int i) { return Sum::both(f0_0.v[i], at(e8, i)); });
            }
            const float r0_all = butterfly<Sum, 32>(gather_lanes<Sum>(f0_0));
            const float r0 = r0_all;
            // sweep 1
            const float e14 = mul2(r0, e13);
            const float e16 = mul2(e14, 1.3020834e-3f);
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                const int col = ((part * CHUNKS + c) * T + lane) * V;
                const bool in = true;
                const F e0 = value(w0[c * T * ROWS]);
                const F e1 = value(w1[c]);
                const F e2 = whole2(e0, e1);
                const F e3 = value(w2[c * T * ROWS]);
                const F e7 = mul2(e2, u3);
                const F e17 = whole2(e16, e3);
                const F e18 = add2(e7, e17);
                const F e19 = add2(e18, e17);
                store<Bf16, 16>(g5 + (i64)col * 2, e19, live && in);
            }
            u3 = v3;
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
}

struct FinishParameters {
    unsigned long long workspace, blocks;
    unsigned long long a4;
};

extern "C" __global__ void __launch_bounds__(1024) finish(const __grid_constant__ FinishParameters p) {
    if (blockIdx.y == 0 && blockIdx.x * 32 < 768) finish_columns<Bf16>((const float*)p.workspace + 0 * p.blocks, p.blocks, 768, (char*)p.a4);
}
