// A matmul of bytes with a bias on the emulator: `host::first_entry`. Arguments of the program are those of `attention.cpp`. Before the launch the file has
// `bytes` with rows, columns, inner size, and bytes of the workspace and of what is kept; then `arguments`, how many, and the name of each. Both
// operands have rows along the inner size; the bias and the result `y` are f32. Where rows of the result are made bytes again, these are `q`, with
// a scale `s` for each row, and the launch runs twice.
#include "emulator.h"
#include "guarded.h"

struct Sizes {
    u64 m, n, k, workspace, kept;
    std::vector<std::string> names;
};

static bool run_seed(const Sizes& sizes, const host::Launch& launch, emulator::Settings settings) {
    const auto& [m, n, k, workspace_bytes, kept_bytes, names] = sizes;
    u64 state = settings.seed * 77;
    const auto draw = [&] {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        return (signed char)(state >> 40);
    };
    const float unwritten = -0.5f;
    host::Guarded<signed char> x(m * k, 0), w(n * k, 0), q(m * n, 77);
    host::Guarded<float> b(n, 0.0f), y(m * n, unwritten), s(m, unwritten);
    std::generate_n(x.first, m * k, draw);
    std::generate_n(w.first, n * k, draw);
    std::generate_n(b.first, n, draw);
    std::vector<u64> workspace(workspace_bytes / 8 + 32, ~0ull), kept(kept_bytes / 8 + 32, 0);
    const auto aligned = [](void* at) { return (char*)(((u64)at + 127) / 128 * 128); };
    host::Places places;
    places.workspace = aligned(workspace.data());
    places.kept = aligned(kept.data());
    bool quantized = false;
    for (const std::string& name : names) {
        quantized |= name == "q";
        places.arguments.push_back(name == "x"   ? (char*)x.first
                                   : name == "w" ? (char*)w.first
                                   : name == "b" ? (char*)b.first
                                   : name == "q" ? (char*)q.first
                                   : name == "s" ? (char*)s.first
                                                 : (char*)y.first);
    }
    settings.statics = 4096;
    u64 wrong = 0;
    // What the first launch leaves, the second does not take for its own: its operands are others.
    for (int turn = 0; turn < (quantized ? 2 : 1); ++turn) {
        if (turn > 0) std::generate_n(x.first, m * k, draw);
        std::fill_n(q.first, m * n, (signed char)77);
        std::fill_n(s.first, m, unwritten);
        host::run_entry(host::first_entry, launch, places, settings);
        for (u64 row = 0; row < m; ++row) {
            std::vector<float> expected(n);
            for (u64 column = 0; column < n; ++column) {
                int sum = 0;
                for (u64 i = 0; i < k; ++i) sum += x.first[row * k + i] * w.first[column * k + i];
                expected[column] = (float)sum + b.first[column];
            }
            if (!quantized) {
                for (u64 column = 0; column < n; ++column) wrong += y.first[row * n + column] != expected[column];
                continue;
            }
            double largest = 0.0;
            for (float value : expected) largest = std::max(largest, (double)std::fabs(value));
            wrong += !(std::fabs(s.first[row] * 127.0 - largest) <= 1e-6 * largest);
            for (u64 column = 0; column < n; ++column) {
                const double scaled = largest == 0.0 ? 0.0 : expected[column] * 127.0 / largest;
                wrong += !(std::fabs(q.first[row * n + column] - scaled) <= 0.5 + 1e-4);
            }
        }
    }
    const bool clean = y.is_clean(unwritten) && s.is_clean(unwritten) && q.is_clean(77), ok = wrong == 0 && clean;
    printf("seed %llu: %llu of %llu wrong%s: %s\n", settings.seed, wrong, m * n, clean ? "" : ", wrote beside the result", ok ? "ok" : "FAILED");
    return ok;
}

int main(int count, char** arguments) {
    if (count < 5) emulator::fail("expected a file, blocks at once, together or apart, seeds");
    host::Reader reader(arguments[1]);
    reader.expect_name("bytes");
    Sizes sizes;
    for (u64* size : {&sizes.m, &sizes.n, &sizes.k, &sizes.workspace, &sizes.kept}) *size = (u64)reader.number();
    reader.expect_name("arguments");
    sizes.names.resize((size_t)reader.number());
    for (std::string& name : sizes.names) name = reader.name();
    const host::Launch launch = host::read_launch(reader);
    return host::run_seeds(count, arguments, [&](emulator::Settings settings) { return run_seed(sizes, launch, settings); });
}
