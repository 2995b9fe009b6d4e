// The instructions of engine/cuda/instructions.cuh and the words of CUDA that ring.cu uses, for a CPU: every thread of a block is
// a context of its own, and all of them take turns, now and then without one of the warps, as a seed has it.
//
// Harder than a GPU where that finds mistakes: a bulk copy ends at some later time, in any order, and until then what it will
// overwrite is not a number; what the kernel before writes is not a number until it is waited for.

#include <ucontext.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __grid_constant__
#define __shared__
#define __align__(bytes)

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

using std::max;
using std::min;

struct uint4 {
    u32 x, y, z, w;
};
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }

alignas(128) char shared[256 << 10];

struct Place {
    int x;
};
inline Place threadIdx, blockIdx, gridDim;

namespace emulated {

struct Barrier {
    int count, pending;
    i64 bytes = 0;
    u32 phase = 0;
    void look() {
        if (pending == 0 && bytes == 0) {
            phase ^= 1;
            pending = count;
        }
    }
};

struct Copy {
    u32 to;
    const void* from;
    u32 bytes, barrier;
};

// Threads that wait for each other, and what each hands to the others; two turns are kept, for nobody is further ahead.
struct Meeting {
    int size = 32, there = 0;
    u64 turn = 0;
    u32 given[2][32][6];
};

struct Block {
    std::mt19937 random;
    std::map<u32, Barrier> barriers;
    std::vector<Copy> copies;
    Meeting warps[32], everyone, some;
    std::function<void()> before;
    bool before_ended = false;
    i64 quiet = 0; // turns since anything happened
};

inline Block* block;
inline ucontext_t scheduler;
inline std::vector<ucontext_t> contexts;
inline int current;

inline char failure[128]; // the first one's words

// End the run: this thread never goes on.
[[noreturn]] inline void fail(const char* what) {
    std::snprintf(failure, sizeof failure, "block %d, thread %d: %s", blockIdx.x, current, what);
    while (true)
        swapcontext(&contexts[current], &scheduler);
}

inline void happened() { block->quiet = 0; }

inline void yield() {
    if (++block->quiet > 2'000'000)
        fail("everyone waits");
    swapcontext(&contexts[current], &scheduler);
}

inline Barrier& barrier(u32 address) {
    auto found = block->barriers.find(address);
    if (found == block->barriers.end())
        fail("no barrier there");
    return found->second;
}

inline void arrive(u32 address, i64 bytes) {
    Barrier& there = barrier(address);
    if (there.pending == 0)
        fail("more arrivals than a barrier takes");
    there.bytes += bytes;
    --there.pending;
    there.look();
    happened();
}

inline void end_copy(size_t nth) {
    const Copy ended = block->copies[nth];
    block->copies.erase(block->copies.begin() + nth);
    std::memcpy(shared + ended.to, ended.from, ended.bytes);
    Barrier& there = barrier(ended.barrier);
    there.bytes -= ended.bytes;
    there.look();
    happened();
}

// Hand over six words, wait for all of the meeting, return what everyone gave.
inline u32 (*meet(Meeting& meeting, int member, const u32 (&mine)[6]))[6] {
    const u64 turn = meeting.turn;
    if (member < 32)
        std::copy(mine, mine + 6, meeting.given[turn % 2][member]);
    if (++meeting.there == meeting.size) {
        meeting.there = 0;
        ++meeting.turn;
        happened();
    }
    while (meeting.turn == turn)
        yield();
    return meeting.given[turn % 2];
}

inline u32 (*meet_warp(const u32 (&mine)[6]))[6] { return meet(block->warps[current / 32], current % 32, mine); }

inline float bf16(u32 bits) { return std::bit_cast<float>(bits << 16); }

} // namespace emulated

inline float __uint_as_float(u32 bits) { return std::bit_cast<float>(bits); }
inline float __int_as_float(int bits) { return std::bit_cast<float>(bits); }
inline int __float_as_int(float value) { return std::bit_cast<int>(value); }
inline float rsqrtf(float value) { return 1.0f / std::sqrt(value); }

inline void __syncwarp() { emulated::meet_warp({}); }
inline void __syncthreads() { emulated::meet(emulated::block->everyone, 32, {}); }
template <int THREADS> inline void meet() {
    emulated::block->some.size = THREADS;
    emulated::meet(emulated::block->some, 32, {});
}

inline i64 __shfl_xor_sync(u32, i64 value, int apart) {
    auto given = emulated::meet_warp({(u32)value, (u32)((u64)value >> 32), 0, 0, 0, 0});
    const u32* other = given[(emulated::current % 32) ^ apart];
    return (i64)((u64)other[1] << 32 | other[0]);
}

inline void atomicAdd(u64* to, u64 value) { *to += value; }
inline void atomicMax(i64* to, i64 value) { *to = std::max(*to, value); }

inline float of_bf16(u32 bits) { return emulated::bf16(bits); }
inline u16 to_bf16(float value) {
    const u32 bits = std::bit_cast<u32>(value);
    if (std::isnan(value))
        return 0x7fff;
    return (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline u32 shared_address(const void* place) { return (u32)((const char*)place - shared); }
inline void barrier_init(u32 address, int arrivals) { emulated::block->barriers[address] = {arrivals, arrivals}; }
inline void barriers_are_there() {}
inline void barrier_expect(u32 address, u32 bytes) { emulated::arrive(address, bytes); }
inline void barrier_arrive(u32 address) { emulated::arrive(address, 0); }
inline void barrier_wait(u32 address, u32 parity) {
    while (emulated::barrier(address).phase == parity)
        emulated::yield();
}
inline u64 read_once() { return 0; }
inline void copy(u32 to, const void* from, u32 bytes, u32 barrier) {
    if (bytes % 16 || to % 16 || (uintptr_t)from % 16)
        emulated::fail("a bulk copy that is not of 16 bytes");
    std::memset(shared + to, 0xff, bytes);
    emulated::block->copies.push_back({to, from, bytes, barrier});
}
inline void copy_once(u32 to, const void* from, u32 bytes, u32 barrier, u64) { copy(to, from, bytes, barrier); }

inline void launch_dependents() {}
inline void wait_for_kernel_before() {
    while (!emulated::block->before_ended)
        emulated::yield();
}

// mma.m16n8k16, as PTX describes who holds what: sums[0, 1] are row `lane / 4` and columns `lane % 4 * 2` and the next, sums[2, 3]
// the row 8 further down; the inputs likewise, two columns a word.
inline void multiply(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    auto given = emulated::meet_warp({a0, a1, a2, a3, b0, b1});
    const int lane = emulated::current % 32;
    auto a = [&](int row, int k) {
        const u32 word = given[row % 8 * 4 + k % 8 / 2][(row >= 8) + 2 * (k >= 8)];
        return emulated::bf16(k % 2 ? word >> 16 : word & 0xffff);
    };
    auto b = [&](int k, int column) {
        const u32 word = given[column * 4 + k % 8 / 2][4 + (k >= 8)];
        return emulated::bf16(k % 2 ? word >> 16 : word & 0xffff);
    };
    for (int nth = 0; nth < 4; ++nth)
        for (int k = 0; k < 16; ++k)
            sums[nth] += a(lane / 4 + nth / 2 * 8, k) * b(k, lane % 4 * 2 + nth % 2);
}

namespace emulated {

inline std::function<void()> body;

inline void enter() { body(); }

// Run a grid's blocks one after the other; `before` is what the kernel before still has to write in each one's eyes.
inline void run(int grid, int threads, u32 seed, std::function<void()> kernel, std::function<void()> before) {
    constexpr size_t STACK = 64 << 10;
    *failure = 0;
    std::vector<char> stacks(threads * STACK);
    for (int nth = 0; nth < grid; ++nth) {
        Block here;
        block = &here;
        here.random.seed(seed + nth);
        here.everyone.size = threads;
        std::memset(shared, 0xff, sizeof shared);
        blockIdx.x = nth;
        gridDim.x = grid;
        contexts.assign(threads, {});
        std::vector<bool> over(threads, false);
        body = [&] {
            kernel();
            over[current] = true;
            happened();
        };
        for (int thread = 0; thread < threads; ++thread) {
            getcontext(&contexts[thread]);
            contexts[thread].uc_stack.ss_sp = stacks.data() + thread * STACK;
            contexts[thread].uc_stack.ss_size = STACK;
            contexts[thread].uc_link = &scheduler;
            makecontext(&contexts[thread], (void (*)())enter, 0);
        }
        int asleep = -1; // a warp, or none
        for (int left = threads, round = 0; left > 0; ++round) {
            const int first = here.random() % threads;
            if (round % 100 == 0)
                asleep = here.random() % 2 ? here.random() % (threads / 32) : -1;
            for (int n = 0; n < threads; ++n) {
                current = threadIdx.x = (first + n) % threads;
                if (over[current] || current / 32 == asleep)
                    continue;
                swapcontext(&scheduler, &contexts[current]);
                if (*failure)
                    return;
                left -= over[current];
                if (!here.copies.empty() && here.random() % 64 == 0)
                    end_copy(here.random() % here.copies.size());
            }
            if (!here.before_ended && round > 150 + (int)(here.random() % 300)) {
                if (nth == 0)
                    before();
                here.before_ended = true;
                happened();
            }
        }
        if (!here.copies.empty()) {
            std::strcpy(failure, "a bulk copy is under way when its block has ended");
            return;
        }
    }
}

} // namespace emulated
