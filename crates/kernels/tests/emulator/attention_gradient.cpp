// The gradient of attention by warpgroups on the emulator: `backward_queries`, then `backward_keys`, whose arguments are queries, keys,
// values, the gradient of the result, and the gradients of queries, keys and values. Arguments of the program are those of
// `attention.cpp`; between shape and launches the file has `workspace` and its bytes.
#include "emulator.h"
#include "attention.h"
#include "kernel.h"

// Elements of a gradient, and the sums of the sizes of their terms.
struct Sums {
    std::vector<double> value, size;
    explicit Sums(u64 count) : value(count), size(count) {}
    void add(u64 at, double weight, double spread, const double* row) {
        for (int i = 0; i < WIDTH; ++i) {
            value[at + i] += weight * row[i];
            size[at + i] += spread * fabs(row[i]);
        }
    }
};

static double dot(const double* a, const double* b) {
    double sum = 0.0;
    for (int i = 0; i < WIDTH; ++i) sum += a[i] * b[i];
    return sum;
}

// A head of queries joins the gradients of its own and of its keys and values.
static void differentiate(const host::Shape& shape, const double* q, const double* k, const double* v, const double* slope, Sums& dq, u64 first,
                          Sums& dk, Sums& dv, u64 first_key) {
    std::vector<double> p(shape.keys), dp(shape.keys);
    for (u64 query = 0; query < shape.queries; ++query) {
        const long long last = (long long)shape.keys - (MASK == CAUSAL ? (long long)(shape.queries - query) : 1);
        double most = -INFINITY, sum = 0.0, delta = 0.0, size = 0.0;
        for (long long key = 0; key <= last; ++key) {
            p[key] = dot(q + query * WIDTH, k + key * WIDTH) * SCALE;
            dp[key] = dot(slope + query * WIDTH, v + key * WIDTH);
            most = std::max(most, p[key]);
        }
        for (long long key = 0; key <= last; ++key) sum += p[key] = exp(p[key] - most);
        for (long long key = 0; key <= last; ++key) {
            p[key] /= sum;
            delta += p[key] * dp[key];
            size += p[key] * fabs(dp[key]);
        }
        for (long long key = 0; key <= last; ++key) {
            const double weight = p[key] * (dp[key] - delta) * SCALE, spread = p[key] * (fabs(dp[key]) + size) * fabs(SCALE);
            dq.add(first + query * WIDTH, weight, spread, k + key * WIDTH);
            dk.add(first_key + key * WIDTH, weight, spread, q + query * WIDTH);
            dv.add(first_key + key * WIDTH, p[key], p[key], slope + query * WIDTH);
        }
    }
}

// The largest share of what rounding may change: weights and results are rounded to the storage type, all else to f32.
static double share_of(host::Rows& rows, const Sums& sums) {
    const double unit = STORAGE == 1 ? 0x1p-11 : 0x1p-8;
    double share = 0.0;
    u64 at = 0;
    rows.each([&](u16* row) {
        for (int i = 0; i < WIDTH; ++i, ++at) {
            const double off = fabs(emulator::widened(STORAGE, row[i]) - sums.value[at]);
            const double allowed = unit * (fabs(sums.value[at]) + sums.size[at]) + 1e-6;
            share = std::max(share, off == off ? off / allowed : INFINITY);
        }
    });
    return share;
}

static bool run_seed(const host::Shape& shape, u64 workspace, const host::Launch& of_queries, const host::Launch& of_keys,
                     emulator::Settings settings) {
    u64 state = settings.seed * 77;
    const u64 key_heads = shape.heads / shape.group;
    const host::Strides query_rows = {shape.heads * shape.queries * WIDTH, shape.queries * WIDTH, WIDTH};
    const host::Strides key_rows = {key_heads * shape.keys * WIDTH, shape.keys * WIDTH, WIDTH};
    host::Rows q(STORAGE, shape.batch, shape.heads, shape.queries, WIDTH, shape.q);
    host::Rows k(STORAGE, shape.batch, key_heads, shape.keys, WIDTH, shape.k);
    host::Rows v(STORAGE, shape.batch, key_heads, shape.keys, WIDTH, shape.v);
    host::Rows slope(STORAGE, shape.batch, shape.heads, shape.queries, WIDTH, shape.o);
    host::Rows dq(STORAGE, shape.batch, shape.heads, shape.queries, WIDTH, query_rows);
    host::Rows dk(STORAGE, shape.batch, key_heads, shape.keys, WIDTH, key_rows);
    host::Rows dv(STORAGE, shape.batch, key_heads, shape.keys, WIDTH, key_rows);
    q.fill(state, 4.0f);
    k.fill(state, 2.0f);
    v.fill(state, 1.0f);
    slope.fill(state, 1.0f);
    // Poison, as a NaN of f32.
    std::vector<u32> room(workspace / 4 + 32, 0x7fffffff);
    u32* first = room.data();
    while ((u64)first % 128) ++first;
    const host::Places places{{q.bytes(), k.bytes(), v.bytes(), slope.bytes(), dq.bytes(), dk.bytes(), dv.bytes()}, (char*)first};
    host::run(backward_queries, of_queries, places, settings);
    host::run(backward_keys, of_keys, places, settings);

    Sums query_sums(shape.batch * shape.heads * shape.queries * WIDTH);
    const u64 keys = shape.batch * key_heads * shape.keys * WIDTH;
    Sums key_sums(keys), value_sums(keys);
    for (u64 at = 0; at < shape.batch * shape.heads; ++at) {
        const u64 sequence = at / shape.heads, head = at % shape.heads, key_head = head / shape.group;
        const auto queries = q.numbers(sequence, head), slopes = slope.numbers(sequence, head);
        const auto all_keys = k.numbers(sequence, key_head), values = v.numbers(sequence, key_head);
        differentiate(shape, queries.data(), all_keys.data(), values.data(), slopes.data(), query_sums, at * shape.queries * WIDTH, key_sums,
                      value_sums, (sequence * key_heads + key_head) * shape.keys * WIDTH);
    }
    const double shares[3] = {share_of(dq, query_sums), share_of(dk, key_sums), share_of(dv, value_sums)};
    const bool clean = dq.is_clean() && dk.is_clean() && dv.is_clean();
    const bool ok = shares[0] <= 1.0 && shares[1] <= 1.0 && shares[2] <= 1.0 && clean;
    printf("seed %llu: queries %.2f, keys %.2f, values %.2f of what rounding allows%s: %s\n", settings.seed, shares[0], shares[1], shares[2],
           clean ? "" : ", wrote beside the result", ok ? "ok" : "FAILED");
    return ok;
}

int main(int count, char** arguments) {
    if (count < 5) emulator::fail("expected a file, blocks at once, together or apart, seeds");
    host::Reader reader(arguments[1]);
    const host::Shape shape = host::read_shape(reader);
    reader.expect_name("workspace");
    const u64 workspace = (u64)reader.number();
    const host::Launch of_queries = host::read_launch(reader), of_keys = host::read_launch(reader);
    return host::run_seeds(count, arguments, [&](emulator::Settings settings) { return run_seed(shape, workspace, of_queries, of_keys, settings); });
}
