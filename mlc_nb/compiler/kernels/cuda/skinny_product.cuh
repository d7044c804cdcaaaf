// Products of a weight matrix with up to 64 tokens: bound by the memory that holds the weights.
//
// The matrix is the tensor core's first operand and the tokens are its 8 columns, so a row of weights costs the same for
// one token as for eight. Nothing passes through shared memory but the sums of the warps that share a tile's columns.
// Blocks stay, and take one tile after another; the next weights are on their way while the last ones are multiplied.

// What becomes of the sums.
enum Epilogue {
    STORE,           // 16-bit floats [tokens, N]
    STORE_FLOAT32,   // float32 [tokens, N]
    ADD_TO_STREAM,   // added to float32 [tokens, N]
    GATED_SILU,      // silu(first half of the rows) * second half: 16-bit floats [tokens, N / 2]
    ROTATE_APPEND    // rows are heads of queries, keys and values: queries out, keys and values to their pages
};

struct ProductArguments {
    const u8* values;
    const u16* scales;
    const u16* offsets;
    const u16* bias;
    const u16* activations;
    void* out;
    // ROTATE_APPEND alone:
    const int* positions;
    const int* sequences;
    const int* page_tables;
    const float* cosines;
    const float* sines;
    u16* pages;
    int page_table_width;
    int num_pages;
    int layer;
};

// QUERY_HEADS, KV_HEADS and HEAD_SIZE are those of ROTATE_APPEND; FIRST_HEAD is the head of row 0, counted over queries,
// keys and values.
template <Format FORMAT_, bool BF16_, int N_, int K_, int PAIR_, Epilogue EPILOGUE_, bool BIAS_, int FIRST_HEAD_ = 0,
          int QUERY_HEADS_ = 0, int KV_HEADS_ = 0, int HEAD_SIZE_ = 32>
struct ProductShape {
    static const Format FORMAT = FORMAT_;
    static const bool BF16 = BF16_;
    static const int N = N_, K = K_, PAIR = PAIR_;
    static const Epilogue EPILOGUE = EPILOGUE_;
    static const bool BIAS = BIAS_;
    static const int FIRST_HEAD = FIRST_HEAD_, QUERY_HEADS = QUERY_HEADS_, KV_HEADS = KV_HEADS_;
    static const int HEAD_SIZE = HEAD_SIZE_, HEAD_STRIDE = (HEAD_SIZE_ + 31) / 32 * 32;
};

template <class Shape>
INLINE void rotate_append(const ProductArguments& arguments, int token, int row, float first, float second) {
    const int half = Shape::HEAD_SIZE / 2;
    int position = arguments.positions[token];
    if (position < 0) return;
    int head = Shape::FIRST_HEAD + row / Shape::HEAD_SIZE, dimension = row % Shape::HEAD_SIZE;
    bool is_value = head >= Shape::QUERY_HEADS + Shape::KV_HEADS;
    if (!is_value) {
        float cosine = arguments.cosines[(size_t)position * half + dimension];
        float sine = arguments.sines[(size_t)position * half + dimension];
        float rotated = first * cosine - second * sine;
        second = second * cosine + first * sine;
        first = rotated;
    }
    u16* target;
    int at_first, at_second;
    if (head < Shape::QUERY_HEADS) {
        target = (u16*)arguments.out + ((size_t)token * Shape::QUERY_HEADS + head) * Shape::HEAD_SIZE;
        at_first = dimension;
        at_second = dimension + half;
    } else {
        int table_row = arguments.sequences[token] * arguments.page_table_width;
        int page = arguments.page_tables[table_row + position / PAGE_TOKENS], inside = position % PAGE_TOKENS;
        int kv_head = (head - Shape::QUERY_HEADS) % Shape::KV_HEADS;
        target = arguments.pages + page_offset<Shape::KV_HEADS, Shape::HEAD_STRIDE>(
                                       arguments.layer, arguments.num_pages, page, is_value, kv_head);
        at_first = is_value ? value_offset(inside, dimension) : key_offset(inside, dimension);
        at_second = is_value ? value_offset(inside, dimension + half) : key_offset(inside, dimension + half);
    }
    target[at_first] = from_float<Shape::BF16>(first);
    target[at_second] = from_float<Shape::BF16>(second);
}

// One pair of sums: row, and the row PAIR further on.
template <class Shape>
INLINE void finish_pair(const ProductArguments& arguments, int token, int row, float first, float second) {
    const bool two = Shape::N % 16 == 0 || row + Shape::PAIR < Shape::N;
    if (Shape::N % 16 && row >= Shape::N) return;
    if constexpr (Shape::BIAS) {
        first += to_float<Shape::BF16>(arguments.bias[row]);
        if (two) second += to_float<Shape::BF16>(arguments.bias[row + Shape::PAIR]);
    }
    size_t at = (size_t)token * Shape::N + row;
    if constexpr (Shape::EPILOGUE == STORE) {
        ((u16*)arguments.out)[at] = from_float<Shape::BF16>(first);
        if (two) ((u16*)arguments.out)[at + Shape::PAIR] = from_float<Shape::BF16>(second);
    } else if constexpr (Shape::EPILOGUE == STORE_FLOAT32) {
        ((float*)arguments.out)[at] = first;
        if (two) ((float*)arguments.out)[at + Shape::PAIR] = second;
    } else if constexpr (Shape::EPILOGUE == ADD_TO_STREAM) {
        ((float*)arguments.out)[at] += first;
        if (two) ((float*)arguments.out)[at + Shape::PAIR] += second;
    } else if constexpr (Shape::EPILOGUE == GATED_SILU) {
        ((u16*)arguments.out)[(size_t)token * (Shape::N / 2) + row] =
            from_float<Shape::BF16>(first / (1.0f + __expf(-first)) * second);
    } else {
        rotate_append<Shape>(arguments, token, row, first, second);
    }
}

// TOKEN_TILES of 8 tokens; ROW_TILES of 16 rows that a warp works on at once; SPLITS warps that share the columns;
// GROUPS of such warps in a block; UNITS of 64 columns that a warp loads at once.
template <class Shape, int TOKEN_TILES, int ROW_TILES, int SPLITS, int GROUPS, int UNITS>
struct SkinnyProduct {
    static const int THREADS = 32 * SPLITS * GROUPS;
    static const int TILES = (Shape::N + 15) / 16;
    static const int BLOCKS = Blocks<Shape::K>::count;
    static const int STAGES = (BLOCKS + SPLITS * UNITS - 1) / (SPLITS * UNITS);
    static const int TOKENS = 8 * TOKEN_TILES;
    static const int TILES_AT_ONCE = GROUPS * ROW_TILES;
    // Few tokens: float32 sums of codes are scaled, which is exact; many: scaling the weights is less work.
    static const bool SCALED = TOKEN_TILES > 2 || FormatTraits<Shape::FORMAT>::has_offsets;
    typedef Fragment<Shape::FORMAT> Weights;

    struct Stage {
        Weights weights[UNITS][ROW_TILES];
    };

    // The place in the sequence of (tiles, stage) that a warp works through.
    struct Cursor {
        int tile, stage;
        INLINE void advance() {
            if (++stage == STAGES) {
                stage = 0;
                tile += gridDim.x * TILES_AT_ONCE;
            }
        }
    };

    static INLINE void load(Stage& stage, const ProductArguments& arguments, Cursor cursor, int split, int group,
                            int lane) {
#pragma unroll
        for (int unit = 0; unit < UNITS; ++unit) {
            int block = (cursor.stage * UNITS + unit) * SPLITS + split;
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r) {
                int tile = cursor.tile + group * ROW_TILES + r;
                if (block < BLOCKS && tile < TILES) {
                    stage.weights[unit][r].template load<Shape::N, Shape::K, Shape::PAIR>(
                        arguments.values, arguments.scales, arguments.offsets, tile, block, lane);
                }
            }
        }
    }

    static INLINE void multiply(float (&sums)[ROW_TILES][TOKEN_TILES][4], const Stage& stage,
                                const ProductArguments& arguments, Cursor cursor, int split, int tokens, int lane) {
        int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int unit = 0; unit < UNITS; ++unit) {
            int block = (cursor.stage * UNITS + unit) * SPLITS + split;
            if (block >= BLOCKS) continue;
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                int column = block * 64 + j * 32 + t * 8;
                Words4 x[TOKEN_TILES];
#pragma unroll
                for (int n = 0; n < TOKEN_TILES; ++n) {
                    x[n] = Words4{{0, 0, 0, 0}};
                    int token = n * 8 + g;
                    if (token < tokens && (Shape::K % 64 == 0 || column < Shape::K)) {
                        x[n] = *(const Words4*)(arguments.activations + (size_t)token * Shape::K + column);
                    }
                }
#pragma unroll
                for (int r = 0; r < ROW_TILES; ++r) {
                    const Weights& weights = stage.weights[unit][r];
                    u32 a[2][4];
                    weights.template operands<SCALED>(j, 0, a[0]);
                    weights.template operands<SCALED>(j, 1, a[1]);
#pragma unroll
                    for (int n = 0; n < TOKEN_TILES; ++n) {
                        if constexpr (SCALED || !FormatTraits<Shape::FORMAT>::quantized) {
                            float(&sum)[4] = sums[r][n];
                            multiply_accumulate<Shape::BF16>(sum, a[0][0], a[0][1], a[0][2], a[0][3], x[n].word[0],
                                                             x[n].word[1]);
                            multiply_accumulate<Shape::BF16>(sum, a[1][0], a[1][1], a[1][2], a[1][3], x[n].word[2],
                                                             x[n].word[3]);
                        } else {
                            float sum[4] = {0, 0, 0, 0};
                            multiply_accumulate<Shape::BF16>(sum, a[0][0], a[0][1], a[0][2], a[0][3], x[n].word[0],
                                                             x[n].word[1]);
                            multiply_accumulate<Shape::BF16>(sum, a[1][0], a[1][1], a[1][2], a[1][3], x[n].word[2],
                                                             x[n].word[3]);
                            float first = first_of<false>(weights.scales.word[j]);
                            float second = second_of<false>(weights.scales.word[j]);
                            sums[r][n][0] += first * sum[0];
                            sums[r][n][1] += first * sum[1];
                            sums[r][n][2] += second * sum[2];
                            sums[r][n][3] += second * sum[3];
                        }
                    }
                }
            }
        }
    }

    // Shared memory holds [group][split][16 rows][tokens].
    static INLINE void finish(float (&sums)[ROW_TILES][TOKEN_TILES][4], float* shared, const ProductArguments& arguments,
                              Cursor cursor, int split, int group, int tokens, int lane) {
        int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) {
            __syncthreads();
            float* mine = shared + (group * SPLITS + split) * 16 * TOKENS;
#pragma unroll
            for (int n = 0; n < TOKEN_TILES; ++n) {
                *(float2*)(mine + g * TOKENS + n * 8 + 2 * t) = make_float2(sums[r][n][0], sums[r][n][1]);
                *(float2*)(mine + (g + 8) * TOKENS + n * 8 + 2 * t) = make_float2(sums[r][n][2], sums[r][n][3]);
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[r][n][i] = 0;
            }
            __syncthreads();
            for (int i = threadIdx.x; i < GROUPS * 8 * tokens; i += THREADS) {
                int inner = i % 8, of_group = i / 8 % GROUPS, token = i / (8 * GROUPS);
                int tile = cursor.tile + of_group * ROW_TILES + r;
                if (tile >= TILES) continue;
                const float* source = shared + of_group * SPLITS * 16 * TOKENS + inner * TOKENS + token;
                float first = 0, second = 0;
#pragma unroll
                for (int s = 0; s < SPLITS; ++s) {
                    first += source[s * 16 * TOKENS];
                    second += source[(s * 16 + 8) * TOKENS];
                }
                finish_pair<Shape>(arguments, token, first_row_of_tile<Shape::PAIR>(tile) + inner, first, second);
            }
        }
    }

    static INLINE void run(const ProductArguments& arguments, int tokens) {
        __shared__ float shared[GROUPS * SPLITS * 16 * TOKENS];
        int lane = threadIdx.x % 32, split = threadIdx.x / 32 % SPLITS, group = threadIdx.x / 32 / SPLITS;
        float sums[ROW_TILES][TOKEN_TILES][4] = {};
        Cursor now = {(int)blockIdx.x * TILES_AT_ONCE, 0};
        Cursor next = now;
        Stage even, odd;
        load(even, arguments, now, split, group, lane);
        let_next_kernel_start();
        wait_for_previous_kernel();
        while (true) {
            next.advance();
            if (next.tile < TILES) load(odd, arguments, next, split, group, lane);
            multiply(sums, even, arguments, now, split, tokens, lane);
            if (now.stage == STAGES - 1) finish(sums, shared, arguments, now, split, group, tokens, lane);
            now = next;
            if (now.tile >= TILES) break;
            next.advance();
            if (next.tile < TILES) load(even, arguments, next, split, group, lane);
            multiply(sums, odd, arguments, now, split, tokens, lane);
            if (now.stage == STAGES - 1) finish(sums, shared, arguments, now, split, group, tokens, lane);
            now = next;
            if (now.tile >= TILES) break;
        }
    }
};
