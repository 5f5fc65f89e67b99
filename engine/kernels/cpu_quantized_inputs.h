// Inputs of a quantized linear layer as its products take them: in the order of the packed weight,
// rounded to 8 bits where the layer asks for that, and summed by groups for the zeros' sake.
#pragma once

#include <type_traits>

#include "cpu_codes.h"

namespace {

// The call's rows in the order of the packed inputs, as the lanes of `Operands`.
struct Inputs {
    const float* units;         // [rows, stride], 32 bits each
    int64_t stride;             // units of a row
    const float* group_sums;    // [rows, groups] float or int32 sums of inputs; null: not needed
    const float* token_scales;  // [rows]; null: none
};

// A row in the order of the packed inputs: the row itself, or a copy in `memory`.
inline const bf16* ordered_row(const QuantizedCall& call, const bf16* x, bf16* memory) {
    int64_t inputs = call.linear.inputs, packed = packed_inputs(call);
    if (call.columns) {
        for (int64_t c = 0; c < packed; c++)
            memory[c] = call.columns[c] < 0 ? bf16{} : x[call.columns[c]];
    } else if (packed == inputs) {
        return x;
    } else {
        std::memcpy(memory, x, size_t(inputs) * sizeof(bf16));
        std::memset(memory + inputs, 0, size_t(packed - inputs) * sizeof(bf16));
    }
    return memory;
}

// Largest absolute value of a row; NaN if it has any, since its bits are the largest.
inline float largest(const bf16* x, int64_t size) {
    vh most = {};
    for (int64_t c = 0; c < size; c += W) {
        vh bits = read<vh>(x + c) & 0x7fff;
        most = bits > most ? bits : most;
    }
    bf16 result = {};
    for (int i = 0; i < W; i++) result.bits = most[i] > result.bits ? most[i] : result.bits;
    return load1(&result);
}

// x / scale rounded to the nearest integer, ties to even; inverse is 1 / scale.
inline vi quotient(vf x, float scale, float inverse) {
#ifdef __FMA__
    // The remainder is exact in one instruction, and one correction by it rounds the quotient as
    // division does (Markstein 1990, theorem 8).
    vf near = x * inverse;
    vf exact = near + (x - near * scale) * inverse;
#else
    vf exact = x / scale;
#endif
#if VECTOR_BYTES == 64
    return (vi)_mm512_cvtps_epi32((__m512)exact);
#else
    constexpr float to_integer = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    return __builtin_convertvector((exact + to_integer) - to_integer, vi);
#endif
}

inline int32_t integer_sum(vi x) {
#if VECTOR_BYTES == 64
    return _mm512_reduce_add_epi32((__m512i)x);
#else
    int32_t total = 0;
    for (int i = 0; i < W; i++) total += x[i];
    return total;
#endif
}

// One row rounded to 8 bits (quantize_activations in quant/linear.py), in the order of operands of
// codes of BITS; returns its scale.
template <int BITS>
float quantize_row(const QuantizedCall& call, const bf16* x, int8_t* to, int32_t* group_sums) {
    float scale = largest(x, packed_inputs(call)) / 127.0f;
    if (scale < 1e-10f) scale = 1e-10f;
    float inverse = 1.0f / scale;
    for (int64_t g = 0; g < call.groups; g++) {
        vi total = {};
        for (int64_t c = 0; c < call.group_size; c += W, x += W, to += W) {
            vi codes = quotient(load(x), scale, inverse);
            total += codes;
#if VECTOR_BYTES == 64
            const __m128i order = BITS == 4
                ? _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15)
                : _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
            __m128i bytes = _mm512_cvtepi32_epi8((__m512i)codes);
            _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_shuffle_epi8(bytes, order));
#else
            constexpr int lane = 32 / BITS;  // inputs whose order changes
            for (int i = 0; i < W; i++) {
                int64_t k = (c + i) % lane;
                to[i - k + ByteOperands::place_of<BITS>(int(k))] = int8_t(codes[i]);
            }
#endif
        }
        group_sums[g] = integer_sum(total) * (call.has_zeros ? 1 : 1 << (call.bits - 1));
    }
    return scale;
}

inline thread_local Scratch input_scratch, row_scratch, operand_scratch;

template <class U, int BITS>
Inputs prepare(const QuantizedCall& call, int64_t threads) {
    int64_t rows = call.linear.rows, inputs = call.linear.inputs, packed = packed_inputs(call);
    int64_t stride = packed / U::INPUTS_EACH;
    const bf16* x = call.linear.x;
    bool is_ready = U::INPUTS_EACH == 2 && !call.columns && packed == inputs;
    if (is_ready && !call.has_zeros)
        return {reinterpret_cast<const float*>(x), stride, nullptr, nullptr};
    float* units = input_scratch.floats(size_t(rows * (stride + call.groups + 1)));
    float* group_sums = units + rows * stride;
    float* token_scales = group_sums + rows * call.groups;
    parallel_rows(rows, packed, threads, [=, &call](int64_t r) {
        float* to = units + r * stride;
        float* sums = group_sums + r * call.groups;
        bf16* memory = reinterpret_cast<bf16*>(row_scratch.floats(size_t(packed + 1) / 2));
        const bf16* row = ordered_row(call, x + r * inputs, memory);
        if constexpr (U::INPUTS_EACH == 4) {
            token_scales[r] = quantize_row<BITS>(call, row, reinterpret_cast<int8_t*>(to),
                                                 reinterpret_cast<int32_t*>(sums));
            return;
        }
        for (int64_t g = 0; g < call.groups; g++) {
            vf total = {};
            for (int64_t c = g * call.group_size; c < (g + 1) * call.group_size; c += W) {
                vf v = load(row + c);
                total += v;
                if (U::INPUTS_EACH == 1) store(to + c, v);
                else if (!is_ready) store(reinterpret_cast<bf16*>(to) + c, v);
            }
            sums[g] = sum(total);
        }
    });
    return {is_ready ? reinterpret_cast<const float*>(x) : units, stride, group_sums,
            U::INPUTS_EACH == 4 ? token_scales : nullptr};
}

}  // namespace
