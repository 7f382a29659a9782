// Attention, a projection or none, a residual and a norm in one launch on the emulator: ENTRY. Arguments of the program are those of
// `attention.cpp`. Between shape and launch the file has `meeting` with columns, elements from one row of the residual to the next,
// whether columns of the weight lie together, epsilon, bytes of the workspace and of what is kept; then `arguments`, how many, and
// the name of each.
#include "emulator.h"
#include "attention.h"
#include "kernel.h"

struct Meeting {
    u64 cols, stride;
    bool turned;
    double epsilon;
    u64 workspace, kept;
    std::vector<std::string> arguments;

    bool has(const char* name) const { return std::find(arguments.begin(), arguments.end(), name) != arguments.end(); }
};

static Meeting read_meeting(host::Reader& reader) {
    Meeting meeting;
    reader.expect_name("meeting");
    meeting.cols = (u64)reader.number();
    meeting.stride = (u64)reader.number();
    meeting.turned = reader.number() != 0;
    meeting.epsilon = atof(reader.name().c_str());
    meeting.workspace = (u64)reader.number();
    meeting.kept = (u64)reader.number();
    reader.expect_name("arguments");
    for (long long left = reader.number(); left > 0; --left) meeting.arguments.push_back(reader.name());
    return meeting;
}

// A row of numbers in the type of the norm's weights.
struct WeightRow {
    std::vector<u16> narrow;
    std::vector<float> wide;
    WeightRow(u64 cols, u64& state, float about) : narrow(cols), wide(cols) {
        for (u64 i = 0; i < cols; ++i) {
            state = state * 6364136223846793005ull + 1442695040888963407ull;
            wide[i] = (float)(state >> 40) * 0x1p-24f + about;
            if (WEIGHT_STORAGE == 0) continue;
            narrow[i] = emulator::narrowed(WEIGHT_STORAGE, wide[i]);
            wide[i] = emulator::widened(WEIGHT_STORAGE, narrow[i]);
        }
    }
    char* bytes() { return WEIGHT_STORAGE == 0 ? (char*)wide.data() : (char*)narrow.data(); }
};

// Attention of one row of one head, and how far rounding of probabilities and result may take each element.
static void attend(const host::Shape& shape, host::Rows& q, host::Rows& k, host::Rows& v, u64 sequence, u64 head, u64 query,
                   std::vector<double>& o, std::vector<double>& allowed) {
    const double unit = STORAGE == 1 ? 0x1p-11 : 0x1p-8;
    const u64 key_head = head / shape.group;
    const long long last = (long long)shape.keys - (MASK == CAUSAL ? (long long)(shape.queries - query) : 1);
    const u16* left = q.row(sequence, head, query);
    std::vector<double> p;
    double most = -INFINITY, sum = 0.0;
    for (long long key = 0; key <= last; ++key) {
        const u16* right = k.row(sequence, key_head, key);
        double score = 0.0;
        for (int i = 0; i < WIDTH; ++i) score += (double)emulator::widened(STORAGE, left[i]) * emulator::widened(STORAGE, right[i]);
        p.push_back(score * SCALE);
        most = std::max(most, p.back());
    }
    for (double& x : p) sum += x = exp(x - most);
    for (int i = 0; i < WIDTH; ++i) {
        double expected = 0.0, terms = 0.0;
        for (long long key = 0; key <= last; ++key) {
            const double value = emulator::widened(STORAGE, v.row(sequence, key_head, key)[i]);
            expected += p[key] / sum * value;
            terms += p[key] / sum * fabs(value);
        }
        o.push_back(expected);
        allowed.push_back(unit * (fabs(expected) + terms) + 1e-6);
    }
}

static bool run_seed(const host::Shape& shape, const Meeting& meeting, const host::Launch& launch, emulator::Settings settings) {
    u64 state = settings.seed * 77;
    const u64 key_heads = shape.heads / shape.group, rows = shape.batch * shape.queries, inner = shape.heads * WIDTH;
    const u64 cols = meeting.cols;
    const double unit = STORAGE == 1 ? 0x1p-11 : 0x1p-8;
    host::Rows q(STORAGE, shape.batch, shape.heads, shape.queries, WIDTH, shape.q);
    host::Rows k(STORAGE, shape.batch, key_heads, shape.keys, WIDTH, shape.k);
    host::Rows v(STORAGE, shape.batch, key_heads, shape.keys, WIDTH, shape.v);
    host::Rows residual(STORAGE, 1, 1, rows, cols, {0, 0, meeting.stride});
    host::Rows s(STORAGE, 1, 1, rows, cols, {0, 0, cols}), y(STORAGE, 1, 1, rows, cols, {0, 0, cols});
    const u64 high = meeting.turned ? inner : cols, wide = meeting.turned ? cols : inner;
    host::Rows weight(STORAGE, 1, 1, high, wide, {0, 0, wide}), bias(STORAGE, 1, 1, 1, cols, {0, 0, cols});
    q.fill(state, 4.0f);
    k.fill(state, 2.0f);
    v.fill(state, 1.0f);
    // Far from zero, as a variance from sums of squares would not bear.
    residual.fill(state, 1.0f);
    residual.each([&](u16* row) {
        for (u64 i = 0; i < cols; ++i) row[i] = emulator::narrowed(STORAGE, emulator::widened(STORAGE, row[i]) + 20.0f);
    });
    weight.fill(state, 0.2f);
    bias.fill(state, 1.0f);
    WeightRow w(cols, state, 0.5f), b(cols, state, -0.5f);
    std::vector<u16> workspace(meeting.workspace / 2 + 64, host::Rows::FILL);
    std::vector<u64> kept(meeting.kept / 8 + 32, 0);
    const auto aligned = [](void* at) { return (char*)(((u64)at + 127) / 128 * 128); };

    host::Places places;
    places.workspace = aligned(workspace.data());
    places.kept = aligned(kept.data());
    for (const std::string& name : meeting.arguments) {
        places.arguments.push_back(name == "q"   ? q.bytes()
                                   : name == "k" ? k.bytes()
                                   : name == "v" ? v.bytes()
                                   : name == "r" ? residual.bytes()
                                   : name == "w" ? w.bytes()
                                   : name == "b" ? b.bytes()
                                   : name == "p" ? weight.bytes()
                                   : name == "c" ? bias.bytes()
                                   : name == "s" ? s.bytes()
                                                 : y.bytes());
    }
    // Marks of words change from launch to launch, numbers may not.
    std::vector<u16> first;
    bool same = true;
    for (int turn = 0; turn < 3; ++turn) {
        s.each([&](u16* row) { std::fill_n(row, cols, host::Rows::FILL); });
        y.each([&](u16* row) { std::fill_n(row, cols, host::Rows::FILL); });
        settings.seed += turn * 1000;
        settings.aligned = true;  // as the text says
        host::run(ENTRY, launch, places, settings);
        std::vector<u16> now = y.all;
        now.insert(now.end(), s.all.begin(), s.all.end());
        if (turn == 0) first = now;
        same = same && now == first;
    }

    double most = 0.0, normed = 0.0;
    const auto worse = [](double& share, double off, double allowed) { share = std::max(share, off == off ? off / allowed : INFINITY); };
    const bool stored = meeting.has("s"), projected = meeting.has("p");
    for (u64 row = 0; row < rows; ++row) {
        const u64 sequence = row / shape.queries, query = row % shape.queries;
        std::vector<double> o, allowed, sums;
        for (u64 head = 0; head < shape.heads; ++head) attend(shape, q, k, v, sequence, head, query, o, allowed);
        for (u64 column = 0; column < cols; ++column) {
            double x = o[projected ? 0 : column], off = allowed[projected ? 0 : column];
            if (projected) {
                x = meeting.has("c") ? emulator::widened(STORAGE, bias.row(0, 0, 0)[column]) : 0.0;
                off = 1e-5;
                for (u64 i = 0; i < inner; ++i) {
                    const u16 at = meeting.turned ? weight.row(0, 0, i)[column] : weight.row(0, 0, column)[i];
                    x += o[i] * emulator::widened(STORAGE, at);
                    off += allowed[i] * fabs(emulator::widened(STORAGE, at));
                }
                off += unit * fabs(x);
            }
            const double sum = emulator::widened(STORAGE, residual.row(0, 0, row)[column]) + x;
            if (stored) {
                const double found = emulator::widened(STORAGE, s.row(0, 0, row)[column]);
                worse(most, fabs(found - sum), off + unit * fabs(sum));
                sums.push_back(found);
            } else {
                sums.push_back(sum);
            }
        }
        // The norm of what was stored, which no rounding before it touches.
        double mean = 0.0, square = 0.0;
        for (double x : sums) mean += x / cols;
        if (RMS) mean = 0.0;
        for (double x : sums) square += (x - mean) * (x - mean) / cols;
        const double rstd = 1.0 / sqrt(square + meeting.epsilon);
        for (u64 column = 0; column < cols; ++column) {
            const double scaled = (sums[column] - mean) * rstd * w.wide[column];
            const double expected = scaled + (RMS ? 0.0 : b.wide[column]), found = emulator::widened(STORAGE, y.row(0, 0, row)[column]);
            const double before = stored ? 1e-5 * fabs(scaled) + 1e-5 : 4.0 * unit * (fabs(sums[column]) + 1.0) * rstd;
            worse(normed, fabs(found - expected), unit * fabs(expected) + before);
        }
    }
    const bool clean = s.is_clean() && y.is_clean(), ok = most <= 1.0 && normed <= 1.0 && clean && same;
    printf("seed %llu: sums %.2f, norms %.2f of what rounding allows%s%s: %s\n", settings.seed, most, normed,
           clean ? "" : ", wrote beside the result", same ? "" : ", other bits in another launch", ok ? "ok" : "FAILED");
    return ok;
}

int main(int count, char** arguments) {
    if (count < 5) emulator::fail("expected a file, blocks at once, together or apart, seeds");
    host::Reader reader(arguments[1]);
    const host::Shape shape = host::read_shape(reader);
    const Meeting meeting = read_meeting(reader);
    const host::Launch launch = host::read_launch(reader);
    return host::run_seeds(count, arguments, [&](emulator::Settings settings) { return run_seed(shape, meeting, launch, settings); });
}
