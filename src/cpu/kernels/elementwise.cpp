// Embedding lookup and silu(gate) * up. Both write each element once, so any split over the shares gives the same
// bits. Called by CpuBackend::embedding and silu_mul.
#include "cpu/kernels/functions.h"

namespace infinilm::cpu::INFINILM_ISA {

template <class E>
static void widen_row(const E* in, float* out, int64_t n) {
    int64_t i = 0;
    for (; i + width <= n; i += width) store(out + i, load(in + i));
    if (i < n) store_partial(out + i, load_partial(in + i, (int)(n - i)), (int)(n - i));
}

void embedding(const EmbeddingArgs& args, Share share) {
    const int64_t begin = args.num_tokens * share.index / share.count;
    const int64_t end = args.num_tokens * (share.index + 1) / share.count;
    visit_element(args.element, [&](auto e) {
        for (int64_t t = begin; t < end; ++t) {
            const int64_t row = args.ids[t] - args.first_id;
            float* out = args.out + t * args.out_stride;  // [hidden_size]
            if (row >= 0 && row < args.num_rows)
                widen_row((const decltype(e)*)args.table + row * args.table_stride, out, args.hidden_size);
            else
                for (int64_t i = 0; i < args.hidden_size; ++i) out[i] = 0;
        }
    });
}

static void silu_mul_row(const float* gate, const float* up, float* out, int64_t n) {
    int64_t i = 0;
    for (; i + width <= n; i += width) store(out + i, silu(load(gate + i)) * load(up + i));
    if (i < n) {
        const int left = (int)(n - i);
        store_partial(out + i, silu(load_partial(gate + i, left)) * load_partial(up + i, left), left);
    }
}

void silu_mul(const SiluMulArgs& args, Share share) {
    constexpr int64_t columns = 512;  // of one unit of work: a single token is still split over the shares
    const int64_t per_row = (args.intermediate_size + columns - 1) / columns, units = args.num_tokens * per_row;
    const int64_t begin = units * share.index / share.count, end = units * (share.index + 1) / share.count;
    for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t t = unit / per_row, first = unit % per_row * columns;
        const int64_t n = args.intermediate_size - first < columns ? args.intermediate_size - first : columns;
        const float* gate = args.gate_up + t * args.gate_up_stride + first;  // [n]
        silu_mul_row(gate, gate + args.intermediate_size, args.out + t * args.out_stride + first, n);
    }
}

}  // namespace infinilm::cpu::INFINILM_ISA
