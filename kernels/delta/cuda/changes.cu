// Twins of kernels/delta/gap.py `diff` and kernels/delta/changes.py `scatter`, on the device. CUDA C++ for NVRTC: no headers.
//
// A warp takes a tile of TILE consecutive elements, 32 at a time, so that reads are whole cache lines and the changed
// ones keep their order by a ballot: no atomics, and the same output whatever the launch. Elements are unsigned lanes of
// 1, 2, 4 or 8 bytes; equality is equality of bits. CHUNK is a multiple of TILE.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define TILE 2048ull
#define CHUNK (1ull << 18)
#define ALL 0xffffffffu

// How many elements of each tile differ. One warp a tile; blocks of 256 threads.
template <typename T>
__device__ void count_tiles(const T* old_M, const T* new_M, u64 elements, u64 tiles, u32* count_B) {
  const u64 tile = ((u64)blockIdx.x * blockDim.x + threadIdx.x) >> 5;
  if (tile >= tiles) return;  // a whole warp leaves: its ballots below stay whole
  const u32 lane = threadIdx.x & 31u;
  u32 count = 0;
#pragma unroll 4
  for (u64 k = 0; k < TILE; k += 32) {
    const u64 i = tile * TILE + k + lane;
    const bool differs = i < elements && old_M[i] != new_M[i];
    count += __popc(__ballot_sync(ALL, differs));
  }
  if (lane == 0) count_B[tile] = count;
}

// Positions within the chunk, elements before and after, in order. first_B[tile] = changed elements before the tile.
template <typename T>
__device__ void compact_tiles(const T* old_M, const T* new_M, u64 elements, u64 tiles, const u64* first_B,
                              u32* positions_N, T* old_N, T* new_N) {
  const u64 tile = ((u64)blockIdx.x * blockDim.x + threadIdx.x) >> 5;
  if (tile >= tiles) return;
  const u32 lane = threadIdx.x & 31u;
  u64 at = first_B[tile];
#pragma unroll 4
  for (u64 k = 0; k < TILE; k += 32) {
    const u64 i = tile * TILE + k + lane;
    T before = 0, after = 0;
    if (i < elements) {
      before = old_M[i];
      after = new_M[i];
    }
    const bool differs = before != after;
    const u32 mask = __ballot_sync(ALL, differs);
    if (differs) {
      const u64 n = at + __popc(mask & ((1u << lane) - 1u));
      positions_N[n] = (u32)(i & (CHUNK - 1));
      old_N[n] = before;
      new_N[n] = after;
    }
    at += __popc(mask);
  }
}

// How many changes do not find the element that they start from, or lie outside. One block a chunk.
template <typename T>
__device__ void check_changes(const T* target_M, u64 elements, const u64* at_K, const u32* positions_N,
                              const T* expected_N, u32* wrong) {
  const u64 first = (u64)blockIdx.x * CHUNK;
  u32 mine = 0;
  for (u64 n = at_K[blockIdx.x] + threadIdx.x; n < at_K[blockIdx.x + 1]; n += blockDim.x) {
    const u64 i = first + positions_N[n];
    if (positions_N[n] >= CHUNK || i >= elements || target_M[i] != expected_N[n]) ++mine;
  }
  if (mine) atomicAdd(wrong, mine);
}

// target[position] = value. Positions are distinct and were checked. One block a chunk.
template <typename T>
__device__ void scatter_changes(T* target_M, const u64* at_K, const u32* positions_N, const T* values_N) {
  const u64 first = (u64)blockIdx.x * CHUNK;
  for (u64 n = at_K[blockIdx.x] + threadIdx.x; n < at_K[blockIdx.x + 1]; n += blockDim.x)
    target_M[first + positions_N[n]] = values_N[n];
}

#define LANES(NAME, T)                                                                                          \
  extern "C" __global__ void count_##NAME(const T* a, const T* b, u64 elements, u64 tiles, u32* count_B) {      \
    count_tiles<T>(a, b, elements, tiles, count_B);                                                             \
  }                                                                                                             \
  extern "C" __global__ void compact_##NAME(const T* a, const T* b, u64 elements, u64 tiles, const u64* first_B, \
                                            u32* positions_N, T* old_N, T* new_N) {                             \
    compact_tiles<T>(a, b, elements, tiles, first_B, positions_N, old_N, new_N);                                \
  }                                                                                                             \
  extern "C" __global__ void check_##NAME(const T* target_M, u64 elements, const u64* at_K,                     \
                                          const u32* positions_N, const T* expected_N, u32* wrong) {            \
    check_changes<T>(target_M, elements, at_K, positions_N, expected_N, wrong);                                 \
  }                                                                                                             \
  extern "C" __global__ void scatter_##NAME(T* target_M, const u64* at_K, const u32* positions_N,               \
                                            const T* values_N) {                                                \
    scatter_changes<T>(target_M, at_K, positions_N, values_N);                                                  \
  }

LANES(u8, u8)
LANES(u16, u16)
LANES(u32, u32)
LANES(u64, u64)
