// 192 threads per row, 1 rows per block, 32 columns per thread by 8, 2 resident blocks per multiprocessor, 2 rows ahead in shared memory: 6 warps hold the row
constexpr int V = 8;
constexpr int T = 192;
constexpr int ROWS = 1;
constexpr int CHUNKS = 4;
constexpr int PARTS = 1;
constexpr int STAGES = 3;
constexpr int COLS = 6144;

struct Parameters {
    unsigned long long a0;
    unsigned long long s0_0;
    unsigned long long a1;
    unsigned long long rows;
    unsigned long long fault;
    unsigned long long workspace;
};

extern "C" __global__ void __launch_bounds__(192, 2) row(const __grid_constant__ Parameters p) {
    const int lane = threadIdx.x % T, group = threadIdx.x / T;
    const int part = 0;
    __shared__ float s_reduce[2][1][6];
    F sum0[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) sum0[c] = lanes<F>([](int) { return 0.0f; });
    {
        extern __shared__ char s_rows[];
        constexpr int STAGE = CHUNKS * T * ROWS * (int)(sizeof(Raw<Bf16>));
        const i64 step = (i64)(gridDim.x / PARTS) * ROWS;
        const i64 begin = (i64)(blockIdx.x / PARTS) * ROWS;
        for (int s = 0; s < STAGES - 1; ++s) {
            const i64 ahead = begin + s * step;
            if (ahead < (i64)p.rows) {
                const bool live = ROWS == 1 || ahead + group < (i64)p.rows;
                const i64 row = live ? ahead + group : (i64)p.rows - 1;
                const char* const g0 = (const char*)p.a0 + row * (i64)p.s0_0;
                Raw<Bf16>* const n0 = (Raw<Bf16>*)(s_rows + s * STAGE) + threadIdx.x;
#pragma unroll
                for (int c = 0; c < CHUNKS; ++c) {
                    const int col = ((part * CHUNKS + c) * T + lane) * V;
                    const bool in = true;
                    copy<Bf16, 16>(n0 + c * T * ROWS, g0 + (i64)col * 2, in);
                }
            }
            commit_copies();
        }
        {
            const bool live = ROWS == 1 || begin + group < (i64)p.rows;
            const i64 row = live ? begin + group : (i64)p.rows - 1;
            const char* const g0 = (const char*)p.a0 + row * (i64)p.s0_0;
        }
        int turn = 0, stage = 0;
        for (i64 start = (i64)(blockIdx.x / PARTS) * ROWS; start < (i64)p.rows; start += (i64)(gridDim.x / PARTS) * ROWS, turn ^= 1) {
            const i64 ahead = start + (STAGES - 1) * step;
            if (ahead < (i64)p.rows) {
                const bool live = ROWS == 1 || ahead + group < (i64)p.rows;
                const i64 row = live ? ahead + group : (i64)p.rows - 1;
                const char* const g0 = (const char*)p.a0 + row * (i64)p.s0_0;
                Raw<Bf16>* const n0 = (Raw<Bf16>*)(s_rows + (stage == 0 ? STAGES - 1 : stage - 1) * STAGE) + threadIdx.x;
#pragma unroll
                for (int c = 0; c < CHUNKS; ++c) {
                    const int col = ((part * CHUNKS + c) * T + lane) * V;
                    const bool in = true;
                    copy<Bf16, 16>(n0 + c * T * ROWS, g0 + (i64)col * 2, in);
                }
            }
            commit_copies();
            await_copies<STAGES - 1>();
            Raw<Bf16>* const w0 = (Raw<Bf16>*)(s_rows + stage * STAGE) + threadIdx.x;
            const bool live = ROWS == 1 || start + group < (i64)p.rows;
            const i64 row = live ? start + group : (i64)p.rows - 1;
            // sweep 0
            F f0_0 = lanes<F>([](int) { return Max::start(); });
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                const int col = ((part * CHUNKS + c) * T + lane) * V;
                const bool in = true;
                const F e0 = value(w0[c * T * ROWS]);
                if (in) f0_0 = lanes<F>([&](int i) { return Max::both(f0_0.v[i], at(e0, i)); });
            }
            const float t0 = butterfly<Max, 32>(gather_lanes<Max>(f0_0));
            if ((threadIdx.x & 31) == 0) s_reduce[turn][0][threadIdx.x / 32] = t0;
            __syncthreads();
            const float r0_all = over_warps<Max, 6>(s_reduce[turn][0]);
            const float r0 = r0_all;
            // sweep 1
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                const int col = ((part * CHUNKS + c) * T + lane) * V;
                const bool in = true;
                const F e0 = value(w0[c * T * ROWS]);
                const F e2 = sub2(e0, r0);
                const F e3 = round_bf16(e2);
                if (live) sum0[c] = lanes<F>([&](int i) { return sum0[c].v[i] + at(e3, i); });
            }
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
    }
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const int col = ((part * CHUNKS + c) * T + lane) * V;
        float* const g_sum = (float*)p.workspace + (i64)0 * (gridDim.x / PARTS) + (i64)(blockIdx.x / PARTS) * 6144;
#pragma unroll
        for (int i = 0; i < V; ++i) if (col < COLS) g_sum[col + i] = sum0[c].v[i];
    }
}

struct FinishParameters {
    unsigned long long workspace, blocks;
    unsigned long long a1;
};

extern "C" __global__ void __launch_bounds__(1024) finish(const __grid_constant__ FinishParameters p) {
    if (blockIdx.y == 0 && blockIdx.x * 32 < 6144) finish_columns<Bf16>((const float*)p.workspace + 0 * p.blocks, p.blocks, 6144, (char*)p.a1);
}
