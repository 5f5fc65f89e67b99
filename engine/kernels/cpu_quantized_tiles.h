// The products of cpu_quantized_dot.h with the tile registers of cpu_tiles.h.
//
// A unit, 32 bits of a row's inputs, is what a lane is for both kinds of tile product: two bfloat16
// or four 8-bit numbers. So both share this code. The scales of groups are applied outside of the
// tile registers, and the way out of them is long: four groups are under way at once, one in each
// of four registers.
#pragma once

#include "cpu_quantized_dot.h"

#if HAS_TILES
namespace {

constexpr int64_t LINE = PAIR_OUTPUTS * 4;  // bytes of a unit's operands
constexpr int64_t CHUNK = 4;                // groups that are multiplied at once

// Registers 0 to 3 sum; 4 and 5 hold inputs, 6 and 7 operands.
inline TileConfig rows_config(int64_t rows, int64_t units) {
    TileConfig config;
    for (int i = 0; i < 6; i++) config.rows[i] = uint8_t(rows);
    config.bytes_per_row[4] = config.bytes_per_row[5] = uint16_t(units * 4);
    config.rows[6] = config.rows[7] = uint8_t(units);
    return config;
}

// Codes of 4 bits become bytes less their zero, since that costs nothing where they are unpacked;
// codes of 8 bits are multiplied as they are.
template <class U, int BITS>
struct TileProduct {
    static constexpr bool is_integer = U::INPUTS_EACH == 4, is_unpacked = !is_integer || BITS == 4;
    static constexpr bool is_corrected = is_integer && BITS == 4;
};
// The registers' numbers are part of the instructions' text.
#define TILE_MULTIPLY_ADD(SUMS, LEFT, RIGHT)                                         \
    do {                                                                             \
        if (!TileProduct<U, BITS>::is_integer) _tile_dpbf16ps(SUMS, LEFT, RIGHT);    \
        else if (BITS == 4) _tile_dpbssd(SUMS, LEFT, RIGHT);                         \
        else _tile_dpbsud(SUMS, LEFT, RIGHT);                                        \
    } while (0)

// Stores to memory that the tile instructions read must come first.
inline void finish_stores() { asm volatile("" ::: "memory"); }

// Pairs of blocks by all rows, with tiles of 16 rows, 16 outputs and up to 16 units.
template <class U, int BITS>
class TilePairs {
  public:
    using Product = TileProduct<U, BITS>;
    using Sum = typename U::Sum;

    TilePairs(const QuantizedCall& shared, const Inputs& in)
        : call_(shared), in_(in), layout_(shared), rows_(shared.linear.rows),
          units_(shared.group_size / U::INPUTS_EACH),
          step_(units_ % 16 == 0 ? 16 : units_ % 8 == 0 ? 8 : 4), group_bytes_(units_ * LINE) {
        size_t operands = Product::is_unpacked ? size_t(CHUNK * group_bytes_ / 4) : 0;
        size_t totals = size_t(rows_ * PAIR_OUTPUTS);
        float* memory = operand_scratch.floats(operands + totals);
        totals_ = reinterpret_cast<vf*>(memory);
        operands_ = reinterpret_cast<uint8_t*>(memory + totals);
    }

    void run(int64_t first, int64_t last) {
        int64_t rest = rows_ % TILE_ROWS, whole = rows_ - rest;
        const TileConfig whole_config = rows_config(TILE_ROWS, step_);
        const TileConfig rest_config = rows_config(rest ? rest : TILE_ROWS, step_);
        Tiles tiles(whole ? whole_config : rest_config);
        for (int64_t i = first; i < last; i++) {
            records_ = call_weight(call_) + i * call_.groups * layout_.size;
            index_ = i;
            for (int64_t r = 0; call_.groups > 1 && r < rows_ * PAIR; r++) totals_[r] = vf{};
            for (int64_t g = 0; g < call_.groups; g += CHUNK) {
                int64_t groups = call_.groups - g < CHUNK ? call_.groups - g : CHUNK;
                if (Product::is_unpacked) unpack(g, groups);
                if (whole && rest && (i > first || g)) _tile_loadconfig(&whole_config);
                for (int64_t row = 0; row < whole; row += TILE_ROWS) {
                    if (call_.groups == 1) {
                        bool is_double = row + 2 * TILE_ROWS <= whole;
                        is_double ? multiply_row<2>(row, TILE_ROWS) : multiply_row<1>(row, TILE_ROWS);
                        row += is_double ? TILE_ROWS : 0;
                        continue;
                    }
                    for (int b = 0; b < PAIR; b++)
                        groups == CHUNK ? multiply<TILE_ROWS, CHUNK>(row, TILE_ROWS, b, g, CHUNK)
                                        : multiply<TILE_ROWS, 0>(row, TILE_ROWS, b, g, groups);
                }
                if (!rest) continue;
                if (whole) _tile_loadconfig(&rest_config);
                if (call_.groups == 1) {
                    multiply_row<1>(whole, rest);
                    continue;
                }
                for (int b = 0; b < PAIR; b++) multiply<0, 0>(whole, rest, b, g, groups);
            }
            if (call_.groups == 1) continue;
            if (in_.token_scales)
                for (int64_t r = 0; r < rows_; r++)
                    for (int b = 0; b < PAIR; b++) totals_[r * PAIR + b] *= in_.token_scales[r];
            emit_rows(call_.linear, 0, rows_, i, reinterpret_cast<const float*>(totals_));
        }
    }

  private:
    const uint8_t* record(int64_t g) const { return records_ + g * layout_.size; }

    void unpack(int64_t first, int64_t groups) {
        for (int64_t i = 0; i < groups; i++) {
            const uint8_t* from = record(first + i);
            uint8_t* to = operands_ + i * group_bytes_;
            if (!Product::is_corrected) {
                unpack_group<U, BITS>(from + layout_.codes, call_.group_size, to);
                continue;
            }
            vi zeros[VECTORS];
            for (int v = 0; v < VECTORS; v++)
                zeros[v] = (call_.has_zeros ? load_zeros(layout_, from, v) : vi{} + 8) * 0x01010101;
            from += layout_.codes;
            for (int64_t u = 0; u < units_; u += 2, from += LINE)
                for (int v = 0; v < VECTORS; v++) {
                    vu codes = read<vu>(from + v * 64);
                    prefetch_page_ahead(from + v * 64);
                    for (int k = 0; k < 2; k++)
                        write(to + (u + k) * LINE + v * 64,
                              _mm512_sub_epi8((__m512i)U::template get<BITS>(codes, k),
                                              (__m512i)zeros[v]));
                }
        }
        finish_stores();
    }

    // Adds the products of `groups` groups from `first` on, for one block and up to 16 rows.
    template <int ROWS, int GROUPS>
    void multiply(int64_t row, int64_t rows, int b, int64_t first, int64_t groups) {
        if (GROUPS) groups = GROUPS;
        const float* x = in_.units + row * in_.stride + first * units_;
        const uint8_t* weight = Product::is_unpacked ? operands_ : record(first) + layout_.codes;
        int64_t weight_step = Product::is_unpacked ? group_bytes_ : layout_.size;
        bool is_first = !Product::is_unpacked && row == 0 && b == 0;
        weight += b * 64;
#define MULTIPLY(I, LEFT, RIGHT)                                                     \
    if (groups > I) {                                                                \
        const float* left = x + I * units_;                                          \
        const uint8_t* right = weight + I * weight_step;                             \
        _tile_zero(I);                                                               \
        for (int64_t u = 0; u < units_; u += step_) {                                \
            if (is_first)                                                            \
                for (int64_t line = 0; line < step_ * LINE; line += 64)              \
                    prefetch_page_ahead(right + u * LINE + line);                    \
            _tile_loadd(LEFT, left + u, in_.stride * 4);                             \
            _tile_loadd(RIGHT, right + u * LINE, LINE);                              \
            TILE_MULTIPLY_ADD(I, LEFT, RIGHT);                                       \
        }                                                                            \
    }
        MULTIPLY(0, 4, 6)
        MULTIPLY(1, 5, 7)
        MULTIPLY(2, 4, 6)
        MULTIPLY(3, 5, 7)
#undef MULTIPLY
        _tile_stored(0, sums_[0], 64);
        if (groups > 1) _tile_stored(1, sums_[1], 64);
        if (groups > 2) _tile_stored(2, sums_[2], 64);
        if (groups > 3) _tile_stored(3, sums_[3], 64);
        vf* totals = totals_ + row * PAIR + b;
        if constexpr (ROWS > 0) {
            vf total[ROWS];
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++) total[r] = totals[r * PAIR];
            for (int64_t i = 0; i < groups; i++) {
                const GroupOutputs outputs(call_, layout_, record(first + i), b);
                int64_t place = row * call_.groups + first + i;
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; r++)
                    total[r] = add(outputs, total[r], sums_[i][r], place + r * call_.groups);
            }
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++) totals[r * PAIR] = total[r];
        } else {
            for (int64_t i = 0; i < groups; i++) {
                const GroupOutputs outputs(call_, layout_, record(first + i), b);
                int64_t place = row * call_.groups + first + i;
                for (int64_t r = 0; r < rows; r++)
                    totals[r * PAIR] =
                        add(outputs, totals[r * PAIR], sums_[i][r], place + r * call_.groups);
            }
        }
    }

    // The products of one group, the whole row of the weight: N tiles of rows by both blocks.
    template <int N>
    void multiply_row(int64_t row, int64_t rows) {
        const float* x = in_.units + row * in_.stride;
        const float* x1 = x + TILE_ROWS * in_.stride;
        const uint8_t* weight = Product::is_unpacked ? operands_ : records_ + layout_.codes;
        bool is_first = !Product::is_unpacked && row == 0;
        _tile_zero(0);
        _tile_zero(1);
        if (N > 1) {
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int64_t u = 0; u < units_; u += step_) {
            const uint8_t* right = weight + u * LINE;
            if (is_first)
                for (int64_t line = 0; line < step_ * LINE; line += 64)
                    prefetch_page_ahead(right + line);
            _tile_loadd(4, x + u, in_.stride * 4);
            _tile_loadd(6, right, LINE);
            TILE_MULTIPLY_ADD(0, 4, 6);
            _tile_loadd(7, right + 64, LINE);
            TILE_MULTIPLY_ADD(1, 4, 7);
            if (N > 1) {
                _tile_loadd(5, x1 + u, in_.stride * 4);
                TILE_MULTIPLY_ADD(2, 5, 6);
                TILE_MULTIPLY_ADD(3, 5, 7);
            }
        }
        _tile_stored(0, sums_[0], 64);
        _tile_stored(1, sums_[1], 64);
        if (N > 1) {
            _tile_stored(2, sums_[2], 64);
            _tile_stored(3, sums_[3], 64);
        }
        alignas(64) vf outputs[2 * TILE_ROWS * PAIR];
        for (int b = 0; b < PAIR; b++) {
            const GroupOutputs group(call_, layout_, records_, b);
            for (int i = 0; i < N; i++)
                for (int64_t r = 0; r < rows; r++) {
                    int64_t place = i * TILE_ROWS + r;
                    vf v = add(group, vf{}, sums_[2 * i + b][r], row + place);
                    outputs[place * PAIR + b] =
                        in_.token_scales ? v * in_.token_scales[row + place] : v;
                }
        }
        emit_rows(call_.linear, row, (N - 1) * TILE_ROWS + rows, index_,
                  reinterpret_cast<const float*>(outputs));
    }

    vf add(const GroupOutputs& outputs, vf total, Sum sum, int64_t place) const {
        if constexpr (Product::is_corrected)
            return total + __builtin_convertvector(sum, vf) * outputs.scales;
        else
            return outputs.add_to(total, sum, in_.group_sums, place);
    }

    const QuantizedCall call_;  // copies that no store can change
    const Inputs in_;
    const RecordLayout layout_;
    const int64_t rows_, units_, step_, group_bytes_;
    const uint8_t* records_ = nullptr;
    int64_t index_ = 0;
    uint8_t* operands_;
    vf* totals_;
    alignas(64) Sum sums_[CHUNK][TILE_ROWS];
};

}  // namespace
#endif
