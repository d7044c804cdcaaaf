// Pages of keys and values.
//
// The pool is [layers, pages, 2, kv heads, 16 * DIM] of 16-bit floats: the keys of a page's 16 tokens, then their
// values, DIM being the head size filled up to a multiple of 32 (the filling stays zero). Both lie in the order in
// which tensor cores take them, so that a warp reads a page in whole lines and never rearranges:
// - keys [DIM / 32][2 halves of 8 tokens][lane][8]: lane g * 4 + t has token g at dimensions 8 t .. 8 t + 7;
// - values [DIM / 16][lane][2 halves of 8 dimensions][2 halves of 8 tokens][2]: dimension g at tokens 2 t and 2 t + 1.

[[maybe_unused]] static const int PAGE_TOKENS = 16;

template <int KV_HEADS, int DIM>
INLINE size_t page_offset(int layer, int num_pages, int page, int is_value, int head) {
    return (((size_t)layer * num_pages + page) * 2 + is_value) * (KV_HEADS * PAGE_TOKENS * DIM) +
           head * (PAGE_TOKENS * DIM);
}

// Elements from a page's start.
INLINE int key_offset(int token, int dimension) {
    int half = token / 8, g = token % 8, t = dimension % 32 / 8;
    return ((dimension / 32 * 2 + half) * 32 + g * 4 + t) * 8 + dimension % 8;
}

INLINE int value_offset(int token, int dimension) {
    int g = dimension % 8, t = token % 8 / 2;
    return (dimension / 16 * 32 + g * 4 + t) * 8 + dimension % 16 / 8 * 4 + token / 8 * 2 + token % 2;
}
