// Attention of sequences with one new token each ("flash decoding"): the context is split over blocks, and the last
// block of a sequence to end merges the parts.
//
// Scores are computed transposed, [tokens, heads]: a page is the 16 rows of the tensor core's first operand and up to 8
// query heads that share a KV head are its columns, so each element of keys and values is loaded once for all of them.

// Row b of the step is sequence sequences[b] at positions[b], negative where there is none.
template <bool BF16, int QUERY_HEADS, int KV_HEADS, int HEAD_SIZE>
struct DecodeAttention {
    static const int WARPS = 4, THREADS = 32 * WARPS;
    static const int DIM = (HEAD_SIZE + 31) / 32 * 32;
    static const int GROUP = QUERY_HEADS / KV_HEADS;
    static const int GROUP_TILES = (GROUP + 7) / 8;
    static const int PART = DIM + 2;  // weighted values, largest score, sum of exponentials
    static const int LEAST_PAGES = 4;

    struct Arguments {
        const u16* queries;
        const int* positions;
        const int* sequences;
        const int* page_tables;
        const u16* pages;
        float* partials;
        u32* arrivals;
        u16* out;
        float scale;
        int page_table_width;
        int num_pages;
        int layer;
    };

    struct State {
        float values[DIM / 16][4];
        float largest[2], total[2];
    };

    static INLINE void attend_page(State& state, const u32 (&queries)[DIM / 32][4], const u16* keys, const u16* values,
                                   int tokens, float scale, int lane) {
        int g = lane / 4, t = lane % 4;
        Words4 key[DIM / 32][2], value[DIM / 16];
#pragma unroll
        for (int j = 0; j < DIM / 32; ++j) {
            key[j][0] = *(const Words4*)(keys + (j * 64 + lane) * 8);
            key[j][1] = *(const Words4*)(keys + (j * 64 + 32 + lane) * 8);
        }
#pragma unroll
        for (int i = 0; i < DIM / 16; ++i) value[i] = *(const Words4*)(values + (i * 32 + lane) * 8);
        float score[4] = {0, 0, 0, 0};
#pragma unroll
        for (int j = 0; j < DIM / 32; ++j) {
#pragma unroll
            for (int s = 0; s < 2; ++s) {
                const Words4 &low = key[j][0], &high = key[j][1];
                multiply_accumulate<BF16>(score, low.word[2 * s], high.word[2 * s], low.word[2 * s + 1],
                                          high.word[2 * s + 1], queries[j][2 * s], queries[j][2 * s + 1]);
            }
        }
        const float none = -1e30f;
#pragma unroll
        for (int i = 0; i < 4; ++i) score[i] = g + i / 2 * 8 < tokens ? score[i] * scale : none;
        float factor[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float largest = fmaxf(score[i], score[i + 2]);
            for (int offset = 4; offset < 32; offset *= 2) {
                largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, offset));
            }
            largest = fmaxf(largest, state.largest[i]);
            factor[i] = power_of_two(state.largest[i] - largest);
            state.largest[i] = largest;
            score[i] = power_of_two(score[i] - largest);
            score[i + 2] = power_of_two(score[i + 2] - largest);
            state.total[i] = state.total[i] * factor[i] + score[i] + score[i + 2];
        }
        u32 low = transpose_8x8(pack_pair<BF16>(score[0], score[1]));
        u32 high = transpose_8x8(pack_pair<BF16>(score[2], score[3]));
        if (tokens < PAGE_TOKENS) {
            // What is not written yet may be anything, infinities included.
            u32 keep_low = (2 * t < tokens ? 0xffffu : 0) | (2 * t + 1 < tokens ? 0xffff0000u : 0);
            u32 keep_high = (2 * t + 8 < tokens ? 0xffffu : 0) | (2 * t + 9 < tokens ? 0xffff0000u : 0);
#pragma unroll
            for (int i = 0; i < DIM / 16; ++i) {
                value[i].word[0] &= keep_low;
                value[i].word[1] &= keep_high;
                value[i].word[2] &= keep_low;
                value[i].word[3] &= keep_high;
            }
        }
#pragma unroll
        for (int i = 0; i < DIM / 16; ++i) {
#pragma unroll
            for (int k = 0; k < 4; ++k) state.values[i][k] *= factor[k % 2];
            multiply_accumulate<BF16>(state.values[i], value[i].word[0], value[i].word[2], value[i].word[1],
                                      value[i].word[3], low, high);
        }
    }

    // Grid: (splits, KV heads * GROUP_TILES, rows).
    static INLINE void run(const Arguments& arguments) {
        __shared__ float shared[WARPS][8][PART];
        __shared__ bool is_last;
        let_next_kernel_start();
        wait_for_previous_kernel();
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4, row = blockIdx.z;
        int kv_head = blockIdx.y / GROUP_TILES, first_head = blockIdx.y % GROUP_TILES * 8;
        int heads = GROUP - first_head < 8 ? GROUP - first_head : 8;
        first_head += kv_head * GROUP;
        int context = arguments.positions[row] + 1;
        if (context <= 0) return;
        int num_pages = (context + PAGE_TOKENS - 1) / PAGE_TOKENS, splits = gridDim.x;
        int per_split = (num_pages + splits - 1) / splits;
        if (per_split < LEAST_PAGES) per_split = LEAST_PAGES;
        splits = (num_pages + per_split - 1) / per_split;
        int split = blockIdx.x;
        if (split >= splits) return;
        int first = split * per_split, end = first + per_split < num_pages ? first + per_split : num_pages;

        u32 queries[DIM / 32][4];
        const u16* query = arguments.queries + ((size_t)row * QUERY_HEADS + first_head + g) * HEAD_SIZE;
#pragma unroll
        for (int j = 0; j < DIM / 32; ++j) {
            Words4 loaded = {{0, 0, 0, 0}};
            int dimension = j * 32 + t * 8;
            if (g < heads && (HEAD_SIZE == DIM || dimension < HEAD_SIZE)) loaded = *(const Words4*)(query + dimension);
#pragma unroll
            for (int i = 0; i < 4; ++i) queries[j][i] = loaded.word[i];
        }
        State state = {{}, {-1e30f, -1e30f}, {0, 0}};
        const int* table = arguments.page_tables + (size_t)arguments.sequences[row] * arguments.page_table_width;
        for (int i = first + warp; i < end; i += WARPS) {
            size_t at = page_offset<KV_HEADS, DIM>(arguments.layer, arguments.num_pages, table[i], 0, kv_head);
            attend_page(state, queries, arguments.pages + at, arguments.pages + at + KV_HEADS * PAGE_TOKENS * DIM,
                        context - i * PAGE_TOKENS, arguments.scale, lane);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            for (int offset = 4; offset < 32; offset *= 2) {
                state.total[i] += __shfl_xor_sync(0xffffffff, state.total[i], offset);
            }
            float* mine = shared[warp][2 * t + i];
#pragma unroll
            for (int k = 0; k < DIM / 16; ++k) {
                mine[k * 16 + g] = state.values[k][i];
                mine[k * 16 + 8 + g] = state.values[k][i + 2];
            }
            if (g == 0) {
                mine[DIM] = state.largest[i];
                mine[DIM + 1] = state.total[i];
            }
        }
        __syncthreads();
        // Partials: [rows, query heads, grid's splits, PART].
        float* partials = arguments.partials + ((size_t)row * QUERY_HEADS + first_head) * gridDim.x * PART;
        u16* out = arguments.out + ((size_t)row * QUERY_HEADS + first_head) * HEAD_SIZE;
        for (int i = threadIdx.x; i < heads * DIM; i += THREADS) {
            int head = i / DIM, dimension = i % DIM;
            float largest, total, value;
            merge<WARPS>(&shared[0][head][0], 8 * PART, WARPS, dimension, largest, total, value);
            if (splits == 1) {
                if (dimension < HEAD_SIZE) out[head * HEAD_SIZE + dimension] = from_float<BF16>(value / total);
            } else {
                float* part = partials + ((size_t)head * gridDim.x + split) * PART;
                part[dimension] = value;
                if (dimension == 0) {
                    part[DIM] = largest;
                    part[DIM + 1] = total;
                }
            }
        }
        if (splits == 1) return;
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
            // Wraps to zero at the last arrival, ready for the next step.
            is_last = atomicInc(arguments.arrivals + row * gridDim.y + blockIdx.y, splits - 1) == splits - 1;
        }
        __syncthreads();
        if (!is_last) return;
        __threadfence();
        for (int i = threadIdx.x; i < heads * HEAD_SIZE; i += THREADS) {
            int head = i / HEAD_SIZE, dimension = i % HEAD_SIZE;
            float largest, total, value;
            merge<8>(partials + (size_t)head * gridDim.x * PART, PART, splits, dimension, largest, total, value);
            out[i] = from_float<BF16>(value / total);
        }
    }

    template <int UNROLL>
    static INLINE void merge(const float* parts, int stride, int count, int dimension, float& largest, float& total,
                             float& value) {
        largest = -1e30f;
        total = value = 0;
#pragma unroll UNROLL
        for (int i = 0; i < count; ++i) {
            const float* part = parts + i * stride;
            float part_largest = part[DIM], part_total = part[DIM + 1], part_value = part[dimension];
            float new_largest = fmaxf(largest, part_largest);
            float factor = power_of_two(largest - new_largest), part_factor = power_of_two(part_largest - new_largest);
            total = total * factor + part_total * part_factor;
            value = value * factor + part_value * part_factor;
            largest = new_largest;
        }
    }
};
