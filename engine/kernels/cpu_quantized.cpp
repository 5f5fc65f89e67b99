// Quantized linear layers: a translation unit of its own, which compiles beside cpu_kernels.cpp.

#include "cpu_quantized_dot.h"
#include "cpu_quantized_tiles.h"

namespace {

template <class U, int BITS>
void quantized_linear(const QuantizedCall& call, int64_t threads) {
    const Inputs in = prepare<U, BITS>(call, threads);
    int64_t pairs = (call.linear.outputs + PAIR_OUTPUTS - 1) / PAIR_OUTPUTS;
    int64_t share = round_up(pairs / (16 * threads) + 1, 2);
    parallel_for((pairs + share - 1) / share, threads, [&](int64_t i) {
        int64_t first = i * share, last = first + share < pairs ? first + share : pairs;
#if HAS_TILES
        if (may_use_tiles() && (U::INPUTS_EACH == 2 || call.linear.rows >= 8))
            return TilePairs<U, BITS>(call, in).run(first, last);
#endif
        dot_pairs<U, BITS>(call, in, first, last);
    });
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {
void pack_codes(const QuantizedCall* call, uint8_t* to, const uint8_t* codes, int64_t lift,
                int64_t threads) {
    pack_codes(*call, to, codes, lift, threads);
}
void quantized_linear(const QuantizedCall* call, int64_t threads) {
    if (call->int8_activations)
        call->bits == 4 ? quantized_linear<ByteOperands, 4>(*call, threads)
                        : quantized_linear<ByteOperands, 8>(*call, threads);
    else
        call->bits == 4 ? quantized_linear<PlainOperands, 4>(*call, threads)
                        : quantized_linear<PlainOperands, 8>(*call, threads);
}
}
#pragma GCC visibility pop
