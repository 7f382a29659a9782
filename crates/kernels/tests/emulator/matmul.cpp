// A matmul with a bias on the emulator: ENTRY. Arguments of the program are those of `attention.cpp`. Before the launch the file has
// `matmul` with rows, columns, inner size and matrices of a batch, whether the left operand is transposed, whether the right one is, and
// the storage type (1 f16, 2 bf16); then `arguments`, how many, and the name of each. The batch shares the bias.
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
    host::Rows b = rows(1, 1, n), y = rows(batch, m, n);
    x.fill(state, 1.0f);
    w.fill(state, 1.0f);
    b.fill(state, 1.0f);
    host::Places places;
    for (const std::string& name : arguments) {
        places.arguments.push_back(name == "x" ? x.bytes() : name == "w" ? w.bytes() : name == "b" ? b.bytes() : y.bytes());
    }
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
                const double expected = product + at(b, 0, 0, column), off = fabs(at(y, matrix, row, column) - expected);
                const double allowed = unit * (fabs(product) + fabs(expected)) + k * 0x1p-24 * terms;
                share = std::max(share, off == off ? off / allowed : INFINITY);
            }
        }
    }
    const bool clean = y.is_clean(), ok = share <= 1.0 && clean;
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
