// The part of NCCL's C interface that is used, declared by hand after NVIDIA's nccl.h (2.14 and later, where calls need
// not block), and the library that has it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace infinilm::nccl {

struct Comm;  // ncclComm
struct UniqueId {
    char bytes[128];
};

// ncclConfig_t as of version 2.14. NCCL reads as many bytes as `size` says and takes its defaults for what later
// versions added.
struct Config {
    size_t size = sizeof(Config);
    uint32_t magic = 0xcafebeef;
    uint32_t version = 21400;
    int blocking = 0;
    int reserved = 0;  // what padding would be
};
static_assert(sizeof(Config) == 24);

using Result = int;  // ncclResult_t
inline constexpr Result success = 0, in_progress = 7;

// ncclDataType_t
inline constexpr int type_int8 = 0, type_uint8 = 1, type_int32 = 2, type_int64 = 4, type_float16 = 6, type_float32 = 7,
                     type_bfloat16 = 9;
inline constexpr int op_sum = 0;  // ncclRedOp_t

struct Library {
    const char* (*GetErrorString)(Result);
    const char* (*GetLastError)(Comm*);
    Result (*GetVersion)(int* version);
    Result (*GetUniqueId)(UniqueId*);
    Result (*CommInitRankConfig)(Comm**, int size, UniqueId, int rank, Config*);
    Result (*CommGetAsyncError)(Comm*, Result*);
    Result (*CommFinalize)(Comm*);
    Result (*CommDestroy)(Comm*);
    Result (*CommAbort)(Comm*);
    Result (*GroupStart)();
    Result (*GroupEnd)();
    Result (*Send)(const void* in, size_t count, int type, int peer, Comm*, void* stream);
    Result (*Recv)(void* out, size_t count, int type, int peer, Comm*, void* stream);
    Result (*AllReduce)(const void* in, void* out, size_t count, int type, int op, Comm*, void* stream);
    Result (*AllGather)(const void* in, void* out, size_t count_per_rank, int type, Comm*, void* stream);
    Result (*Broadcast)(const void* in, void* out, size_t count, int type, int root, Comm*, void* stream);
};

// Opened once, never closed. The first of these places counts: the environment variable INFINILM_NCCL_LIBRARY; `path`,
// if it is not empty; where the system looks for libnccl.so.2. DeviceError: none can be opened, or it is no NCCL
// >= 2.19.
const Library& open_nccl(const std::string& path);

}  // namespace infinilm::nccl
