
// What all rows share beside the weights: the whole of it, or what belongs to a strip of columns.
template <class Parameters> static __device__ __forceinline__ void prefetch_shared(const Parameters& p, int strip) {
#pragma unroll
    for (int i = 0; i < SHARED; ++i) {
        const u64 bytes = p.shared[i].bytes, own = p.shared[i].strip, first = strip * own;
        if (p.shared[i].address != 0 && first < bytes) prefetch_range(p.shared[i].address + first, own == 0 ? bytes : min(own, bytes - first));
    }
}
