extern "C" __global__ void __launch_bounds__(THREADS, 1) matmul_hopper(const __grid_constant__ Parameters p) { run(p); }
