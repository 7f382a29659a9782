// The tensor memory accelerator: bulk copies between global and shared memory by tensor maps (Hopper and later). One thread starts a copy.
//
// - A load is signalled at an mbarrier, which gets its bytes (complete_tx). Stores are counted in bulk commit groups.
// - A tile in shared memory starts at a multiple of 1024 bytes. Its rows have 128 bytes, and are swizzled: in eight rows, the 16 bytes of
//   column c of row r lie at column c xor r, so that neither rows nor columns of 8 x 8 matrices share a bank.
// - Coordinates count elements, the innermost axis first. Beyond the tensor a load gives zeros and a store writes nothing.
// - These copies go through the async proxy: a fence orders them after ordinary accesses of the same memory.

// A tensor map: address, sizes and strides of a tensor and the size of a tile. The host writes it as a kernel's parameter.
struct alignas(128) TensorMap {
    u64 opaque[16];
};

// Prefetches a descriptor.
static __device__ __forceinline__ void prefetch_tensor_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Loads a tile of a tensor of rank 3, 4 or 5 to the shared address `to`.
static __device__ __forceinline__ void tma_load_3d(u32 to, const TensorMap* map, u32 barrier, int c0, int c1, int c2) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
                 ::"r"(to), "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2) : "memory");
}
static __device__ __forceinline__ void tma_load_4d(u32 to, const TensorMap* map, u32 barrier, int c0, int c1, int c2, int c3) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2];"
                 ::"r"(to), "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}
static __device__ __forceinline__ void tma_load_5d(u32 to, const TensorMap* map, u32 barrier, int c0, int c1, int c2, int c3, int c4) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];"
                 ::"r"(to), "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4) : "memory");
}
// Loads a tile of a tensor of rank 3 to all blocks of the cluster whose ranks are set in `ranks`: to the same place in each, where an mbarrier gets
// its bytes.
static __device__ __forceinline__ void tma_load_3d_to_ranks(u32 to, const TensorMap* map, u32 barrier, int c0, int c1, int c2, u16 ranks) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;"
                 ::"r"(to), "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "h"(ranks) : "memory");
}
// Brings a tile of a tensor of rank 3 into the L2.
static __device__ __forceinline__ void tma_prefetch_3d(const TensorMap* map, int c0, int c1, int c2) {
    asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global [%0, {%1, %2, %3}];" ::"l"(map), "r"(c0), "r"(c1), "r"(c2) : "memory");
}
// Loads contiguous bytes, without a map. Both addresses and `bytes` are multiples of 16.
static __device__ __forceinline__ void bulk_load(u32 to, const void* g_from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(to), "l"(g_from), "r"(bytes), "r"(barrier) : "memory");
}

// Stores a tile of a tensor of rank 3. A fence comes after the ordinary writes to `from` and before this.
static __device__ __forceinline__ void tma_store_3d(const TensorMap* map, u32 from, int c0, int c1, int c2) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];"
                 ::"l"(map), "r"(from), "r"(c0), "r"(c1), "r"(c2) : "memory");
}
// Ends a bulk commit group: all stores that this thread started since the last one.
static __device__ __forceinline__ void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until this thread's committed stores have read shared memory, so that it may be written again.
static __device__ __forceinline__ void await_stores_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// Waits until this thread's committed stores have written global memory.
static __device__ __forceinline__ void await_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Orders this thread's earlier accesses of shared memory before later bulk copies.
static __device__ __forceinline__ void fence_proxy_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// The same for all memory, and for the writes of other threads that this one has observed.
static __device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }
