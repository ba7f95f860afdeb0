// y[M, N] = x[M, K] W[N, K]^T for up to eight rows on tensor cores, bound by reading W once (16-bit types only); or, GATED,
// y = act(gate) * up of a matrix of N rows of gate, then N of up.
//
// Block: 16 rows of weights, K dealt to its warps 128 elements at a time. Weights go from global memory straight into
// the operand registers of mma.m16n8k16: each lane takes eight consecutive elements of a row for two
// products, and as both operands are taken so, the sums are over the same pairs. The first weights are asked
// for before the wait for the previous kernel, because they never change.
constexpr u32 WARPS = 8, LOADS = 4, SLICE = 32 * LOADS, ROWS = 8, OUTPUTS = 16;

template <bool GATED>
__device__ __forceinline__ void skinny(const elem* weights, const elem* x, const float* bias, elem* y, u32 n, u32 k, u32 rows, int kind) {
  constexpr u32 RESULTS = GATED ? OUTPUTS / 2 : OUTPUTS;
  __shared__ float sums[WARPS][ROWS][OUTPUTS];
  let_next_start();
  const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31, quad = lane >> 2, first = blockIdx.x * RESULTS;
  const u32 column = warp * SLICE + (lane & 3) * 8;
  const elem* w = weights + (u64)(first + quad) * k + column;
  // GATED, rows 8 to 15 are up's of the outputs whose gates are rows 0 to 7.
  const u64 other = (u64)(GATED ? n : 8) * k;
  const bool low = first + quad < n, high = GATED ? low : first + quad + 8 < n;
  uint4 next[2][LOADS];
  auto ask = [&](u32 from) {
#pragma unroll
    for (u32 u = 0; u < LOADS; u++) {
      const u32 at = from + u * 32;
      const bool inside = column + at < k;
      next[0][u] = inside && low ? load16_once(w + at) : make_uint4(0, 0, 0, 0);
      next[1][u] = inside && high ? load16_once(w + other + at) : make_uint4(0, 0, 0, 0);
    }
  };
  ask(0);
  wait_for_previous();
  float even[4] = {0, 0, 0, 0}, odd[4] = {0, 0, 0, 0};
  for (u32 from = 0; from < k; from += WARPS * SLICE) {
    uint4 now[2][LOADS], input[LOADS];
#pragma unroll
    for (u32 u = 0; u < LOADS; u++) {
      now[0][u] = next[0][u];
      now[1][u] = next[1][u];
      const u32 at = column + from + u * 32;
      input[u] = quad < rows && at < k ? load16(x + (u64)quad * k + at) : make_uint4(0, 0, 0, 0);
    }
    if (from + WARPS * SLICE < k) ask(from + WARPS * SLICE);
#pragma unroll
    for (u32 u = 0; u < LOADS; u++) {
      const uint4 a = now[0][u], b = now[1][u];
      const u32 start[4] = {a.x, b.x, a.y, b.y}, end[4] = {a.z, b.z, a.w, b.w};
      mma(even, start, input[u].x, input[u].y);
      mma(odd, end, input[u].z, input[u].w);
    }
  }
#pragma unroll
  for (u32 i = 0; i < 4; i++) sums[warp][(lane & 3) * 2 + (i & 1)][quad + (i >> 1) * 8] = even[i] + odd[i];
  __syncthreads();
  const u32 row = threadIdx.x / RESULTS, output = threadIdx.x % RESULTS, at = first + output;
  if (row >= rows || at >= n) return;
  float sum = bias ? bias[at] : 0.f, up = GATED && bias ? bias[n + at] : 0.f;
#pragma unroll
  for (u32 i = 0; i < WARPS; i++) {
    sum += sums[i][row][output];
    if (GATED) up += sums[i][row][RESULTS + output];
  }
  put(y + (u64)row * n + at, GATED ? gated(kind, sum, up) : sum);
}

#define SKINNY(NAME, GATED)                                                                                 \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, 2) NAME(const elem* w, const elem* x, const float* bias, elem* y, u32 n, u32 k, u32 rows, int kind) { skinny<GATED>(w, x, bias, y, n, k, rows, kind); }
SKINNY(skinny_plain, false)
SKINNY(skinny_gated, true)
