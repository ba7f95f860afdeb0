// Rows moved and changed element by element.

// out[t] = table[ids[t] - first_id], zeros where another rank holds the row. An id with its highest bit set
// is the place in `chosen` of the token that the step before chose. One block a token.
extern "C" __global__ void embed(const elem* table, const u32* ids, const u32* chosen, u32 first_id, u32 table_rows, elem* out, u32 cols) {
  let_next_start();
  wait_for_previous();
  const u32 given = ids[blockIdx.x], id = given >> 31 ? chosen[given & 0x7fffffffu] : given;
  const u32 row = id - first_id;  // wraps for smaller ids, which are then too large
  const elem* from = table + (u64)row * cols;
  elem* to = out + (u64)blockIdx.x * cols;
  for (u32 i = threadIdx.x * VEC; i < cols; i += blockDim.x * VEC)
    *(uint4*)(to + i) = row < table_rows ? load16(from + i) : make_uint4(0, 0, 0, 0);
}

// out[i] = x[rows[i]]. One block a row.
extern "C" __global__ void gather_rows(const elem* x, const u32* rows, elem* out, u32 cols) {
  let_next_start();
  wait_for_previous();
  const elem* from = x + (u64)rows[blockIdx.x] * cols;
  elem* to = out + (u64)blockIdx.x * cols;
  for (u32 i = threadIdx.x * VEC; i < cols; i += blockDim.x * VEC) *(uint4*)(to + i) = load16(from + i);
}

// x *= factor.
extern "C" __global__ void scale(elem* x, float factor, u64 count) {
  let_next_start();
  wait_for_previous();
  const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) put(x + i, to_float(x[i]) * factor);
}

// x = cap * tanh(x / cap), on logits, which are f32.
extern "C" __global__ void softcap(float* x, float cap, u64 count) {
  let_next_start();
  wait_for_previous();
  const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) x[i] = cap * tanhf(x[i] / cap);
}

// out = act(gate) * up of the fused gate|up rows `[rows, 2 * inner]`. Block y is the row.
extern "C" __global__ void gated_activation(const elem* gate_up, elem* out, u32 inner, int kind) {
  let_next_start();
  wait_for_previous();
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

// The token of each row from every rank's largest logit and its column, `[ranks][rows]`. Ranks hold
// ascending ids, so that the first of equal ones is kept; all ones where no rank has any.
extern "C" __global__ void pick(const float2* best, u32 ranks, u32 rows, u32 local_vocab, u32* chosen) {
  let_next_start();
  wait_for_previous();
  const u32 row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  float2 largest = best[row];
  u32 rank = 0;
  for (u32 r = 1; r < ranks; r++) {
    const float2 other = best[(u64)r * rows + row];
    if (other.x > largest.x) { largest = other; rank = r; }
  }
  const bool is_any = largest.x > __int_as_float(0xff800000);
  chosen[row] = is_any ? rank * local_vocab + __float_as_uint(largest.y) : ~0u;
}

// NaN into `count` elements from `first`, for pages that nobody may read.
extern "C" __global__ void poison(elem* x, u64 first, u64 count) {
  wait_for_previous();
  const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) put(x + first + i, __int_as_float(0x7fc00000));
}
