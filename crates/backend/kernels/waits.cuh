// Memory that another GPU or the host uses too, and waits for it that have an end.
//
// A wait ends without what it waits for when the host says so, or when it has lasted too long: what is missing is written
// where the host finds it, and all later waits of this rank end soon.

constexpr u32 POLLS = 4096;  // between two looks at clock and host, a few milliseconds

// Words of `report`, in the host's memory.
constexpr u32 STOP = 0, IS_FAILED = 1, MISSING = 2, OPERATION = 3, BYTES = 4, KIND = 5, WAITED_MS = 6;

struct Wait {
  u32* failed;  // a wait of this rank has ended without what it waited for
  u32* report;
  u32 limit_ms;
};

__device__ __forceinline__ uint4 take16(u64 at) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
  return v;
}
__device__ __forceinline__ void put16(u64 at, uint4 v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ u32 take4(const void* at) {
  u32 v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
}
__device__ __forceinline__ void put4(void* at, u32 v) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(at), "r"(v) : "memory");
}
__device__ __forceinline__ u64 nanoseconds() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

// Whether a wait of so long is to end without what it waits for; the first one that does leaves the report.
__device__ __noinline__ bool gives_up(Wait wait, u64 waited_ns, u32 source, u32 kind, u32 bytes, u32 operation) {
  const u32 waited_ms = (u32)(waited_ns / 1000000);
  if (take4(wait.failed) == 0 && take4(wait.report + STOP) == 0 && waited_ms < wait.limit_ms) return false;
  if (atomicExch(wait.failed, 1u) == 0) {
    put4(wait.report + MISSING, source);
    put4(wait.report + OPERATION, operation);
    put4(wait.report + BYTES, bytes);
    put4(wait.report + KIND, kind);
    put4(wait.report + WAITED_MS, waited_ms);
    __threadfence_system();
    put4(wait.report + IS_FAILED, 1);
  }
  return true;
}
