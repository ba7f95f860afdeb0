// Per-head norm, rope, and the store of k and v: one warp a (token, head).
//
// qkv rows are `[heads | kv_heads | kv_heads] * head_dim`; K and V `[slot][kv_head][head_dim]` of one
// layer; the table `[position][cos half | sin half]`.
extern "C" __global__ void rope_and_store(elem* qkv, const float* q_weight, const float* k_weight, const float* table, const u32* positions, const u32* slots, elem* k_cache, elem* v_cache, u32 heads, u32 kv_heads, u32 head_dim, u32 half, float eps) {
  const u32 lane = threadIdx.x & 31, head = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5), token = blockIdx.y;
  if (head >= heads + 2 * kv_heads) return;
  wait_for_previous();
  let_next_start();
  elem* x = qkv + ((u64)token * (heads + 2 * kv_heads) + head) * head_dim;
  const u64 slot = slots[token];
  if (head >= heads + kv_heads) {
    elem* to = v_cache + (slot * kv_heads + head - heads - kv_heads) * head_dim;
    for (u32 i = lane * VEC; i < head_dim; i += 32 * VEC) *(uint4*)(to + i) = load16(x + i);
    return;
  }
  const bool is_query = head < heads;
  elem* to = is_query ? x : k_cache + (slot * kv_heads + head - heads) * head_dim;
  const float* weight = is_query ? q_weight : k_weight;
  float factor = 1.f;
  if (weight) {
    float squares = 0;
    for (u32 i = lane; i < head_dim; i += 32) { const float v = to_float(x[i]); squares += v * v; }
    factor = 1.f / sqrtf(warp_sum(squares) / head_dim + eps);
  }
  const float* cosines = table + (u64)positions[token] * 2 * half;
  for (u32 i = lane; i < half; i += 32) {
    float low = to_float(x[i]), high = to_float(x[i + half]);
    if (weight) { low *= factor * weight[i]; high *= factor * weight[i + half]; }
    const float c = cosines[i], s = cosines[half + i];
    put(to + i, low * c - high * s);
    put(to + i + half, high * c + low * s);
  }
  for (u32 i = 2 * half + lane; i < head_dim; i += 32) {
    const float v = to_float(x[i]);
    put(to + i, weight ? v * factor * weight[i] : v);
  }
}
