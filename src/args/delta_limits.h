// The sizes that the kernels of the delta rule have registers and arrays for, on every device. Checks of the op, of a
// specification and of a configuration use these constants, too, so that all of them refuse the same sizes.
#pragma once

namespace infinilm {

constexpr int most_taps = 8;     // tokens that the convolution sees
constexpr int most_k_dim = 256;  // rows of a head's state
constexpr int most_drafts = 16;  // tokens of a sequence that its state does not take in

}  // namespace infinilm
