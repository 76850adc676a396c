// Keeps a compiled library loadable with older C++ runtimes than the compiler's own.
#pragma once

#include <new>

#ifdef __GLIBCXX__
namespace std {
// The std::vector of GCC 11 and newer calls this function, which older runtimes lack.
void __throw_bad_array_new_length() __attribute__((__noreturn__));
inline void __throw_bad_array_new_length() { throw bad_array_new_length(); }
}  // namespace std
#endif
