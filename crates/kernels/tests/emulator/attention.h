// Operands of attention that are drawn from a seed, and attention in f64 to compare with.
#pragma once

#include <math.h>

#include <algorithm>
#include <vector>

#include "launch.h"

namespace host {

struct Strides {
    u64 batch, head, position;
};

// `shape` with batch, heads, heads of a group, queries, keys; then the strides of queries, keys, values and result.
struct Shape {
    u64 batch, heads, group, queries, keys;
    Strides q, k, v, o;
};

static Shape read_shape(Reader& reader) {
    reader.expect_name("shape");
    Shape shape;
    for (u64* size : {&shape.batch, &shape.heads, &shape.group, &shape.queries, &shape.keys}) *size = (u64)reader.number();
    for (Strides* strides : {&shape.q, &shape.k, &shape.v, &shape.o}) {
        *strides = {(u64)reader.number(), (u64)reader.number(), (u64)reader.number()};
    }
    return shape;
}

// Rows of 16-bit elements. Around them, and between them, is `FILL`, a NaN of either type.
struct Rows {
    static constexpr u16 FILL = 0xfedc;
    static constexpr size_t AROUND = 4096;
    int storage;
    u64 batch, heads, positions, width;
    Strides strides;
    std::vector<u16> all;
    u16* first;

    Rows(int storage, u64 batch, u64 heads, u64 positions, u64 width, Strides strides)
        : storage(storage), batch(batch), heads(heads), positions(positions), width(width), strides(strides) {
        const u64 end = (batch - 1) * strides.batch + (heads - 1) * strides.head + (positions - 1) * strides.position + width;
        all.assign(end + 2 * AROUND, FILL);
        first = all.data() + AROUND;
        while ((u64)first % 128) ++first;
    }
    char* bytes() { return (char*)first; }
    u16* row(u64 sequence, u64 head, u64 position) {
        return first + sequence * strides.batch + head * strides.head + position * strides.position;
    }
    template <class Visit> void each(Visit visit) {
        for (u64 sequence = 0; sequence < batch; ++sequence) {
            for (u64 head = 0; head < heads; ++head) {
                for (u64 position = 0; position < positions; ++position) visit(row(sequence, head, position));
            }
        }
    }
    // Numbers between -size and size.
    void fill(u64& state, float size) {
        each([&](u16* row) {
            for (u64 i = 0; i < width; ++i) {
                state = state * 6364136223846793005ull + 1442695040888963407ull;
                row[i] = emulator::narrowed(storage, ((float)(state >> 40) * 0x1p-23f - 1.0f) * size);
            }
        });
    }
    std::vector<double> numbers(u64 sequence, u64 head) {
        std::vector<double> list;
        for (u64 position = 0; position < positions; ++position) {
            const u16* at = row(sequence, head, position);
            for (u64 i = 0; i < width; ++i) list.push_back(emulator::widened(storage, at[i]));
        }
        return list;
    }
    // Whether nothing but rows was written.
    bool is_clean() {
        std::vector<u16> rest = all;
        u16* start = rest.data() + (first - all.data());
        each([&](u16* row) { std::fill_n(start + (row - first), width, FILL); });
        return std::all_of(rest.begin(), rest.end(), [](u16 x) { return x == FILL; });
    }
};

// The largest error, and the largest share of what rounding may change.
struct Error {
    double most = 0.0, share = 0.0;
};

// Attention, and how far a result is from it. Probabilities and the result are rounded to the storage type; all else to f32.
static Error compare(const Shape& shape, Rows& q, Rows& k, Rows& v, Rows& o, double scale, bool causal) {
    const double unit = o.storage == 1 ? 0x1p-11 : 0x1p-8;
    const u64 width = q.width;
    Error error;
    std::vector<double> p(shape.keys);
    for (u64 at = 0; at < shape.batch * shape.heads; ++at) {
        const u64 sequence = at / shape.heads, head = at % shape.heads;
        const auto left = q.numbers(sequence, head), result = o.numbers(sequence, head);
        const auto right = k.numbers(sequence, head / shape.group), values = v.numbers(sequence, head / shape.group);
        for (u64 query = 0; query < shape.queries; ++query) {
            const long long last = (long long)shape.keys - (causal ? (long long)(shape.queries - query) : 1);
            double most = -INFINITY, sum = 0.0;
            for (long long key = 0; key <= last; ++key) {
                p[key] = 0.0;
                for (u64 i = 0; i < width; ++i) p[key] += left[query * width + i] * right[key * width + i];
                p[key] *= scale;
                most = std::max(most, p[key]);
            }
            for (long long key = 0; key <= last; ++key) sum += p[key] = exp(p[key] - most);
            for (u64 i = 0; i < width; ++i) {
                double expected = 0.0, terms = 0.0;
                for (long long key = 0; key <= last; ++key) {
                    expected += p[key] / sum * values[key * width + i];
                    terms += p[key] / sum * fabs(values[key * width + i]);
                }
                const double off = fabs(result[query * width + i] - expected), allowed = unit * (fabs(expected) + terms) + 1e-6;
                // A NaN is as far off as can be.
                error.most = std::max(error.most, off == off ? off : INFINITY);
                error.share = std::max(error.share, off == off ? off / allowed : INFINITY);
            }
        }
    }
    return error;
}

}  // namespace host
