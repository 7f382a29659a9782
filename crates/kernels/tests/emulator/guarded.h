// Elements with others around them, which nobody may write.
#pragma once

#include <vector>

#include "launch.h"

namespace host {

template <class T> struct Guarded {
    static constexpr size_t AROUND = 4096;
    std::vector<T> all;
    T* first;
    size_t count;

    Guarded(size_t count, T fill) : all(count + 2 * AROUND, fill), count(count) {
        first = all.data() + AROUND;
        while ((u64)first % 128) ++first;
    }
    // Whether nothing beside the elements was written.
    bool is_clean(T fill) const {
        for (const T& x : all) {
            if ((&x < first || &x >= first + count) && x != fill) return false;
        }
        return true;
    }
};

}  // namespace host
