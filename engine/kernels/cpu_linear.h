// Linear layers of a few rows, straight out of the weights that oneDNN has packed.
//
// For one row a linear layer is a walk through its weight at memory speed. oneDNN spends tens of
// microseconds a call before and after that walk, as long as the walk itself for a small model.
// Its packed bfloat16 weights [N, C] are blocks of `block` outputs: [N / block][C / 2][block][2],
// pairs of neighbouring inputs side by side, which is what one instruction multiplies. So a block
// is read in order, once for all rows, and no second copy of the weights is needed.
//
// A row's result does not depend on how many rows there are.
#pragma once

#include "cpu_parallel.h"
#include "cpu_vector.h"

struct LinearShape {
    int64_t rows, outputs, inputs, block;
};

#if HAS_BF16_DOT

namespace {

constexpr int64_t PREFETCH = 1024;  // elements ahead: 2 KiB, half a page

// out[r, 0 … 16 V) of all R rows for one block of 16 V outputs.
template <int R, int V>
inline void linear_block(bf16* out, const bf16* x, const bf16* weight, const bf16* bias,
                         const bf16* residual, int64_t outputs, int64_t inputs) {
    vf total[R][V] = {};
    for (int64_t c = 0; c < inputs; c += 2) {
        vf w[V];
        for (int v = 0; v < V; v++) {
            w[v] = read<vf>(weight + v * 32);
            __builtin_prefetch(weight + v * 32 + PREFETCH);
        }
        for (int r = 0; r < R; r++) {
            vf pair = (vf)(vu{} + read<uint32_t>(x + r * inputs + c));
            for (int v = 0; v < V; v++)
                total[r][v] = (vf)_mm512_dpbf16_ps((__m512)total[r][v], (__m512bh)w[v],
                                                   (__m512bh)pair);
        }
        weight += 32 * V;
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) {
            vf y = total[r][v];
            if (bias) y += load(bias + v * 16);
            if (residual) y += load(residual + r * outputs + v * 16);
            store(out + r * outputs + v * 16, y);
        }
}

template <int R, int V>
void linear_rows(bf16* out, const bf16* x, const bf16* weight, const bf16* bias,
                 const bf16* residual, const LinearShape& shape, int64_t threads) {
    constexpr int64_t block = 16 * V;
    const int64_t blocks = shape.outputs / block;
    if (threads > blocks) threads = blocks;
    parallel_for(threads, threads, [&](int64_t part) {
        for (int64_t b = blocks * part / threads; b < blocks * (part + 1) / threads; b++)
            linear_block<R, V>(out + b * block, x, weight + b * block * shape.inputs,
                               bias ? bias + b * block : nullptr,
                               residual ? residual + b * block : nullptr, shape.outputs,
                               shape.inputs);
    });
}

template <int V>
void linear_width(bf16* out, const bf16* x, const bf16* weight, const bf16* bias,
                  const bf16* residual, const LinearShape& shape, int64_t threads) {
    switch (shape.rows) {
#define ROWS(R) \
    case R: return linear_rows<R, V>(out, x, weight, bias, residual, shape, threads);
        ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) ROWS(7) ROWS(8)
#undef ROWS
    }
}

}  // namespace

#endif

// 1 where the processor has the instruction, else 0 and nothing is done. Up to 8 rows.
inline int64_t few_rows_linear(bf16* out, const bf16* x, const bf16* weight, const bf16* bias,
                               const bf16* residual, const LinearShape& shape, int64_t threads) {
#if HAS_BF16_DOT
    switch (shape.block) {
        case 16: linear_width<1>(out, x, weight, bias, residual, shape, threads); return 1;
        case 32: linear_width<2>(out, x, weight, bias, residual, shape, threads); return 1;
        case 48: linear_width<3>(out, x, weight, bias, residual, shape, threads); return 1;
        case 64: linear_width<4>(out, x, weight, bias, residual, shape, threads); return 1;
    }
#endif
    return 0;
}
