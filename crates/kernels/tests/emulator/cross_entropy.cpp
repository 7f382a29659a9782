// Losses of rows of logits, or their gradients, on the emulator. Arguments of the program are those of `attention.cpp`. The file has `loss`
// with rows, classes, inner size, the storage type (1 f16, 2 bf16), whether it is the gradient, a thousand times the smoothing and the target
// that is ignored; `arguments`, how many, and the name of each; `workspace` and its bytes, `grids`, how many, and each with its entry first.
//
// x, w rows and weight, t targets, l losses, s logsumexp, a and d gradients of logsumexp and losses, dx and dw gradients.
#include "emulator.h"
#include "attention.h"

struct Sizes {
    u64 rows, classes, inner;
    int storage;
    bool gradient;
    double smoothing;
    long long ignored;
    u64 workspace;
    std::vector<std::string> arguments;
};

struct Named {
    std::string entry;
    host::Launch launch;
};

static Sizes read_sizes(host::Reader& reader) {
    Sizes sizes;
    reader.expect_name("loss");
    for (u64* size : {&sizes.rows, &sizes.classes, &sizes.inner}) *size = (u64)reader.number();
    sizes.storage = (int)reader.number();
    sizes.gradient = reader.number() != 0;
    sizes.smoothing = (double)reader.number() / 1000.0;
    sizes.ignored = reader.number();
    reader.expect_name("arguments");
    for (long long left = reader.number(); left > 0; --left) sizes.arguments.push_back(reader.name());
    reader.expect_name("workspace");
    sizes.workspace = (u64)reader.number();
    return sizes;
}

// Numbers of f32 or i32, with some around them that stay as they are.
template <class T> struct Numbers {
    static constexpr size_t AROUND = 64;
    std::vector<T> all;
    Numbers(u64 count, T fill) : all(count + 2 * AROUND, fill) {}
    T& operator[](u64 at) { return all[AROUND + at]; }
    char* bytes() { return (char*)(all.data() + AROUND); }
};

// Rounds as the kernel rounds logits and slopes.
static double rounded(int storage, double x) { return emulator::widened(storage, emulator::narrowed(storage, (float)x)); }

struct Case {
    const Sizes& sizes;
    host::Rows x, w, dx, dw;
    Numbers<int> t;
    Numbers<float> l, s, a, d;
    std::vector<double> logits;  // rounded

    Case(const Sizes& sizes, u64 seed)
        : sizes(sizes), x(matrix(sizes.rows)), w(matrix(sizes.classes)), dx(matrix(sizes.rows)), dw(matrix(sizes.classes)),
          t(sizes.rows, -7), l(sizes.rows, NAN), s(sizes.rows, NAN), a(sizes.rows, NAN), d(sizes.rows, NAN) {
        u64 state = seed * 77;
        x.fill(state, 1.0f);
        w.fill(state, 0.5f);
        if (!sizes.gradient) {
            // Exponentials relative to any other class are beyond f32: the row is surest of its last class.
            const u16* const sure = x.row(0, 0, sizes.rows / 2);
            u16* const last = w.row(0, 0, sizes.classes - 1);
            for (u64 i = 0; i < sizes.inner; ++i) last[i] = emulator::narrowed(sizes.storage, 8.0f * emulator::widened(sizes.storage, sure[i]));
        }
        for (u64 row = 0; row < sizes.rows; ++row) {
            state = state * 6364136223846793005ull + 1442695040888963407ull;
            t[row] = (int)((state >> 33) % sizes.classes);
            if (row % 5 == 3 && has_ignored()) t[row] = (int)sizes.ignored;
            if (row == 1) t[row] = (int)sizes.classes - 1;
            d[row] = (float)(state >> 40) * 0x1p-24f + 0.25f;
            a[row] = d[row] + (row % 3 == 0 ? 0.5f : 0.0f);
        }
        for (u64 row = 0; row < sizes.rows; ++row) {
            for (u64 column = 0; column < sizes.classes; ++column) {
                double sum = 0.0;
                for (u64 i = 0; i < sizes.inner; ++i) sum += at(x, row, i) * at(w, column, i);
                logits.push_back(rounded(sizes.storage, sum));
            }
            if (sizes.gradient) s[row] = (float)logsumexp(row);
        }
    }
    host::Rows matrix(u64 rows) { return host::Rows(sizes.storage, 1, 1, rows, sizes.inner, {0, 0, sizes.inner}); }
    bool has_ignored() const { return sizes.ignored > -2147483649ll; }
    double at(host::Rows& rows, u64 row, u64 column) { return emulator::widened(sizes.storage, rows.row(0, 0, row)[column]); }
    const double* row_of(u64 row) const { return logits.data() + row * sizes.classes; }
    double unit() const { return sizes.storage == 1 ? 0x1p-11 : 0x1p-8; }

    double logsumexp(u64 row) const {
        double sum = 0.0;
        for (u64 i = 0; i < sizes.classes; ++i) sum += exp(row_of(row)[i]);
        return log(sum);
    }
    double loss(u64 row) {
        if (has_ignored() && t[row] == sizes.ignored) return 0.0;
        double mean = 0.0;
        for (u64 i = 0; i < sizes.classes; ++i) mean += row_of(row)[i] / (double)sizes.classes;
        return logsumexp(row) - (1.0 - sizes.smoothing) * row_of(row)[t[row]] - sizes.smoothing * mean;
    }
    double slope(u64 row, u64 column) {
        const double even = sizes.smoothing / (double)sizes.classes, hit = (u64)t[row] == column ? 1.0 - sizes.smoothing : 0.0;
        return a[row] * exp(row_of(row)[column] - s[row]) - d[row] * (even + hit);
    }
    // The largest share of what rounding allows. A logit near a tie may be rounded the other way, which moves others little.
    double share_of_losses() {
        double share = 0.0;
        for (u64 row = 0; row < sizes.rows; ++row) {
            double most = 1.0;
            for (u64 i = 0; i < sizes.classes; ++i) most = std::max(most, fabs(row_of(row)[i]));
            const double off = std::max(fabs(l[row] - loss(row)), fabs(s[row] - logsumexp(row)));
            share = std::max(share, off == off ? off / (unit() * most) : INFINITY);
        }
        return share;
    }
    double share_of_gradients() {
        double share = 0.0;
        const auto compare = [&](double found, double expected, double terms) {
            const double off = fabs(found - expected), allowed = unit() * (fabs(expected) + 2.0 * terms);
            share = std::max(share, off == off ? off / allowed : INFINITY);
        };
        std::vector<double> slopes(sizes.rows * sizes.classes);
        for (u64 i = 0; i < slopes.size(); ++i) slopes[i] = slope(i / sizes.classes, i % sizes.classes);
        for (u64 i = 0; i < sizes.inner; ++i) {
            for (u64 row = 0; row < sizes.rows; ++row) {
                double sum = 0.0, terms = 0.0;
                for (u64 column = 0; column < sizes.classes; ++column) {
                    const double term = slopes[row * sizes.classes + column] * at(w, column, i);
                    sum += term;
                    terms += fabs(term);
                }
                compare(at(dx, row, i), sum, terms);
            }
            for (u64 column = 0; column < sizes.classes; ++column) {
                double sum = 0.0, terms = 0.0;
                for (u64 row = 0; row < sizes.rows; ++row) {
                    const double term = slopes[row * sizes.classes + column] * at(x, row, i);
                    sum += term;
                    terms += fabs(term);
                }
                compare(at(dw, column, i), sum, terms);
            }
        }
        return share;
    }
};

static bool run_seed(const Sizes& sizes, const std::vector<Named>& grids, emulator::Settings settings) {
    Case it(sizes, settings.seed);
    // A target beyond the classes is a fault, and nothing else.
    const bool faulty = !sizes.gradient && settings.seed % 2 == 0;
    if (faulty) it.t[sizes.rows / 2] = (int)sizes.classes;
    u64 fault = ~0ull;
    std::vector<char> workspace(sizes.workspace + 1024, (char)0xfe);
    host::Places places;
    places.workspace = workspace.data() + (1024 - (u64)workspace.data() % 1024) % 1024;
    places.fault = (char*)&fault;
    for (const std::string& name : sizes.arguments) {
        const std::pair<const char*, char*> known[] = {{"x", it.x.bytes()}, {"w", it.w.bytes()}, {"t", it.t.bytes()}, {"l", it.l.bytes()},
                                                       {"s", it.s.bytes()}, {"a", it.a.bytes()}, {"d", it.d.bytes()}, {"dx", it.dx.bytes()},
                                                       {"dw", it.dw.bytes()}};
        for (const auto& [word, bytes] : known) {
            if (name == word) places.arguments.push_back(bytes);
        }
    }
    settings.statics = 4096;
    for (const Named& grid : grids) host::run_entry(grid.entry.c_str(), grid.launch, places, settings);
    const u64 expected = faulty ? sizes.rows / 2 * 256 + 2 : ~0ull;
    if (faulty) {
        if (it.l[sizes.rows / 2] == it.l[sizes.rows / 2]) fault = 0;
        it.t[sizes.rows / 2] = 0;
        it.l[sizes.rows / 2] = (float)it.loss(sizes.rows / 2);
    }
    const double share = sizes.gradient ? it.share_of_gradients() : it.share_of_losses();
    const bool clean = it.dx.is_clean() && it.dw.is_clean(), ok = share <= 1.0 && clean && fault == expected;
    printf("seed %llu: %.2f of what rounding allows%s%s: %s\n", settings.seed, share, clean ? "" : ", wrote beside the result",
           fault == expected ? "" : ", wrong fault", ok ? "ok" : "FAILED");
    return ok;
}

int main(int count, char** arguments) {
    if (count < 5) emulator::fail("expected a file, blocks at once, together or apart, seeds");
    host::Reader reader(arguments[1]);
    const Sizes sizes = read_sizes(reader);
    reader.expect_name("grids");
    std::vector<Named> grids;
    for (long long left = reader.number(); left > 0; --left) {
        const std::string entry = reader.name();
        grids.push_back({entry, host::read_launch(reader)});
    }
    return host::run_seeds(count, arguments, [&](emulator::Settings settings) { return run_seed(sizes, grids, settings); });
}
