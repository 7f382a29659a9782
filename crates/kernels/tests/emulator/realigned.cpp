// A matmul of operands that `realign` copies first; the rest is as in `matmul.cpp`.
#define FIRST realign
#include "matmul.cpp"
