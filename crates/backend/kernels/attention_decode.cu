// Attention of one token at a time on tensor cores, for decode (16-bit types only).
//
// A unit is a token and up to ROWS query heads of one of its KV heads: the rows of mma.m16n8k16. The work of
// a launch is a list of chunks of 64 positions: of the first token's first unit, its second, and so on. Every
// block takes the same number of consecutive chunks, worked out here from the tokens' positions, so a
// launch depends on nothing but how many tokens there are, and uneven contexts cost nothing. A unit that
// several blocks share is joined by the block that finishes last.
//
// A warp takes 16 positions of each chunk, through STAGES places of shared memory that are filled by
// copies in flight; warps meet where a unit begins and where it ends. DIM is 64, 128 or 256, the first
// that holds a head.
constexpr u32 WARPS = 4, KEYS = 16, CHUNK = WARPS * KEYS, THREADS = WARPS * 32;
// Tokens of a launch, at most.
constexpr u32 TOKENS_MAX = 512;
constexpr u32 NO_SLOT = 0xffffffffu;
// Steps of a product over a row, and its 16-byte pieces.
constexpr u32 STEPS = DIM / 16, PIECES = DIM / 8;
// Blocks of a multiprocessor that registers leave room for.
constexpr int RESIDENT = DIM == 64 ? 4 : DIM == 128 ? 3 : 1;

__device__ __forceinline__ u32 chunks_of(const Heads& h, const Token& token) {
  return (token.position + CHUNK - first_visible(h, token.position)) / CHUNK;
}

// starts[t] = chunks of one unit of the tokens before t; the last is the sum.
__device__ __forceinline__ void sum_chunks(const Heads& h, const Token* tokens, u32 count, u32* starts) {
  constexpr u32 EACH = TOKENS_MAX / THREADS;
  __shared__ u32 totals[WARPS];
  const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  u32 chunks[EACH], sum = 0;
#pragma unroll
  for (u32 i = 0; i < EACH; i++) {
    const u32 t = threadIdx.x * EACH + i;
    chunks[i] = t < count ? chunks_of(h, tokens[t]) : 0;
    sum += chunks[i];
  }
  u32 before = sum;
#pragma unroll
  for (u32 o = 1; o < 32; o <<= 1) {
    const u32 other = __shfl_up_sync(~0u, before, o);
    if (lane >= o) before += other;
  }
  if (lane == 31) totals[warp] = before;
  __syncthreads();
  before -= sum;
  for (u32 w = 0; w < warp; w++) before += totals[w];
#pragma unroll
  for (u32 i = 0; i < EACH; i++) {
    starts[threadIdx.x * EACH + i] = before;
    before += chunks[i];
  }
  if (threadIdx.x == THREADS - 1) starts[TOKENS_MAX] = before;
  __syncthreads();
}

// A unit and its chunks `start .. end` in the list.
struct Unit {
  u32 token_index, index, start, end;
  Token token;
  // The first position that the token sees.
  u32 begin;

  __device__ __forceinline__ void enter(const Heads& h, const Token* tokens) {
    token = tokens[token_index];
    begin = first_visible(h, token.position);
  }
  // To the unit of chunk `x`.
  __device__ __forceinline__ void find(const Heads& h, const Token* tokens, const u32* starts, u32 units, u32 x) {
    u32 low = 0, high = TOKENS_MAX;
    while (high - low > 1) {
      const u32 middle = (low + high) / 2;
      if (starts[middle] * units <= x) low = middle; else high = middle;
    }
    const u32 chunks = starts[low + 1] - starts[low];
    token_index = low;
    index = (x - starts[low] * units) / chunks;
    start = starts[low] * units + index * chunks;
    end = start + chunks;
    enter(h, tokens);
  }
  // To the next one; there must be one.
  __device__ __forceinline__ void advance(const Heads& h, const Token* tokens, u32 units) {
    u32 chunks = end - start;
    if (++index == units) {
      index = 0;
      token_index++;
      enter(h, tokens);
      chunks = chunks_of(h, token);
    }
    start = end;
    end += chunks;
  }
};

// Where element `d` of a row lies in a warp's sums: rows start in different banks.
__device__ __forceinline__ u32 sum_place(u32 row, u32 d) { return row * DIM + (((d >> 3) ^ (row & 7)) << 3) + (d & 7); }

struct Inputs {
  const elem *qkv, *k_cache, *v_cache;
  const Token* tokens;
  u32 count;
  const u32* all_pages;
};
// Where units that are cut leave their parts: two for each block, of the unit that it found begun and of
// the one that it began; `finished[b]` counts the parts of the unit that block b began.
struct Parts { float* sums; float2* states; u32* finished; };

// A warp's positions of a chunk, of which the first `visible` count, against its rows (8 for each of HALVES):
// K at `keys`, V behind it.
template <int HALVES>
__device__ __forceinline__ void attend_chunk(const Heads& h, const elem* keys, u32 visible, const u32 (*query)[2 * HALVES], float (*acc)[4], float* largest, float* sum) {
  constexpr bool WIDE = HALVES == 2;
  const u32 lane = threadIdx.x & 31, pair = (lane & 3) * 2;
  const elem* values = keys + KEYS * DIM;
  float score[2][4];
#pragma unroll
  for (int i = 0; i < 4; i++) score[0][i] = score[1][i] = 0;
#pragma unroll
  for (u32 s = 0; s < STEPS; s++) {
    const u32 row = (lane >> 4) * 8 + (lane & 7), piece = s * 2 + ((lane >> 3) & 1);
    u32 a[4] = {query[s][0], 0, query[s][1], 0}, b[4];
    if (WIDE) { a[1] = query[s][1]; a[2] = query[s][2]; a[3] = query[s][3]; }
    load_matrices(b, keys + row * DIM + (piece ^ (lane & 7)) * 8);
    mma(score[0], a, b[0], b[1]);
    mma(score[1], a, b[2], b[3]);
  }
  u32 weights[4] = {0, 0, 0, 0};
#pragma unroll
  for (int r = 0; r < HALVES; r++) {
    float now = largest[r];
#pragma unroll
    for (u32 n = 0; n < 2; n++)
#pragma unroll
      for (u32 i = 0; i < 2; i++) {
        float& e = score[n][2 * r + i];
        e = n * 8 + pair + i < visible ? exponent(h, e) : -__int_as_float(0x7f800000);
        now = fmaxf(now, e);
      }
    now = fmaxf(now, __shfl_xor_sync(~0u, now, 1));
    now = fmaxf(now, __shfl_xor_sync(~0u, now, 2));
    const float shrink = power2(largest[r] - now);
    largest[r] = now;
    sum[r] *= shrink;
#pragma unroll
    for (u32 n = 0; n < PIECES; n++) { acc[n][2 * r] *= shrink; acc[n][2 * r + 1] *= shrink; }
#pragma unroll
    for (u32 n = 0; n < 2; n++) {
      const float low = power2(score[n][2 * r] - now), high = power2(score[n][2 * r + 1] - now);
      sum[r] += low + high;
      weights[2 * n + r] = pack2(low, high);
    }
  }
#pragma unroll
  for (u32 n = 0; n < STEPS; n++) {
    u32 b[4];
    load_matrices_turned(b, values + (lane & 15) * DIM + ((n * 2 + (lane >> 4)) ^ (lane & 7)) * 8);
    mma(acc[2 * n], weights, b[0], b[1]);
    mma(acc[2 * n + 1], weights, b[2], b[3]);
  }
}

// Where a unit's result goes: rows of `dim` elements.
template <int ROWS>
struct Result {
  elem* out;
  u32 dim, rows;
  // Calls each(row, d) for every fourth element of the rows, dealt to the threads.
  template <typename Each>
  __device__ __forceinline__ void each_four(Each each) const {
    for (u32 i = threadIdx.x; i < rows * (DIM / 4); i += THREADS) each(i / (DIM / 4), i % (DIM / 4) * 4);
  }
  __device__ __forceinline__ void put(u32 row, u32 d, const float* sums, float total) const {
    if (d < dim) *(uint2*)(out + row * dim + d) = make_uint2(pack2(sums[0] / total, sums[1] / total), pack2(sums[2] / total, sums[3] / total));
  }
};

__device__ __forceinline__ void add_scaled(float* sums, float4 x, float factor) {
  sums[0] += x.x * factor; sums[1] += x.y * factor; sums[2] += x.z * factor; sums[3] += x.w * factor;
}

// From the warps' sums and states: the result of a whole unit, else the block's part of it. `places` is the
// first warp's; those of the others are a ring apart.
template <int ROWS>
__device__ __forceinline__ void join_warps(const Result<ROWS>& result, const float* places, const float2 (*states)[ROWS], const Parts& parts, u32 part, bool whole) {
  result.each_four([&](u32 row, u32 d) {
    float now = NOTHING, total = 0, sums[4] = {0, 0, 0, 0};
#pragma unroll
    for (u32 w = 0; w < WARPS; w++) now = fmaxf(now, states[w][row].x);
#pragma unroll
    for (u32 w = 0; w < WARPS; w++) {
      const float factor = power2(states[w][row].x - now);
      total += states[w][row].y * factor;
      add_scaled(sums, *(const float4*)(places + w * STAGES * KEYS * DIM + sum_place(row, d)), factor);
    }
    if (whole) return result.put(row, d, sums, total);
    *(float4*)(parts.sums + ((u64)part * ROWS + row) * DIM + d) = make_float4(sums[0], sums[1], sums[2], sums[3]);
    if (d == 0) parts.states[part * ROWS + row] = make_float2(now, total);
  });
}

// The result of a unit that `count` blocks share, of which `owner` is the first. Parts are asked for TOGETHER at a time.
template <int ROWS>
__device__ __forceinline__ void join_parts(const Result<ROWS>& result, const Parts& parts, u32 owner, u32 count) {
  constexpr u32 TOGETHER = 16;
  __threadfence();
  result.each_four([&](u32 row, u32 d) {
    float largest = NOTHING, total = 0, sums[4] = {0, 0, 0, 0};
    for (u32 first = 0; first < count; first += TOGETHER) {
      float2 state[TOGETHER];
      float4 sum[TOGETHER];
#pragma unroll
      for (u32 i = 0; i < TOGETHER; i++) {
        // The owner's part is its second, every other block's its first.
        const u32 p = first + i, place = ((owner + p) * 2 + (p == 0)) * ROWS + row;
        state[i] = p < count ? __ldcg(&parts.states[place]) : make_float2(NOTHING, 0.f);
        sum[i] = p < count ? __ldcg((const float4*)(parts.sums + (u64)place * DIM + d)) : make_float4(0, 0, 0, 0);
      }
      float now = largest;
#pragma unroll
      for (u32 i = 0; i < TOGETHER; i++) now = fmaxf(now, state[i].x);
      const float shrink = power2(largest - now);
      largest = now;
      total *= shrink;
#pragma unroll
      for (u32 e = 0; e < 4; e++) sums[e] *= shrink;
#pragma unroll
      for (u32 i = 0; i < TOGETHER; i++) {
        const float factor = power2(state[i].x - now);
        total += state[i].y * factor;
        add_scaled(sums, sum[i], factor);
      }
    }
    result.put(row, d, sums, total);
  });
}

template <int ROWS>
__device__ __forceinline__ void attention_decode(const Inputs& in, elem* out, const Parts& parts, const Heads& h) {
  constexpr u32 AT_ONCE = 32 / PIECES, PLACE = 2 * KEYS * DIM;
  constexpr u32 QUERY_STRIDE = DIM + 8;
  constexpr bool WIDE = ROWS > 8;  // rows 8..15 are there
  constexpr int HALVES = WIDE ? 2 : 1;
  extern __shared__ uint4 memory[];
  __shared__ u32 starts[TOKENS_MAX + 1];
  __shared__ float2 states[WARPS][ROWS];
  __shared__ u32 is_last;
  let_next_start();
  const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31, quad = lane >> 2, pair = (lane & 3) * 2;
  elem* ring = (elem*)memory + warp * STAGES * PLACE;
  elem* queries = (elem*)memory + WARPS * STAGES * PLACE;
  const u32 group = h.heads / h.kv_heads, cuts = (group + ROWS - 1) / ROWS, units = h.kv_heads * cuts, dim = h.head_dim;

  sum_chunks(h, in.tokens, in.count, starts);
  const u32 total = starts[TOKENS_MAX] * units, share = (total + gridDim.x - 1) / gridDim.x;
  const u32 first = blockIdx.x * share, last = min(first + share, total);
  if (first >= last) return;

  // The side that asks: `ahead` is the unit of chunk `next`, `slot` where the key of this lane (mod 16) lies.
  Unit ahead;
  ahead.find(h, in.tokens, starts, units, first);
  Unit unit = ahead;
  u32 next = first, slot, asked_queries = 0;
  auto find_slot = [&]() {
    const u32 position = ahead.begin + (next - ahead.start) * CHUNK + warp * KEYS + (lane & 15);
    if (position > ahead.token.position) return NO_SLOT;
    const u32 page = in.all_pages[ahead.token.first_page + (position >> h.page_shift)];
    return (page << h.page_shift) + (position & ((1u << h.page_shift) - 1));
  };
  auto query_row = [&](const Unit& u, u32 row) {
    const u32 head = u.index / cuts * group + u.index % cuts * ROWS + row;
    return in.qkv + ((u64)u.token.row * (h.heads + 2 * h.kv_heads) + head) * dim;
  };
  auto head_count = [&](const Unit& u) { return min((u32)ROWS, group - u.index % cuts * ROWS); };
  // Asks for chunk `next` into a place of the ring.
  auto fill = [&](u32 stage) {
    if (next < last) {
      const u32 kv_head = ahead.index / cuts, piece = lane % PIECES;
      elem* to = ring + stage * PLACE;
#pragma unroll
      for (u32 i = 0; i < KEYS / AT_ONCE; i++) {
        const u32 row = i * AT_ONCE + lane / PIECES, from = __shfl_sync(~0u, slot, row);
        const bool real = from != NO_SLOT && piece * 8 < dim;
        const u64 at = real ? ((u64)from * h.kv_heads + kv_head) * dim + piece * 8 : 0;
        elem* place = to + row * DIM + (piece ^ (row & 7)) * 8;
        copy16(place, in.k_cache + at, real);
        copy16(place + KEYS * DIM, in.v_cache + at, real);
      }
      if (next == ahead.start && next != first) {
        asked_queries = asked_queries + 1 == STAGES ? 0 : asked_queries + 1;
        for (u32 i = threadIdx.x; i < head_count(ahead) * PIECES; i += THREADS) {
          const u32 row = i / PIECES, d = i % PIECES * 8;
          copy16(queries + (asked_queries * ROWS + row) * QUERY_STRIDE + d, query_row(ahead, row) + (d < dim ? d : 0), d < dim);
        }
      }
      if (++next < last) {
        if (next == ahead.end) ahead.advance(h, in.tokens, units);
        slot = find_slot();
      }
    }
    commit_copies();
  };

  // K and V of earlier steps are older than the previous kernel, as tokens and pages are; queries and
  // the newest positions are not.
  slot = find_slot();
#pragma unroll
  for (u32 stage = 0; stage < STAGES; stage++) {
    const u32 chunk_end = ahead.begin + (next - ahead.start + 1) * CHUNK;
    if (min(chunk_end, ahead.token.position + 1) > ahead.token.fresh || ahead.start > first) wait_for_previous();
    fill(stage);
  }
  wait_for_previous();
  for (u32 i = threadIdx.x; i < head_count(unit) * PIECES; i += THREADS) {
    const u32 row = i / PIECES, d = i % PIECES * 8;
    *(uint4*)(queries + row * QUERY_STRIDE + d) = d < dim ? load16(query_row(unit, row) + d) : make_uint4(0, 0, 0, 0);
  }

  u32 stage = 0, my_queries = 0;
  for (u32 x = first;;) {
    const u32 stop = min(unit.end, last);
    wait_for_copies<STAGES - 1>();
    __syncthreads();
    // Operand A; a row that is not there repeats another or is left over, and its result is not kept.
    u32 query[STEPS][2 * HALVES];
#pragma unroll
    for (u32 s = 0; s < STEPS; s += 3 - HALVES) {
      const elem* from = queries + my_queries * ROWS * QUERY_STRIDE + s * 16;
      if (WIDE) load_matrices(query[s], from + (lane & 15) * QUERY_STRIDE + (lane >> 4) * 8);
      else load_matrices(query[s], from + (lane & 7) % ROWS * QUERY_STRIDE + (lane >> 3) * 8);
    }
    my_queries = my_queries + 1 == STAGES ? 0 : my_queries + 1;
    float acc[PIECES][4], largest[HALVES], sum[HALVES];
#pragma unroll
    for (u32 n = 0; n < PIECES; n++) acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0;
#pragma unroll
    for (int r = 0; r < HALVES; r++) { largest[r] = NOTHING; sum[r] = 0; }

    for (;;) {
      wait_for_copies<STAGES - 1>();
      __syncwarp();
      const elem* keys = ring + stage * PLACE;
      const u32 from = unit.begin + (x - unit.start) * CHUNK + warp * KEYS;
      if (from <= unit.token.position) {
        attend_chunk<HALVES>(h, keys, unit.token.position + 1 - from, query, acc, largest, sum);
      }
      __syncwarp();
      if (++x == stop) break;
      fill(stage);
      stage = stage + 1 == STAGES ? 0 : stage + 1;
    }

    // The warps' sums, each in the place that it has just read; then over the warps.
    float* sums = (float*)(ring + stage * PLACE);
#pragma unroll
    for (int r = 0; r < HALVES; r++) {
      sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
      sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
      const u32 row = quad + 8 * r;
      if (row >= ROWS) continue;
      if (pair == 0) states[warp][row] = make_float2(largest[r], sum[r]);
#pragma unroll
      for (u32 n = 0; n < PIECES; n++) *(float2*)(sums + sum_place(row, n * 8 + pair)) = make_float2(acc[n][2 * r], acc[n][2 * r + 1]);
    }
    __syncthreads();
    const bool begun_here = unit.start >= first, whole = begun_here && unit.end <= last;
    const Result<ROWS> result{out + ((u64)unit.token.row * h.heads + unit.index / cuts * group + unit.index % cuts * ROWS) * dim, dim, head_count(unit)};
    join_warps(result, (const float*)memory + stage * (PLACE / 2), states, parts, blockIdx.x * 2 + begun_here, whole);
    if (!whole) {
      const u32 owner = unit.start / share, count = (unit.end - 1) / share - owner + 1;
      __threadfence();
      __syncthreads();
      if (threadIdx.x == 0) is_last = atomicInc(parts.finished + owner, count - 1) == count - 1;
      __syncthreads();
      if (is_last) join_parts(result, parts, owner, count);
    }
    if (x == last) return;
    __syncthreads();
    fill(stage);
    stage = stage + 1 == STAGES ? 0 : stage + 1;
    unit.advance(h, in.tokens, units);
  }
}

#define ATTENTION_DECODE(ROWS)                                                                              \
  extern "C" __global__ void __launch_bounds__(THREADS, ROWS > 8 && DIM == 128 ? 2 : RESIDENT) attention_decode_##ROWS(const elem* qkv, const elem* k, const elem* v, const Token* tokens, const u32* pages, elem* out, float* sums, float2* states, u32* finished, Heads h, u32 count) { \
    attention_decode<ROWS>(Inputs{qkv, k, v, tokens, count, pages}, out, Parts{sums, states, finished}, h); }
ATTENTION_DECODE(4)
ATTENTION_DECODE(8)
#if DIM < 256
ATTENTION_DECODE(16)
#endif
