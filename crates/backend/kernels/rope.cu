// Per-head norm, rope, and the store of k and v: one warp a (token, head).
//
// qkv rows are `[heads | kv_heads | kv_heads] * head_dim`; K and V `[slot][kv_head][head_dim]` of one
// layer; the table `[position][cos half | sin half]`. A lane turns up to TURNS pairs of elements; their weights and angles
// are older than the previous kernel, as the step's lists are, and are loaded before the wait for it.
constexpr u32 TURNS = 4;

extern "C" __global__ void rope_and_store(elem* qkv, const float* q_weight, const float* k_weight, const float* table, const u32* positions, const u32* slots, elem* k_cache, elem* v_cache, u32 heads, u32 kv_heads, u32 head_dim, u32 half, float eps) {
  const u32 lane = threadIdx.x & 31, head = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5), token = blockIdx.y;
  let_next_start();
  if (head >= heads + 2 * kv_heads) return;
  elem* x = qkv + ((u64)token * (heads + 2 * kv_heads) + head) * head_dim;
  const u64 slot = slots[token];
  if (head >= heads + kv_heads) {
    wait_for_previous();
    elem* to = v_cache + (slot * kv_heads + head - heads - kv_heads) * head_dim;
    for (u32 i = lane * VEC; i < head_dim; i += 32 * VEC) *(uint4*)(to + i) = load16(x + i);
    return;
  }
  const bool is_query = head < heads;
  elem* to = is_query ? x : k_cache + (slot * kv_heads + head - heads) * head_dim;
  const float* weight = is_query ? q_weight : k_weight;
  const float* cosines = table + (u64)positions[token] * 2 * half;
  float cosine[TURNS], sine[TURNS], low_weight[TURNS], high_weight[TURNS], low[TURNS], high[TURNS];
#pragma unroll
  for (u32 t = 0; t < TURNS; t++) {
    const u32 i = lane + 32 * t;
    if (i >= half) continue;
    cosine[t] = cosines[i];
    sine[t] = cosines[half + i];
    low_weight[t] = weight ? weight[i] : 1.f;
    high_weight[t] = weight ? weight[i + half] : 1.f;
  }
  wait_for_previous();
  float squares = 0;
#pragma unroll
  for (u32 t = 0; t < TURNS; t++) {
    const u32 i = lane + 32 * t;
    low[t] = i < half ? to_float(x[i]) : 0.f;
    high[t] = i < half ? to_float(x[i + half]) : 0.f;
    squares += low[t] * low[t] + high[t] * high[t];
  }
  float factor = 1.f;
  if (weight) {
    for (u32 i = 2 * half + lane; i < head_dim; i += 32) { const float v = to_float(x[i]); squares += v * v; }
    factor = 1.f / sqrtf(warp_sum(squares) / head_dim + eps);
  }
#pragma unroll
  for (u32 t = 0; t < TURNS; t++) {
    const u32 i = lane + 32 * t;
    if (i >= half) continue;
    low[t] *= factor * low_weight[t];
    high[t] *= factor * high_weight[t];
    put(to + i, low[t] * cosine[t] - high[t] * sine[t]);
    put(to + i + half, high[t] * cosine[t] + low[t] * sine[t]);
  }
  for (u32 i = 2 * half + lane; i < head_dim; i += 32) {
    const float v = to_float(x[i]);
    put(to + i, weight ? v * factor * weight[i] : v);
  }
}
