// ---- the kernels

extern "C" __global__ void __launch_bounds__(slopes::THREADS, 1) cross_entropy_slopes(const __grid_constant__ slopes::Parameters p) { slopes::run(p); }
extern "C" __global__ void __launch_bounds__(d_b::THREADS, 1) cross_entropy_d_b(const __grid_constant__ d_b::Parameters p) { d_b::run(p); }
extern "C" __global__ void __launch_bounds__(d_a::THREADS, 1) cross_entropy_d_a(const __grid_constant__ d_a::Parameters p) { d_a::run(p); }
