// RMSNorm, and the end of a half layer. One block a row; a thread keeps up to 16 elements.
constexpr int PARTS = 2;

// This thread's weights of a norm, which never change.
__device__ __forceinline__ void load_weights(const float* weight, u32 cols, float (*w)[8]) {
#pragma unroll
  for (int p = 0; p < PARTS; p++) {
    const u32 i = (threadIdx.x + p * blockDim.x) * 8;
    if (i < cols) load8_f32(weight + i, w[p]);
  }
}

// out = x / sqrt(mean(x^2) + eps) * weight.
extern "C" __global__ void rms_norm(const elem* x, const float* weight, float eps, elem* out, u32 cols) {
  __shared__ float scratch[32];
  let_next_start();
  float w[PARTS][8];
  load_weights(weight, cols, w);
  wait_for_previous();
  const u64 row = (u64)blockIdx.x * cols;
  float v[PARTS][8], squares = 0;
#pragma unroll
  for (int p = 0; p < PARTS; p++) {
    const u32 i = (threadIdx.x + p * blockDim.x) * 8;
    if (i < cols) load8(x + row + i, v[p]);
#pragma unroll
    for (int e = 0; e < 8; e++) squares += i < cols ? v[p][e] * v[p][e] : 0.f;
  }
  const float factor = 1.f / sqrtf(block_sum(squares, scratch) / cols + eps);
#pragma unroll
  for (int p = 0; p < PARTS; p++) {
    const u32 i = (threadIdx.x + p * blockDim.x) * 8;
    if (i >= cols) continue;
#pragma unroll
    for (int e = 0; e < 8; e++) v[p][e] *= factor * w[p][e];
    store8(out + row + i, v[p]);
  }
}

// sum = partial (+ bias) (normed by post_weight); residual += sum; out = rms_norm(residual).
// The norm sees the residual as it is stored.
extern "C" __global__ void add_norm(const elem* partial, elem* residual, elem* out, const float* bias, const float* post_weight, const float* weight, float eps, u32 cols) {
  __shared__ float scratch[32];
  let_next_start();
  float w[PARTS][8];
  load_weights(weight, cols, w);
  wait_for_previous();
  const u64 row = (u64)blockIdx.x * cols;
  float sum[PARTS][8], squares = 0;
#pragma unroll
  for (int p = 0; p < PARTS; p++) {
    const u32 i = (threadIdx.x + p * blockDim.x) * 8;
    if (i >= cols) continue;
    load8(partial + row + i, sum[p]);
    if (bias) {
      float b[8];
      load8_f32(bias + i, b);
#pragma unroll
      for (int e = 0; e < 8; e++) sum[p][e] += b[e];
    }
#pragma unroll
    for (int e = 0; e < 8; e++) squares += sum[p][e] * sum[p][e];
  }
  const float post = post_weight ? 1.f / sqrtf(block_sum(squares, scratch) / cols + eps) : 1.f;
  squares = 0;
#pragma unroll
  for (int p = 0; p < PARTS; p++) {
    const u32 i = (threadIdx.x + p * blockDim.x) * 8;
    if (i >= cols) continue;
    if (post_weight) {
      float w_post[8];
      load8_f32(post_weight + i, w_post);
#pragma unroll
      for (int e = 0; e < 8; e++) sum[p][e] *= post * w_post[e];
    }
    float r[8];
    load8(residual + row + i, r);
#pragma unroll
    for (int e = 0; e < 8; e++) {
      elem stored;
      put(&stored, r[e] + sum[p][e]);
      sum[p][e] = to_float(stored);
      squares += sum[p][e] * sum[p][e];
    }
    store8(residual + row + i, sum[p]);
  }
  const float factor = 1.f / sqrtf(block_sum(squares, scratch) / cols + eps);
#pragma unroll
  for (int p = 0; p < PARTS; p++) {
    const u32 i = (threadIdx.x + p * blockDim.x) * 8;
    if (i >= cols) continue;
#pragma unroll
    for (int e = 0; e < 8; e++) sum[p][e] *= factor * w[p][e];
    store8(out + row + i, sum[p]);
  }
}
