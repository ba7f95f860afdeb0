// What both attention kernels share.
//
// Queries are the first columns of the qkv rows; K and V are `[slot][kv_head][head_dim]` of one layer,
// slot = page * page_size + offset, page_size a power of two. A query at position p sees the positions
// `p + 1 - window ..= p`; nothing else is read, for its page may be gone.
struct Heads {
  u32 heads, kv_heads, head_dim, page_shift;
  // Multiplies the dot products; with `cap`, scores become cap * tanh(score / cap).
  float scale, cap;
  // Positions that a query sees; 0 for all before it.
  u32 window;
};

// A token of the step: its row in qkv and out, its position, where its page table starts, the first
// position of its request that this step writes.
struct Token { u32 row, position, first_page, fresh; };
// Up to 128 consecutive tokens of a request: row of the first in qkv and out, how many, position of the
// first, where the page table starts.
struct Tile { u32 row, count, position, first_page; };

// The maximum before anything was seen; below every score.
constexpr float NOTHING = -1e30f;

// Where a position's row of K or V starts.
__device__ __forceinline__ u64 kv_offset(const Heads& h, const u32* pages, u32 position, u32 kv_head) {
  const u64 slot = ((u64)pages[position >> h.page_shift] << h.page_shift) + (position & ((1u << h.page_shift) - 1));
  return (slot * h.kv_heads + kv_head) * h.head_dim;
}

// A raw dot product as the exponent (to base 2) of the softmax.
__device__ __forceinline__ float exponent(const Heads& h, float dot) {
  const float score = dot * h.scale;
  // tanh(x) = 1 - 2 / (e^2x + 1): a few instructions where the library's takes dozens.
  return (h.cap > 0.f ? h.cap - 2.f * h.cap / (exp2f(2.f * LOG2E / h.cap * score) + 1.f) : score) * LOG2E;
}

__device__ __forceinline__ u32 first_visible(const Heads& h, u32 position) {
  return h.window && position + 1 > h.window ? position + 1 - h.window : 0;
}
