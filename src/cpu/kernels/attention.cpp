// Attention by products of float32, of a cache of any dtype. Called by CpuBackend::paged_attention.
#include "cpu/kernels/attention.h"

namespace infinilm::cpu::INFINILM_ISA {

size_t attention_scratch_bytes(const CpuAttentionArgs& args) { return Workspace::bytes(args); }

size_t attention_shared_scratch_bytes(const CpuAttentionArgs& args) {
    Cursor seq;
    seq.start(args, 1);
    while (seq.next(args)) {
    }
    return (size_t)(seq.partial_end * partial_stride(args)) * sizeof(float);
}

size_t attention_most_shared_scratch_bytes(const CpuAttentionArgs& args, int64_t num_tokens, int64_t max_context_len) {
    const int64_t num_chunks = (max_context_len + chunk_keys - 1) / chunk_keys;
    if (num_chunks <= 1) return 0;  // nothing to split
    const int64_t partials = smaller(num_tokens * args.num_heads * num_chunks, max_partials);
    return (size_t)(partials * partial_stride(args)) * sizeof(float);
}

void attention(const CpuAttentionArgs& args, Share share) {
    visit_cache_element(args.cache_type, [&](auto element) { attend_items<Floats, decltype(element)>(args, share); });
}

void attention_merge(const CpuAttentionArgs& args, Share share) {
    const int64_t dim = padded_dim(args);
    Cursor seq;
    seq.start(args, share.count);
    int64_t count = 0;  // of (token, head) rows seen so far: dealt to the shares in turn
    while (seq.next(args)) {
        if (!seq.split) continue;
        for (int64_t row = 0; row < seq.num_queries * args.num_heads; ++row) {
            if (count++ % share.count != share.index) continue;
            const int64_t query = row / args.num_heads, head = row % args.num_heads;
            const Interval chunks = visible_chunks(args, seq, seq.context - seq.num_queries + query);
            const Results total = partial_row(seq.partial(args, query, head, chunks.begin), dim);
            for (int64_t chunk = chunks.begin + 1; chunk < chunks.end; ++chunk)
                merge(total, partial_row(seq.partial(args, query, head, chunk), dim), dim);
            write_row(args, total, head,
                      (float*)args.out + (seq.first_token + query) * args.out_stride + head * args.value_dim);
        }
    }
}

}  // namespace infinilm::cpu::INFINILM_ISA
