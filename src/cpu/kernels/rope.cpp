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

// x: [head_dim], or a value; cache: the row of one slot; scale: of int8, else null
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

static void normalise(float* x, const void* weight, const CpuRopeStoreArgs& a) {
    const float scale = rms_scale(sum_squares<false>(x, nullptr, a.rope.head_dim), a.rope.head_dim, a.rope.eps);
    visit_element(a.norm_element, [&](auto w) { scale_row(x, scale, (const decltype(w)*)weight, x, a.rope.head_dim); });
}

static void rope_head(const CpuRopeStoreArgs& a, int64_t token, int head) {
    const int value_begin = a.rope.num_heads + a.rope.num_kv_heads, value = head - value_begin;
    const int size = value < 0 ? a.rope.head_dim : a.rope.value_dim;
    float* x = (float*)a.qkv + token * a.qkv_stride;  // [size]
    x += value < 0 ? (int64_t)head * size : (int64_t)value_begin * a.rope.head_dim + (int64_t)value * size;
    const void* const weight = head < a.rope.num_heads ? a.rope.q_norm
                               : head < value_begin    ? a.rope.k_norm
                                                       : a.rope.v_norm;
    if (weight) normalise(x, weight, a);
    if (head < value_begin) {
        const float* const table = head < a.rope.num_heads ? a.rope.q_cos_sin : a.rope.cos_sin;
        const float* const from =
            a.rope.q_turned && head < a.rope.num_heads
                ? (const float*)a.rope.q_turned + token * a.rope.q_turned_stride + head * a.rope.q_turned_head_stride
                : x;
        if (a.rope.rotary_dim && table) rotate(from, x, table + token * a.rope.rotary_dim, a.rope.rotary_dim / 2);
    }
    if (head < a.rope.num_heads || !a.rope.slot_mapping) return;
    const int64_t slot = a.rope.slot_mapping[token];
    if (slot < 0) return;
    const bool is_key = head < value_begin;
    const int kv_head = head - (is_key ? a.rope.num_heads : value_begin);
    const int64_t block = slot / a.rope.block_size, offset = slot % a.rope.block_size;
    const int64_t row = (block * a.rope.num_kv_heads + kv_head) * a.rope.block_size + offset;  // of the cache
    float* const scales = is_key ? a.rope.k_scales : a.rope.v_scales;
    visit_cache_element(a.rope.cache_type, [&](auto e) {
        store_head(x, (decltype(e)*)(is_key ? a.rope.k_cache : a.rope.v_cache) + row * a.rope.head_dim,
                   scales ? scales + row : scales, size);
    });
}

void rope_store(const CpuRopeStoreArgs& args, Share share) {
    const int heads = args.rope.num_heads + (args.rope.v_cache ? 2 : 1) * args.rope.num_kv_heads;
    const int64_t units = (int64_t)args.num_tokens * heads;
    const int64_t begin = units * share.index / share.count, end = units * (share.index + 1) / share.count;
    for (int64_t unit = begin; unit < end; ++unit) rope_head(args, unit / heads, (int)(unit % heads));
}

}  // namespace infinilm::cpu::INFINILM_ISA
