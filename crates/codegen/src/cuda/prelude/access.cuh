// Accesses of V elements by pieces of A bytes, the alignment that the launch promises.

// How a load goes by the caches: what is read once is not worth keeping.
enum Load { STREAM, AGAIN };

template <int BYTES, int A, Load HOW> static __device__ __forceinline__ void load_words(u32* w, const char* p) {
    if constexpr (A >= 4) {
#pragma unroll
        for (int i = 0; i < BYTES / A; ++i) {
            if constexpr (HOW == AGAIN) Access<A>::load_again(w + i * (A / 4), p + i * A);
            else Access<A>::load(w + i * (A / 4), p + i * A);
        }
    } else if constexpr (A == 2) {
#pragma unroll
        for (int i = 0; i < BYTES / 2; ++i) {
            const u32 x = load_u16(p + 2 * i) << (16 * (i & 1));
            if (i & 1) w[i / 2] |= x;
            else w[i / 2] = x;
        }
    } else {
#pragma unroll
        for (int i = 0; i < BYTES; ++i) {
            const u32 x = load_u8(p + i) << (8 * (i & 3));
            if (i & 3) w[i / 4] |= x;
            else w[i / 4] = x;
        }
    }
}

// V elements; zeros where the mask does not hold. A is at most the bytes of all of them.
template <class Type, int A, Load HOW> static __device__ __forceinline__ Raw<Type> load(const char* p, bool in) {
    Raw<Type> r;
    constexpr int BYTES = V * Type::SIZE;
#pragma unroll
    for (int i = 0; i < (BYTES + 3) / 4; ++i) r.w[i] = 0;
    if (in) load_words<BYTES, A, HOW>(r.w, p);
    return r;
}

// V elements to shared memory by cp.async; zeros where the mask does not hold. They are there after a wait for their commit group.
template <class Type, int A> static __device__ __forceinline__ void copy(Raw<Type>* to, const char* p, bool in) {
    const u32 at = shared_address(to);
#pragma unroll
    for (int i = 0; i < V * Type::SIZE / A; ++i) copy_async<A>(at + A * i, p + A * i, in);
}

// The first `count` of V elements, one by one: the tail of a flat kernel.
template <class Type> static __device__ __forceinline__ Raw<Type> load_tail(const char* p, int count) {
    Raw<Type> r;
#pragma unroll
    for (int i = 0; i < (V * Type::SIZE + 3) / 4; ++i) r.w[i] = 0;
#pragma unroll
    for (int i = 0; i < V; ++i) {
        if (i < count) {
            if constexpr (Type::SIZE == 4) {
                Access<4>::load(r.w + i, p + 4 * i);
            } else if constexpr (Type::SIZE == 2) {
                r.w[i / 2] |= load_u16(p + 2 * i) << (16 * (i & 1));
            } else {
                r.w[i / 4] |= load_u8(p + i) << (8 * (i & 3));
            }
        }
    }
    return r;
}

template <class Type, int A> static __device__ __forceinline__ void store_raw(char* p, const Raw<Type>& r) {
    constexpr int BYTES = V * Type::SIZE;
    if constexpr (A >= 4) {
#pragma unroll
        for (int i = 0; i < BYTES / A; ++i) Access<A>::store(p + i * A, r.w + i * (A / 4));
    } else if constexpr (A == 2) {
#pragma unroll
        for (int i = 0; i < BYTES / 2; ++i) store_u16(p + 2 * i, r.w[i / 2] >> (16 * (i & 1)));
    } else {
#pragma unroll
        for (int i = 0; i < BYTES; ++i) store_u8(p + i, r.w[i / 4] >> (8 * (i & 3)));
    }
}

template <class Type, int A, class X> static __device__ __forceinline__ void store(char* p, const X& x, bool in) {
    if (in) store_raw<Type, A>(p, Packer<Type>::pack(x));
}

template <class Type, class X> static __device__ __forceinline__ void store_tail(char* p, const X& x, int count) {
    const Raw<Type> r = Packer<Type>::pack(x);
#pragma unroll
    for (int i = 0; i < V; ++i) {
        if (i < count) {
            if constexpr (Type::SIZE == 4) Access<4>::store(p + 4 * i, r.w + i);
            else if constexpr (Type::SIZE == 2) store_u16(p + 2 * i, r.w[i / 2] >> (16 * (i & 1)));
            else store_u8(p + i, r.w[i / 4] >> (8 * (i & 3)));
        }
    }
}

// One number per row.
static __device__ __forceinline__ float load_one(F32, const char* p) { u32 w; Access<4>::load_again(&w, p); return __uint_as_float(w); }
static __device__ __forceinline__ float load_one(Bf16, const char* p) { return bf16_low(load_u16(p)); }
static __device__ __forceinline__ float load_one(F16, const char* p) { return f16_low(load_u16(p)); }
static __device__ __forceinline__ int load_one(I32, const char* p) { u32 w; Access<4>::load_again(&w, p); return (int)w; }
static __device__ __forceinline__ float load_one(I8, const char* p) { return (float)(signed char)load_u8(p); }
static __device__ __forceinline__ bool load_one(Bool, const char* p) { return load_u8(p) != 0; }

static __device__ __forceinline__ void store_one(F32, char* p, float x) { const u32 w = __float_as_uint(x); Access<4>::store(p, &w); }
static __device__ __forceinline__ void store_one(I32, char* p, int x) { const u32 w = (u32)x; Access<4>::store(p, &w); }
static __device__ __forceinline__ void store_one(Bf16, char* p, float x) { store_u16(p, bf16x2(x, 0.0f)); }
static __device__ __forceinline__ void store_one(F16, char* p, float x) { store_u16(p, f16x2(x, 0.0f)); }
static __device__ __forceinline__ void store_one(I8, char* p, float x) { store_u8(p, (u32)to_i8(x)); }
static __device__ __forceinline__ void store_one(F8, char* p, float x) { store_u8(p, to_f8(x)); }
static __device__ __forceinline__ void store_one(Bool, char* p, float x) { store_u8(p, x != 0.0f); }
static __device__ __forceinline__ void store_one(Bool, char* p, bool x) { store_u8(p, x); }
