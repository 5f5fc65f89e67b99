// Quantized linear layers: a translation unit of its own, which compiles beside cpu_kernels.cpp.

#include "cpu_quantized_dot.h"
#include "cpu_quantized_tiles.h"

namespace {

// body(first, last) for shares of all pairs of blocks.
template <class Body>
void for_pairs(const QuantizedCall& call, int64_t threads, const Body& body) {
    int64_t pairs = (call.linear.outputs + PAIR_OUTPUTS - 1) / PAIR_OUTPUTS;
    int64_t share = round_up(pairs / (16 * threads) + 1, 2);
    parallel_for((pairs + share - 1) / share, threads, [&](int64_t i) {
        int64_t first = i * share;
#if HAS_TILES
        FlushedSubnormals flushed;  // as tiles do it, with and without them
#endif
        body(first, first + share < pairs ? first + share : pairs);
    });
}

// Integer sums are exact with and without tiles, which pay from this many rows on (measured).
constexpr int64_t WORTH_TILES = 8;

template <class U>
bool takes_tiles(const QuantizedCall& call) {
    return may_use_tiles() && (U::INPUTS_EACH == 2 || call.linear.rows >= WORTH_TILES);
}

template <class U, int BITS>
void quantized_linear(const QuantizedCall& call, int64_t threads) {
#if HAS_TILES
    if constexpr (U::INPUTS_EACH == 2)
        if (may_use_tiles() && call.linear.rows <= FEW_ROWS<BITS>) {
            const Inputs in = prepare<FloatOperands, BITS>(call, threads);
            return for_pairs(call, threads, [&](int64_t first, int64_t last) {
                for (; first < last; first++) tile_order_pair<BITS>(call, in, first);
            });
        }
#endif
    const Inputs in = prepare<U, BITS>(call, threads);
    for_pairs(call, threads, [&](int64_t first, int64_t last) {
#if HAS_TILES
        if (takes_tiles<U>(call)) return TilePairs<U, BITS>(call, in).run(first, last);
#endif
        dot_pairs<U, BITS>(call, in, first, last);
    });
}

#if HAS_TWO_LEVELS
void two_level_linear(const QuantizedCall& call, int64_t threads) {
    QuantizedCall whole = call;
    whole.group_size = packed_inputs(call);
    whole.groups = 1;
    whole.bits = 8;
    whole.scale_type = SCALE_FLOAT32;
    const Inputs in = prepare<ByteOperands, 4>(whole, threads);
    for_pairs(call, threads, [&](int64_t first, int64_t last) {
#if HAS_TILES
        if (takes_tiles<ByteOperands>(call))
            return TilePairs<ByteOperands, 8>(whole, in, &call).run(first, last);
#endif
        dot_two_levels(call, whole, in, first, last);
    });
}
#endif

}  // namespace

#pragma GCC visibility push(default)
extern "C" {
void pack_codes(const QuantizedCall* call, uint8_t* to, const uint8_t* codes, int64_t lift,
                int64_t threads) {
    pack_codes(*call, to, codes, lift, threads);
}
int64_t multiplies_two_levels() { return HAS_TWO_LEVELS; }
void quantized_linear(const QuantizedCall* call, int64_t threads) {
#if HAS_TWO_LEVELS
    if (call->channel_scales) return two_level_linear(*call, threads);
#endif
    if (call->int8_activations)
        call->bits == 4 ? quantized_linear<ByteOperands, 4>(*call, threads)
                        : quantized_linear<ByteOperands, 8>(*call, threads);
    else
        call->bits == 4 ? quantized_linear<PlainOperands, 4>(*call, threads)
                        : quantized_linear<PlainOperands, 8>(*call, threads);
}
}
#pragma GCC visibility pop
