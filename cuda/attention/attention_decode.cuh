// Attention of the sequences with few rows (query_len * group <= attention_decode_rows): decode. The four warps of a
// block share a chunk of 128 keys: each has the scores of 32 of them, for a tile of 16 rows, then all weights and a
// quarter of the columns of the values. All of a chunk is on its way at once, and the next chunk's keys while the
// values are added.
//
// Grid (items * num_kv_heads), 128 threads. An item of the list of work is up to `width` chunks of a tile, one behind
// the other. They are merged by their block where they are the whole tile, else through the workspace by the last block
// to arrive. Blocks of empty items, at most as many as there are others, end at once. A block reads its item and then
// keys: of the first ones the item has the block numbers. Bytes:
// every key and value of the context once for each row tile (one in practice), 2 * context * head_dim * 2 per kv head,
// and 1 / 128 of that for each row, written and read as partial results. That is the floor: the mma of rows that are
// not there cost less than the wait for the keys. What bounds it is latency: with few sequences a block has a chunk or
// two. Ideas: Flash-Decoding (Dao et al. 2023), with a fixed chunk instead of a fixed number of splits.
//
// In steps of one token a sequence, a block may also do what lies between the linear of q, k and v and attention
// (store_head.cuh): each block norms and turns its queries on their way to shared memory, and the one that has the last
// keys of its tile writes the new key and value to the cache before it copies them with the others. No other block
// reads these. So a layer has one launch less, and q is not written and read again.
//
// Where the cache has 8 bits, its numbers are copied to places of their own, and each thread widens what it has copied
// into the tile that is multiplied: keys, then values. Half the bytes are on their way in as many copies, and scores
// and outputs are those of attention over the widened keys, bit for bit.
#pragma once

#include "cuda/attention/attention.cuh"
#include "cuda/attention/store_head.cuh"
#include "cuda/core/launch.cuh"

namespace infinilm::cuda {

constexpr int kDecodeWarps = kPieces, kDecodeThreads = 32 * kDecodeWarps;

// D columns, of which kColumns at a time lie in shared memory. E: an element of the cache: T, or uint8_t for 8 bits.
template <class E, int D, int kColumns>
struct DecodeShape {
    using CacheElement = E;
    static constexpr bool kWidens = sizeof(E) == 1;
    static constexpr int kParts = D / kColumns, kUnits = kColumns / 8, kPairs = kColumns / 16;  // of 16 bytes; of 16
    static constexpr int kWarpPairs = ceil_div(kPairs, kDecodeWarps);  // of a part, whose values a warp adds
    static_assert(D % kColumns == 0 && (kParts == 1 || kPairs % kDecodeWarps == 0), "pairs in the order of columns");
    // Wide heads, and what is widened, have keys and values in one place, one after the other.
    static constexpr bool kShared = D > 128 || kWidens;
    static constexpr int kTile = tile_elements<kUnits>(kChunk) * 2;
    static constexpr int kNumbers = kWidens ? kChunk * kColumns : 0;  // bytes of keys or values as they come
    static constexpr int kScales = kWidens ? kChunk * 4 : 0;
    static constexpr int kQueryPart = tile_elements<kUnits>(kTileRows), kQueries = kParts * kQueryPart * 2;
    static constexpr int kWeights = kChunk / 16 * 32 * 16;  // bytes, in fragment order
    static constexpr int kMaxima = kDecodeWarps * kTileRows * 4, kKeyRows = 2 * kChunk * 4;
    static constexpr int kBytes =
        (kShared ? 1 : 2) * kTile + kQueries + kWeights + kMaxima + kKeyRows + 2 * kNumbers + kScales;
    static constexpr int kBlocks = D <= 80 ? 4 : D <= 128 ? 3 : D <= 256 || kParts > 1 ? 2 : 1;  // of an SM
};

// What a block has to do.
struct DecodeTile {
    int seq, row0, num_rows, kv_head;
    int begin, end, chunk0, chunks;  // keys that any row sees; the first of their chunks, and how many
    int slot, width, first_chunk;    // of AttentionDecodeItem
    int first_token, query_len, context;
    int first_block;  // of the sequence's, of which `blocks` is
    int blocks[attention_item_blocks];
    int all_begin, all_end;   // keys that all rows see
    int ahead;                // see RowsOf::keys_ahead
    int row_ends[kTileRows];  // of the keys that each row sees, as far as there are some
    bool is_last;             // of the blocks to arrive

    // By the first warp. item: an AttentionDecodeItem, all of which is asked for at once.
    __device__ __forceinline__ void find(const AttentionKernelArgs& p, const int4* item, int head) {
        static_assert(sizeof(AttentionDecodeItem) == 2 * sizeof(int4) + sizeof(blocks));
        const int lane = lane_id();
        const int4 what = item[0], where = item[1];
        const int block = reinterpret_cast<const int*>(item + 2)[lane % attention_item_blocks];
        if (lane < attention_item_blocks) blocks[lane] = block;
        const int count = min(where.y * p.group - what.y, kTileRows);
        const int keys_ahead = what.x < 0 ? 0 : Rows::keys_ahead(p, what.x);
        const Rows rows(p, where.x, where.y, where.z, keys_ahead, head);
        const int row_end = rows.end(what.y + min(lane, count - 1));
        if (lane < kTileRows) row_ends[lane] = row_end;
        if (lane == kTileRows - 1) {
            seq = what.x, row0 = what.y, num_rows = count, kv_head = head;
            begin = rows.begin(row0), end = min(row_end, rows.context);
            all_begin = rows.begin(row0 + count - 1), all_end = rows.seen_end(row0);
            chunk0 = begin / kChunk, chunks = ceil_div(end, kChunk) - chunk0;
            first_chunk = what.z, slot = what.w, width = where.w, ahead = keys_ahead;
            first_token = where.x, query_len = where.y, context = where.z;
            first_block = p.per_block.quotient((chunk0 + first_chunk) * kChunk);
        }
    }
    __device__ __forceinline__ Rows rows(const AttentionKernelArgs& p) const {
        return Rows(p, first_token, query_len, context, ahead, kv_head);
    }
    __device__ __forceinline__ bool is_whole() const { return slot < 0; }
    // A chunk's partial results.
    __device__ __forceinline__ float* partial(const AttentionKernelArgs& p, int chunk) const {
        const int64_t row = slot + static_cast<int64_t>(kv_head * chunks + chunk) * num_rows;
        return static_cast<float*>(p.work.workspace) + row * p.work.row_floats;
    }
};

// Where a tile's keys lie: the item has the numbers of its first blocks, others are looked up.
struct DecodeKeys : KeyRows {
    const DecodeTile& tile;
    __device__ __forceinline__ DecodeKeys(const AttentionKernelArgs& p, const DecodeTile& tile)
        : KeyRows(p, tile.seq, tile.kv_head), tile(tile) {}
    __device__ __forceinline__ int row(int key) const {
        const int block = per_block.quotient(key), at = block - tile.first_block;
        const int known = at < attention_item_blocks ? tile.blocks[at] : -1;
        return row_of(key, block, known >= 0 ? known : blocks[block]);
    }
};

// Shared memory of a block.
template <class T, class Shape>
struct DecodeRoom {
    T *keys, *values;  // tiles of a part
    T* queries;        // a tile for each part
    uint4* weights;    // [steps of 16 keys][lanes]
    float* maxima;     // [warps][rows]
    int* key_rows;     // of a chunk (KeyRows), and of the next one
    // Where the cache has 8 bits: the numbers of a part of keys and of values, and the scales of a chunk's values.
    uint8_t *key_numbers, *value_numbers;
    float* value_scales;
    __device__ __forceinline__ explicit DecodeRoom(uint8_t* smem) {
        keys = reinterpret_cast<T*>(smem);
        values = Shape::kShared ? keys : reinterpret_cast<T*>(smem + Shape::kTile);
        smem += (Shape::kShared ? 1 : 2) * Shape::kTile;
        queries = reinterpret_cast<T*>(smem);
        weights = reinterpret_cast<uint4*>(smem += Shape::kQueries);
        maxima = reinterpret_cast<float*>(smem += Shape::kWeights);
        key_rows = reinterpret_cast<int*>(smem += Shape::kMaxima);
        key_numbers = smem += Shape::kKeyRows;
        value_numbers = smem += Shape::kNumbers;
        value_scales = reinterpret_cast<float*>(smem + Shape::kNumbers);
    }
    // Where 8 columns of a query row lie.
    __device__ __forceinline__ T* query(int row, int unit) const {
        return queries + unit / Shape::kUnits * Shape::kQueryPart + place<Shape::kUnits>(row, unit % Shape::kUnits);
    }
    __device__ __forceinline__ int* rows_of(int i) const { return key_rows + i % 2 * kChunk; }
    // Where copies go: of keys from `key` on, and of values.
    __device__ __forceinline__ typename Shape::CacheElement* place_of_keys(int key) const {
        if constexpr (Shape::kWidens)
            return key_numbers + key * 8 * Shape::kUnits;
        else
            return keys + tile_elements<Shape::kUnits>(key);
    }
    __device__ __forceinline__ typename Shape::CacheElement* place_of_values() const {
        if constexpr (Shape::kWidens)
            return value_numbers;
        else
            return values;
    }
};

// What a lane has of the output of its rows g and g + 8, and of their sums of weights: of a chunk, or merged so far.
template <class Shape>
struct DecodeSums {
    static constexpr int kWarpPairs = Shape::kParts * Shape::kWarpPairs;
    RowState rows[2];
    float out[2 * kWarpPairs][4] = {};

    // Chunks in ascending order.
    __device__ __forceinline__ void merge(const DecodeSums& chunk) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const Factors factors = rows[h].merge(chunk.rows[h]);
#pragma unroll
            for (int j = 0; j < 2 * kWarpPairs; ++j)
#pragma unroll
                for (int i = 2 * h; i < 2 * h + 2; ++i) out[j][i] = factors.merge(out[j][i], chunk.out[j][i]);
        }
    }
    // Calls put(row, column, h, j) for pairs of neighbouring outputs, out[j][2 * h] and the next.
    template <class Put>
    __device__ __forceinline__ void for_outputs(int num_rows, const Put& put) const {
        const int lane = lane_id(), warp = warp_id();
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int r = lane / 4 + 8 * h;
            if (r >= num_rows) continue;
#pragma unroll
            for (int j = 0; j < 2 * kWarpPairs; ++j) {
                const int pair = warp + j / 2 * kDecodeWarps;
                if (pair < Shape::kParts * Shape::kPairs) put(r, 16 * pair + j % 2 * 8 + lane % 4 * 2, h, j);
            }
        }
    }
    __device__ __forceinline__ void store_partial(float* partial, int num_rows, int row_floats) const {
        for_outputs(num_rows, [&](int r, int column, int h, int j) {
            *reinterpret_cast<float2*>(partial + r * row_floats + column) =
                make_float2(out[j][2 * h], out[j][2 * h + 1]);
            if (column == 0)
                *reinterpret_cast<float2*>(partial + (r + 1) * row_floats - 4) = make_float2(rows[h].m, rows[h].l);
        });
    }
    template <class T>
    __device__ __forceinline__ void store(const AttentionKernelArgs& p, const Rows& rows_of,
                                          const DecodeTile& tile) const {
        const int lane = lane_id();
        float inverse[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int r = min(lane / 4 + 8 * h, tile.num_rows - 1);
            inverse[h] = inverse_weight(p, rows_of.head(tile.row0 + r), rows[h]);
        }
        for_outputs(tile.num_rows, [&](int r, int column, int h, int j) {
            if (column >= p.value_dim) return;
            T* to = static_cast<T*>(p.out) + rows_of.offset(tile.row0 + r, p.out_stride, p.value_dim) + column;
            *reinterpret_cast<uint32_t*>(to) =
                pack2<T>(finished(out[j][2 * h], inverse[h]), finished(out[j][2 * h + 1], inverse[h]));
        });
    }
};

// The scores and weights of a warp's piece of a chunk, and what they say of m; the weights of all pieces come to lie in
// room.weights. load_next(part): starts the copies of the keys behind this part, once no thread reads it. key_scale: of
// the piece's key that has the lane's number, where the cache has 8 bits.
template <class T, class Shape, class Load>
__device__ __forceinline__ void weigh_piece(const AttentionKernelArgs& p, const DecodeTile& tile,
                                            const DecodeRoom<T, Shape>& room, int chunk_begin, float key_scale,
                                            RowState (&rows)[2], const Load& load_next) {
    const int lane = lane_id(), warp = warp_id();
    float scores[1][kPiece / 8][4] = {};
#pragma unroll 1
    for (int part = 0; part < Shape::kParts; ++part) {
        // On their way: these keys, and their values or, where keys and values share a place, nothing more.
        cp_async_wait<Shape::kShared && !(Shape::kWidens && Shape::kParts == 1) ? 0 : 1>();
        if constexpr (Shape::kWidens) {
            const int key = warp * kPiece;
            widen_tile<32, kPiece, Shape::kUnits>(room.keys + tile_elements<Shape::kUnits>(key),
                                                  room.place_of_keys(key), p.cache_type == Element::fp8,
                                                  [&](int at) { return __shfl_sync(0xffffffffu, key_scale, at); });
            load_next(part);
        }
        __syncwarp();
        add_scores<T, Shape::kUnits, kPiece>(scores, 0, room.queries + part * Shape::kQueryPart, room.keys,
                                             warp * kPiece);
        __syncwarp();  // a warp's keys are its own
        if constexpr (!Shape::kWidens) load_next(part);
    }
    if (p.cap > 0) cap_scores(scores[0], p);
    const int begin = chunk_begin + warp * kPiece;
    if (p.position_bias) add_position_bias(scores[0], p, tile.rows(p), tile.row0, begin);
    if (tile.all_end < begin + kPiece || tile.all_begin > begin) {
        const int end[2] = {tile.row_ends[lane / 4], tile.row_ends[lane / 4 + 8]};
        mask_scores(scores[0], end, tile.end, begin, tile.ahead, p.first_key);
    }
    tell_maxima<kTileRows>(room.maxima, warp, scores[0], p.scale);
    __syncthreads();
    tell_weights<T, kTileRows>(room.weights, rows, room.maxima, warp, scores[0], p.scale);
}

// The products of all weights of a chunk with a warp's columns of a part of its values, which begin at first_unit of
// the tile; width: columns of the values from this part on.
template <class T, class Shape>
__device__ __forceinline__ void add_part(float (*out)[4], const uint32_t (&weights)[kChunk / 16][4],
                                         const DecodeRoom<T, Shape>& room, int first_unit, int width) {
    const int lane = lane_id(), warp = warp_id();
#pragma unroll
    for (int i = 0; i < Shape::kWarpPairs; ++i) {
        const int pair = warp + i * kDecodeWarps;
        if (pair >= Shape::kPairs || 16 * pair >= width) break;
        const T* values = room.values + place<Shape::kUnits>(lane % 16, first_unit + 2 * pair + lane / 16);
#pragma unroll
        for (int step = 0; step < kChunk / 16; ++step) {
            uint32_t b[4];
            ldmatrix_x4_trans(b, values + step * tile_elements<Shape::kUnits>(16));
            mma_m16n8k16<T>(out[2 * i], weights[step], {b[0], b[1]});
            mma_m16n8k16<T>(out[2 * i + 1], weights[step], {b[2], b[3]});
        }
    }
}

// What is merged of a tile: kThreads threads have a row, thread t of them columns 4 t .. of every 4 * kThreads.
template <int D, int kThreads>
struct Merged {
    static constexpr int kColumns = 4 * kThreads, kItems = ceil_div(D, kColumns);
    // What a thread reads of a chunk.
    struct Part {
        RowState state;
        float4 x[kItems];
    };
    const int row = threadIdx.x / kThreads, column0 = threadIdx.x % kThreads * 4;
    const bool active;
    RowState state;
    float o[kItems][4] = {};
    __device__ __forceinline__ explicit Merged(int num_rows) : active(row < num_rows && column0 < D) {}

    __device__ __forceinline__ void load(Part& part, const float* from, int row_floats) const {
        const float2 m_and_l = *reinterpret_cast<const float2*>(from + row_floats - 4);
        part.state.m = m_and_l.x, part.state.l = m_and_l.y;
#pragma unroll
        for (int i = 0; i < kItems; ++i)
            if (D % kColumns == 0 || column0 + kColumns * i < D)
                part.x[i] = *reinterpret_cast<const float4*>(from + column0 + kColumns * i);
    }
    __device__ __forceinline__ void merge(const Part& part) {
        const Factors factors = state.merge(part.state);
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
            o[i][0] = factors.merge(o[i][0], part.x[i].x);
            o[i][1] = factors.merge(o[i][1], part.x[i].y);
            o[i][2] = factors.merge(o[i][2], part.x[i].z);
            o[i][3] = factors.merge(o[i][3], part.x[i].w);
        }
    }
    // count chunks in order, kTogether of them read at once and then merged: a load that follows each merge would be
    // waited for by the next one, as a warp has six counters of loads under way. partial: the first one's rows, chunks
    // chunk_stride apart.
    template <int kTogether>
    __device__ __forceinline__ void add(const float* partial, int row_floats, int64_t chunk_stride, int count) {
        if (!active) return;
        const float* from = partial + row * row_floats;
#pragma unroll 1
        for (int chunk = 0; chunk < count; chunk += kTogether, from += kTogether * chunk_stride) {
            Part parts[kTogether];
#pragma unroll
            for (int i = 0; i < kTogether; ++i)
                if (chunk + i < count) load(parts[i], from + i * chunk_stride, row_floats);
#pragma unroll
            for (int i = 0; i < kTogether; ++i)
                if (chunk + i < count) merge(parts[i]);
        }
    }
    template <class T>
    __device__ __forceinline__ void store(const AttentionKernelArgs& p, const Rows& rows, int row0) const {
        if (!active) return;
        T* to = static_cast<T*>(p.out) + rows.offset(row0 + row, p.out_stride, p.value_dim);
        const float inverse = inverse_weight(p, rows.head(row0 + row), state);
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
            const int column = column0 + kColumns * i;
            if (column >= p.value_dim) break;
            *reinterpret_cast<uint2*>(to + column) =
                make_uint2(pack2<T>(finished(o[i][0], inverse), finished(o[i][1], inverse)),
                           pack2<T>(finished(o[i][2], inverse), finished(o[i][3], inverse)));
        }
    }
};

// Merges all chunks of a tile from the workspace, by as many threads to a row as there are.
template <class T, int D, int kThreads>
__device__ __forceinline__ void merge_tile(const AttentionKernelArgs& p, const DecodeTile& tile) {
    constexpr int kItems = Merged<D, kThreads>::kItems, kMost = D <= 80 ? 4 : 8,  // as registers allow
        kTogether = kItems < kMost ? kMost / kItems : 1;
    Merged<D, kThreads> merged(tile.num_rows);
    merged.template add<kTogether>(tile.partial(p, 0), p.work.row_floats,
                                   static_cast<int64_t>(tile.num_rows) * p.work.row_floats, tile.chunks);
    merged.template store<T>(p, tile.rows(p), tile.row0);
}

// A key and its value to L2, while the kernel in front, which may write them, still runs: nothing is read.
template <class E>
__device__ __forceinline__ void prefetch_key(const AttentionKernelArgs& p, int row) {
    if (row < 0) return;
    const int64_t bytes = static_cast<int64_t>(sizeof(E)) * p.head_dim;
    for (int64_t i = 0; i < bytes; i += 128) {
        prefetch_l2(static_cast<const uint8_t*>(p.k_cache) + row * bytes + i);
        if (!values_end_keys<E>(p)) prefetch_l2(static_cast<const uint8_t*>(p.v_cache) + row * bytes + i);
    }
}

// The heads of the tile's token, a warp each in turn: queries to their tile, and where `keys` the key and the value to
// the cache. No thread reads room.weights yet.
template <class T, class Shape>
__device__ __forceinline__ void store_heads(const QkNormRopeStoreArgs& store, const DecodeTile& tile,
                                            const DecodeRoom<T, Shape>& room, bool keys) {
    const int num_heads = store.rope.num_heads, num_kv_heads = store.rope.num_kv_heads;
    float* const shared = reinterpret_cast<float*>(room.weights) + static_cast<int>(warp_id()) * store.rope.head_dim;
    const int count = tile.num_rows + (keys && num_kv_heads > 0 ? 2 : 0);
    for (int i = static_cast<int>(warp_id()); i < count; i += kDecodeWarps) {
        const int of_kv = i - tile.num_rows;  // 0: the key; 1: the value
        const int head = of_kv < 0 ? tile.kv_head * tile.num_rows + i : num_heads + of_kv * num_kv_heads + tile.kv_head;
        store_head<T>(store, tile.first_token, head, shared, [&](T*, int column, const float (&x)[8]) {
            if (of_kv < 0) store8(room.query(i, column / 8), x);
        });
        __syncwarp();  // the next head takes the place of this one
    }
    constexpr int kUnits = Shape::kParts * Shape::kUnits;
    for (int i = static_cast<int>(threadIdx.x); i < kTileRows * kUnits; i += kDecodeThreads) {
        const int row = i / kUnits, unit = i % kUnits;
        if (row >= tile.num_rows || unit * 8 >= store.rope.head_dim)
            *reinterpret_cast<uint4*>(room.query(row, unit)) = make_uint4(0, 0, 0, 0);
    }
}

// One item of the list, for one kv head, by the whole block.
template <class T, class E, int D, int kColumns>
__device__ __forceinline__ void run_item(const AttentionKernelArgs& p, const QkNormRopeStoreArgs& store,
                                         DecodeTile& tile, uint8_t* smem) {
    using Shape = DecodeShape<E, D, kColumns>;
    constexpr bool kAhead = !Shape::kShared || Shape::kWidens;  // the next keys and values come meanwhile
    const DecodeRoom<T, Shape> room(smem);
    const DecodeKeys keys(p, tile);
    const int first = tile.first_chunk;
    const int count = tile.is_whole() ? tile.chunks : min(tile.width, tile.chunks - first);
    // Values that are the ends of their keys lie in the tile of these already, if all of a key does.
    const bool are_there = Shape::kShared && Shape::kParts == 1 && values_end_keys<E>(p);
    const int first_unit = are_there ? (p.head_dim - p.value_dim) / 8 : 0;
    auto begin_of = [&](int i) { return (tile.chunk0 + first + i) * kChunk; };
    // A warp finds and copies the keys of its piece.
    auto locate = [&](int i) {
        if (i < count)
            locate_keys<kDecodeThreads>(keys, room.rows_of(i), begin_of(i), Span(tile.begin, tile.end, begin_of(i)),
                                        threadIdx.x);
        __syncwarp();
    };
    auto load_keys = [&](int i, int part) {
        const int key = static_cast<int>(warp_id()) * kPiece;
        if (i < count)
            copy_tile<32, kPiece, Shape::kUnits>(room.place_of_keys(key), static_cast<const E*>(p.k_cache),
                                                 room.rows_of(i) + key, part * Shape::kUnits, p.head_dim, p.head_dim);
        cp_async_commit();
    };
    auto load_values = [&](int i, int part) {
        if (i < count && !(Shape::kWidens && are_there))
            copy_tile<kDecodeThreads, kChunk, Shape::kUnits>(room.place_of_values(), static_cast<const E*>(p.v_cache),
                                                             room.rows_of(i), part * Shape::kUnits, p.head_dim,
                                                             p.value_dim);
        cp_async_commit();
    };
    // Where the cache has 8 bits: the scales of the key that this thread located, and of its value. They are asked for
    // a chunk ahead.
    float key_scale = 0.0f, value_scale = 0.0f;
    auto load_scales = [&](int i) {
        if (!Shape::kWidens || i >= count) return;
        const int row = room.rows_of(i)[threadIdx.x];
        key_scale = row >= 0 ? p.k_scales[row] : 0.0f;
        value_scale = row >= 0 ? p.v_scales[row] : 0.0f;
    };
    // Widens a part of the values, whose numbers lie in the place of the keys: behind a barrier, when no thread reads
    // it.
    auto widen_values = [&](int i, int part) {
        if constexpr (Shape::kWidens) {
            if (!are_there)
                widen_tile<kDecodeThreads, kChunk, Shape::kUnits>(room.values, room.value_numbers,
                                                                  p.cache_type == Element::fp8,
                                                                  [&](int at) { return room.value_scales[at]; });
            const bool is_last = part + 1 == Shape::kParts || (part + 1) * kColumns >= p.value_dim;
            load_values(is_last ? i + 1 : i, is_last ? 0 : part + 1);
        }
    };
    locate(0);
    prefetch_key<E>(p, room.rows_of(0)[threadIdx.x]);
    locate(1);
    grid_dependency_wait();             // where the keys are, the host has listed; what they are may be an output
    constexpr bool kStores = D <= 256;  // wider heads have no room for it
    const bool stores = kStores && store.qkv, has_new_key = stores && first + count == tile.chunks;
    const bool waits = has_new_key && count == 1;  // for the new key; later chunks are copied behind a barrier anyway
    if (!waits) load_keys(0, 0);
    if constexpr (kStores) {
        if (stores) store_heads<T>(store, tile, room, has_new_key);
    }
    __syncthreads();  // the rows of all keys have come, and the new key and value are in the cache
    if (waits) load_keys(0, 0);
    if (kAhead) load_values(0, 0);
    load_scales(0);
    for (int part = 0; !stores && part < Shape::kParts; ++part)
        copy_queries<kTileRows, Shape::kUnits>(room.queries + part * Shape::kQueryPart, p, tile.rows(p), tile.row0,
                                               part * Shape::kUnits);
    __syncthreads();
    DecodeSums<Shape> sums;
    for (int i = 0; i < count; ++i) {
        DecodeSums<Shape> chunk;
        if (Shape::kWidens) room.value_scales[threadIdx.x] = value_scale;
        weigh_piece<T>(p, tile, room, begin_of(i), key_scale, chunk.rows, [&](int part) {
            if (part + 1 < Shape::kParts)
                load_keys(i, part + 1);
            else if (kAhead)
                load_keys(i + 1, 0);
        });
        load_scales(i + 1);
        if (!kAhead && !are_there) load_values(i, 0);  // behind the barrier that all had read the keys
        cp_async_wait<kAhead ? 1 : 0>();
        widen_values(i, 0);
        __syncthreads();  // all weights, and all values of a part
        uint32_t weights[kChunk / 16][4];
        read_weights(weights, room.weights);
        sum_weights<T>(chunk.rows, weights);
#pragma unroll
        for (int part = 0; part < Shape::kParts; ++part) {
            const int width = p.value_dim - part * kColumns;
            if (part > 0) {
                if (width <= 0) break;
                __syncthreads();  // no thread reads the part before any more
                if (!Shape::kWidens) load_values(i, part);
                cp_async_wait<0>();
                widen_values(i, part);
                __syncthreads();
            }
            add_part<T>(chunk.out + 2 * part * Shape::kWarpPairs, weights, room, first_unit, width);
        }
        locate(i + 2);
        __syncthreads();  // no thread reads the values or the weights any more; rows of the chunk after the next have
                          // come
        if (!kAhead)
            load_keys(i + 1, 0);
        else if (!Shape::kWidens)
            load_values(i + 1, 0);
        if (tile.is_whole())
            sums.merge(chunk);
        else
            chunk.store_partial(tile.partial(p, first + i), tile.num_rows, p.work.row_floats);
    }
    cp_async_wait<0>();
    grid_launch_dependents();
    if (tile.is_whole()) return sums.template store<T>(p, tile.rows(p), tile);
    __syncthreads();  // the block has written its partial results
    if (threadIdx.x == 0) {
        unsigned* counter = reinterpret_cast<unsigned*>(tile.partial(p, 0) + p.work.row_floats - 2);
        const unsigned blocks = static_cast<unsigned>(ceil_div(tile.chunks, tile.width));
        tile.is_last = atomic_add_acq_rel(counter, 1) + 1 == blocks;
        if (tile.is_last) *counter = 0;  // ready for the next call
    }
    __syncthreads();
    if (!tile.is_last) return;
    if (tile.num_rows <= 4)
        merge_tile<T, D, 32>(p, tile);
    else
        merge_tile<T, D, 8>(p, tile);
}

template <class T, class E, int D, int kColumns>
__global__ void __launch_bounds__(kDecodeThreads, DecodeShape<E, D, kColumns>::kBlocks)
    attention_decode_kernel(const AttentionKernelArgs p, const QkNormRopeStoreArgs store) {
    INFINILM_DYNAMIC_SHARED(smem);
    INFINILM_SHARED(DecodeTile, tile, [1]);
    // The kv heads of an item are neighbours: they read the same entry.
    const int number = static_cast<int>(blockIdx.x) / p.num_kv_heads;
    const int head = static_cast<int>(blockIdx.x) - number * p.num_kv_heads;
    constexpr int kItem = sizeof(AttentionDecodeItem) / sizeof(int4);
    if (warp_id() == 0) tile->find(p, p.work.array + p.work.decode_begin + number * kItem, head);
    __syncthreads();
    if (tile->seq < 0) return grid_dependency_wait();
    run_item<T, E, D, kColumns>(p, store, *tile, smem);
}

template <class T, class E, int D, int kColumns>
cudaError_t launch_decode(const AttentionKernelArgs& p, const QkNormRopeStoreArgs& store, cudaStream_t stream) {
    using Shape = DecodeShape<E, D, kColumns>;
    static_assert(sizeof(DecodeTile) <= declared_shared_bytes);
    const dim3 grid(static_cast<unsigned>(p.work.num_decode * p.num_kv_heads));
    return launch<attention_decode_kernel<T, E, D, kColumns>>(
        {grid, dim3(kDecodeThreads), size_t{Shape::kBytes}, stream}, p, store);
}

}  // namespace infinilm::cuda
