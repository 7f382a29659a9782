// o = softmax(q k^T / sqrt(WIDTH)) v, causal: a query sees the keys up to its own position. All four are bf16[heads][length][WIDTH], the
// heads of all sequences one after another; sums are f32.
//
// STORAGE (2, bf16), WIDTH and SCALE are constants defined before this file.
typedef Stored<STORAGE>::Element Element;
constexpr float LOG2E = 1.44269504f;
static __device__ __forceinline__ float never() { return __int_as_float(0xff800000); }

struct Parameters {
    const Element* g_q;
    const Element* g_k;
    const Element* g_v;
    Element* g_o;
    float* g_scores;  // [heads][length][length], for the rungs that store scores
    long long heads, length;
};
