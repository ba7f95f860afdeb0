// What every kernel file starts with. Needs no header: NVRTC alone compiles it.
//
// ELEM chooses the type of activations, weights, K and V: 0 f32, 1 bf16, 2 f16. Sums, norms,
// softmax and biases are f32 whatever it is. Sizes are checked by the caller: inner dimensions are
// multiples of 8 elements and rows start on 16 bytes.
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#if ELEM == 0
typedef float elem;
#else
typedef u16 elem;
#endif

// Elements in one 16-byte load.
constexpr int VEC = 16 / sizeof(elem);

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(u16 x) {
#if ELEM == 2
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
#else
  return __uint_as_float((u32)x << 16);
#endif
}

__device__ __forceinline__ void put(float* p, float x) { *p = x; }
// Nearest even.
__device__ __forceinline__ void put(u16* p, float x) {
  u16 y;
#if ELEM == 2
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
#else
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
#endif
  *p = y;
}

// Two floats as one register of two elements, `low` in the lower half.
__device__ __forceinline__ u32 pack2(float low, float high) {
  u32 y;
#if ELEM == 2
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
#else
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
#endif
  return y;
}

// The VEC elements of a 16-byte register as floats.
__device__ __forceinline__ void unpack(const uint4& raw, float* out) {
  const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
#if ELEM == 0
    out[i] = __uint_as_float(words[i]);
#else
    out[2 * i] = to_float((u16)(words[i] & 0xffffu));
    out[2 * i + 1] = to_float((u16)(words[i] >> 16));
#endif
  }
}

// VEC floats as the elements of a 16-byte register, rounded.
__device__ __forceinline__ uint4 packed(const float* x) {
#if ELEM == 0
  return make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3]));
#else
  return make_uint4(pack2(x[0], x[1]), pack2(x[2], x[3]), pack2(x[4], x[5]), pack2(x[6], x[7]));
#endif
}

__device__ __forceinline__ uint4 load16(const elem* p) { return *(const uint4*)p; }

// A weight: read once, so it leaves the first-level cache to the activations. Not through `.nc`: the assembler moves such
// loads behind the wait for the previous kernel.
__device__ __forceinline__ uint4 load16_once(const elem* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

// Eight consecutive elements.
__device__ __forceinline__ void load8(const elem* p, float* out) {
#pragma unroll
  for (int i = 0; i < 8; i += VEC) unpack(load16(p + i), out + i);
}
__device__ __forceinline__ void store8(elem* p, const float* x) {
#if ELEM == 0
  *(float4*)p = make_float4(x[0], x[1], x[2], x[3]);
  *(float4*)(p + 4) = make_float4(x[4], x[5], x[6], x[7]);
#else
  *(uint4*)p = packed(x);
#endif
}
__device__ __forceinline__ void load8_f32(const float* p, float* out) {
  const float4 a = *(const float4*)p, b = *(const float4*)(p + 4);
  out[0] = a.x; out[1] = a.y; out[2] = a.z; out[3] = a.w;
  out[4] = b.x; out[5] = b.y; out[6] = b.z; out[7] = b.w;
}

// The next kernel of the stream may start where there is room (sm_90 and later, where it was launched so). Kernels call it
// first of all, so several of them may have started: what one reads before its wait must be older than all of them. One whose
// next relies on more calls it after its own wait.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
// Everything that earlier kernels of the stream wrote is visible from here on. Every kernel waits, in all blocks that do not end
// at once: its end says to the next that all before it have ended too.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

[[maybe_unused]] constexpr float LOG2E = 1.4426950408889634f;
// 2^x in one instruction; 0 far below.
__device__ __forceinline__ float power2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int o = 16; o; o >>= 1) x += __shfl_xor_sync(~0u, x, o);
  return x;
}

// Sum over the block, on every thread. `scratch` holds 32 floats.
__device__ __forceinline__ float block_sum(float x, float* scratch) {
  x = warp_sum(x);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = x;
  __syncthreads();
  const int warps = (blockDim.x + 31) >> 5;
  return warp_sum((threadIdx.x & 31) < warps ? scratch[threadIdx.x & 31] : 0.f);
}

// act(gate) * up; `kind` 0 silu, 1 gelu by tanh.
__device__ __forceinline__ float gated(int kind, float gate, float up) {
  const float exponent = kind == 0 ? -gate : -1.5957691f * (gate + 0.044715f * gate * gate * gate);
  return gate / (1.f + expf(exponent)) * up;
}
