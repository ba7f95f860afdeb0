// Attention of one token at a time, for decode and for whatever the tile kernel does not take.
//
// Block (split, kv head and group of query heads, token); positions of a split go round the warps. LANES
// lanes share a position, so a warp reads 32 / LANES rows of K at once; each such subgroup keeps a
// softmax of its own (maximum, sum, accumulator), joined over subgroups, warps and splits at the end.
// The block that finishes a token's last split joins the splits. DIM is 64, 128 or 256, the first that
// holds a head.

constexpr int WARPS = 4, AT_ONCE = 4;
// Positions of a split are a multiple of this.
constexpr u32 STEP_OF_SPLITS = 64;

// The softmax of a subgroup for each head of a group: this lane's part of the outputs, maxima and sums.
template <int GROUP>
struct Sums {
  float acc[GROUP][8], largest[GROUP], total[GROUP];
  __device__ __forceinline__ Sums() {
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
      largest[g] = NOTHING;
      total[g] = 0;
#pragma unroll
      for (int e = 0; e < 8; e++) acc[g][e] = 0;
    }
  }
};

// Where the splits of a launch leave their parts, `[unit][split][GROUP]`, and how many of a unit's have.
struct Parts {
  float* sums;
  float2* states;
  u32* finished;
};

// Scores of AT_ONCE positions, each subgroup its own; NOTHING for those at `to` and beyond.
template <int LANES, int GROUP>
__device__ __forceinline__ void score_positions(float (*score)[AT_ONCE], const float (*query)[8], const uint4 (*k)[8 / VEC], const Heads& h, u32 base, u32 to) {
  const u32 sub = (threadIdx.x & 31) / LANES;
#pragma unroll
  for (int u = 0; u < AT_ONCE; u++) {
    float key[8];
#pragma unroll
    for (int i = 0; i < 8 / VEC; i++) unpack(k[u][i], key + i * VEC);
    const bool visible = base + u * (32 / LANES) + sub < to;
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
      float dot = 0;
#pragma unroll
      for (int e = 0; e < 8; e++) dot += key[e] * query[g][e];
#pragma unroll
      for (int o = LANES / 2; o; o >>= 1) dot += __shfl_xor_sync(~0u, dot, o);
      score[g][u] = visible ? exponent(h, dot) : NOTHING;
    }
  }
}

// Adds values by their scores.
template <int GROUP>
__device__ __forceinline__ void add_values(Sums<GROUP>& sums, float (*score)[AT_ONCE], const uint4 (*v)[8 / VEC]) {
#pragma unroll
  for (int g = 0; g < GROUP; g++) {
    float now = sums.largest[g];
#pragma unroll
    for (int u = 0; u < AT_ONCE; u++) now = fmaxf(now, score[g][u]);
    const float shrink = exp2f(sums.largest[g] - now);
    sums.largest[g] = now;
    sums.total[g] *= shrink;
#pragma unroll
    for (int e = 0; e < 8; e++) sums.acc[g][e] *= shrink;
#pragma unroll
    for (int u = 0; u < AT_ONCE; u++) {
      // A subgroup that has seen nothing yet would take masked positions for its maximum.
      score[g][u] = score[g][u] > NOTHING ? exp2f(score[g][u] - now) : 0.f;
      sums.total[g] += score[g][u];
    }
  }
#pragma unroll
  for (int u = 0; u < AT_ONCE; u++) {
    float value[8];
#pragma unroll
    for (int i = 0; i < 8 / VEC; i++) unpack(v[u][i], value + i * VEC);
#pragma unroll
    for (int g = 0; g < GROUP; g++)
#pragma unroll
      for (int e = 0; e < 8; e++) sums.acc[g][e] += score[g][u] * value[e];
  }
}

// Joins the subgroups of a warp.
template <int LANES, int GROUP>
__device__ __forceinline__ void join_subgroups(Sums<GROUP>& sums) {
#pragma unroll
  for (int g = 0; g < GROUP; g++)
#pragma unroll
    for (int o = LANES; o < 32; o <<= 1) {
      const float other = __shfl_xor_sync(~0u, sums.largest[g], o), now = fmaxf(sums.largest[g], other);
      const float mine = exp2f(sums.largest[g] - now), theirs = exp2f(other - now);
      sums.total[g] = sums.total[g] * mine + __shfl_xor_sync(~0u, sums.total[g], o) * theirs;
#pragma unroll
      for (int e = 0; e < 8; e++) sums.acc[g][e] = sums.acc[g][e] * mine + __shfl_xor_sync(~0u, sums.acc[g][e], o) * theirs;
      sums.largest[g] = now;
    }
}

// Joins the splits of a unit, if this block brings the last.
template <int LANES, int GROUP>
__device__ __forceinline__ void join_splits(const Parts& parts, const Heads& h, u64 unit, u32 splits, u32 head_count, elem* result) {
  __shared__ u32 is_last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) is_last = atomicInc(parts.finished + unit, splits - 1) == splits - 1;
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  for (int g = 0; g < head_count; g++) {
    const u64 part = unit * gridDim.x * GROUP + g;
    float now = NOTHING, sum = 0;
    for (u32 s = 0; s < splits; s++) now = fmaxf(now, __ldcg(&parts.states[part + s * GROUP]).x);
    for (u32 s = 0; s < splits; s++) {
      const float2 state = __ldcg(&parts.states[part + s * GROUP]);
      sum += state.y * exp2f(state.x - now);
    }
    for (u32 d = threadIdx.x; d < h.head_dim; d += blockDim.x) {
      float a = 0;
      for (u32 s = 0; s < splits; s++)
        a += __ldcg(&parts.sums[(part + s * GROUP) * (LANES * 8) + d]) * exp2f(__ldcg(&parts.states[part + s * GROUP]).x - now);
      put(result + g * h.head_dim + d, a / sum);
    }
  }
}

template <int LANES, int GROUP>
__device__ __forceinline__ void attention_token(const elem* qkv, const elem* k_cache, const elem* v_cache, const Token* tokens, const u32* all_pages, elem* out, const Parts& parts, const Heads& h) {
  constexpr int SUBGROUPS = 32 / LANES, STEP = SUBGROUPS * AT_ONCE;
  const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31, sub = lane / LANES, column = (lane % LANES) * 8;
  __shared__ float warp_sums[WARPS][GROUP][LANES * 8];
  __shared__ float2 states[WARPS][GROUP];
  let_next_start();
  wait_for_previous();
  const Token token = tokens[blockIdx.z];
  const u32 group = h.heads / h.kv_heads, chunks = (group + GROUP - 1) / GROUP;
  const u32 kv_head = blockIdx.y / chunks, first_head = (blockIdx.y % chunks) * GROUP;
  const u32 head0 = kv_head * group + first_head, head_count = min((u32)GROUP, group - first_head);
  const u32 begin = first_visible(h, token.position), end = token.position + 1;
  const u32 per_split = ((end - begin + gridDim.x - 1) / gridDim.x + STEP_OF_SPLITS - 1) / STEP_OF_SPLITS * STEP_OF_SPLITS;
  const u32 from = begin + blockIdx.x * per_split, to = min(end, from + per_split), splits = (end - begin + per_split - 1) / per_split;
  if (from >= end) return;
  const u32* pages = all_pages + token.first_page;
  const bool inside = column < h.head_dim;
  const elem* q = qkv + (u64)token.row * (h.heads + 2 * h.kv_heads) * h.head_dim + (u64)head0 * h.head_dim + column;

  float query[GROUP][8] = {};
#pragma unroll
  for (int g = 0; g < GROUP; g++)
    if (inside && g < head_count) load8(q + g * h.head_dim, query[g]);
  Sums<GROUP> sums;
  for (u32 base = from + warp * STEP; base < to; base += WARPS * STEP) {
    uint4 k[AT_ONCE][8 / VEC], v[AT_ONCE][8 / VEC];
#pragma unroll
    for (int u = 0; u < AT_ONCE; u++) {
      const u32 position = base + u * SUBGROUPS + sub;
#pragma unroll
      for (int i = 0; i < 8 / VEC; i++) k[u][i] = v[u][i] = make_uint4(0, 0, 0, 0);
      if (position < to && inside) {
        const u64 at = kv_offset(h, pages, position, kv_head) + column;
#pragma unroll
        for (int i = 0; i < 8 / VEC; i++) {
          k[u][i] = load16(k_cache + at + i * VEC);
          v[u][i] = load16(v_cache + at + i * VEC);
        }
      }
    }
    float score[GROUP][AT_ONCE];
    score_positions<LANES, GROUP>(score, query, k, h, base, to);
    add_values<GROUP>(sums, score, v);
  }
  join_subgroups<LANES, GROUP>(sums);
#pragma unroll
  for (int g = 0; g < GROUP; g++) {
    if (sub == 0)
#pragma unroll
      for (int e = 0; e < 8; e++) warp_sums[warp][g][column + e] = sums.acc[g][e];
    if (lane == 0) states[warp][g] = make_float2(sums.largest[g], sums.total[g]);
  }
  __syncthreads();
  // Over the warps; then this block's share is done, or the whole token is.
  const u64 unit = (u64)blockIdx.z * gridDim.y + blockIdx.y;
  elem* result = out + ((u64)token.row * h.heads + head0) * h.head_dim;
  for (int g = 0; g < head_count; g++) {
    float now = NOTHING, sum = 0;
    for (int w = 0; w < WARPS; w++) now = fmaxf(now, states[w][g].x);
    for (int w = 0; w < WARPS; w++) sum += states[w][g].y * exp2f(states[w][g].x - now);
    const u64 part = (unit * gridDim.x + blockIdx.x) * GROUP + g;
    if (splits > 1 && threadIdx.x == 0) parts.states[part] = make_float2(now, sum);
    for (u32 d = threadIdx.x; d < h.head_dim; d += blockDim.x) {
      float a = 0;
      for (int w = 0; w < WARPS; w++) a += warp_sums[w][g][d] * exp2f(states[w][g].x - now);
      if (splits > 1) parts.sums[part * (LANES * 8) + d] = a;
      else put(result + g * h.head_dim + d, a / sum);
    }
  }
  if (splits > 1) join_splits<LANES, GROUP>(parts, h, unit, splits, head_count, result);
}

#define ATTENTION_TOKEN(LANES, GROUP, NAME)                                                                 \
  extern "C" __global__ void __launch_bounds__(128) NAME(const elem* qkv, const elem* k, const elem* v, const Token* tokens, const u32* pages, elem* out, float* partial, float2* partial_ml, u32* finished, Heads h) { \
    attention_token<LANES, GROUP>(qkv, k, v, tokens, pages, out, {partial, partial_ml, finished}, h); }
ATTENTION_TOKEN(DIM / 8, 1, attention_token_1)
ATTENTION_TOKEN(DIM / 8, 2, attention_token_2)
ATTENTION_TOKEN(DIM / 8, 4, attention_token_4)
#if DIM < 256
ATTENTION_TOKEN(DIM / 8, 8, attention_token_8)
#endif
