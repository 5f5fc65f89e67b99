// The products of cpu_quantized_dot.h with the tile registers of cpu_tiles.h.
//
// A unit, 32 bits of a row's inputs, is what a lane is for both kinds of tile product: two bfloat16
// or four 8-bit numbers. So both share this code. The scales of groups are applied outside of the
// tile registers, and the way out of them is long: four groups are under way at once, one in each
// of four registers.
#pragma once

#include "cpu_tile_order.h"

#if HAS_TILES
namespace {

constexpr int64_t CHUNK = 4;  // groups that are multiplied at once

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

    // With two levels of scales `shared` is the call whose one group is the whole row, and
    // `two_levels` the other.
    TilePairs(const QuantizedCall& shared, const Inputs& in,
              const QuantizedCall* two_levels = nullptr)
        : call_(shared), in_(in), layout_(shared), two_levels_(two_levels),
          rows_(shared.linear.rows), rest_(rows_ % TILE_ROWS), whole_(rows_ - rest_),
          units_(shared.group_size / U::INPUTS_EACH),
          step_(tile_step(units_)), group_bytes_(units_ * LINE),
          whole_config_(rows_config(TILE_ROWS, step_)),
          rest_config_(rows_config(rest_ ? rest_ : TILE_ROWS, step_)) {
        int64_t chunks = (call_.groups + CHUNK - 1) / CHUNK;
        chunk_ = (call_.groups + chunks - 1) / chunks;
        int64_t totals = call_.groups > 1 ? rows_ * LINE : 0;
        bool is_unpacked = Product::is_unpacked || two_levels;
        uint8_t* memory = operand_memory(totals + (is_unpacked ? chunk_ * group_bytes_ : 0));
        totals_ = reinterpret_cast<vf*>(memory);
        operands_ = is_unpacked ? memory + totals : nullptr;
    }

    void run(int64_t first, int64_t last) {
        Tiles tiles(whole_ ? whole_config_ : rest_config_);
        for (index_ = first; index_ < last; index_++) {
            if (call_.groups == 1)
                multiply_row();
            else
                multiply_groups();
            if (whole_ && rest_) _tile_loadconfig(&whole_config_);
        }
    }

  private:
    // A weight whose one group is the whole row: two tiles of rows by both blocks at once.
    void multiply_row() {
        if (two_levels_) {
            unpack_wide();
        } else {
            records_ = records_of(call_, layout_, index_);
            if (Product::is_unpacked) unpack(0, 1);
            read_ahead(1, (whole_ + TILE_ROWS) / (2 * TILE_ROWS) + (rest_ > 0));
        }
        int64_t row = 0;
        for (; row + 2 * TILE_ROWS <= whole_; row += 2 * TILE_ROWS)
            multiply_blocks<2>(row, TILE_ROWS);
        if (row < whole_) multiply_blocks<1>(row, TILE_ROWS);
        if (!rest_) return;
        if (whole_) _tile_loadconfig(&rest_config_);
        multiply_blocks<1>(whole_, rest_);
    }

    void multiply_groups() {
        records_ = records_of(call_, layout_, index_);
        for (int64_t r = 0; r < rows_ * PAIR; r++) totals_[r] = vf{};
        for (int64_t g = 0, groups; g < call_.groups; g += groups) {
            groups = call_.groups - g < chunk_ ? call_.groups - g : chunk_;
            if (Product::is_unpacked) unpack(g, groups);
            read_ahead(g + groups, PAIR * (whole_ / TILE_ROWS + (rest_ > 0)));
            if (whole_ && rest_ && g) _tile_loadconfig(&whole_config_);
            for (int64_t row = 0; row < whole_; row += TILE_ROWS)
                for (int b = 0; b < PAIR; b++) multiply<TILE_ROWS>(row, TILE_ROWS, b, g, groups);
            if (!rest_) continue;
            if (whole_) _tile_loadconfig(&rest_config_);
            for (int b = 0; b < PAIR; b++) multiply<0>(whole_, rest_, b, g, groups);
        }
        if (in_.token_scales)
            for (int64_t r = 0; r < rows_; r++)
                for (int b = 0; b < PAIR; b++) totals_[r * PAIR + b] *= in_.token_scales[r];
        emit_rows(call_.linear, 0, rows_, index_, reinterpret_cast<const float*>(totals_));
    }

    const uint8_t* record(int64_t g) const { return records_ + g * layout_.size; }

    void unpack_wide() {
#if HAS_TWO_LEVELS
        const RecordLayout layout(*two_levels_);
        unpack_two_levels(*two_levels_, layout, records_of(*two_levels_, layout, index_),
                          operands_);
        finish_stores();
#endif
        records_ = reinterpret_cast<const uint8_t*>(two_levels_->channel_scales +
                                                    index_ * PAIR_OUTPUTS);
    }

    // Lets the products of this chunk, `passes` over its tiles, ask for the records from group
    // `first` on, as many as a chunk has: memory is read while the tile unit multiplies.
    void read_ahead(int64_t first, int64_t passes) {
        int64_t bytes = chunk_ * layout_.size, steps = passes * chunk_ * (units_ / step_);
        ahead_ = record(first);
        ahead_end_ = ahead_ + bytes;
        ahead_step_ = round_up(bytes / steps + 1, 64);
    }

    void prefetch_ahead() {
        const uint8_t* end = ahead_ + ahead_step_ < ahead_end_ ? ahead_ + ahead_step_ : ahead_end_;
        for (; ahead_ < end; ahead_ += 64) __builtin_prefetch(ahead_, 0, 2);
    }

    void unpack(int64_t first, int64_t groups) {
        for (int64_t i = 0; i < groups; i++) {
            const uint8_t* from = record(first + i);
            uint8_t* to = operands_ + i * group_bytes_;
            if (!Product::is_corrected) {
                unpack_group<U, BITS>(from + layout_.codes, call_.group_size, to, false);
                continue;
            }
            vi zeros[VECTORS];
            for (int v = 0; v < VECTORS; v++)
                zeros[v] = (call_.has_zeros ? load_zeros(layout_, from, v) : vi{} + 8) * 0x01010101;
            from += layout_.codes;
            for (int64_t u = 0; u < units_; u += 2, from += LINE)
                for (int v = 0; v < VECTORS; v++) {
                    vu codes = read<vu>(from + v * 64);
                    for (int k = 0; k < 2; k++)
                        write(to + (u + k) * LINE + v * 64,
                              _mm512_sub_epi8((__m512i)U::template get<BITS>(codes, k),
                                              (__m512i)zeros[v]));
                }
        }
        finish_stores();
    }

    // Adds the products of `groups` groups from `first` on, for one block and up to 16 rows.
    // ROWS is 16, or 0 for any number.
    template <int ROWS>
    void multiply(int64_t row, int64_t rows, int b, int64_t first, int64_t groups) {
        const float* x = in_.units + row * in_.stride + first * units_;
        const uint8_t* weight = Product::is_unpacked ? operands_ : record(first) + layout_.codes;
        int64_t weight_step = Product::is_unpacked ? group_bytes_ : layout_.size;
        weight += b * 64;
#define MULTIPLY(I, LEFT, RIGHT)                                                     \
    if (groups > I) {                                                                \
        const float* left = x + I * units_;                                          \
        const uint8_t* right = weight + I * weight_step;                             \
        _tile_zero(I);                                                               \
        for (int64_t u = 0; u < units_; u += step_) {                                \
            prefetch_ahead();                                                        \
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

    // N tiles of rows by both blocks, over a whole row of the weight.
    template <int N>
    void multiply_blocks(int64_t row, int64_t rows) {
        const float* x = in_.units + row * in_.stride;
        const float* x1 = x + TILE_ROWS * in_.stride;
        const uint8_t* weight = operands_ ? operands_ : records_ + layout_.codes;
        _tile_zero(0);
        _tile_zero(1);
        if (N > 1) {
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int64_t u = 0; u < units_; u += step_) {
            const uint8_t* right = weight + u * LINE;
            prefetch_ahead();
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
    const QuantizedCall* const two_levels_;
    const int64_t rows_, rest_, whole_, units_, step_, group_bytes_;
    const TileConfig whole_config_, rest_config_;
    int64_t chunk_, index_ = 0, ahead_step_ = 64;
    const uint8_t *records_ = nullptr, *ahead_ = nullptr, *ahead_end_ = nullptr;
    uint8_t* operands_;
    vf* totals_;
    alignas(64) Sum sums_[CHUNK][TILE_ROWS];
};

}  // namespace
#endif
