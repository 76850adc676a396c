// Runs loops on several threads of OpenMP's pool, which is torch's own: the library is linked
// without an OpenMP runtime and uses the one that torch has loaded. A second pool would spin on the
// same cores. With MM_STD_THREADS, for checkers that do not know OpenMP, threads are started instead.
//
// Threads claim the items of a loop one by one, so that its results depend neither on their number
// nor on how fast each is. Loops of recorded calls are run by a Crew, see crew.h.
#pragma once

#include <cstdint>

#include <atomic>

#include "crew.h"

#ifdef MM_STD_THREADS
#include <thread>
#include <vector>
#endif

namespace mm {

// Runs work() on up to `num_threads` threads at once; returns when all have returned.
template <typename Work>
void together(int num_threads, const Work& work) {
    if (Crew* const crew = own_crew(); crew != nullptr) return crew->run(work);
#ifdef MM_STD_THREADS
    std::vector<std::thread> threads;
    for (int t = 0; t < num_threads; ++t) threads.emplace_back(work);
    for (auto& thread : threads) thread.join();
#else
#pragma omp parallel num_threads(num_threads)
    work();
#endif
}

// Runs body(i) for every i in 0 .. num, in any order, at most `num_threads` at once.
template <typename Body>
void parallel_for(int64_t num, int num_threads, const Body& body) {
    if (num <= 1 || num_threads <= 1) {
        for (int64_t i = 0; i < num; ++i) body(i);
        return;
    }
    std::atomic<int64_t> claimed{0};
    together(num_threads, [&] {
        for (int64_t i = claimed++; i < num; i = claimed++) body(i);
    });
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
    together(num_threads, work);
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

// Runs calls() on this thread, with a crew of up to `num_threads` threads for the loops in it.
template <typename Calls>
void with_crew(int num_threads, const Calls& calls) {
    if (num_threads <= 1 || own_crew() != nullptr) return calls();
    Crew crew;
    const auto lead = [&] {
        own_crew() = &crew;
        calls();
        own_crew() = nullptr;
        crew.end();
    };
#ifdef MM_STD_THREADS
    std::vector<std::thread> threads;
    for (int t = 1; t < num_threads; ++t) threads.emplace_back([&] { crew.follow(); });
    lead();
    for (auto& thread : threads) thread.join();
#else
#pragma omp parallel num_threads(num_threads)
    {
        bool leads = false;
#pragma omp master
        {
            leads = true;
            lead();
        }
        if (!leads) crew.follow();
    }
#endif
}

}  // namespace mm
