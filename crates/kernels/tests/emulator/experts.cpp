// Rows routed to experts on the emulator: `route`, then `host::first_entry`. Arguments of the program are those of `attention.cpp`. Before the two launches the
// file has `experts` with rows of the result, columns, inner size, experts, choices of each row of x, the storage type (0 f32, 1 f16, 2 bf16,
// 3 i8) and how rows are spread (0 evenly, 1 to two experts, 2 one of them is wrong); then `arguments`, how many, and the name of each.
// `y = x w[chosen] + b[chosen]` of one type; of bytes `y = x w[chosen] x_scale w_scale[chosen] + b[chosen]`, all but x and w f32, or that made
// bytes again, `q`, with a scale `s` for each row.
#include "emulator.h"
#include "guarded.h"

struct Sizes {
    u64 m, n, k, experts, choices, storage, spread;
    std::vector<std::string> names;
};

// Numbers of a storage type, with bytes around them that nobody may write.
struct Numbers {
    static constexpr char FILL = 0x77;
    int storage, size;
    host::Guarded<char> bytes;

    Numbers(int storage, u64 count) : storage(storage), size(storage == 0 ? 4 : storage == 3 ? 1 : 2), bytes(count * size, FILL) {}
    double at(u64 i) const {
        const char* p = bytes.first + i * size;
        return storage == 0 ? *(const float*)p : storage == 3 ? *(const signed char*)p : emulator::widened(storage, *(const u16*)p);
    }
    // Between -1 and 1, or all bytes.
    void fill(u64& state) {
        for (char* p = bytes.first; p < bytes.first + bytes.count; p += size) {
            state = state * 6364136223846793005ull + 1442695040888963407ull;
            const float x = (float)(state >> 40) * 0x1p-23f - 1.0f;
            if (storage == 0) *(float*)p = x;
            if (storage == 3) *p = (char)(state >> 56);
            if (storage == 1 || storage == 2) *(u16*)p = emulator::narrowed(storage, x);
        }
    }
    bool is_written(u64 i) const {
        return std::any_of(bytes.first + i * size, bytes.first + (i + 1) * size, [](char x) { return x != FILL; });
    }
};

static bool run_seed(const Sizes& sizes, const host::Launch& sort, const host::Launch& multiply, emulator::Settings settings) {
    const auto& [m, n, k, experts, choices, storage, spread, names] = sizes;
    const bool scaled = storage == 3;
    const int kind = (int)storage, result = scaled ? 0 : kind;
    u64 state = settings.seed * 77;
    Numbers x(kind, m / choices * k), w(kind, experts * n * k), b(result, experts * n), y(result, m * n), x_scale(0, m), w_scale(0, experts * n), q(3, m * n), s(0, m);
    for (Numbers* numbers : {&x, &w, &b, &x_scale, &w_scale}) numbers->fill(state);
    host::Guarded<int> chosen(m, 0), workspace(1 << 16, 7);
    for (u64 row = 0; row < m; ++row) {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        const u64 number = state >> 56;
        chosen.first[row] = (int)(spread == 1 ? number % 8 == 0 ? 0 : experts - 1 : number % experts);
    }
    // Two that pick no expert: the first is named.
    const u64 wrong_row = m / 3;
    if (spread == 2) chosen.first[wrong_row] = (int)experts, chosen.first[m - 1] = -1;
    u64 fault = ~0ull;
    std::vector<u64> kept(1 << 16, 0);
    host::Places places;
    places.workspace = (char*)workspace.first;
    places.kept = (char*)kept.data();
    bool quantized = false;
    places.fault = (char*)&fault;
    for (const std::string& name : names) {
        char* at = y.bytes.first;
        quantized |= name == "q";
        if (name == "q") at = q.bytes.first;
        if (name == "s") at = s.bytes.first;
        if (name == "x") at = x.bytes.first;
        if (name == "w") at = w.bytes.first;
        if (name == "b") at = b.bytes.first;
        if (name == "x_scale") at = x_scale.bytes.first;
        if (name == "w_scale") at = w_scale.bytes.first;
        if (name == "chosen") at = (char*)chosen.first;
        places.arguments.push_back(at);
    }
    settings.statics = 4096;
    host::run_entry("route", sort, places, settings);
    host::run_entry(host::first_entry, multiply, places, settings);
    const double unit = result == 0 ? 0x1p-24 : result == 1 ? 0x1p-11 : 0x1p-8;
    u64 wrong = 0;
    for (u64 row = 0; row < m; ++row) {
        const u64 expert = (u64)chosen.first[row];
        double largest = 0.0;
        std::vector<double> rows(n);
        for (u64 column = 0; column < n; ++column) {
            if (expert >= experts) {
                wrong += quantized ? q.is_written(row * n + column) || s.is_written(row) : y.is_written(row * n + column);
                continue;
            }
            double sum = 0.0, terms = 0.0;
            for (u64 i = 0; i < k; ++i) {
                const double term = x.at(row / choices * k + i) * w.at((expert * n + column) * k + i);
                sum += term;
                terms += fabs(term);
            }
            // Sums of bytes are exact; others are f32, in some order, and rounded.
            const double product = scaled ? sum * x_scale.at(row) * w_scale.at(expert * n + column) : sum;
            const double expected = product + b.at(expert * n + column), off = fabs(y.at(row * n + column) - expected);
            rows[column] = expected;
            largest = std::max(largest, fabs(expected));
            if (quantized) continue;
            wrong += !(off <= unit * (scaled ? 4 : 1) * (fabs(product) + fabs(expected)) + (scaled ? 0.0 : k * 0x1p-24 * terms));
        }
        if (!quantized || expert >= experts) continue;
        wrong += !(fabs(s.at(row) * 127.0 - largest) <= 1e-6 * largest);
        for (u64 column = 0; column < n; ++column) {
            const double there = largest == 0.0 ? 0.0 : rows[column] * 127.0 / largest;
            wrong += !(fabs(q.at(row * n + column) - there) <= 0.5 + 1e-3);
        }
    }
    const u64 expected_fault = spread == 2 ? wrong_row * 256 + 1 : ~0ull;
    const bool clean = y.bytes.is_clean(Numbers::FILL) && q.bytes.is_clean(Numbers::FILL) && s.bytes.is_clean(Numbers::FILL) && workspace.is_clean(7);
    const bool ok = wrong == 0 && clean && fault == expected_fault;
    printf("seed %llu: %llu of %llu wrong%s%s: %s\n", settings.seed, wrong, m * n, clean ? "" : ", wrote beside the result",
           fault == expected_fault ? "" : ", not the fault that was expected", ok ? "ok" : "FAILED");
    return ok;
}

int main(int count, char** arguments) {
    if (count < 5) emulator::fail("expected a file, blocks at once, together or apart, seeds");
    host::Reader reader(arguments[1]);
    reader.expect_name("experts");
    Sizes sizes;
    for (u64* size : {&sizes.m, &sizes.n, &sizes.k, &sizes.experts, &sizes.choices, &sizes.storage, &sizes.spread}) *size = (u64)reader.number();
    reader.expect_name("arguments");
    sizes.names.resize((size_t)reader.number());
    for (std::string& name : sizes.names) name = reader.name();
    const host::Launch sort = host::read_launch(reader), multiply = host::read_launch(reader);
    return host::run_seeds(count, arguments, [&](emulator::Settings settings) { return run_seed(sizes, sort, multiply, settings); });
}
