// The residual stream on its way from a pipeline stage to the next one, through memory of the receiving GPU that the sending
// one writes.
//
// That memory has slots for whole transfers and a flag for each. A transfer goes into the slot of its number; when all of
// it is there its flag becomes the number. The receiver waits for exactly that number. Nobody says when a slot is free: a
// rank starts a step only when the one that had its slot before has ended on all stages (`stages.rs`).

constexpr u32 TRANSFER = 3;               // value of KIND
constexpr u32 ARRIVED = 0, FAILED = 1;    // words of `state`

__device__ __forceinline__ u32 acquire4(u64 at) {
  u32 v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
}
__device__ __forceinline__ void release4(u64 at, u32 v) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(v) : "memory");
}

// `vectors` of 16 bytes from `from` to the slot at `to`; the last block to have written raises the flag.
extern "C" __global__ void __launch_bounds__(512) stage_send(const uint4* from, u64 to, u64 flag, u32* state, u32 number, u32 vectors) {
  for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < vectors; i += gridDim.x * blockDim.x) put16(to + (u64)i * 16, from[i]);
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x || atomicAdd(state + ARRIVED, 1u) + 1 < gridDim.x) return;
  put4(state + ARRIVED, 0);
  __threadfence_system();
  release4(flag, number);
}

// The same from the slot at `from` once its flag is `number`, which rank `source` raises.
extern "C" __global__ void __launch_bounds__(512) stage_recv(u64 from, u64 flag, uint4* to, u32* state, u32* report, u32 limit_ms, u32 source, u32 number, u32 vectors) {
  if (threadIdx.x == 0) {
    u64 since = 0;
    for (u32 polls = 1; acquire4(flag) != number; polls++) {
      if (polls % POLLS) continue;
      const u64 now = nanoseconds();
      if (since == 0) since = now;
      else if (gives_up(Wait{state + FAILED, report, limit_ms}, now - since, source, TRANSFER, vectors * 16, number)) break;
    }
  }
  __syncthreads();
  for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < vectors; i += gridDim.x * blockDim.x) to[i] = take16(from + (u64)i * 16);
}
