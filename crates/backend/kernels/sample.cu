// The next token of each row of logits, as the host's sampler chooses it: temperature, then the first top_k,
// then the fewest that have top_p of the mass, then those with at least min_p of the largest; the token is
// the one that the row's uniform number falls on. Without top_k and top_p tokens stand by ascending id,
// else by descending logit and ascending id. Weights are f32 and their sums f64, in an order that depends
// on the row alone.
//
// Logits are `[ranks][rows][stride]` as they are gathered from ranks that hold ascending ids; a row's tokens are
// the first `cols` over its ranks.
//
// Before, rows that change their logits have a launch for what they allow and one for the rest (`LogitChanges` of the
// host, in the same f32 operations).
//
// Three launches of (blocks of a row, rows) blocks whose shape depends on the number of rows only; rows that
// are done let the later ones pass:
// 1. the largest logit, which is the answer of greedy rows;
// 2. the mass of every tile, and for top_k and top_p how many tokens lie how far below the largest. The
//    row's last block chooses by id, or says how far down the last token lies that is kept;
// 3. what lies above that is gathered and sorted. Where it is too much, as in nearly flat rows with top_p, only
//    what may be the last kept is, with the mass above it, and then what may be the token. Where that is still
//    too much, many equal logits, the row's last block finds the tokens digit by digit.
constexpr u32 THREADS = 512, WARPS = THREADS / 32;
// Elements that a warp sums at a time, and how many such tiles a row may have.
constexpr u32 TILE = 1024, TILES_MAX = 512;
// Distances below the largest, in 1/192 of a factor of two.
constexpr u32 BINS = 4096;
constexpr float BINS_OF_HALVING = 192.f;
// Tokens that are sorted, at most.
constexpr u32 SORTED_MAX = 4096;
// Bits of an id; TILE * TILES_MAX ids.
constexpr u32 ID_BITS = 19, ID_MASK = (1u << ID_BITS) - 1;
constexpr u32 NONE = 0xffffffffu;

struct Params { float temperature; u32 top_k; float top_p, min_p; u32 seed[2]; u32 choice, position; };
// What a row's launches leave to each other. `finished` and `gathered` are zero between steps, as bins are.
// Step 3 gathers the bins `low ..= high`, of which `above` tokens lie above; `total` is the mass of the row.
struct State { u32 finished, gathered, low, high; double total; u32 above, unused; };
// `low` of rows whose tokens are found digit by digit.
constexpr u32 BY_DIGITS = NONE;

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

// Whether every block of the row got here before.
__device__ __forceinline__ bool is_last(State* state) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicInc(&state->finished, gridDim.x - 1) == gridDim.x - 1;
  __syncthreads();
  if (last) __threadfence();
  return last;
}

__device__ __forceinline__ double warp_sum_exact(double x) {
#pragma unroll
  for (int o = 16; o; o >>= 1) x += __shfl_xor_sync(~0u, x, o);
  return x;
}

// The sum of `x` over the threads before this one, and over all.
__device__ __forceinline__ double sum_before(double x, double& total) {
  __shared__ double sums[WARPS];
  const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  double before = x;
#pragma unroll
  for (u32 o = 1; o < 32; o <<= 1) {
    const double other = __shfl_up_sync(~0u, before, o);
    if (lane >= o) before += other;
  }
  __syncthreads();
  if (lane == 31) sums[warp] = before;
  __syncthreads();
  double earlier = 0;
  total = 0;
  for (u32 w = 0; w < WARPS; w++) {
    if (w == warp) earlier = total;
    total += sums[w];
  }
  return earlier + (before - x);
}

// The first thread whose mass reaches beyond `target`; the last one that has any if rounding overshoots;
// NONE when nobody has. `beyond` says whether it was the first.
__device__ __forceinline__ u32 thread_at(double mass, double before, double target, bool& beyond) {
  __shared__ u32 first, last;
  if (threadIdx.x == 0) { first = NONE; last = 0; }
  __syncthreads();
  if (mass > 0) {
    if (before + mass > target) atomicMin(&first, threadIdx.x);
    atomicMax(&last, threadIdx.x + 1);
  }
  __syncthreads();
  beyond = first != NONE;
  const u32 found = beyond ? first : last ? last - 1 : NONE;
  __syncthreads();
  return found;
}

// A uniform number in [0, 1) with 53 bits: Philox4x32-10 (Salmon et al. 2011) of the key and the counter alone.
__device__ __forceinline__ double uniform(const Params& p) {
  u32 counter[4] = {p.position, p.choice, 0, 0}, key[2] = {p.seed[0], p.seed[1]};
#pragma unroll
  for (int round = 0; round < 10; round++) {
    const u64 a = (u64)counter[0] * 0xD2511F53u, b = (u64)counter[2] * 0xCD9E8D57u;
    counter[0] = (u32)(b >> 32) ^ counter[1] ^ key[0];
    counter[1] = (u32)b;
    counter[2] = (u32)(a >> 32) ^ counter[3] ^ key[1];
    counter[3] = (u32)a;
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return (double)(((u64)counter[1] << 32 | counter[0]) >> 11) * (1.0 / 9007199254740992.0);
}

// The logits of one row.
struct Logits {
  const float* start;
  u32 stride, count;
  __device__ __forceinline__ Logits(const float* x, u32 stride, u32 cols) : start(x + (u64)blockIdx.y * stride), stride(stride), count(cols) {}
  __device__ __forceinline__ float at(u32 id) const {
    if (id >= count) return -infinity();
    return id < stride ? start[id] : start[(u64)(id / stride) * gridDim.y * stride + id % stride];
  }
};

// One row being sampled.
struct Row {
  Logits logits;
  u32 count;
  Params params;
  // The largest logit, and log2(e) / temperature.
  float top, scale;

  __device__ __forceinline__ Row(const float* x, u32 stride, u32 cols, const Params* all, const float2* best) : logits(x, stride, cols), count(cols) {
    params = all[blockIdx.y];
    top = best[blockIdx.y].x;
    scale = LOG2E / params.temperature;
  }
  __device__ __forceinline__ bool is_drawn() const { return params.temperature != 0.f && params.top_k != 1 && top > -infinity() && top < infinity(); }
  // Whether tokens stand by descending logit.
  __device__ __forceinline__ bool is_ordered() const { return params.top_k || params.top_p < 1.f; }
  // Factors of two that a logit lies below the largest; NaN and minus infinity are no tokens.
  __device__ __forceinline__ float depth(float logit) const { return logit > -infinity() ? (top - logit) * scale : infinity(); }
  __device__ __forceinline__ float weight(float logit) const { return power2(-depth(logit)); }
  __device__ __forceinline__ u32 bin(float logit) const { return (u32)fminf(depth(logit) * BINS_OF_HALVING, (float)BINS); }
  __device__ __forceinline__ float kept(float weight) const { return weight >= params.min_p ? weight : 0.f; }
};

// Descending as unsigned numbers are logits and then ascending ids.
__device__ __forceinline__ u64 sort_key(float logit, u32 id) {
  const u32 bits = __float_as_uint(logit);
  return (u64)(bits & 0x80000000u ? ~bits : bits | 0x80000000u) << ID_BITS | (ID_MASK - id);
}
__device__ __forceinline__ float logit_of(u64 key) {
  const u32 bits = (u32)(key >> ID_BITS);
  return __uint_as_float(bits & 0x80000000u ? bits & 0x7fffffffu : ~bits);
}

// Calls each(id, logit) for the elements of the tiles of block `part` of `parts`; each warp its own tiles,
// end(tile) after each.
template <typename Each, typename End>
__device__ __forceinline__ void each_of_tiles(const Row& row, u32 part, u32 parts, Each each, End end) {
  const u32 lane = threadIdx.x & 31;
  for (u32 tile = part * WARPS + (threadIdx.x >> 5); tile * TILE < row.count; tile += parts * WARPS) {
    for (u32 base = tile * TILE; base < (tile + 1) * TILE; base += 8 * 32) {
      float logit[8];
#pragma unroll
      for (u32 i = 0; i < 8; i++) logit[i] = row.logits.at(base + i * 32 + lane);
#pragma unroll
      for (u32 i = 0; i < 8; i++) each(base + i * 32 + lane, logit[i]);
    }
    end(tile);
  }
}

// The larger of two; the first of equal ones.
__device__ __forceinline__ void take_better(float& best, u32& at, float other, u32 place) {
  if (other > best || (other == best && place < at)) { best = other; at = place; }
}
__device__ __forceinline__ void best_of_block(float& best, u32& at) {
  __shared__ float values[WARPS];
  __shared__ u32 places[WARPS];
#pragma unroll
  for (int o = 16; o; o >>= 1) take_better(best, at, __shfl_xor_sync(~0u, best, o), __shfl_xor_sync(~0u, at, o));
  __syncthreads();
  if ((threadIdx.x & 31) == 0) { values[threadIdx.x >> 5] = best; places[threadIdx.x >> 5] = at; }
  __syncthreads();
  for (u32 w = 0; w < WARPS; w++) take_better(best, at, values[w], places[w]);
}

// What one row changes. Places and numbers of entries are those of the step's words; `allowed` is a bit for each id.
struct Change { u32 row, allowed, allowed_words, bias, bias_count, seen, seen_count, banned, banned_count; float repetition, frequency, presence; };

// Minus infinity for what is not allowed, by changed row; `first_id` is the token of the first of this rank's `cols`.
extern "C" __global__ void __launch_bounds__(THREADS) sample_mask(float* x, u32 stride, u32 first_id, u32 cols, const Change* changes, const u32* words) {
  let_next_start();
  wait_for_previous();
  const Change c = changes[blockIdx.y];
  if (c.allowed == NONE) return;
  float* row = x + (u64)c.row * stride;
  for (u32 col = blockIdx.x * THREADS + threadIdx.x; col < cols; col += gridDim.x * THREADS) {
    const u32 id = first_id + col, word = id >> 5;
    const bool may = word < c.allowed_words && (words[c.allowed + word] >> (id & 31) & 1);
    if (!may) row[col] = -infinity();
  }
}

// Biases, then penalties, then bans of a changed row, a block each. Rounded one by one as on the host: no fused operations.
extern "C" __global__ void __launch_bounds__(THREADS) sample_change(float* x, u32 stride, u32 first_id, u32 cols, const Change* changes, const u32* words) {
  let_next_start();
  wait_for_previous();
  const Change c = changes[blockIdx.x];
  float* row = x + (u64)c.row * stride;
  for (u32 i = threadIdx.x; i < c.bias_count; i += THREADS) {
    const u32 col = words[c.bias + 2 * i] - first_id;
    if (col < cols) row[col] = __fadd_rn(row[col], __uint_as_float(words[c.bias + 2 * i + 1]));
  }
  __syncthreads();
  for (u32 i = threadIdx.x; i < c.seen_count; i += THREADS) {
    const u32 col = words[c.seen + 2 * i] - first_id, in_output = words[c.seen + 2 * i + 1];
    if (col >= cols) continue;
    float logit = row[col];
    logit = logit > 0.f ? __fdiv_rn(logit, c.repetition) : __fmul_rn(logit, c.repetition);
    if (in_output) {
      logit = __fsub_rn(logit, __fmul_rn(c.frequency, (float)in_output));
      logit = __fsub_rn(logit, c.presence);
    }
    row[col] = logit;
  }
  __syncthreads();
  for (u32 i = threadIdx.x; i < c.banned_count; i += THREADS) {
    const u32 col = words[c.banned + i] - first_id;
    if (col < cols) row[col] = -infinity();
  }
}

// Where no logit is larger than minus infinity, that and 0, and NONE as the chosen token.
extern "C" __global__ void __launch_bounds__(THREADS) sample_best(const float* x, u32 stride, u32 cols, float2* best, u32* chosen, float2* parts, State* states) {
  let_next_start();
  wait_for_previous();
  const Logits logits(x, stride, cols);
  float top = -infinity();
  u32 at = NONE;
  for (u32 base = blockIdx.x * THREADS * 8; base < cols; base += gridDim.x * THREADS * 8) {
    float logit[8];
#pragma unroll
    for (u32 i = 0; i < 8; i++) logit[i] = logits.at(base + i * THREADS + threadIdx.x);
#pragma unroll
    for (u32 i = 0; i < 8; i++)
      if (logit[i] > top) { top = logit[i]; at = base + i * THREADS + threadIdx.x; }
  }
  best_of_block(top, at);
  float2* mine = parts + (u64)blockIdx.y * gridDim.x;
  if (threadIdx.x == 0) mine[blockIdx.x] = make_float2(top, __uint_as_float(at));
  if (!is_last(states + blockIdx.y)) return;
  top = -infinity();
  at = NONE;
  for (u32 i = threadIdx.x; i < gridDim.x; i += THREADS) {
    const float2 part = __ldcg(mine + i);
    take_better(top, at, part.x, __float_as_uint(part.y));
  }
  best_of_block(top, at);
  if (threadIdx.x) return;
  // Pairs travel between ranks, where NONE would be taken for a word that has not come.
  best[blockIdx.y] = make_float2(top, __uint_as_float(at == NONE ? 0 : at));
  if (chosen) chosen[blockIdx.y] = at;
}

// The token by ascending id, from the masses of the tiles.
__device__ __forceinline__ void choose_by_id(const Row& row, const double* masses, u32* chosen) {
  __shared__ u32 tile;
  const u32 t = threadIdx.x;
  bool beyond;
  double total;
  double mass = t * TILE < row.count ? __ldcg(masses + t) : 0.0, before = sum_before(mass, total);
  const double target = uniform(row.params) * total;
  const u32 owner = thread_at(mass, before, target, beyond);
  __shared__ double start;
  if (t == owner) { tile = t; start = before; }
  __syncthreads();
  const u32 id = tile * TILE + 2 * t;
  const float low = row.kept(row.weight(row.logits.at(id))), high = row.kept(row.weight(row.logits.at(id + 1)));
  mass = (double)low + (double)high;
  before = start + sum_before(mass, total);
  if (t == thread_at(mass, before, target, beyond)) chosen[blockIdx.y] = low > 0.f && (before + low > target || high == 0.f) ? id : id + 1;
}

// Bins of which one holds the token where mass (or number) first exceeds a goal: `low ..= high`, with
// `above` tokens above and `through` down to the end.
struct Window {
  u32 low, high, above, through;
  // The goal is reached in a bin.
  bool is_reached;
  __device__ __forceinline__ bool fits() const { return is_reached && through - above <= SORTED_MAX; }
};

// Searches the first `end` bins. The mass of a bin is known within a 192nd of a factor of two.
__device__ __forceinline__ Window find_window(const u32* bins, u32 end, double goal, bool by_number) {
  constexpr u32 EACH = BINS / THREADS;
  __shared__ Window window;
  const u32 t = threadIdx.x;
  u32 counts[EACH] = {};
  double least = 0, number = 0, all;
  // A bin's mass at its end, and at its start.
  auto mass_at_end = [&](u32 i) { return counts[i] * (by_number ? 1.0 : (double)power2(-(float)(t * EACH + i + 1) / BINS_OF_HALVING)); };
  const double widest = by_number ? 1.0 : (double)power2(1.f / BINS_OF_HALVING);
#pragma unroll
  for (u32 i = 0; i < EACH; i++) {
    counts[i] = t * EACH + i < end ? __ldcg(bins + t * EACH + i) : 0;
    number += counts[i];
    least += mass_at_end(i);
  }
  const double number_before = sum_before(number, all);
  double before = sum_before(least, all);
  bool beyond;
  // Where the most that it may be exceeds the goal, and where the least does.
  u32 owner = thread_at(least, before, goal / widest, beyond);
  if (t == owner) {
    double reached = before;
    u32 above = (u32)number_before, bin = 0;
#pragma unroll
    for (u32 i = 0; i < EACH; i++) {
      reached += mass_at_end(i);
      if (reached * widest > goal || i + 1 == EACH) { bin = i; break; }
      above += counts[i];
    }
    window.low = t * EACH + bin;
    window.above = above;
    window.is_reached = beyond;
  }
  owner = thread_at(least, before, goal, beyond);
  if (beyond && t == owner) {
    u32 through = (u32)number_before, bin = 0;
#pragma unroll
    for (u32 i = 0; i < EACH; i++) {
      before += mass_at_end(i);
      through += counts[i];
      if (before > goal || i + 1 == EACH) { bin = i; break; }
    }
    window.high = t * EACH + bin;
    window.through = through;
  }
  if (!beyond && t == THREADS - 1) {
    window.high = end - 1;
    window.through = (u32)(number_before + number);
  }
  __syncthreads();
  const Window found = window;
  __syncthreads();
  return found;
}

// What step 3 must gather.
__device__ __forceinline__ void set_window(const Row& row, const double* masses, const u32* bins, State* state) {
  const Params& p = row.params;
  double total;
  sum_before(threadIdx.x * TILE < row.count ? __ldcg(masses + threadIdx.x) : 0.0, total);
  Window w = find_window(bins, BINS, p.top_k ? p.top_k - 1.0 : p.top_p * total, p.top_k != 0);
  // All that may be kept, where it can be sorted; else one threshold alone can be looked for.
  const bool is_all = w.through <= SORTED_MAX && (w.is_reached || !p.top_k);
  const bool is_simple = p.min_p <= 0.f && !(p.top_k && p.top_p < 1.f);
  if (is_all) w.low = w.above = 0;
  if (threadIdx.x) return;
  state->low = is_all || (w.fits() && is_simple) ? w.low : BY_DIGITS;
  state->high = w.high;
  state->above = w.above;
  state->total = total;
}

extern "C" __global__ void __launch_bounds__(THREADS) sample_weigh(const float* x, u32 stride, u32 cols, const Params* params, const float2* best, u32* chosen, double* all_masses, u32* all_bins, State* states) {
  __shared__ u32 counts[BINS];
  let_next_start();
  wait_for_previous();
  const Row row(x, stride, cols, params, best);
  if (!row.is_drawn()) return;
  double* masses = all_masses + (u64)blockIdx.y * TILES_MAX;
  u32* bins = all_bins + (u64)blockIdx.y * BINS;
  const bool ordered = row.is_ordered();
  if (ordered) {
    for (u32 b = threadIdx.x; b < BINS; b += THREADS) counts[b] = 0;
    __syncthreads();
  }
  float sum = 0;
  auto each = [&](u32, float logit) {
    const float weight = row.weight(logit);
    sum += ordered ? weight : row.kept(weight);
    if (!ordered) return;
    const u32 b = row.bin(logit);
    if (b < BINS) atomicAdd(counts + b, 1);
  };
  auto end = [&](u32 tile) {
    const double mass = warp_sum_exact(sum);
    if ((threadIdx.x & 31) == 0) masses[tile] = mass;
    sum = 0;
  };
  each_of_tiles(row, blockIdx.x, gridDim.x, each, end);
  if (ordered) {
    __syncthreads();
    for (u32 b = threadIdx.x; b < BINS; b += THREADS)
      if (counts[b]) atomicAdd(bins + b, counts[b]);
  }
  State* state = states + blockIdx.y;
  if (!is_last(state)) return;
  if (!ordered) return choose_by_id(row, masses, chosen);
  set_window(row, masses, bins, state);
}

// Over tokens from the top, the key where `goal` is reached (or passed): of their number, or of their mass
// where `by_mass`, those below min_p counting only with `all`. 16-fold search, a pass over the row a digit.
__device__ __forceinline__ u64 find_key(const Row& row, double goal, bool by_mass, bool all, bool passed) {
  __shared__ double sums[WARPS][16];
  __shared__ u64 low;
  const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  if (threadIdx.x == 0) low = 0;
  for (int shift = 48; shift >= 0; shift -= 4) {
    __syncthreads();
    const u64 from = low;
    float sum[16];
#pragma unroll
    for (u32 j = 0; j < 16; j++) sum[j] = 0;
    auto each = [&](u32 id, float logit) {
      const float weight = row.weight(logit);
      const u64 key = sort_key(logit, id);
      if (!(logit > -infinity()) || key < from) return;
      const u64 digit = (key - from) >> shift;
      const float value = by_mass ? (all ? weight : row.kept(weight)) : 1.f;
#pragma unroll
      for (u32 j = 0; j < 16; j++) sum[j] += digit == j || (j == 15 && digit > 15) ? value : 0.f;
    };
    each_of_tiles(row, 0, 1, each, [](u32) {});
#pragma unroll
    for (u32 j = 0; j < 16; j++) {
      const double s = warp_sum_exact(sum[j]);
      if (lane == 0) sums[warp][j] = s;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      double reached = 0;
      int j = 15;
      for (;; j--) {
        for (u32 w = 0; w < WARPS; w++) reached += sums[w][j];
        if (j == 0 || (passed ? reached > goal : reached >= goal)) break;
      }
      low = from + ((u64)j << shift);
    }
  }
  __syncthreads();
  const u64 found = low;
  __syncthreads();
  return found;
}

// The mass of the tokens from the top down to `key`.
__device__ __forceinline__ double mass_from(const Row& row, u64 key, bool all) {
  float sum = 0;
  auto each = [&](u32 id, float logit) {
    const float weight = row.weight(logit);
    if (logit > -infinity() && sort_key(logit, id) >= key) sum += all ? weight : row.kept(weight);
  };
  each_of_tiles(row, 0, 1, each, [](u32) {});
  double total;
  sum_before(sum, total);
  return total;
}

__device__ __forceinline__ void choose_by_digits(const Row& row, u32* chosen) {
  u64 last = row.params.top_k ? find_key(row, row.params.top_k, false, true, false) : 0;
  if (row.params.top_p < 1.f) {
    const u64 cut = find_key(row, row.params.top_p * mass_from(row, last, true), true, true, false);
    last = cut > last ? cut : last;
  }
  const double target = uniform(row.params) * mass_from(row, last, false);
  const u64 key = find_key(row, target, true, false, true);
  const u32 id = ID_MASK - (u32)(key & ID_MASK);
  // Beyond the last by rounding: the largest stays chosen.
  if (threadIdx.x == 0 && key >= last && id < row.count) chosen[blockIdx.y] = id;
}

// Sorts the first `number` of `keys`, descending; what follows them, to a power of two, becomes 0.
__device__ __forceinline__ void sort(u64* keys, u32 number) {
  u32 size = 2;
  while (size < number) size <<= 1;
  for (u32 i = number + threadIdx.x; i < size; i += THREADS) keys[i] = 0;
  for (u32 run = 2; run <= size; run <<= 1)
    for (u32 apart = run >> 1; apart; apart >>= 1) {
      __syncthreads();
      for (u32 i = threadIdx.x; i < size / 2; i += THREADS) {
        const u32 low = 2 * i - (i & (apart - 1)), high = low + apart;
        const u64 a = keys[low], b = keys[high];
        if ((a < b) == !(low & run)) { keys[low] = b; keys[high] = a; }
      }
    }
  __syncthreads();
}

// Of sorted keys each thread has this many in a row.
constexpr u32 EACH = SORTED_MAX / THREADS;

// The weights of this thread's sorted keys, 0 beyond the first `count`.
__device__ __forceinline__ double weights_of(const Row& row, const u64* keys, u32 count, float* weights) {
  double mass = 0;
#pragma unroll
  for (u32 i = 0; i < EACH; i++) {
    const u32 at = threadIdx.x * EACH + i;
    weights[i] = at < count ? row.weight(logit_of(keys[at])) : 0.f;
    mass += weights[i];
  }
  return mass;
}

// The token where the weights' sum first exceeds `target`.
__device__ __forceinline__ void draw(const u64* keys, const float* weights, double target, u32* chosen) {
  double mass = 0, total;
#pragma unroll
  for (u32 i = 0; i < EACH; i++) mass += weights[i];
  double before = sum_before(mass, total);
  bool beyond;
  if (threadIdx.x != thread_at(mass, before, target, beyond)) return;
  u32 found = 0;
  bool is_found = false;
#pragma unroll
  for (u32 i = 0; i < EACH; i++) {
    before += weights[i];
    if (weights[i] > 0.f && !is_found) found = i;
    is_found = is_found || (weights[i] > 0.f && before > target);
  }
  chosen[blockIdx.y] = ID_MASK - (u32)(keys[threadIdx.x * EACH + found] & ID_MASK);
}

// The token among the first `number` of the row, sorted; false when top_p reaches beyond them.
__device__ __forceinline__ bool choose_sorted(const Row& row, const u64* keys, u32 number, const State& state, u32* chosen) {
  const Params& p = row.params;
  float weights[EACH];
  double total, before = sum_before(weights_of(row, keys, p.top_k ? min(p.top_k, number) : number, weights), total);
  const double goal = p.top_p < 1.f ? p.top_p * (p.top_k ? total : state.total) : infinity();
  if (p.top_p < 1.f && total < goal) return false;
  double mass = 0;
#pragma unroll
  for (u32 i = 0; i < EACH; i++) {
    const bool inside = before < goal || threadIdx.x * EACH + i == 0;
    before += weights[i];
    weights[i] = inside ? row.kept(weights[i]) : 0.f;
    mass += weights[i];
  }
  sum_before(mass, total);
  draw(keys, weights, uniform(p) * total, chosen);
  return true;
}

// The token, when the sorted `keys` hold the last that is kept and `masses` what lies above them; `bins`
// lead to the token if it is above. False when there are too many.
__device__ __forceinline__ bool choose_in_window(const Row& row, u64* keys, u32 number, const State& state, const double* masses, const u32* bins, u32* chosen) {
  __shared__ u32 gathered;
  const Params& p = row.params;
  double above, mass = 0, total;
  sum_before(threadIdx.x * TILE < row.count ? __ldcg(masses + threadIdx.x) : 0.0, above);
  float weights[EACH];
  double before = sum_before(weights_of(row, keys, p.top_k ? min(p.top_k - state.above, number) : number, weights), total);
  const double goal = p.top_k ? infinity() : p.top_p * state.total - above;
#pragma unroll
  for (u32 i = 0; i < EACH; i++) {
    const bool inside = before < goal;
    before += weights[i];
    weights[i] = inside ? weights[i] : 0.f;
    mass += weights[i];
  }
  sum_before(mass, total);
  const double target = uniform(p) * (above + total);
  if (target >= above && total > 0) {
    draw(keys, weights, target - above, chosen);
    return true;
  }
  const Window w = find_window(bins, state.low, target, false);
  if (!w.fits()) return false;
  if (threadIdx.x == 0) gathered = 0;
  __syncthreads();
  float sum = 0;
  auto each = [&](u32 id, float logit) {
    const u32 b = row.bin(logit);
    if (b < w.low) sum += row.weight(logit);
    else if (b <= w.high) keys[atomicAdd(&gathered, 1)] = sort_key(logit, id);
  };
  each_of_tiles(row, 0, 1, each, [](u32) {});
  sum_before(sum, above);
  number = gathered;
  sort(keys, number);
  weights_of(row, keys, number, weights);
  draw(keys, weights, target - above, chosen);
  return true;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) sample_pick(const float* x, u32 stride, u32 cols, const Params* params, const float2* best, u32* chosen, double* all_masses, u32* all_bins, State* states, u64* lists) {
  __shared__ u64 keys[SORTED_MAX];
  let_next_start();
  wait_for_previous();
  const Row row(x, stride, cols, params, best);
  if (!row.is_drawn() || !row.is_ordered()) return;
  State* shared_state = states + blockIdx.y;
  const State state = *shared_state;
  double* masses = all_masses + (u64)blockIdx.y * TILES_MAX;
  u32* bins = all_bins + (u64)blockIdx.y * BINS;
  u64* list = lists + (u64)blockIdx.y * SORTED_MAX;
  float sum = 0;
  auto each = [&](u32 id, float logit) {
    const u32 b = row.bin(logit);
    if (b < state.low) sum += row.weight(logit);
    else if (b <= state.high) list[atomicAdd(&shared_state->gathered, 1)] = sort_key(logit, id);
  };
  auto end = [&](u32 tile) {
    const double mass = warp_sum_exact(sum);
    if (state.low && (threadIdx.x & 31) == 0) masses[tile] = mass;
    sum = 0;
  };
  if (state.low != BY_DIGITS) each_of_tiles(row, blockIdx.x, gridDim.x, each, end);
  if (!is_last(shared_state)) return;
  bool is_chosen = false;
  if (state.low != BY_DIGITS) {
    const u32 number = __ldcg(&shared_state->gathered);
    for (u32 i = threadIdx.x; i < number; i += THREADS) keys[i] = __ldcg(list + i);
    sort(keys, number);
    if (threadIdx.x == 0) shared_state->gathered = 0;
    is_chosen = state.low ? choose_in_window(row, keys, number, state, masses, bins, chosen) : choose_sorted(row, keys, number, state, chosen);
  }
  if (!is_chosen) choose_by_digits(row, chosen);
  __syncthreads();
  for (u32 b = threadIdx.x; b < BINS; b += THREADS) bins[b] = 0;
}
