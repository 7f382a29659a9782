// ---- the kernel for rows that are routed to experts, as `route` has sorted them: a tile for each block, with rows of one expert
//
// Rows of A are read where they lie, and results go to their places. There may be more blocks than tiles. Rows of the result that follow
// each other may be choices of one row of A.

struct RoutedParameters {
    Parameters own;                // `a` has lines anywhere; `row_tiles` is not used
    u64 left_row, left_own;        // bytes of A from one row's choices to those of the next, from choice to choice
    u64 choices, matrix;           // of a row; bytes from one expert's B to the next
    u64 order, list;               // as `route` writes them
};

extern "C" __global__ void __launch_bounds__(THREADS, 2) matmul_mma_routed(const __grid_constant__ RoutedParameters p) {
    extern __shared__ char s_ring[];
    __shared__ u64 s_lines[ROWS];
    __shared__ int s_rows[ROWS];
    start_next();
    wait_for_previous();
    u32 words[4];
    Access<16>::load_again(words, (const char*)p.list);
    const u32 row_tiles = words[0], column_tiles = (u32)p.own.column_tiles;
    if (blockIdx.x >= row_tiles * column_tiles) return;
    const Tile tile = tile_of(row_tiles, column_tiles, blockIdx.x);
    // Its expert, its first place, and the one behind the expert's last.
    Access<16>::load_again(words, (const char*)p.list + 16ll * (tile.row / ROWS + 1));
    const int first = (int)words[1], high = min((int)words[2] - first, ROWS);
    for (int i = threadIdx.x; i < ROWS; i += THREADS) {
        const u32 row = i < high ? load_one(I32{}, (const char*)p.order + 4ll * (first + i)) : 0, choices = (u32)p.choices;
        s_rows[i] = (int)row;
        s_lines[i] = (row / choices) * p.left_row + (row % choices) * p.left_own;
    }
    __syncthreads();
    const Source a = {p.own.a.g_first, p.own.a.g_end, p.own.a.line, p.own.a.element, high, (int)p.own.k, s_lines};
    const Source b = source<B_ROWS>(p.own.b, words[0] * p.matrix, tile.column, N, p.own.k);
    make_tile(p.own, s_ring, a, b, tile.column, [&](int r) { return (i64)s_rows[r]; });
}
