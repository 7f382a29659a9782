// Keeps a stream busy for a while, so that what is timed behind it is all enqueued before it starts.

struct Hold {
    unsigned long long nanoseconds;
};

extern "C" __global__ void hold(const __grid_constant__ Hold p) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do {
        __nanosleep(100);
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - start < p.nanoseconds);
}
