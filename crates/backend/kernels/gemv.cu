// y[M, N] = x[M, K] W[N, K]^T for very few rows, bound by reading W once.
//
// A warp owns two outputs; each lane has four 16-byte loads of each in flight, the next four are asked
// for before these are used, and the first come before the wait for the previous kernel, because
// weights never change.
constexpr int OUTPUTS = 2, LOADS = 4;

template <int M, typename Out>
__device__ __forceinline__ void gemv(const elem* weights, const elem* x, const float* bias, Out* y, u32 n, u32 k) {
  const u32 lane = threadIdx.x & 31, row = (blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5)) * OUTPUTS;
  if (row >= n) return;
  const elem* w = weights + (u64)row * k + lane * VEC;
  const bool both = row + 1 < n;
  uint4 next[OUTPUTS][LOADS];
  auto ask = [&](u32 from) {
#pragma unroll
    for (int u = 0; u < LOADS; u++) {
      const u32 at = from + u * 32 * VEC;
      const bool inside = at + lane * VEC < k;
      next[0][u] = inside ? load16_once(w + at) : make_uint4(0, 0, 0, 0);
      next[1][u] = inside && both ? load16_once(w + k + at) : make_uint4(0, 0, 0, 0);
    }
  };
  ask(0);
  wait_for_previous();
  let_next_start();
  float sums[M][OUTPUTS];
#pragma unroll
  for (int m = 0; m < M; m++) sums[m][0] = sums[m][1] = 0.f;
  constexpr u32 STEP = 32 * VEC * LOADS;
  for (u32 from = 0; from < k; from += STEP) {
    uint4 now[OUTPUTS][LOADS];
#pragma unroll
    for (int u = 0; u < LOADS; u++) { now[0][u] = next[0][u]; now[1][u] = next[1][u]; }
    if (from + STEP < k) ask(from + STEP);
#pragma unroll
    for (int u = 0; u < LOADS; u++) {
      const u32 at = from + u * 32 * VEC + lane * VEC;
      if (at >= k) break;
      float a[VEC], b[VEC];
      unpack(now[0][u], a);
      unpack(now[1][u], b);
#pragma unroll
      for (int m = 0; m < M; m++) {
        float v[VEC];
        unpack(load16(x + (u64)m * k + at), v);
#pragma unroll
        for (int e = 0; e < VEC; e++) { sums[m][0] += a[e] * v[e]; sums[m][1] += b[e] * v[e]; }
      }
    }
  }
#pragma unroll
  for (int m = 0; m < M; m++) {
    const float first = warp_sum(sums[m][0]), second = warp_sum(sums[m][1]);
    if (lane) continue;
    put(y + (u64)m * n + row, first + (bias ? bias[row] : 0.f));
    if (both) put(y + (u64)m * n + row + 1, second + (bias ? bias[row + 1] : 0.f));
  }
}

#define GEMV(M, NAME, OUT)                                                                                  \
  extern "C" __global__ void __launch_bounds__(256) NAME(const elem* w, const elem* x, const float* bias, OUT* y, u32 n, u32 k) { gemv<M>(w, x, bias, y, n, k); }
GEMV(1, gemv_1, elem)
GEMV(2, gemv_2, elem)
GEMV(1, gemv_1_f32, float)
GEMV(2, gemv_2_f32, float)
