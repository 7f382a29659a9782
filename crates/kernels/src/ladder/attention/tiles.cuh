// Tiles of 64 rows in shared memory, as f32, and their matmul by 256 threads with 4 x
// 4 elements each: four row values and four column values, read once from shared
// memory, give sixteen products.
constexpr int TILE = 64, THREADS = 256;
constexpr int PITCH = WIDTH + 4;  // eight rows, read four numbers at a time, lie in different banks
static_assert(WIDTH == TILE, "rows of keys and rows of scores are as long");

struct Tile { float4 rows[TILE][PITCH / 4]; };

// Element `column` of a row.
__device__ float& at(Tile& s, int row, int column) { return ((float*)s.rows[row])[column]; }

// Rows of a tile from `first` on; zeros beyond `length`, which is not read.
__device__ void load_tile(Tile& s, const Element* g_rows, int first, int length) {
    for (int i = threadIdx.x; i < TILE * WIDTH; i += THREADS) {
        const int row = i / WIDTH, column = i % WIDTH;
        const bool in = first + row < length;
        at(s, row, column) = in ? widen<STORAGE>(g_rows[(long long)(first + row) * WIDTH + column]) : 0.0f;
    }
}

// c += left right^T, of rows 4 y + i and 16 j + x.
__device__ void multiply_rows(float (&r_c)[4][4], const Tile& left, const Tile& right, int x, int y) {
#pragma unroll 2
    for (int l = 0; l < WIDTH / 4; ++l) {
        float4 r_left[4], r_right[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) r_left[i] = left.rows[4 * y + i][l];
#pragma unroll
        for (int j = 0; j < 4; ++j) r_right[j] = right.rows[16 * j + x][l];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                r_c[i][j] += r_left[i].x * r_right[j].x;
                r_c[i][j] += r_left[i].y * r_right[j].y;
                r_c[i][j] += r_left[i].z * r_right[j].z;
                r_c[i][j] += r_left[i].w * r_right[j].w;
            }
        }
    }
}

// c += left right, of rows 4 y + i of the left and columns 4 x + j of the right.
__device__ void multiply_columns(float (&r_c)[4][4], const Tile& left, const Tile& right, int x, int y) {
#pragma unroll 2
    for (int l = 0; l < TILE / 4; ++l) {
        float4 r_left[4], r_right[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) r_left[i] = left.rows[4 * y + i][l];
#pragma unroll
        for (int k = 0; k < 4; ++k) r_right[k] = right.rows[4 * l + k][x];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float r_row[4] = {r_left[i].x, r_left[i].y, r_left[i].z, r_left[i].w};
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                r_c[i][0] += r_row[k] * r_right[k].x;
                r_c[i][1] += r_row[k] * r_right[k].y;
                r_c[i][2] += r_row[k] * r_right[k].z;
                r_c[i][3] += r_row[k] * r_right[k].w;
            }
        }
    }
}
