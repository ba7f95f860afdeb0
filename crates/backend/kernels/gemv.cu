// y[M, N] = x[M, K] W[N, K]^T for very few rows, bound by reading W once; or, GATED, y = act(gate) * up of a matrix of N rows of
// gate, then N of up.
//
// SPLIT warps share OUTPUTS rows of weights, each every SPLIT-th piece of them; a lane has two 16-byte loads of each row in
// flight, and there are enough warps on a multiprocessor for the others. The first loads come before the wait for the
// previous kernel, because weights never change.
constexpr u32 WARPS = 8, LOADS = 2, PIECE = 32 * VEC;

template <int M, u32 OUTPUTS, u32 SPLIT, bool GATED, typename Out>
__device__ __forceinline__ void gemv(const elem* weights, const elem* x, const float* bias, Out* y, u32 n, u32 k, int kind) {
  constexpr u32 GROUPS = WARPS / SPLIT, STEP = SPLIT * LOADS * PIECE, STRIDE = GATED ? 2 : 1;
  __shared__ float parts[WARPS][M][OUTPUTS];
  let_next_start();
  const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, part = warp % SPLIT, begin = part * PIECE + lane * VEC;
  const u32 first = (blockIdx.x * GROUPS + warp / SPLIT) * (OUTPUTS / STRIDE);
  // GATED, gate and up of an output are neighbours.
  auto output_of = [&](u32 o) { return first + o / STRIDE; };
  auto row_of = [&](u32 o) { return output_of(o) + (GATED && o % 2 ? n : 0); };
  uint4 weight[OUTPUTS][LOADS];
  auto ask = [&](u32 from) {
#pragma unroll
    for (u32 o = 0; o < OUTPUTS; o++)
#pragma unroll
      for (u32 u = 0; u < LOADS; u++) {
        const u32 at = from + u * SPLIT * PIECE + begin;
        weight[o][u] = at < k && output_of(o) < n ? load16_once(weights + (u64)row_of(o) * k + at) : make_uint4(0, 0, 0, 0);
      }
  };
  ask(0);
  wait_for_previous();
  float sums[M][OUTPUTS] = {};
  for (u32 from = 0; from < k; from += STEP) {
#pragma unroll
    for (u32 u = 0; u < LOADS; u++) {
      const u32 at = from + u * SPLIT * PIECE + begin;
#pragma unroll
      for (int m = 0; m < M; m++) {
        float v[VEC];
        unpack(at < k ? load16(x + (u64)m * k + at) : make_uint4(0, 0, 0, 0), v);
#pragma unroll
        for (u32 o = 0; o < OUTPUTS; o++) {
          float w[VEC];
          unpack(weight[o][u], w);
#pragma unroll
          for (int e = 0; e < VEC; e++) sums[m][o] += w[e] * v[e];
        }
      }
    }
    if (from + STEP < k) ask(from + STEP);
  }
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (u32 o = 0; o < OUTPUTS; o++) {
      sums[m][o] = warp_sum(sums[m][o]);
      if (lane == 0) parts[warp][m][o] = sums[m][o];
    }
  __syncthreads();
  if (part || lane) return;
#pragma unroll
  for (int m = 0; m < M; m++) {
#pragma unroll
    for (u32 o = 0; o < OUTPUTS; o++) {
#pragma unroll
      for (u32 p = 1; p < SPLIT; p++) sums[m][o] += parts[warp + p][m][o];
      if (bias && output_of(o) < n) sums[m][o] += bias[row_of(o)];
    }
#pragma unroll
    for (u32 o = 0; o < OUTPUTS; o += STRIDE)
      if (output_of(o) < n) put(y + (u64)m * n + output_of(o), GATED ? gated(kind, sums[m][o], sums[m][o + STRIDE - 1]) : sums[m][o]);
  }
}

// RESIDENT blocks on a multiprocessor leave this many registers.
#define GEMV(NAME, M, OUTPUTS, SPLIT, GATED, OUT, RESIDENT)                                                  \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, RESIDENT) NAME(const elem* w, const elem* x, const float* bias, OUT* y, u32 n, u32 k, int kind) { gemv<M, OUTPUTS, SPLIT, GATED>(w, x, bias, y, n, k, kind); }
#define GEMV_OF_ROWS(M)                                \
  GEMV(gemv_##M, M, 4, 4, false, elem, 4)              \
  GEMV(gemv_##M##_short, M, 2, 2, false, elem, 6)      \
  GEMV(gemv_##M##_narrow, M, 2, 4, false, elem, 6)     \
  GEMV(gemv_##M##_narrow_long, M, 2, 8, false, elem, 6) \
  GEMV(gemv_##M##_f32, M, 4, 4, false, float, 4)       \
  GEMV(gemv_##M##_f32_short, M, 2, 2, false, float, 6) \
  GEMV(gemv_##M##_gated, M, 4, 4, true, elem, 4)       \
  GEMV(gemv_##M##_gated_short, M, 2, 2, true, elem, 6)
GEMV_OF_ROWS(1)
GEMV_OF_ROWS(2)
