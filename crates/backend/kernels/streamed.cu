// y[M, N] = x[M, K] W[N, K]^T for 2 to 64 rows, bound by reading W once (16-bit types only).
//
// The work is a list of units: of the first tile of outputs its first DEPTH inputs, its next, and so on. Every
// block takes the same number of consecutive units (one more or less), whatever N and K are, so the memory is
// busy everywhere until the end. A tile that several blocks share is added up by the one that finishes last,
// in the order of the inputs, so results are repeatable.

// Where a block stands in the list of units.
struct Unit {
  u32 tile, step;
  __device__ __forceinline__ void advance(u32 steps) {
    if (++step == steps) {
      step = 0;
      tile++;
    }
  }
};

struct Product {
  const elem *weights, *x;
  const float* bias;
  elem* y;
  u32 n, k, rows;
  // Two parts of a tile for each block, of the tile that it found begun and of the one that it began, and how
  // many parts of each tile are there (0 between launches).
  float* parts;
  u32* finished;

  // Four outputs of a row; `output` is a multiple of 4.
  __device__ __forceinline__ void put4(u32 row, u32 output, float4 v) const {
    if (output >= n) return;
    float sums[4] = {v.x, v.y, v.z, v.w};
    elem* to = y + (u64)row * n + output;
#pragma unroll
    for (u32 e = 0; e < 4; e++) sums[e] += bias && output + e < n ? bias[output + e] : 0.f;
    if (n % 4 == 0) {
      *(uint2*)to = make_uint2(pack2(sums[0], sums[1]), pack2(sums[2], sums[3]));
      return;
    }
#pragma unroll
    for (u32 e = 0; e < 4; e++)
      if (output + e < n) put(to + e, sums[e]);
  }
};

// The units of this launch and their blocks.
struct Shares {
  u32 units, steps;
  __device__ __forceinline__ u32 first(u32 block) const { return (u64)units * block / gridDim.x; }
  __device__ __forceinline__ u32 block_of(u32 unit) const { return (u32)(((u64)(unit + 1) * gridDim.x - 1) / units); }
  // Which of its block's two parts is that of the tile that begins with unit `begin`.
  __device__ __forceinline__ u32 part(u32 block, u32 begin) const { return 2 * block + (begin <= first(block) ? 0 : 1); }
};

// Adds up a tile's parts, if this block brings the last of them.
template <class T>
__device__ __forceinline__ void join(const Product& p, const Shares& shares, u32 tile) {
  __shared__ bool is_last;
  const u32 begin = tile * shares.steps, from = shares.block_of(begin), to = shares.block_of(begin + shares.steps - 1);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = atomicAdd(p.finished + tile, 1) == to - from;
    if (is_last) p.finished[tile] = 0;
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  // Nothing else runs on this multiprocessor by now: the loads of a part are all in flight at once.
  constexpr u32 EACH = T::TOKENS * T::ROWS / 4 / T::THREADS;
  const u32 count = p.rows * (T::ROWS / 4);
  float4 sum[EACH];
#pragma unroll
  for (u32 e = 0; e < EACH; e++) sum[e] = make_float4(0, 0, 0, 0);
#pragma unroll 2
  for (u32 block = from; block <= to; block++) {
    const float4* part = (const float4*)(p.parts + (u64)shares.part(block, begin) * T::TOKENS * T::ROWS);
#pragma unroll
    for (u32 e = 0; e < EACH; e++) {
      const u32 i = threadIdx.x + e * T::THREADS;
      if (i >= count) continue;
      const float4 v = __ldcg(part + i);
      sum[e] = make_float4(sum[e].x + v.x, sum[e].y + v.y, sum[e].z + v.z, sum[e].w + v.w);
    }
  }
#pragma unroll
  for (u32 e = 0; e < EACH; e++) {
    const u32 i = threadIdx.x + e * T::THREADS;
    if (i < count) p.put4(i / (T::ROWS / 4), tile * T::ROWS + i % (T::ROWS / 4) * 4, sum[e]);
  }
}

template <class T>
__device__ __forceinline__ void streamed(const Product& p) {
  extern __shared__ uint4 memory[];
  elem* ring = (elem*)memory;
  float* sums = (float*)(ring + T::STAGES * T::STAGE);
  Shares shares;
  shares.steps = (p.k + T::DEPTH - 1) / T::DEPTH;
  shares.units = (p.n + T::ROWS - 1) / T::ROWS * shares.steps;
  const u32 first = shares.first(blockIdx.x), last = shares.first(blockIdx.x + 1);
  const bool takes_weights = threadIdx.x < T::LOADERS;
  const u32 thread = threadIdx.x % T::LOADERS, row = thread / T::PIECES;
  Unit asked = {first / shares.steps, first % shares.steps}, unit = asked;
  // Begins the copies of the block's next unit, its `number`-th.
  auto ask = [&](u32 number) {
    if (first + number < last) {
      elem* stage = ring + number % T::STAGES * T::STAGE;
      const u32 column = asked.step * T::DEPTH, output = asked.tile * T::ROWS + row;
      if (takes_weights)
        load_rows<T, T::ROWS>(stage, thread, column, p.k, [&](u32 i) { return output + i * T::STRIDE < p.n ? p.weights + (u64)(output + i * T::STRIDE) * p.k : nullptr; });
      else
        load_rows<T, T::TOKENS>(stage + T::ROWS * T::DEPTH, thread, column, p.k, [&](u32 i) { return row + i * T::STRIDE < p.rows ? p.x + (u64)(row + i * T::STRIDE) * p.k : nullptr; });
      asked.advance(shares.steps);
    }
    commit_copies();
  };
  if (takes_weights)
    for (u32 i = 0; i < T::STAGES - 1; i++) ask(i);
  wait_for_previous();
  let_next_start();
  if (!takes_weights)
    for (u32 i = 0; i < T::STAGES - 1; i++) ask(i);
  const WarpPlace<T> warp;
  float acc[T::M][T::N][4] = {};
  for (u32 number = 0; first + number < last; number++) {
    wait_for_copies<T::STAGES - 2>();
    __syncthreads();
    ask(number + T::STAGES - 1);
    multiply<T>(acc, ring + number % T::STAGES * T::STAGE, warp);
    if (unit.step + 1 == shares.steps || first + number + 1 == last) {
      const u32 begin = unit.tile * shares.steps, tile = unit.tile;
      const bool is_whole = first <= begin && begin + shares.steps <= last;
      float4* part = (float4*)(p.parts + (u64)shares.part(blockIdx.x, begin) * T::TOKENS * T::ROWS);
      drain<T>(acc, sums, warp, [&](u32 token) {
        for (u32 i = threadIdx.x; i < T::CHUNK * (T::ROWS / 4); i += T::THREADS) {
          const u32 at = token + i / (T::ROWS / 4), output = i % (T::ROWS / 4) * 4;
          if (at >= p.rows) break;
          const float4 v = *(const float4*)(sums + (at - token) * T::PITCH + output);
          if (is_whole) p.put4(at, tile * T::ROWS + output, v);
          else __stcg(part + at * (T::ROWS / 4) + output / 4, v);
        }
      });
      if (!is_whole) join<T>(p, shares, tile);
    }
    unit.advance(shares.steps);
  }
}

#define STREAMED(NAME, TILE)                                                                                \
  extern "C" __global__ void __launch_bounds__(256, 1) NAME(const elem* weights, const elem* x, const float* bias, elem* y, u32 n, u32 k, u32 rows, float* parts, u32* finished) { \
    streamed<TILE>({weights, x, bias, y, n, k, rows, parts, finished});                                      \
  }
// Few outputs of many parts each are joined sooner; many read x less often.
using Tile64x16 = Tile<64, 16, 128, STAGES_0, 2, 1, 4>;
using Tile64x32 = Tile<64, 32, 128, STAGES_1, 2, 1, 4>;
using Tile128x32 = Tile<128, 32, 64, STAGES_2, 4, 1, 2>;
using Tile64x64 = Tile<64, 64, 128, STAGES_3, 2, 1, 4>;
using Tile128x64 = Tile<128, 64, 64, STAGES_4, 4, 1, 2>;
STREAMED(streamed_64x16, Tile64x16)
STREAMED(streamed_64x32, Tile64x32)
STREAMED(streamed_128x32, Tile128x32)
STREAMED(streamed_64x64, Tile64x64)
STREAMED(streamed_128x64, Tile128x64)
