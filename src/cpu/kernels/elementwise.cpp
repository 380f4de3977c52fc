// Embedding lookup, activation(gate) * up, soft caps and the sum over a token's experts. They write each element once,
// so any split over the shares gives the same bits. Called by CpuBackend::embedding, act_mul, soft_cap and experts.
#include "cpu/kernels/functions.h"
#include "cpu/kernels/pack.h"
#include "cpu/kernels/read_scales.h"

namespace infinilm::cpu::INFINILM_ISA {

// The integer of quad `quad`, number j, in a lane of a group's planes.
INFINILM_INLINE int integer_at(const uint8_t* lane, int bits, int quad, int j) {
    if (bits == 8) return (int8_t)lane[quad * line_bytes + j];
    int q = 0, line = 0;
    for (int plane = 4, at = 0; plane > 0; plane /= 2)
        if (bits & plane) {
            const int per_line = 8 / plane, byte = lane[(line + quad / per_line) * line_bytes + j];
            q |= (byte >> quad % per_line * plane & ((1 << plane) - 1)) << at;
            line += plane, at += plane;
        }
    return q;
}

// As for_row, of integers.
template <class F>
INFINILM_INLINE void for_row_of_integers(const PackedWeight& weight, const char* lines, const char* scales,
                                         int64_t lane, F f) {
    const Integers integers = integers_of(weight.format);
    const ReadScales read_scales = scale_reader(weight.format);
    float scale[most_scale_groups * most_splits][panel_outputs], min[most_scale_groups * most_splits][panel_outputs];
    const int64_t groups = num_groups(weight.in_features);
    for (int64_t group = 0; group < groups; ++group) {
        const char* const from = scales + group * scale_bytes_of_group(weight.format);
        const int64_t of_read = group % most_scale_groups * integers.splits;
        if (read_scales && of_read == 0)
            read_scales(from, (int)smaller(groups - group, most_scale_groups), scale[0], min[0]);
        if (weight.format == Format::int8) scale[of_read][lane] = ((const float*)scales)[lane];
        if (weight.format == Format::int4) scale[of_read][lane] = load_partial((const Bf16*)from + lane, 1)[0];
        if (weight.format == Format::q8_0 || weight.format == Format::q4_0)
            scale[of_read][lane] = load_partial((const F16*)from + lane, 1)[0];
        const auto* const of_lane =
            (const uint8_t*)lines + group * lines_of_group(weight.format) * line_bytes + 4 * lane;
        for (int i = 0; i < group_size && group * group_size + i < weight.in_features; ++i) {
            const int q = integer_at(of_lane, integers.bits, i / 4, i % 4);
            const int64_t at = of_read + i * integers.splits / group_size;
            const float value = (float)(integers.has_values ? weight.values[q] : q - integers.offset) * scale[at][lane];
            f(group * group_size + i, integers.has_min ? value - min[at][lane] : value);
        }
    }
}

// k of an f8 row; see F8Widened.
INFINILM_INLINE float f8_at(const PackedWeight& weight, const char* lines, const char* scales, int64_t k,
                            int64_t lane) {
    const uint32_t code = ((const uint8_t*)lines)[k / 4 * line_bytes + 4 * lane + f8_place((int)(k % 4))];
    const uint32_t bits = (code & 0x80u) << 24 | (code & 0x7fu) << 20;
    float value;
    memcpy(&value, &bits, sizeof value);
    const int64_t at = f8_scales_at(scale_bytes_of_group(weight.format), k / group_size);
    return value * ((const float*)(scales + at))[lane];
}

// Calls f(k, value) for k = 0, 1, .. of one row of a packed weight: one lane of each line of its panel.
template <class F>
INFINILM_INLINE void for_row(const PackedWeight& weight, int64_t row, F f) {
    const int64_t panel = row / panel_outputs, lane = row % panel_outputs, n = weight.in_features;
    const char* const lines = (const char*)weight.panels + panel * panel_bytes(weight.format, n);
    const char* const scales = (const char*)weight.scales + panel * scale_bytes_of_panel(weight.format, n);
    for (int64_t k = 0; k < n; ++k) {
        const char* const pair = lines + k / 2 * line_bytes;
        switch (weight.format) {
            case Format::f32: f(k, ((const float*)lines)[k * panel_outputs + lane]); break;
            case Format::bf16: f(k, load_partial((const Bf16*)pair + 2 * lane + k % 2, 1)[0]); break;
            case Format::f16: f(k, load_partial((const F16*)pair + k % 2 * panel_outputs + lane, 1)[0]); break;
            case Format::f8_row:
            case Format::f8_32:
            case Format::f8_128: f(k, f8_at(weight, lines, scales, k, lane)); break;
            default: return for_row_of_integers(weight, lines, scales, lane, f);
        }
    }
}

void embedding(const EmbeddingArgs& args, Share share) {
    const int64_t begin = args.num_tokens * share.index / share.count;
    const int64_t end = args.num_tokens * (share.index + 1) / share.count;
    for (int64_t t = begin; t < end; ++t) {
        const int32_t id = args.known_ids > 0 && args.ids[t] >= args.known_ids ? 0 : args.ids[t];
        const int64_t row = id - args.first_id;
        float* const out = args.out + t * args.out_stride;  // [hidden_size]
        if (row >= 0 && row < args.num_rows)
            for_row(args.table, row, [&](int64_t k, float value) { out[k] = value * args.multiplier; });
        else
            for (int64_t k = 0; k < args.table.in_features; ++k) out[k] = 0;
    }
}

// Calls f(row, first, n) for pieces of the rows of a matrix: a single row is still split over the shares.
template <class F>
INFINILM_INLINE void for_pieces(int64_t num_rows, int64_t row_size, Share share, F f) {
    constexpr int64_t columns = 512;
    const int64_t per_row = (row_size + columns - 1) / columns, units = num_rows * per_row;
    const int64_t begin = units * share.index / share.count, end = units * (share.index + 1) / share.count;
    for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t first = unit % per_row * columns;
        f(unit / per_row, first, smaller(row_size - first, columns));
    }
}

static void act_mul_piece(const ActMulArgs& args, const float* gate, const float* up, float* out, int64_t n) {
    const Activation activation = args.activation;
    int64_t i = 0;
    if (activation == Activation::xielu) {
        for_vectors(n, [&](int64_t i, int count) {
            const vec x = xielu(load_partial(gate + i, count), args.alpha_p, args.alpha_n);
            store_partial(out + i, up ? x * load_partial(up + i, count) : x, count);
        });
        return;
    }
    if (activation == Activation::clamped_silu) {
        for_vectors(n, [&](int64_t i, int count) {
            const vec x = clamped_silu(load_partial(gate + i, count), load_partial(up + i, count), args.limit);
            store_partial(out + i, x, count);
        });
        return;
    }
    if (is_gate(activation) && up) {
        for_vectors(n, [&](int64_t i, int count) {
            const vec x = gated(activation, load_partial(gate + i, count), load_partial(up + i, count));
            store_partial(out + i, x, count);
        });
        return;
    }
    if (!up) {
        for_vectors(n, [&](int64_t i, int count) {
            store_partial(out + i, activate(activation, load_partial(gate + i, count)), count);
        });
        return;
    }
    for (; i + width <= n; i += width) store(out + i, act_mul(activation, load(gate + i), load(up + i)));
    if (i < n) {
        const int left = (int)(n - i);
        store_partial(out + i, act_mul(activation, load_partial(gate + i, left), load_partial(up + i, left)), left);
    }
}

// Elements [first, first + n) of a row, each group of which one element of the gate multiplies.
static void gate_groups(const ActMulArgs& args, const float* gate, const float* up, float* out, int64_t first,
                        int64_t n) {
    for (int64_t begin = first, end; begin < first + n; begin = end) {
        end = smaller((begin / args.group + 1) * args.group, first + n);
        const vec shared = set1(gate[begin / args.group]);
        for_vectors(end - begin, [&](int64_t i, int count) {
            store_partial(out + begin + i, gated(args.activation, shared, load_partial(up + begin + i, count)), count);
        });
    }
}

void act_mul(const ActMulArgs& args, Share share) {
    if (args.group > 1)
        return for_pieces(args.num_tokens, args.intermediate_size, share, [&](int64_t token, int64_t first, int64_t n) {
            const float* gate = (const float*)args.gate + token * args.gate_stride;
            const float* up = (const float*)args.up + token * args.up_stride;
            gate_groups(args, gate, up, (float*)args.out + token * args.out_stride, first, n);
        });
    for_pieces(args.num_tokens, args.intermediate_size, share, [&](int64_t token, int64_t first, int64_t n) {
        const float* gate = (const float*)args.gate + token * args.gate_stride + first;  // [n]
        const float* up = args.up ? (const float*)args.up + token * args.up_stride + first : nullptr;
        act_mul_piece(args, gate, up, (float*)args.out + token * args.out_stride + first, n);
    });
}

void soft_cap(const SoftCapArgs& args, Share share) {
    for_pieces(args.num_rows, args.n, share, [&](int64_t row, int64_t first, int64_t n) {
        float* const x = args.x + row * args.x_stride + first;  // [n]
        int64_t i = 0;
        for (; i + width <= n; i += width) store(x + i, soft_cap(load(x + i), args.cap));
        if (i < n) store_partial(x + i, soft_cap(load_partial(x + i, (int)(n - i)), args.cap), (int)(n - i));
    });
}

void combine(const CombineArgs& args, Share share) {
    for_pieces(args.num_tokens, args.hidden_size, share, [&](int64_t t, int64_t first, int64_t n) {
        const int32_t* const part_of = args.part_of + t * args.top_k;
        const float* const weights = args.weights ? args.weights + t * args.weights_stride : nullptr;
        const vec gate =
            args.shared_gate ? 1.0f / (1.0f + exp(-set1(args.shared_gate[t * args.shared_gate_stride]))) : set1(1);
        for (int64_t i = first; i < first + n; i += width) {
            const int count = (int)smaller(first + n - i, width);
            const auto at = [&](const float* row)
                                __attribute__((always_inline)) { return load_partial(row + i, count); };
            vec sum = zero();
            for (int64_t k = 0; k < args.top_k; ++k)
                sum = fma(set1(weights ? weights[k] : 1), at((const float*)args.parts + part_of[k] * args.parts_stride),
                          sum);
            if (args.shared) sum = fma(gate, at((const float*)args.shared + t * args.shared_stride), sum);
            if (args.residual) sum += at((const float*)args.residual + t * args.residual_stride);
            store_partial((float*)args.out + t * args.out_stride + i, sum, count);
        }
    });
}

}  // namespace infinilm::cpu::INFINILM_ISA
