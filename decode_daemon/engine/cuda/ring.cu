// A matrix times a few rows at the speed of the memory: what comes before the product and what comes after it are part of it.
//
// One block a multiprocessor. Two of its warps stream the block's tiles of the matrix through a ring in shared memory, with bulk
// copies that take no registers and hardly an instruction; eight others multiply with tensor cores, which take up to eight rows
// of x in the time of one. The matrix lies in memory as it is read (`pack` in ring.py): a stage of the ring is one run of bytes,
// made of blocks of 8 rows and 64 bytes, each of which a warp loads at once. The matrix does not depend on what ran before, so
// a block fills its ring while the kernel before it ends.
//
// A row's result is the same bit for bit whatever rows are beside it: each is a column of its own in every tensor core
// instruction, and the order of a sum's terms is a matter of the cut, the same for every width.
//
// Compiled behind instructions.cuh.

constexpr int LANES = 32;
constexpr int WARPS = 8;   // that multiply
constexpr int COPIERS = 2; // warps after them
constexpr int THREADS = (WARPS + COPIERS) * LANES;
constexpr int GROUP = 32;         // columns of which a lane's 16 bytes are a part
constexpr int BLOCK = 512;        // bytes of 8 rows of a group
constexpr int PAD = 64;           // bytes between rows of x, so that two of them lie in different banks
constexpr int SLOTS = 64;         // words over which a row's maxima are spread
constexpr float SQUARE = 1 << 24; // one, as squares are added up in integers: see products.py
constexpr float LOG2E = 1.4426950408889634f;

struct Arguments {
    u16* out;           // bfloat16 [8, outputs]
    const u16* x;       // bfloat16 [8, inputs], with its norm's gain
    const char* weight; // bfloat16 [outputs, inputs], packed, or [2 * outputs, inputs] when gated: all gates, then all ups
    const u16* addend;  // bias [outputs], or what is added to [8, outputs] when there is a next norm, or null
    const i64* squares; // [8]: sums of squares of what x was before its gain, or null
    const u16* gain;    // [outputs], of the norm that follows
    u16* scaled;        // bfloat16 [8, outputs]: out * gain
    u64* next_squares;  // [8]: gets the sums of squares of `out`; null: no norm follows
    i64* peaks;         // [8, SLOTS]: the largest (value, id) of each row, or null
    float eps;
    int inputs; // a multiple of 32
    int outputs;
};

// The square of a value as an integer, see SQUARE; a value counts as at most 2**18, so that its square fits.
__device__ __forceinline__ i64 counted(float value) {
    float bounded = fminf(fabsf(value), 262144.0f);
    return (i64)(bounded * bounded * SQUARE);
}

// (value, id) as an integer: larger values first, of equal ones the lower id; a value that is not finite tops all.
__device__ __forceinline__ i64 peak_of(float value, int id) {
    int bits = __float_as_int(value == 0.0f ? 0.0f : value);
    int high = bits ^ ((bits >> 31) & 0x7FFFFFFF);
    high = fabsf(value) < __int_as_float(0x7f800000) ? high : 0x7FFFFFFF;
    return ((i64)high << 32) | (i64)(u32)(0x7FFFFFFF - id);
}

// Sum, and largest, over the lanes of each group of ROWS.
template <int ROWS> __device__ __forceinline__ i64 sum_of(i64 value) {
#pragma unroll
    for (int apart = ROWS / 2; apart > 0; apart /= 2)
        value += __shfl_xor_sync(0xffffffff, value, apart);
    return value;
}

template <int ROWS> __device__ __forceinline__ i64 largest_of(i64 value) {
#pragma unroll
    for (int apart = ROWS / 2; apart > 0; apart /= 2) {
        i64 other = __shfl_xor_sync(0xffffffff, value, apart);
        value = other > value ? other : value;
    }
    return value;
}

// How a matrix is cut: a stage holds LINES rows of COLUMNS columns, and the same columns of WIDTH rows of x.
template <int WIDTH, bool GATED, int LINES, int COLUMNS, int STAGES> struct Cut {
    static constexpr int ROWS = GATED ? LINES / 2 : LINES; // outputs of a tile; gated: as many gates, then as many ups
    static constexpr int OWN = COLUMNS / WARPS;            // columns of a warp
    static constexpr int WEIGHTS = LINES * COLUMNS * 2;    // bytes
    static constexpr int X_PITCH = COLUMNS * 2 + PAD;
    static constexpr int STAGE = WEIGHTS + WIDTH * X_PITCH;
    static constexpr int PITCH = LINES + 4; // floats between rows of sums, so that a warp's lanes store to different banks
    static constexpr int SUMS = WARPS * WIDTH * PITCH;
    static_assert(LINES % 16 == 0 && LINES <= LANES && OWN % GROUP == 0 && ROWS * WIDTH <= WARPS * LANES, "tile");
    static_assert(X_PITCH % 128 == PAD && STAGE % PAD == 0, "banks");
};

template <int WIDTH, bool GATED, int LINES, int COLUMNS, int STAGES>
__global__ void __launch_bounds__(THREADS) product(const __grid_constant__ Arguments a) {
    using C = Cut<WIDTH, GATED, LINES, COLUMNS, STAGES>;
    constexpr int ROWS = C::ROWS;
    extern __shared__ __align__(128) char shared[];
    float* const sums_of_warps = (float*)(shared + STAGES * C::STAGE); // [2][WARPS][WIDTH][PITCH]
    u64* const barriers = (u64*)(sums_of_warps + 2 * C::SUMS);
    const u32 ring = shared_address(shared), full = shared_address(barriers), empty = full + STAGES * 8;
    const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const int inputs = a.inputs, outputs = a.outputs;
    const int tiles = (outputs + ROWS - 1) / ROWS, passes = (inputs + COLUMNS - 1) / COLUMNS;
    int slot = 0;
    u32 parity = 0;
    auto advance = [&]() {
        if (++slot == STAGES) {
            slot = 0;
            parity ^= 1;
        }
    };

    launch_dependents();
    if (threadIdx.x == 0) {
        for (int nth = 0; nth < STAGES; ++nth) {
            barrier_init(full + nth * 8, COPIERS);
            barrier_init(empty + nth * 8, WARPS);
        }
        barriers_are_there();
    }
    __syncthreads();

    if (warp >= WARPS) {
        const int copier = warp - WARPS;
        const int rows_of_x = (WIDTH - copier + COPIERS - 1) / COPIERS, row_of_x = copier + lane * COPIERS;
        const u64 policy = read_once();
        const int total = (tiles - blockIdx.x + gridDim.x - 1) / gridDim.x * passes, first = min(total, STAGES);
        auto weights = [&](int nth, int to) {
            const int tile = blockIdx.x + nth / passes * gridDim.x, at = nth % passes * COLUMNS;
            const int columns = min(COLUMNS, inputs - at), bytes = LINES * columns * 2 / COPIERS;
            if (lane == 0) {
                barrier_expect(full + to * 8, bytes + rows_of_x * columns * 2);
                const char* from = a.weight + (i64)tile * LINES * inputs * 2 + at * LINES * 2 + copier * bytes;
                copy_once(ring + to * C::STAGE + copier * bytes, from, bytes, full + to * 8, policy);
            }
            __syncwarp();
        };
        auto rows = [&](int nth, int to) {
            const int at = nth % passes * COLUMNS;
            if (lane < rows_of_x)
                copy(ring + to * C::STAGE + C::WEIGHTS + row_of_x * C::X_PITCH, a.x + (i64)row_of_x * inputs + at,
                     min(COLUMNS, inputs - at) * 2, full + to * 8);
        };
        for (int nth = 0; nth < first; ++nth)
            weights(nth, nth);
        wait_for_kernel_before();
        for (int nth = 0; nth < first; ++nth)
            rows(nth, nth);
        for (int nth = first; nth < total; ++nth, advance()) {
            barrier_wait(empty + slot * 8, parity);
            weights(nth, slot);
            rows(nth, slot);
        }
        return;
    }

    wait_for_kernel_before();
    const int group = lane / 4, part = lane % 4;
    // The output that this thread ends: of row r, the n-th of the tile.
    const int r = threadIdx.x / ROWS, n = threadIdx.x % ROWS;
    const bool next_norm = a.next_squares != nullptr;
    const i64 squares = r < WIDTH && a.squares ? a.squares[r] : 0;
    int turn = 0; // of the two places for sums, so that a tile's need no second barrier
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, turn ^= 1) {
        const int output = tile * ROWS + n;
        const bool inside = r < WIDTH && output < outputs;
        u16 addend = 0, gain = 0; // as they are: nothing waits for them until the end
        if (inside && a.addend)
            addend = a.addend[next_norm ? (i64)r * outputs + output : output];
        if (inside && next_norm)
            gain = a.gain[output];
        float sums[LINES / 16][4] = {};
        for (int at = 0; at < inputs; at += COLUMNS, advance()) {
            barrier_wait(full + slot * 8, parity);
            const char* stage = shared + slot * C::STAGE;
            const char* xs = stage + C::WEIGHTS + group * C::X_PITCH;
            const int columns = min(COLUMNS, inputs - at);
#pragma unroll
            for (int nth = 0; nth < C::OWN / GROUP; ++nth) {
                const int column = warp * C::OWN + nth * GROUP;
                if (column >= columns)
                    break;
                // 16 bytes of one of 8 rows: of which and from where depends on the lane, as `multiply` wants it.
                auto half = [&](int rows) {
                    return *(const uint4*)(stage + (rows * (columns / GROUP) + column / GROUP) * BLOCK + lane * 16);
                };
                const uint4 b = group < WIDTH ? *(const uint4*)(xs + (column + part * 8) * 2) : make_uint4(0, 0, 0, 0);
#pragma unroll
                for (int block = 0; block < LINES / 16; ++block) {
                    const uint4 w = half(2 * block), v = half(2 * block + 1);
                    multiply(sums[block], w.x, v.x, w.y, v.y, b.x, b.y);
                    multiply(sums[block], w.z, v.z, w.w, v.w, b.z, b.w);
                }
            }
            __syncwarp();
            if (lane == 0)
                barrier_arrive(empty + slot * 8);
        }
        float* const kept = sums_of_warps + turn * C::SUMS;
#pragma unroll
        for (int block = 0; block < LINES / 16; ++block)
#pragma unroll
            for (int nth = 0; nth < 4; ++nth)
                if (part * 2 + nth % 2 < WIDTH)
                    kept[(warp * WIDTH + part * 2 + nth % 2) * C::PITCH + block * 16 + group + nth / 2 * 8] = sums[block][nth];
        meet<WARPS * LANES>();
        float y = 0.0f, up = 0.0f;
        if (r < WIDTH)
#pragma unroll
            for (int other = 0; other < WARPS; ++other) {
                const float* line = kept + (other * WIDTH + r) * C::PITCH;
                y += line[n];
                if (GATED)
                    up += line[ROWS + n];
            }
        const float scale = a.squares ? rsqrtf((float)squares / (SQUARE * inputs) + a.eps) : 1.0f;
        y *= scale;
        if (GATED) {
            up *= scale;
            y = y / (1.0f + exp2f(-y * LOG2E)) * up;
        }
        y += of_bf16(addend);
        const i64 place = (i64)r * outputs + output;
        const u16 bits = to_bf16(y);
        y = of_bf16(bits);
        if (inside)
            a.out[place] = bits;
        if (next_norm) {
            if (inside)
                a.scaled[place] = to_bf16(y * of_bf16(gain));
            const i64 sum = sum_of<ROWS>(inside ? counted(y) : 0);
            if (r < WIDTH && n == 0)
                atomicAdd(a.next_squares + r, (u64)sum);
        }
        if (a.peaks) {
            const i64 best = largest_of<ROWS>(inside ? peak_of(y, output) : (i64)(1ull << 63));
            if (r < WIDTH && n == 0)
                atomicMax(a.peaks + r * SLOTS + tile % SLOTS, best);
        }
    }
}
