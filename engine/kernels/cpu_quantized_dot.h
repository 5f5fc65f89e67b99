// y = x W^T for a quantized W: quant/linear.py's products on the records of cpu_codes.h.
//
// Codes are multiplied as they are, and a group's scale is applied to the group's sum, so a weight
// is never rounded again: with bfloat16 inputs each code less the middle is exact in bfloat16, with
// 8-bit inputs the sum is an exact integer. A zero z of its own changes a group's sum by z times
// the sum of the group's inputs, which is made once a row.
//
// Few rows decode in registers. For many rows a pair's codes are unpacked once into a thread's
// scratch memory and serve all rows from there. The order of every sum is the same in all of these,
// so that a row's result has the same bits in any batch.
#pragma once

#include "cpu_two_levels.h"

namespace {

// A group's products with vector v of a pair's outputs, less what the zeros bring.
struct GroupOutputs {
    vf scales;
    vi zeros;
    vf offsets;
    bool has_zeros;

    GroupOutputs(const QuantizedCall& call, const RecordLayout& layout, const uint8_t* record,
                 int v)
        : scales(load_scales(call, record, v)), zeros(vi{}), offsets(vf{}),
          has_zeros(call.has_zeros) {
        if (has_zeros) {
            zeros = load_zeros(layout, record, v);
            offsets = __builtin_convertvector(zeros - (1 << (call.bits - 1)), vf);
        }
    }
    // The row's inputs in this group are summed at group_sums[place].
    vf add_to(vf total, vf sum, const float* group_sums, int64_t place) const {
        if (has_zeros) sum -= offsets * group_sums[place];
        return total + sum * scales;
    }
    vf add_to(vf total, vi sum, const float* group_sums, int64_t place) const {
        vi inputs = vi{} + read<int32_t>(group_sums + place);
        sum -= has_zeros ? zeros * inputs : inputs;
        return total + __builtin_convertvector(sum, vf) * scales;
    }
};

template <class U, int BITS>
void unpack_group(const uint8_t* codes, int64_t group_size, uint8_t* to, bool prefetch) {
    constexpr int operands = U::template PER_LINE<BITS>;
    for (int64_t line = 0; line < group_size * BITS / 32; line++, codes += LINE)
        for (int v = 0; v < VECTORS; v++) {
            vu codes_of = read<vu>(codes + v * VECTOR_BYTES);
            if (prefetch) prefetch_page_ahead(codes + v * VECTOR_BYTES);
            for (int k = 0; k < operands; k++)
                write(to + (line * operands + k) * LINE + v * VECTOR_BYTES,
                      U::template get<BITS>(codes_of, k));
        }
}

// A pair of blocks as one thread sees it.
struct PairOfBlocks {
    const uint8_t* records;
    const uint8_t* unpacked;  // [packed inputs / INPUTS_EACH, 32] operands, or null
    int64_t index;
};

// Adds the products of M rows with group g, whose record this is, to their totals.
template <int M, class Sum>
void add_group(const QuantizedCall& call, const Inputs& in, const uint8_t* record, int64_t row,
               int64_t g, const Sum (&part)[M][VECTORS], vf (&total)[M][VECTORS]) {
    const RecordLayout layout(call);
    for (int v = 0; v < VECTORS; v++) {
        const GroupOutputs outputs(call, layout, record, v);
        for (int i = 0; i < M; i++)
            total[i][v] = outputs.add_to(total[i][v], part[i][v], in.group_sums,
                                         (row + i) * call.groups + g);
    }
}

template <int M>
void emit_totals(const QuantizedCall& call, const Inputs& in, int64_t pair, int64_t row,
                 const vf (&total)[M][VECTORS]) {
    constexpr int half = VECTORS / 2;
    for (int i = 0; i < M; i++) {
        float scale = in.token_scales ? in.token_scales[row + i] : 1.0f;
        for (int v = 0; v < half; v++)
            emit(call.linear, row + i, pair, total[i][v] * scale, total[i][v + half] * scale,
                 v * W);
    }
}

// M rows by a pair of blocks. BITS is 0 where the pair is unpacked.
template <class U, int BITS, int M>
void dot_rows(const QuantizedCall& call, const Inputs& in, const PairOfBlocks& pair, int64_t row,
              bool is_first) {
    constexpr int operands = U::template PER_LINE<BITS>;
    const RecordLayout layout(call);
    const int64_t lines = call.group_size / U::INPUTS_EACH / operands;
    const float* x = in.units + row * in.stride;
    const uint8_t* record = pair.records;
    const uint8_t* unpacked = pair.unpacked;
    vf total[M][VECTORS];
    for (int i = 0; i < M; i++)
        for (int v = 0; v < VECTORS; v++) total[i][v] = vf{};
    for (int64_t g = 0; g < call.groups; g++, record += layout.size) {
        const uint8_t* line = BITS ? record + layout.codes : unpacked;
        typename U::Sum part[M][VECTORS];
        for (int i = 0; i < M; i++)
            for (int v = 0; v < VECTORS; v++) part[i][v] = typename U::Sum{};
        for (int64_t l = 0; l < lines; l++, line += LINE) {
            vu codes[VECTORS];
            for (int v = 0; v < VECTORS; v++) {
                codes[v] = read<vu>(line + v * VECTOR_BYTES);
                if (is_first) prefetch_page_ahead(line + v * VECTOR_BYTES);
            }
#pragma GCC unroll 8
            for (int k = 0; k < operands; k++, x++) {
                vu weight[VECTORS];
                for (int v = 0; v < VECTORS; v++)
                    weight[v] = BITS ? U::template get<BITS ? BITS : 4>(codes[v], k) : codes[v];
                for (int i = 0; i < M; i++) {
                    vu left = (vu)spread(x + i * in.stride);
                    for (int v = 0; v < VECTORS; v++)
                        part[i][v] = U::multiply_add(part[i][v], left, weight[v]);
                }
            }
        }
        unpacked = line;
        add_group(call, in, record, row, g, part, total);
    }
    emit_totals(call, in, pair.index, row, total);
}

constexpr int MOST_ROWS = W == 16 ? 6 : W == 8 ? 2 : 1;

template <class U, int BITS, int M = MOST_ROWS>
void dot_some(const QuantizedCall& call, const Inputs& in, const PairOfBlocks& pair, int64_t row,
              int64_t rows, bool is_first) {
    if constexpr (M > 0) {
        if (rows < M) return dot_some<U, BITS, M - 1>(call, in, pair, row, rows, is_first);
        dot_rows<U, BITS, M>(call, in, pair, row, is_first);
    }
}

// This thread's memory for operands.
inline uint8_t* operand_memory(int64_t bytes) {
    return reinterpret_cast<uint8_t*>(operand_scratch.floats(size_t(bytes + 3) / 4));
}

template <class U, int BITS>
void dot_pairs(const QuantizedCall& call, const Inputs& in, int64_t first, int64_t last) {
    const RecordLayout layout(call);
    constexpr bool is_unpacked_as_it_is = U::INPUTS_EACH == 4 && BITS == 8;
    bool is_unpacked = call.linear.rows > 2 * MOST_ROWS && !is_unpacked_as_it_is;
    int64_t group_bytes = call.group_size / U::INPUTS_EACH * LINE;
    uint8_t* memory = is_unpacked ? operand_memory(call.groups * group_bytes) : nullptr;
    for (int64_t i = first; i < last; i++) {
        PairOfBlocks pair{records_of(call, layout, i), memory, i};
        for (int64_t g = 0; is_unpacked && g < call.groups; g++)
            unpack_group<U, BITS>(pair.records + g * layout.size + layout.codes, call.group_size,
                                  memory + g * group_bytes, true);
        for (int64_t row = 0; row < call.linear.rows; row += MOST_ROWS) {
            int64_t left = call.linear.rows - row, rows = left < MOST_ROWS ? left : MOST_ROWS;
            if (is_unpacked)
                dot_some<U, 0>(call, in, pair, row, rows, false);
            else
                dot_some<U, BITS>(call, in, pair, row, rows, row == 0);
        }
    }
}

#if HAS_TWO_LEVELS
// `whole` is the call whose one group is the whole row.
inline void dot_two_levels(const QuantizedCall& call, const QuantizedCall& whole, const Inputs& in,
                           int64_t first, int64_t last) {
    const RecordLayout layout(call);
    uint8_t* memory = operand_memory(packed_inputs(call) * PAIR_OUTPUTS);
    for (int64_t i = first; i < last; i++) {
        unpack_two_levels(call, layout, records_of(call, layout, i), memory);
        const float* scales = call.channel_scales + i * PAIR_OUTPUTS;
        PairOfBlocks pair{reinterpret_cast<const uint8_t*>(scales), memory, i};
        for (int64_t row = 0; row < call.linear.rows; row += MOST_ROWS) {
            int64_t left = call.linear.rows - row, rows = left < MOST_ROWS ? left : MOST_ROWS;
            dot_some<ByteOperands, 0>(whole, in, pair, row, rows, false);
        }
    }
}
#endif

}  // namespace
