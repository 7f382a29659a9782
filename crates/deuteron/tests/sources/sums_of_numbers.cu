// 32 threads per row, 4 rows per block, 24 columns per thread by 4, 3 resident blocks per multiprocessor, 2 rows ahead in shared memory: a warp holds the row
constexpr int V = 4;
constexpr int T = 32;
constexpr int ROWS = 4;
constexpr int CHUNKS = 6;
constexpr int PARTS = 1;
constexpr int STAGES = 3;
constexpr int COLS = 768;

struct Parameters {
    unsigned long long a0;
    unsigned long long s0_0;
    unsigned long long a1;
    unsigned long long s1_0;
    unsigned long long a2;
    unsigned long long rows;
    unsigned long long fault;
    unsigned long long workspace;
};

extern "C" __global__ void __launch_bounds__(128, 3) row(const __grid_constant__ Parameters p) {
    const int lane = threadIdx.x % T, group = threadIdx.x / T;
    const int part = 0;
    float sum0 = 0.0f;
    {
        extern __shared__ char s_rows[];
        constexpr int STAGE = CHUNKS * T * ROWS * (int)(sizeof(Raw<F32>));
        const i64 step = (i64)(gridDim.x / PARTS) * ROWS;
        const i64 begin = (i64)(blockIdx.x / PARTS) * ROWS;
        for (int s = 0; s < STAGES - 1; ++s) {
            const i64 ahead = begin + s * step;
            if (ahead < (i64)p.rows) {
                const bool live = ROWS == 1 || ahead + group < (i64)p.rows;
                const i64 row = live ? ahead + group : (i64)p.rows - 1;
                const char* const g0 = (const char*)p.a0 + row * (i64)p.s0_0;
                Raw<F32>* const n0 = (Raw<F32>*)(s_rows + s * STAGE) + threadIdx.x;
#pragma unroll
                for (int c = 0; c < CHUNKS; ++c) {
                    const int col = ((part * CHUNKS + c) * T + lane) * V;
                    const bool in = true;
                    copy<F32, 16>(n0 + c * T * ROWS, g0 + (i64)col * 4, in);
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
                Raw<F32>* const n0 = (Raw<F32>*)(s_rows + (stage == 0 ? STAGES - 1 : stage - 1) * STAGE) + threadIdx.x;
#pragma unroll
                for (int c = 0; c < CHUNKS; ++c) {
                    const int col = ((part * CHUNKS + c) * T + lane) * V;
                    const bool in = true;
                    copy<F32, 16>(n0 + c * T * ROWS, g0 + (i64)col * 4, in);
                }
            }
            commit_copies();
            await_copies<STAGES - 1>();
            Raw<F32>* const w0 = (Raw<F32>*)(s_rows + stage * STAGE) + threadIdx.x;
            const bool live = ROWS == 1 || start + group < (i64)p.rows;
            const i64 row = live ? start + group : (i64)p.rows - 1;
            char* const g1 = (char*)p.a1 + row * (i64)p.s1_0;
            // sweep 0
            F f0_0 = lanes<F>([](int) { return Max::start(); });
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                const int col = ((part * CHUNKS + c) * T + lane) * V;
                const bool in = true;
                const F e0 = value(w0[c * T * ROWS]);
                if (in) f0_0 = lanes<F>([&](int i) { return Max::both(f0_0.v[i], at(e0, i)); });
            }
            const float r0_all = butterfly<Max, 32>(gather_lanes<Max>(f0_0));
            const float r0 = r0_all;
            // sweep 1
            sum0 += live ? r0 : 0.0f;
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                const int col = ((part * CHUNKS + c) * T + lane) * V;
                const bool in = true;
                const F e0 = value(w0[c * T * ROWS]);
                const F e2 = sub2(e0, r0);
                store<F32, 16>(g1 + (i64)col * 4, e2, live && in);
            }
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
    }
    {
        __shared__ float s_sum[ROWS];
        if (lane == 0) s_sum[group] = sum0;
        __syncthreads();
        if (threadIdx.x == 0 && part == 0) {
            float total = s_sum[0];
            for (int i = 1; i < ROWS; ++i) total += s_sum[i];
            *((float*)p.workspace + (i64)0 * (gridDim.x / PARTS) + (i64)(blockIdx.x / PARTS) * 1) = total;
        }
        __syncthreads();
    }
}

struct FinishParameters {
    unsigned long long workspace, blocks;
    unsigned long long a2;
};

extern "C" __global__ void __launch_bounds__(1024) finish(const __grid_constant__ FinishParameters p) {
    if (blockIdx.y == 0 && blockIdx.x * 32 < 1) finish_columns<F32>((const float*)p.workspace + 0 * p.blocks, p.blocks, 1, (char*)p.a2);
}
