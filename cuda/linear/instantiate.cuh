// What a file of linears of some weight formats includes.
#pragma once

#include "cuda/linear/linear_grouped.cuh"
#include "cuda/linear/linear_prefill.cuh"

#define INFINILM_INSTANTIATE_LINEARS(F)                                                \
    template cudaError_t linear_decode_as<F>(const LinearArgs&, cudaStream_t);         \
    template cudaError_t linear_grouped_as<F>(const GroupedLinearArgs&, cudaStream_t); \
    template cudaError_t linear_prefill_as<F>(const LinearArgs&, const PrefillPlan&, cudaStream_t);
