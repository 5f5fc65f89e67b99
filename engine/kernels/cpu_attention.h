// Attention over a paged KV cache: flash attention (Dao et al. 2022) on tiles of 64 keys.
//
// Work is cut into (sequence, key/value head, tile of queries); the query heads that share a
// key/value head are rows of one tile, so each key is read once for all of them. Per tile of keys:
// pack K transposed and V, multiply, soften against the tile's own maximum, multiply, and fold the
// tile into the running (maximum, sum, output) of each row, in the order of the keys.
//
// A row's result depends on its query and on the keys it sees, by absolute position, and on nothing
// else: tiles start at multiples of 64, each is computed by itself, and folding goes from the first
// to the last. So a token gets the same bits alone or in any batch, in a prompt or as a decode,
// on one thread or on many (where a few long contexts are cut among threads, "flash decoding",
// the tiles are kept and folded in that same order).
#pragma once

#include <cmath>
#include <memory>
#include <vector>

#include "cpu_parallel.h"
#include "cpu_vector.h"

struct AttentionBatch {
    int64_t num_seqs, block_size, table_width;
    const int32_t* query_start_loc;  // [B + 1]
    const int32_t* seq_lens;         // [B]
    const int32_t* block_table;      // [B, table_width]
};

struct AttentionShape {
    int64_t num_heads, num_kv_heads, head_dim, query_stride;
    int64_t window;  // 0: none
    float scale;
    float softcap;  // 0: none
};

constexpr int64_t MAX_HEAD_DIM = 512;

namespace {

constexpr int64_t TILE = 64;   // keys
constexpr int64_t ROWS = 96;   // wanted rows (queries x heads of a group) in a tile of queries
// Registers: MR x NV accumulators, NV operands and a broadcast must fit (32 or 16 vectors).
#if VECTOR_BYTES == 64 || defined(__aarch64__)
constexpr int MR = 6, NV = 4;
#else
constexpr int MR = 4, NV = 2;
#endif

// What a product's operands are made of. A unit has 32 bits: a float, or two bfloat16 that are
// neighbours along the summed dimension and are multiplied by one instruction.
struct FloatUnit {
    static constexpr int64_t per_unit = 1;
    typedef float type;
    static inline vf multiply_add(vf c, vf a, vf b) { return a * b + c; }
};

#if HAS_BF16_DOT
struct PairUnit {
    static constexpr int64_t per_unit = 2;
    typedef bf16 type;
    static inline vf multiply_add(vf c, vf a, vf b) {
        return (vf)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
    }
};
template <class T>
struct UnitOf {
    typedef FloatUnit type;
};
template <>
struct UnitOf<bf16> {
    typedef PairUnit type;
};
#else
template <class T>
struct UnitOf {
    typedef FloatUnit type;
};
#endif

// c [M, n vectors] = a [M, depth units] b [depth units, n vectors]; strides in units or floats.
template <class U, int M, int N>
void multiply_block(const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c,
                    int64_t c_stride, int64_t depth) {
    vf total[M][N] = {};
    for (int64_t k = 0; k < depth; k++) {
        vf right[N];
        for (int j = 0; j < N; j++) right[j] = load(b + k * b_stride + j * W);
        for (int i = 0; i < M; i++) {
            vf left = (vf)(vu{} + read<uint32_t>(a + i * a_stride + k));
            for (int j = 0; j < N; j++) total[i][j] = U::multiply_add(total[i][j], left, right[j]);
        }
    }
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++) store(c + i * c_stride + j * W, total[i][j]);
}

template <class U, int M>
void multiply_rows(const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c,
                   int64_t c_stride, int64_t depth, int64_t vectors) {
    int64_t j = 0;
    for (; j + NV <= vectors; j += NV)
        multiply_block<U, M, NV>(a, a_stride, b + j * W, b_stride, c + j * W, c_stride, depth);
    for (; j < vectors; j++)
        multiply_block<U, M, 1>(a, a_stride, b + j * W, b_stride, c + j * W, c_stride, depth);
}

template <class U, int M = MR>
void multiply(int rows, const float* a, int64_t a_stride, const float* b, int64_t b_stride,
              float* c, int64_t c_stride, int64_t depth, int64_t vectors) {
    if constexpr (M > 0) {
        if (rows == M)
            multiply_rows<U, M>(a, a_stride, b, b_stride, c, c_stride, depth, vectors);
        else
            multiply<U, M - 1>(rows, a, a_stride, b, b_stride, c, c_stride, depth, vectors);
    }
}

inline int64_t round_up(int64_t x, int64_t multiple) {
    return (x + multiple - 1) / multiple * multiple;
}

// `size` elements of a row as units of type U: whole vectors, zeros behind the row's end.
template <class U, class T>
inline vu load_units(const T* row, int64_t unit, int64_t size) {
    int64_t first = unit * U::per_unit, left = size - first;
    if constexpr (U::per_unit == 1) {
        return (vu)(left >= W ? load(row + first) : load_part(row + first, left > 0 ? left : 0));
    } else {
        if (left >= 2 * W) return read<vu>(row + first);
        bf16 padded[2 * W] = {};
        for (int64_t i = 0; i < left; i++) padded[i] = row[first + i];
        return read<vu>(padded);
    }
}

// packed [units, TILE]: unit u of key j at u * TILE + j. Missing keys (null rows) are zeros.
template <class U, class T>
void pack_keys(float* packed, const T* const* rows, int64_t head_dim, int64_t units) {
    for (int64_t j = 0; j < TILE; j += W) {
        if (!rows[j]) {  // none of these W keys is there
            for (int64_t u = 0; u < units; u++) store(packed + u * TILE + j, vf{});
            continue;
        }
        for (int64_t u = 0; u < units; u += W) {
            vu block[W];
            for (int i = 0; i < W; i++)
                block[i] = rows[j + i] ? load_units<U>(rows[j + i], u, head_dim) : vu{};
            transpose(block);
            for (int i = 0; i < W; i++) write(packed + (u + i) * TILE + j, block[i]);
        }
    }
}

// packed [TILE / per_unit, out_floats]: rows of V, or pairs of rows interleaved.
template <class U, class T>
void pack_values(float* packed, const T* const* rows, int64_t head_dim, int64_t out_floats) {
    for (int64_t j = 0; j < TILE && rows[j]; j += U::per_unit, packed += out_floats)
        for (int64_t d = 0; d < out_floats; d += W) {
            int64_t left = head_dim - d;
            vf first = left >= W ? load(rows[j] + d) : load_part(rows[j] + d, left);
            if constexpr (U::per_unit == 1) {
                store(packed + d, first);
            } else {
                const T* row = rows[j + 1];
                vf second = !row ? vf{} : left >= W ? load(row + d) : load_part(row + d, left);
                // a widened bfloat16 has its bits in the upper half
                write(packed + d, ((vu)first >> 16) | (vu)second);
            }
        }
}

// Scores of one row -> probabilities against the row's own maximum, and their sum. Keys outside
// [low, high) are hidden; `width` scores, whole vectors, are read and written.
template <class U>
__attribute__((noinline)) void soften(float* scores, int64_t low, int64_t high, int64_t width,
                                      const AttentionShape& shape, float* maximum_out,
                                      float* sum_out) {
    int32_t lane_numbers[W];
    for (int i = 0; i < W; i++) lane_numbers[i] = i;
    const vi lanes = read<vi>(lane_numbers);
    vf most = splat(-INFINITY);
    for (int64_t j = 0; j < width; j += W) {
        vf s = load(scores + j) * shape.scale;
        if (shape.softcap > 0.0f) s = shape.softcap * tanh(s / shape.softcap);
        vi key = lanes + int32_t(j);
        s = ((key >= int32_t(low)) & (key < int32_t(high))) ? s : splat(-INFINITY);
        most = maximum(s, most);
        store(scores + j, s);
    }
    float top = maximum(most);
    *maximum_out = top;
    if (top == -INFINITY) top = 0.0f;
    vf total = {};
    for (int64_t j = 0; j < width; j += W) {
        vf p = exp(load(scores + j) - top);
        total += p;
        if constexpr (U::per_unit == 1)
            store(scores + j, p);
        else  // in place: what is written lies before what is read next
            store(reinterpret_cast<bf16*>(scores) + j, p);
    }
    *sum_out = sum(total);
}

// Result of rows over some keys: maximum, sum of probabilities, weighted sum of V.
struct Partial {
    float *maxima, *sums, *out;  // [rows], [rows], [rows, out_floats]

    static int64_t floats(int64_t rows, int64_t out_floats) {
        return 2 * round_up(rows, 16) + rows * out_floats;
    }
    static Partial at(float* memory, int64_t rows) {
        int64_t padded = round_up(rows, 16);
        return {memory, memory + padded, memory + 2 * padded};
    }
    Partial from(int64_t row, int64_t out_floats) const {
        return {maxima + row, sums + row, out + row * out_floats};
    }
    void clear(int64_t rows, int64_t out_floats) const {
        for (int64_t i = 0; i < rows; i++) maxima[i] = -INFINITY;
        std::memset(sums, 0, rows * sizeof(float));
        std::memset(out, 0, rows * out_floats * sizeof(float));
    }
};

// Fold one row's result over a later tile into the running one.
__attribute__((noinline)) void fold_row(const Partial& running, const Partial& tile,
                                        int64_t out_floats) {
    float top = *tile.maxima;
    if (top == -INFINITY) return;  // the row sees no key of the tile
    float before = *running.maxima;
    float after = before > top ? before : top;
    vf keep = exp(splat(before - after)), take = exp(splat(top - after));
    *running.maxima = after;
    *running.sums = *running.sums * keep[0] + *tile.sums * take[0];
    for (int64_t d = 0; d < out_floats; d += W)
        store(running.out + d, load(running.out + d) * keep + load(tile.out + d) * take);
}

// A tile of queries of one sequence and key/value head, over tiles of keys [first, last).
struct Item {
    int64_t seq, head, first_query, queries;
    int64_t first_tile, last_tile;
    // Where threads share the item: tiles in a part, parts, place of the kept tiles, counter.
    int64_t tiles_each, num_parts, kept, counter;
};

struct Part {
    int64_t item, index;
};

inline thread_local Scratch worker_scratch, kept_scratch;

template <class T>
class Attention {
    using U = typename UnitOf<T>::type;

  public:
    Attention(const AttentionBatch& batch, const AttentionShape& shape, T* out, const T* q,
              const T* cache, int64_t threads)
        : batch_(batch), shape_(shape), out_(out), q_(q), cache_(cache), threads_(threads),
          group_(shape.num_heads / shape.num_kv_heads),
          depth_((shape.head_dim + U::per_unit - 1) / U::per_unit),
          units_(round_up(depth_, W)), out_floats_(round_up(shape.head_dim, W)) {}

    void run() {
        plan();
        parallel_for(int64_t(parts_.size()), threads_, [this](int64_t i) { work(parts_[i]); });
    }

  private:
    struct Buffers {
        float *queries, *keys, *values, *scores;
        Partial running, tile;
    };

    int64_t query_len(int64_t seq) const {
        return batch_.query_start_loc[seq + 1] - batch_.query_start_loc[seq];
    }
    // Position in its sequence of the i-th new token.
    int64_t position(int64_t seq, int64_t i) const {
        return batch_.seq_lens[seq] - query_len(seq) + i;
    }

    void plan() {
        int64_t tile_queries = ROWS / group_ > 0 ? ROWS / group_ : 1, total = 0;
        for (int64_t seq = 0; seq < batch_.num_seqs; seq++) {
            // The last queries see most keys: they go first, so that threads end together.
            for (int64_t end = query_len(seq); end > 0; end -= tile_queries) {
                int64_t first = end > tile_queries ? end - tile_queries : 0;
                int64_t low = shape_.window ? position(seq, first) + 1 - shape_.window : 0;
                int64_t first_tile = low > 0 ? low / TILE : 0;
                int64_t last_tile = position(seq, end - 1) / TILE + 1;
                total += (last_tile - first_tile) * shape_.num_kv_heads;
                for (int64_t head = 0; head < shape_.num_kv_heads; head++)
                    items_.push_back({seq, head, first, end - first, first_tile, last_tile,
                                      last_tile - first_tile, 1, 0, 0});
            }
        }
        // An item of more than half a thread's fair share is cut into parts.
        int64_t share = total / (4 * threads_) + 1, kept = 0, counters = 0;
        for (size_t i = 0; i < items_.size(); i++) {
            Item& item = items_[i];
            int64_t tiles = item.last_tile - item.first_tile;
            if (threads_ > 1 && tiles > 2 * share) {
                item.tiles_each = share;
                item.num_parts = (tiles + share - 1) / share;
                item.kept = kept;
                item.counter = counters++;
                kept += tiles * Partial::floats(item.queries * group_, out_floats_);
            }
            for (int64_t part = 0; part < item.num_parts; part++)
                parts_.push_back({int64_t(i), part});
        }
        if (kept) {
            kept_ = kept_scratch.floats(kept);
            finished_.reset(new std::atomic<int64_t>[counters]());
        }
    }

    Buffers buffers(int64_t rows) const {
        int64_t sizes[] = {rows * units_, TILE * units_, TILE * out_floats_, MR * TILE,
                           Partial::floats(rows, out_floats_), Partial::floats(MR, out_floats_)};
        int64_t starts[7] = {};
        for (int i = 0; i < 6; i++) starts[i + 1] = starts[i] + round_up(sizes[i], 16);
        float* memory = worker_scratch.floats(starts[6]);
        return {memory, memory + starts[1], memory + starts[2], memory + starts[3],
                Partial::at(memory + starts[4], rows),
                Partial::at(memory + starts[5], MR)};
    }

    Partial kept_tile(const Item& item, int64_t tile) const {
        int64_t rows = item.queries * group_, size = Partial::floats(rows, out_floats_);
        return Partial::at(kept_ + item.kept + (tile - item.first_tile) * size, rows);
    }

    void work(const Part& part) {
        const Item& item = items_[part.item];
        int64_t rows = item.queries * group_;
        Buffers to = buffers(rows);
        pack_queries(item, to.queries);
        to.running.clear(rows, out_floats_);
        int64_t first = item.first_tile + part.index * item.tiles_each;
        int64_t last = first + item.tiles_each < item.last_tile ? first + item.tiles_each
                                                                : item.last_tile;
        if (item.num_parts == 1) {
            for (int64_t tile = first; tile < last; tile++) attend(item, tile, to, nullptr);
        } else {
            for (int64_t tile = first; tile < last; tile++) {
                Partial kept = kept_tile(item, tile);
                kept.clear(rows, out_floats_);
                attend(item, tile, to, &kept);
            }
            // Whoever ends last folds all.
            int64_t done = finished_[item.counter].fetch_add(1, std::memory_order_acq_rel) + 1;
            if (done < item.num_parts) return;
            for (int64_t tile = item.first_tile; tile < item.last_tile; tile++)
                for (int64_t row = 0; row < rows; row++)
                    fold_row(to.running.from(row, out_floats_),
                             kept_tile(item, tile).from(row, out_floats_), out_floats_);
        }
        write_out(item, to.running);
    }

    // Rows (query, head of the group), as units.
    void pack_queries(const Item& item, float* packed) const {
        int64_t start = batch_.query_start_loc[item.seq] + item.first_query;
        for (int64_t i = 0; i < item.queries; i++)
            for (int64_t g = 0; g < group_; g++, packed += units_) {
                const T* row = q_ + (start + i) * shape_.query_stride +
                               (item.head * group_ + g) * shape_.head_dim;
                for (int64_t u = 0; u < units_; u += W)
                    write(packed + u, load_units<U>(row, u, shape_.head_dim));
            }
    }

    // Addresses of a tile's keys, of `count` keys that are there; null behind them.
    void find_rows(const Item& item, int64_t tile, int64_t count, const T** keys) const {
        const int32_t* table = batch_.block_table + item.seq * batch_.table_width;
        int64_t token_size = 2 * shape_.num_kv_heads * shape_.head_dim;
        int64_t block = tile * TILE / batch_.block_size, offset = tile * TILE % batch_.block_size;
        for (int64_t j = 0; j < TILE; j++) {
            keys[j] = nullptr;
            if (j >= count) continue;
            int64_t slot = table[block] * batch_.block_size + offset;
            keys[j] = cache_ + slot * token_size + item.head * shape_.head_dim;
            if (++offset == batch_.block_size) block++, offset = 0;
        }
    }

    // One tile of keys for all rows of an item: folded into to.running, or kept.
    void attend(const Item& item, int64_t tile, const Buffers& to, const Partial* kept) const {
        int64_t rows = item.queries * group_;
        int64_t newest = position(item.seq, item.first_query + item.queries - 1);
        int64_t count = newest + 1 - tile * TILE < TILE ? newest + 1 - tile * TILE : TILE;
        const T* addresses[TILE];
        find_rows(item, tile, count, addresses);
        pack_keys<U>(to.keys, addresses, shape_.head_dim, units_);
        for (int64_t j = 0; j < count; j++) addresses[j] += shape_.num_kv_heads * shape_.head_dim;
        pack_values<U>(to.values, addresses, shape_.head_dim, out_floats_);
        for (int64_t row = 0; row < rows; row += MR) {
            int block = int(rows - row < MR ? rows - row : MR);
            // Keys of the tile that the block's last row sees; earlier rows see no others.
            int64_t high = seen(item, row + block - 1, tile);
            if (high <= 0) continue;
            int64_t width = round_up(high, W);
            multiply<U>(block, to.queries + row * units_, units_, to.keys, TILE, to.scores, TILE,
                        depth_, width / W);
            Partial result = kept ? kept->from(row, out_floats_) : to.tile;
            for (int i = 0; i < block; i++) {
                int64_t end = seen(item, row + i, tile);
                int64_t low = shape_.window ? seen(item, row + i, tile, shape_.window) : 0;
                soften<U>(to.scores + i * TILE, low, end, width, shape_, result.maxima + i,
                          result.sums + i);
            }
            multiply<U>(block, to.scores, TILE, to.values, out_floats_, result.out, out_floats_,
                        (high + U::per_unit - 1) / U::per_unit, out_floats_ / W);
            if (kept) continue;
            for (int i = 0; i < block; i++)
                fold_row(to.running.from(row + i, out_floats_), to.tile.from(i, out_floats_),
                         out_floats_);
        }
    }

    // How many keys of the tile are not after a row's position less `back`; may be negative.
    int64_t seen(const Item& item, int64_t row, int64_t tile, int64_t back = 0) const {
        int64_t query = item.first_query + row / group_;
        int64_t count = position(item.seq, query) + 1 - back - tile * TILE;
        return count < TILE ? count : TILE;
    }

    void write_out(const Item& item, const Partial& running) const {
        int64_t start = batch_.query_start_loc[item.seq] + item.first_query, row = 0;
        for (int64_t i = 0; i < item.queries; i++)
            for (int64_t g = 0; g < group_; g++, row++) {
                T* to = out_ + ((start + i) * shape_.num_heads + item.head * group_ + g) *
                                   shape_.head_dim;
                const float* from = running.out + row * out_floats_;
                vf share = splat(1.0f / running.sums[row]);
                for (int64_t d = 0; d < shape_.head_dim; d += W) {
                    vf v = load(from + d) * share;
                    if (shape_.head_dim - d >= W)
                        store(to + d, v);
                    else
                        store_part(to + d, v, shape_.head_dim - d);
                }
            }
    }

    const AttentionBatch& batch_;
    const AttentionShape& shape_;
    T* out_;
    const T* q_;
    const T* cache_;
    int64_t threads_, group_, depth_, units_, out_floats_;
    std::vector<Item> items_;
    std::vector<Part> parts_;
    float* kept_ = nullptr;
    std::unique_ptr<std::atomic<int64_t>[]> finished_;
};

template <class T>
void attention(const AttentionBatch& batch, const AttentionShape& shape, T* out, const T* q,
               const T* cache, int64_t threads) {
    Attention<T>(batch, shape, out, q, cache, threads).run();
}

}  // namespace
