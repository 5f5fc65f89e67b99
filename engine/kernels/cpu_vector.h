// Vectors of W floats in GCC/Clang vector extensions: one source for AVX-512, AVX2, NEON and SSE.
//
// bfloat16 is handled as its bits: it is the upper half of a float32, so widening is a shift and
// narrowing an addition that rounds to nearest, ties to even.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define VECTOR_BYTES 64
#elif defined(__AVX2__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif
// Two bfloat16 products added to a float32 in each lane, as one instruction.
#if VECTOR_BYTES == 64 && defined(__AVX512BF16__)
#define HAS_BF16_DOT 1
#else
#define HAS_BF16_DOT 0
#endif

#ifdef __SSE2__
#include <immintrin.h>
#endif

constexpr int W = VECTOR_BYTES / 4;  // lanes

typedef float vf __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t vi __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t vu __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t vh __attribute__((vector_size(VECTOR_BYTES / 2)));

struct bf16 {
    uint16_t bits;
};

template <class V, class P>
static inline V read(const P* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

template <class V, class P>
static inline void write(P* p, V v) {
    std::memcpy(p, &v, sizeof v);
}

static inline vf splat(float x) { return vf{} + x; }

// The 32 bits at p in each lane.
static inline vf spread(const float* p) { return (vf)(vu{} + read<uint32_t>(p)); }

static inline vf load(const float* p) { return read<vf>(p); }
static inline vf load(const bf16* p) {
#if VECTOR_BYTES == 64  // GCC 12 splits the conversion
    return (vf)((vu)_mm512_cvtepu16_epi32((__m256i)read<vh>(p)) << 16);
#else
    return (vf)(__builtin_convertvector(read<vh>(p), vu) << 16);
#endif
}

static inline float load1(const float* p) { return *p; }
static inline float load1(const bf16* p) {
    uint32_t bits = uint32_t(p->bits) << 16;
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

static inline vh round_to_bf16(vf x) {
#if HAS_BF16_DOT
    return (vh)_mm512_cvtneps_pbh((__m512)x);
#else
    vu bits = (vu)x;
    vu rounded = (bits + (0x7fffu + ((bits >> 16) & 1u))) >> 16;
    vu quiet_nan = (bits >> 16) | 0x40u;
    return __builtin_convertvector((vu)((x == x) ? rounded : quiet_nan), vh);
#endif
}

static inline void store(float* p, vf x) { write(p, x); }
static inline void store(bf16* p, vf x) { write(p, round_to_bf16(x)); }

static inline void store1(float* p, float x) { *p = x; }
static inline void store1(bf16* p, float x) {
    vh rounded = round_to_bf16(splat(x));
    p->bits = rounded[0];
}

// The n < W elements at p, zeros behind them.
template <class T>
static inline vf load_part(const T* p, int64_t n) {
    float lanes[W] = {};
    for (int64_t i = 0; i < n; i++) lanes[i] = load1(p + i);
    return load(lanes);
}

template <class T>
static inline void store_part(T* p, vf x, int64_t n) {
    float lanes[W];
    store(lanes, x);
    for (int64_t i = 0; i < n; i++) store1(p + i, lanes[i]);
}

static inline vf maximum(vf a, vf b) { return a > b ? a : b; }

// Lane i of the result is lane i ^ S of x.
template <int S, size_t... I>
static inline vf swap_lanes(vf x, std::index_sequence<I...>) {
#if defined(__clang__) || __GNUC__ >= 12
    return __builtin_shufflevector(x, x, (I ^ S)...);
#else
    return __builtin_shuffle(x, vi{(I ^ S)...});
#endif
}

template <int S = W / 2>
static inline float sum(vf x) {
    x += swap_lanes<S>(x, std::make_index_sequence<W>());
    if constexpr (S > 1)
        return sum<S / 2>(x);
    else
        return x[0];
}

template <int S = W / 2>
static inline float maximum(vf x) {
    x = maximum(swap_lanes<S>(x, std::make_index_sequence<W>()), x);
    if constexpr (S > 1)
        return maximum<S / 2>(x);
    else
        return x[0];
}

// exp(x) to 2 units in the last place (Cephes expf: Cody-Waite reduction by ln 2, a polynomial of
// degree 5 on [-ln 2 / 2, ln 2 / 2]). Results below the smallest normal number are 0; arguments
// above 88 give exp(88).
static inline vf exp(vf x) {
    vf bounded = x > 88.0f ? splat(88.0f) : x;
    bounded = bounded < -87.0f ? splat(-87.0f) : bounded;
    constexpr float to_integer = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    vf n = (bounded * 1.44269504f + to_integer) - to_integer;
    vf r = bounded - n * 0.693359375f - n * -2.12194440e-4f;
    vf p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    vf result = (vf)((vi)p + (__builtin_convertvector(n, vi) << 23));
    return x < -87.0f ? vf{} : result;
}

// 2^x for x <= 0 to 1 unit in the last place: 1 + r P(r) on [-1/2, 1/2], P of degree 5 through
// (2^r - 1) / r at Chebyshev nodes. Results below the smallest normal number are 0.
static inline vf exp2_of_negative(vf x) {
#if VECTOR_BYTES == 64
    vf n = (vf)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    constexpr float to_integer = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    x = x < -127.0f ? splat(-127.0f) : x;
    vf n = (x + to_integer) - to_integer;
#endif
    vf r = x - n;
    vf p = splat(1.545316295e-4f);
    p = p * r + 1.339086336e-3f;
    p = p * r + 9.618082557e-3f;
    p = p * r + 5.550357114e-2f;
    p = p * r + 2.402265076e-1f;
    p = p * r + 6.931471880e-1f;
    p = p * r + 1.0f;
#if VECTOR_BYTES == 64
    __mmask16 is_normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    return (vf)_mm512_maskz_scalef_ps(is_normal, (__m512)p, (__m512)n);
#else
    vf result = (vf)((vi)p + (__builtin_convertvector(n, vi) << 23));
    return x < -126.0f ? vf{} : result;
#endif
}

static inline vf sigmoid(vf x) { return 1.0f / (1.0f + exp(-x)); }

// Absolute error below 2e-7.
static inline vf tanh(vf x) { return 1.0f - 2.0f / (1.0f + exp(2.0f * x)); }

// erf(x), absolute error below 1e-7: x (1 + P(x^2)) up to 1, and 1 - exp(-Q(|x|)) beyond, up to 4,
// where it is 1 in float32. P and Q interpolate at Chebyshev nodes.
static inline vf erf(vf x) {
    vf size = x < 0.0f ? -x : x;
    vf square = size * size;
    vf p = splat(7.882497109e-5f);
    p = p * square - 8.018854992e-4f;
    p = p * square + 5.189311943e-3f;
    p = p * square - 2.685432880e-2f;
    p = p * square + 1.128359746e-1f;
    p = p * square - 3.761262690e-1f;
    p = p * square + 1.283791659e-1f;
    vf bounded = size > 4.0f ? splat(4.0f) : size;
    vf q = splat(-1.614061601e-6f);
    q = q * bounded + 4.559062240e-5f;
    q = q * bounded - 5.927695375e-4f;
    q = q * bounded + 4.740222340e-3f;
    q = q * bounded - 2.636471736e-2f;
    q = q * bounded + 1.099782451e-1f;
    q = q * bounded + 6.319370937e-1f;
    q = q * bounded + 1.130166676f;
    q = q * bounded - 3.032129692e-4f;
    vf far = 1.0f - exp(-q);
    far = x < 0.0f ? -far : far;
    return size < 1.0f ? p * x + x : far;
}
