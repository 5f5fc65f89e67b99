// Attention over a paged KV cache: flash attention (Dao et al. 2022) on tiles of 64 keys.
//
// Work is cut into (sequence, key/value head, tile of queries); the query heads that share a
// key/value head are rows of one tile, so each key is read once for all of them. Per tile of keys:
// multiply with K, soften against the tile's own maximum, multiply with V, and fold the tile into
// the running (maximum, sum, output) of each row, in the order of the keys.
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
#include "cpu_products.h"

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

namespace {

constexpr int64_t ROWS = 96;  // wanted rows (queries x heads of a group) in a tile of queries

constexpr float LOG2_E = 1.44269504f;

// Scores of one row over a tile -> probabilities against the row's own maximum, which is in powers
// of two, and their sum. Keys outside [low, high) are hidden, whatever stands in their scores.
template <class U>
__attribute__((noinline)) void soften(float* scores, int64_t low, int64_t high,
                                      const AttentionShape& shape, float* maximum_out,
                                      float* sum_out) {
    constexpr int vectors = TILE / W;
    vf s[vectors];
    if (shape.softcap > 0.0f)
        for (int j = 0; j < vectors; j++)
            s[j] = shape.softcap * LOG2_E *
                   tanh(load(scores + j * W) * (shape.scale / shape.softcap));
    else
        for (int j = 0; j < vectors; j++)
            s[j] = load(scores + j * W) * (shape.scale * LOG2_E);
    if (low > 0 || high < TILE) {
        int32_t lane_numbers[W];
        for (int i = 0; i < W; i++) lane_numbers[i] = i;
        for (int j = 0; j < vectors; j++) {
            vi key = read<vi>(lane_numbers) + j * W;
            s[j] = ((key >= int32_t(low)) & (key < int32_t(high))) ? s[j] : splat(-INFINITY);
        }
    }
    vf most = s[0];
    for (int j = 1; j < vectors; j++) most = maximum(s[j], most);
    float top = maximum(most);
    *maximum_out = top;
    if (top == -INFINITY) top = 0.0f;
    vf total = {};
    for (int j = 0; j < vectors; j++) {
        vf p = exp2_of_negative(s[j] - top);
        total += p;
        if constexpr (U::per_unit == 1)
            store(scores + j * W, p);
        else
            store(reinterpret_cast<bf16*>(scores) + j * W, p);
    }
    *sum_out = sum(total);
}

// Result of rows over some keys: maximum, sum of probabilities, weighted sum of V.
struct Partial {
    float *maxima, *sums, *out;  // [rows] in powers of two, [rows], [rows, out_floats]

    static int64_t floats(int64_t rows, int64_t out_floats) {
        return 2 * round_up(rows, 16) + rows * out_floats;
    }
    static Partial at(float* memory, int64_t rows) {
        int64_t padded = round_up(rows, 16);
        return {memory, memory + padded, memory + 2 * padded};
    }
    void clear(int64_t rows, int64_t out_floats) const {
        for (int64_t i = 0; i < rows; i++) maxima[i] = -INFINITY;
        std::memset(sums, 0, rows * sizeof(float));
        std::memset(out, 0, rows * out_floats * sizeof(float));
    }
};

// Fold rows' results over a later tile into the running ones.
__attribute__((noinline)) void fold(const Partial& running, const Partial& tile, int64_t rows,
                                    int64_t out_floats) {
    for (int64_t first = 0; first < rows; first += W) {
        vf before = load(running.maxima + first), top = load(tile.maxima + first);
        // Of a row that sees no key of the tile nothing is taken, whatever its sums hold.
        vi is_seen = top != -INFINITY;
        vf after = maximum(top, before);
        vf keep = exp2_of_negative(before - after), take = exp2_of_negative(top - after);
        vf sums = load(running.sums + first);
        vf folded = sums * keep + load(tile.sums + first) * take;
        store(running.maxima + first, after);
        store(running.sums + first, is_seen ? folded : sums);
        for (int64_t i = 0; i < W && first + i < rows; i++) {
            if (!is_seen[i]) continue;
            float* out = running.out + (first + i) * out_floats;
            const float* from = tile.out + (first + i) * out_floats;
            for (int64_t d = 0; d < out_floats; d += W)
                store(out + d, load(out + d) * keep[i] + load(from + d) * take[i]);
        }
    }
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
              T* cache, int64_t threads)
        : batch_(batch), shape_(shape), out_(out), q_(q),
          cache_{cache, shape.num_kv_heads, shape.head_dim}, threads_(threads),
          group_(shape.num_heads / shape.num_kv_heads),
          depth_(shape.head_dim / U::per_unit), units_(round_up(depth_, W)),
          out_floats_(cache_.padded_dim()),
          use_tiles_(U::per_unit == 2 && shape.head_dim % 32 == 0 && may_use_tiles()) {}

    void run() {
        plan();
        parallel_for(int64_t(parts_.size()), threads_, [this](int64_t i) { work(parts_[i]); });
    }

  private:
    struct Buffers {
        float *queries, *spare, *scores;
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
                kept += tiles * kept_floats(item);
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
        // Products of tiles take and write whole tiles of rows.
        rows = round_up(rows, TILE_ROWS);
        int64_t sizes[] = {rows * units_, 2 * TILE * out_floats_, rows * TILE,
                           Partial::floats(rows, out_floats_), Partial::floats(rows, out_floats_)};
        int64_t starts[6] = {};
        for (int i = 0; i < 5; i++) starts[i + 1] = starts[i] + round_up(sizes[i], 16);
        float* memory = worker_scratch.floats(starts[5]);
        return {memory, memory + starts[1], memory + starts[2],
                Partial::at(memory + starts[3], rows),
                Partial::at(memory + starts[4], rows)};
    }

    // Products of tiles write whole tiles of rows.
    int64_t kept_floats(const Item& item) const {
        return Partial::floats(round_up(item.queries * group_, TILE_ROWS), out_floats_);
    }
    Partial kept_tile(const Item& item, int64_t tile) const {
        int64_t place = item.kept + (tile - item.first_tile) * kept_floats(item);
        return Partial::at(kept_ + place, item.queries * group_);
    }

    void work(const Part& part) {
#if HAS_TILES
        static const TileConfig config = TileProducts::config();
        if (use_tiles_) {
            Tiles tiles(config);
            return attend_part(part);
        }
#endif
        attend_part(part);
    }

    void attend_part(const Part& part) {
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
                attend(item, tile, to, &kept);
            }
            // Whoever ends last folds all.
            int64_t done = finished_[item.counter].fetch_add(1, std::memory_order_acq_rel) + 1;
            if (done < item.num_parts) return;
            for (int64_t tile = item.first_tile; tile < item.last_tile; tile++)
                fold(to.running, kept_tile(item, tile), rows, out_floats_);
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
                if constexpr (U::per_unit == 1)
                    for (int64_t d = 0; d < depth_; d++) packed[d] = load1(row + d);
                else
                    std::memcpy(packed, row, shape_.head_dim * sizeof(T));
            }
    }

    // Where a tile's first `count` keys stand; `spare` holds what has to be copied.
    Tile<T> find(const Item& item, int64_t index, int64_t count, T* spare) const {
        const int32_t* table = batch_.block_table + item.seq * batch_.table_width;
        int64_t size = cache_.group_size();
        Tile<T> tile = {};
        for (int64_t g = 0; g * GROUP < count; g++) {
            int64_t position = index * TILE + g * GROUP;
            if (batch_.block_size % GROUP == 0) {
                int64_t slot = table[position / batch_.block_size] * batch_.block_size +
                               position % batch_.block_size;
                tile.keys[g] = cache_.keys(slot / GROUP, item.head);
                tile.values[g] = cache_.values(slot / GROUP, item.head);
                continue;
            }
            // Smaller blocks: these positions lie in several groups, and are brought together.
            T* keys = spare + 2 * g * size;
            T* values = keys + size;
            std::memset(keys, 0, 2 * size * sizeof(T));
            for (int64_t lane = 0; lane < GROUP && g * GROUP + lane < count; lane++, position++) {
                int64_t slot = table[position / batch_.block_size] * batch_.block_size +
                               position % batch_.block_size;
                const T* from_keys = cache_.keys(slot / GROUP, item.head);
                const T* from_values = cache_.values(slot / GROUP, item.head);
                for (int64_t d = 0; d < shape_.head_dim; d++) {
                    keys[cache_.key_place(lane, d)] = from_keys[cache_.key_place(slot % GROUP, d)];
                    values[cache_.value_place(lane, d)] =
                        from_values[cache_.value_place(slot % GROUP, d)];
                }
            }
            tile.keys[g] = keys;
            tile.values[g] = values;
        }
        // The last values may be multiplied together with slots not yet written, whose bits are
        // anything: weight 0 times not-a-number would spoil the sum.
        int64_t end = round_up(count, use_tiles_ ? GROUP : U::per_unit), g = count / GROUP;
        if (count < end) {
            T* values = spare + (2 * g + 1) * size;
            if (values != tile.values[g]) std::memcpy(values, tile.values[g], size * sizeof(T));
            for (int64_t lane = count % GROUP; lane <= (end - 1) % GROUP; lane++)
                for (int64_t d = 0; d < shape_.head_dim; d++)
                    values[cache_.value_place(lane, d)] = T{};
            tile.values[g] = values;
        }
        return tile;
    }

    // One tile of keys for all rows of an item: folded into to.running, or kept. Each product is
    // made for all rows before the next begins, so that none waits for the one before.
    void attend(const Item& item, int64_t index, const Buffers& to, const Partial* kept) const {
        int64_t rows = item.queries * group_;
        int64_t newest = position(item.seq, item.first_query + item.queries - 1);
        int64_t count = newest + 1 - index * TILE < TILE ? newest + 1 - index * TILE : TILE;
        Tile<T> tile = find(item, index, count, reinterpret_cast<T*>(to.spare));
        const Partial& result = kept ? *kept : to.tile;
        int64_t step = use_tiles_ ? TILE_ROWS : MR;
        // body(first row, rows, keys that its last row sees) for blocks of rows that see any.
        auto for_blocks = [&](const auto& body) {
            for (int64_t row = 0; row < rows; row += step) {
                int64_t block = rows - row < step ? rows - row : step;
                int64_t high = seen(item, (row + block - 1) / group_, index);
                if (high > 0) body(row, int(block), high);
            }
        };
        for_blocks([&](int64_t row, int block, int64_t high) {
            score_rows(block, to.queries + row * units_, tile, to.scores + row * TILE, high);
        });
        for (int64_t query = 0, row = 0; query < item.queries; query++) {
            int64_t end = seen(item, query, index);
            int64_t low = shape_.window ? seen(item, query, index, shape_.window) : 0;
            for (int64_t g = 0; g < group_; g++, row++)
                if (end > 0 && low < TILE)
                    soften<U>(to.scores + row * TILE, low, end, shape_, result.maxima + row,
                              result.sums + row);
                else
                    result.maxima[row] = -INFINITY;
        }
        for_blocks([&](int64_t row, int block, int64_t high) {
            mix_rows(block, to.scores + row * TILE, tile, result.out + row * out_floats_, high);
        });
        if (!kept) fold(to.running, to.tile, rows, out_floats_);
    }

    void score_rows(int rows, const float* queries, const Tile<T>& tile, float* scores,
                    int64_t high) const {
#if HAS_TILES
        if constexpr (U::per_unit == 2)
            if (use_tiles_)
                return TileProducts::score(queries, units_, tile, scores, depth_,
                                           round_up(high, GROUP) / GROUP);
#endif
        score<U>(rows, queries, units_, tile, scores, depth_, round_up(high, W) / W);
    }

    void mix_rows(int rows, const float* weights, const Tile<T>& tile, float* out,
                  int64_t high) const {
#if HAS_TILES
        if constexpr (U::per_unit == 2)
            if (use_tiles_)
                return TileProducts::mix(weights, tile, out_floats_, out,
                                         round_up(high, GROUP) / GROUP);
#endif
        mix<U>(rows, weights, tile, out_floats_, out, round_up(high, U::per_unit) / U::per_unit);
    }

    // How many keys of the tile are not after a query's position less `back`; may be negative.
    int64_t seen(const Item& item, int64_t query, int64_t tile, int64_t back = 0) const {
        int64_t count = position(item.seq, item.first_query + query) + 1 - back - tile * TILE;
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
    Cache<T> cache_;
    int64_t threads_, group_, depth_, units_, out_floats_;
    bool use_tiles_;
    std::vector<Item> items_;
    std::vector<Part> parts_;
    float* kept_ = nullptr;
    std::unique_ptr<std::atomic<int64_t>[]> finished_;
};

template <class T>
void attention(const AttentionBatch& batch, const AttentionShape& shape, T* out, const T* q,
               T* cache, int64_t threads) {
    Attention<T>(batch, shape, out, q, cache, threads).run();
}

}  // namespace
