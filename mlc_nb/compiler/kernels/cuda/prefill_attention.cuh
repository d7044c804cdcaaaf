// Attention of the new tokens of long inputs, causal over everything that is in the pages ("flash attention 2").
//
// A block has one query head and up to 16 rows a warp. Keys and values of some pages at a time come to shared memory as
// they lie in the pages, which is already the order of the tensor cores, while those before are worked on.

template <bool BF16, int QUERY_HEADS, int KV_HEADS, int HEAD_SIZE, int WARPS>
struct PrefillAttention {
    static const int THREADS = 32 * WARPS, ROWS = 16 * WARPS;
    static const int DIM = (HEAD_SIZE + 31) / 32 * 32;
    static const int STEP_PAGES = DIM > 128 ? 2 : 4, STEP_TOKENS = STEP_PAGES * PAGE_TOKENS;
    static const int PAGE_ELEMENTS = PAGE_TOKENS * DIM;
    static const int STAGE_ELEMENTS = 2 * STEP_PAGES * PAGE_ELEMENTS;

    struct Arguments {
        const u16* queries;
        const int* tiles;  // [tiles, 4]: first row, rows (0: none), sequence, position of the first row
        const int* page_tables;
        const u16* pages;
        u16* out;
        float scale;
        int page_table_width;
        int num_pages;
        int layer;
    };

    static INLINE void fetch(u16* stage, const Arguments& arguments, const int* table, int kv_head, int first_page,
                             int pages) {
        const int vectors = PAGE_ELEMENTS / 8;
#pragma unroll
        for (int i = 0; i < 2 * STEP_PAGES * vectors / THREADS; ++i) {
            int at = i * THREADS + threadIdx.x;
            int page = at / vectors % STEP_PAGES, is_value = at / vectors / STEP_PAGES;
            if (page >= pages) continue;
            size_t from = page_offset<KV_HEADS, DIM>(arguments.layer, arguments.num_pages, table[first_page + page],
                                                     is_value, kv_head);
            copy_16_bytes(stage + at * 8, arguments.pages + from + at % vectors * 8);
        }
    }

    // Grid: (query heads, tiles).
    static INLINE void run(const Arguments& arguments) {
        extern __shared__ __align__(16) u16 shared[];
        let_next_kernel_start();
        wait_for_previous_kernel();
        const int* tile = arguments.tiles + blockIdx.y * 4;
        int first_row = tile[0], rows = tile[1], first_position = tile[3];
        if (rows == 0) return;
        const int* table = arguments.page_tables + (size_t)tile[2] * arguments.page_table_width;
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
        int head = blockIdx.x, kv_head = head / (QUERY_HEADS / KV_HEADS);
        int context = first_position + rows, num_pages = (context + PAGE_TOKENS - 1) / PAGE_TOKENS;
        int steps = (num_pages + STEP_PAGES - 1) / STEP_PAGES;
        // Rows past the end repeat the last one, and are not written.
        int row[2], position[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            row[i] = warp * 16 + g + 8 * i;
            int inside = row[i] < rows ? row[i] : rows - 1;
            position[i] = first_position + inside;
        }
        fetch(shared, arguments, table, kv_head, 0, num_pages);
        commit_copies();

        u32 queries[DIM / 32][2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            int inside = position[i] - first_position;
            const u16* query =
                arguments.queries + ((size_t)(first_row + inside) * QUERY_HEADS + head) * HEAD_SIZE;
#pragma unroll
            for (int j = 0; j < DIM / 32; ++j) {
                Words4 loaded = {{0, 0, 0, 0}};
                int dimension = j * 32 + t * 8;
                if (HEAD_SIZE == DIM || dimension < HEAD_SIZE) loaded = *(const Words4*)(query + dimension);
                queries[j][0][i] = loaded.word[0];
                queries[j][0][2 + i] = loaded.word[1];
                queries[j][1][i] = loaded.word[2];
                queries[j][1][2 + i] = loaded.word[3];
            }
        }
        float values[DIM / 8][4] = {};
        float largest[2] = {-1e30f, -1e30f}, total[2] = {0, 0};
        int warp_end = first_position + (warp * 16 + 15 < rows ? warp * 16 + 15 : rows - 1);
        int warp_start = first_position + (warp * 16 < rows ? warp * 16 : rows - 1);
        for (int step = 0; step < steps; ++step) {
            const u16* stage = shared + step % 2 * STAGE_ELEMENTS;
            if (step + 1 < steps) {
                int first_page = (step + 1) * STEP_PAGES;
                fetch(shared + (step + 1) % 2 * STAGE_ELEMENTS, arguments, table, kv_head, first_page,
                      num_pages - first_page);
            }
            commit_copies();
            wait_for_copies<1>();
            __syncthreads();
            int first_token = step * STEP_TOKENS;
            if (first_token <= warp_end) {
                if (first_token + STEP_TOKENS - 1 > warp_start) {
                    work<true>(stage, queries, values, largest, total, position, first_token, context, arguments.scale,
                               lane);
                } else {
                    work<false>(stage, queries, values, largest, total, position, first_token, context,
                                arguments.scale, lane);
                }
            }
            __syncthreads();
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            total[i] += __shfl_xor_sync(0xffffffff, total[i], 1);
            total[i] += __shfl_xor_sync(0xffffffff, total[i], 2);
            if (row[i] >= rows) continue;
            float factor = 1.0f / total[i];
            u16* target = arguments.out + ((size_t)(first_row + row[i]) * QUERY_HEADS + head) * HEAD_SIZE;
#pragma unroll
            for (int n = 0; n < HEAD_SIZE / 8; ++n) {
                *(u32*)(target + n * 8 + 2 * t) =
                    pack_pair<BF16>(values[n][2 * i] * factor, values[n][2 * i + 1] * factor);
            }
        }
    }

    // MASKED where some row does not see all of the step's tokens.
    template <bool MASKED>
    static INLINE void work(const u16* stage, const u32 (&queries)[DIM / 32][2][4], float (&values)[DIM / 8][4],
                            float (&largest)[2], float (&total)[2], const int (&position)[2], int first_token,
                            int context, float scale, int lane) {
        int t = lane % 4;
        float score[2 * STEP_PAGES][4] = {};
#pragma unroll
        for (int j = 0; j < DIM / 32; ++j) {
#pragma unroll
            for (int n = 0; n < 2 * STEP_PAGES; ++n) {
                Words4 key = *(const Words4*)(stage + n / 2 * PAGE_ELEMENTS + ((j * 2 + n % 2) * 32 + lane) * 8);
#pragma unroll
                for (int s = 0; s < 2; ++s) {
                    multiply_accumulate<BF16>(score[n], queries[j][s][0], queries[j][s][1], queries[j][s][2],
                                              queries[j][s][3], key.word[2 * s], key.word[2 * s + 1]);
                }
            }
        }
        if (MASKED) {
#pragma unroll
            for (int n = 0; n < 2 * STEP_PAGES; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    if (first_token + n * 8 + 2 * t + i % 2 > position[i / 2]) score[n][i] = -1e30f;
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float highest = score[0][2 * i];
#pragma unroll
            for (int n = 0; n < 2 * STEP_PAGES; ++n) {
                highest = fmaxf(highest, fmaxf(score[n][2 * i], score[n][2 * i + 1]));
            }
            highest = fmaxf(highest, __shfl_xor_sync(0xffffffff, highest, 1));
            highest = fmaxf(highest, __shfl_xor_sync(0xffffffff, highest, 2));
            highest = fmaxf(largest[i], highest * scale);
            float factor = power_of_two(largest[i] - highest);
            largest[i] = highest;
            total[i] *= factor;
#pragma unroll
            for (int n = 0; n < 2 * STEP_PAGES; ++n) {
                score[n][2 * i] = power_of_two(score[n][2 * i] * scale - highest);
                score[n][2 * i + 1] = power_of_two(score[n][2 * i + 1] * scale - highest);
                total[i] += score[n][2 * i] + score[n][2 * i + 1];
            }
#pragma unroll
            for (int n = 0; n < DIM / 8; ++n) {
                values[n][2 * i] *= factor;
                values[n][2 * i + 1] *= factor;
            }
        }
        const u16* stage_values = stage + STEP_PAGES * PAGE_ELEMENTS;
#pragma unroll
        for (int page = 0; page < STEP_PAGES; ++page) {
            // A page past the end was not fetched.
            int tokens = context - first_token - page * PAGE_TOKENS;
            if (MASKED && tokens <= 0) break;
            u32 a0 = pack_pair<BF16>(score[2 * page][0], score[2 * page][1]);
            u32 a1 = pack_pair<BF16>(score[2 * page][2], score[2 * page][3]);
            u32 a2 = pack_pair<BF16>(score[2 * page + 1][0], score[2 * page + 1][1]);
            u32 a3 = pack_pair<BF16>(score[2 * page + 1][2], score[2 * page + 1][3]);
            u32 keep_low = 0xffffffff, keep_high = 0xffffffff;
            if (MASKED && tokens < PAGE_TOKENS) {
                // What is not written yet may be anything, infinities included.
                keep_low = (2 * t < tokens ? 0xffffu : 0) | (2 * t + 1 < tokens ? 0xffff0000u : 0);
                keep_high = (2 * t + 8 < tokens ? 0xffffu : 0) | (2 * t + 9 < tokens ? 0xffff0000u : 0);
            }
#pragma unroll
            for (int i = 0; i < DIM / 16; ++i) {
                Words4 value = *(const Words4*)(stage_values + page * PAGE_ELEMENTS + (i * 32 + lane) * 8);
                multiply_accumulate<BF16>(values[2 * i], a0, a1, a2, a3, value.word[0] & keep_low,
                                          value.word[1] & keep_high);
                multiply_accumulate<BF16>(values[2 * i + 1], a0, a1, a2, a3, value.word[2] & keep_low,
                                          value.word[3] & keep_high);
            }
        }
    }
};
