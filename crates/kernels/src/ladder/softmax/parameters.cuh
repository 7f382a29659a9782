// y = exp(x - m) / sum(exp(x - m)), m the largest x of a row, over rows of COLS columns; strides in bytes.
struct Parameters {
    const char* g_x;
    long long x_stride;
    char* g_y;
    long long y_stride, rows, fault;
    float* g_scratch;  // for the rung with four launches: [rows][COLS] exponentials, [rows] largest values, [rows] sums
};

__device__ float never() { return __int_as_float(0xff800000); }
