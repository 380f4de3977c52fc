// The instruction sets the CPU kernels were built for, and the one to use here.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "cpu/kernels/kernels.h"

namespace infinilm::cpu {

// Builds that this machine can run, slowest first.
std::vector<const Kernels*> available_kernels();

// Whether the build of this name rounds a product and its sum once, as AVX2 and NEON do. All builds that do give the
// same bits, since all add in one order; but for products of bfloat16.
bool fuses_products(std::string_view isa);

// "": INFINILM_CPU_ISA if set, else the fastest. A name that is not built or not runnable here: DeviceError that lists
// those that are.
const Kernels& select_kernels(std::string_view isa = "");

}  // namespace infinilm::cpu
