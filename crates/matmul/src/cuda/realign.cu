// ---- an operand whose lines start anywhere, copied once

// Copies lines to lines that start at multiples of 16 bytes. A warp has a chunk of 128 pieces of a line.
struct Realigned {
    const char* g_from;
    const char* g_end;  // behind its last element: no more is read
    char* g_to;
    u64 line, batch;    // bytes from a line to the next, from a matrix to the next
    u64 lines;          // of a matrix
    u64 bytes, pitch;   // of a line, and of one of the copy
    u64 chunks, tasks;  // of a line, of all
};

extern "C" __global__ void __launch_bounds__(256) realign(const __grid_constant__ Realigned p) {
    constexpr int TOGETHER = 4;
    start_next();
    wait_for_previous();
    const u64 task = (u64)blockIdx.x * 8 + threadIdx.x / 32;
    if (task >= p.tasks) return;
    const u64 line = task / p.chunks, start = (task % p.chunks * (32 * TOGETHER) + threadIdx.x % 32) * 16;
    const char* g_line = p.g_from + line / p.lines * p.batch + line % p.lines * p.line;
    char* g_to = p.g_to + line * p.pitch;
    u32 w[TOGETHER][8];
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) {
        const u64 at = start + i * 512;
        const char* g_from = g_line + at;
        const char* g_word = (const char*)((u64)g_from & ~15ull);
        if (at + 16 <= p.bytes && p.g_end - g_word >= 32) {
            Access<16>::load_again(w[i], g_word);
            Access<16>::load_again(w[i] + 4, g_word + 16);
        } else {
            load_around<2>(w[i], g_from, p.g_end, at < p.bytes ? (int)min(p.bytes - at, (u64)16) : 0);
        }
    }
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) {
        const u64 at = start + i * 512;
        cut_out<2>(w[i], (u32)(u64)(g_line + at) & 15);
        if (at < p.bytes) Access<16>::store(g_to + at, w[i]);
    }
}
