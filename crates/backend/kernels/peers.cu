// Sums and gathers over the ranks of a TP group, through memory that their GPUs write to each other. RANKS is 2, 4 or 8.
//
// Every rank has an inbox: lanes, one for each block, of PHASES phases, of a slot for each rank, of LANE_BYTES. In a turn
// of a lane every rank puts its part into its slot of the others' inboxes and takes the others' parts from its own. The
// data says itself that it is there: a word that holds EMPTY has not arrived, and whoever takes a word makes it EMPTY
// again. No flags, no fences between data and flags.
//
// Two phases in turn are enough. All of a rank's threads have taken and emptied what they get in turn n before one
// of them puts anything of turn n+1 (the end of a kernel, or a barrier in it), and no part of turn n+1 can be finished
// without something from every rank; so whoever puts into a phase in turn n+2 finds it empty. A lane counts its own
// turns, in memory: launches may differ in size, in kind and in type, and a replayed graph goes on where it was, as long
// as all ranks launch the same.
//
// A wait ends without its word when the host says so, or when it has lasted too long: what is missing is written where
// the host finds it, and all later waits end soon.

constexpr u32 EMPTY = 0xffffffffu;  // not a number in any type
constexpr u32 LANES = 256;
constexpr u32 LANE_BYTES = 16384;
constexpr u32 PHASES = 2;

// Words of `state`, behind the turns of the lanes.
constexpr u32 OPERATIONS = LANES, FAILED = LANES + 1;
// Values of KIND.
constexpr u32 ONE_SHOT = 0, TWO_SHOT = 1, GATHER = 2;

struct Peers {
  u64 inbox[8];
  u32* state;
  u32* report;
  u32 rank;
  u32 limit_ms;
  u32 overlaps;  // the next kernel may start early: only where this GPU is no other rank's
  u32 padding;
};

__device__ __forceinline__ bool is_empty(u32 w) { return w == EMPTY; }
__device__ __forceinline__ bool is_empty(const uint4& v) {
  return v.x == EMPTY || v.y == EMPTY || v.z == EMPTY || v.w == EMPTY;
}
// What may be sent: another NaN for the one that means "not there".
__device__ __forceinline__ u32 sendable(u32 w) { return w == EMPTY ? 0x7fff7fffu : w; }
__device__ __forceinline__ uint4 sendable(const uint4& v) {
  return make_uint4(sendable(v.x), sendable(v.y), sendable(v.z), sendable(v.w));
}

// A word of this rank's inbox, looked at once.
__device__ __forceinline__ uint4 look(u64 at, const uint4&) { return take16(at); }
__device__ __forceinline__ u32 look(u64 at, u32) { return take4((const void*)at); }
__device__ __forceinline__ void make_empty(u64 at, const uint4&) { put16(at, make_uint4(EMPTY, EMPTY, EMPTY, EMPTY)); }
__device__ __forceinline__ void make_empty(u64 at, u32) { put4((void*)at, EMPTY); }

// Waits until `v`, which was found at `at`, is whole, and empties its place.
template <typename T> __device__ __forceinline__ T received(const Peers& peers, u64 at, T v, u32 source, u32 kind, u32 bytes) {
  u64 since = 0;
  for (u32 polls = 1; is_empty(v); polls++) {
    v = look(at, v);
    if (polls % POLLS) continue;
    const u64 now = nanoseconds();
    if (since == 0) since = now;
    else if (gives_up(Wait{peers.state + FAILED, peers.report, peers.limit_ms}, now - since, source, kind, bytes, take4(peers.state + OPERATIONS))) break;
  }
  make_empty(at, v);
  return v;
}

// Where in an inbox this lane's slot of `source` starts.
__device__ __forceinline__ u64 slot(u64 inbox, u32 turn, u32 source) {
  return inbox + (u64)((blockIdx.x * PHASES + turn % PHASES) * RANKS + source) * LANE_BYTES;
}

// The own inbox. A constant index keeps the structure out of local memory.
__device__ __forceinline__ u64 inbox_of(const Peers& peers, u32 rank) {
  u64 inbox = peers.inbox[0];
#pragma unroll
  for (u32 r = 1; r < RANKS; r++) inbox = r == rank ? peers.inbox[r] : inbox;
  return inbox;
}

// v[FIRST] + ... + v[FIRST + COUNT - 1] as a binary tree, in f32.
template <int FIRST, int COUNT> __device__ __forceinline__ void add_tree(const uint4* v, float* sum) {
  if constexpr (COUNT == 1) {
    unpack(v[FIRST], sum);
  } else {
    float right[VEC];
    add_tree<FIRST, COUNT / 2>(v, sum);
    add_tree<FIRST + COUNT / 2, COUNT / 2>(v, right);
#pragma unroll
    for (int e = 0; e < VEC; e++) sum[e] += right[e];
  }
}

// The sum of all ranks' vector at `offset` of the slots, of which the others' arrive in this rank's inbox.
__device__ __forceinline__ void sum_arriving(const Peers& peers, u64 own, u32 turn, u32 offset, const uint4& mine, float* sum, u32 kind, u32 bytes) {
  uint4 v[RANKS];
#pragma unroll
  for (u32 r = 0; r < RANKS; r++) v[r] = r == peers.rank ? mine : take16(slot(own, turn, r) + offset);
#pragma unroll
  for (u32 r = 0; r < RANKS; r++)
    if (r != peers.rank) v[r] = received(peers, slot(own, turn, r) + offset, v[r], r, kind, bytes);
  add_tree<0, RANKS>(v, sum);
}

// The vector to the same place of every other rank's inbox.
__device__ __forceinline__ void put_everywhere(const Peers& peers, u32 turn, u32 offset, const uint4& v) {
#pragma unroll
  for (u32 r = 0; r < RANKS; r++)
    if (r != peers.rank) put16(slot(peers.inbox[r], turn, peers.rank) + offset, v);
}

// Every rank gets everything and adds it up itself.
__device__ __forceinline__ void one_shot(const Peers& peers, u64 own, u32 turn, uint4 mine, float* sum, u32 bytes) {
  mine = sendable(mine);
  const u32 offset = threadIdx.x * 16;
  put_everywhere(peers, turn, offset, mine);
  sum_arriving(peers, own, turn, offset, mine, sum, ONE_SHOT, bytes);
}

// Each vector of the `width` of this turn has an owner, who adds it up, rounds it and gives it to all. A slot takes both
// ways: where its rank is the owner of a vector it is a sum that arrives, elsewhere a part.
__device__ __forceinline__ void two_shot(const Peers& peers, u64 own, u32 turn, u32 width, uint4 mine, float* sum, u32 bytes) {
  mine = sendable(mine);
  const u32 offset = threadIdx.x * 16, owner = threadIdx.x * RANKS / width;
  uint4 total;
  if (owner == peers.rank) {
    sum_arriving(peers, own, turn, offset, mine, sum, TWO_SHOT, bytes);
    total = sendable(packed(sum));
    put_everywhere(peers, turn, offset, total);
  } else {
    put16(slot(inbox_of(peers, owner), turn, peers.rank) + offset, mine);
    const u64 at = slot(own, turn, owner) + offset;
    total = received(peers, at, take16(at), owner, TWO_SHOT, bytes);
  }
  unpack(total, sum);
}

// Between two turns of a lane in one kernel: what this block emptied is empty before anything of the next turn is put.
__device__ __forceinline__ void next_turn() {
  __threadfence_system();
  __syncthreads();
}

// The lane has had its turns; every thread of the block has read the count.
__device__ __forceinline__ void count_turns(const Peers& peers, u32 turn) {
  __syncthreads();
  if (threadIdx.x) return;
  put4(peers.state + blockIdx.x, turn);
  if (blockIdx.x == 0) put4(peers.state + OPERATIONS, take4(peers.state + OPERATIONS) + 1);
}

__device__ __forceinline__ void start(const Peers& peers) {
  wait_for_previous();
  if (peers.overlaps) let_next_start();
}

// data = the sum of all ranks' data, `vectors` of 16 bytes, in place; a block takes blockDim.x of them a turn.
template <bool TWO_SHOTS> __device__ __forceinline__ void reduce(const Peers& peers, elem* data, u32 vectors) {
  const u64 own = inbox_of(peers, peers.rank);
  start(peers);
  u32 turn = take4(peers.state + blockIdx.x);
  for (u32 first = blockIdx.x * blockDim.x; first < vectors; first += gridDim.x * blockDim.x, turn++) {
    if (first != blockIdx.x * blockDim.x) next_turn();
    const u32 width = min(blockDim.x, vectors - first);
    if (threadIdx.x >= width) continue;
    elem* at = data + (u64)(first + threadIdx.x) * VEC;
    float sum[VEC];
    if (TWO_SHOTS) two_shot(peers, own, turn, width, load16(at), sum, vectors * 16);
    else one_shot(peers, own, turn, load16(at), sum, vectors * 16);
    *(uint4*)at = packed(sum);
  }
  count_turns(peers, turn);
}

struct Norm {
  const float* bias;         // or null
  const float* post_weight;  // or null
  const float* weight;
  float eps;
  u32 cols;
};

__device__ __forceinline__ void load_f32(const float* p, float* out) {
#pragma unroll
  for (int i = 0; i < VEC; i += 4) {
    const float4 v = *(const float4*)(p + i);
    out[i] = v.x; out[i + 1] = v.y; out[i + 2] = v.z; out[i + 3] = v.w;
  }
}

// The end of a half layer for one row, as in norm.cu, of which this thread has the sum of one vector at `i` (zeros beyond
// the row). `before` is the residual there.
__device__ __forceinline__ void add_norm(const Norm& norm, const float* weight, uint4 before, u32 i, float* sum, elem* residual, elem* out, float* scratch) {
  const bool is_mine = i < norm.cols;
  if (norm.bias && is_mine) {
    float b[VEC];
    load_f32(norm.bias + i, b);
#pragma unroll
    for (int e = 0; e < VEC; e++) sum[e] += b[e];
  }
  if (norm.post_weight) {
    float squares = 0;
#pragma unroll
    for (int e = 0; e < VEC; e++) squares += sum[e] * sum[e];
    const float factor = 1.f / sqrtf(block_sum(squares, scratch) / norm.cols + norm.eps);
    if (is_mine) {
      float w[VEC];
      load_f32(norm.post_weight + i, w);
#pragma unroll
      for (int e = 0; e < VEC; e++) sum[e] *= factor * w[e];
    }
  }
  float squares = 0;
  if (is_mine) {
    float r[VEC];
    unpack(before, r);
#pragma unroll
    for (int e = 0; e < VEC; e++) sum[e] += r[e];
    const uint4 stored = packed(sum);
    *(uint4*)residual = stored;
    unpack(stored, sum);
#pragma unroll
    for (int e = 0; e < VEC; e++) squares += sum[e] * sum[e];
  }
  const float factor = 1.f / sqrtf(block_sum(squares, scratch) / norm.cols + norm.eps);
  if (is_mine) {
#pragma unroll
    for (int e = 0; e < VEC; e++) sum[e] *= factor * weight[e];
    *(uint4*)out = packed(sum);
  }
}

// sum = partial of all ranks, then add_norm; a row a turn, a vector a thread.
template <bool TWO_SHOTS> __device__ __forceinline__ void reduce_norm(const Peers& peers, const elem* partial, elem* residual, elem* out, const Norm& norm, u32 rows) {
  __shared__ float scratch[32];
  const u64 own = inbox_of(peers, peers.rank);
  const u32 i = threadIdx.x * VEC, width = norm.cols / VEC, bytes = rows * norm.cols * sizeof(elem);
  float weight[VEC];
  if (i < norm.cols) load_f32(norm.weight + i, weight);
  start(peers);
  u32 turn = take4(peers.state + blockIdx.x);
  for (u32 row = blockIdx.x; row < rows; row += gridDim.x, turn++) {
    if (row != blockIdx.x) next_turn();
    const u64 at = (u64)row * norm.cols + i;
    uint4 before = make_uint4(0, 0, 0, 0);
    float sum[VEC];
#pragma unroll
    for (int e = 0; e < VEC; e++) sum[e] = 0;
    if (i < norm.cols) {
      const uint4 mine = load16(partial + at);
      before = load16(residual + at);
      if (TWO_SHOTS) two_shot(peers, own, turn, width, mine, sum, bytes);
      else one_shot(peers, own, turn, mine, sum, bytes);
    }
    add_norm(norm, weight, before, i, sum, residual + at, out + at, scratch);
  }
  count_turns(peers, turn);
}

extern "C" __global__ void __launch_bounds__(1024) reduce_one_shot(const Peers peers, elem* data, u32 vectors) {
  reduce<false>(peers, data, vectors);
}
extern "C" __global__ void __launch_bounds__(1024) reduce_two_shot(const Peers peers, elem* data, u32 vectors) {
  reduce<true>(peers, data, vectors);
}
extern "C" __global__ void __launch_bounds__(1024) reduce_norm_one_shot(const Peers peers, const elem* partial, elem* residual, elem* out, const float* bias, const float* post_weight, const float* weight, float eps, u32 cols, u32 rows) {
  reduce_norm<false>(peers, partial, residual, out, Norm{bias, post_weight, weight, eps, cols}, rows);
}
extern "C" __global__ void __launch_bounds__(1024) reduce_norm_two_shot(const Peers peers, const elem* partial, elem* residual, elem* out, const float* bias, const float* post_weight, const float* weight, float eps, u32 cols, u32 rows) {
  reduce_norm<true>(peers, partial, residual, out, Norm{bias, post_weight, weight, eps, cols}, rows);
}

// all[r] = rank r's `words` words; a block takes blockDim.x of them a turn.
extern "C" __global__ void __launch_bounds__(1024) gather(const Peers peers, const u32* mine, u32* all, u32 words) {
  const u64 own = inbox_of(peers, peers.rank);
  start(peers);
  u32 turn = take4(peers.state + blockIdx.x);
  for (u32 first = blockIdx.x * blockDim.x; first < words; first += gridDim.x * blockDim.x, turn++) {
    if (first != blockIdx.x * blockDim.x) next_turn();
    const u32 i = first + threadIdx.x, offset = threadIdx.x * 4;
    if (i >= words) continue;
    const u32 word = sendable(mine[i]);
#pragma unroll
    for (u32 r = 0; r < RANKS; r++)
      if (r != peers.rank) put4((void*)(slot(peers.inbox[r], turn, peers.rank) + offset), word);
    all[(u64)peers.rank * words + i] = word;
#pragma unroll
    for (u32 r = 0; r < RANKS; r++) {
      if (r == peers.rank) continue;
      const u64 at = slot(own, turn, r) + offset;
      all[(u64)r * words + i] = received(peers, at, take4((const void*)at), r, GATHER, words * 4);
    }
  }
  count_turns(peers, turn);
}
