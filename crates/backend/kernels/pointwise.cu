// Rows moved and changed element by element.

// out[t] = table[ids[t] - first_id], zeros where another rank holds the row. An id with its highest bit set
// is the place in `chosen` of the token that the step before chose. One block a token.
extern "C" __global__ void embed(const elem* table, const u32* ids, const u32* chosen, u32 first_id, u32 table_rows, elem* out, u32 cols) {
  wait_for_previous();
  let_next_start();
  const u32 given = ids[blockIdx.x], id = given >> 31 ? chosen[given & 0x7fffffffu] : given;
  const u32 row = id - first_id;  // wraps for smaller ids, which are then too large
  const elem* from = table + (u64)row * cols;
  elem* to = out + (u64)blockIdx.x * cols;
  for (u32 i = threadIdx.x * VEC; i < cols; i += blockDim.x * VEC)
    *(uint4*)(to + i) = row < table_rows ? load16(from + i) : make_uint4(0, 0, 0, 0);
}

// out[i] = x[rows[i]]. One block a row.
extern "C" __global__ void gather_rows(const elem* x, const u32* rows, elem* out, u32 cols) {
  wait_for_previous();
  let_next_start();
  const elem* from = x + (u64)rows[blockIdx.x] * cols;
  elem* to = out + (u64)blockIdx.x * cols;
  for (u32 i = threadIdx.x * VEC; i < cols; i += blockDim.x * VEC) *(uint4*)(to + i) = load16(from + i);
}

// x *= factor.
extern "C" __global__ void scale(elem* x, float factor, u64 count) {
  wait_for_previous();
  let_next_start();
  const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) put(x + i, to_float(x[i]) * factor);
}

// x = cap * tanh(x / cap), on logits, which are f32.
extern "C" __global__ void softcap(float* x, float cap, u64 count) {
  wait_for_previous();
  let_next_start();
  const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) x[i] = cap * tanhf(x[i] / cap);
}

// out = act(gate) * up of the fused gate|up rows `[rows, 2 * inner]`. Block y is the row.
extern "C" __global__ void gated_activation(const elem* gate_up, elem* out, u32 inner, int kind) {
  wait_for_previous();
  let_next_start();
  const u32 i = (blockIdx.x * blockDim.x + threadIdx.x) * 8;
  if (i >= inner) return;
  const elem* row = gate_up + (u64)blockIdx.y * 2 * inner;
  float gate[8], up[8];
  load8(row + i, gate);
  load8(row + inner + i, up);
#pragma unroll
  for (int e = 0; e < 8; e++) gate[e] = gated(kind, gate[e], up[e]);
  store8(out + (u64)blockIdx.y * inner + i, gate);
}

// The largest of the first `cols` of each row's `stride` elements and where it is, the first of equal
// ones; NaN is never taken. One block a row.
extern "C" __global__ void __launch_bounds__(1024) argmax(const float* x, u32 stride, u32 cols, float2* out) {
  __shared__ float values[32];
  __shared__ u32 places[32];
  wait_for_previous();
  let_next_start();
  const float* row = x + (u64)blockIdx.x * stride;
  float best = -__int_as_float(0x7f800000);
  u32 at = 0xffffffffu;
  for (u32 i = threadIdx.x; i < cols; i += blockDim.x)
    if (row[i] > best) { best = row[i]; at = i; }
  for (int round = 0; round < 2; round++) {
#pragma unroll
    for (int o = 16; o; o >>= 1) {
      const float other = __shfl_xor_sync(~0u, best, o);
      const u32 place = __shfl_xor_sync(~0u, at, o);
      if (other > best || (other == best && place < at)) { best = other; at = place; }
    }
    if (round == 1) break;
    if ((threadIdx.x & 31) == 0) { values[threadIdx.x >> 5] = best; places[threadIdx.x >> 5] = at; }
    __syncthreads();
    if (threadIdx.x >= 32) return;
    best = values[threadIdx.x];
    at = places[threadIdx.x];
  }
  if (threadIdx.x == 0) out[blockIdx.x] = make_float2(best, __uint_as_float(at == 0xffffffffu ? 0 : at));
}

// The token of each row from every rank's largest logit and its column, `[ranks][rows]`. Ranks hold
// ascending ids, so that the first of equal ones is kept.
extern "C" __global__ void pick(const float2* best, u32 ranks, u32 rows, u32 local_vocab, u32* chosen) {
  wait_for_previous();
  let_next_start();
  const u32 row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  float2 largest = best[row];
  u32 rank = 0;
  for (u32 r = 1; r < ranks; r++) {
    const float2 other = best[(u64)r * rows + row];
    if (other.x > largest.x) { largest = other; rank = r; }
  }
  chosen[row] = rank * local_vocab + __float_as_uint(largest.y);
}

// NaN into `count` elements from `first`, for pages that nobody may read.
extern "C" __global__ void poison(elem* x, u64 first, u64 count) {
  wait_for_previous();
  const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) put(x + first + i, __int_as_float(0x7fc00000));
}
