// ---- the kernel

static __device__ __forceinline__ void run(const Parameters& p) {
    extern __shared__ char s_dynamic[];
    const u32 unaligned = shared_address(s_dynamic), base = (unaligned + MEETING_BYTES + 1023) & ~1023u;
    char* const s_base = s_dynamic + (base - unaligned);
    const Ring ring = {base};
    // By a shuffle, so that the compiler knows that all lanes have the same, and keeps what follows from it in uniform registers.
    const int warpgroup = (int)shuffle(threadIdx.x / 128, 0) - 1;
    start_next();
    if (threadIdx.x == 0) {
        prefetch_tensor_map(&p.a);
        for (int right = 0; right < RIGHTS; ++right) prefetch_tensor_map(&p.b[right]);
        for (int stage = 0; stage < STAGES; ++stage) {
            mbarrier_init(ring.full(stage), 1);
            mbarrier_init(ring.empty(stage), SHARERS * (TURNS ? 4 : 8));
        }
#ifdef BY_ROWS
        prepare(ring, ((u32)p.tiles - 1 - blockIdx.x) / gridDim.x + 1);
#endif
        fence_mbarrier_init();
    }
    __syncthreads();
    if constexpr (CLUSTER > 1 && !TURNS) cluster_arrive();
    meet_neighbours();
    const u32 early = threadIdx.x == 0 ? fetch_early(p, ring) : 0;
    prefetch_shared(p);
#ifdef MAKES
    prefetch_first_rows(p);
    wait_for_previous();
    make_first_rows(p);
#else
    wait_for_previous();
#endif
    walk(p, ring, s_base, warpgroup, early);
    meet_neighbours();
}
