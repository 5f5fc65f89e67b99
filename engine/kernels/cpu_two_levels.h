// Weights with two levels of scales (QQQ): code times the group's scale, rounded, is an 8-bit
// integer, and a whole row of these has one scale.
//
// A group has no more than 16 such integers an output: they are computed once, and the codes are
// looked up in that table 64 at a time. What comes out is a pair of blocks as an 8-bit weight with
// one group has it, in the order of 4-bit codes.
#pragma once

#include "cpu_quantized_inputs.h"

#if VECTOR_BYTES == 64 && defined(__AVX512VBMI__)
#define HAS_TWO_LEVELS 1

namespace {

// The integers of one block, 16 bytes a code, 128 above their value.
inline void wide_integers(const QuantizedCall& call, const uint8_t* record, int block,
                          uint8_t* table) {
    vf scales = load_scales(call, record, block);
    auto put = [&](int code, vi integer) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(table + code * BLOCK),
                         _mm512_cvtepi32_epi8((__m512i)(integer + 128)));
    };
    put(8, vi{});
    for (int k = 1; k <= 8; k++) {
        vi integer = (vi)_mm512_cvtps_epi32((__m512)(scales * float(k)));
        put(8 - k, integer > 128 ? vi{} - 128 : -integer);
        if (k < 8) put(8 + k, integer > 127 ? vi{} + 127 : integer);
    }
}

// All groups of a pair of blocks -> [packed inputs / 4, 32] operands of unsigned bytes.
inline void unpack_two_levels(const QuantizedCall& call, const RecordLayout& layout,
                              const uint8_t* record, uint8_t* to) {
    alignas(64) uint8_t tables[PAIR][16 * BLOCK];
    // The lane of each byte, to which a code's 4 bits are joined: a place in the table.
    alignas(64) uint8_t lane_numbers[64];
    for (int i = 0; i < 64; i++) lane_numbers[i] = uint8_t(i / 4);
    const __m512i lanes = _mm512_load_si512(lane_numbers), upper = _mm512_set1_epi8(char(0xf0));
    for (int64_t g = 0; g < call.groups; g++, record += layout.size) {
        __m512i table[PAIR][4];
        for (int b = 0; b < PAIR; b++) {
            wide_integers(call, record, b, tables[b]);
            for (int i = 0; i < 4; i++) table[b][i] = _mm512_load_si512(tables[b] + 64 * i);
        }
        const uint8_t* line = record + layout.codes;
        for (int64_t c = 0; c < call.group_size; c += 8, line += LINE)
            for (int b = 0; b < PAIR; b++) {
                __m512i codes = _mm512_loadu_si512(line + b * 64);
                prefetch_page_ahead(line + b * 64);
                for (int k = 0; k < 2; k++) {
                    __m512i shifted = k ? codes : _mm512_slli_epi32(codes, 4);
                    __m512i place = _mm512_or_si512(_mm512_and_si512(shifted, upper), lanes);
                    __m512i low = _mm512_permutex2var_epi8(table[b][0], place, table[b][1]);
                    __m512i high = _mm512_permutex2var_epi8(table[b][2], place, table[b][3]);
                    __mmask64 is_high = _mm512_movepi8_mask(place);
                    _mm512_storeu_si512(to + k * LINE + b * 64,
                                        _mm512_mask_blend_epi8(is_high, low, high));
                }
                if (b == PAIR - 1) to += 2 * LINE;
            }
    }
}

}  // namespace
#else
#define HAS_TWO_LEVELS 0
#endif
