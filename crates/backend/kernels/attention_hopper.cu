// Attention of 128 consecutive tokens of one request by Hopper's asynchronous matrix instructions, for
// prefill (16-bit types, sm_90a).
//
// Block (query head, tile), two warpgroups of 64 tokens each. Queries lie in shared memory; K and V go through
// STAGES places of it, 128 positions at a time; all in panels of 64 elements whose 16-byte pieces are
// exchanged as the 128-byte swizzle of wgmma expects. Scores and output stay in registers; the product of a
// part's weights with V runs while the weights of the next part are worked out (Shah et al. 2024,
// "FlashAttention-3"). DIM is 64 or 128, the first that holds a head.

constexpr u32 KEYS = 128, STAGES = 3, THREADS = 256, PANELS = DIM / 64;
// Bytes of a panel, of K or V of a place (or the queries), and of a place.
constexpr u32 PANEL = KEYS * 128, HALF = PANELS * PANEL, PLACE = 2 * HALF;

#if ELEM == 1
#define TYPES ".f32.bf16.bf16"
#else
#define TYPES ".f32.f16.f16"
#endif
#define F4(x, n) "+f"(x[n][0]), "+f"(x[n][1]), "+f"(x[n][2]), "+f"(x[n][3])
#define F16(x, n) F4(x, n), F4(x, n + 1), F4(x, n + 2), F4(x, n + 3)
#define D64 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}"
#define D128                                                                                               \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"  \
  "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}"

// d[64, 128] (+)= a[64, 16] b[128, 16]^T, queries and keys.
__device__ __forceinline__ void multiply_keys(float (*d)[4], u64 a, u64 b, u32 add) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16" TYPES " " D128 ", %64, %65, p, 1, 1, 0, 0;}"
               : F16(d, 0), F16(d, 4), F16(d, 8), F16(d, 12) : "l"(a), "l"(b), "r"(add));
}
// d[64, DIM] += a[64, 16] b[16, DIM], weights and values.
__device__ __forceinline__ void multiply_values(float (*d)[4], const u32* a, u64 b) {
#if DIM == 128
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16" TYPES " " D128 ", {%64,%65,%66,%67}, %68, 1, 1, 1, 1;"
               : F16(d, 0), F16(d, 4), F16(d, 8), F16(d, 12) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#else
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16" TYPES " " D64 ", {%32,%33,%34,%35}, %36, 1, 1, 1, 1;"
               : F16(d, 0), F16(d, 4) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#endif
}
// Before the first product that touches registers written otherwise.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// All groups but the newest PENDING have ended; the compiler learns that `x` has changed.
template <int PENDING, int N>
__device__ __forceinline__ void wait_for_products(float (*x)[4]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(PENDING) : "memory");
#pragma unroll
  for (int n = 0; n < N; n++) asm volatile("" : F4(x, n) :: "memory");
}
// An operand at a shared address: 128-byte swizzle, rows of 128 bytes in groups of eight, panels.
__device__ __forceinline__ u64 describe(u32 address) {
  return (u64)((address & 0x3ffffu) >> 4) | (u64)(PANEL >> 4) << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}

__device__ __forceinline__ void attend(const elem* qkv, const elem* k_cache, const elem* v_cache, const Tile* tiles, const u32* all_pages, elem* out, const Heads& h) {
  constexpr u32 PIECES = DIM / 8, ROWS_AT_ONCE = THREADS / PIECES, LOADS = KEYS / ROWS_AT_ONCE;
  extern __shared__ uint4 memory[];
  // The swizzle counts from multiples of 1024 bytes.
  const u32 queries = (shared_address(memory) + 1023) & ~1023u, ring = queries + HALF;
  wait_for_previous();
  let_next_start();
  // The longest first.
  const Tile tile = tiles[gridDim.y - 1 - blockIdx.y];
  const u32 group = threadIdx.x >> 7, lane = threadIdx.x & 31, quad = lane >> 2, pair = (lane & 3) * 2;
  const u32 head = blockIdx.x, kv_head = head / (h.heads / h.kv_heads), dim = h.head_dim;
  const u32* pages = all_pages + tile.first_page;
  const u32 begin = first_visible(h, tile.position), end = tile.position + tile.count, start = begin / KEYS * KEYS;
  const u32 parts = (end - start + KEYS - 1) / KEYS;
  const u64 row_width = (u64)(h.heads + 2 * h.kv_heads) * dim;

  // Slots of the rows that this thread copies, of the part to be asked for next.
  constexpr u32 NO_SLOT = 0xffffffffu;
  const u32 piece = threadIdx.x % PIECES, first_row = threadIdx.x / PIECES;
  const u32 column = piece * 8 < dim ? piece * 8 : 0, place_of_piece = piece / 8 * PANEL + first_row * 128 + ((piece ^ first_row) & 7) * 16;
  const elem *keys_at = k_cache + kv_head * dim + column, *values_at = v_cache + kv_head * dim + column;
  const u32 slot_width = h.kv_heads * dim;
  u32 next = 0, slots[LOADS];
  auto find_slots = [&]() {
#pragma unroll
    for (u32 i = 0; i < LOADS; i++) {
      const u32 position = start + next * KEYS + first_row + i * ROWS_AT_ONCE;
      slots[i] = NO_SLOT;
      if (position >= begin && position < end && piece * 8 < dim) slots[i] = (pages[position >> h.page_shift] << h.page_shift) + (position & ((1u << h.page_shift) - 1));
    }
  };
  // The rows of a thread are multiples of 8 apart, so its pieces lie alike in all.
  auto fill = [&]() {
    if (next < parts) {
      const u32 to = ring + next % STAGES * PLACE + place_of_piece;
#pragma unroll
      for (u32 i = 0; i < LOADS; i++) {
        const bool real = slots[i] != NO_SLOT;
        const u64 at = real ? (u64)slots[i] * slot_width : 0;
        copy16_to(to + i * ROWS_AT_ONCE * 128, keys_at + at, real);
        copy16_to(to + i * ROWS_AT_ONCE * 128 + HALF, values_at + at, real);
      }
      next++;
      find_slots();
    }
    commit_copies();
  };
  find_slots();
#pragma unroll
  for (u32 i = 0; i < LOADS; i++) {
    const u32 t = first_row + i * ROWS_AT_ONCE;
    const bool real = t < tile.count && piece * 8 < dim;
    copy16_to(queries + place_of_piece + i * ROWS_AT_ONCE * 128, qkv + (tile.row + (real ? t : 0)) * row_width + (u64)head * dim + column, real);
  }
  fill();

  // This thread's two tokens.
  const u32 mine[2] = {(threadIdx.x >> 5) * 16 + quad, (threadIdx.x >> 5) * 16 + quad + 8};
  // Parts that the warpgroup's tokens see.
  const u32 group_first = tile.position + group * 64, group_end = min(end, group_first + 64);
  const u32 my_parts = group * 64 < tile.count ? (group_end - start + KEYS - 1) / KEYS : 0;
  const float factor = h.cap > 0.f ? 1.f : h.scale * LOG2E;
  float acc[DIM / 8][4], largest[2] = {NOTHING, NOTHING}, total[2] = {0, 0};
  u32 weights[KEYS / 16][4];
#pragma unroll
  for (u32 n = 0; n < DIM / 8; n++) acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0;
  auto add_values = [&](u32 part) {
    const u32 values = ring + part % STAGES * PLACE + HALF;
#pragma unroll
    for (u32 s = 0; s < KEYS / 16; s++) multiply_values(acc, weights[s], describe(values + s * 2048));
    commit_products();
  };

  for (u32 part = 0; part < parts; part++) {
    wait_for_copies<0>();
    // What copies wrote is seen by the matrix instructions of all threads.
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (part > my_parts || my_parts == 0) {
      fill();
      continue;
    }
    begin_products();
    if (part == my_parts) {
      add_values(part - 1);
      fill();
      wait_for_products<0, DIM / 8>(acc);
      continue;
    }
    float score[KEYS / 8][4];
    const u32 keys = ring + part % STAGES * PLACE;
#pragma unroll
    for (u32 s = 0; s < DIM / 16; s++) {
      const u32 step = s / 4 * PANEL + s % 4 * 32;
      multiply_keys(score, describe(queries + group * 64 * 128 + step), describe(keys + step), s > 0);
    }
    commit_products();
    if (part) {
      add_values(part - 1);
      fill();
      wait_for_products<1, KEYS / 8>(score);
    } else {
      fill();
      wait_for_products<0, KEYS / 8>(score);
    }
    const u32 base = start + part * KEYS;
    if (h.cap > 0.f)
#pragma unroll
      for (u32 n = 0; n < KEYS / 8; n++)
#pragma unroll
        for (u32 i = 0; i < 4; i++) score[n][i] = exponent(h, score[n][i]);
    if (base + KEYS - 1 > group_first || base < first_visible(h, group_first + 63))
#pragma unroll
      for (u32 n = 0; n < KEYS / 8; n++)
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
          const u32 position = base + n * 8 + pair + (i & 1), p = tile.position + mine[i >> 1];
          if (position > p || position < first_visible(h, p)) score[n][i] = -__int_as_float(0x7f800000);
        }
    float shrink[2];
#pragma unroll
    for (u32 r = 0; r < 2; r++) {
      float now = -__int_as_float(0x7f800000);
#pragma unroll
      for (u32 n = 0; n < KEYS / 8; n++) now = fmaxf(now, fmaxf(score[n][2 * r], score[n][2 * r + 1]));
      now = fmaxf(now, __shfl_xor_sync(~0u, now, 1));
      now = fmaxf(largest[r], fmaxf(now, __shfl_xor_sync(~0u, now, 2)) * factor);
      shrink[r] = power2(largest[r] - now);
      largest[r] = now;
      total[r] *= shrink[r];
#pragma unroll
      for (u32 n = 0; n < KEYS / 8; n++)
#pragma unroll
        for (u32 i = 2 * r; i < 2 * r + 2; i++) {
          score[n][i] = power2(score[n][i] * factor - now);
          total[r] += score[n][i];
        }
    }
    wait_for_products<0, DIM / 8>(acc);
#pragma unroll
    for (u32 n = 0; n < DIM / 8; n++)
#pragma unroll
      for (u32 i = 0; i < 4; i++) acc[n][i] *= shrink[i >> 1];
#pragma unroll
    for (u32 s = 0; s < KEYS / 16; s++)
#pragma unroll
      for (u32 i = 0; i < 4; i++) weights[s][i] = pack2(score[2 * s + (i >> 1)][(i & 1) * 2], score[2 * s + (i >> 1)][(i & 1) * 2 + 1]);
  }
  if (my_parts == parts) {
    begin_products();
    add_values(parts - 1);
    wait_for_products<0, DIM / 8>(acc);
  }
#pragma unroll
  for (u32 r = 0; r < 2; r++) {
    total[r] += __shfl_xor_sync(~0u, total[r], 1);
    total[r] += __shfl_xor_sync(~0u, total[r], 2);
    if (mine[r] >= tile.count) continue;
    const float share = 1.f / total[r];
    elem* to = out + ((u64)(tile.row + mine[r]) * h.heads + head) * dim;
#pragma unroll
    for (u32 n = 0; n < DIM / 8; n++) {
      const u32 d = n * 8 + pair;
      if (d < dim) *(u32*)(to + d) = pack2(acc[n][2 * r] * share, acc[n][2 * r + 1] * share);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_tile(const elem* qkv, const elem* k, const elem* v, const Tile* tiles, const u32* pages, elem* out, Heads h) {
  attend(qkv, k, v, tiles, pages, out, h);
}
