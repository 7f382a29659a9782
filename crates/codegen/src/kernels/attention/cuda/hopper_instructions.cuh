// The instructions that only Hopper has (sm_90a), each a function: barriers in shared memory, copies of tiles by tensor maps,
// products of a warpgroup. Addresses of shared memory are 32-bit numbers here, as the instructions take them.

static __device__ __forceinline__ u32 shared_address(const void* s_at) { return (u32)__cvta_generic_to_shared(s_at); }

// Barriers in shared memory. A phase is over once `count` arrivals and all expected bytes have come; the phases of a barrier
// have parities 0, 1, 0, ... in turn.
static __device__ __forceinline__ void init_barrier(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
// Barriers that were made before are there for the unit that copies too.
static __device__ __forceinline__ void fence_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
static __device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives, and has the phase wait for so many bytes.
static __device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
static __device__ __forceinline__ bool is_over(u32 barrier, u32 parity) {
    u32 over;
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(over) : "r"(barrier), "r"(parity) : "memory");
    return over != 0;
}
// The same without the while that the instruction before may wait for.
static __device__ __forceinline__ bool is_over_now(u32 barrier, u32 parity) {
    u32 over;
    asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(over) : "r"(barrier), "r"(parity) : "memory");
    return over != 0;
}
// Waits for the end of the phase of this parity. Of a new barrier the phase of parity 1 counts as over.
static __device__ __forceinline__ void wait(u32 barrier, u32 parity) {
    while (!is_over(barrier, parity)) {
    }
}

// Barriers of a number of threads, known by a number.
static __device__ __forceinline__ void named_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
static __device__ __forceinline__ void named_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// What the unit that copies knows of a tensor: where it is, its sizes and strides, the size of a tile. The host writes it.
struct alignas(128) TensorMap {
    u64 opaque[16];
};

// It will be used.
static __device__ __forceinline__ void expect_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// A tile on its way to shared memory: rows from `row` on of one head, zeros beyond the last. The barrier gets its bytes. A row
// is pieces of 64 elements (128 bytes); of two pieces the first ones of all rows come first. In eight rows of 128 bytes, 16 bytes
// lie at their place xor the row (the 128-byte swizzle), so that neither rows nor columns of small matrices meet in a bank.
template <int PIECES>
static __device__ __forceinline__ void fetch(u32 to, const TensorMap* map, u32 barrier, int row, int head, int sequence) {
    if constexpr (PIECES == 1) {
        asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
                     "[%0], [%1, {%3, %4, %5, %6}], [%2];"
                     ::"r"(to), "l"(map), "r"(barrier), "r"(0), "r"(row), "r"(head), "r"(sequence) : "memory");
    } else {
        asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
                     "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];"
                     ::"r"(to), "l"(map), "r"(barrier), "r"(0), "r"(row), "r"(0), "r"(head), "r"(sequence) : "memory");
    }
}

// Bytes that lie together on their way to shared memory: a multiple of 16 from one on. The barrier gets them.
static __device__ __forceinline__ void fetch_bytes(u32 to, const void* g_from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(to), "l"(g_from), "r"(bytes), "r"(barrier) : "memory");
}
// What this thread wrote to shared memory comes before copies to the same place that are allowed later.
static __device__ __forceinline__ void fence_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The same for copies from any memory, of what this thread knows to be written.
static __device__ __forceinline__ void fence_all_copies() { asm volatile("fence.proxy.async;" ::: "memory"); }

// A tile of a matrix on its way to shared memory: rows from `row` on of 128 bytes from `column` on, zeros beyond the last.
static __device__ __forceinline__ void fetch_piece(u32 to, const TensorMap* map, u32 barrier, int column, int row, int sequence) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
                 ::"r"(to), "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(sequence) : "memory");
}
// The same the other way: nothing is written beyond the last. What this thread stores so is counted in groups; what it wrote to shared
// memory before needs a fence.
static __device__ __forceinline__ void store_piece(const TensorMap* map, u32 from, int column, int row, int sequence) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];"
                 ::"l"(map), "r"(from), "r"(column), "r"(row), "r"(sequence) : "memory");
}
static __device__ __forceinline__ void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// All that this thread has committed is read, or written too.
static __device__ __forceinline__ void wait_stores_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
static __device__ __forceinline__ void wait_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Words of global memory by which blocks tell each other of what they have done.
static __device__ __forceinline__ u64 read_word(const u64* g_word) {
    u64 word;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(g_word) : "memory");
    return word;
}
static __device__ __forceinline__ void write_word(u64* g_word, u64 word) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(g_word), "l"(word) : "memory");
}
// What this thread, and those it knows of, did before comes before the sum; the sum before was.
static __device__ __forceinline__ u32 add_released(u32* g_sum, u32 more) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(g_sum), "r"(more) : "memory");
    return before;
}
static __device__ __forceinline__ u32 load_acquired(const u32* g_sum) {
    u32 sum;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(sum) : "l"(g_sum) : "memory");
    return sum;
}
// The same within a block, in shared memory.
static __device__ __forceinline__ void store_released_shared(u32 s_at, u32 value) {
    asm volatile("st.release.cta.shared::cta.u32 [%0], %1;" ::"r"(s_at), "r"(value) : "memory");
}
static __device__ __forceinline__ u32 load_acquired_shared(u32 s_at) {
    u32 value;
    asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];" : "=r"(value) : "r"(s_at) : "memory");
    return value;
}
// The number of this thread, asked for anew: what follows from it need not stay in registers meanwhile.
static __device__ __forceinline__ int thread_anew() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}
// For who looks again and again.
static __device__ __forceinline__ void pause() { asm volatile("nanosleep.u32 %0;" ::"n"(40) : "memory"); }

// The sums of two pairs, rounded once. A sum of two such numbers has so few digits between that rounding it to f32 before changes nothing.
template <int KIND> static __device__ __forceinline__ u32 add_pairs(u32 a, u32 b) {
    u32 sums;
    if constexpr (KIND == 2) {
        asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(sums) : "r"(a), "r"(b));
    } else {
        asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sums) : "r"(a), "r"(b));
    }
    return sums;
}

// Registers of a warp's threads from here on.
template <int COUNT> static __device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> static __device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Four matrices of 8 x 8 to rows of shared memory: lane l holds the address of row l % 8 of matrix l / 8, and elements
// 2 (l % 4) and the next of row l / 4 of each.
static __device__ __forceinline__ void store_matrices(void* s_row, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(shared_address(s_row)), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}

// Products of a warpgroup go on while the program does. What they read and write may not be touched between the fence before
// them and the wait after them.
static __device__ __forceinline__ void fence_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
static __device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// All but so many of the groups of products committed last are done.
template <int PENDING> static __device__ __forceinline__ void wait_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// The compiler knows nothing of products that go on: registers pinned here are not read or written across this line.
template <int N> static __device__ __forceinline__ void pin(float (&r)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(r[i])::"memory");
}
template <int N> static __device__ __forceinline__ void pin(u32 (&r)[N][4]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+r"(r[i][0]), "+r"(r[i][1]), "+r"(r[i][2]), "+r"(r[i][3])::"memory");
}

// How a product finds a tile in shared memory: its address, 1024 bytes from eight rows to the next, the 128-byte swizzle.
// BEYOND: bytes to the next 64 columns, for an operand whose columns lie together. A descriptor counts in 16 bytes.
template <int BEYOND> static __device__ __forceinline__ u64 descriptor(u32 tile) {
    return (u64)((tile & 0x3ffff) >> 4) | (u64)(BEYOND >> 4) << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}

// d += a b of 64 x 16 and 16 x N, with sums in f32; d = a b where `add` is 0. In d, warp w of the group has rows 16 w on; with
// g = lane / 4 and t = lane % 4 its registers 4 j on are (g, 8 j + 2 t), the next column, and both of row g + 8. Each d is one
// instruction, so its registers stand in a list.
// - of_shared: a lies in shared memory, its rows along the sum.
// - of_registers: a is in registers as d lies, narrowed to pairs.
// TURNED: columns of b lie together, not what is summed.
template <int N> struct Product;
#define PRODUCT(TYPES, N, D, REST, ADD, ...) \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ADD ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPES " " D \
                 ", " REST ";\n}" : __VA_ARGS__)
#define PRODUCT_OF_STORAGE(...) \
    if constexpr (STORAGE == 2) PRODUCT("bf16.bf16", __VA_ARGS__); else PRODUCT("f16.f16", __VA_ARGS__)
#define FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SIXTEEN(i) FOUR(i), FOUR(i + 4), FOUR(i + 8), FOUR(i + 12)
#define SUMS_64 \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define SUMS_128 \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"

template <> struct Product<64> {
    template <int TURNED> static __device__ __forceinline__ void of_shared(float (&d)[32], u64 a, u64 b, int add) {
        PRODUCT_OF_STORAGE(64, SUMS_64, "%32, %33, p, 1, 1, 0, %35", "%34", SIXTEEN(0), SIXTEEN(16)
                           : "l"(a), "l"(b), "r"(add), "n"(TURNED));
    }
    template <int TURNED> static __device__ __forceinline__ void of_registers(float (&d)[32], const u32 (&a)[4], u64 b, int add) {
        PRODUCT_OF_STORAGE(64, SUMS_64, "{%32, %33, %34, %35}, %36, p, 1, 1, %38", "%37", SIXTEEN(0), SIXTEEN(16)
                           : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(TURNED));
    }
};

template <> struct Product<128> {
    template <int TURNED> static __device__ __forceinline__ void of_shared(float (&d)[64], u64 a, u64 b, int add) {
        PRODUCT_OF_STORAGE(128, SUMS_128, "%64, %65, p, 1, 1, 0, %67", "%66",
                           SIXTEEN(0), SIXTEEN(16), SIXTEEN(32), SIXTEEN(48) : "l"(a), "l"(b), "r"(add), "n"(TURNED));
    }
    template <int TURNED> static __device__ __forceinline__ void of_registers(float (&d)[64], const u32 (&a)[4], u64 b, int add) {
        PRODUCT_OF_STORAGE(128, SUMS_128, "{%64, %65, %66, %67}, %68, p, 1, 1, %70", "%69",
                           SIXTEEN(0), SIXTEEN(16), SIXTEEN(32), SIXTEEN(48)
                           : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(TURNED));
    }
};
