// Fused CPU kernels for what a decoder does between its matrix multiplications.
//
// reference.py says what each function computes; cpu_ops.py checks the arguments and calls these
// through ctypes. Each exists for float32 and bfloat16, computes in float32 and rounds once.
// Tensors are contiguous and row-major; `threads` bounds the threads a call may use.

#include <cmath>

#include "cpu_activation.h"
#include "cpu_attention.h"
#include "cpu_linear.h"
#include "cpu_parallel.h"
#include "cpu_vector.h"

namespace {

// f(i, width) for whole vectors of a row, then for what remains, width < W.
template <class F>
inline void for_vectors(int64_t size, const F& f) {
    int64_t i = 0;
    for (; i + W <= size; i += W) f(i, int64_t(W));
    if (i < size) f(i, size - i);
}

template <class T>
inline vf load_width(const T* p, int64_t width) {
    return width == W ? load(p) : load_part(p, width);
}

template <class T>
inline void store_width(T* p, vf x, int64_t width) {
    if (width == W)
        store(p, x);
    else
        store_part(p, x, width);
}

template <class T>
float sum_of_squares(const T* x, int64_t size) {
    vf total[4] = {};
    int64_t i = 0;
    for (; i + 4 * W <= size; i += 4 * W)
        for (int j = 0; j < 4; j++) {
            vf v = load(x + i + j * W);
            total[j] += v * v;
        }
    for_vectors(size - i, [&](int64_t k, int64_t width) {
        vf v = load_width(x + i + k, width);
        total[0] += v * v;
    });
    return sum((total[0] + total[1]) + (total[2] + total[3]));
}

template <class T>
float norm_scale(const T* x, int64_t size, float eps) {
    return 1.0f / std::sqrt(sum_of_squares(x, size) / float(size) + eps);
}

template <class T>
void rms_norm(T* out, const T* x, const float* weight, int64_t rows, int64_t size, float eps,
              int64_t threads) {
    parallel_rows(rows, size, threads, [=](int64_t row) {
        const T* in = x + row * size;
        vf scale = splat(norm_scale(in, size, eps));
        for_vectors(size, [&](int64_t i, int64_t width) {
            vf v = load_width(in + i, width) * scale * load_width(weight + i, width);
            store_width(out + row * size + i, v, width);
        });
    });
}

// Mean first, then the squares around it: no cancellation where the mean is large.
template <class T>
void layer_norm(T* out, const T* x, const float* weight, const float* bias, int64_t rows,
                int64_t size, float eps, int64_t threads) {
    parallel_rows(rows, size, threads, [=](int64_t row) {
        const T* in = x + row * size;
        vf total = {};
        for_vectors(size, [&](int64_t i, int64_t width) { total += load_width(in + i, width); });
        float mean = sum(total) / float(size);
        vf squares = {};
        int64_t whole = size / W * W;
        for (int64_t i = 0; i < whole; i += W) {
            vf v = load(in + i) - mean;
            squares += v * v;
        }
        float variance = sum(squares);
        for (int64_t i = whole; i < size; i++) {
            float v = load1(in + i) - mean;
            variance += v * v;
        }
        float scale = 1.0f / std::sqrt(variance / float(size) + eps);
        for_vectors(size, [&](int64_t i, int64_t width) {
            vf v = (load_width(in + i, width) - mean) * scale;
            if (weight) v *= load_width(weight + i, width);
            if (bias) v += load_width(bias + i, width);
            store_width(out + row * size + i, v, width);
        });
    });
}

template <int64_t ACTIVATION, class T>
void act(T* out, const T* x, int64_t rows, int64_t size, bool gated, int64_t threads) {
    parallel_rows(rows, 4 * size, threads, [=](int64_t row) {  // exp costs about 4 plain passes
        const T* gate = x + row * size * (gated ? 2 : 1);
        for_vectors(size, [&](int64_t i, int64_t width) {
            vf v = activate<ACTIVATION>(load_width(gate + i, width));
            if (gated) v *= load_width(gate + size + i, width);
            store_width(out + row * size + i, v, width);
        });
    });
}

template <class T>
void act(T* out, const T* x, int64_t rows, int64_t size, int64_t activation, bool gated,
         int64_t threads) {
    switch (activation) {
        case SILU: return act<SILU>(out, x, rows, size, gated, threads);
        case GELU: return act<GELU>(out, x, rows, size, gated, threads);
        case GELU_TANH: return act<GELU_TANH>(out, x, rows, size, gated, threads);
        default: return act<RELU>(out, x, rows, size, gated, threads);
    }
}

struct RopeShape {
    int64_t tokens, num_heads, num_kv_heads, head_dim, rotary_dim;
    int64_t norm_together;  // the norms are over all query, or all key, heads of a token
    float eps;
};

// Norm and rotate one head in place. It is kept in float32 between the two.
template <class T>
void turn_head(T* x, const float* weight, float scale, const float* cos, const float* sin,
               int64_t head_dim, int64_t half) {
    float head[MAX_HEAD_DIM];
    for_vectors(head_dim, [&](int64_t i, int64_t width) {
        vf v = load_width(x + i, width);
        if (weight) v = v * scale * load_width(weight + i, width);
        store_width(head + i, v, width);
    });
    for_vectors(half, [&](int64_t i, int64_t width) {
        vf a = load_width(head + i, width), b = load_width(head + half + i, width);
        vf c = load_width(cos + i, width), s = load_width(sin + i, width);
        store_width(head + i, a * c - b * s, width);
        store_width(head + half + i, b * c + a * s, width);
    });
    for_vectors(head_dim, [&](int64_t i, int64_t width) {
        store_width(x + i, load_width(head + i, width), width);
    });
}

template <class T>
void turn_heads(T* x, int64_t heads, const float* weight, const float* cos, const float* sin,
                const RopeShape& shape) {
    if (!weight && !cos) return;
    int64_t D = shape.head_dim;
    bool together = shape.norm_together;
    float scale = weight && together ? norm_scale(x, heads * D, shape.eps) : 0.0f;
    for (int64_t i = 0; i < heads; i++) {
        if (weight && !together) scale = norm_scale(x + i * D, D, shape.eps);
        turn_head(x + i * D, weight && together ? weight + i * D : weight, scale, cos, sin, D,
                  cos ? shape.rotary_dim / 2 : 0);
    }
}

template <class T>
void rope_and_store(const RopeShape& shape, T* qkv, const float* cos, const float* sin,
                    const int64_t* slots, T* cache, const float* q_weight, const float* k_weight,
                    int64_t threads) {
    int64_t N = shape.num_heads, M = shape.num_kv_heads, D = shape.head_dim;
    int64_t half = shape.rotary_dim / 2, row_size = (N + 2 * M) * D;
    parallel_rows(shape.tokens, row_size, threads, [=, &shape](int64_t token) {
        T* q = qkv + token * row_size;
        T* k = q + N * D;
        const float* c = cos ? cos + token * half : nullptr;
        const float* s = cos ? sin + token * half : nullptr;
        turn_heads(q, N, q_weight, c, s, shape);
        turn_heads(k, M, k_weight, c, s, shape);
        if (slots[token] >= 0) Cache<T>{cache, M, D}.write(slots[token], k, k + M * D);
    });
}

}  // namespace

#define FOR_BOTH_TYPES(DEFINE) DEFINE(float32, float) DEFINE(bfloat16, bf16)

#define DEFINE(NAME, T)                                                                           \
    void rms_norm_##NAME(T* out, const T* x, const float* weight, int64_t rows, int64_t size,     \
                         float eps, int64_t threads) {                                            \
        rms_norm(out, x, weight, rows, size, eps, threads);                                       \
    }                                                                                             \
    void layer_norm_##NAME(T* out, const T* x, const float* weight, const float* bias,            \
                           int64_t rows, int64_t size, float eps, int64_t threads) {              \
        layer_norm(out, x, weight, bias, rows, size, eps, threads);                               \
    }                                                                                             \
    void act_##NAME(T* out, const T* x, int64_t rows, int64_t size, int64_t activation,           \
                    int64_t gated, int64_t threads) {                                             \
        act(out, x, rows, size, activation, gated != 0, threads);                                 \
    }                                                                                             \
    void rope_and_store_##NAME(const RopeShape* shape, T* qkv, const float* cos,                  \
                               const float* sin, const int64_t* slots, T* cache,                  \
                               const float* q_weight, const float* k_weight, int64_t threads) {   \
        rope_and_store(*shape, qkv, cos, sin, slots, cache, q_weight, k_weight, threads);         \
    }                                                                                             \
    void attention_##NAME(const AttentionBatch* batch, const AttentionShape* shape, T* out,       \
                          const T* q, T* cache, int64_t threads) {                                \
        attention(*batch, *shape, out, q, cache, threads);                                        \
    }

#pragma GCC visibility push(default)
extern "C" {
void set_parallel_entry(ParallelEntry entry) { parallel_entry = entry; }
FOR_BOTH_TYPES(DEFINE)

int64_t multiplies_bfloat16() { return HAS_BF16_DOT; }
#if HAS_BF16_DOT
void pack_weight_bfloat16(bf16* to, const bf16* weight, int64_t outputs, int64_t inputs,
                          int64_t gated, int64_t threads) {
    pack_weight(to, weight, outputs, inputs, gated, threads);
}
void linear_bfloat16(const LinearCall* call, int64_t threads) { linear(*call, threads); }
#endif
}
#pragma GCC visibility pop
