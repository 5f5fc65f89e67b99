// Few rows of the products of cpu_quantized_tiles.h, without tiles and with the same bits.
//
// A tile product multiplies as many rows in the same time as one, and its operands have to be
// unpacked into memory first, so it is wasted on one row. But a row must have the same bits in any
// batch, so what stands here adds in the tile unit's own order (Intel SDM vol. 2, TDPBF16PS): the
// products of even and of odd inputs are summed apart, each by a fused multiply-add in float32,
// and their sum is added to the register after every line of 16 pairs. Subnormal numbers count as
// zero there, and by `FlushedSubnormals` here.
#pragma once

#include "cpu_quantized_dot.h"

#if HAS_TILES
namespace {

// Subnormal inputs and results are zero in this thread as long as this lives.
class FlushedSubnormals {
  public:
    FlushedSubnormals() : theirs_(_mm_getcsr()) { _mm_setcsr(theirs_ | 0x8040); }
    ~FlushedSubnormals() { _mm_setcsr(theirs_); }
    FlushedSubnormals(const FlushedSubnormals&) = delete;
    FlushedSubnormals& operator=(const FlushedSubnormals&) = delete;

  private:
    unsigned theirs_;
};

// Pairs of inputs in a line of the tiles that share a group.
inline int64_t tile_step(int64_t units) { return units % 16 == 0 ? 16 : units % 8 == 0 ? 8 : 4; }

// The call's M rows by a pair of blocks.
template <int BITS, int M>
void tile_order_rows(const QuantizedCall& call, const Inputs& in, int64_t pair) {
    constexpr int codes_each = FloatOperands::PER_LINE<BITS>;
    const RecordLayout layout(call);
    const int64_t step = tile_step(call.group_size / 2) * 2;
    const float* x = in.units;
    const uint8_t* record = records_of(call, layout, pair);
    vf total[M][VECTORS] = {};
    for (int64_t g = 0; g < call.groups; g++, record += layout.size) {
        const uint8_t* line = record + layout.codes;
        vf part[M][VECTORS] = {};
        for (int64_t c = 0; c < call.group_size; c += step) {
            vf even[M][VECTORS] = {}, odd[M][VECTORS] = {};
            for (int64_t k = 0; k < step; k += codes_each, line += LINE, x += codes_each) {
                vu codes[VECTORS];
                for (int v = 0; v < VECTORS; v++) {
                    codes[v] = read<vu>(line + v * VECTOR_BYTES);
                    prefetch_page_ahead(line + v * VECTOR_BYTES);
                }
#pragma GCC unroll 8
                for (int j = 0; j < codes_each; j += 2)
                    for (int v = 0; v < VECTORS; v++) {
                        vu left = FloatOperands::get<BITS>(codes[v], j);
                        vu right = FloatOperands::get<BITS>(codes[v], j + 1);
                        for (int i = 0; i < M; i++) {
                            const float* at = x + i * in.stride + j;
                            even[i][v] =
                                FloatOperands::multiply_add(even[i][v], (vu)spread(at), left);
                            odd[i][v] =
                                FloatOperands::multiply_add(odd[i][v], (vu)spread(at + 1), right);
                        }
                    }
            }
            for (int i = 0; i < M; i++)
                for (int v = 0; v < VECTORS; v++) part[i][v] += even[i][v] + odd[i][v];
        }
        add_group(call, in, record, 0, g, part, total);
    }
    emit_totals(call, in, pair, 0, total);
}

// Up to this many rows are faster than with tiles (measured). Codes of 8 bits take tiles longer,
// since those unpack them to pairs in more steps.
template <int BITS>
constexpr int FEW_ROWS = BITS == 4 ? 2 : 4;

template <int BITS, int M = FEW_ROWS<BITS>>
void tile_order_pair(const QuantizedCall& call, const Inputs& in, int64_t pair) {
    if constexpr (M > 0) {
        if (call.linear.rows < M) return tile_order_pair<BITS, M - 1>(call, in, pair);
        tile_order_rows<BITS, M>(call, in, pair);
    }
}

}  // namespace
#endif
