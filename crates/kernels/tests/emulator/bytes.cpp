// A matmul of bytes with a bias on the emulator: ENTRY. Arguments of the program are those of `attention.cpp`. Before the launch the file has
// `bytes` with rows, columns and inner size; then `arguments`, how many, and the name of each. Both operands have rows along the inner size;
// the bias and the result are f32.
#include "emulator.h"
#include "guarded.h"
#include "kernel.h"

static bool run_seed(u64 m, u64 n, u64 k, const std::vector<std::string>& names, const host::Launch& launch, emulator::Settings settings) {
    u64 state = settings.seed * 77;
    const auto draw = [&] {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        return (signed char)(state >> 40);
    };
    const float unwritten = -0.5f;
    host::Guarded<signed char> x(m * k, 0), w(n * k, 0);
    host::Guarded<float> b(n, 0.0f), y(m * n, unwritten);
    std::generate_n(x.first, m * k, draw);
    std::generate_n(w.first, n * k, draw);
    std::generate_n(b.first, n, draw);
    host::Places places;
    for (const std::string& name : names) {
        places.arguments.push_back(name == "x" ? (char*)x.first : name == "w" ? (char*)w.first : name == "b" ? (char*)b.first : (char*)y.first);
    }
    settings.statics = 4096;
    host::run(ENTRY, launch, places, settings);
    u64 wrong = 0;
    for (u64 row = 0; row < m; ++row) {
        for (u64 column = 0; column < n; ++column) {
            int sum = 0;
            for (u64 i = 0; i < k; ++i) sum += x.first[row * k + i] * w.first[column * k + i];
            wrong += y.first[row * n + column] != (float)sum + b.first[column];
        }
    }
    const bool clean = y.is_clean(unwritten), ok = wrong == 0 && clean;
    printf("seed %llu: %llu of %llu wrong%s: %s\n", settings.seed, wrong, m * n, clean ? "" : ", wrote beside the result", ok ? "ok" : "FAILED");
    return ok;
}

int main(int count, char** arguments) {
    if (count < 5) emulator::fail("expected a file, blocks at once, together or apart, seeds");
    host::Reader reader(arguments[1]);
    reader.expect_name("bytes");
    const u64 m = (u64)reader.number(), n = (u64)reader.number(), k = (u64)reader.number();
    reader.expect_name("arguments");
    std::vector<std::string> names((size_t)reader.number());
    for (std::string& name : names) name = reader.name();
    const host::Launch launch = host::read_launch(reader);
    return host::run_seeds(count, arguments, [&](emulator::Settings settings) { return run_seed(m, n, k, names, launch, settings); });
}
