// Multiplications of warpgroups.
#include "wgmma.h"

namespace emulator {

// A matrix in shared memory, as its descriptor places it.
struct Operand {
    u32 start, beyond;
    bool transposed;

    Operand(u64 descriptor, bool transposed) : transposed(transposed) {
        start = (u32)(descriptor & 0x3fff) << 4;
        beyond = (u32)(descriptor >> 16 & 0x3fff) << 4;
        if ((descriptor >> 32 & 0x3fff) != 1024 >> 4 || descriptor >> 62 != 1 || (descriptor >> 49 & 7)) {
            fail("a descriptor that is not of eight rows of 128 bytes, swizzled");
        }
    }
    // Row or column `i`, and `k` along the sum.
    u32 address(int i, int k) const {
        if (transposed) return swizzled(start + i / 64 * beyond + k / 8 * 1024 + k % 8 * 128 + i % 64 * 2);
        return swizzled(start + i / 8 * 1024 + i % 8 * 128 + k * 2);
    }
    bool reads_from(int count, u32 to, u32 bytes) const {
        const u32 from = start & ~127u;
        if (!transposed) return overlap(from, count / 8 * 1024, to, bytes);
        for (int i = 0; i < count; i += 64) {
            if (overlap(from + i / 64 * beyond, 2048, to, bytes)) return true;
        }
        return false;
    }
};

static bool reads(const Issue& issue, u32 to, u32 bytes) {
    if (!issue.of_registers && Operand(issue.a, issue.transposed_a).reads_from(64, to, bytes)) return true;
    return Operand(issue.b, issue.transposed).reads_from(issue.columns, to, bytes);
}

void check_unread(const Block& block, u32 to, u32 bytes) {
    for (const Group& group : block.groups) {
        for (const auto& issue : group.issues) {
            if (reads(*issue, to, bytes)) fail("a copy to %d, which a multiplication in flight reads", place(block, to));
        }
    }
}

// Bytes: as many of them as of 16-bit elements are in half of the bytes.
static void multiply_bytes(const Block& block, const Issue& issue) {
    static int a[64][32], b[32][256];
    const Operand left(issue.a, false), right(issue.b, false);
    const auto byte = [&](u32 address, int odd) { return (int)*(const signed char*)bytes_at(block, address + odd, 1); };
    for (int row = 0; row < 64; ++row) {
        for (int k = 0; k < 32; ++k) a[row][k] = byte(left.address(row, k / 2), k % 2);
    }
    for (int k = 0; k < 32; ++k) {
        for (int i = 0; i < issue.columns; ++i) b[k][i] = byte(right.address(i, k / 2), k % 2);
    }
    for (int thread = 0; thread < 128; ++thread) {
        const int first = thread / 32 * 16 + thread % 32 / 4, beside = thread % 4 * 2;
        std::vector<float>& sums = issue.parts[thread].flight->sums;
        for (int i = 0; i < issue.columns / 2; ++i) {
            const int row = first + i / 2 % 2 * 8, column = beside + i / 4 * 8 + i % 2;
            u32 sum = issue.add ? bits_of(sums[i]) : 0;
            for (int k = 0; k < 32; ++k) sum += (u32)(a[row][k] * b[k][column]);
            sums[i] = of_bits(sum);
        }
    }
}

// Numbers of 32 bits, which are cut off: half as many as 16-bit elements.
static float cut_element(const Block& block, u32 address) {
    u32 word;
    memcpy(&word, bytes_at(block, address, 4), 4);
    return of_bits(word & 0xffffe000);
}

static float element(const Block& block, int storage, u32 address) {
    u16 x;
    memcpy(&x, bytes_at(block, address, 2), 2);
    return widened(storage, x);
}

// Carries out the next multiplication of a warpgroup.
static void multiply(Block& block, Group& group) {
    const std::unique_ptr<Issue> owned = std::move(group.issues.front());
    group.issues.pop_front();
    const Issue& issue = *owned;
    if (issue.storage == 3) {
        multiply_bytes(block, issue);
        ++group.done;
        return;
    }
    // Steps along the sum, and places of 16-bit elements from one to the next.
    const int steps = issue.storage == 0 ? 8 : 16, apart = 16 / steps;
    const auto number = [&](const Operand& operand, int i, int k) {
        const u32 address = operand.address(i, k * apart);
        return issue.storage == 0 ? cut_element(block, address) : element(block, issue.storage, address);
    };
    static float a[64][16], b[16][256], d[64][256];
    for (int row = 0; row < 64 && !issue.of_registers; ++row) {
        const Operand left(issue.a, issue.transposed_a);
        for (int k = 0; k < steps; ++k) a[row][k] = number(left, row, k);
    }
    for (int thread = 0; thread < 128 && issue.of_registers; ++thread) {
        const Issue::Part& part = issue.parts[thread];
        if (memcmp(part.at, part.a, sizeof part.a)) {
            fail("block %u: registers of a multiplication in flight were written", block.index.x);
        }
        const int row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
        for (int i = 0; i < 8; ++i) {
            a[row + i / 2 % 2 * 8][column + i / 4 * 8 + i % 2] = widened(issue.storage, (u16)(part.a[i / 2] >> i % 2 * 16));
        }
    }
    const Operand right(issue.b, issue.transposed);
    for (int k = 0; k < steps; ++k) {
        for (int i = 0; i < issue.columns; ++i) b[k][i] = number(right, i, k);
    }
    for (int row = 0; row < 64; ++row) {
        for (int i = 0; i < issue.columns; ++i) d[row][i] = 0.0f;
        for (int k = 0; k < steps; ++k) {
            const float factor = a[row][k];
            for (int i = 0; i < issue.columns; ++i) d[row][i] += factor * b[k][i];
        }
    }
    for (int thread = 0; thread < 128; ++thread) {
        const int row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
        std::vector<float>& sums = issue.parts[thread].flight->sums;
        for (int i = 0; i < issue.columns / 2; ++i) {
            const float share = d[row + i / 2 % 2 * 8][column + i / 4 * 8 + i % 2];
            sums[i] = issue.add ? sums[i] + share : share;
        }
    }
    ++group.done;
}

// The registers of an accumulator are poisoned until its thread has waited.
static Flight* take_off(float* d, int count) {
    for (auto& flight : current->flights) {
        if (flight->d == d && flight->count == count) return flight.get();
        if (d < flight->d + flight->count && flight->d < d + count) fail("two multiplications to parts of the same registers");
    }
    current->flights.push_back(std::make_unique<Flight>(Flight{d, count, std::vector<float>(d, d + count), 0}));
    for (int i = 0; i < count; ++i) d[i] = of_bits(POISON);
    return current->flights.back().get();
}

void issue_wgmma(int storage, float* d, int columns, const u32* registers, u64 a, u64 b, bool transposed, bool transposed_a, int add) {
    Thread* thread = current;
    Block* block = thread->block;
    Group* group = &block->groups[thread->position.x / 128];
    if (!thread->fenced) fail("a multiplication without a fence before it");
    if (storage == 0 && (registers || transposed || transposed_a)) fail("TF32 is multiplied from shared memory, along rows");
    if (thread->position.x / 128 >= block->threads.size() / 128) fail("a multiplication of part of a warpgroup");
    const u64 position = thread->issued++ - group->done;
    if (position == group->issues.size()) group->issues.push_back(std::make_unique<Issue>());
    Issue& issue = *group->issues[position];
    if (issue.arrived++ == 0) {
        issue.a = a;
        issue.b = b;
        issue.columns = columns;
        issue.storage = storage;
        issue.add = add != 0;
        issue.of_registers = registers != nullptr;
        issue.transposed = transposed;
        issue.transposed_a = transposed_a;
        for (const Copy& copy : block->copies) {
            if (reads(issue, copy.to, copy.bytes)) fail("a multiplication of bytes in flight to %d", place(*block, copy.to));
        }
    } else if (issue.a != a || issue.b != b || issue.columns != columns || issue.add != (add != 0) || issue.transposed != transposed || issue.transposed_a != transposed_a ||
               issue.of_registers != (registers != nullptr)) {
        fail("threads of a warpgroup do not agree on a multiplication");
    }
    Issue::Part& part = issue.parts[thread->position.x % 128];
    part.flight = take_off(d, columns / 2);
    part.flight->last = thread->issued;
    part.at = registers;
    if (registers) memcpy(part.a, registers, sizeof part.a);
    if (issue.arrived == 128) {
        // One after another.
        group->last_due = std::max(machine.now, group->last_due) + delay() / 4;
        machine.events.emplace(group->last_due, [=] { multiply(*block, *group); });
    }
    progress();
}

static bool wgmmas_are_done(const void* of, u64 number) { return ((const Group*)of)->done >= number; }

void wait_groups(size_t pending) {
    Thread* thread = current;
    sync_lanes(0xffffffffu, "wgmma_wait");
    if (thread->committed.size() > pending) {
        const u64 last = thread->committed[thread->committed.size() - 1 - pending];
        thread->committed.erase(thread->committed.begin(), thread->committed.end() - pending);
        wait_until("wgmma instructions", 0, wgmmas_are_done, &thread->block->groups[thread->position.x / 128], last);
        auto& flights = thread->flights;
        for (size_t i = flights.size(); i-- > 0;) {
            Flight& flight = *flights[i];
            if (flight.last > last) continue;
            for (int j = 0; j < flight.count; ++j) {
                if (bits_of(flight.d[j]) != POISON) fail("an accumulator was written while multiplications added to it");
                flight.d[j] = flight.sums[j];
            }
            flights.erase(flights.begin() + i);
        }
    }
    thread->fenced = false;
}

}  // namespace emulator
