// 128 threads per block, 1 x 8 elements per thread: no row structure
#define WAITS
constexpr int V = 8;
constexpr int T = 128;
constexpr int ROWS = 1;
constexpr int CHUNKS = 1;
constexpr int PARTS = 1;
constexpr int COLS = 0;

struct Parameters {
    unsigned long long a0;
    unsigned long long a1;
    unsigned long long rows;
    unsigned long long fault;
    unsigned long long workspace;
};

extern "C" __global__ void __launch_bounds__(128) row(const __grid_constant__ Parameters p) {
    start_next();
    wait_for_previous();
    const i64 first = ((i64)blockIdx.x * CHUNKS * T + threadIdx.x) * V;
    const bool whole = first + (i64)(CHUNKS - 1) * T * V + V <= (i64)p.rows;
    if (whole) {
        Raw<Bf16> w0[CHUNKS];
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const i64 element = first + (i64)c * T * V;
            w0[c] = load<Bf16, 16, STREAM>((const char*)p.a0 + element * 2, true);
        }
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const i64 element = first + (i64)c * T * V;
            const F e0 = value(w0[c]);
            const F e10 = gelu_tanh1(e0);
            store<Bf16, 16>((char*)p.a1 + element * 2, e10, true);
        }
    } else {
        Raw<Bf16> w0[CHUNKS];
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const i64 element = first + (i64)c * T * V;
            w0[c] = load_tail<Bf16>((const char*)p.a0 + element * 2, (int)min((i64)V, (i64)p.rows - element));
        }
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const i64 element = first + (i64)c * T * V;
            const F e0 = value(w0[c]);
            const F e10 = gelu_tanh1(e0);
            store_tail<Bf16>((char*)p.a1 + element * 2, e10, (int)min((i64)V, (i64)p.rows - element));
        }
    }
}
