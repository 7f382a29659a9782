// Follows the formula: one thread per element of C. Each thread fetches a row of A
// and a column of B itself, although all threads of the same row fetch the same row
// of A, and all threads of the same column the same column of B: two loads per
// multiplication.
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
