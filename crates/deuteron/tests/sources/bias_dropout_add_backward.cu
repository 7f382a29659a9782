// 32 threads per row, 4 rows per block, 24 columns per thread by 8, 3 resident blocks per multiprocessor, 3 rows ahead in shared memory: a warp holds the row
constexpr int V = 8;
constexpr int T = 32;
constexpr int ROWS = 4;
constexpr int CHUNKS = 3;
constexpr int PARTS = 1;
constexpr int STAGES = 4;
constexpr int COLS = 768;

struct Parameters {
    unsigned long long a0;
    unsigned long long a1;
    unsigned long long s1_0;
    unsigned long long a2;
    unsigned long long s2_0;
    unsigned long long a3;
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
    {
        int u0;
        extern __shared__ char s_rows[];
        constexpr int STAGE = CHUNKS * T * ROWS * (int)(sizeof(Raw<Bf16>));
        const i64 step = (i64)(gridDim.x / PARTS) * ROWS;
        const i64 begin = (i64)(blockIdx.x / PARTS) * ROWS;
        for (int s = 0; s < STAGES - 1; ++s) {
            const i64 ahead = begin + s * step;
            if (ahead < (i64)p.rows) {
                const bool live = ROWS == 1 || ahead + group < (i64)p.rows;
                const i64 row = live ? ahead + group : (i64)p.rows - 1;
                const char* const g0 = (const char*)p.a0;
                const char* const g1 = (const char*)p.a1 + row * (i64)p.s1_0;
                Raw<Bf16>* const n1 = (Raw<Bf16>*)(s_rows + s * STAGE) + threadIdx.x;
#pragma unroll
                for (int c = 0; c < CHUNKS; ++c) {
                    const int col = ((part * CHUNKS + c) * T + lane) * V;
                    const bool in = true;
                    copy<Bf16, 16>(n1 + c * T * ROWS, g1 + (i64)col * 2, in);
                }
            }
            commit_copies();
        }
        {
            const bool live = ROWS == 1 || begin + group < (i64)p.rows;
            const i64 row = live ? begin + group : (i64)p.rows - 1;
            const char* const g0 = (const char*)p.a0;
            const char* const g1 = (const char*)p.a1 + row * (i64)p.s1_0;
            u0 = load_one(I32{}, g0);
        }
        int turn = 0, stage = 0;
        for (i64 start = (i64)(blockIdx.x / PARTS) * ROWS; start < (i64)p.rows; start += (i64)(gridDim.x / PARTS) * ROWS, turn ^= 1) {
            const i64 ahead = start + (STAGES - 1) * step;
            if (ahead < (i64)p.rows) {
                const bool live = ROWS == 1 || ahead + group < (i64)p.rows;
                const i64 row = live ? ahead + group : (i64)p.rows - 1;
                const char* const g0 = (const char*)p.a0;
                const char* const g1 = (const char*)p.a1 + row * (i64)p.s1_0;
                Raw<Bf16>* const n1 = (Raw<Bf16>*)(s_rows + (stage == 0 ? STAGES - 1 : stage - 1) * STAGE) + threadIdx.x;
#pragma unroll
                for (int c = 0; c < CHUNKS; ++c) {
                    const int col = ((part * CHUNKS + c) * T + lane) * V;
                    const bool in = true;
                    copy<Bf16, 16>(n1 + c * T * ROWS, g1 + (i64)col * 2, in);
                }
            }
            commit_copies();
            int v0;
            const i64 next = start + step;
            if (next < (i64)p.rows) {
                const bool live = ROWS == 1 || next + group < (i64)p.rows;
                const i64 row = live ? next + group : (i64)p.rows - 1;
                const char* const g0 = (const char*)p.a0;
                const char* const g1 = (const char*)p.a1 + row * (i64)p.s1_0;
                v0 = load_one(I32{}, g0);
            }
            await_copies<STAGES - 1>();
            Raw<Bf16>* const w1 = (Raw<Bf16>*)(s_rows + stage * STAGE) + threadIdx.x;
            const bool live = ROWS == 1 || start + group < (i64)p.rows;
            const i64 row = live ? start + group : (i64)p.rows - 1;
            char* const g2 = (char*)p.a2 + row * (i64)p.s2_0;
            // sweep 0
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                const int col = ((part * CHUNKS + c) * T + lane) * V;
                const bool in = true;
                const B e1 = keep<true>((u64)row * COLS + col, (u32)u0, 0u, 429496729u);
                const F e2 = value(w1[c * T * ROWS]);
                const F e4 = select<F>(e1, e2, 0e0f);
                const F e6 = whole2(e4, 1.1111112e0f);
                const F e7 = round_bf16(e6);
                store<Bf16, 16>(g2 + (i64)col * 2, e6, live && in);
                if (live) sum0[c] = lanes<F>([&](int i) { return sum0[c].v[i] + at(e7, i); });
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
}

struct FinishParameters {
    unsigned long long workspace, blocks;
    unsigned long long a3;
};

extern "C" __global__ void __launch_bounds__(1024) finish(const __grid_constant__ FinishParameters p) {
    if (blockIdx.y == 0 && blockIdx.x * 32 < 768) finish_columns<Bf16>((const float*)p.workspace + 0 * p.blocks, p.blocks, 768, (char*)p.a3);
}
