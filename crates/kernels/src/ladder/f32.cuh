// Elements of a ladder's rung: f32.
typedef float Element;
constexpr int V = 4;  // elements of 16 bytes

__device__ float widen(Element x) { return x; }
__device__ Element narrow(float x) { return x; }
