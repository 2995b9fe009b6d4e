// Threads of our own, not OpenMP's: PyTorch brings an OpenMP runtime, how long its threads spin is fixed when it is loaded,
// and the daemon must be quiet while it waits.
#include "team.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>
#include <memory>
#include <system_error>
#include <thread>
#include <vector>

#include "step.h"

namespace {

// A step has six barriers a layer, microseconds apart on a quiet machine: sleeping would cost more than the work. Beside busy
// processes a thread that spins only uses up its turn. So each thread's patience grows by each wait it was long enough for,
// and shrinks to a quarter by each it was not.
constexpr int64_t MOST_SPIN_NS = 50'000, LEAST_SPIN_NS = 500, GROWTH_NS = 250;

thread_local int64_t patience_ns = MOST_SPIN_NS;

int64_t now_ns() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * int64_t{1'000'000'000} + time.tv_nsec;
}

// A counter that threads wait on: a moment spinning, then asleep.
class Signal {
  public:
    uint32_t value() const { return count_.load(std::memory_order_acquire); }

    void raise() {
        count_.fetch_add(1);
        if (sleepers_.load() > 0) syscall(SYS_futex, &count_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
    }

    void wait_beyond(uint32_t seen) {
        for (int64_t until = now_ns() + patience_ns; now_ns() < until;)
            for (int i = 0; i < 8; i++) {
                if (value() != seen) {
                    patience_ns = std::min(MOST_SPIN_NS, patience_ns + GROWTH_NS);
                    return;
                }
                _mm_pause();
            }
        patience_ns = std::max(LEAST_SPIN_NS, patience_ns / 4);
        sleepers_.fetch_add(1);
        while (count_.load() == seen) syscall(SYS_futex, &count_, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
        sleepers_.fetch_sub(1);
    }

  private:
    alignas(64) std::atomic<uint32_t> count_{0};
    std::atomic<int> sleepers_{0};
};

void move_to(int core) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    sched_setaffinity(0, sizeof set, &set);  // refused when the process may not use it any more: then it runs elsewhere
}

// Keeps the calling thread on a core, and lets it go where it came from.
class Stay {
  public:
    explicit Stay(int core) : moved_(core >= 0 && sched_getaffinity(0, sizeof before_, &before_) == 0) {
        if (moved_) move_to(core);
    }
    ~Stay() {
        if (moved_) sched_setaffinity(0, sizeof before_, &before_);
    }
    Stay(const Stay &) = delete;
    Stay &operator=(const Stay &) = delete;

  private:
    cpu_set_t before_;
    bool moved_;
};

}  // namespace

struct Team {
    int size = 1;
    int callers_core = -1;
    std::vector<std::thread> threads;
    Signal job, met;
    alignas(64) std::atomic<int> arrived{0};
    bool closing = false;
    void (*work)(void *, int) = nullptr;
    void *argument = nullptr;

    void serve(int thread, int core) {
        pthread_setname_np(pthread_self(), "anchorleg-step");
        if (core >= 0) move_to(core);
        for (uint32_t seen = 0;; seen++) {
            job.wait_beyond(seen);
            if (closing) return;
            work(argument, thread);
            anchorleg_barrier(this);
        }
    }
};

extern "C" void anchorleg_barrier(Team *team) {
    const uint32_t seen = team->met.value();
    if (team->arrived.fetch_add(1) + 1 == team->size) {
        team->arrived.store(0);
        team->met.raise();
    } else {
        team->met.wait_beyond(seen);
    }
}

Team *team_open(int size, const int *cores) {
    std::unique_ptr<Team> team(new Team);
    team->callers_core = cores ? cores[0] : -1;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the threads that the process had
    try {
        for (; team->size < size; team->size++)
            team->threads.emplace_back(&Team::serve, team.get(), team->size, cores ? cores[team->size] : -1);
    } catch (const std::system_error &) {
        team_close(team.release());
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return team.release();
}

void team_run(Team *team, void (*work)(void *, int), void *argument) {
    Stay stay(team->callers_core);
    team->work = work;
    team->argument = argument;
    team->job.raise();
    work(argument, 0);
    anchorleg_barrier(team);
}

void team_close(Team *team) {
    team->closing = true;
    team->job.raise();
    for (std::thread &thread : team->threads) thread.join();
    delete team;
}
