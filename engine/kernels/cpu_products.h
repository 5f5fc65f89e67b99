// The two products of attention over a tile of 64 keys: queries by keys, and weights by values,
// read from the cache as it lies (cpu_cache.h).
#pragma once

#include "cpu_cache.h"
#include "cpu_tiles.h"

namespace {

constexpr int64_t TILE = 64;  // keys
constexpr int64_t GROUPS = TILE / GROUP;
// Registers: MR x NV accumulators, NV operands and a broadcast must fit (32 or 16 vectors).
#if VECTOR_BYTES == 64 || defined(__aarch64__)
constexpr int MR = 6, NV = 4;
#else
constexpr int MR = 4, NV = 2;
#endif

// A tile of keys in the cache, or a copy of it; null where the tile has no more groups.
template <class T>
struct Tile {
    const T *keys[GROUPS], *values[GROUPS];
};

// Scores [M, N vectors] = queries [M, depth units] . keys; vectors from `first` on.
template <class U, int M, int N, class T>
void score_block(const float* queries, int64_t stride, const Tile<T>& tile, int64_t first,
                 float* scores, int64_t depth) {
    constexpr int64_t vectors = GROUP / W;  // in a group
    const T* keys[N];
    for (int j = 0; j < N; j++)
        keys[j] = tile.keys[(first + j) / vectors] + (first + j) % vectors * W * U::per_unit;
    vf total[M][N];
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++) total[i][j] = vf{};
    for (int64_t u = 0; u < depth; u++) {
        vf right[N];
        for (int j = 0; j < N; j++) right[j] = U::load_units(keys[j] + u * GROUP * U::per_unit);
        for (int i = 0; i < M; i++) {
            vf left = spread(queries + i * stride + u);
            for (int j = 0; j < N; j++) total[i][j] = U::multiply_add(total[i][j], left, right[j]);
        }
    }
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++) store(scores + i * TILE + (first + j) * W, total[i][j]);
}

// out [M, N vectors] = weights [M, depth units] . values; columns from `column` on.
template <class U, int M, int N, class T>
void mix_block(const float* weights, const Tile<T>& tile, int64_t column, int64_t padded_dim,
               float* out, int64_t depth) {
    constexpr int64_t group_units = GROUP / U::per_unit;
    vf total[M][N];
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++) total[i][j] = vf{};
    for (int64_t g = 0; g * group_units < depth; g++) {
        const T* values = tile.values[g] + column * U::per_unit;
        int64_t left = depth - g * group_units, units = left < group_units ? left : group_units;
        for (int64_t u = 0; u < units; u++, values += padded_dim * U::per_unit) {
            vf right[N];
            for (int j = 0; j < N; j++) right[j] = U::load_units(values + j * W * U::per_unit);
            for (int i = 0; i < M; i++) {
                vf left = spread(weights + i * TILE + g * group_units + u);
                for (int j = 0; j < N; j++)
                    total[i][j] = U::multiply_add(total[i][j], left, right[j]);
            }
        }
    }
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++) store(out + i * padded_dim + column + j * W, total[i][j]);
}

// The two products for up to MR rows, M of them.
template <class U, int M = MR, class T>
void score(int rows, const float* queries, int64_t stride, const Tile<T>& tile, float* scores,
           int64_t depth, int64_t vectors) {
    if constexpr (M > 0) {
        if (rows < M) return score<U, M - 1>(rows, queries, stride, tile, scores, depth, vectors);
        int64_t j = 0;
        for (; j + NV <= vectors; j += NV)
            score_block<U, M, NV>(queries, stride, tile, j, scores, depth);
        for (; j < vectors; j++) score_block<U, M, 1>(queries, stride, tile, j, scores, depth);
    }
}

template <class U, int M = MR, class T>
void mix(int rows, const float* weights, const Tile<T>& tile, int64_t padded_dim, float* out,
         int64_t depth) {
    if constexpr (M > 0) {
        if (rows < M) return mix<U, M - 1>(rows, weights, tile, padded_dim, out, depth);
        int64_t d = 0;
        for (; d + NV * W <= padded_dim; d += NV * W)
            mix_block<U, M, NV>(weights, tile, d, padded_dim, out, depth);
        for (; d < padded_dim; d += W) mix_block<U, M, 1>(weights, tile, d, padded_dim, out, depth);
    }
}

#if HAS_TILES
// The same products for 16 rows at once; head dims in multiples of 32.
struct TileProducts {
    // Registers 0 to 3 sum; 4 times 5 are queries by keys, 6 times 7 weights by values, of which
    // a group has 8 pairs only.
    static TileConfig config() {
        TileConfig config;
        config.bytes_per_row[6] = 32;
        config.rows[7] = 8;
        return config;
    }

    // Scores [16, 16 groups] of queries [16, depth units].
    static void score(const float* queries, int64_t stride, const Tile<bf16>& tile, float* scores,
                      int64_t depth, int64_t groups) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t u = 0; u < depth; u += TILE_ROWS) {
            int64_t place = u * GROUP * 2;
            _tile_loadd(4, queries + u, stride * sizeof(float));
            _tile_loadd(5, tile.keys[0] + place, 64);
            _tile_dpbf16ps(0, 4, 5);
            if (groups > 1) {
                _tile_loadd(5, tile.keys[1] + place, 64);
                _tile_dpbf16ps(1, 4, 5);
            }
            if (groups > 2) {
                _tile_loadd(5, tile.keys[2] + place, 64);
                _tile_dpbf16ps(2, 4, 5);
            }
            if (groups > 3) {
                _tile_loadd(5, tile.keys[3] + place, 64);
                _tile_dpbf16ps(3, 4, 5);
            }
        }
        constexpr int64_t row = TILE * sizeof(float);
        _tile_stored(0, scores, row);
        _tile_stored(1, scores + GROUP, row);
        _tile_stored(2, scores + 2 * GROUP, row);
        _tile_stored(3, scores + 3 * GROUP, row);
    }

    // out [16, padded_dim] of weights [16, 16 groups].
    static void mix(const float* weights, const Tile<bf16>& tile, int64_t padded_dim, float* out,
                    int64_t groups) {
        int64_t column = 0;
        for (; column + 4 * GROUP <= padded_dim; column += 4 * GROUP)
            mix_columns<4>(weights, tile, padded_dim, out, groups, column);
        if (column < padded_dim) mix_columns<2>(weights, tile, padded_dim, out, groups, column);
    }

  private:
    // N blocks of 16 columns: sums that do not wait for one another.
    template <int N>
    static void mix_columns(const float* weights, const Tile<bf16>& tile, int64_t padded_dim,
                            float* out, int64_t groups, int64_t column) {
        int64_t row = padded_dim * sizeof(float);
        _tile_zero(0);
        _tile_zero(1);
        if (N > 2) {
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int64_t g = 0; g < groups; g++) {
            const bf16* values = tile.values[g] + column * 2;
            _tile_loadd(6, weights + g * GROUP / 2, TILE * sizeof(float));
            _tile_loadd(7, values, row);
            _tile_dpbf16ps(0, 6, 7);
            _tile_loadd(7, values + GROUP * 2, row);
            _tile_dpbf16ps(1, 6, 7);
            if (N > 2) {
                _tile_loadd(7, values + 2 * GROUP * 2, row);
                _tile_dpbf16ps(2, 6, 7);
                _tile_loadd(7, values + 3 * GROUP * 2, row);
                _tile_dpbf16ps(3, 6, 7);
            }
        }
        _tile_stored(0, out + column, row);
        _tile_stored(1, out + column + GROUP, row);
        if (N > 2) {
            _tile_stored(2, out + column + 2 * GROUP, row);
            _tile_stored(3, out + column + 3 * GROUP, row);
        }
    }
};
#endif

}  // namespace
