// Lines of elements of SIZE bytes that start anywhere, read by aligned pieces of 16 bytes: what is wanted is cut out of two.

// One element, zero-extended.
template <int SIZE> static __device__ __forceinline__ u32 load_element(const char* g_at) {
    if constexpr (SIZE == 4) {
        u32 w;
        Access<4>::load_again(&w, g_at);
        return w;
    } else if constexpr (SIZE == 2) {
        return load_u16(g_at);
    } else {
        return load_u8(g_at);
    }
}

// Two aligned pieces that hold `bytes` from `g_from` on, of which those that lie behind the buffer's end are not read.
template <int SIZE>
static __device__ __forceinline__ void load_around(u32* w, const char* g_from, const char* g_end, int bytes) {
    const int shift = (int)((u64)g_from & 15), end = shift + bytes;
    const char* g_word = g_from - shift;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        w[i] = 0;
        if (bytes == 0 || 4 * i + 4 <= shift || 4 * i >= end) continue;
        const char* g_own = g_word + 4 * i;
        if (g_end - g_own >= 4) {
            Access<4>::load_again(w + i, g_own);
        } else {
#pragma unroll
            for (int at = 0; at < 4; at += SIZE) {
                if (g_own + at < g_end) w[i] |= load_element<SIZE>(g_own + at) << at * 8;
            }
        }
    }
}

// The 16 bytes from `shift` on, at the front.
template <int SIZE> static __device__ __forceinline__ void cut_out(u32* w, u32 shift) {
#pragma unroll
    for (int i = 0; i < 6; ++i) w[i] = shift & 8 ? w[i + 2] : w[i];
#pragma unroll
    for (int i = 0; i < 5; ++i) w[i] = shift & 4 ? w[i + 1] : w[i];
    if constexpr (SIZE < 4) {
#pragma unroll
        for (int i = 0; i < 4; ++i) w[i] = __funnelshift_r(w[i], w[i + 1], (shift & 3) * 8);
    }
}

// Zeros behind the first `bytes` of 16.
static __device__ __forceinline__ void clear_behind(u32* w, int bytes) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int left = bytes - 4 * i;
        w[i] = left >= 4 ? w[i] : left <= 0 ? 0u : w[i] & (1u << 8 * left) - 1;
    }
}

