// A mixture's routing, and its products one (token, expert) pair after another, the exact way of f32 mode.

// The largest probabilities of each row of router logits and their experts, equal ones by ascending
// expert. One warp a row; at most 512 experts. If `order` is given, also the lists that `group` would make, with a
// tile for every pair, which saves few rows a kernel.
constexpr int EXPERTS_PER_LANE = 16;
extern "C" __global__ void route(const float* logits, u32 experts, u32 per_token, int normalise, u32* chosen, float* weights, u32* order, uint4* tiles, u32* tile_count) {
  let_next_start();
  wait_for_previous();
  const u32 lane = threadIdx.x;
  const float* row = logits + (u64)blockIdx.x * experts;
  float p[EXPERTS_PER_LANE], largest = -3e38f, total = 0;
#pragma unroll
  for (int i = 0; i < EXPERTS_PER_LANE; i++) {
    const u32 e = lane + 32 * i;
    p[i] = e < experts ? row[e] : -3e38f;
    largest = fmaxf(largest, p[i]);
  }
#pragma unroll
  for (int o = 16; o; o >>= 1) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, o));
#pragma unroll
  for (int i = 0; i < EXPERTS_PER_LANE; i++) {
    p[i] = lane + 32 * i < experts ? expf(p[i] - largest) : -1.f;
    total += fmaxf(p[i], 0.f);
  }
  total = warp_sum(total);
  float sum = 0;
  for (u32 slot = 0; slot < per_token; slot++) {
    float best = -2.f;
    u32 at = 0xffffffffu;
#pragma unroll
    for (int i = 0; i < EXPERTS_PER_LANE; i++)
      if (p[i] > best) { best = p[i]; at = lane + 32 * i; }
#pragma unroll
    for (int o = 16; o; o >>= 1) {
      const float other = __shfl_xor_sync(~0u, best, o);
      const u32 place = __shfl_xor_sync(~0u, at, o);
      if (other > best || (other == best && place < at)) { best = other; at = place; }
    }
#pragma unroll
    for (int i = 0; i < EXPERTS_PER_LANE; i++)
      if (lane + 32 * i == at) p[i] = -1.f;
    sum += best / total;
    if (lane == 0) {
      const u32 pair = blockIdx.x * per_token + slot;
      chosen[pair] = at;
      weights[pair] = best / total;
      if (order) {
        order[pair] = pair;
        tiles[pair] = make_uint4(at, pair, 1, 0);
      }
    }
  }
  if (order && blockIdx.x == 0 && lane == 0) *tile_count = gridDim.x * per_token;
  __syncwarp();
  if (normalise)
    for (u32 slot = lane; slot < per_token; slot += 32) weights[blockIdx.x * per_token + slot] /= sum;
}

// One dot product of a warp.
__device__ __forceinline__ float warp_dot(const elem* w, const elem* x, u32 k) {
  float sum = 0;
  for (u32 i = (threadIdx.x & 31) * VEC; i < k; i += 32 * VEC) {
    float a[VEC], b[VEC];
    unpack(load16(w + i), a);
    unpack(load16(x + i), b);
#pragma unroll
    for (int e = 0; e < VEC; e++) sum += a[e] * b[e];
  }
  return warp_sum(sum);
}

// inner[pair] = act(gate) * up of the pair's expert; gate_up is `[experts][2 * inner][hidden]`. Block y
// is the pair, a warp one element.
extern "C" __global__ void moe_gate_up(const elem* gate_up, const elem* x, const u32* chosen, elem* inner_out, u32 inner, u32 hidden, u32 per_token, int kind) {
  let_next_start();
  wait_for_previous();
  const u32 i = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5), pair = blockIdx.y;
  if (i >= inner) return;
  const elem* w = gate_up + (u64)chosen[pair] * 2 * inner * hidden;
  const elem* row = x + (u64)(pair / per_token) * hidden;
  const float gate = warp_dot(w + (u64)i * hidden, row, hidden), up = warp_dot(w + (u64)(inner + i) * hidden, row, hidden);
  if ((threadIdx.x & 31) == 0) put(inner_out + (u64)pair * inner + i, gated(kind, gate, up));
}

// out[row] = sum over its pairs of weight * down(inner[pair]); down is `[experts][hidden][inner]`.
extern "C" __global__ void moe_down(const elem* down, const elem* inner_in, const u32* chosen, const float* weights, elem* out, u32 inner, u32 hidden, u32 per_token) {
  let_next_start();
  wait_for_previous();
  const u32 i = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5), row = blockIdx.y;
  if (i >= hidden) return;
  float sum = 0;
  for (u32 slot = 0; slot < per_token; slot++) {
    const u32 pair = row * per_token + slot;
    sum += weights[pair] * warp_dot(down + ((u64)chosen[pair] * hidden + i) * inner, inner_in + (u64)pair * inner, inner);
  }
  if ((threadIdx.x & 31) == 0) put(out + (u64)row * hidden + i, sum);
}
