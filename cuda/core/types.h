// What kernels of every room share. C++17, for nvcc, for the host compiler and for the emulator.
//
// Each room has a kernels.h: its kernels as the host code sees them, which are argument structs of plain device
// pointers and sizes, and launchers. A launcher enqueues on `stream`, allocates nothing, waits for nothing and returns
// the error of the launch. Arguments are valid already (ops.cpp); what a layout needs beyond that is said there, and
// the host code of the room ensures it.
//
// Alignment: every row of an activation, of a cache and of a norm weight starts at a multiple of 16 bytes, since
// widths are multiples of 8 elements (the backend refuses other models) and buffers are aligned to 256 bytes.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "args/activation.h"
#include "args/element.h"

namespace infinilm::cuda {

// One Element, that of activations, packed weights and the cache, serves a whole engine. f32 serves checks, not speed.
using infinilm::Activation;
using infinilm::Element;

constexpr int size_bytes(Element type) { return type == Element::f32 ? 4 : 2; }

}  // namespace infinilm::cuda
