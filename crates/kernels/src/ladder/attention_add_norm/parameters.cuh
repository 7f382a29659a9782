// s = r + attention(q, k, v), y = (s - mean) / sqrt(variance + EPS) * w + b over rows of COLS columns, heads side by side. All are bf16;
// q, k, v and attention's own result o are [heads][length][WIDTH], the heads of all sequences one after another; r, s, y are
// [rows][COLS], a row per position of a sequence; sums are f32.
//
// STORAGE (2, bf16), WIDTH, SCALE, COLS and EPS are constants defined before this file.
typedef Stored<STORAGE>::Element Element;
constexpr float LOG2E = 1.44269504f;
static __device__ __forceinline__ float never() { return __int_as_float(0xff800000); }

struct Parameters {
    const Element* g_q;
    const Element* g_k;
    const Element* g_v;
    Element* g_o;     // in the workspace
    float* g_scores;  // [heads][length][length], for the rungs that store scores
    long long heads, length;
    const Element* g_r;
    const Element* g_w;
    const Element* g_b;
    Element* g_s;
    Element* g_y;
    long long rows;
};

// The index in o of column `column` of a row.
static __device__ __forceinline__ long long merged(const Parameters& p, long long row, int column) {
    const long long sequence = row / p.length, head = sequence * (COLS / WIDTH) + column / WIDTH;
    return (head * p.length + row % p.length) * WIDTH + column % WIDTH;
}
