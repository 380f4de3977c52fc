// Blocks of one type as blocks of another that has the same integers behind the same scales: for devices whose kernels
// take the second one alone.
#pragma once

#include "gguf/dequantise.h"

namespace infinilm::gguf {

// The type whose blocks hold those of `type`; "": no other type does. IQ1 and IQ3 become Q6_K; Q5_0, IQ4 and IQ2
// Q8_0; TQ1_0 and TQ2_0 Q2_K. Numbers stay what they are, but for these:
//   IQ1, IQ3_XXS      the factor is divided by 8 or 2: a small one may be rounded to a float16
//   IQ4_XS, IQ2_XXS   the scale of 32 weights is rounded to a float16
//   IQ2_XS, IQ2_S     weights are rounded to 127ths of the largest of 32
std::string_view regrouped_type(std::string_view type);

// The bytes of a row as blocks of regrouped_type. Error: there is none.
int64_t regrouped_bytes(const Rows& rows);

// Writes the rows to `out`, [num_rows, regrouped_bytes], with up to num_threads threads. Error: as above.
void regroup(const Rows& rows, uint8_t* out, int num_threads);

}  // namespace infinilm::gguf
