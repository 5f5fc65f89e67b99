// Quantized weights as the kernels read them: codes, scales and zeros in one stream.
//
// Outputs are taken in pairs of blocks, 32 side by side, as in cpu_linear.h. A record holds what
// one group of inputs has for them: scales [32], zeros [32] (if the weight has any), then lines of
// 128 bytes of codes. A line gives each output a lane of 32 bits, which is 8 codes of 4 bits or 4
// of 8 bits. Within a lane the codes are dealt to both halves in turn, so that a shift brings two
// neighbours into the lower bits of the two halves: a pair of bfloat16 operands. Taken as bytes,
// the same lane is one or two operands of the integer dot product, with its inputs in an order to
// which the 8-bit activations are brought when they are rounded. So one layout serves products
// with bfloat16 and with 8-bit activations, for one row and for a whole prompt.
//
// Records of a pair lie in the order of their groups, and pairs in the order of their outputs: a
// thread reads one stream.
#pragma once

#include "cpu_linear.h"

constexpr int64_t PAIR_OUTPUTS = PAIR * BLOCK;
constexpr int VECTORS = PAIR_OUTPUTS / W;   // that hold a lane of each output of a pair
constexpr int64_t LINE = PAIR_OUTPUTS * 4;  // bytes of such lanes

enum ScaleType : int64_t { SCALE_BFLOAT16, SCALE_FLOAT16, SCALE_FLOAT32 };

struct QuantizedCall {
    LinearCall linear;       // its `weight` points to records
    const int32_t* columns;  // the input that each packed one is, -1: none; null: in order
    int64_t bits;            // 4 or 8
    int64_t group_size;      // inputs of a group in the records
    int64_t groups;
    int64_t scale_type;
    int64_t has_zeros;  // else each zero is the middle code
    int64_t int8_activations;
    const float* channel_scales;  // two levels of scales (cpu_two_levels.h); null: one
};

namespace {

// Where the parts of a record lie, in bytes.
struct RecordLayout {
    int64_t zeros, codes, size;

    explicit RecordLayout(const QuantizedCall& call)
        : zeros(PAIR_OUTPUTS * (call.scale_type == SCALE_FLOAT32 ? 4 : 2)),
          codes(zeros + (call.has_zeros ? PAIR_OUTPUTS * 2 : 0)),
          size(codes + call.group_size * PAIR_OUTPUTS * call.bits / 8) {}
};

inline int64_t packed_inputs(const QuantizedCall& call) { return call.groups * call.group_size; }

// Bits by which code k of a lane is shifted.
constexpr int lane_shift(int bits, int k) { return bits * (k / 2) + 16 * (k % 2); }

// The records of a pair of blocks.
inline const uint8_t* records_of(const QuantizedCall& call, const RecordLayout& layout,
                                 int64_t pair) {
    return reinterpret_cast<const uint8_t*>(call.linear.weight) + pair * call.groups * layout.size;
}

// Row-major codes [outputs, inputs] -> lines; `lift` is added to each code.
inline void pack_codes(const QuantizedCall& call, uint8_t* to, const uint8_t* codes, int64_t lift,
                       int64_t threads) {
    const RecordLayout layout(call);
    int64_t outputs = call.linear.outputs, inputs = call.linear.inputs, half = outputs / 2;
    int64_t packed = packed_inputs(call), per_lane = 32 / call.bits;
    parallel_rows(outputs, packed, threads, [=, &call](int64_t n) {
        int64_t place = n;
        if (call.linear.gated) {
            int64_t i = n % half;
            place = (i / BLOCK * PAIR + n / half) * BLOCK + i % BLOCK;
        }
        uint8_t* record = to + place / PAIR_OUTPUTS * call.groups * layout.size;
        for (int64_t c = 0; c < packed; c += per_lane) {
            uint32_t lane = 0;
            for (int64_t k = 0; k < per_lane; k++) {
                int64_t column = call.columns ? call.columns[c + k] : c + k;
                if (column < 0 || column >= inputs) continue;
                uint32_t code = codes[n * inputs + column] + lift;
                lane |= code << lane_shift(int(call.bits), int(k));
            }
            int64_t line = c % call.group_size / per_lane * PAIR_OUTPUTS + place % PAIR_OUTPUTS;
            std::memcpy(record + c / call.group_size * layout.size + layout.codes + line * 4,
                        &lane, sizeof lane);
        }
    });
}

// Scales of vector v of a record's outputs.
inline vf load_scales(const QuantizedCall& call, const uint8_t* record, int v) {
    if (call.scale_type == SCALE_FLOAT32)
        return load(reinterpret_cast<const float*>(record) + v * W);
    const bf16* narrow = reinterpret_cast<const bf16*>(record) + v * W;
    if (call.scale_type == SCALE_BFLOAT16) return load(narrow);
#if VECTOR_BYTES == 64
    return (vf)_mm512_cvtph_ps((__m256i)read<vh>(narrow));
#else
    // Positive and finite: a shift, and the exponent's other bias made good.
    return (vf)(__builtin_convertvector(read<vh>(narrow), vu) << 13) * 0x1p112f;
#endif
}

inline vi load_zeros(const RecordLayout& layout, const uint8_t* record, int v) {
    const uint8_t* zeros = record + layout.zeros + v * W * 2;
#if VECTOR_BYTES == 64
    return (vi)_mm512_cvtepu16_epi32((__m256i)read<vh>(zeros));
#else
    return __builtin_convertvector(read<vh>(zeros), vi);
#endif
}

// What the products of one kind are made of. An operand is a lane of 32 bits an output; `x` is
// the input's counterpart, the same 32 bits in every lane. A line holds PER_LINE<BITS> operands.
struct FloatOperands {
    using Sum = vf;
    static constexpr int INPUTS_EACH = 1;
    template <int BITS>
    static constexpr int PER_LINE = BITS ? 32 / BITS : 1;

    template <int BITS>
    static vu get(vu line, int k) {
        constexpr int middle = 1 << (BITS - 1);
#if VECTOR_BYTES == 64
        if constexpr (BITS == 4) {
            // The lookup takes the lower 4 bits of each lane.
            const __m512 table =
                _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
            return (vu)_mm512_permutexvar_ps((__m512i)(line >> lane_shift(BITS, k)), table);
        }
#endif
        vu code = (line >> lane_shift(BITS, k)) & ((1u << BITS) - 1);
        return (vu)__builtin_convertvector((vi)code - middle, vf);
    }
    static vf multiply_add(vf sum, vu x, vu weight) { return sum + (vf)x * (vf)weight; }
};

#if HAS_BF16_DOT
struct PairOperands {
    using Sum = vf;
    static constexpr int INPUTS_EACH = 2;
    template <int BITS>
    static constexpr int PER_LINE = BITS ? 16 / BITS : 1;

    template <int BITS>
    static vu get(vu line, int k) {
        if constexpr (BITS == 4) {
            // The lookup takes 5 bits of each half, of which the upper one is another code's.
            alignas(64) static constexpr uint16_t codes[32] = {
                0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,   // -8 to -1
                0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,   // 0 to 7
                0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
                0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
            __m512i table = _mm512_load_si512(codes);
            return (vu)_mm512_permutexvar_epi16((__m512i)(line >> (4 * k)), table);
        } else {
            // Whole numbers below 2^8 are exact in the upper half of a float.
            vu shifted = line >> (8 * k);
            vf even = __builtin_convertvector((vi)(shifted & 0xff), vf) - 128.0f;
            vf odd = __builtin_convertvector((vi)(shifted >> 16 & 0xff), vf) - 128.0f;
            return ((vu)odd & 0xffff0000u) | (vu)even >> 16;
        }
    }
    static vf multiply_add(vf sum, vu x, vu weight) {
        return PairUnit::multiply_add(sum, (vf)x, (vf)weight);
    }
};
using PlainOperands = PairOperands;
#else
using PlainOperands = FloatOperands;
#endif

// Four unsigned codes by four signed inputs.
struct ByteOperands {
    using Sum = vi;
    static constexpr int INPUTS_EACH = 4;
    template <int BITS>
    static constexpr int PER_LINE = BITS == 4 ? 2 : 1;

    template <int BITS>
    static vu get(vu line, int k) {
        return BITS == 4 ? (line >> (4 * k)) & 0x0f0f0f0fu : line;
    }
    // Where the k-th input of a lane stands among the bytes of its operands.
    template <int BITS>
    static constexpr int place_of(int k) {
        int bit = lane_shift(BITS, k);
        return bit % 8 + bit / 8;
    }
    static vi multiply_add(vi sum, vu x, vu weight) {
#if VECTOR_BYTES == 64 && defined(__AVX512VNNI__)
        return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weight, (__m512i)x);
#elif VECTOR_BYTES == 32 && defined(__AVXVNNI__)
        return (vi)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)weight, (__m256i)x);
#elif defined(__SSE2__)
        // Bytes to 16 bits, even ones and odd ones, whose products are added in pairs.
        typedef int16_t vs __attribute__((vector_size(VECTOR_BYTES)));
        vs even = (vs)(weight & 0x00ff00ffu), odd = (vs)(weight >> 8 & 0x00ff00ffu);
        vs x_even = ((vs)x << 8) >> 8, x_odd = (vs)x >> 8;
#if VECTOR_BYTES == 64
        return sum + (vi)_mm512_madd_epi16((__m512i)even, (__m512i)x_even) +
               (vi)_mm512_madd_epi16((__m512i)odd, (__m512i)x_odd);
#elif VECTOR_BYTES == 32
        return sum + (vi)_mm256_madd_epi16((__m256i)even, (__m256i)x_even) +
               (vi)_mm256_madd_epi16((__m256i)odd, (__m256i)x_odd);
#else
        return sum + (vi)_mm_madd_epi16((__m128i)even, (__m128i)x_even) +
               (vi)_mm_madd_epi16((__m128i)odd, (__m128i)x_odd);
#endif
#else
        for (int i = 0; i < 4; i++)
            sum += (vi)(weight >> (8 * i) & 0xff) * (((vi)x << (24 - 8 * i)) >> 24);
        return sum;
#endif
    }
};

}  // namespace
