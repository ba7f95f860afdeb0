// Attention of consecutive tokens of one request on tensor cores, for prefill (16-bit types only).
//
// Block (tile, query head, half of the tile's 128 tokens), four warps of 16 tokens each. K and V go through shared memory 64 positions
// at a time; scores and output stay in the registers of mma.m16n8k16 (Dao 2023, "FlashAttention-2"). DIM is 64, 128 or 256, the first that holds a
// head.

constexpr int KEYS = 64;
constexpr u32 TOKENS = 64;

// Rows of shared memory start in different banks.
constexpr int STRIDE = DIM + 8;

// What a thread keeps of its two tokens: outputs, and the softmax's maxima and sums.
struct Sums {
  float acc[DIM / 8][4], largest[2], total[2];
  __device__ __forceinline__ Sums() {
#pragma unroll
    for (int n = 0; n < DIM / 8; n++) acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0;
    largest[0] = largest[1] = NOTHING;
    total[0] = total[1] = 0;
  }
};

// Positions `base ..` of K and V into shared memory, zeros for those outside `begin .. end`.
__device__ __forceinline__ void load_positions(elem* keys, elem* values, const elem* k_cache, const elem* v_cache, const Heads& h, const u32* pages, u32 kv_head, u32 base, u32 begin, u32 end) {
  for (u32 i = threadIdx.x; i < KEYS * (DIM / 8); i += blockDim.x) {
    const u32 position = base + i / (DIM / 8), d = i % (DIM / 8) * 8;
    uint4 k = make_uint4(0, 0, 0, 0), v = k;
    if (position >= begin && position < end && d < h.head_dim) {
      const u64 at = kv_offset(h, pages, position, kv_head) + d;
      k = load16(k_cache + at);
      v = load16(v_cache + at);
    }
    *(uint4*)(keys + i / (DIM / 8) * STRIDE + d) = k;
    *(uint4*)(values + i / (DIM / 8) * STRIDE + d) = v;
  }
}

// Dot products of the queries and the positions in shared memory.
__device__ __forceinline__ void score_positions(float (*score)[4], const u32 (*query)[4], const elem* keys) {
  const u32 lane = threadIdx.x & 31;
#pragma unroll
  for (int n = 0; n < KEYS / 8; n++) score[n][0] = score[n][1] = score[n][2] = score[n][3] = 0;
#pragma unroll
  for (int s = 0; s < DIM / 16; s++)
#pragma unroll
    for (int n = 0; n < KEYS / 16; n++) {
      u32 b[4];
      load_matrices(b, keys + (n * 16 + (lane >> 4) * 8 + (lane & 7)) * STRIDE + s * 16 + ((lane >> 3) & 1) * 8);
      mma(score[2 * n], query[s], b[0], b[1]);
      mma(score[2 * n + 1], query[s], b[2], b[3]);
    }
}

// Masks scores of positions `base ..`, turns them into weights, and shrinks the sums to the new maxima. The tokens stand
// at `token[0]` and `token[1]`.
__device__ __forceinline__ void weigh(float (*score)[4], Sums& sums, const Heads& h, const u32* token, u32 base) {
  const u32 pair = (threadIdx.x & 3) * 2;
  float now[2] = {sums.largest[0], sums.largest[1]};
#pragma unroll
  for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 position = base + n * 8 + pair + (i & 1), p = token[i >> 1];
      const bool visible = position <= p && position >= first_visible(h, p);
      score[n][i] = visible ? exponent(h, score[n][i]) : -__int_as_float(0x7f800000);
      now[i >> 1] = fmaxf(now[i >> 1], score[n][i]);
    }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    now[r] = fmaxf(now[r], __shfl_xor_sync(~0u, now[r], 1));
    now[r] = fmaxf(now[r], __shfl_xor_sync(~0u, now[r], 2));
    const float shrink = exp2f(sums.largest[r] - now[r]);
    sums.largest[r] = now[r];
    sums.total[r] *= shrink;
#pragma unroll
    for (int n = 0; n < DIM / 8; n++) { sums.acc[n][2 * r] *= shrink; sums.acc[n][2 * r + 1] *= shrink; }
  }
#pragma unroll
  for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      score[n][i] = exp2f(score[n][i] - now[i >> 1]);
      sums.total[i >> 1] += score[n][i];
    }
}

// Adds the values of the positions in shared memory by their weights.
__device__ __forceinline__ void add_values(Sums& sums, const float (*weight)[4], const elem* values) {
  const u32 lane = threadIdx.x & 31;
#pragma unroll
  for (int s = 0; s < KEYS / 16; s++) {
    const u32 a[4] = {pack2(weight[2 * s][0], weight[2 * s][1]), pack2(weight[2 * s][2], weight[2 * s][3]), pack2(weight[2 * s + 1][0], weight[2 * s + 1][1]), pack2(weight[2 * s + 1][2], weight[2 * s + 1][3])};
#pragma unroll
    for (int n = 0; n < DIM / 16; n++) {
      u32 b[4];
      load_matrices_turned(b, values + (s * 16 + ((lane >> 3) & 1) * 8 + (lane & 7)) * STRIDE + n * 16 + (lane >> 4) * 8);
      mma(sums.acc[2 * n], a, b[0], b[1]);
      mma(sums.acc[2 * n + 1], a, b[2], b[3]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(128) attention_tile(const elem* qkv, const elem* k_cache, const elem* v_cache, const Tile* tiles, const u32* all_pages, elem* out, Heads h) {
  extern __shared__ uint4 memory[];
  elem* keys = (elem*)memory;
  elem* values = keys + KEYS * STRIDE;
  let_next_start();
  wait_for_previous();
  Tile tile = tiles[blockIdx.x];
  const u32 skipped = blockIdx.z * TOKENS;
  if (skipped >= tile.count) return;
  tile.row += skipped;
  tile.position += skipped;
  tile.count = min(tile.count - skipped, TOKENS);
  const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31, quad = lane >> 2, pair = (lane & 3) * 2;
  const u32 head = blockIdx.y, kv_head = head / (h.heads / h.kv_heads), dim = h.head_dim;
  const u32* pages = all_pages + tile.first_page;
  const u32 begin = first_visible(h, tile.position), end = tile.position + tile.count;
  const u64 row_width = (u64)(h.heads + 2 * h.kv_heads) * dim;

  // This thread's two tokens, and their queries as operand A.
  const u32 mine[2] = {warp * 16 + quad, warp * 16 + quad + 8}, at[2] = {tile.position + mine[0], tile.position + mine[1]};
  u32 query[DIM / 16][4];
#pragma unroll
  for (int s = 0; s < DIM / 16; s++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 t = mine[i & 1], d = s * 16 + pair + (i >> 1) * 8;
      const bool real = t < tile.count && d < dim;
      query[s][i] = real ? *(const u32*)(qkv + (tile.row + t) * row_width + (u64)head * dim + d) : 0;
    }
  Sums sums;
  for (u32 base = begin / KEYS * KEYS; base < end; base += KEYS) {
    __syncthreads();
    load_positions(keys, values, k_cache, v_cache, h, pages, kv_head, base, begin, end);
    __syncthreads();
    float score[KEYS / 8][4];
    score_positions(score, query, keys);
    weigh(score, sums, h, at, base);
    add_values(sums, score, values);
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    sums.total[r] += __shfl_xor_sync(~0u, sums.total[r], 1);
    sums.total[r] += __shfl_xor_sync(~0u, sums.total[r], 2);
    if (mine[r] >= tile.count) continue;
    const float factor = 1.f / sums.total[r];
    elem* to = out + ((u64)(tile.row + mine[r]) * h.heads + head) * dim;
#pragma unroll
    for (int n = 0; n < DIM / 8; n++) {
      const u32 d = n * 8 + pair;
      if (d < dim) *(u32*)(to + d) = pack2(sums.acc[n][2 * r] * factor, sums.acc[n][2 * r + 1] * factor);
    }
  }
}
