// A matmul with a bias, and maybe a residual and a layer norm, on the emulator: ENTRY. Arguments of the program are those of `attention.cpp`. Before the launch the file has
// `matmul` with rows, columns, inner size and matrices of a batch, whether the left operand is transposed, whether the right one is, and
// the storage type (1 f16, 2 bf16); then `arguments`, how many, and the name of each: x and w are multiplied, b is the bias, r the residual, s the sum where it is normed by weights g and h; y is the
// result. The batch shares bias and weights.
#include <algorithm>
#include <map>
#include "emulator.h"
#include "attention.h"
#include "kernel.h"

struct Sizes {
    u64 m, n, k, batch;
    bool left, right;  // transposed
    int storage;
    std::vector<std::string> arguments;
};

static Sizes read_sizes(host::Reader& reader) {
    Sizes sizes;
    reader.expect_name("matmul");
    for (u64* size : {&sizes.m, &sizes.n, &sizes.k, &sizes.batch}) *size = (u64)reader.number();
    sizes.left = reader.number() != 0;
    sizes.right = reader.number() != 0;
    sizes.storage = (int)reader.number();
    reader.expect_name("arguments");
    for (long long left = reader.number(); left > 0; --left) sizes.arguments.push_back(reader.name());
    return sizes;
}

static bool run_seed(const Sizes& sizes, const host::Launch& launch, emulator::Settings settings) {
    const auto& [m, n, k, batch, left, right, storage, arguments] = sizes;
    u64 state = settings.seed * 77;
    const auto rows = [&](u64 count, u64 high, u64 wide) { return host::Rows(storage, count, 1, high, wide, {high * wide, 0, wide}); };
    host::Rows x = left ? rows(batch, k, m) : rows(batch, m, k), w = right ? rows(batch, n, k) : rows(batch, k, n);
    host::Rows b = rows(1, 1, n), g = rows(1, 1, n), h = rows(1, 1, n), r = rows(batch, m, n), s = rows(batch, m, n), y = rows(batch, m, n);
    for (host::Rows* operand : {&x, &w, &b, &g, &h, &r}) operand->fill(state, 1.0f);
    const std::map<std::string, host::Rows*> named = {{"x", &x}, {"w", &w}, {"b", &b}, {"g", &g}, {"h", &h}, {"r", &r}, {"s", &s}, {"y", &y}};
    const auto has = [&](const char* name) { return std::find(arguments.begin(), arguments.end(), name) != arguments.end(); };
    const bool normed = has("s");
    host::Rows& sums = normed ? s : y;
    host::Places places;
    for (const std::string& name : arguments) places.arguments.push_back(named.at(name)->bytes());
    settings.statics = 4096;
    host::run(ENTRY, launch, places, settings);

    const double unit = storage == 1 ? 0x1p-11 : 0x1p-8;
    double share = 0.0;
    const auto at = [&](host::Rows& rows, u64 matrix, u64 row, u64 column) {
        return (double)emulator::widened(storage, rows.row(matrix, 0, row)[column]);
    };
    for (u64 matrix = 0; matrix < batch; ++matrix) {
        for (u64 row = 0; row < m; ++row) {
            for (u64 column = 0; column < n; ++column) {
                double product = 0.0, terms = 0.0;
                for (u64 i = 0; i < k; ++i) {
                    const double term = (left ? at(x, matrix, i, row) : at(x, matrix, row, i)) *
                                        (right ? at(w, matrix, column, i) : at(w, matrix, i, column));
                    product += term;
                    terms += fabs(term);
                }
                // Sums are f32, in some order; the matmul's result is rounded, and the sum with the bias.
                const double biased = product + at(b, 0, 0, column), expected = biased + (has("r") ? at(r, matrix, row, column) : 0.0);
                const double off = fabs(at(sums, matrix, row, column) - expected);
                const double allowed = unit * (fabs(product) + fabs(biased) + fabs(expected)) + k * 0x1p-24 * terms;
                share = std::max(share, off == off ? off / allowed : INFINITY);
            }
            if (!normed) continue;
            // The norm of the sums as they were stored.
            double mean = 0.0, squares = 0.0;
            for (u64 column = 0; column < n; ++column) mean += at(s, matrix, row, column) / n;
            for (u64 column = 0; column < n; ++column) squares += pow(at(s, matrix, row, column) - mean, 2) / n;
            for (u64 column = 0; column < n; ++column) {
                const double scaled = (at(s, matrix, row, column) - mean) / sqrt(squares + 1e-5) * at(g, 0, 0, column);
                const double expected = scaled + at(h, 0, 0, column), off = fabs(at(y, matrix, row, column) - expected);
                const double allowed = unit * fabs(expected) + 0x1p-18 * (fabs(scaled) + fabs(at(h, 0, 0, column)) + 1.0);
                share = std::max(share, off == off ? off / allowed : INFINITY);
            }
        }
    }
    const bool clean = y.is_clean() && s.is_clean(), ok = share <= 1.0 && clean;
    printf("seed %llu: %.2f of what rounding allows%s: %s\n", settings.seed, share, clean ? "" : ", wrote beside the result",
           ok ? "ok" : "FAILED");
    return ok;
}

int main(int count, char** arguments) {
    if (count < 5) emulator::fail("expected a file, blocks at once, together or apart, seeds");
    host::Reader reader(arguments[1]);
    const Sizes sizes = read_sizes(reader);
    const host::Launch launch = host::read_launch(reader);
    return host::run_seeds(count, arguments, [&](emulator::Settings settings) { return run_seed(sizes, launch, settings); });
}
