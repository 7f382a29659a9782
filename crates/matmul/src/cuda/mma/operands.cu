// Matrix products by the matrix units of a warp (mma.sync): C[m, n] = tail(A[m, k] B[k, n]), any strides, any number of batch axes.
//
// - A block of four warps makes one tile of ROWS x COLUMNS, a warp a quarter of it. Operands pass through a ring of STAGES in shared
//   memory, of 64 bytes of K each.
// - A stage has lines: rows of A and columns of B, with 64 bytes of K each; or, where the other axis is contiguous (A_COLUMNS, B_ROWS),
//   a line for each of its K. Either way a line is read as it lies in memory, by pieces of 16 bytes.
// - How pieces come (A_LOAD, B_LOAD): COPIED past the registers; ALIGNED through registers; SHIFTED likewise, of lines that start
//   anywhere: two aligned pieces are read, and what is wanted is cut out of both; GATHERED, element by element, of any strides.
// - Sums are f32 in an order that the constants alone decide (of i8: exact integers), rounded to the storage type of the matmul. They pass
//   through shared memory, so that `tail` gets V neighbouring columns of a row at a time, and reads and writes whole vectors.
// - Beyond m, n and k operands are zeros, which are summed and not stored. Besides an operand's elements, no more is read than the rest of
//   the aligned 16 bytes around them and the next 16, and nothing behind its last element.
// - f32 is multiplied in three passes of TF32 (`sums.cu`), or by fused multiply-adds (FMA).
//
// - ROUTED: rows of A lie anywhere (`routed.cu`).
//
// KIND (0 f32, 1 f16, 2 bf16, 3 i8), ROWS, COLUMNS, STAGES, A_COLUMNS, B_ROWS, A_LOAD, B_LOAD, FMA, ROUTED, V and N are constants that
// stand before this file.

constexpr int COPIED = 0, ALIGNED = 1, SHIFTED = 2, GATHERED = 3;
constexpr int WARPS = 4, THREADS = 32 * WARPS;
constexpr int SIZE = KIND == 0 ? 4 : KIND == 3 ? 1 : 2;  // bytes of an element
constexpr int DEPTH = 64 / SIZE;                         // K of a stage
constexpr int PIECE = 16 / SIZE;                         // elements of 16 bytes
constexpr int AXES = 6;

// An operand in memory. Distances are in bytes.
struct Matrix {
    const char* g_first;
    const char* g_end;  // behind its last element: no more may be read
    u64 line, element;  // from a line to the next, from an element of a line to the next
};

struct Parameters {
    tail::Parameters tail;
    Matrix a, b;
    u64 m, k, row_tiles, column_tiles;
    u64 axes[AXES][3];  // of the batch, outermost first: size, distance in A, in B
};

struct Tile {
    u32 batch;
    int row, column;
};

// Tiles of eight rows of tiles are neighbours: they share columns of B while these are in the L2.
static __device__ __forceinline__ Tile tile_of(u32 row_tiles, u32 column_tiles, u32 index) {
    const u32 all = row_tiles * column_tiles;
    const u32 batch = index / all, own = index % all, band = own / (8 * column_tiles), inside = own % (8 * column_tiles);
    const u32 high = min(8u, row_tiles - band * 8);
    return {batch, (int)(band * 8 + inside % high) * ROWS, (int)(inside / high) * COLUMNS};
}

// A tile's part of an operand: `high` rows of A or columns of B, and all of K.
struct Source {
    const char* g_first;
    const char* g_end;
    u64 line, element;
    int high, k;
    const u64* s_lines;  // where lines begin, behind `g_first`; none where they lie `line` apart
};

template <bool ACROSS>
static __device__ __forceinline__ Source source(const Matrix& matrix, u64 batch, int first, u64 size, u64 k) {
    const u64 start = batch + (u64)first * (ACROSS ? matrix.element : matrix.line);
    return {matrix.g_first + start, matrix.g_end, matrix.line, matrix.element, (int)min(size - first, (u64)1 << 30), (int)k, nullptr};
}

// The first `bytes` of 16, element by element; zeros behind them.
static __device__ __forceinline__ void gather(u32* w, const char* g_from, u64 apart, int bytes) {
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = 0;
#pragma unroll
    for (int i = 0; i < PIECE; ++i) {
        if (i * SIZE < bytes) w[i * SIZE / 4] |= load_element<SIZE>(g_from + i * apart) << i * SIZE % 4 * 8;
    }
}

// Rows of A or columns of B in a stage, HIGH of them. ACROSS: there is a line for each of K, not for each of them. LISTED: lines
// lie anywhere.
template <bool ACROSS, int HIGH, int LOAD, bool LISTED = false> struct Operand {
    static_assert(!ACROSS || !LISTED, "rows that lie anywhere have lines of their own");
    static constexpr bool HELD = LOAD != COPIED;  // passes through registers
    static constexpr int LINES = ACROSS ? DEPTH : HIGH, PIECES = (ACROSS ? HIGH : DEPTH) / PIECE;
    // Lines of 64 bytes are permuted, others are apart, so that what is read together is in different banks.
    static constexpr int PITCH = ACROSS ? PIECES * 16 + (SIZE == 4 ? 32 : 16) : 64;
    static constexpr int BYTES = LINES * PITCH;
    static constexpr int COUNT = LINES * PIECES / THREADS;  // pieces of a thread
    static constexpr int WORDS = LOAD == SHIFTED ? 8 : 4;
    static_assert(LINES * PIECES % THREADS == 0, "threads have equally many pieces");
    typedef u32 Held[HELD ? COUNT : 1][WORDS];

    // Where threads divide into lines, a thread has the same piece of lines that are APART.
    static constexpr bool EVEN = THREADS % PIECES == 0;
    static constexpr int APART = THREADS / PIECES;
    static_assert(ACROSS || APART % 8 == 0, "lines of a thread are permuted alike");

    static __device__ __forceinline__ int at(int line, int piece) {
        return line * PITCH + (ACROSS ? piece : piece ^ line >> 1 & 3) * 16;
    }
    static __device__ __forceinline__ int line(int i) { return EVEN ? (int)threadIdx.x / PIECES + i * APART : ((int)threadIdx.x + i * THREADS) / PIECES; }
    static __device__ __forceinline__ int piece(int i) { return EVEN ? (int)threadIdx.x % PIECES : ((int)threadIdx.x + i * THREADS) % PIECES; }
    // Where piece i of a thread goes in a stage, and where it lies in memory, of a stage from `first` of K on.
    static __device__ __forceinline__ int target(int i) { return EVEN ? at(line(0), piece(0)) + i * APART * PITCH : at(line(i), piece(i)); }
    static __device__ __forceinline__ const char* place(const Source& from, int first, int i) {
        const u64 element = LOAD == GATHERED ? from.element : SIZE;
        if constexpr (LISTED) return from.g_first + from.s_lines[line(i)] + (u64)(first + piece(i) * PIECE) * element;
        const int own = EVEN ? 0 : i, lines = ACROSS ? first + line(own) : line(own), elements = ACROSS ? piece(own) * PIECE : first + piece(own) * PIECE;
        const char* g_own = from.g_first + (u64)lines * from.line + (u64)elements * element;
        return EVEN ? g_own + i * (APART * from.line) : g_own;
    }
    // Bytes of it that exist.
    static __device__ __forceinline__ int existing(const Source& from, int first, int i) {
        const bool in = ACROSS ? first + line(i) < from.k : line(i) < from.high;
        const int left = (ACROSS ? from.high : from.k - first) - piece(i) * PIECE;
        return in ? min(max(left, 0), PIECE) * SIZE : 0;
    }
    // Whether all of a stage exists, and all that is read with it is inside of the buffer.
    static __device__ __forceinline__ bool is_whole(const Source& from, int first) {
        const bool in = from.high >= HIGH && first + DEPTH <= from.k;
        if (LOAD != SHIFTED || !in) return in;
        // What is behind a line that lies anywhere is looked at piece by piece.
        if constexpr (LISTED) return false;
        const u64 lines = ACROSS ? first + DEPTH - 1 : HIGH - 1, elements = ACROSS ? HIGH : first + DEPTH;
        return from.g_end - from.g_first >= (i64)(lines * from.line + elements * SIZE + 16);
    }

    // Starts all copies of a stage.
    static __device__ __forceinline__ void copy(char* s_to, const Source& from, int first) {
        if constexpr (!HELD) {
            if (is_whole(from, first)) {
#pragma unroll
                for (int i = 0; i < COUNT; ++i) copy_async_first(shared_address(s_to + target(i)), place(from, first, i), 16);
            } else {
#pragma unroll
                for (int i = 0; i < COUNT; ++i) {
                    copy_async_first(shared_address(s_to + target(i)), place(from, first, i), existing(from, first, i));
                }
            }
        }
    }
    // Through registers: the loads, and later the stores.
    static __device__ __forceinline__ void load(Held& held, const Source& from, int first) {
        if constexpr (HELD && LOAD != GATHERED) {
            if (is_whole(from, first)) {
#pragma unroll
                for (int i = 0; i < COUNT; ++i) {
                    const char* g_from = place(from, first, i);
                    if constexpr (LOAD == ALIGNED) {
                        Access<16>::load(held[i], g_from);
                    } else {
                        const char* g_word = (const char*)((u64)g_from & ~15ull);
                        Access<16>::load_again(held[i], g_word);
                        Access<16>::load_again(held[i] + 4, g_word + 16);
                    }
                }
                return;
            }
        }
        if constexpr (HELD) {
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                const char* g_from = place(from, first, i);
                const int bytes = existing(from, first, i);
                if constexpr (LOAD == SHIFTED) {
                    load_around<SIZE>(held[i], g_from, from.g_end, bytes);
                } else {
                    gather(held[i], g_from, LOAD == ALIGNED ? SIZE : from.element, bytes);
                }
            }
        }
    }
    static __device__ __forceinline__ void store(char* s_to, Held& held, const Source& from, int first) {
        if constexpr (HELD) {
            const bool whole = is_whole(from, first);
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                if constexpr (LOAD == SHIFTED) {
                    cut_out<SIZE>(held[i], (u32)(u64)place(from, first, i) & 15);
                    if (!whole) clear_behind(held[i], existing(from, first, i));
                }
                *(uint4*)(s_to + target(i)) = make_uint4(held[i][0], held[i][1], held[i][2], held[i][3]);
            }
        }
    }
};

typedef Operand<A_COLUMNS, ROWS, A_LOAD, ROUTED> Left;
typedef Operand<B_ROWS, COLUMNS, B_LOAD> Right;
constexpr int STAGE_BYTES = Left::BYTES + Right::BYTES;
