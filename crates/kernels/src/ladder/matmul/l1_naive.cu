// As the formula is written: a thread computes one element of C. It fetches a row of A and a column of B by itself, from memory or a cache,
// though all threads of its row fetch the same row, and all of its column the same column: two loads per multiplication.
constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS) matmul(const __grid_constant__ Parameters p) {
    const Tile tile = tile_of_block<1, THREADS>(p);
    const long long column = tile.column + threadIdx.x;
    if (column >= p.n) return;
    const Element* g_a = p.g_a + tile.row * p.k;
    const Element* g_b = p.g_b + column;
    float sum = 0.0f;
    for (long long i = 0; i < p.k; ++i) sum += widen<KIND>(g_a[i]) * widen<KIND>(g_b[i * p.n]);
    p.g_c[tile.row * p.n + column] = narrow<KIND>(sum);
}
