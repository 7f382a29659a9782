// One block per row: neighbouring threads read neighbouring columns. The largest
// value and the sum are reduced by a tree in shared memory, with a barrier after each
// of its eight steps.
constexpr int THREADS = 256;

template <class Combine> __device__ float over_block(float x, float* s_values, Combine combine) {
    s_values[threadIdx.x] = x;
    __syncthreads();
    for (int step = THREADS / 2; step > 0; step /= 2) {
        if (threadIdx.x < step) s_values[threadIdx.x] = combine(s_values[threadIdx.x], s_values[threadIdx.x + step]);
        __syncthreads();
    }
    const float value = s_values[0];
    __syncthreads();
    return value;
}

struct Larger { __device__ float operator()(float a, float b) const { return fmaxf(a, b); } };
struct Sum { __device__ float operator()(float a, float b) const { return a + b; } };

extern "C" __global__ void __launch_bounds__(THREADS) row(const __grid_constant__ Parameters p) {
    __shared__ float s_values[THREADS];
    const long long row = blockIdx.x;
    const Element* g_x = (const Element*)(p.g_x + row * p.x_stride);
    Element* g_y = (Element*)(p.g_y + row * p.y_stride);
    float most = never(), sum = 0.0f;
    for (int c = threadIdx.x; c < COLS; c += THREADS) most = fmaxf(most, widen(g_x[c]));
    most = over_block(most, s_values, Larger());
    for (int c = threadIdx.x; c < COLS; c += THREADS) sum += expf(widen(g_x[c]) - most);
    sum = over_block(sum, s_values, Sum());
    for (int c = threadIdx.x; c < COLS; c += THREADS) g_y[c] = narrow(expf(widen(g_x[c]) - most) / sum);
}
