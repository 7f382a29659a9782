// What the kernels in f32 arithmetic share: tiles of 64 rows, and products of them.
//
// A thread makes 4 x 4 elements of a product of two tiles: rows 4 y to 4 y + 3, columns x, x + 16, x + 32, x + 48; of a product
// with the width the same rows, and every 16th column. Tiles pass through shared memory 32 of the width at a time; where
// their rows are summed over, 16 of them.

constexpr int TILE = 64;
constexpr int THREADS = 256;
constexpr int DEPTH = 32;
// A row more than the depth: eight rows, read four numbers at a time, lie in different banks.
constexpr int PADDED = DEPTH + 4;
constexpr int VALUES = 16;
constexpr int COLUMNS = (WIDTH + 15) / 16;
constexpr int WIDE = 16 * COLUMNS;
constexpr int OPERANDS = 2 * TILE * PADDED > VALUES * WIDE ? 2 * TILE * PADDED : VALUES * WIDE;

struct Memory {
    float operands[OPERANDS];
    float weights[TILE][TILE + 4];
};

// Rows of a tile: from `first` on, zeros from `end` on, where nothing is read.
template <int KIND> struct Tile {
    const typename Stored<KIND>::Element* g_rows;
    u64 stride;
    int first, end;
};

// Rows of a tile, `COUNT` columns of them from `column` on, into rows of PITCH; zeros beyond `end` and beyond the width.
template <int KIND, int ROWS, int COUNT, int PITCH>
static __device__ __forceinline__ void load_tile(float* s_to, const typename Stored<KIND>::Element* g_from, u64 stride, int first,
                                                 int end, int column) {
    for (int i = threadIdx.x; i < ROWS * COUNT; i += THREADS) {
        const int row = i / COUNT, at = i % COUNT;
        const bool in = first + row < end && column + at < WIDTH;
        s_to[row * PITCH + at] = in ? widen<KIND>(g_from[(u64)(first + row) * stride + column + at]) : 0.0f;
    }
}

// c += left right^T, both rows along the width.
template <int LEFT, int RIGHT>
static __device__ __forceinline__ void multiply_tiles(float (&r_c)[4][4], Memory& s, const Tile<LEFT>& left, const Tile<RIGHT>& right) {
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
    float *s_left = s.operands, *s_right = s.operands + TILE * PADDED;
    for (int depth = 0; depth < WIDTH; depth += DEPTH) {
        __syncthreads();
        load_tile<LEFT, TILE, DEPTH, PADDED>(s_left, left.g_rows, left.stride, left.first, left.end, depth);
        load_tile<RIGHT, TILE, DEPTH, PADDED>(s_right, right.g_rows, right.stride, right.first, right.end, depth);
        __syncthreads();
#pragma unroll 2
        for (int l = 0; l < DEPTH; l += 4) {
            float4 r_left[4], r_right[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) r_left[i] = *(const float4*)(s_left + (4 * y + i) * PADDED + l);
#pragma unroll
            for (int j = 0; j < 4; ++j) r_right[j] = *(const float4*)(s_right + (x + 16 * j) * PADDED + l);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    r_c[i][j] = fmaf(r_left[i].x, r_right[j].x, r_c[i][j]);
                    r_c[i][j] = fmaf(r_left[i].y, r_right[j].y, r_c[i][j]);
                    r_c[i][j] = fmaf(r_left[i].z, r_right[j].z, r_c[i][j]);
                    r_c[i][j] = fmaf(r_left[i].w, r_right[j].w, r_c[i][j]);
                }
            }
        }
    }
}

// c += w right: weights are in shared memory, the rows of `right` those of the inner size.
template <int RIGHT>
static __device__ __forceinline__ void add_weighted(float (&r_c)[4][COLUMNS], Memory& s, const Tile<RIGHT>& right) {
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
    float* s_right = s.operands;
    for (int part = 0; part < TILE && right.first + part < right.end; part += VALUES) {
        __syncthreads();
        load_tile<RIGHT, VALUES, WIDE, WIDE>(s_right, right.g_rows, right.stride, right.first + part, right.end, 0);
        __syncthreads();
#pragma unroll 1
        for (int l = 0; l < VALUES; l += 4) {
            float4 r_w[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) r_w[i] = *(const float4*)&s.weights[4 * y + i][part + l];
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) {
                const float* s_column = s_right + l * WIDE + x + 16 * c;
                const float a = s_column[0], b = s_column[WIDE], d = s_column[2 * WIDE], e = s_column[3 * WIDE];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float sum = fmaf(r_w[i].x, a, r_c[i][c]);
                    sum = fmaf(r_w[i].y, b, sum);
                    sum = fmaf(r_w[i].z, d, sum);
                    r_c[i][c] = fmaf(r_w[i].w, e, sum);
                }
            }
        }
    }
}
