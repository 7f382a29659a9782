// ---- the kernel: a tile for each block

extern "C" __global__ void __launch_bounds__(THREADS, 2) matmul_mma(const __grid_constant__ Parameters p) {
    extern __shared__ char s_ring[];
    start_next();
    wait_for_previous();
    const Tile tile = tile_of((u32)p.row_tiles, (u32)p.column_tiles, blockIdx.x);
    u64 a_batch = 0, b_batch = 0;
    u32 batch = tile.batch;
#pragma unroll 1
    for (int axis = AXES - 1; axis >= 0; --axis) {
        const u32 size = (u32)p.axes[axis][0], index = batch % size;
        batch /= size;
        a_batch += index * p.axes[axis][1];
        b_batch += index * p.axes[axis][2];
    }
    const Source a = source<A_COLUMNS>(p.a, a_batch, tile.row, p.m, p.k), b = source<B_ROWS>(p.b, b_batch, tile.column, N, p.k);
    const i64 first = (i64)tile.batch * (i64)p.m + tile.row;
    make_tile(p, s_ring, a, b, tile.column, [&](int r) { return first + r; });
}
