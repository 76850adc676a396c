// Runs loops on several threads of OpenMP's pool, which is torch's own: the library is linked
// without an OpenMP runtime and uses the one that torch has loaded. A second pool would spin on the
// same cores. With MM_STD_THREADS, for checkers that do not know OpenMP, each loop starts its own
// threads.
#pragma once

#include <cstdint>

#include <atomic>

#ifdef MM_STD_THREADS
#include <thread>
#include <vector>
#endif

namespace mm {

// Runs body(i) for every i in 0 .. num, in any order, at most `num_threads` at once.
template <typename Body>
void parallel_for(int64_t num, int num_threads, const Body& body) {
    if (num <= 1 || num_threads <= 1) {
        for (int64_t i = 0; i < num; ++i) body(i);
        return;
    }
#ifdef MM_STD_THREADS
    std::atomic<int64_t> next{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < num_threads; ++t) {
        threads.emplace_back([&] {
            for (int64_t i = next++; i < num; i = next++) body(i);
        });
    }
    for (auto& thread : threads) thread.join();
#else
#pragma omp parallel for schedule(dynamic) num_threads(num_threads)
    for (int64_t i = 0; i < num; ++i) body(i);
#endif
}

// Runs body(i, next) for every i in 0 .. num. next: the item that the same thread does afterwards;
// num or more when it has no other.
template <typename Body>
void parallel_with_next(int64_t num, int num_threads, const Body& body) {
    std::atomic<int64_t> claimed{0};
    const auto work = [&] {
        int64_t i = claimed++;
        while (i < num) {
            const int64_t next = claimed++;
            body(i, next);
            i = next;
        }
    };
    if (num <= 1 || num_threads <= 1) return work();
#ifdef MM_STD_THREADS
    std::vector<std::thread> threads;
    for (int t = 0; t < num_threads; ++t) threads.emplace_back(work);
    for (auto& thread : threads) thread.join();
#else
#pragma omp parallel num_threads(num_threads)
    work();
#endif
}

// Runs body(begin, end) for chunks of 0 .. num, four per thread.
template <typename Body>
void parallel_parts(int64_t num, int num_threads, const Body& body) {
    const int64_t parts = num_threads <= 1 ? 1 : int64_t(num_threads) * 4;
    const int64_t step = (num + parts - 1) / parts;
    if (step == 0) return;
    parallel_for((num + step - 1) / step, num_threads, [&](int64_t part) {
        const int64_t begin = part * step;
        body(begin, begin + step < num ? begin + step : num);
    });
}

}  // namespace mm
