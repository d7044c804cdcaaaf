// Between the blocks of a file, the order of matrix.cuh, and plain rows of 16-bit floats.

// How a file holds a matrix, row by row. GGUF's blocks are described in mlc_nb/quantization/packing.py; Q4F16_1 is
// MLC's group quantization: codes of 4 bits in uint32 words, least significant first, and float16 scales apart.
template <Format FORMAT>
struct SourceBlock {
    static const int bytes = FORMAT == Q4_0 ? 18 : FORMAT == Q4_1 ? 20 : 34;
    static const int header = FORMAT == Q4_1 ? 4 : 2;

    static INLINE u32 code(const u8* source, size_t row, int column, int columns) {
        if constexpr (FORMAT == Q4F16_1) {
            u32 word = ((const u32*)source)[(row * columns + column) / 8];
            return word >> (column % 8 * 4) & 15;
        } else {
            const u8* block = source + (row * (columns / 32) + column / 32) * bytes;
            if constexpr (FORMAT == Q8_0) return block[header + column % 32] ^ 0x80;
            return block[header + column % 16] >> (column % 32 / 16 * 4) & 15;
        }
    }

    // The scale, or the offset that follows it.
    static INLINE u16 scale(const u8* source, const u16* scales, size_t row, int group, int columns, int which) {
        size_t at = row * (columns / 32) + group;
        if constexpr (FORMAT == Q4F16_1) return scales[at];
        return ((const u16*)(source + at * bytes))[which];
    }
};

// Row of the file for row of a tensor whose heads have their rotary pairs side by side; 0: it has not.
INLINE int source_row(int row, int interleaved_head_size) {
    if (interleaved_head_size == 0) return row;
    int inside = row % interleaved_head_size, half = interleaved_head_size / 2;
    return row - inside + inside % half * 2 + inside / half;
}

// Rows 0 .. rows - 1 of a tensor of the file to rows from first_row of a quantized matrix [N, K]. A thread has 16 bytes
// of codes, or the scales of its row. Grid: enough for rows * blocks * 4 threads.
template <Format FORMAT, int K, int PAIR>
INLINE void pack_matrix(const u8* source, const u16* source_scales, u8* values, u16* scales, u16* offsets, int rows,
                        int first_row, int interleaved_head_size) {
    typedef FormatTraits<FORMAT> Traits;
    typedef SourceBlock<FORMAT> Source;
    const int blocks = Blocks<K>::count;
    size_t at = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    int t = at % 4, block = at / 4 % blocks;
    if (at / 4 / blocks >= rows) return;
    int row = at / 4 / blocks, tile, inner;
    locate_row<PAIR>(first_row + row, tile, inner);
    int from = source_row(row, interleaved_head_size), g = inner % 8, second = inner / 8;
    size_t place = (size_t)tile * blocks + block;
    u8* target = values + (place * Traits::code_words * 32 + g * 4 + t) * 16;
    for (int j = 0; j < 2; ++j) {
        for (int s = 0; s < 2; ++s) {
            u32 code[4];
            for (int i = 0; i < 4; ++i) {
                int column = block * 64 + j * 32 + t * 8 + s * 4 + i;
                code[i] = column < K ? Source::code(source, from, column, K) : 0;
            }
            if constexpr (Traits::code_words == 2) {
                u16* word = (u16*)(target + j * 512 + s * 8);
                word[second] = (u16)(code[0] | code[1] << 8);
                word[2 + second] = (u16)(code[2] | code[3] << 8);
            } else {
                // Nibbles i and i + 4 of a word are the pair a_i; rows g and g + 8 have a0, a2 and a1, a3.
                u32 bits = (code[0] | code[1] << 16 | code[2] << 8 | code[3] << 24) << (second * 4);
                u32 mask = 0x0f0f0f0fu << (second * 4);
                u32* word = (u32*)target + 2 * j + s;
                atomicAnd(word, ~mask);
                atomicOr(word, bits);
            }
        }
    }
    if (t < 2) {
        bool there = block * 64 + t * 32 < K;
        size_t scale_at = place * 32 + g * 4 + t * 2 + second;
        int group = block * 2 + t;
        scales[scale_at] = there ? Source::scale(source, source_scales, from, group, K, 0) : (u16)0;
        if (Traits::has_offsets) {
            offsets[scale_at] = there ? Source::scale(source, source_scales, from, group, K, 1) : (u16)0;
        }
    }
}

// The same for unquantized matrices: float32 (SOURCE_BYTES 4), or 16-bit floats of either kind, to 16-bit floats.
template <int SOURCE_BYTES, bool SOURCE_BF16, bool BF16, int K>
INLINE void pack_rows(const u8* source, u16* values, int rows, int first_row, int interleaved_head_size) {
    size_t at = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= (size_t)rows * K) return;
    int row = at / K, column = at % K;
    size_t from = (size_t)source_row(row, interleaved_head_size) * K + column;
    u16 bits;
    if constexpr (SOURCE_BYTES == 4) {
        bits = from_float<BF16>(((const float*)source)[from]);
    } else if constexpr (SOURCE_BF16 == BF16) {
        bits = ((const u16*)source)[from];
    } else {
        bits = from_float<BF16>(to_float<SOURCE_BF16>(((const u16*)source)[from]));
    }
    values[(size_t)(first_row + row) * K + column] = bits;
}

// Rows of a quantized matrix as float16 [N, K]. A warp has a tile at one block of 64 columns.
template <Format FORMAT, int N, int K, int PAIR>
INLINE void dequantize_matrix(const u8* values, const u16* scales, const u16* offsets, u16* out) {
    const int tiles = (N + 15) / 16, blocks = Blocks<K>::count;
    size_t at = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    int lane = threadIdx.x % 32, block = at % blocks;
    Fragment<FORMAT> fragment;
    bool there = at / blocks < tiles;
    int tile = at / blocks;
    if (there) fragment.template load<N, K, PAIR>(values, scales, offsets, tile, block, lane);
    let_next_kernel_start();
    wait_for_previous_kernel();
    if (!there) return;
    int row = first_row_of_tile<PAIR>(tile) + lane / 4;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        u32 a[2][4];
        fragment.values(j, 0, a[0]);
        fragment.values(j, 1, a[1]);
        int column = block * 64 + j * 32 + lane % 4 * 8;
        if (K % 64 && column >= K) continue;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int to = row + half * PAIR;
            if (N % 16 && to >= N) continue;
            *(Words4*)(out + (size_t)to * K + column) =
                Words4{{a[0][half], a[0][2 + half], a[1][half], a[1][2 + half]}};
        }
    }
}

// Rows of an embedding as float32: block b of the grid gives the row of token_ids[b].
template <Format FORMAT, int N, int K>
INLINE void embedding_rows(const int* token_ids, const u8* values, const u16* scales, const u16* offsets,
                           float* stream) {
    typedef FormatTraits<FORMAT> Traits;
    let_next_kernel_start();
    wait_for_previous_kernel();
    int row = token_ids[blockIdx.x];
    // What padding holds is not looked at; whatever it is, nothing outside the table is read.
    if (row < 0 || row >= N) row = 0;
    float* out = stream + (size_t)blockIdx.x * K;
    for (int column = threadIdx.x; column < K; column += blockDim.x) {
        if constexpr (!Traits::quantized) {
            out[column] = to_float<Traits::bf16>(((const u16*)values)[(size_t)row * K + column]);
        } else {
            int tile = row / 16, inner = row % 16, g = inner % 8, second = inner / 8;
            int block = column / 64, j = column % 64 / 32, t = column % 32 / 8, s = column % 8 / 4, i = column % 4;
            size_t place = (size_t)tile * Blocks<K>::count + block;
            const u8* source = values + (place * Traits::code_words * 32 + g * 4 + t) * 16;
            float code;
            if constexpr (Traits::code_words == 2) {
                code = (float)source[j * 512 + s * 8 + i / 2 * 4 + second * 2 + i % 2];
            } else {
                u32 word = ((const u32*)source)[2 * j + s];
                code = (float)(word >> (second * 4 + i % 2 * 16 + i / 2 * 8) & 15);
            }
            size_t scale_at = place * 32 + g * 4 + j * 2 + second;
            float value = (code - Traits::zero_point) * to_float<false>(scales[scale_at]);
            if (Traits::has_offsets) value += to_float<false>(offsets[scale_at]);
            out[column] = value;
        }
    }
}
