// A matmul with a bias, and maybe a residual and a layer norm, on the emulator: `host::first_entry`. Arguments of the program are those of
// `attention.cpp`. Before the launch the file has `matmul` with rows, columns, inner size and matrices of a batch, whether the left operand is
// transposed, whether the right one is, the storage types of the operands and of bias and result (0 f32, 1 f16, 2 bf16, 3 i8), and how many
// elements of every line of the operands come before those of the matmul; then `arguments`, how many, and the name of each: x and w are
// multiplied, b is the bias, r the residual, s the sum where it is normed by weights g and h (without s, the norm is of the sum with the bias,
// and the residual is added to it); y is the result, p that of a matmul alone. The batch shares bias and weights; a kernel without bias is the
// matmul alone. Where x is multiplied by v and u, too, their results are z and t. Where c and d are among the arguments, the left operand is the
// layer norm of x with these weights, which the launch itself makes. Then comes what the launch has beside itself:
//
//   alone                   nothing
//   first NAME COUNT BYTES  launches of this kernel before it, on a workspace of so many bytes that they share
//   kept BYTES KEPT         bytes of workspace, and of what is kept from launch to launch
//   summed BYTES            bytes of workspace for sums over rows, into f; the launch of `finish` comes behind that of the matmul
//
// Where PLANTED is defined, operands of f32 have extreme values.
#include "emulator.h"
#include "attention.h"

struct Sizes {
    u64 m, n, k, batch;
    bool left, right;  // transposed
    int storage, result;
    u64 skipped;
    std::vector<std::string> arguments;
};

static Sizes read_sizes(host::Reader& reader) {
    Sizes sizes;
    reader.expect_name("matmul");
    for (u64* size : {&sizes.m, &sizes.n, &sizes.k, &sizes.batch}) *size = (u64)reader.number();
    sizes.left = reader.number() != 0;
    sizes.right = reader.number() != 0;
    sizes.storage = (int)reader.number();
    sizes.result = (int)reader.number();
    sizes.skipped = (u64)reader.number();
    reader.expect_name("arguments");
    for (long long left = reader.number(); left > 0; --left) sizes.arguments.push_back(reader.name());
    return sizes;
}

// Matrices of a storage type, one behind another. Around them, and before the part of a line that counts, are numbers that are none.
struct Matrices {
    static constexpr size_t AROUND = 8192;
    static constexpr char FILL = (char)0xff;
    int storage, size;
    u64 count, high, wide, skipped;
    std::vector<char> all;
    char* first;

    Matrices(int storage, u64 count, u64 high, u64 wide, u64 skipped)
        : storage(storage), size(storage == 0 ? 4 : storage == 3 ? 1 : 2), count(count), high(high), wide(wide), skipped(skipped) {
        all.assign(bytes() + 2 * AROUND, FILL);
        first = all.data() + AROUND / 2;
        while ((u64)first % 128) ++first;
    }
    Matrices(const Matrices& other) : Matrices(other.storage, other.count, other.high, other.wide, other.skipped) {}
    u64 bytes() const { return count * high * (skipped + wide) * size; }
    char* place(u64 matrix, u64 row, u64 column) { return first + ((matrix * high + row) * (skipped + wide) + skipped + column) * size; }
    double at(u64 matrix, u64 row, u64 column) {
        const char* p = place(matrix, row, column);
        return storage == 0 ? *(const float*)p : storage == 3 ? *(const signed char*)p : emulator::widened(storage, *(const u16*)p);
    }
    // Numbers between -1 and 1, or all bytes.
    void fill(u64& state) {
        for (u64 i = 0; i < count * high * wide; ++i) {
            state = state * 6364136223846793005ull + 1442695040888963407ull;
            char* p = place(i / wide / high, i / wide % high, i % wide);
            const float x = (float)(state >> 40) * 0x1p-23f - 1.0f;
            if (storage == 0) *(float*)p = x;
            if (storage == 3) *p = (char)(state >> 56);
            if (storage == 1 || storage == 2) *(u16*)p = emulator::narrowed(storage, x);
        }
    }
    bool is_clean() const {
        const auto filled = [](char x) { return x == FILL; };
        const char* end = first + bytes();
        return std::all_of(all.data(), (const char*)first, filled) && std::all_of(end, all.data() + all.size(), filled);
    }
};

#ifdef PLANTED
// Plants f32 that have no two numbers of TF32 in the last matrix of both operands: NaN of all bits and of the lowest one, infinity before weights that are zero,
// one and any, the largest number, subnormal ones and others below 2^-117.
static void plant(Matrices& x, Matrices& w, bool left, bool right) {
    const u64 k = left ? x.high : x.wide;
    const auto word = [](Matrices& of, bool transposed, u64 row, u64 column) -> u32& { return *(u32*)of.place(of.count - 1, transposed ? column : row, transposed ? row : column); };
    word(x, left, 1, 3) = 0x7fffffff;
    word(x, left, 2, k - 1) = 0xff800001;
    word(x, left, 3, 5) = 0x7f800000;
    word(w, right, 5, 0) = 0;
    word(w, right, 5, 1) = 0x3f800000;
    for (u64 i = 0; i < k; ++i) {
        word(x, left, 4, i) = i == 7 ? 0x7f7fffff : 0;
        word(x, left, 5, i) = i % 3 ? 0x04800000u | (u32)(i * 0x9e3779b1u) & 0x7fffffu : 0x00000100u << i % 15 | i % 2 << 31;
    }
    word(w, right, 9, 2) = 0x7f800000;
}
#endif

// Launches that come before the matmul and behind it, and the workspace.
struct Before {
    std::string kind, first;
    std::vector<host::Launch> launches;
    std::vector<char> workspace, kept;
    std::vector<host::Launch> behind;
};

static Before read_before(host::Reader& reader) {
    Before before;
    before.kind = reader.name();
    if (before.kind == "alone") return before;
    if (before.kind != "first" && before.kind != "kept" && before.kind != "summed") emulator::fail("no kind %s", before.kind.c_str());
    if (before.kind == "first") before.first = reader.name();
    const long long count = before.kind == "first" ? reader.number() : 0;
    before.workspace.resize(reader.number() + 128);
    for (long long i = 0; i < count; ++i) before.launches.push_back(host::read_launch(reader));
    if (before.kind == "kept") before.kept.resize(reader.number() + 128);
    return before;
}

static bool run_seed(const Sizes& sizes, Before& before, const host::Launch& launch, emulator::Settings settings) {
    const auto& [m, n, k, batch, left, right, storage, result, skipped, arguments] = sizes;
    u64 state = settings.seed * 77;
    const auto operand = [&, count = batch, skip = skipped, kind = storage](bool transposed, u64 high, u64 wide) {
        return transposed ? Matrices(kind, count, wide, high, skip) : Matrices(kind, count, high, wide, skip);
    };
    Matrices f(0, 1, 1, n, 0), x = operand(left, m, k), w = operand(right, k, n), b(result, 1, 1, n, 0), c(result, 1, 1, k, 0), d = c, v = w, u = w, g = b, h = b, y(result, batch, m, n, 0), r = y, s = y, z = y, t = y;
    std::map<std::string, Matrices*> named = {{"x", &x}, {"w", &w}, {"b", &b}, {"g", &g}, {"h", &h}, {"r", &r}, {"s", &s}, {"y", &y}, {"p", &y}, {"c", &c}, {"d", &d}, {"v", &v}, {"u", &u}, {"z", &z}, {"t", &t}, {"f", &f}};
    for (const char* name : {"x", "w", "b", "g", "h", "r", "v", "u", "c", "d"}) named[name]->fill(state);
    const auto has = [&, &names = arguments](const char* name) { return std::find(names.begin(), names.end(), name) != names.end(); };
    const bool normed = has("s"), late = has("g") && !normed;
    std::vector<std::pair<Matrices*, Matrices*>> products = {{&w, normed ? &s : &y}};
    if (has("v")) products.push_back({&v, &z});
    if (has("u")) products.push_back({&u, &t});
    host::Places places;
    for (const std::string& name : arguments) places.arguments.push_back(named.at(name)->first);
#ifdef PLANTED
    plant(x, w, left, right);
    // Beside a bias the smallest products would not be seen.
    for (u64 i = 0; i < n; ++i) *(u32*)b.place(0, 0, i) = 0;
#endif
    std::fill(before.workspace.begin(), before.workspace.end(), Matrices::FILL);
    places.workspace = before.workspace.data();
    while ((u64)places.workspace % 128) ++places.workspace;
    places.kept = before.kept.data();
    while ((u64)places.kept % 128) ++places.kept;
    // Where there is no dynamic shared memory, tiles may be variables.
    const auto statics = [](const host::Launch& grid) { return grid.shared == 0 ? 48 << 10 : 4096; };
    for (const host::Launch& first : before.launches) {
        settings.statics = statics(first);
        host::run_entry(before.first.c_str(), first, places, settings);
    }
    settings.statics = statics(launch);
    host::run_entry(host::first_entry, launch, places, settings);
    settings.statics = 48 << 10;
    for (const host::Launch& last : before.behind) host::run_entry("finish", last, places, settings);
    // What is kept is as it was before the launch.
    const bool kept = std::all_of(before.kept.begin(), before.kept.end(), [](char byte) { return byte == 0; });
    if (has("c")) {
        // The left operand as it is rounded, in place of x.
        for (u64 row = 0; row < m; ++row) {
            double mean = 0.0, squares = 0.0;
            for (u64 i = 0; i < k; ++i) mean += x.at(0, row, i) / k;
            for (u64 i = 0; i < k; ++i) squares += pow(x.at(0, row, i) - mean, 2) / k;
            for (u64 i = 0; i < k; ++i) {
                const double made = (x.at(0, row, i) - mean) / sqrt(squares + 1e-5) * c.at(0, 0, i) + d.at(0, 0, i);
                *(u16*)x.place(0, row, i) = emulator::narrowed(storage, (float)made);
            }
        }
    }

    const double unit = result == 0 ? 0x1p-24 : result == 1 ? 0x1p-11 : 0x1p-8;
    double share = 0.0;
    for (u64 matrix = 0; matrix < batch; ++matrix) {
        for (u64 row = 0; row < m; ++row) {
            if (late) {
                // The norm of what the matmul and the bias give, and the residual behind it. Sums may be rounded the other way.
                std::vector<double> biased(n);
                double mean = 0.0, squares = 0.0, largest = 0.0;
                for (u64 column = 0; column < n; ++column) {
                    double product = 0.0;
                    for (u64 i = 0; i < k; ++i) product += (left ? x.at(matrix, i, row) : x.at(matrix, row, i)) * (right ? w.at(matrix, column, i) : w.at(matrix, i, column));
                    biased[column] = product + b.at(0, 0, column);
                    mean += biased[column] / n;
                    largest = std::max(largest, fabs(biased[column]));
                }
                for (double value : biased) squares += pow(value - mean, 2) / n;
                for (u64 column = 0; column < n; ++column) {
                    const double scale = g.at(0, 0, column) / sqrt(squares + 1e-5), scaled = (biased[column] - mean) * scale + h.at(0, 0, column);
                    const double expected = scaled + r.at(matrix, row, column), off = fabs(y.at(matrix, row, column) - expected);
                    const double allowed = unit * (4.0 * largest * fabs(scale) + fabs(scaled) + fabs(expected) + 0.01);
                    share = std::max(share, off == off ? off / allowed : INFINITY);
                }
                continue;
            }
            for (u64 at = 0; at < n * products.size(); ++at) {
                auto [weights, sums] = products[at / n];
                const u64 column = at % n;
                double product = 0.0, terms = 0.0, largest = 0.0;
                for (u64 i = 0; i < k; ++i) {
                    const double term = (left ? x.at(matrix, i, row) : x.at(matrix, row, i)) * (right ? weights->at(matrix, column, i) : weights->at(matrix, i, column));
                    product += term;
                    terms += fabs(term);
                    largest = std::max(largest, fabs(term));
                }
                // Sums are f32, in some order; the matmul's result is rounded, and the sum with the bias. Two elements of what is made may be rounded
                // the other way.
                const double biased = product + (has("b") ? b.at(0, 0, column) : 0.0), expected = biased + (has("r") ? r.at(matrix, row, column) : 0.0);
                const double found = sums->at(matrix, row, column), off = fabs(found - expected);
                const double allowed = unit * (fabs(product) + fabs(biased) * (normed ? 1.0 : 0.0) + fabs(expected)) + (storage == 3 ? 0.0 : k * (0x1p-24 * terms + 0x1p-137)) + (has("c") ? 4 * unit * largest : 0.0);
                // What is infinite or no number is exactly that.
                const bool same = std::isfinite(expected) ? off <= INFINITY : expected == found || (expected != expected && found != found);
                share = std::max(share, !same ? INFINITY : std::isfinite(expected) ? off / allowed : 0.0);
            }
            if (!normed) continue;
            // The norm of the sums as they were stored.
            double mean = 0.0, squares = 0.0;
            for (u64 column = 0; column < n; ++column) mean += s.at(matrix, row, column) / n;
            for (u64 column = 0; column < n; ++column) squares += pow(s.at(matrix, row, column) - mean, 2) / n;
            for (u64 column = 0; column < n; ++column) {
                const double scaled = (s.at(matrix, row, column) - mean) / sqrt(squares + 1e-5) * g.at(0, 0, column);
                const double expected = scaled + h.at(0, 0, column), off = fabs(y.at(matrix, row, column) - expected);
                const double allowed = unit * fabs(expected) + 0x1p-18 * (fabs(scaled) + fabs(h.at(0, 0, column)) + 1.0);
                share = std::max(share, off == off ? off / allowed : INFINITY);
            }
        }
    }
    for (u64 column = 0; has("f") && column < n; ++column) {
        // Sums of the results as they were stored.
        double sum = 0.0, terms = 0.0;
        for (u64 row = 0; row < batch * m; ++row) sum += y.at(row / m, row % m, column), terms += fabs(y.at(row / m, row % m, column));
        const double off = fabs(f.at(0, 0, column) - sum);
        share = std::max(share, off == off ? off / (batch * m * 0x1p-24 * terms + 0x1p-40) : INFINITY);
    }
    const bool clean = f.is_clean() && y.is_clean() && s.is_clean() && z.is_clean() && t.is_clean(), ok = share <= 1.0 && clean && kept;
    printf("seed %llu: %.2f of what rounding allows%s: %s\n", settings.seed, share, !clean ? ", wrote beside the result" : !kept ? ", left counts behind" : "",
           ok ? "ok" : "FAILED");
    return ok;
}

int main(int count, char** arguments) {
    if (count < 5) emulator::fail("expected a file, blocks at once, together or apart, seeds");
    host::Reader reader(arguments[1]);
    const Sizes sizes = read_sizes(reader);
    Before before = read_before(reader);
    const host::Launch launch = host::read_launch(reader);
    if (before.kind == "summed") before.behind.push_back(host::read_launch(reader));
    return host::run_seeds(count, arguments, [&](emulator::Settings settings) { return run_seed(sizes, before, launch, settings); });
}
