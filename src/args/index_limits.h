// What the kernels of choose_keys have room for.
#pragma once

namespace infinilm {

constexpr int most_index_size = 11264;  // elements of a token's heads on a GPU: 44 KiB of shared memory

}  // namespace infinilm
