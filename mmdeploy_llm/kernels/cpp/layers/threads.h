// Sets on which CPUs the pool's threads run and from which node they allocate memory. Linux only.
#pragma once

#include <cerrno>
#include <cstdint>

#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace mm {

#ifdef __linux__

constexpr int32_t MAX_CPUS = 8192;
constexpr int32_t MAX_NODES = 1024;
constexpr int32_t WORD = 8 * sizeof(unsigned long);

// Restricts the calling thread to these CPUs. Returns 0 or an error number.
inline int32_t run_on(const int32_t* cpus, int32_t num_cpus) {
    unsigned long mask[MAX_CPUS / WORD] = {};
    for (int32_t i = 0; i < num_cpus; ++i) {
        if (cpus[i] < 0 || cpus[i] >= MAX_CPUS) return EINVAL;
        mask[cpus[i] / WORD] |= 1ul << (cpus[i] % WORD);
    }
    return syscall(SYS_sched_setaffinity, 0, sizeof mask, mask) < 0 ? errno : 0;
}

// Makes the calling thread allocate memory of this node while it has any. Returns 0 or an error
// number.
inline int32_t prefer_node(int32_t node) {
    constexpr int PREFERRED = 1;  // MPOL_PREFERRED of <numaif.h>, which few machines have
    if (node < 0 || node >= MAX_NODES) return EINVAL;
    unsigned long mask[MAX_NODES / WORD] = {};
    mask[node / WORD] |= 1ul << (node % WORD);
    return syscall(SYS_set_mempolicy, PREFERRED, mask, MAX_NODES + 1) < 0 ? errno : 0;
}

#endif

// Pins worker i of the calling thread's pool to pinned[i % num_pinned], or to all of `cpus` if
// num_pinned is 0. The calling thread may run on all of `cpus`, because threads that it starts
// later inherit its mask. node: -1 is any. Returns 0, or the error number of a thread that failed.
inline int32_t place_threads(const int32_t* cpus, int32_t num_cpus, const int32_t* pinned,
                             int32_t num_pinned, int32_t node, int32_t num_threads) {
#ifdef __linux__
    const auto place = [&](int32_t thread) {
        const bool has_own = num_pinned > 0 && thread > 0;
        const int32_t error =
            has_own ? run_on(pinned + thread % num_pinned, 1) : run_on(cpus, num_cpus);
        return error == 0 && node >= 0 ? prefer_node(node) : error;
    };
    int32_t worst = 0;
#ifdef MM_STD_THREADS
    (void)num_threads;
    worst = place(0);
#else
#pragma omp parallel for num_threads(num_threads) schedule(static, 1) reduction(max : worst)
    for (int32_t thread = 0; thread < num_threads; ++thread) {
        const int32_t error = place(thread);
        worst = error > worst ? error : worst;
    }
#endif
    return worst;
#else
    (void)cpus, (void)num_cpus, (void)pinned, (void)num_pinned, (void)node, (void)num_threads;
    return ENOSYS;
#endif
}

}  // namespace mm
