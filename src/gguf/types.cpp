#include "gguf/types.h"

namespace infinilm::gguf {

namespace {

constexpr Type types[] = {
    {0, "F32", 1, 4, true},
    {1, "F16", 1, 2, true},
    {30, "BF16", 1, 2, true},
    {2, "Q4_0", 32, 18, true},
    {3, "Q4_1", 32, 20, true},
    {6, "Q5_0", 32, 22, true},
    {7, "Q5_1", 32, 24, true},
    {8, "Q8_0", 32, 34, true},
    {10, "Q2_K", 256, 84, true},
    {11, "Q3_K", 256, 110, true},
    {12, "Q4_K", 256, 144, true},
    {13, "Q5_K", 256, 176, true},
    {14, "Q6_K", 256, 210, true},
    {19, "IQ1_S", 256, 50, true},
    {29, "IQ1_M", 256, 56, true},
    {16, "IQ2_XXS", 256, 66, true},
    {17, "IQ2_XS", 256, 74, true},
    {22, "IQ2_S", 256, 82, true},
    {18, "IQ3_XXS", 256, 98, true},
    {21, "IQ3_S", 256, 110, true},
    {20, "IQ4_NL", 32, 18, true},
    {23, "IQ4_XS", 256, 136, true},
    {34, "TQ1_0", 256, 54, true},
    {35, "TQ2_0", 256, 66, true},
    {39, "MXFP4", 32, 17, true},
    {40, "NVFP4", 64, 36, true},
    {in_no_file, "Z4_32", 32, 19, true},
    {in_no_file, "Z4_64", 64, 35, true},
    {in_no_file, "Z4_128", 128, 67, true},
    // e4m3 behind a float32 scale; of F8_ROW all of a row have the same.
    {in_no_file, "F8_ROW", 32, 36, true},
    {in_no_file, "F8_32", 32, 36, true},
    {in_no_file, "F8_128", 128, 132, true},
    // Behind a float32 scale, which all of a row have, too: what NVFP4 of a tensor with a scale becomes.
    {in_no_file, "NVFP4_ROW", 64, 40, true},
    // Known by their sizes, so that a file with one of them has a readable header.
    {9, "Q8_1", 32, 40, false},
    {15, "Q8_K", 256, 292, false},
    {24, "I8", 1, 1, false},
    {25, "I16", 1, 2, false},
    {26, "I32", 1, 4, false},
    {27, "I64", 1, 8, false},
    {28, "F64", 1, 8, false},
    {41, "Q1_0", 128, 18, false},
    // Types that ggml has removed; older files have them.
    {4, "Q4_2", 0, 0, false},
    {5, "Q4_3", 0, 0, false},
    {31, "Q4_0_4_4", 0, 0, false},
    {32, "Q4_0_4_8", 0, 0, false},
    {33, "Q4_0_8_8", 0, 0, false},
    {36, "IQ4_NL_4_4", 0, 0, false},
    {37, "IQ4_NL_4_8", 0, 0, false},
    {38, "IQ4_NL_8_8", 0, 0, false},
};

}  // namespace

const Type* find_type(uint32_t number) {
    for (const Type& type : types)
        if (type.number == number && number != in_no_file) return &type;
    return nullptr;
}

const Type* find_type(std::string_view name) {
    for (const Type& type : types)
        if (type.name == name) return &type;
    return nullptr;
}

std::string readable_types() {
    std::string out;
    for (const Type& type : types)
        if (type.readable && type.number != in_no_file) out += (out.empty() ? "" : ", ") + std::string(type.name);
    return out;
}

}  // namespace infinilm::gguf
