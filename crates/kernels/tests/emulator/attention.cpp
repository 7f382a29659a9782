// A kernel of attention on the emulator: ENTRY, whose arguments are queries, keys, values and the result. Arguments of the
// program: a file with a shape and a launch, blocks that run at once, `together` or `apart` for the lanes of a warp, seeds.
#include "emulator.h"
#include "attention.h"
#include "kernel.h"

static bool run_seed(const host::Shape& shape, const host::Launch& launch, emulator::Settings settings) {
    u64 state = settings.seed * 77;
    const u64 key_heads = shape.heads / shape.group;
    host::Rows q(STORAGE, shape.batch, shape.heads, shape.queries, WIDTH, shape.q);
    host::Rows k(STORAGE, shape.batch, key_heads, shape.keys, WIDTH, shape.k);
    host::Rows v(STORAGE, shape.batch, key_heads, shape.keys, WIDTH, shape.v);
    host::Rows o(STORAGE, shape.batch, shape.heads, shape.queries, WIDTH, shape.o);
    q.fill(state, 4.0f);
    k.fill(state, 2.0f);
    v.fill(state, 1.0f);
    // What is kept from launch to launch is zeros between them.
    std::vector<u64> kept(64, 0);
    host::Places places{{q.bytes(), k.bytes(), v.bytes(), o.bytes()}};
    places.kept = (char*)kept.data() + (256 - (u64)kept.data() % 256) % 256;
    host::run(ENTRY, launch, places, settings);
    const host::Error error = host::compare(shape, q, k, v, o, SCALE, MASK == CAUSAL);
    const bool clean = o.is_clean(), left = std::any_of(kept.begin(), kept.end(), [](u64 word) { return word != 0; });
    const bool ok = error.share <= 1.0 && clean && !left;
    printf("seed %llu: max error %.3g, %.2f of what rounding allows%s%s: %s\n", settings.seed, error.most, error.share,
           clean ? "" : ", wrote beside the result", left ? ", left a count" : "", ok ? "ok" : "FAILED");
    return ok;
}

int main(int count, char** arguments) {
    if (count < 5) emulator::fail("expected a file, blocks at once, together or apart, seeds");
    host::Reader reader(arguments[1]);
    const host::Shape shape = host::read_shape(reader);
    const host::Launch launch = host::read_launch(reader);
    return host::run_seeds(count, arguments, [&](emulator::Settings settings) { return run_seed(shape, launch, settings); });
}
