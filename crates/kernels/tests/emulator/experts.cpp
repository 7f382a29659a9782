// Rows of bytes routed to experts on the emulator: `route`, then `matmul_routed`. Arguments of the program are those of `attention.cpp`.
// Before the two launches the file has `experts` with rows, columns, inner size, experts and how rows are spread (0 evenly, 1 to two experts,
// 2 one of them is wrong); then `arguments`, how many, and the name of each. `y = x w[chosen] x_scale w_scale[chosen] + b[chosen]`, all but
// x and w f32.
#include "emulator.h"
#include "guarded.h"
#include "kernel.h"

struct Sizes {
    u64 m, n, k, experts, spread;
    std::vector<std::string> names;
};

static bool run_seed(const Sizes& sizes, const host::Launch& sort, const host::Launch& multiply, emulator::Settings settings) {
    const auto& [m, n, k, experts, spread, names] = sizes;
    u64 state = settings.seed * 77;
    const auto draw = [&] {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        return (signed char)(state >> 40);
    };
    const auto scale = [&] { return 1.0f + (float)draw() / 128.0f; };
    const float unwritten = -0.5f;
    host::Guarded<signed char> x(m * k, 0), w(experts * n * k, 0);
    host::Guarded<float> x_scale(m, 0.0f), w_scale(experts * n, 0.0f), b(experts * n, 0.0f), y(m * n, unwritten);
    host::Guarded<int> chosen(m, 0), workspace(1 << 16, 7);
    std::generate_n(x.first, m * k, draw);
    std::generate_n(w.first, experts * n * k, draw);
    std::generate_n(x_scale.first, m, scale);
    std::generate_n(w_scale.first, experts * n, scale);
    std::generate_n(b.first, experts * n, scale);
    for (u64 row = 0; row < m; ++row) {
        const u64 number = (u64)(unsigned char)draw();
        chosen.first[row] = (int)(spread == 1 ? number % 8 == 0 ? 0 : experts - 1 : number % experts);
    }
    // Two that pick no expert: the first is named.
    const u64 wrong_row = m / 3;
    if (spread == 2) chosen.first[wrong_row] = (int)experts, chosen.first[m - 1] = -1;
    u64 fault = ~0ull;
    host::Places places;
    places.workspace = (char*)workspace.first;
    places.fault = (char*)&fault;
    for (const std::string& name : names) {
        char* at = (char*)y.first;
        if (name == "x") at = (char*)x.first;
        if (name == "w") at = (char*)w.first;
        if (name == "b") at = (char*)b.first;
        if (name == "x_scale") at = (char*)x_scale.first;
        if (name == "w_scale") at = (char*)w_scale.first;
        if (name == "chosen") at = (char*)chosen.first;
        places.arguments.push_back(at);
    }
    settings.statics = 4096;
    host::run(route, sort, places, settings);
    host::run(matmul_routed, multiply, places, settings);
    u64 wrong = 0;
    for (u64 row = 0; row < m; ++row) {
        const u64 expert = (u64)chosen.first[row];
        for (u64 column = 0; column < n; ++column) {
            const float found = y.first[row * n + column];
            if (expert >= experts) {
                wrong += found != unwritten;
                continue;
            }
            int sum = 0;
            for (u64 i = 0; i < k; ++i) sum += x.first[row * k + i] * w.first[(expert * n + column) * k + i];
            const double product = (double)sum * x_scale.first[row] * w_scale.first[expert * n + column];
            const double expected = product + b.first[expert * n + column];
            wrong += !(fabs(found - expected) <= 4 * 0x1p-24 * (fabs(product) + fabs(expected)));
        }
    }
    const u64 expected_fault = spread == 2 ? wrong_row * 256 + 1 : ~0ull;
    const bool clean = y.is_clean(unwritten) && workspace.is_clean(7), ok = wrong == 0 && clean && fault == expected_fault;
    printf("seed %llu: %llu of %llu wrong%s%s: %s\n", settings.seed, wrong, m * n, clean ? "" : ", wrote beside the result",
           fault == expected_fault ? "" : ", not the fault that was expected", ok ? "ok" : "FAILED");
    return ok;
}

int main(int count, char** arguments) {
    if (count < 5) emulator::fail("expected a file, blocks at once, together or apart, seeds");
    host::Reader reader(arguments[1]);
    reader.expect_name("experts");
    Sizes sizes;
    for (u64* size : {&sizes.m, &sizes.n, &sizes.k, &sizes.experts, &sizes.spread}) *size = (u64)reader.number();
    reader.expect_name("arguments");
    sizes.names.resize((size_t)reader.number());
    for (std::string& name : sizes.names) name = reader.name();
    const host::Launch sort = host::read_launch(reader), multiply = host::read_launch(reader);
    return host::run_seeds(count, arguments, [&](emulator::Settings settings) { return run_seed(sizes, sort, multiply, settings); });
}
