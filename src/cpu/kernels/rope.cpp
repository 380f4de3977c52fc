// Between the QKV projection and attention: per head of q, k and v an optional RMSNorm over head_dim, then rotate-half
// RoPE of q and k (Su et al. 2021, as in Llama: pairs i, i + rotary_dim / 2) in place in qkv; then k and v are narrowed
// into the cache at slot_mapping (-1: nowhere), to int8 with a scale for each head of a token. The unit of work is one
// head of one token. Called by CpuBackend::qk_norm_rope_store_kv.
#include "cpu/kernels/functions.h"
#include "cpu/kernels/norm_row.h"
#include "cpu/kernels/round_int8.h"

namespace infinilm::cpu::INFINILM_ISA {

// from, to: [2 * half], may be the same; cos_sin: [2 * half]: cosines, then sines.
static void rotate(const float* from, float* to, const float* cos_sin, int64_t half) {
    const float *cosine = cos_sin, *sine = cos_sin + half;
    int64_t i = 0;
    for (; i + width <= half; i += width) {
        const vec a = load(from + i), b = load(from + half + i), c = load(cosine + i), s = load(sine + i);
        store(to + i, a * c - b * s);
        store(to + half + i, b * c + a * s);
    }
    if (i < half) {
        const int left = (int)(half - i);
        const vec a = load_partial(from + i, left), b = load_partial(from + half + i, left);
        const vec c = load_partial(cosine + i, left), s = load_partial(sine + i, left);
        store_partial(to + i, a * c - b * s, left);
        store_partial(to + half + i, b * c + a * s, left);
    }
}

// cache: [head_dim] of one slot; scale: of int8, else null
static void store_head(const float* x, int8_t* cache, float* scale, int head_dim) {
    Int8Rounding rounding;
    for_vectors(head_dim, [&](int64_t d, int count) { rounding.see(load_partial(x + d, count)); });
    *scale = rounding.scale();
    for_vectors(head_dim, [&](int64_t d, int count) {
        const bvec bytes = __builtin_convertvector(rounding.round(load_partial(x + d, count)), bvec);
        memcpy(cache + d, &bytes, (size_t)count);
    });
}
template <class E>
static void store_head(const float* x, E* cache, float*, int head_dim) {
    int d = 0;
    for (; d + width <= head_dim; d += width) store(cache + d, load(x + d));
    if (d < head_dim) store_partial(cache + d, load_partial(x + d, head_dim - d), head_dim - d);
}

static void normalise(float* x, const void* weight, const RopeStoreArgs& a) {
    const float scale = rms_scale(sum_squares<false>(x, nullptr, a.head_dim), a.head_dim, a.eps);
    visit_element(a.norm_element, [&](auto w) { scale_row(x, scale, (const decltype(w)*)weight, x, a.head_dim); });
}

static void rope_head(const RopeStoreArgs& a, int64_t token, int head) {
    float* x = a.qkv + token * a.qkv_stride + (int64_t)head * a.head_dim;  // [head_dim]
    const int value_begin = a.num_heads + a.num_kv_heads;
    const void* const weight = head < a.num_heads ? a.q_norm : head < value_begin ? a.k_norm : a.v_norm;
    if (weight) normalise(x, weight, a);
    if (head < value_begin) {
        const float* const table = head < a.num_heads ? a.q_cos_sin : a.cos_sin;
        const float* const from = a.q_turned && head < a.num_heads
                                      ? a.q_turned + token * a.q_turned_stride + head * a.q_turned_head_stride
                                      : x;
        if (a.rotary_dim && table) rotate(from, x, table + token * a.rotary_dim, a.rotary_dim / 2);
    }
    if (head < a.num_heads || !a.slot_mapping) return;
    const int64_t slot = a.slot_mapping[token];
    if (slot < 0) return;
    const bool is_key = head < value_begin;
    const int kv_head = head - (is_key ? a.num_heads : value_begin);
    const int64_t block = slot / a.block_size, offset = slot % a.block_size;
    const int64_t row = (block * a.num_kv_heads + kv_head) * a.block_size + offset;  // of the cache
    float* const scales = is_key ? a.k_scales : a.v_scales;
    visit_cache_element(a.cache_element, [&](auto e) {
        store_head(x, (decltype(e)*)(is_key ? a.k_cache : a.v_cache) + row * a.head_dim, scales ? scales + row : scales,
                   a.head_dim);
    });
}

void rope_store(const RopeStoreArgs& args, Share share) {
    const int heads = args.num_heads + (args.v_cache ? 2 : 1) * args.num_kv_heads;
    const int64_t units = args.num_tokens * heads;
    const int64_t begin = units * share.index / share.count, end = units * (share.index + 1) / share.count;
    for (int64_t unit = begin; unit < end; ++unit) rope_head(args, unit / heads, (int)(unit % heads));
}

}  // namespace infinilm::cpu::INFINILM_ISA
