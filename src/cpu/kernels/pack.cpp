// Rows of a checkpoint's tensors to packed panels (pack.h): from any stored element to any format, 32 k of 16 rows at a
// time. A weight that keeps its 16 bits keeps its bits; others go by way of float32.
#include "cpu/kernels/pack.h"

#include "cpu/kernels/functions.h"
#include "numerics/quantise.h"

namespace infinilm::cpu::INFINILM_ISA {

namespace {

constexpr int parts = panel_outputs / width;

// ---- 32 bits of each of 16 rows, turned to lines ----

// Exchanges the bit `bit` of the row's number with that of the lane's.
template <int bit, int... lane>
INFINILM_INLINE void exchange(uvec (&m)[width]) {
#pragma GCC unroll 16
    for (int row = 0; row < width; ++row) {
        if (row & bit) continue;
        const uvec a = m[row], b = m[row + bit];
        m[row] = __builtin_shufflevector(a, b, (lane & bit ? width + lane - bit : lane)...);
        m[row + bit] = __builtin_shufflevector(a, b, (lane & bit ? width + lane : lane + bit)...);
    }
}
template <int... lane>
INFINILM_INLINE void transpose_lanes(uvec (&m)[width]) {
    if constexpr (width > 8) exchange<8, lane...>(m);
    if constexpr (width > 4) exchange<4, lane...>(m);
    exchange<2, lane...>(m);
    exchange<1, lane...>(m);
}
INFINILM_INLINE void transpose(uvec (&m)[width]) {
#if INFINILM_WIDTH == 16
    transpose_lanes<0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15>(m);
#elif INFINILM_WIDTH == 8
    transpose_lanes<0, 1, 2, 3, 4, 5, 6, 7>(m);
#else
    transpose_lanes<0, 1, 2, 3>(m);
#endif
}

// [16 rows][n] of 32 bits to [n][16], n a multiple of 16
INFINILM_INLINE void transpose_rows(const char* const* rows, int n, uint32_t* lines) {
    for (int first = 0; first < n; first += width)
        for (int part = 0; part < parts; ++part) {
            uvec m[width];
#pragma GCC unroll 16
            for (int r = 0; r < width; ++r) m[r] = load_uint(rows[part * width + r] + 4 * first);
            transpose(m);
#pragma GCC unroll 16
            for (int r = 0; r < width; ++r) store_uint(lines + (first + r) * panel_outputs + part * width, m[r]);
        }
}

// ---- Where rows come from ----

struct Row {
    const char* data;  // null: zeros
    Element element;
};

Row row_of(const PackArgs& args, int64_t panel, int lane) {
    int source = args.pairs ? (int)(panel % 2) : 0;
    int64_t row = (args.pairs ? panel / 2 : panel) * panel_outputs + lane;
    while (!args.pairs && source < args.num_sources && row >= args.sources[source].out_features)
        row -= args.sources[source++].out_features;
    if (source >= args.num_sources || row >= args.sources[source].out_features) return {nullptr, Element::f32};
    const PackSource& from = args.sources[source];
    return {(const char*)from.weight + row * from.weight_stride * (int64_t)element_bytes(from.element), from.element};
}

struct Panel {
    Row rows[panel_outputs];
    bool as_stored;  // in 16 bits, which stay as they are
};

// 32 k of 16 rows as float32, [32][16]
struct Floats {
    alignas(64) float k[group_size][panel_outputs];
};
void read_group(const Panel& panel, int64_t in_features, int64_t group, Floats& out) {
    alignas(64) float rows[panel_outputs][group_size];
    const char* pointers[panel_outputs];
    const int64_t begin = group * group_size, left = in_features - begin;
    for (int r = 0; r < panel_outputs; ++r) {
        pointers[r] = (const char*)rows[r];
        visit_element(panel.rows[r].element, [&](auto e) {
            using E = decltype(e);
            const E* from = (const E*)panel.rows[r].data;
            for (int k = 0; k < group_size; k += width) {
                const int64_t n = from ? left - k : 0;
                store(rows[r] + k, n >= width ? load(from + begin + k)
                                   : n > 0    ? load_partial(from + begin + k, (int)n)
                                              : zero());
            }
        });
    }
    transpose_rows(pointers, group_size, (uint32_t*)out.k);
}

// The same of rows that stay as stored: pairs, [16][16][2 of k]
struct Pairs {
    alignas(64) uint32_t pair[group_size / 2][panel_outputs];
};
void read_pairs(const Panel& panel, int64_t in_features, int64_t group, Pairs& out) {
    alignas(64) static const char nothing[2 * group_size] = {};
    alignas(64) char ends[panel_outputs][2 * group_size];
    const char* pointers[panel_outputs];
    const int64_t left = in_features - group * group_size;
    for (int r = 0; r < panel_outputs; ++r) {
        const char* const from = panel.rows[r].data;
        pointers[r] = from ? from + 2 * group * group_size : nothing;
        if (from && left < group_size) {
            memset(ends[r], 0, sizeof ends[r]);
            memcpy(ends[r], pointers[r], 2 * (size_t)left);
            pointers[r] = ends[r];
        } else if (from) {
            __builtin_prefetch(pointers[r] + 512);
        }
    }
    transpose_rows(pointers, group_size / 2, (uint32_t*)out.pair);
}

// ---- Formats ----

void write_pairs(const Pairs& pairs, Format format, char* to) {
    if (format == Format::bf16) {
        memcpy(to, pairs.pair, sizeof pairs);
        return;
    }
    for (int i = 0; i < group_size / 2; ++i)
        for (int part = 0; part < panel_outputs; part += width) {
            const uvec pair = load_uint(pairs.pair[i] + part);
            const hvec even = __builtin_convertvector(pair & 0xffffu, hvec);
            const hvec odd = __builtin_convertvector(pair >> 16, hvec);
            uint16_t* line = (uint16_t*)to + 2 * i * panel_outputs + part;
            memcpy(line, &even, sizeof even);
            memcpy(line + panel_outputs, &odd, sizeof odd);
        }
}

void write_floats(const Floats& in, Format format, char* to) {
    if (format == Format::f32) {
        memcpy(to, in.k, sizeof in);
        return;
    }
    Pairs pairs;
    for (int i = 0; i < group_size / 2; ++i)
        for (int part = 0; part < panel_outputs; part += width) {
            const vec even = load(in.k[2 * i] + part), odd = load(in.k[2 * i + 1] + part);
            const auto narrow = [&](vec v) {
                return __builtin_convertvector(format == Format::bf16 ? narrow_bf16(v) : narrow_f16(v), uvec);
            };
            store_uint(pairs.pair[i] + part, narrow(even) | narrow(odd) << 16);
        }
    write_pairs(pairs, format, to);
}

// The vector of this instruction set, as quantise.h asks for it.
struct Lanes {
    using Float = vec;
    using Int = ivec;
    static INFINILM_MEMBER vec set1(float v) { return cpu::INFINILM_ISA::set1(v); }
    static INFINILM_MEMBER vec absolute(vec v) { return as_float(as_uint(v) & 0x7fffffffu); }
    static INFINILM_MEMBER vec fma(vec a, vec b, vec c) { return cpu::INFINILM_ISA::fma(a, b, c); }
    static INFINILM_MEMBER vec bf16(vec v) { return widen_bf16(narrow_bf16(v)); }
    static INFINILM_MEMBER ivec nearest(vec v) { return (ivec)(v + 0x1.8p23f) - 0x4b400000; }  // |v| < 2^22
    static INFINILM_MEMBER vec to_float(ivec v) { return __builtin_convertvector(v, vec); }
};

// Integers of 16 rows by 32 k, to lines; four or eight k of a row are 32 bits.
void write_int8(const Floats& in, const float* scales, char* to) {
    for (int part = 0; part < panel_outputs; part += width) {
        const vec inverse = quantise::inverse_or_zero<Lanes>(load(scales + part));
        for (int quad = 0; quad < group_size / 4; ++quad) {
            uvec lanes{};
            for (int j = 0; j < 4; ++j)
                lanes |= (uvec)(quantise::int8<Lanes>(load(in.k[4 * quad + j] + part), inverse) & 255) << (8 * j);
            store_uint(to + quad * line_bytes + 4 * part, lanes);
        }
    }
}

void write_int4(const Floats& in, Bf16* scales, char* to) {
    for (int part = 0; part < panel_outputs; part += width) {
        const auto value = [&](int k) __attribute__((always_inline)) { return load(in.k[k] + part); };
        const vec scale = quantise::int4_scale<Lanes>(value);
        store(scales + part, scale);
        const vec inverse = quantise::inverse_or_zero<Lanes>(scale);
        for (int line = 0; line < group_size / 8; ++line) {
            uvec lanes{};
            for (int j = 0; j < 8; ++j) {
                const ivec q = quantise::int4<Lanes>(value(8 * line + j), inverse) + int4_offset;
                lanes |= (uvec)q << (8 * (j % 4) + 4 * (j / 4));
            }
            store_uint(to + line * line_bytes + 4 * part, lanes);
        }
    }
}

void pack_panel(const PackArgs& args, int64_t number) {
    Panel panel;
    panel.as_stored = args.format == Format::bf16 || args.format == Format::f16;
    for (int r = 0; r < panel_outputs; ++r) {
        panel.rows[r] = row_of(args, number, r);
        const Element stored = args.format == Format::bf16 ? Element::bf16 : Element::f16;
        if (panel.rows[r].data && panel.rows[r].element != stored) panel.as_stored = false;
    }
    const int64_t groups = num_groups(args.in_features);
    char* to = (char*)args.panels + number * panel_bytes(args.format, args.in_features);
    char* const scales = (char*)args.scales + number * scale_bytes_of_panel(args.format, args.in_features);
    const int64_t group_bytes = panel_bytes(args.format, group_size);
    Floats floats;
    if (args.format == Format::int8) {
        vec largest[parts] = {};
        for (int64_t group = 0; group < groups; ++group) {
            read_group(panel, args.in_features, group, floats);
            for (int k = 0; k < group_size; ++k)
                for (int part = 0; part < parts; ++part)
                    largest[part] = max(Lanes::absolute(load(floats.k[k] + part * width)), largest[part]);
        }
        for (int part = 0; part < parts; ++part)
            store((float*)scales + part * width, quantise::int8_scale<Lanes>(largest[part]));
    }
    for (int64_t group = 0; group < groups; ++group, to += group_bytes) {
        if (panel.as_stored) {
            Pairs pairs;
            read_pairs(panel, args.in_features, group, pairs);
            write_pairs(pairs, args.format, to);
            continue;
        }
        read_group(panel, args.in_features, group, floats);
        if (args.format == Format::int8)
            write_int8(floats, (const float*)scales, to);
        else if (args.format == Format::int4)
            write_int4(floats, (Bf16*)scales + group * panel_outputs, to);
        else
            write_floats(floats, args.format, to);
    }
}

}  // namespace

void pack(const PackArgs& args, Share share) {
    for (int64_t panel = args.num_panels * share.index / share.count;
         panel < args.num_panels * (share.index + 1) / share.count; ++panel)
        pack_panel(args, panel);
}

}  // namespace infinilm::cpu::INFINILM_ISA
