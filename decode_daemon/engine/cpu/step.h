// What the parts of the native step share: the model as Python hands it over, and the state of one step.
//
// Everything here is plain data, so that work.cpp can be compiled once for each instruction set without the copies
// sharing a function: the linker would keep one copy of an inline function, and it might be one this CPU cannot run.
#pragma once
#include <cstddef>
#include <cstdint>

struct Team;

constexpr int MAX_WIDTH = 8;  // rows of one step

// Sizes in elements, heads or positions. hidden, intermediate and head_dim are multiples of 16.
struct Shape {
    int32_t layers, hidden, intermediate, heads, kv_heads, head_dim, vocab, context;
    int32_t bfloat16;  // of weights, tables, cache and logits: 1 bfloat16, 0 float32
    float eps;
};

// Matrices are [outputs, inputs]; the three pointers that a family may lack are null then.
struct Layer {
    const void *input_norm, *qkv, *qkv_bias, *q_norm, *k_norm, *output, *post_norm, *gate_up, *down;
};

struct Tensors {
    const void *embedding, *final_norm, *head;
    const void *cos, *sin;  // [context, head_dim / 2]
    void *cache;            // [layers, 2, kv_heads, context, head_dim], K (rotated) before V
    void *logits;           // [MAX_WIDTH, vocab]
};

// A counter that hands out the parts of one stage; a cache line each, so that stages do not slow each other.
struct alignas(64) Claim {
    int32_t next;
};

// One thread's own memory.
struct Scratch {
    float *packed;   // [MAX_WIDTH, longest input]: a product's input as the kernels want it
    float *row;      // [longest of hidden and head_dim]
    float *queries;  // [MAX_WIDTH * heads / kv_heads, head_dim], rotated and packed
    float *scores;   // [4, longest chunk]
    float *gate_up;  // [2, MAX_WIDTH, BLOCK_ROWS]
    int64_t best_id[MAX_WIDTH];
    float best[MAX_WIDTH];
    int32_t finite[MAX_WIDTH];
};

// Activations are float arrays that hold values already rounded to the model's type.
struct Step {
    Shape shape;
    Tensors tensors;
    const Layer *layers;
    Team *team;
    Scratch *scratch;  // one per thread
    int32_t threads, width, position, chunks;
    Claim *claims;      // [layers * STAGES + 1]
    float *x;           // [MAX_WIDTH, hidden]: the residual stream
    float *qkv;         // [MAX_WIDTH, (heads + 2 * kv_heads) * head_dim]
    float *attention;   // [MAX_WIDTH, heads * head_dim]
    float *mlp;         // [MAX_WIDTH, intermediate]
    float *chunk_max;   // [MAX_WIDTH * heads, chunks of the whole context]
    float *chunk_sum;   // as chunk_max
    float *chunk_out;   // [MAX_WIDTH * heads, chunks of the whole context, head_dim]
    int32_t chunk_stride;
};

enum Stage { QKV, ATTEND, COMBINE, OUTPUT, GATE_UP, DOWN, STAGES };

constexpr int BLOCK_ROWS = 128;  // most rows of a matrix that a thread claims at once

// The context is cut at fixed positions, whatever the width and the threads: 128 chunks of 64 up to 8,192 positions, and 64
// more for each doubling after that. Short contexts are spread well, and long ones do not drown in partial results.
static inline int64_t chunk_start(int64_t chunk) {
    if (chunk < 128) return chunk * 64;
    int64_t doubling = (chunk - 128) / 64, rest = (chunk - 128) % 64;
    return (int64_t{8192} << doubling) + rest * (int64_t{128} << doubling);
}

// How many chunks hold the positions before `end`.
static inline int32_t chunks_before(int64_t end) {
    int32_t chunks = end < 8192 ? static_cast<int32_t>(end / 64) : 128;
    while (chunk_start(chunks) < end) chunks++;
    return chunks;
}

extern "C" {
// One thread's share of a step.
void anchorleg_work_avx512(Step *step, int thread);
void anchorleg_work_avx2(Step *step, int thread);

// Wait until every thread of the team has come here.
void anchorleg_barrier(Team *team);
}
