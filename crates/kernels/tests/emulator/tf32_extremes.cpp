// The same of extreme values.
#define PLANTED
#include "tf32.cpp"
