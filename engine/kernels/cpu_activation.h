// Activations of the MLP; reference.py's ACTIVATIONS, in the order of architecture.py's literal.
#pragma once

#include "cpu_vector.h"

enum Activation : int64_t { SILU, GELU, GELU_TANH, RELU };

template <int64_t ACTIVATION>
static inline vf activate(vf x) {
    if (ACTIVATION == SILU) return x * sigmoid(x);
    if (ACTIVATION == GELU) return 0.5f * x * (1.0f + erf(x * 0.70710678f));
    // 0.5 * (1 + tanh(u)) = sigmoid(2 u); u = sqrt(2 / pi) * (x + 0.044715 x^3)
    if (ACTIVATION == GELU_TANH) return x * sigmoid(1.59576912f * (x + 0.044715f * x * x * x));
    return x < 0.0f ? vf{} : x;
}

static inline vf activate(int64_t activation, vf x) {
    switch (activation) {
        case SILU: return activate<SILU>(x);
        case GELU: return activate<GELU>(x);
        case GELU_TANH: return activate<GELU_TANH>(x);
        default: return activate<RELU>(x);
    }
}
