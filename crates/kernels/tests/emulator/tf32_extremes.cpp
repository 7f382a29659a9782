// A matmul of f32 of extreme values; the rest is as in `matmul.cpp`.
#define PLANTED
#include "matmul.cpp"
