// The C functions that Python calls (native.py), the choice of instruction set, and the memory of one model's steps.
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "step.h"
#include "team.h"

namespace {

using Work = void (*)(Step *, int);

float widen(const void *values, int64_t index, bool bfloat16) {
    if (!bfloat16) return static_cast<const float *>(values)[index];
    uint32_t bits = static_cast<uint32_t>(static_cast<const uint16_t *>(values)[index]) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

struct Free {
    void operator()(void *memory) const { std::free(memory); }
};

}  // namespace

struct Model {
    Step step{};
    Work work = nullptr;
    std::vector<Layer> layers;
    std::vector<Scratch> scratch;
    std::vector<std::unique_ptr<void, Free>> memory;
    Team *team = nullptr;

    ~Model() {
        if (team) team_close(team);
    }

    // Whole cache lines, so that what one thread writes shares none with another's. Large ones cost no memory until used.
    template <class Value = float>
    Value *room(int64_t count) {
        size_t bytes = (count * sizeof(Value) + 127) / 64 * 64;
        void *found = std::aligned_alloc(64, bytes);
        if (!found) throw std::bad_alloc();
        memory.emplace_back(found);
        return static_cast<Value *>(found);
    }

    void allocate(int threads) {
        const Shape &shape = step.shape;
        const int64_t attention = int64_t{shape.heads} * shape.head_dim;
        int64_t longest = shape.hidden > shape.intermediate ? shape.hidden : shape.intermediate;
        longest = attention > longest ? attention : longest;
        const int32_t chunks = chunks_before(shape.context);
        const int64_t chunk = chunk_start(chunks) - chunk_start(chunks - 1);
        step.chunk_stride = (chunks + 15) / 16 * 16;
        const int64_t partials = int64_t{MAX_WIDTH} * shape.heads * step.chunk_stride;
        step.claims = room<Claim>(shape.layers * STAGES + 1);
        step.x = room(int64_t{MAX_WIDTH} * shape.hidden);
        step.qkv = room(MAX_WIDTH * (attention + 2 * int64_t{shape.kv_heads} * shape.head_dim));
        step.attention = room(MAX_WIDTH * attention);
        step.mlp = room(int64_t{MAX_WIDTH} * shape.intermediate);
        step.chunk_max = room(partials);
        step.chunk_sum = room(partials);
        step.chunk_out = room(partials * shape.head_dim);
        for (int i = 0; i < threads; i++) {
            Scratch one{};
            one.packed = room(MAX_WIDTH * (longest + 16));  // room for whole groups of 32
            one.row = room(shape.hidden > shape.head_dim ? shape.hidden : shape.head_dim);
            one.queries = room(int64_t{MAX_WIDTH} * shape.heads / shape.kv_heads * (shape.head_dim + 16));
            one.scores = room(4 * chunk);
            one.gate_up = room(2 * MAX_WIDTH * BLOCK_ROWS);
            std::memset(one.gate_up, 0, 2 * MAX_WIDTH * BLOCK_ROWS * sizeof(float));
            scratch.push_back(one);
        }
    }

    void run(const int64_t *ids, int width, int position) {
        const Shape &shape = step.shape;
        step.width = width;
        step.position = position;
        step.chunks = chunks_before(position + width);
        std::memset(static_cast<void *>(step.claims), 0, (shape.layers * STAGES + 1) * sizeof(Claim));
        for (int m = 0; m < width; m++)
            for (int i = 0; i < shape.hidden; i++)
                step.x[m * shape.hidden + i] = widen(step.tensors.embedding, ids[m] * shape.hidden + i, shape.bfloat16);
        team_run(team, [](void *self, int thread) {
            Model *model = static_cast<Model *>(self);
            model->work(&model->step, thread);
        }, this);
    }

    // The id of the largest logit of row m, the lowest of equal ones; -1 when a logit is not finite.
    int64_t best(int m) const {
        const Scratch *best = &scratch[0];
        for (const Scratch &one : scratch) {
            if (!one.finite[m]) return -1;
            if (one.best[m] > best->best[m] || (one.best[m] == best->best[m] && one.best_id[m] < best->best_id[m])) best = &one;
        }
        return best->best_id[m];
    }
};

#pragma GCC visibility push(default)
extern "C" {

// Whether this CPU, and the operating system on it, can run a set of instructions by name.
int anchorleg_supports(const char *instructions) {
    __builtin_cpu_init();
    if (!std::strcmp(instructions, "avx512"))
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("fma");
    if (!std::strcmp(instructions, "avx2")) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    return 0;
}

// Keep pointers to the tensors and start the threads; null when memory or threads cannot be had. `cores` may be null.
Model *anchorleg_open(const Shape *shape, const Tensors *tensors, const Layer *layers, const char *instructions, int threads,
                      const int *cores) {
    try {
        std::unique_ptr<Model> model(new Model);
        model->step.shape = *shape;
        model->step.tensors = *tensors;
        model->layers.assign(layers, layers + shape->layers);
        model->work = std::strcmp(instructions, "avx2") ? anchorleg_work_avx512 : anchorleg_work_avx2;
        model->step.threads = threads;
        model->allocate(threads);
        model->team = team_open(threads, cores);
        if (!model->team) return nullptr;
        model->step.layers = model->layers.data();
        model->step.scratch = model->scratch.data();
        model->step.team = model->team;
        return model.release();
    } catch (const std::bad_alloc &) {
        return nullptr;
    }
}

// Run a step of 1 to MAX_WIDTH rows; the caller has checked ids and positions. Logits are in Tensors.logits afterwards.
void anchorleg_step(Model *model, const int64_t *ids, int width, int position, int64_t *best) {
    model->run(ids, width, position);
    for (int m = 0; m < width; m++) best[m] = model->best(m);
}

// The rows of the last step as they left the last layer, before the final norm: [MAX_WIDTH, hidden], while the model lives.
const float *anchorleg_hidden(const Model *model) { return model->step.x; }

void anchorleg_close(Model *model) { delete model; }

}
#pragma GCC visibility pop
