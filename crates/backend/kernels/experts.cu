// A mixture of experts as grouped products (16-bit types only): pairs of (token, expert) are sorted by expert, and each
// expert's weights meet its pairs a tile at a time, so they are read once for as many pairs as a tile takes.
//
// `group` makes the list of tiles, on the device, so that a launch depends on nothing but how many tokens there are;
// `experts_up_*` and `experts_down_*` work through it, and `join_experts` adds each token's pairs up in the order of its choices.

// Experts, at most, and warps of `group`.
constexpr u32 EXPERTS_MAX = 512, GROUP_WARPS = 16;

// Some pairs of one expert: those at `first .. first + count` of the sorted list.
struct Pairs { u32 expert, first, count, unused; };

// Sum of x over the threads before this one; `total` receives that over all. `scratch` holds GROUP_WARPS numbers.
__device__ __forceinline__ u32 sum_before(u32 x, u32* scratch, u32* total) {
  const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  u32 sum = x;
#pragma unroll
  for (u32 o = 1; o < 32; o <<= 1) {
    const u32 other = __shfl_up_sync(~0u, sum, o);
    if (lane >= o) sum += other;
  }
  __syncthreads();
  if (lane == 31) scratch[warp] = sum;
  __syncthreads();
  u32 before = sum - x, all = 0;
#pragma unroll
  for (u32 w = 0; w < GROUP_WARPS; w++) {
    if (w < warp) before += scratch[w];
    all += scratch[w];
  }
  *total = all;
  return before;
}

// Calls `use(pair, expert, lanes of this warp that have the same expert)` for a warp's share of the pairs, in order.
template <class Use>
__device__ __forceinline__ void each_pair(const u32* chosen, u32 pairs, Use use) {
  const u32 share = (pairs + GROUP_WARPS * 32 - 1) / (GROUP_WARPS * 32) * 32, first = (threadIdx.x >> 5) * share;
  for (u32 i = first; i < first + share && i < pairs; i += 32) {
    const u32 pair = i + (threadIdx.x & 31), expert = pair < pairs ? chosen[pair] : EXPERTS_MAX;
    use(pair, expert, __match_any_sync(~0u, expert));
    __syncwarp();
  }
}

// order = the pairs by expert, those of one expert in ascending order; tiles = their runs of at most `width`. One
// block. Chosen experts are below EXPERTS_MAX.
extern "C" __global__ void __launch_bounds__(GROUP_WARPS * 32) group(const u32* chosen, u32 pairs, u32 width, u32* order, Pairs* tiles, u32* tile_count) {
  __shared__ u32 counts[GROUP_WARPS][EXPERTS_MAX + 1], scratch[GROUP_WARPS];
  static_assert(GROUP_WARPS * 32 == EXPERTS_MAX, "a thread owns an expert");
  const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31, expert = threadIdx.x;
#pragma unroll
  for (u32 w = 0; w < GROUP_WARPS; w++) counts[w][expert] = 0;
  wait_for_previous();
  let_next_start();
  __syncthreads();
  each_pair(chosen, pairs, [&](u32, u32 e, u32 same) {
    if (lane == __ffs(same) - 1) counts[warp][e] += __popc(same);
  });
  __syncthreads();
  u32 count = 0, pairs_in_all, tiles_in_all;
#pragma unroll
  for (u32 w = 0; w < GROUP_WARPS; w++) count += counts[w][expert];
  const u32 first = sum_before(count, scratch, &pairs_in_all);
  u32 tile = sum_before((count + width - 1) / width, scratch, &tiles_in_all);
  for (u32 i = 0; i < count; i += width) tiles[tile++] = {expert, first + i, min(width, count - i), 0};
  if (threadIdx.x == 0) *tile_count = tiles_in_all;
  // From counts to the places where each warp puts its pairs.
  u32 place = first;
#pragma unroll
  for (u32 w = 0; w < GROUP_WARPS; w++) {
    const u32 mine = counts[w][expert];
    counts[w][expert] = place;
    place += mine;
  }
  __syncthreads();
  each_pair(chosen, pairs, [&](u32 pair, u32 e, u32 same) {
    const u32 at = counts[warp][e] + __popc(same & ((1u << lane) - 1));
    __syncwarp();
    if (lane == __ffs(same) - 1) counts[warp][e] += __popc(same);
    if (pair < pairs) order[at] = pair;
  });
}

// What both products share: the sorted pairs, and the weights `[experts][rows_out][k]`.
struct Grouped {
  const elem *weights, *x;
  const u32* order;
  const Pairs* tiles;
  const u32* tile_count;
  elem* out;
  // Outputs of a pair, inputs, and pairs of a token.
  u32 outputs, k, per_token;
  int kind;
};

// Where a block stands: a tile of pairs, a tile of outputs, a step of the inputs.
struct Item { u32 tile, outputs, step; };

// act(gate) * up of every pair's expert, at the pair's sorted place; the rows of a tile of weights are 16 of gate, the 16
// of up for the same outputs, and so on, so that both sums meet. Or, unless GATED, the down product of the sorted
// rows, at the pair's own place.
template <class T, bool GATED>
__device__ __forceinline__ void grouped(const Grouped& g) {
  extern __shared__ uint4 memory[];
  elem* ring = (elem*)memory;
  float* sums = (float*)(ring + T::STAGES * T::STAGE);
  constexpr u32 OUTPUTS = GATED ? T::ROWS / 2 : T::ROWS, COPIES = T::TOKENS / T::STRIDE;
  const u32 steps = (g.k + T::DEPTH - 1) / T::DEPTH, output_tiles = (g.outputs + OUTPUTS - 1) / OUTPUTS;
  const bool takes_weights = threadIdx.x < T::LOADERS;
  const u32 thread = threadIdx.x % T::LOADERS, row = thread / T::PIECES;
  // The list was made by the kernel before, or by the one before that, which the one before has waited for
  // when it lets this one start.
  if (GATED) {
    wait_for_previous();
    let_next_start();
  }
  const u32 items = __ldcg(g.tile_count) * output_tiles;
  const u32 mine = items > blockIdx.x ? (items - blockIdx.x - 1) / gridDim.x + 1 : 0, units = mine * steps;
  auto pairs_of = [&](u32 item) {
    const uint4 v = __ldcg((const uint4*)(g.tiles + item / output_tiles));
    return Pairs{v.x, v.y, v.z, 0};
  };
  u32 asked_item = blockIdx.x, asked_step = 0;
  Pairs asked = {0, 0, 0, 0};
  const elem* x_rows[COPIES];
  // Begins the copies of the block's next unit, its `number`-th.
  auto ask = [&](u32 number) {
    if (number < units) {
      if (asked_step == 0) {
        asked = pairs_of(asked_item);
        if (!takes_weights)
#pragma unroll
          for (u32 i = 0; i < COPIES; i++) {
            const u32 pair = row + i * T::STRIDE, at = asked.first + pair;
            x_rows[i] = pair >= asked.count ? nullptr : g.x + (u64)(GATED ? __ldcg(g.order + at) / g.per_token : at) * g.k;
          }
      }
      elem* stage = ring + number % T::STAGES * T::STAGE;
      const u32 column = asked_step * T::DEPTH, first = asked_item % output_tiles * OUTPUTS;
      if (takes_weights)
        load_rows<T, T::ROWS>(stage, thread, column, g.k, [&](u32 i) -> const elem* {
          const u32 r = row + i * T::STRIDE, output = first + (GATED ? (r >> 5) * 16 + (r & 15) : r);
          if (output >= g.outputs) return nullptr;
          const u64 in_expert = GATED ? ((r >> 4) & 1) * g.outputs + output : output;
          return g.weights + ((u64)asked.expert * (GATED ? 2 * g.outputs : g.outputs) + in_expert) * g.k;
        });
      else
        load_rows<T, T::TOKENS>(stage + T::ROWS * T::DEPTH, thread, column, g.k, [&](u32 i) { return x_rows[i]; });
      if (++asked_step == steps) {
        asked_step = 0;
        asked_item += gridDim.x;
      }
    }
    commit_copies();
  };
  if (takes_weights)
    for (u32 i = 0; i < T::STAGES - 1; i++) ask(i);
  if (!GATED) {
    wait_for_previous();
    let_next_start();
  }
  if (!takes_weights)
    for (u32 i = 0; i < T::STAGES - 1; i++) ask(i);
  const WarpPlace<T> warp;
  float acc[T::M][T::N][4] = {};
  u32 item = blockIdx.x, step = 0;
  for (u32 number = 0; number < units; number++) {
    wait_for_copies<T::STAGES - 2>();
    __syncthreads();
    ask(number + T::STAGES - 1);
    multiply<T>(acc, ring + number % T::STAGES * T::STAGE, warp);
    if (++step < steps) continue;
    const Pairs pairs = pairs_of(item);
    const u32 first = item % output_tiles * OUTPUTS;
    drain<T>(acc, sums, warp, [&](u32 token) {
      for (u32 i = threadIdx.x; i < T::CHUNK * (OUTPUTS / 8); i += T::THREADS) {
        const u32 pair = token + i / (OUTPUTS / 8), at = i % (OUTPUTS / 8) * 8, output = first + at;
        if (pair >= pairs.count) break;
        if (output >= g.outputs) continue;
        const float* sum = sums + (pair - token) * T::PITCH + (GATED ? (at >> 4) * 32 + (at & 15) : at);
        float v[8];
        load8_f32(sum, v);
        if (GATED) {
          float up[8];
          load8_f32(sum + 16, up);
#pragma unroll
          for (u32 e = 0; e < 8; e++) v[e] = gated(g.kind, v[e], up[e]);
        }
        const u32 place = pairs.first + pair;
        store8(g.out + (u64)(GATED ? place : __ldcg(g.order + place)) * g.outputs + output, v);
      }
    });
    step = 0;
    item += gridDim.x;
  }
}

#define EXPERTS(NAME, TILE, GATED)                                                                \
  extern "C" __global__ void __launch_bounds__(256, 2) NAME(const elem* weights, const elem* x, const u32* order, const Pairs* tiles, const u32* tile_count, elem* out, u32 outputs, u32 k, u32 per_token, int kind) { \
    grouped<TILE, GATED>({weights, x, order, tiles, tile_count, out, outputs, k, per_token, kind});          \
  }
using Tile16 = Tile<64, 16, 128, STAGES_0, 2, 1, 4>;
using Tile32 = Tile<128, 32, 64, STAGES_1, 4, 1, 2>;
using Tile64 = Tile<128, 64, 64, STAGES_2, 4, 1, 2>;
using Tile128 = Tile<128, 128, 64, STAGES_3, 4, 2, 1>;
EXPERTS(experts_up_16, Tile16, true)
EXPERTS(experts_up_32, Tile32, true)
EXPERTS(experts_up_64, Tile64, true)
EXPERTS(experts_up_128, Tile128, true)
EXPERTS(experts_down_16, Tile16, false)
EXPERTS(experts_down_32, Tile32, false)
EXPERTS(experts_down_64, Tile64, false)
EXPERTS(experts_down_128, Tile128, false)

// out[row] = sum of weight * the down product of its pairs, in the order of its choices. Block y is the row.
extern "C" __global__ void join_experts(const elem* products, const float* weights, elem* out, u32 hidden, u32 per_token) {
  let_next_start();
  wait_for_previous();
  const u32 i = (blockIdx.x * blockDim.x + threadIdx.x) * 8;
  if (i >= hidden) return;
  const u64 first = (u64)blockIdx.y * per_token;
  float sum[8] = {};
#pragma unroll 4
  for (u32 slot = 0; slot < per_token; slot++) {
    const float weight = weights[first + slot];
    float v[8];
    load8(products + (first + slot) * hidden + i, v);
#pragma unroll
    for (u32 e = 0; e < 8; e++) sum[e] += weight * v[e];
  }
  store8(out + (u64)blockIdx.y * hidden + i, sum);
}
