// What the functions that Python calls share: the types of their values, and how they are defined.
// Each .cpp file here is compiled on its own, so that all of them are at the same time.
#pragma once

#include <cstdint>

#include "../products/numbers.h"
#include "calls.h"

using mm::bf16;

namespace {

constexpr int32_t FLOAT = 0;

// The type T that a dtype names, for what pointers to void point to.
template <typename T>
struct Of {
    using Type = T;
    static const T* in(const void* values) { return static_cast<const T*>(values); }
    static T* out(void* values) { return static_cast<T*>(values); }
};

// Calls function(Of<T>()) for the type T of a dtype.
template <typename Function>
void by_dtype(int32_t dtype, const Function& function) {
    if (dtype == FLOAT) return function(Of<float>());
    function(Of<bf16>());
}

}  // namespace

// Defines mm_NAME, which Python calls, by a function `run` of its struct.
#define MM_DEFINE(name, Args)                                                       \
    extern "C" __attribute__((visibility("default"))) void mm_##name(const void*); \
    void mm_##name(const void* args) { run(*static_cast<const mm::Args*>(args)); }
