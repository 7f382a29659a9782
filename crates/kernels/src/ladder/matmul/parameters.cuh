// C[m, n] = A[m, k] B[k, n]: all three are contiguous and row-major, elements are f16 or bf16, sums are f32. Any m, n, k.
//
// KIND (1 f16, 2 bf16), A_ALIGNED and B_ALIGNED (whether every row of the operand starts at a multiple of 16 bytes) and EVEN (whether n is
// even) are constants defined before this file.
typedef Stored<KIND>::Element Element;
struct __align__(16) Vector { Element e[8]; };

struct Parameters {
    const Element* g_a;
    const Element* g_b;
    Element* g_c;
    long long m, n, k;
};

// The first row and column of a block's tile of C. Consecutive blocks are in the same row of tiles.
struct Tile { long long row, column; };
template <int ROWS, int COLUMNS> __device__ Tile tile_of_block(const Parameters& p) {
    const long long across = (p.n + COLUMNS - 1) / COLUMNS;
    return {blockIdx.x / across * ROWS, blockIdx.x % across * COLUMNS};
}

// An element of a matrix; zero outside of it, without a load.
__device__ float element(const Element* g_matrix, long long rows, long long columns, long long row, long long column) {
    return row < rows && column < columns ? widen<KIND>(g_matrix[row * columns + column]) : 0.0f;
}

// Eight elements of a row from `column`, a multiple of 8, on; zeros outside of the matrix. If rows are ALIGNED they are one load of 16 bytes,
// and the number of columns is a multiple of 8, so that all eight exist or none.
template <bool ALIGNED>
__device__ Vector vector(const Element* g_matrix, long long rows, long long columns, long long row, long long column) {
    Vector r = {};
    const Element* g_first = g_matrix + row * columns + column;
    if (row >= rows || column >= columns) return r;
    if constexpr (ALIGNED) {
        r = *(const Vector*)g_first;
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (column + i < columns) r.e[i] = g_first[i];
        }
    }
    return r;
}

// Stores two neighbouring elements of a row of C, from the even column `column` on.
__device__ void store_pair(const Parameters& p, long long row, long long column, float first, float second) {
    if (row >= p.m || column >= p.n) return;
    Element* g_first = p.g_c + row * p.n + column;
    if constexpr (EVEN) {
        *(u32*)g_first = narrow2<KIND>(first, second);
    } else {
        g_first[0] = narrow<KIND>(first);
        if (column + 1 < p.n) g_first[1] = narrow<KIND>(second);
    }
}
