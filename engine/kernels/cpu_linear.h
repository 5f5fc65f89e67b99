// y = x W^T + bias, activated, gated or added to a residual; bfloat16 with float32 sums.
//
// The weight [N, C] is packed once: 16 outputs side by side, in pairs of neighbours along C, so
// that a cache line holds 16 outputs' share of two inputs. That is what both instructions for
// bfloat16 take: the dot product of pairs (AVX512-BF16) and, where the processor has it, the
// product of 16 x 32 tiles (AMX). A row's sum runs over C in one order, whatever the number of
// rows, so a token's result does not depend on its neighbours in a batch.
//
// With few rows the work is reading W. The processor's own prefetcher stops at each page of 4 KiB,
// so lines are asked for one page ahead: 1.3 to 2 times as fast as without.
#pragma once

#include "cpu_activation.h"
#include "cpu_cache.h"
#include "cpu_parallel.h"
#include "cpu_tiles.h"

// Outputs in a block, blocks in a pair, inputs to whose multiple rows are padded.
constexpr int64_t BLOCK = 16, PAIR = 2, INPUTS = 32;

struct LinearCall {
    const bf16* weight;    // packed: [N / 16, C / 2, 16, 2]
    const float* bias;     // [N] in the order of the packed weight, or null
    const bf16* x;         // [rows, C]
    const bf16* residual;  // [rows, N], or null; may be `out`
    bf16* out;             // [rows, N], or [rows, N / 2] if gated
    int64_t rows, inputs, outputs;
    int64_t activation;  // of what comes out; negative: none
    int64_t gated;       // even blocks are activated gates, odd blocks what they multiply
};

namespace {

inline int64_t packed_inputs(int64_t inputs) { return round_up(inputs, INPUTS); }

// Row-major [outputs, inputs] -> blocks. With `gated`, the first half of the rows are gates and
// the second half what they multiply: their blocks alternate.
inline void pack_weight(bf16* to, const bf16* weight, int64_t outputs, int64_t inputs,
                        int64_t gated, int64_t threads) {
    int64_t padded = packed_inputs(inputs), half = outputs / 2;
    parallel_rows(outputs, inputs, threads, [=](int64_t n) {
        int64_t place = n;
        if (gated) {
            int64_t i = n % half;
            place = (i / BLOCK * PAIR + n / half) * BLOCK + i % BLOCK;
        }
        bf16* block = to + place / BLOCK * BLOCK * padded + place % BLOCK * 2;
        for (int64_t c = 0; c < inputs; c++)
            block[c / 2 * BLOCK * 2 + c % 2] = weight[n * inputs + c];
    });
}

inline void store_columns(bf16* to, vf v, int64_t left) {
    if (left >= W)
        store(to, v);
    else if (left > 0)
        store_part(to, v, left);
}

// What becomes of one row's sums over a pair of blocks: W of each block, from `lane` on.
__attribute__((always_inline)) inline void emit(const LinearCall& call, int64_t row, int64_t pair,
                                                vf first, vf second, int64_t lane = 0) {
    int64_t column = pair * PAIR * BLOCK + lane;
    if (call.bias) {
        first += load(call.bias + column);
        second += load(call.bias + column + BLOCK);
    }
    if (call.gated) {
        int64_t width = call.outputs / 2, place = pair * BLOCK + lane;
        store_columns(call.out + row * width + place, activate(call.activation, first) * second,
                      width - place);
        return;
    }
    if (call.activation >= 0) {
        first = activate(call.activation, first);
        second = activate(call.activation, second);
    }
    vf sums[PAIR] = {first, second};
    for (int64_t i = 0; i < PAIR; i++, column += BLOCK) {
        int64_t place = row * call.outputs + column, left = call.outputs - column;
        if (left <= 0) return;
        if (call.residual)
            sums[i] += left >= W ? load(call.residual + place)
                                 : load_part(call.residual + place, left);
        store_columns(call.out + place, sums[i], left);
    }
}

constexpr int64_t PAGE = 4096;

inline void prefetch_page_ahead(const void* p) {
    __builtin_prefetch(static_cast<const char*>(p) + PAGE);
}

#if HAS_BF16_DOT

// M rows by N blocks, one dot product of pairs at a time.
template <int M, int N>
void dot_block(const LinearCall& call, const bf16* x, int64_t row, int64_t block, bool is_first) {
    int64_t padded = packed_inputs(call.inputs);
    const bf16* weight = call.weight + block * BLOCK * padded;
    vf total[M][N];
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++) total[i][j] = vf{};
    for (int64_t c = 0; c < padded; c += 2, weight += BLOCK * 2) {
        vf right[N];
        for (int j = 0; j < N; j++) {
            right[j] = read<vf>(weight + j * BLOCK * padded);
            if (is_first) prefetch_page_ahead(weight + j * BLOCK * padded);
        }
        for (int i = 0; i < M; i++) {
            vf left = spread(reinterpret_cast<const float*>(x + i * padded + c));
            for (int j = 0; j < N; j++)
                total[i][j] = PairUnit::multiply_add(total[i][j], left, right[j]);
        }
    }
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j += PAIR)
            emit(call, row + i, (block + j) / PAIR, total[i][j], total[i][j + 1]);
}

template <int N, int M = 6>
void dot_rows(const LinearCall& call, const bf16* x, int64_t row, int64_t rows, int64_t block) {
    if constexpr (M > 0) {
        if (rows < M) return dot_rows<N, M - 1>(call, x, row, rows, block);
        dot_block<M, N>(call, x, row, block, row == 0);
    }
}

void dot_pairs(const LinearCall& call, const bf16* x, int64_t first, int64_t last) {
    int64_t padded = packed_inputs(call.inputs);
    for (int64_t pair = first; pair < last; pair += 2)
        for (int64_t row = 0; row < call.rows; row += 6) {
            int64_t rows = call.rows - row < 6 ? call.rows - row : 6;
            if (last - pair >= 2)
                dot_rows<2 * PAIR>(call, x + row * padded, row, rows, pair * PAIR);
            else
                dot_rows<PAIR>(call, x + row * padded, row, rows, pair * PAIR);
        }
}
#endif

#if HAS_TILES
// One or two tiles of rows (x0, x1) by one pair of blocks -> sums [32, 32].
template <int N>
void tile_product(float* sums, const bf16* weight, const bf16* x0, const bf16* x1, int64_t padded,
                  bool is_first) {
    const bf16* second = weight + BLOCK * padded;
    int64_t stride = padded * sizeof(bf16);
    _tile_zero(0);
    _tile_zero(1);
    if (N > 1) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t c = 0; c < padded; c += INPUTS) {
        if (is_first)
            for (int64_t line = 0; line < INPUTS * BLOCK; line += 32) {
                prefetch_page_ahead(weight + c * BLOCK + line);
                prefetch_page_ahead(second + c * BLOCK + line);
            }
        _tile_loadd(4, x0 + c, stride);
        _tile_loadd(6, weight + c * BLOCK, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, second + c * BLOCK, 64);
        _tile_dpbf16ps(1, 4, 7);
        if (N > 1) {
            _tile_loadd(5, x1 + c, stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    constexpr int64_t row = PAIR * BLOCK;
    _tile_stored(0, sums, row * sizeof(float));
    _tile_stored(1, sums + BLOCK, row * sizeof(float));
    if (N > 1) {
        _tile_stored(2, sums + TILE_ROWS * row, row * sizeof(float));
        _tile_stored(3, sums + TILE_ROWS * row + BLOCK, row * sizeof(float));
    }
}

// The same for neighbouring rows; whole pairs without a bias need no decision within the loop.
void emit_rows(const LinearCall& call, int64_t row, int64_t rows, int64_t pair,
               const float* sums) {
    constexpr int64_t width = PAIR * BLOCK;
    if (call.bias || call.activation >= 0 || (pair + 1) * width > call.outputs) {
        for (int64_t i = 0; i < rows; i++, sums += width)
            emit(call, row + i, pair, load(sums), load(sums + BLOCK));
        return;
    }
    int64_t stride = call.outputs, place = row * stride + pair * width;
    bf16* out = call.out + place;
    if (call.residual) {
        const bf16* residual = call.residual + place;
        for (int64_t i = 0; i < rows; i++, sums += width, out += stride, residual += stride) {
            store(out, load(sums) + load(residual));
            store(out + BLOCK, load(sums + BLOCK) + load(residual + BLOCK));
        }
    } else {
        for (int64_t i = 0; i < rows; i++, sums += width, out += stride) {
            store(out, load(sums));
            store(out + BLOCK, load(sums + BLOCK));
        }
    }
}

// `last_rows` is a whole tile: the rows behind the last multiple of 16, and zeros.
void tile_pairs(const LinearCall& shared, const bf16* x, const bf16* last_rows, int64_t first,
                int64_t last) {
    static const TileConfig config;
    Tiles tiles(config);
    const LinearCall call = shared;  // a copy that no store can change: it stays in registers
    int64_t padded = packed_inputs(call.inputs);
    alignas(64) float sums[2 * TILE_ROWS * PAIR * BLOCK];
    auto rows_at = [&](int64_t row) {
        return row + TILE_ROWS <= call.rows ? x + row * padded : last_rows;
    };
    for (int64_t pair = first; pair < last; pair++) {
        const bf16* weight = call.weight + pair * PAIR * BLOCK * padded;
        for (int64_t row = 0; row < call.rows; row += 2 * TILE_ROWS) {
            int64_t left = call.rows - row;
            if (left > TILE_ROWS)
                tile_product<2>(sums, weight, rows_at(row), rows_at(row + TILE_ROWS), padded,
                                row == 0);
            else
                tile_product<1>(sums, weight, rows_at(row), nullptr, padded, row == 0);
            emit_rows(call, row, left < 2 * TILE_ROWS ? left : 2 * TILE_ROWS, pair, sums);
        }
    }
}
#endif

#if HAS_BF16_DOT
inline thread_local Scratch linear_scratch;

void linear(const LinearCall& call, int64_t threads) {
    int64_t padded = packed_inputs(call.inputs);
    bool is_padded = padded != call.inputs;
    int64_t rest = call.rows % 16, copied = is_padded ? call.rows : 0;
    // Rows padded to whole inputs where they are not, and the last rows as a whole tile.
    bf16* memory = reinterpret_cast<bf16*>(
        linear_scratch.floats(size_t((copied + 16) * padded * sizeof(bf16) / sizeof(float))));
    const bf16* x = is_padded ? memory : call.x;
    bf16* last_rows = memory + copied * padded;
    if (is_padded) std::memset(memory, 0, size_t(copied * padded) * sizeof(bf16));
    for (int64_t row = 0; row < copied; row++)
        std::memcpy(memory + row * padded, call.x + row * call.inputs, call.inputs * sizeof(bf16));
    if (rest) {
        size_t size = size_t(rest * padded), whole = size_t(16 * padded);
        std::memcpy(last_rows, x + (call.rows - rest) * padded, size * sizeof(bf16));
        std::memset(last_rows + size, 0, (whole - size) * sizeof(bf16));
    }
    int64_t pairs = (call.outputs + PAIR * BLOCK - 1) / (PAIR * BLOCK);
    int64_t share = round_up(pairs / (16 * threads) + 1, 2);
    parallel_for((pairs + share - 1) / share, threads, [&](int64_t i) {
        int64_t first = i * share, last = first + share < pairs ? first + share : pairs;
#if HAS_TILES
        if (may_use_tiles()) return tile_pairs(call, x, last_rows, first, last);
#endif
        dot_pairs(call, x, first, last);
    });
}
#endif

}  // namespace
