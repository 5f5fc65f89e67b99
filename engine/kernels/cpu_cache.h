// Layout of the KV cache, chosen so that attention multiplies straight out of it.
//
// Slots form groups of 16. A group holds, per key/value head, its 16 keys transposed and its 16
// values, both in units of 32 bits: a float, or, where the processor multiplies pairs of bfloat16,
// two neighbours along the dimension that the product sums over (head dims for keys, slots for
// values). Shape [groups, 2 M, 16 * padded head dim], key heads before value heads; padding is zero.
#pragma once

#include "cpu_vector.h"

constexpr int64_t GROUP = 16;  // slots
constexpr int64_t MAX_HEAD_DIM = 512;

inline int64_t round_up(int64_t x, int64_t multiple) {
    return (x + multiple - 1) / multiple * multiple;
}

struct FloatUnit {
    static constexpr int64_t per_unit = 1;
    template <class T>
    static inline vf load_units(const T* p) {
        return load(p);
    }
    static inline vf multiply_add(vf c, vf a, vf b) { return a * b + c; }
};

template <class T>
struct UnitOf {
    typedef FloatUnit type;
};

#if HAS_BF16_DOT
struct PairUnit {
    static constexpr int64_t per_unit = 2;
    static inline vf load_units(const bf16* p) { return read<vf>(p); }
    static inline vf multiply_add(vf c, vf a, vf b) {
        return (vf)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
    }
};

template <>
struct UnitOf<bf16> {
    typedef PairUnit type;
};
#endif

template <class T>
struct Cache {
    static constexpr int64_t per_unit = UnitOf<T>::type::per_unit;

    T* data;
    int64_t num_kv_heads, head_dim;

    int64_t padded_dim() const { return round_up(head_dim, GROUP); }
    int64_t group_size() const { return GROUP * padded_dim(); }

    T* keys(int64_t group, int64_t head) const {
        return data + (group * 2 * num_kv_heads + head) * group_size();
    }
    T* values(int64_t group, int64_t head) const { return keys(group, num_kv_heads + head); }

    // Place of dimension d of a slot's key or value in its group.
    static int64_t key_place(int64_t lane, int64_t d) {
        return (d / per_unit * GROUP + lane) * per_unit + d % per_unit;
    }
    int64_t value_place(int64_t lane, int64_t d) const {
        return (lane / per_unit * padded_dim() + d) * per_unit + lane % per_unit;
    }

    void write(int64_t slot, const T* k, const T* v) const {
        int64_t group = slot / GROUP, lane = slot % GROUP;
        for (int64_t head = 0; head < num_kv_heads; head++, k += head_dim, v += head_dim) {
            T *to_keys = keys(group, head), *to_values = values(group, head);
            for (int64_t d = 0; d < head_dim; d += per_unit)
                std::memcpy(to_keys + key_place(lane, d), k + d, per_unit * sizeof(T));
            for (int64_t d = 0; d < head_dim; d++) to_values[value_place(lane, d)] = v[d];
        }
    }
};
