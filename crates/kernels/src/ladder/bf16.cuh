// Elements of a ladder's rung: bf16, the upper half of an f32.
typedef unsigned short Element;
constexpr int V = 8;  // elements of 16 bytes

__device__ float widen(Element x) { return __uint_as_float((unsigned)x << 16); }

// To the nearest, ties to even; NaN stays NaN.
__device__ Element narrow(float x) {
    const unsigned bits = __float_as_uint(x);
    return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
