// Three launches that follow the formula: all scores, their softmax, their product
// with the values. One thread per element or row. Each thread fetches all of its
// operands itself, although its neighbours fetch the same ones, and each score is
// written twice and read four times.

// scores[i][j] = q[i] . k[j] / sqrt(WIDTH); one thread per score.
extern "C" __global__ void __launch_bounds__(256) scores(const __grid_constant__ Parameters p) {
    const int key = blockIdx.x * 256 + threadIdx.x, query = blockIdx.y;
    if (key > query) return;  // masked, and never read
    const long long row = blockIdx.z * p.length + query;
    const Element* g_q = p.g_q + row * WIDTH;
    const Element* g_k = p.g_k + (blockIdx.z * p.length + key) * WIDTH;
    float sum = 0.0f;
    for (int c = 0; c < WIDTH; ++c) sum += widen<STORAGE>(g_q[c]) * widen<STORAGE>(g_k[c]);
    p.g_scores[row * p.length + key] = sum * SCALE;
}

// Subtracting the largest score of the row keeps exponentials at most 1; one thread per row.
extern "C" __global__ void __launch_bounds__(256) softmax(const __grid_constant__ Parameters p) {
    const long long row = (long long)blockIdx.x * 256 + threadIdx.x;
    if (row >= p.heads * p.length) return;
    const int seen = row % p.length + 1;
    float* g_row = p.g_scores + row * p.length;
    float most = never(), sum = 0.0f;
    for (int j = 0; j < seen; ++j) most = fmaxf(most, g_row[j]);
    for (int j = 0; j < seen; ++j) sum += expf(g_row[j] - most);
    for (int j = 0; j < seen; ++j) g_row[j] = expf(g_row[j] - most) / sum;
}

// o[i] = sum over j of probabilities[i][j] v[j]; one thread per element.
extern "C" __global__ void __launch_bounds__(256) values(const __grid_constant__ Parameters p) {
    const long long element = (long long)blockIdx.x * 256 + threadIdx.x, row = element / WIDTH;
    if (row >= p.heads * p.length) return;
    const int column = element % WIDTH, query = row % p.length;
    const float* g_row = p.g_scores + row * p.length;
    const Element* g_v = p.g_v + (row - query) * WIDTH + column;
    float sum = 0.0f;
    for (int j = 0; j <= query; ++j) sum += g_row[j] * widen<STORAGE>(g_v[(long long)j * WIDTH]);
    p.g_o[element] = narrow<STORAGE>(sum);
}
