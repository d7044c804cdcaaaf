// Products of a weight matrix with up to 64 tokens: bound by the memory that holds the weights.
//
// The matrix is the tensor core's first operand and the tokens are its 8 columns, so a row of weights costs the same
// for one token as for eight. Nothing passes through shared memory but the sums of the warps that share a tile's
// columns. Blocks stay, and take one tile after another; the next weights are on their way while the last ones are
// multiplied.

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

// QUERY_HEADS, KV_HEADS and HEAD_SIZE are those of ROTATE_APPEND; FIRST_HEAD is the head of row 0, counted over
// queries, keys and values.
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
            from_float<Shape::BF16>(__fdividef(first, 1.0f + __expf(-first)) * second);
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
    static const bool WHOLE_STAGES = BLOCKS % (SPLITS * UNITS) == 0;
    static const int TOKENS = 8 * TOKEN_TILES;
    static const int TILES_AT_ONCE = GROUPS * ROW_TILES;
    // Activations of few tokens come with the weights; of many, registers have no room and the L1 cache serves.
    static const bool PREFETCHES = TOKEN_TILES == 1;
    // Few tokens: sums of codes are scaled, in float32; many: scaling the weights is less work.
    static const bool SUMS_ARE_SCALED = FormatTraits<Shape::FORMAT>::quantized && TOKEN_TILES <= 2;
    typedef Fragment<Shape::FORMAT> Weights;

    struct Stage {
        Weights weights[UNITS][ROW_TILES];
        Words4 x[PREFETCHES ? UNITS : 1][2];
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

    const ProductArguments& arguments;
    int tokens, lane, split, group;
    float* shared;
    float* buffer;
    int first_warp;
    float sums[ROW_TILES][TOKEN_TILES][4];

    static INLINE bool is_there(int block) { return WHOLE_STAGES || block < BLOCKS; }

    INLINE int block_of(Cursor cursor, int unit) const { return (cursor.stage * UNITS + unit) * SPLITS + split; }

    INLINE void load_weights_of(Stage& stage, Cursor cursor) const {
#pragma unroll
        for (int unit = 0; unit < UNITS; ++unit) {
            int block = block_of(cursor, unit);
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r) {
                int tile = cursor.tile + group * ROW_TILES + r;
                if (is_there(block) && (TILES_AT_ONCE == 1 || tile < TILES)) {
                    stage.weights[unit][r].template load<Shape::N, Shape::K, Shape::PAIR>(
                        arguments.values, arguments.scales, arguments.offsets, tile, block, lane);
                }
            }
        }
    }

    // What lanes without a token compute is not looked at, so they take the last token's activations.
    INLINE Words4 activations_of(Cursor cursor, int unit, int j, int n) const {
        int token = n * 8 + lane / 4, column = block_of(cursor, unit) * 64 + j * 32 + lane % 4 * 8;
        if (token >= tokens) token = tokens - 1;
        if (Shape::K % 64 != 0 && column >= Shape::K) return Words4{{0, 0, 0, 0}};
        return *(const Words4*)(arguments.activations + (size_t)token * Shape::K + column);
    }

    INLINE void load_activations_of(Stage& stage, Cursor cursor) const {
        if constexpr (PREFETCHES) {
#pragma unroll
            for (int unit = 0; unit < UNITS; ++unit) {
                if (!is_there(block_of(cursor, unit))) continue;
                stage.x[unit][0] = activations_of(cursor, unit, 0, 0);
                stage.x[unit][1] = activations_of(cursor, unit, 1, 0);
            }
        }
    }

    INLINE void multiply_stage(const Stage& stage, Cursor cursor) {
#pragma unroll
        for (int unit = 0; unit < UNITS; ++unit) {
            if (!is_there(block_of(cursor, unit))) continue;
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                Words4 x[TOKEN_TILES];
#pragma unroll
                for (int n = 0; n < TOKEN_TILES; ++n) {
                    x[n] = PREFETCHES ? stage.x[PREFETCHES ? unit : 0][j] : activations_of(cursor, unit, j, n);
                }
#pragma unroll
                for (int r = 0; r < ROW_TILES; ++r) {
                    const Weights& weights = stage.weights[unit][r];
                    u32 a[2][4];
                    if constexpr (SUMS_ARE_SCALED) {
                        weights.subnormal_codes(j, 0, a[0]);
                        weights.subnormal_codes(j, 1, a[1]);
#pragma unroll
                        for (int n = 0; n < TOKEN_TILES; ++n) weights.accumulate(sums[r][n], j, a, x[n]);
                    } else {
                        weights.values(j, 0, a[0]);
                        weights.values(j, 1, a[1]);
#pragma unroll
                        for (int n = 0; n < TOKEN_TILES; ++n) {
                            multiply_accumulate<Shape::BF16>(sums[r][n], a[0][0], a[0][1], a[0][2], a[0][3],
                                                             x[n].word[0], x[n].word[1]);
                            multiply_accumulate<Shape::BF16>(sums[r][n], a[1][0], a[1][1], a[1][2], a[1][3],
                                                             x[n].word[2], x[n].word[3]);
                        }
                    }
                }
            }
        }
    }

    static constexpr float FIRST_UNIT = SUMS_ARE_SCALED ? Weights::first_unit : 1.0f;
    static constexpr float SECOND_UNIT = SUMS_ARE_SCALED ? Weights::second_unit : 1.0f;
    // With two buffers, a warp goes on to the next tiles while another one still adds up.
    static const int BUFFERS = TOKEN_TILES == 1 ? 2 : 1;
    static const int BUFFER_ROW_TILES = TOKEN_TILES == 1 ? ROW_TILES : 1;
    static const int BUFFER_SUMS = SPLITS == 1 ? 0 : BUFFER_ROW_TILES * GROUPS * SPLITS * 16 * TOKENS;

    INLINE void finish(Cursor cursor) {
        if constexpr (SPLITS == 1) {
            finish_alone(cursor);
        } else if constexpr (BUFFERS == 2) {
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r) share_sums(buffer, r, r);
            __syncthreads();
            add_up(buffer, cursor, 0, ROW_TILES);
            buffer = buffer == shared ? shared + BUFFER_SUMS : shared;
            first_warp = first_warp + 1 < SPLITS * GROUPS ? first_warp + 1 : 0;
        } else {
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r) {
                __syncthreads();
                share_sums(buffer, 0, r);
                __syncthreads();
                add_up(buffer, cursor, r, 1);
            }
        }
    }

    // A lane has whole sums: of tokens 2 t and 2 t + 1, of row g and its pair.
    INLINE void finish_alone(Cursor cursor) {
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) {
            int tile = cursor.tile + group * ROW_TILES + r;
#pragma unroll
            for (int n = 0; n < TOKEN_TILES; ++n) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    int token = n * 8 + lane % 4 * 2 + i;
                    if (token < tokens && (TILES_AT_ONCE == 1 || tile < TILES)) {
                        finish_pair<Shape>(arguments, token, first_row_of_tile<Shape::PAIR>(tile) + lane / 4,
                                           sums[r][n][i] * FIRST_UNIT, sums[r][n][i + 2] * SECOND_UNIT);
                    }
                    sums[r][n][i] = sums[r][n][i + 2] = 0;
                }
            }
        }
    }

    // A buffer holds [row tile][group][split][16 rows][tokens].
    INLINE void share_sums(float* to, int slot, int r) {
        int g = lane / 4, t = lane % 4;
        float* mine = to + ((slot * GROUPS + group) * SPLITS + split) * 16 * TOKENS;
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; ++n) {
            *(float2*)(mine + g * TOKENS + n * 8 + 2 * t) = make_float2(sums[r][n][0], sums[r][n][1]);
            *(float2*)(mine + (g + 8) * TOKENS + n * 8 + 2 * t) = make_float2(sums[r][n][2], sums[r][n][3]);
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[r][n][i] = 0;
        }
    }

    // Adds up the sums of the warps that share columns, in order, for row tiles from first_r. The warps take turns to
    // begin, as there may be work for one only.
    INLINE void add_up(const float* from, Cursor cursor, int first_r, int row_tiles) const {
        int start = (int)threadIdx.x - first_warp * 32;
        if (start < 0) start += THREADS;
#pragma unroll 1
        for (int i = start; i < row_tiles * GROUPS * 8 * tokens; i += THREADS) {
            int inner = i % 8, of_group = i / 8 % GROUPS, slot = i / (8 * GROUPS) % row_tiles;
            int token = i / (8 * GROUPS) / row_tiles, tile = cursor.tile + of_group * ROW_TILES + first_r + slot;
            if (TILES_AT_ONCE > 1 && tile >= TILES) continue;
            const float* source = from + (slot * GROUPS + of_group) * SPLITS * 16 * TOKENS + inner * TOKENS + token;
            float first = 0, second = 0;
#pragma unroll
            for (int s = 0; s < SPLITS; ++s) {
                first += source[s * 16 * TOKENS];
                second += source[(s * 16 + 8) * TOKENS];
            }
            finish_pair<Shape>(arguments, token, first_row_of_tile<Shape::PAIR>(tile) + inner, first * FIRST_UNIT,
                               second * SECOND_UNIT);
        }
    }

    // Works on a stage while the next one is loaded; false after the last one.
    INLINE bool step(Stage& stage, Stage& following, Cursor& cursor) {
        Cursor next = cursor;
        next.advance();
        bool goes_on = next.tile < TILES;
        if (goes_on) {
            load_weights_of(following, next);
            load_activations_of(following, next);
        }
        multiply_stage(stage, cursor);
        if (cursor.stage == STAGES - 1) finish(cursor);
        cursor = next;
        return goes_on;
    }

    INLINE void work() {
        Stage even, odd;
        Cursor cursor = {(int)blockIdx.x * TILES_AT_ONCE, 0};
        load_weights_of(even, cursor);
        let_next_kernel_start();
        wait_for_previous_kernel();
        load_activations_of(even, cursor);
        while (step(even, odd, cursor) && step(odd, even, cursor)) {
        }
    }

    static INLINE void run(const ProductArguments& arguments, int tokens) {
        __shared__ __align__(16) float shared[BUFFERS * BUFFER_SUMS + 4];
        int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        SkinnyProduct product = {arguments, tokens, lane, warp % SPLITS, warp / SPLITS, shared, shared, 0, {}};
        product.work();
    }
};
