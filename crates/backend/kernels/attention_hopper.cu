// Attention of 128 consecutive tokens of one request by Hopper's asynchronous matrix instructions, for
// prefill (16-bit types, sm_90a).
//
// Block (query head, tile), three warpgroups: one brings K and V, two compute 64 tokens each (Shah et al. 2024,
// "FlashAttention-3"). Queries lie in shared memory; K and V go through STAGES places of it, 128 positions at a
// time; all in panels of 64 elements whose 16-byte pieces are exchanged as the 128-byte swizzle of wgmma
// expects. Scores and output stay in registers. The computing warpgroups take turns to queue their products, so
// that one works out its weights while the other multiplies; and the product of a part's weights with V is
// queued together with the next part's scores. DIM is 64 or 128, the first that holds a head.

constexpr u32 KEYS = 128, STAGES = 3, GROUP = 128, THREADS = 3 * GROUP, PANELS = DIM / 64;
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

// Barriers in shared memory: of each place, that it is filled, and that it is free.
__device__ __forceinline__ void make_barrier(u32 at, u32 arrivals) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(at), "r"(arrivals) : "memory"); }
__device__ __forceinline__ void arrive(u32 at) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(at) : "memory"); }
// Until the phase of that parity has ended.
__device__ __forceinline__ void wait_for_barrier(u32 at, u32 parity) {
  asm volatile("{.reg .pred p; WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @p bra DONE; bra WAIT; DONE:}" :: "r"(at), "r"(parity) : "memory");
}
// The computing warpgroups' turns: barriers 1 and 2 of the block.
__device__ __forceinline__ void await_turn(u32 group) { asm volatile("bar.sync %0, %1;" :: "r"(1 + group), "n"(2 * GROUP) : "memory"); }
__device__ __forceinline__ void give_turn(u32 group) { asm volatile("bar.arrive %0, %1;" :: "r"(1 + group), "n"(2 * GROUP) : "memory"); }

// An operand at a shared address: 128-byte swizzle, rows of 128 bytes in groups of eight, panels.
__device__ __forceinline__ u64 describe(u32 address) {
  return (u64)((address & 0x3ffffu) >> 4) | (u64)(PANEL >> 4) << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}

// One tile of one query head.
struct Work {
  Tile tile;
  const u32* pages;
  u32 head, kv_head, begin, end, start, parts;
  __device__ __forceinline__ Work(const Heads& h, const Tile* tiles, const u32* all_pages) {
    tile = tiles[gridDim.y - 1 - blockIdx.y];  // the longest first
    pages = all_pages + tile.first_page;
    head = blockIdx.x;
    kv_head = head / (h.heads / h.kv_heads);
    begin = first_visible(h, tile.position);
    end = tile.position + tile.count;
    start = begin / KEYS * KEYS;
    parts = (end - start + KEYS - 1) / KEYS;
  }
};

// Copies queries, K and V. The rows of a thread are multiples of 8 apart, so its pieces lie alike in all.
__device__ __forceinline__ void bring(const Work& work, const elem* qkv, const elem* k_cache, const elem* v_cache, const Heads& h, u32 queries, u32 filled, u32 freed) {
  constexpr u32 PIECES = DIM / 8, ROWS_AT_ONCE = GROUP / PIECES, LOADS = KEYS / ROWS_AT_ONCE, NO_SLOT = 0xffffffffu;
  const u32 dim = h.head_dim, piece = threadIdx.x % PIECES, first_row = threadIdx.x / PIECES, ring = queries + HALF;
  const u32 column = piece * 8 < dim ? piece * 8 : 0, place_of_piece = piece / 8 * PANEL + first_row * 128 + ((piece ^ first_row) & 7) * 16;
  const elem *keys_at = k_cache + work.kv_head * dim + column, *values_at = v_cache + work.kv_head * dim + column;
  const u32 slot_width = h.kv_heads * dim;
  const u64 row_width = (u64)(h.heads + 2 * h.kv_heads) * dim;
#pragma unroll
  for (u32 i = 0; i < LOADS; i++) {
    const u32 t = first_row + i * ROWS_AT_ONCE;
    const bool real = t < work.tile.count && piece * 8 < dim;
    copy16_to(queries + place_of_piece + i * ROWS_AT_ONCE * 128, qkv + (work.tile.row + (real ? t : 0)) * row_width + (u64)work.head * dim + column, real);
  }
  u32 slots[LOADS];
  auto find_slots = [&](u32 part) {
#pragma unroll
    for (u32 i = 0; i < LOADS; i++) {
      const u32 position = work.start + part * KEYS + first_row + i * ROWS_AT_ONCE;
      slots[i] = NO_SLOT;
      if (position >= work.begin && position < work.end && piece * 8 < dim) slots[i] = (work.pages[position >> h.page_shift] << h.page_shift) + (position & ((1u << h.page_shift) - 1));
    }
  };
  find_slots(0);
  for (u32 part = 0; part < work.parts; part++) {
    const u32 place = part % STAGES;
    if (part >= STAGES) wait_for_barrier(freed + place * 8, (part / STAGES - 1) & 1);
    const u32 to = ring + place * PLACE + place_of_piece;
#pragma unroll
    for (u32 i = 0; i < LOADS; i++) {
      const bool real = slots[i] != NO_SLOT;
      const u64 at = real ? (u64)slots[i] * slot_width : 0;
      copy16_to(to + i * ROWS_AT_ONCE * 128, keys_at + at, real);
      copy16_to(to + i * ROWS_AT_ONCE * 128 + HALF, values_at + at, real);
    }
    commit_copies();
    find_slots(part + 1);
    wait_for_copies<0>();
    // What copies wrote is seen by the matrix instructions.
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    arrive(filled + place * 8);
  }
}

// Attention of 64 of the tile's tokens.
__device__ __forceinline__ void compute(const Work& work, elem* out, const Heads& h, u32 queries, u32 filled, u32 freed) {
  // The same for all threads of a warpgroup, which the compiler must know of what branches around products.
  const u32 thread = threadIdx.x - GROUP, group = __shfl_sync(~0u, thread >> 7, 0), lane = thread & 31, quad = lane >> 2, pair = (lane & 3) * 2;
  const u32 dim = h.head_dim, ring = queries + HALF, parts = work.parts, position_0 = work.tile.position;
  // This thread's two tokens.
  const u32 mine[2] = {(thread >> 5) * 16 + quad, (thread >> 5) * 16 + quad + 8};
  // Parts that the warpgroup's tokens see.
  const u32 group_first = position_0 + group * 64, group_end = min(work.end, group_first + 64);
  const u32 my_parts = group * 64 < work.tile.count ? (group_end - work.start + KEYS - 1) / KEYS : 0;
  const float factor = h.cap > 0.f ? 1.f : h.scale * LOG2E;
  float acc[DIM / 8][4], largest[2] = {NOTHING, NOTHING}, total[2] = {0, 0};
  u32 weights[KEYS / 16][4];
  float score[KEYS / 8][4], shrink[2];
#pragma unroll
  for (u32 n = 0; n < DIM / 8; n++) acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0;
  auto ask_scores = [&](u32 part) {
    const u32 keys = ring + part % STAGES * PLACE, my_queries = queries + group * 64 * 128;
#pragma unroll
    for (u32 s = 0; s < DIM / 16; s++) {
      const u32 step = s / 4 * PANEL + s % 4 * 32;
      multiply_keys(score, describe(my_queries + step), describe(keys + step), s > 0);
    }
    commit_products();
  };
  auto add_values = [&](u32 part) {
    const u32 values = ring + part % STAGES * PLACE + HALF;
#pragma unroll
    for (u32 s = 0; s < KEYS / 16; s++) multiply_values(acc, weights[s], describe(values + s * 2048));
    commit_products();
  };
  // Scores to weights, not yet rounded; `shrink` is what earlier sums lose.
  auto weigh = [&](u32 part) {
    const u32 base = work.start + part * KEYS;
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
          const u32 position = base + n * 8 + pair + (i & 1), p = position_0 + mine[i >> 1];
          if (position > p || position < first_visible(h, p)) score[n][i] = -__int_as_float(0x7f800000);
        }
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
  };
  auto round_weights = [&]() {
#pragma unroll
    for (u32 s = 0; s < KEYS / 16; s++)
#pragma unroll
      for (u32 i = 0; i < 4; i++) weights[s][i] = pack2(score[2 * s + (i >> 1)][(i & 1) * 2], score[2 * s + (i >> 1)][(i & 1) * 2 + 1]);
  };
  auto wait_until_filled = [&](u32 part) { wait_for_barrier(filled + part % STAGES * 8, part / STAGES & 1); };
  auto free_place = [&](u32 part) {
    if (lane == 0) arrive(freed + part % STAGES * 8);
  };

  if (group == 1) give_turn(0);
  if (my_parts) {
    wait_until_filled(0);
    await_turn(group);
    begin_products();
    ask_scores(0);
    give_turn(group ^ 1);
    wait_for_products<0, KEYS / 8>(score);
    weigh(0);
    round_weights();
    for (u32 part = 1; part < my_parts; part++) {
      wait_until_filled(part);
      await_turn(group);
      begin_products();
      ask_scores(part);
      add_values(part - 1);
      give_turn(group ^ 1);
      wait_for_products<1, KEYS / 8>(score);
      weigh(part);
      wait_for_products<0, DIM / 8>(acc);
      free_place(part - 1);
#pragma unroll
      for (u32 n = 0; n < DIM / 8; n++)
#pragma unroll
        for (u32 i = 0; i < 4; i++) acc[n][i] *= shrink[i >> 1];
      round_weights();
    }
    begin_products();
    add_values(my_parts - 1);
    wait_for_products<0, DIM / 8>(acc);
    free_place(my_parts - 1);
  }
  // The other warpgroup may still need turns and places.
  for (u32 part = my_parts; part < parts; part++) {
    await_turn(group);
    give_turn(group ^ 1);
    wait_until_filled(part);
    free_place(part);
  }
  if (group == 0) await_turn(0);
#pragma unroll
  for (u32 r = 0; r < 2; r++) {
    total[r] += __shfl_xor_sync(~0u, total[r], 1);
    total[r] += __shfl_xor_sync(~0u, total[r], 2);
    if (mine[r] >= work.tile.count) continue;
    const float share = 1.f / total[r];
    elem* to = out + ((u64)(work.tile.row + mine[r]) * h.heads + work.head) * dim;
#pragma unroll
    for (u32 n = 0; n < DIM / 8; n++) {
      const u32 d = n * 8 + pair;
      if (d < dim) *(u32*)(to + d) = pack2(acc[n][2 * r] * share, acc[n][2 * r + 1] * share);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_tile(const elem* qkv, const elem* k, const elem* v, const Tile* tiles, const u32* pages, elem* out, Heads h) {
  extern __shared__ uint4 memory[];
  __shared__ u64 barriers[2 * STAGES];
  // The swizzle counts from multiples of 1024 bytes.
  const u32 queries = (shared_address(memory) + 1023) & ~1023u, filled = shared_address(barriers), freed = filled + STAGES * 8;
  if (threadIdx.x == 0) {
    for (u32 i = 0; i < STAGES; i++) {
      make_barrier(filled + i * 8, GROUP);
      make_barrier(freed + i * 8, 2 * GROUP / 32);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  let_next_start();
  wait_for_previous();
  const Work work(h, tiles, pages);
  if (threadIdx.x < GROUP) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    bring(work, qkv, k, v, h, queries, filled, freed);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    compute(work, out, h, queries, filled, freed);
  }
}
