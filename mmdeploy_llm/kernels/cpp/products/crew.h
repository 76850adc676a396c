// A crew: threads that stay together while one of them, the leader, runs loop after loop.
//
//     leader    open the loop | work | close it | wait for those inside | the next loop ...
//     follower  wait for an open loop | enter | work | leave | wait ...
//
// A decode step has a hundred short loops. OpenMP has every thread of its pool begin and end each
// loop; it lets them sleep in between as soon as the program has more of its threads than CPUs, such
// as those that another thread of the program once computed with, and to wake one takes longer than a
// loop. The followers of a crew wait awake, and nobody waits for one that has not come: threads claim
// items one by one, so the others do its share.
#pragma once

#include <cstdint>

#include <atomic>
#include <thread>

namespace mm {

// Waits for what another thread does next, awake at first: then others may have the CPU.
class Wait {
    static constexpr int AWAKE = 4096;  // rounds, of some 15 ns
    int rounds_ = 0;

   public:
    void round() {
        if (++rounds_ > AWAKE) {
            rounds_ -= 64;
            std::this_thread::yield();
        }
#if defined(__x86_64__) || defined(__i386__)
        __builtin_ia32_pause();
#elif defined(__aarch64__) || defined(__arm__)
        asm volatile("yield");
#endif
    }
};

class Crew;
inline Crew*& own_crew();

class Crew {
    // The number of the loop, odd while it is open; ENDED when there are no more.
    static constexpr uint64_t ENDED = ~uint64_t(0) - 1;
    alignas(64) std::atomic<uint64_t> state_{0};
    void (*work_)(const void*) = nullptr;  // of the open loop; these two are written by the leader,
    const void* context_ = nullptr;        // while no loop is open and nobody is inside
    alignas(64) std::atomic<int64_t> inside_{0};  // followers

   public:
    // The leader: runs work() on all threads that come until it has returned here, and returns when
    // all of these have returned.
    template <typename Work>
    void run(const Work& work) {
        work_ = [](const void* context) { (*static_cast<const Work*>(context))(); };
        context_ = &work;
        const uint64_t open = state_.load(std::memory_order_relaxed) + 1;
        state_.store(open);
        own_crew() = nullptr;  // a loop within the loop is another matter
        work();
        own_crew() = this;
        // Of this store and the reading of inside_, and of the two steps of a follower in `follow`,
        // one thread sees what the other did: all four are in one order.
        state_.store(open + 1);
        for (Wait wait; inside_.load() != 0;) wait.round();
    }

    // The leader: there are no more loops.
    void end() { state_.store(ENDED); }

    // A follower: works in all loops, until the end.
    void follow() {
        uint64_t done = 0;
        for (Wait wait;;) {
            const uint64_t state = state_.load(std::memory_order_acquire);
            if (state == ENDED) return;
            if (state % 2 == 0 || state == done) {
                wait.round();
                continue;
            }
            inside_.fetch_add(1);
            if (state_.load() == state) work_(context_);
            inside_.fetch_sub(1);
            done = state;
            wait = Wait();
        }
    }
};

// The crew that this thread leads, if there is one.
inline Crew*& own_crew() {
    static thread_local Crew* crew = nullptr;
    return crew;
}

}  // namespace mm
