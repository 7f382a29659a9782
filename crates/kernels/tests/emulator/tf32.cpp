// A matmul of f32, which `split_tf32` splits first; the rest is as in `matmul.cpp`.
#define FIRST split_tf32
#include "matmul.cpp"
