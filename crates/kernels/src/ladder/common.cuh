// What all rungs of a ladder share. The parameter has the words of the generated kernel, so that one harness launches all.
struct __align__(16) Vector { Element e[V]; };

// A value as the storage type holds it: where the graph has a result, it is rounded.
__device__ float rounded(float x) { return widen(narrow(x)); }

__device__ float gelu(float x) {
    return 0.5f * x * (1.0f + tanhf(0.7978845608f * (x + 0.044715f * x * x * x)));
}
