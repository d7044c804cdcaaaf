// Weight matrices [N, K]: how they lie in memory, and how tensor cores get them.
//
// Rows are taken in tiles of 16: 8 rows and the 8 that lie PAIR rows further on. PAIR is 8 for plain products; with
// half a head a lane that holds an output also holds the one that is rotated with it, and with half the rows of a
// stacked gate and up projection it holds both factors.
//
// Columns are taken in blocks of 64. A quantized matrix holds, for each tile and block, one 16-byte word for each lane
// (two for 8-bit codes) and 16 scales of 2 groups of 32 columns. The lane g * 4 + t has rows g and g + 8 of the tile at
// columns 32 j + 8 t .. 32 j + 8 t + 7, j = 0, 1: whichever order the tensor core calls them in, activations come in
// the same.

enum Format { FLOAT16, BFLOAT16, Q4_0, Q4_1, Q8_0, Q4F16_1 };

template <Format FORMAT>
struct FormatTraits {
    static const bool quantized = FORMAT != FLOAT16 && FORMAT != BFLOAT16;
    static const bool has_offsets = FORMAT == Q4_1;
    static const int code_words = FORMAT == Q8_0 ? 2 : 1;
    static const int zero_point = FORMAT == Q8_0 ? 128 : FORMAT == Q4_0 ? 8 : FORMAT == Q4F16_1 ? 7 : 0;
    static const bool bf16 = FORMAT == BFLOAT16;
};

template <int PAIR>
INLINE int first_row_of_tile(int tile) {
    return tile / (PAIR / 8) * (2 * PAIR) + tile % (PAIR / 8) * 8;
}

// Tile of a row, and its row inside the tile.
template <int PAIR>
INLINE void locate_row(int row, int& tile, int& inner) {
    int segment = row / (2 * PAIR), within = row % (2 * PAIR);
    tile = segment * (PAIR / 8) + within % PAIR / 8;
    inner = within % 8 + within / PAIR * 8;
}

template <int K>
struct Blocks {
    static const int count = (K + 63) / 64;
};

// Eight 4-bit codes as float16 integers less ZERO: the tensor core's a0 to a3. 0x6400 is 1024, whose last ten bits
// count ones.
template <int ZERO>
INLINE void expand_nibbles(u32 codes, u32 (&a)[4]) {
    const u32 one = 0x64006400 + ZERO * 0x00010001;
    const u32 sixteenth = 0x2c002c00;
    const u32 sixteens = 0xd400d400 + ZERO * 0x00100010;  // -(64 + ZERO)
    u32 high = codes >> 8;
    a[0] = half2_subtract((codes & 0x000f000f) | 0x64006400, one);
    a[1] = half2_fma((codes & 0x00f000f0) | 0x64006400, sixteenth, sixteens);
    a[2] = half2_subtract((high & 0x000f000f) | 0x64006400, one);
    a[3] = half2_fma((high & 0x00f000f0) | 0x64006400, sixteenth, sixteens);
}

// Eight 8-bit codes likewise; their zero point is 128.
INLINE void expand_bytes(u32 low, u32 high, u32 (&a)[4]) {
    const u32 offset = 0x64806480;  // 1152
    a[0] = half2_subtract(__byte_perm(low, 0x64646464, 0x4140), offset);
    a[1] = half2_subtract(__byte_perm(low, 0x64646464, 0x4342), offset);
    a[2] = half2_subtract(__byte_perm(high, 0x64646464, 0x4140), offset);
    a[3] = half2_subtract(__byte_perm(high, 0x64646464, 0x4342), offset);
}

// What a lane holds of one tile at one block of 64 columns.
template <Format FORMAT>
struct Fragment {
    typedef FormatTraits<FORMAT> Traits;
    Words4 codes[Traits::quantized ? Traits::code_words : 4];
    Words2 scales;  // rows g and g + 8 of group 0, then of group 1
    Words2 offsets;

    template <int N, int K, int PAIR>
    INLINE void load(const u8* values, const u16* scale_values, const u16* offset_values, int tile, int block,
                     int lane) {
        if constexpr (Traits::quantized) {
            size_t at = (size_t)tile * Blocks<K>::count + block;
            const u8* source = values + (at * Traits::code_words * 32 + lane) * 16;
#pragma unroll
            for (int word = 0; word < Traits::code_words; ++word) codes[word] = load_weights(source + word * 512);
            scales = load_scales(scale_values + at * 32 + lane / 4 * 4);
            if constexpr (Traits::has_offsets) offsets = load_scales(offset_values + at * 32 + lane / 4 * 4);
        } else {
            int row = first_row_of_tile<PAIR>(tile) + lane / 4;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                int from = row + half * PAIR;
                if (N % 16 && from >= N) from = N - 1;
                const u16* source = (const u16*)values + (size_t)from * K + block * 64 + lane % 4 * 8;
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    if (K % 64 && block * 64 + j * 32 + lane % 4 * 8 >= K) {
                        codes[half * 2 + j] = Words4{{0, 0, 0, 0}};
                    } else {
                        codes[half * 2 + j] = load_weights(source + j * 32);
                    }
                }
            }
        }
    }

    // Operands of step s of group j, as float16 or bfloat16 values.
    INLINE void values(int j, int s, u32 (&a)[4]) const {
        if constexpr (!Traits::quantized) {
            a[0] = codes[j].word[2 * s];
            a[1] = codes[2 + j].word[2 * s];
            a[2] = codes[j].word[2 * s + 1];
            a[3] = codes[2 + j].word[2 * s + 1];
        } else {
            if constexpr (Traits::code_words == 2) {
                expand_bytes(codes[j].word[2 * s], codes[j].word[2 * s + 1], a);
            } else {
                expand_nibbles<Traits::zero_point>(codes[0].word[2 * j + s], a);
            }
            u32 first = __byte_perm(scales.word[j], 0, 0x1010), second = __byte_perm(scales.word[j], 0, 0x3232);
            if constexpr (Traits::has_offsets) {
                u32 low = __byte_perm(offsets.word[j], 0, 0x1010), high = __byte_perm(offsets.word[j], 0, 0x3232);
                a[0] = half2_fma(a[0], first, low);
                a[1] = half2_fma(a[1], second, high);
                a[2] = half2_fma(a[2], first, low);
                a[3] = half2_fma(a[3], second, high);
            } else {
                a[0] = half2_multiply(a[0], first);
                a[1] = half2_multiply(a[1], second);
                a[2] = half2_multiply(a[2], first);
                a[3] = half2_multiply(a[3], second);
            }
        }
    }

    // The codes themselves, which cost one instruction a pair: a small integer's bits are a subnormal float16, 2^-24
    // times the integer, which tensor cores multiply exactly. Rows g + 8 of 4-bit codes come out 16 times larger.
    static const int second_factor = Traits::code_words == 2 ? 1 : 16;
    static constexpr float first_unit = 16777216.0f, second_unit = first_unit / second_factor;

    INLINE void subnormal_codes(int j, int s, u32 (&a)[4]) const {
        if constexpr (Traits::code_words == 2) {
            u32 low = codes[j].word[2 * s], high = codes[j].word[2 * s + 1];
            a[0] = __byte_perm(low, 0, 0x4140);
            a[1] = __byte_perm(low, 0, 0x4342);
            a[2] = __byte_perm(high, 0, 0x4140);
            a[3] = __byte_perm(high, 0, 0x4342);
        } else {
            u32 word = codes[0].word[2 * j + s], high = word >> 8;
            a[0] = word & 0x000f000f;
            a[1] = word & 0x00f000f0;
            a[2] = high & 0x000f000f;
            a[3] = high & 0x00f000f0;
        }
    }

    // sums += scale * (codes - zero point) x + offset * x over group j, in the units above; x are the operands b of its
    // two steps.
    INLINE void accumulate(float (&sums)[4], int j, const u32 (&a)[2][4], const Words4& x) const {
        const u32 zero_first = 0x80008000 | Traits::zero_point * 0x00010001;
        const u32 zero_second = 0x80008000 | Traits::zero_point * second_factor * 0x00010001;
        float sum[4];
        multiply<false>(sum, a[0][0], a[0][1], a[0][2], a[0][3], x.word[0], x.word[1]);
        multiply_accumulate<false>(sum, a[1][0], a[1][1], a[1][2], a[1][3], x.word[2], x.word[3]);
        if constexpr (Traits::zero_point != 0) {
            multiply_accumulate<false>(sum, zero_first, zero_second, zero_first, zero_second, x.word[0], x.word[1]);
            multiply_accumulate<false>(sum, zero_first, zero_second, zero_first, zero_second, x.word[2], x.word[3]);
        }
        float first = first_of<false>(scales.word[j]), second = second_of<false>(scales.word[j]);
        sums[0] += first * sum[0];
        sums[1] += first * sum[1];
        sums[2] += second * sum[2];
        sums[3] += second * sum[3];
        if constexpr (Traits::has_offsets) {
            const u32 one = 0x00010001, other = second_factor * 0x00010001;
            multiply<false>(sum, one, other, one, other, x.word[0], x.word[1]);
            multiply_accumulate<false>(sum, one, other, one, other, x.word[2], x.word[3]);
            first = first_of<false>(offsets.word[j]);
            second = second_of<false>(offsets.word[j]);
            sums[0] += first * sum[0];
            sums[1] += first * sum[1];
            sums[2] += second * sum[2];
            sums[3] += second * sum[3];
        }
    }
};
