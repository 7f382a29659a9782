// y = gelu((x - mean) * rstd * w + b) over rows of COLS columns; strides in bytes.
struct Parameters {
    const char* g_x;  // [rows][COLS] of Element
    long long x_stride;
    const Element* g_w;  // [COLS]
    const Element* g_b;  // [COLS]
    char* g_y;           // [rows][COLS] of Element
    long long y_stride, rows, fault;
    float* g_scratch;  // for the rung with five launches: [rows][COLS] results of a step, [rows] means, [rows] deviations
};

__device__ Element finished(float x, float mean, float rstd, Element w, Element b) {
    return narrow(gelu(rounded((x - mean) * rstd * widen(w) + widen(b))));
}
