// The vector operations of one instruction set, for the file that includes it: AVX-512 or AVX2, as the compiler was told.
//
// bfloat16 is multiplied as floats: with two rows of input and more that is faster than AVX512-BF16's VDPBF16PS (Sapphire
// Rapids, a matrix of 1.2 MB in the L2 cache, four rows: 47 against 66 microseconds), and one row waits for memory either way.
//
// A product's sum over its inputs is taken in one fixed order, the same for every width. Compile with -ffp-contract=off:
// whether two roundings become one must not depend on how the compiler unrolls a loop.
#pragma once
#include <immintrin.h>

#include "step.h"

namespace {

#ifdef __AVX512F__
constexpr int LANES = 16;
constexpr int TILE_ROWS = 4;  // input rows whose sums fit the registers, beside half of four rows of a matrix
#else
constexpr int LANES = 8;
constexpr int TILE_ROWS = 2;
#endif

using bf16 = uint16_t;
typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));

inline Floats load(const float *from) {
    Floats value;
    __builtin_memcpy(&value, from, sizeof value);
    return value;
}

inline Floats load(const bf16 *from) {
#ifdef __AVX512F__
    Words wide = (Words)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)));
#else
    Words wide = (Words)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
#endif
    return (Floats)(wide << 16);
}

inline void store(float *to, Floats value) { __builtin_memcpy(to, &value, sizeof value); }

inline Floats splat(float value) {
#ifdef __AVX512F__
    return (Floats)_mm512_set1_ps(value);
#else
    return (Floats)_mm256_set1_ps(value);
#endif
}

inline float widen(float value) { return value; }

inline float widen(bf16 value) {
    uint32_t bits = static_cast<uint32_t>(value) << 16;
    float wide;
    __builtin_memcpy(&wide, &bits, sizeof wide);
    return wide;
}

// Round to the nearest value of T, ties to even; the result stays a float.
template <class T>
inline Floats rounded(Floats value) {
    if (sizeof(T) == 4) return value;
    Words bits = (Words)value;
    return (Floats)((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u);
}

template <class T>
inline float rounded(float value) {
    if (sizeof(T) == 4) return value;
    uint32_t bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u;
    __builtin_memcpy(&value, &bits, sizeof bits);
    return value;
}

inline void narrow(float *to, float value) { *to = value; }

inline void narrow(bf16 *to, float value) {  // `value` is rounded already
    uint32_t bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    *to = static_cast<bf16>(bits >> 16);
}

inline Floats fused(Floats a, Floats b, Floats c) {
#ifdef __AVX512F__
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#endif
}

inline float sum(Floats value) {
    float total[LANES];
    store(total, value);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) total[i] += total[i + half];
    return total[0];
}

inline float largest(Floats value) {
    float most = value[0];
    for (int i = 1; i < LANES; i++) most = value[i] > most ? value[i] : most;
    return most;
}

// e to the x within 2 units in the last place; a NaN stays one. Reduction and coefficients: Cephes' expf.
inline Floats exponential(Floats x) {
    x = x > 88.0f ? splat(88.0f) : x;
    x = x < -87.0f ? splat(-87.0f) : x;
    Floats shifted = x * 1.44269504088896341f + 12582912.0f;  // adding 1.5 * 2**23 rounds to a whole number
    Floats n = shifted - 12582912.0f;
    Floats r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    Floats p = splat(1.9875691500e-4f);
    p = fused(p, r, splat(1.3981999507e-3f));
    p = fused(p, r, splat(8.3334519073e-3f));
    p = fused(p, r, splat(4.1665795894e-2f));
    p = fused(p, r, splat(1.6666665459e-1f));
    p = fused(p, r, splat(5.0000001201e-1f));
    p = fused(p, r * r, r + 1.0f);
    // The low bits of `shifted` are n: moved to the exponent's place, they scale by 2**n.
    return (Floats)((Words)p + ((Words)shifted << 23));
}

// How many floats a row of `length` takes once packed: whole groups.
constexpr int GROUP = 2 * LANES;
inline int packed_length(int length) { return (length + GROUP - 1) / GROUP * GROUP; }

// Order a row of input as its type's products want it.
template <class T>
inline void pack(const float *from, float *to, int count);

template <>
inline void pack<float>(const float *from, float *to, int count) {
    __builtin_memcpy(to, from, count * sizeof(float));
}

// Within each group the even elements come before the odd ones: of two neighbours in a word of memory, a shift makes one a
// float and a mask the other.
template <>
inline void pack<bf16>(const float *from, float *to, int count) {
    Ints even, odd;
    for (int lane = 0; lane < LANES; lane++) even[lane] = 2 * lane, odd[lane] = 2 * lane + 1;
    for (int i = 0; i < count; i += GROUP) {
        Floats low = load(from + i), high = {};
        if (i + LANES < count) high = load(from + i + LANES);
        store(to + i, __builtin_shuffle(low, high, even));
        store(to + i + LANES, __builtin_shuffle(low, high, odd));
    }
}

// The sums of four vectors: by value, since sums that have an address are kept in memory.
inline __m128 four_sums(Floats s0, Floats s1, Floats s2, Floats s3) {
#ifdef __AVX512F__
    auto half = [](Floats sums) {
        __m512 whole = (__m512)sums;
        return _mm256_add_ps(_mm512_castps512_ps256(whole), _mm512_extractf32x8_ps(whole, 1));
    };
#else
    auto half = [](Floats sums) { return (__m256)sums; };
#endif
    __m256 four = _mm256_hadd_ps(_mm256_hadd_ps(half(s0), half(s1)), _mm256_hadd_ps(half(s2), half(s3)));
    return _mm_add_ps(_mm256_castps256_ps128(four), _mm256_extractf128_ps(four, 1));
}

// Multiply four rows of a matrix with M rows of packed input, `length` elements each: out[m][r]. What lies `ahead` elements
// further is fetched meanwhile.
template <int M>
inline void tile(const bf16 *const *w, int64_t ahead, const float *x, int stride, int length, float (*out)[4]) {
    Floats sums[M][4] = {};
    auto pairs = [&](int r, int i, int count) {
        Words words = {};
        __builtin_memcpy(&words, w[r] + i, count * sizeof(bf16));
        return words;
    };
    auto add = [&](const Floats *rows, int i) {
        for (int m = 0; m < M; m++) {
            Floats input = load(x + m * stride + i);
            for (int r = 0; r < 4; r++) sums[m][r] = fused(rows[r], input, sums[m][r]);
        }
    };
    // One half after the other, and read twice: AVX2's registers hold the sums and one half.
    auto group = [&](int i, int count) {
        Floats half[4];
        for (int r = 0; r < 4; r++) {
            _mm_prefetch(w[r] + i + ahead, _MM_HINT_T0);
            half[r] = (Floats)(pairs(r, i, count) << 16);
        }
        add(half, i);
        for (int r = 0; r < 4; r++) half[r] = (Floats)(pairs(r, i, count) & 0xffff0000u);
        add(half, i + LANES);
    };
    int i = 0;
    for (; i + GROUP <= length; i += GROUP) group(i, GROUP);
    if (LANES == 16 && i < length) group(i, LANES);
    for (int m = 0; m < M; m++) _mm_storeu_ps(out[m], four_sums(sums[m][0], sums[m][1], sums[m][2], sums[m][3]));
}

template <int M>
inline void tile(const float *const *w, int64_t ahead, const float *x, int stride, int length, float (*out)[4]) {
    Floats sums[M][4] = {};
    for (int i = 0; i < length; i += LANES)
        for (int r = 0; r < 4; r++) {
            Floats row = load(w[r] + i);
            _mm_prefetch(w[r] + i + ahead, _MM_HINT_T0);
            for (int m = 0; m < M; m++) sums[m][r] = fused(row, load(x + m * stride + i), sums[m][r]);
        }
    for (int m = 0; m < M; m++) _mm_storeu_ps(out[m], four_sums(sums[m][0], sums[m][1], sums[m][2], sums[m][3]));
}

// As `tile`, for up to TILE_ROWS rows of input.
template <class T>
inline void tiles(int rows, const T *const *w, int64_t ahead, const float *x, int stride, int length, float (*out)[4]) {
    switch (rows) {
        case 1: return tile<1>(w, ahead, x, stride, length, out);
        case 2: return tile<2>(w, ahead, x, stride, length, out);
#ifdef __AVX512F__
        case 3: return tile<3>(w, ahead, x, stride, length, out);
        case 4: return tile<4>(w, ahead, x, stride, length, out);
#endif
    }
}

// out[r] += the sum over j of weights[r][j] * values[j], `from` <= j < `to`, for C vectors of the head's dimensions.
template <class T, int R, int C>
inline void weigh(const float *const *weights, const T *values, int stride, int from, int to, float *const *out) {
    Floats sums[R][C];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) sums[r][c] = load(out[r] + c * LANES);
    for (int j = from; j < to; j++) {
        Floats value[C];
        for (int c = 0; c < C; c++) value[c] = load(values + static_cast<int64_t>(j) * stride + c * LANES);
        for (int r = 0; r < R; r++) {
            Floats weight = splat(weights[r][j]);
            for (int c = 0; c < C; c++) sums[r][c] = fused(weight, value[c], sums[r][c]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) store(out[r] + c * LANES, sums[r][c]);
}

}  // namespace
