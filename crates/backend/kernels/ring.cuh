// A tile of weight rows times a tile of tokens, fed through a ring of shared memory by copies in flight.
//
// Weights are the rows of mma.m16n8k16 and tokens its columns, so few tokens waste little. A stage of the
// ring holds DEPTH elements of ROWS rows of weights and, behind them, of TOKENS rows of x; the 16-byte pieces
// of a row are permuted so that neither copies nor ldmatrix meet in a bank. The first half of the threads
// copies weights and the other half x, so that weights, which never change, are asked for before the wait for
// the previous kernel. Warps share rows, tokens and depth; those that share depth are added in order.
template <u32 ROWS_, u32 TOKENS_, u32 DEPTH_, u32 STAGES_, u32 ROW_WARPS_, u32 TOKEN_WARPS_, u32 DEPTH_WARPS_>
struct Tile {
  static constexpr u32 ROWS = ROWS_, TOKENS = TOKENS_, DEPTH = DEPTH_, STAGES = STAGES_;
  static constexpr u32 ROW_WARPS = ROW_WARPS_, TOKEN_WARPS = TOKEN_WARPS_, DEPTH_WARPS = DEPTH_WARPS_;
  static constexpr u32 THREADS = 32 * ROW_WARPS * TOKEN_WARPS * DEPTH_WARPS, LOADERS = THREADS / 2;
  // 16-byte pieces of a row, and rows that all loaders take at once.
  static constexpr u32 PIECES = DEPTH / 8, STRIDE = LOADERS / PIECES;
  // Elements of a stage.
  static constexpr u32 STAGE = (ROWS + TOKENS) * DEPTH;
  // Rows and tokens of a warp, in those of an mma.
  static constexpr u32 M = ROWS / ROW_WARPS / 16, N = TOKENS / TOKEN_WARPS / 8;
  // Tokens whose sums are in shared memory at once, and floats from one to the next: 4 banks.
  static constexpr u32 CHUNK = TOKENS < 32 ? TOKENS : 32, PITCH = ROWS + 4;
  static_assert(STRIDE % 8 == 0 && ROWS % STRIDE == 0 && TOKENS % STRIDE == 0, "rows are dealt to loaders evenly");
  static_assert(N % 2 == 0 && N * 8 % CHUNK == 0, "a warp's tokens are pairs of mma columns and whole chunks");
  static_assert(DEPTH / 16 % DEPTH_WARPS == 0 && PITCH % 32 == 4 && STAGES >= 2, "what the loops below assume");
};

// Where a warp's rows, tokens and depth of a tile begin.
template <class T>
struct WarpPlace {
  u32 row, token, depth;
  __device__ __forceinline__ WarpPlace() {
    const u32 warp = threadIdx.x >> 5;
    row = warp % T::ROW_WARPS * T::M * 16;
    token = warp / T::ROW_WARPS % T::TOKEN_WARPS * T::N * 8;
    depth = warp / (T::ROW_WARPS * T::TOKEN_WARPS);
  }
};

// One of the LOADERS begins its copies of columns `column ..` of COUNT rows. `row_at(i)` is where the row of its
// i-th copy starts, which is row `thread / PIECES + i * STRIDE` of the tile, or null for one of zeros.
template <class T, u32 COUNT, class RowAt>
__device__ __forceinline__ void load_rows(elem* to, u32 thread, u32 column, u32 k, RowAt row_at) {
  const u32 piece = thread % T::PIECES, first = thread / T::PIECES, from = column + piece * 8;
  elem* place = to + first * T::DEPTH + ((piece ^ (first & 7)) << 3);
#pragma unroll
  for (u32 i = 0; i < COUNT / T::STRIDE; i++) {
    const elem* row = row_at(i);
    copy16(place + i * T::STRIDE * T::DEPTH, row + from, row && from < k);
  }
}

// acc += weights * x over a stage.
template <class T>
__device__ __forceinline__ void multiply(float (*acc)[T::N][4], const elem* stage, const WarpPlace<T>& warp) {
  const u32 lane = threadIdx.x & 31;
  const elem* weights = stage + (warp.row + (lane & 15)) * T::DEPTH;
  const elem* x = stage + (T::ROWS + warp.token + (lane & 7) + (lane >> 4) * 8) * T::DEPTH;
#pragma unroll
  for (u32 i = 0; i < T::DEPTH / 16 / T::DEPTH_WARPS; i++) {
    const u32 piece = 2 * (i * T::DEPTH_WARPS + warp.depth);
    u32 a[T::M][4];
#pragma unroll
    for (u32 m = 0; m < T::M; m++) load_matrices(a[m], weights + m * 16 * T::DEPTH + (((piece + (lane >> 4)) ^ (lane & 7)) << 3));
#pragma unroll
    for (u32 n = 0; n < T::N; n += 2) {
      u32 b[4];
      load_matrices(b, x + n * 8 * T::DEPTH + (((piece + ((lane >> 3) & 1)) ^ (lane & 7)) << 3));
#pragma unroll
      for (u32 m = 0; m < T::M; m++) {
        mma(acc[m][n], a[m], b[0], b[1]);
        mma(acc[m][n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// Brings a tile's sums into shared memory, `sums[token][PITCH]`, CHUNK tokens at a time, and calls `use(first token)`
// on all threads for each; then they are zero.
template <class T, class Use>
__device__ __forceinline__ void drain(float (*acc)[T::N][4], float* sums, const WarpPlace<T>& warp, Use use) {
  const u32 quad = (threadIdx.x & 31) >> 2, pair = (threadIdx.x & 3) * 2;
#pragma unroll
  for (u32 first = 0; first < T::TOKENS; first += T::CHUNK) {
    const u32 owner = first / (T::N * 8) * T::N * 8, n0 = (first - owner) / 8;
#pragma unroll
    for (u32 depth = 0; depth < T::DEPTH_WARPS; depth++) {
      if (warp.depth == depth && warp.token == owner) {
#pragma unroll
        for (u32 m = 0; m < T::M; m++)
#pragma unroll
          for (u32 n = 0; n < T::CHUNK / 8; n++)
#pragma unroll
            for (u32 e = 0; e < 4; e++) {
              float* sum = sums + (n * 8 + pair + (e & 1)) * T::PITCH + warp.row + m * 16 + quad + (e >> 1) * 8;
              *sum = depth ? *sum + acc[m][n0 + n][e] : acc[m][n0 + n][e];
            }
      }
      __syncthreads();
    }
    use(first);
    __syncthreads();
  }
#pragma unroll
  for (u32 m = 0; m < T::M; m++)
#pragma unroll
    for (u32 n = 0; n < T::N; n++)
#pragma unroll
      for (u32 e = 0; e < 4; e++) acc[m][n][e] = 0.f;
}
