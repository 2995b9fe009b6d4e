// One thread's share of a decode step, compiled once for each instruction set (WORK names the copy).
//
// Within a stage threads claim parts until none is left, so that a slow core does less; a barrier ends the stage. A value is
// computed by the same operations in the same order whoever claims it and however many rows the step has. The points where
// values are rounded to bfloat16 are those of transformers' and vLLM's Llama.
#include "kernels.h"

namespace {

// Bytes of a matrix that a thread claims at once: long enough to stream, short enough to end the stage together.
constexpr int64_t BLOCK_BYTES = 96 * 1024;
constexpr int BLOCKS_EACH = 4;  // for each thread of every matrix that has the rows, so that small ones are shared evenly too

constexpr int64_t BYTES_AHEAD = 1024;  // of a matrix's row and those after it, on their way while one byte is multiplied
constexpr int64_t KEYS_AHEAD = 32;     // positions whose keys are on their way while one is scored

template <class T>
struct Worker {
    Step &s;
    Scratch &own;
    const int width, hidden, heads, kv_heads, dim, group, kv_row, attention_row, qkv_row;
    int64_t ready = -1;  // which layer's and KV head's queries `own.queries` holds

    Worker(Step &step, Scratch &scratch)
        : s(step), own(scratch), width(step.width), hidden(step.shape.hidden), heads(step.shape.heads),
          kv_heads(step.shape.kv_heads), dim(step.shape.head_dim), group(heads / kv_heads), kv_row(heads * dim),
          attention_row(heads * dim), qkv_row((heads + 2 * kv_heads) * dim) {}

    static const T *typed(const void *from) { return static_cast<const T *>(from); }

    int claim(int stage) { return __atomic_fetch_add(&s.claims[stage].next, 1, __ATOMIC_RELAXED); }

    void step() {
        const Shape &shape = s.shape;
        for (int l = 0; l < shape.layers; l++) {
            const Layer &layer = s.layers[l];
            int stage = l * STAGES;
            pack_normed(layer.input_norm);
            product(stage + QKV, layer.qkv, qkv_row, hidden, [&](int n, int m, float value) {
                if (layer.qkv_bias) value += widen(typed(layer.qkv_bias)[n]);
                s.qkv[m * qkv_row + n] = rounded<T>(value);
            });
            anchorleg_barrier(s.team);
            attend_all(l, stage + ATTEND);
            anchorleg_barrier(s.team);
            for (int part; (part = claim(stage + COMBINE)) < width * heads;) combine(part);
            anchorleg_barrier(s.team);
            pack_rows(s.attention, attention_row);
            add_product(stage + OUTPUT, layer.output, attention_row);
            anchorleg_barrier(s.team);
            pack_normed(layer.post_norm);
            gate_up(stage + GATE_UP, typed(layer.gate_up));
            anchorleg_barrier(s.team);
            pack_rows(s.mlp, shape.intermediate);
            add_product(stage + DOWN, layer.down, shape.intermediate);
            anchorleg_barrier(s.team);
        }
        pack_normed(s.tensors.final_norm);
        choose(shape.layers * STAGES);
    }

    // y = x / rms(x) * weight over `count` elements. The mean is taken in one fixed order.
    void norm(const float *x, const void *weight, int count, float *y) {
        Floats squares = {};
        for (int i = 0; i < count; i += LANES) squares = fused(load(x + i), load(x + i), squares);
        float scale = 1.0f / __builtin_sqrtf(sum(squares) / count + s.shape.eps);
        for (int i = 0; i < count; i += LANES) store(y + i, rounded<T>(load(x + i) * scale * load(typed(weight) + i)));
    }

    void pack_normed(const void *weight) {
        for (int m = 0; m < width; m++) {
            norm(s.x + m * hidden, weight, hidden, own.row);
            pack<T>(own.row, own.packed + m * packed_length(hidden), hidden);
        }
    }

    void pack_rows(const float *rows, int length) {
        for (int m = 0; m < width; m++) pack<T>(rows + m * length, own.packed + m * packed_length(length), length);
    }

    // Call `take(n, m, value)` for each row n of the matrix from `from` to `end`, and each row m of the input.
    //
    // Four rows are multiplied at once, each from another quarter of the block: four long runs for the CPU's own prefetching.
    // Four neighbours are not runs to it: two threads of Zen 3 read 9.9 GB/s of them, and 16.6 in quarters.
    template <class Take>
    void block_product(const T *matrix, int from, int end, int length, Take take) {
        const int quarter = (end - from + 3) / 4, stride = packed_length(length);
        float out[MAX_WIDTH][4];
        for (int first = from; first < from + quarter; first++) {
            const T *w[4];
            for (int r = 0; r < 4; r++) {
                const int n = first + r * quarter;
                w[r] = matrix + static_cast<int64_t>(n < end ? n : end - 1) * length;
            }
            for (int m = 0; m < width; m += TILE_ROWS) {
                const int rows = width - m < TILE_ROWS ? width - m : TILE_ROWS;
                tiles<T>(rows, w, BYTES_AHEAD / sizeof(T), own.packed + m * stride, stride, length, out + m);
            }
            for (int r = 0; r < 4 && first + r * quarter < end; r++)
                for (int m = 0; m < width; m++) take(first + r * quarter, m, out[m][r]);
        }
    }

    // How many rows of a matrix a thread claims at once: whole groups of four, at least one.
    int block_rows(int outputs, int length) const {
        const int64_t most = BLOCK_BYTES / (length * static_cast<int64_t>(sizeof(T)));
        const int64_t even = outputs / (BLOCKS_EACH * s.threads), rows = (most < even ? most : even) / 4 * 4;
        return static_cast<int>(rows < 4 ? 4 : rows > BLOCK_ROWS ? BLOCK_ROWS : rows);
    }

    // As `block_product`, for the blocks of the whole matrix that this thread claims.
    template <class Take>
    void product(int stage, const void *matrix, int outputs, int length, Take take) {
        const int block = block_rows(outputs, length);
        for (int from; (from = claim(stage) * block) < outputs;)
            block_product(typed(matrix), from, from + block < outputs ? from + block : outputs, length, take);
    }

    void add_product(int stage, const void *matrix, int length) {
        product(stage, matrix, hidden, length, [&](int n, int m, float value) {
            float &x = s.x[m * hidden + n];
            x = rounded<T>(x + rounded<T>(value));
        });
    }

    void gate_up(int stage, const T *matrix) {
        const int outputs = s.shape.intermediate, block = block_rows(outputs, hidden);
        const T *up_matrix = matrix + static_cast<int64_t>(outputs) * hidden;
        for (int from; (from = claim(stage) * block) < outputs;) {
            const int end = from + block < outputs ? from + block : outputs;
            float *gates = own.gate_up, *ups = gates + MAX_WIDTH * BLOCK_ROWS;
            block_product(matrix, from, end, hidden, [&](int n, int m, float v) { gates[m * BLOCK_ROWS + n - from] = v; });
            block_product(up_matrix, from, end, hidden, [&](int n, int m, float v) { ups[m * BLOCK_ROWS + n - from] = v; });
            for (int m = 0; m < width; m++) activate(m, from, end);
        }
    }

    // mlp = silu(gate) * up for what `gate_up` has of row m; lanes beyond the end are computed and not kept.
    void activate(int m, int from, int end) {
        float *gates = own.gate_up + m * BLOCK_ROWS, *ups = own.gate_up + (MAX_WIDTH + m) * BLOCK_ROWS;
        for (int i = 0; i < end - from; i += LANES) {
            Floats gate = rounded<T>(load(gates + i));
            Floats silu = rounded<T>(gate / (1.0f + exponential(-gate)));
            store(gates + i, rounded<T>(silu * rounded<T>(load(ups + i))));
        }
        __builtin_memcpy(s.mlp + m * static_cast<int64_t>(s.shape.intermediate) + from, gates, (end - from) * sizeof(float));
    }

    // Write the head's vector at `from`, normalised where the family does that and turned to its position, to `to`.
    void turn(const float *from, const void *norm_weight, int position, float *to) {
        if (norm_weight) {
            norm(from, norm_weight, dim, own.row);
            from = own.row;
        }
        const int half = dim / 2;
        const T *cos = typed(s.tensors.cos) + static_cast<int64_t>(position) * half;
        const T *sin = typed(s.tensors.sin) + static_cast<int64_t>(position) * half;
        for (int i = 0; i < half; i++) {
            float low = from[i], high = from[i + half], c = widen(cos[i]), n = widen(sin[i]);
            to[i] = rounded<T>(low * c - high * n);
            to[i + half] = rounded<T>(high * c + low * n);
        }
    }

    T *cached(int layer, int kind, int kv_head) {
        int64_t index = (static_cast<int64_t>(layer) * 2 + kind) * kv_heads + kv_head;
        return static_cast<T *>(s.tensors.cache) + index * s.shape.context * dim;
    }

    // Put row m's key and value for `kv_head` in the cache.
    void remember(int layer, int kv_head, int m, T *keys, T *values) {
        const float *row = s.qkv + m * qkv_row + kv_row;
        const int64_t place = static_cast<int64_t>(s.position + m) * dim;
        float key[dim];
        turn(row + kv_head * dim, s.layers[layer].k_norm, s.position + m, key);
        for (int i = 0; i < dim; i++) {
            narrow(keys + place + i, key[i]);
            narrow(values + place + i, row[(kv_heads + kv_head) * dim + i]);
        }
    }

    // Turn the queries that share `kv_head`, row by row of the step: [width * group, dim], packed.
    void prepare_queries(int layer, int kv_head) {
        if (ready == static_cast<int64_t>(layer) * kv_heads + kv_head) return;
        ready = static_cast<int64_t>(layer) * kv_heads + kv_head;
        float query[dim];
        for (int m = 0; m < width; m++)
            for (int h = 0; h < group; h++) {
                turn(s.qkv + m * qkv_row + (kv_head * group + h) * dim, s.layers[layer].q_norm, s.position + m, query);
                pack<T>(query, own.queries + (m * group + h) * packed_length(dim), dim);
            }
    }

    // Neighbouring chunks are claimed together once there are enough for every thread: memory is read in long runs.
    void attend_all(int layer, int stage) {
        const int parts = kv_heads * s.chunks, share = parts / (16 * s.threads), run = share < 1 ? 1 : share > 8 ? 8 : share;
        for (int from; (from = claim(stage) * run) < parts;)
            for (int part = from; part < from + run && part < parts; part++) attend(layer, part / s.chunks, part % s.chunks);
    }

    // Attend to one chunk of one KV head: for each query that shares it the largest score, the sum of weights and the
    // weighted values, to be combined with the other chunks'. New keys and values are stored by who reads their chunk.
    void attend(int layer, int kv_head, int chunk) {
        const int start = static_cast<int>(chunk_start(chunk)), last = s.position + width;
        const int stop = chunk_start(chunk + 1) < last ? static_cast<int>(chunk_start(chunk + 1)) : last;
        T *keys = cached(layer, 0, kv_head), *values = cached(layer, 1, kv_head);
        for (int m = 0; m < width; m++)
            if (s.position + m >= start && s.position + m < stop) remember(layer, kv_head, m, keys, values);
        prepare_queries(layer, kv_head);
        keys += static_cast<int64_t>(start) * dim, values += static_cast<int64_t>(start) * dim;
        const int queries = width * group, count = stop - start, padded = (count + LANES - 1) / LANES * LANES;
        const float scale = 1.0f / __builtin_sqrtf(static_cast<float>(dim));
        for (int q = 0; q < queries; q += TILE_ROWS) {
            const int rows = queries - q < TILE_ROWS ? queries - q : TILE_ROWS;
            score(keys, values, q, rows, count, padded);
            const float *weights[TILE_ROWS];
            float *outs[TILE_ROWS];
            int known[TILE_ROWS], common = count;
            for (int r = 0; r < rows; r++) {
                const int m = (q + r) / group, head = kv_head * group + (q + r) % group;
                const int64_t place = static_cast<int64_t>(m * heads + head) * s.chunk_stride + chunk;
                const int visible = s.position + m + 1 - start;
                known[r] = visible < 0 ? 0 : visible < count ? visible : count;
                common = known[r] < common ? known[r] : common;
                float *scores = own.scores + r * padded;
                if (known[r] > 0) soften(scores, known[r], padded, scale, s.chunk_max[place], s.chunk_sum[place]);
                weights[r] = scores;
                outs[r] = s.chunk_out + place * dim;
                for (int i = 0; i < dim; i++) outs[r][i] = 0.0f;
            }
            weigh_rows(rows, weights, values, 0, common, outs);
            // A row sees no later row's values, not even times zero: they may not be finite.
            for (int r = 0; r < rows; r++) weigh_rows(1, weights + r, values, common, known[r], outs + r);
        }
    }

    // scores[r][j]: query q + r times key j.
    void score(const T *keys, const T *values, int q, int rows, int count, int padded) {
        const int stride = packed_length(dim);
        float out[TILE_ROWS][4];
        for (int j = 0; j < count; j += 4) {
            const T *w[4];
            for (int k = 0; k < 4; k++) w[k] = keys + static_cast<int64_t>(j + k < count ? j + k : count - 1) * dim;
            tiles<T>(rows, w, KEYS_AHEAD * dim, own.queries + q * stride, stride, dim, out);
            if (q == 0)  // the values come next
                for (int i = 0; i < 4 * dim; i += 64 / static_cast<int>(sizeof(T)))
                    _mm_prefetch(values + static_cast<int64_t>(j) * dim + i, _MM_HINT_T0);
            for (int r = 0; r < rows; r++) __builtin_memcpy(own.scores + r * padded + j, out[r], sizeof out[r]);
        }
    }

    // Turn the first `known` scores into weights exp(score - largest), and the others into zeros.
    void soften(float *scores, int known, int padded, float scale, float &most, float &total) {
        const float lowest = -__builtin_inff();
        for (int j = known; j < padded; j++) scores[j] = lowest;
        Floats top = splat(lowest);
        for (int j = 0; j < padded; j += LANES) {
            Floats score = load(scores + j) * scale;
            store(scores + j, score);
            top = score > top ? score : top;
        }
        most = largest(top);
        for (int j = 0; j < padded; j += LANES) store(scores + j, exponential(load(scores + j) - most));
        for (int j = known; j < padded; j++) scores[j] = 0.0f;
        Floats sums = {};
        for (int j = 0; j < padded; j += LANES) sums += load(scores + j);
        total = sum(sums);
    }

    void weigh_rows(int rows, const float *const *weights, const T *values, int from, int to, float *const *outs) {
        if (from >= to) return;
        switch (rows) {
            case 1: return weigh_dims<1>(weights, values, from, to, outs);
            case 2: return weigh_dims<2>(weights, values, from, to, outs);
#ifdef __AVX512F__
            case 3: return weigh_dims<3>(weights, values, from, to, outs);
            case 4: return weigh_dims<4>(weights, values, from, to, outs);
#endif
        }
    }

    template <int R>
    void weigh_dims(const float *const *weights, const T *values, int from, int to, float *const *outs) {
        for (int i = 0; i < dim;) {
            float *at[R];
            for (int r = 0; r < R; r++) at[r] = outs[r] + i;
            if (dim - i >= 4 * LANES) {
                weigh<T, R, 4>(weights, values + i, dim, from, to, at);
                i += 4 * LANES;
            } else if (dim - i >= 2 * LANES) {
                weigh<T, R, 2>(weights, values + i, dim, from, to, at);
                i += 2 * LANES;
            } else {
                weigh<T, R, 1>(weights, values + i, dim, from, to, at);
                i += LANES;
            }
        }
    }

    // Put one head's attention together from its chunks, first to last.
    void combine(int part) {
        const int m = part / heads, chunks = chunks_before(s.position + m + 1);
        const int64_t first = static_cast<int64_t>(part) * s.chunk_stride;
        const float *maxima = s.chunk_max + first, *sums = s.chunk_sum + first, *outs = s.chunk_out + first * dim;
        float most = maxima[0], total = 0.0f, row[dim];
        for (int c = 1; c < chunks; c++) most = maxima[c] > most ? maxima[c] : most;
        for (int i = 0; i < dim; i++) row[i] = 0.0f;
        Floats shares = {};
        for (int c = 0; c < chunks; c++) {
            // The rows of `maxima` are padded to whole vectors.
            if (c % LANES == 0) shares = exponential(load(maxima + c) - most);
            float share = shares[c % LANES];
            total += sums[c] * share;
            for (int i = 0; i < dim; i += LANES)
                store(row + i, fused(splat(share), load(outs + static_cast<int64_t>(c) * dim + i), load(row + i)));
        }
        float *to = s.attention + m * attention_row + part % heads * dim;
        for (int i = 0; i < dim; i++) to[i] = rounded<T>(row[i] / total);
    }

    // Write the logits, and keep the best of those that this thread computes: of equal ones the lowest id.
    void choose(int stage) {
        const int vocab = s.shape.vocab;
        T *logits = static_cast<T *>(s.tensors.logits);
        for (int m = 0; m < width; m++) own.best[m] = -__builtin_inff(), own.best_id[m] = vocab, own.finite[m] = 1;
        product(stage, s.tensors.head, vocab, hidden, [&](int n, int m, float value) {
            value = rounded<T>(value);
            narrow(logits + static_cast<int64_t>(m) * vocab + n, value);
            if (!(__builtin_fabsf(value) < __builtin_inff())) own.finite[m] = 0;
            const bool better = value > own.best[m] || (value == own.best[m] && n < own.best_id[m]);
            if (better) own.best[m] = value, own.best_id[m] = n;
        });
    }
};

}  // namespace

extern "C" void WORK(Step *step, int thread) {
    Scratch &scratch = step->scratch[thread];
    if (step->shape.bfloat16)
        Worker<bf16>(*step, scratch).step();
    else
        Worker<float>(*step, scratch).step();
}
