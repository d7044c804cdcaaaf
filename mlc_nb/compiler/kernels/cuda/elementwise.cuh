// Rows of activations: embedding, RMSNorm, gated SiLU, rotary embeddings of long inputs.

// float32 [rows, SIZE] -> 16-bit floats; row r of the output is row picked[r] of the input, where PICKED.
template <bool BF16, int SIZE, int THREADS, bool PICKED>
INLINE void rms_norm(const float* stream, const int* picked, const float* weight, u16* out, float epsilon) {
    const int vectors = SIZE / 4, rounds = (vectors + THREADS - 1) / THREADS;
    __shared__ float partial[THREADS / 32];
    let_next_kernel_start();
    float4 scale[rounds];
#pragma unroll
    for (int i = 0; i < rounds; ++i) {
        int at = i * THREADS + threadIdx.x;
        if (at < vectors) scale[i] = ((const float4*)weight)[at];
    }
    wait_for_previous_kernel();
    int row = PICKED ? picked[blockIdx.x] : blockIdx.x;
    const float4* source = (const float4*)(stream + (size_t)row * SIZE);
    float4 value[rounds];
    float squares = 0;
#pragma unroll
    for (int i = 0; i < rounds; ++i) {
        int at = i * THREADS + threadIdx.x;
        if (at < vectors) {
            value[i] = source[at];
            squares += value[i].x * value[i].x + value[i].y * value[i].y + value[i].z * value[i].z +
                       value[i].w * value[i].w;
        }
    }
    squares = warp_sum(squares);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = squares;
    __syncthreads();
    float total = 0;
#pragma unroll
    for (int i = 0; i < THREADS / 32; ++i) total += partial[i];
    float factor = rsqrtf(total / SIZE + epsilon);
    Words2* target = (Words2*)(out + (size_t)blockIdx.x * SIZE);
#pragma unroll
    for (int i = 0; i < rounds; ++i) {
        int at = i * THREADS + threadIdx.x;
        if (at < vectors) {
            target[at] = Words2{{pack_pair<BF16>(value[i].x * factor * scale[i].x, value[i].y * factor * scale[i].y),
                                 pack_pair<BF16>(value[i].z * factor * scale[i].z, value[i].w * factor * scale[i].w)}};
        }
    }
}

// 16-bit floats [tokens, 2 * SIZE], gate then up -> [tokens, SIZE]; 8 elements a thread.
template <bool BF16, int SIZE>
INLINE void gated_silu(const u16* gate_up, u16* out, int tokens) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    size_t at = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= (size_t)tokens * (SIZE / 8)) return;
    size_t token = at / (SIZE / 8), column = at % (SIZE / 8) * 8;
    const u16* source = gate_up + token * (2 * SIZE) + column;
    Words4 gate = *(const Words4*)source, up = *(const Words4*)(source + SIZE), result;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float first = first_of<BF16>(gate.word[i]), second = second_of<BF16>(gate.word[i]);
        result.word[i] = pack_pair<BF16>(first / (1.0f + __expf(-first)) * first_of<BF16>(up.word[i]),
                                         second / (1.0f + __expf(-second)) * second_of<BF16>(up.word[i]));
    }
    *(Words4*)(out + token * SIZE + column) = result;
}

// Queries, keys and values of long inputs, 16-bit floats [tokens, (q + 2 kv heads) * HEAD_SIZE]: rotated queries out
// [tokens, q heads, HEAD_SIZE], keys and values to their pages. A thread has 8 dimensions and the 8 rotated with them.
template <bool BF16, int QUERY_HEADS, int KV_HEADS, int HEAD_SIZE>
INLINE void rotate_and_append(const u16* qkv, const int* positions, const int* sequences, const int* page_tables,
                              const float* cosines, const float* sines, u16* queries, u16* pages, int tokens,
                              int page_table_width, int num_pages, int layer) {
    const int half = HEAD_SIZE / 2, chunks = half / 8, heads = QUERY_HEADS + 2 * KV_HEADS;
    const int stride = (HEAD_SIZE + 31) / 32 * 32;
    let_next_kernel_start();
    wait_for_previous_kernel();
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    int chunk = at % chunks * 8, head = at / chunks % heads, token = at / chunks / heads;
    if (token >= tokens || positions[token] < 0) return;
    int position = positions[token];
    const u16* source = qkv + ((size_t)token * heads + head) * HEAD_SIZE + chunk;
    Words4 low = *(const Words4*)source, high = *(const Words4*)(source + half);
    bool is_value = head >= QUERY_HEADS + KV_HEADS;
    if (!is_value) {
        const float* cosine = cosines + (size_t)position * half + chunk;
        const float* sine = sines + (size_t)position * half + chunk;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float a = first_of<BF16>(low.word[i]), b = second_of<BF16>(low.word[i]);
            float c = first_of<BF16>(high.word[i]), d = second_of<BF16>(high.word[i]);
            float c0 = cosine[2 * i], c1 = cosine[2 * i + 1], s0 = sine[2 * i], s1 = sine[2 * i + 1];
            low.word[i] = pack_pair<BF16>(a * c0 - c * s0, b * c1 - d * s1);
            high.word[i] = pack_pair<BF16>(c * c0 + a * s0, d * c1 + b * s1);
        }
    }
    if (head < QUERY_HEADS) {
        u16* target = queries + ((size_t)token * QUERY_HEADS + head) * HEAD_SIZE + chunk;
        *(Words4*)target = low;
        *(Words4*)(target + half) = high;
        return;
    }
    int page = page_tables[sequences[token] * page_table_width + position / PAGE_TOKENS];
    int inside = position % PAGE_TOKENS, kv_head = (head - QUERY_HEADS) % KV_HEADS;
    u16* target = pages + page_offset<KV_HEADS, stride>(layer, num_pages, page, is_value, kv_head);
    if (is_value) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            target[value_offset(inside, chunk + 2 * i)] = (u16)low.word[i];
            target[value_offset(inside, chunk + 2 * i + 1)] = (u16)(low.word[i] >> 16);
            target[value_offset(inside, chunk + half + 2 * i)] = (u16)high.word[i];
            target[value_offset(inside, chunk + half + 2 * i + 1)] = (u16)(high.word[i] >> 16);
        }
    } else {
        *(Words4*)(target + key_offset(inside, chunk)) = low;
        *(Words4*)(target + key_offset(inside, chunk + half)) = high;
    }
}
