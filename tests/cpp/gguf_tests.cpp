// The header of GGUF files that are damaged in every way: either it is refused, or what it says lies in the file.
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <random>

#include "check.h"
#include "gguf/dequantise.h"
#include "gguf/header.h"

namespace infinilm::test {
namespace {

using gguf::Header;
using gguf::ValueType;
using Bytes = std::vector<std::byte>;

class Writer {
public:
    template <class T>
    Writer& number(T value) {
        const auto* from = reinterpret_cast<const std::byte*>(&value);
        bytes.insert(bytes.end(), from, from + sizeof value);
        return *this;
    }
    Writer& string(const std::string& text) {
        number<uint64_t>(text.size());
        const auto* from = reinterpret_cast<const std::byte*>(text.data());
        bytes.insert(bytes.end(), from, from + text.size());
        return *this;
    }
    Writer& key(const std::string& name, ValueType type) { return string(name).number(static_cast<uint32_t>(type)); }
    Writer& tensor(const std::string& name, std::vector<uint64_t> dims, uint32_t type, uint64_t offset) {
        string(name).number(static_cast<uint32_t>(dims.size()));
        for (const uint64_t dim : dims) number(dim);
        return number(type).number(offset);
    }
    Bytes bytes;
};

// A small file with values of all kinds, of `num_tensors` tensors.
Bytes sample(int num_tensors = 3) {
    Writer w;
    w.number<uint32_t>(0x46554747).number<uint32_t>(3).number<uint64_t>(num_tensors).number<uint64_t>(7);
    w.key("general.architecture", ValueType::string).string("llama");
    w.key("general.alignment", ValueType::uint32).number<uint32_t>(64);
    w.key("llama.rope.freq_base", ValueType::float32).number(10000.0f);
    w.key("tokenizer.ggml.add_bos_token", ValueType::boolean).number<uint8_t>(1);
    w.key("tokenizer.ggml.tokens", ValueType::array).number(static_cast<uint32_t>(ValueType::string));
    w.number<uint64_t>(3).string("<s>").string("").string("a b");
    w.key("tokenizer.ggml.scores", ValueType::array).number(static_cast<uint32_t>(ValueType::float32));
    w.number<uint64_t>(3).number(0.0f).number(-1.0f).number(-2.0f);
    w.key("split.count", ValueType::uint16).number<uint16_t>(0);
    uint64_t offset = 0;
    for (int i = 0; i < num_tensors; ++i) {
        w.tensor("blk." + std::to_string(i) + ".attn_q.weight", {64, 4}, i % 2 == 0 ? 2 : 0, offset);
        offset += i % 2 == 0 ? 192 : 1024;  // Q4_0 of 144 bytes, and F32
    }
    w.bytes.resize((w.bytes.size() + 63) / 64 * 64 + offset);
    return w.bytes;
}

// What must hold for a header that was accepted.
void check_header(const Header& header, const Bytes& file, uint64_t file_size) {
    CHECK(header.data_begin % 8 == 0 || header.data_begin <= file_size + (1 << 20));
    CHECK(header.tensors.size() <= file.size() / 24);
    CHECK(header.metadata.size() <= file.size() / 13);
    for (const gguf::TensorEntry& tensor : header.tensors) {
        CHECK(tensor.begin >= header.data_begin && tensor.begin <= file_size);
        CHECK(tensor.bytes <= file_size - tensor.begin);
        uint64_t elements = 1;
        for (const int64_t size : tensor.shape) elements *= static_cast<uint64_t>(size);
        const auto block = static_cast<uint64_t>(tensor.type->block);
        CHECK(elements % block == 0 && elements / block * static_cast<uint64_t>(tensor.type->bytes) == tensor.bytes);
    }
    for (const auto& [key, value] : header.metadata) {
        if (value.type == ValueType::string) {
            CHECK(gguf::strings(value, file).size() == value.count);
        } else {
            CHECK(value.begin <= file.size());
            CHECK(value.count <= (file.size() - value.begin) / static_cast<uint64_t>(gguf::size_bytes(value.type)));
        }
    }
}

TEST(gguf_header) {
    const Bytes file = sample();
    const auto header = gguf::parse_header(file, file.size());
    CHECK(header && header->tensors.size() == 3 && header->metadata.size() == 7);
    CHECK(header->data_begin % 64 == 0);
    CHECK((header->tensors[1].shape == std::vector<int64_t>{4, 64}));
    CHECK(header->tensors[1].begin == header->data_begin + 192 && header->tensors[1].bytes == 1024);
    check_header(*header, file, file.size());
    // Every beginning of the file says that there is more, until the header is whole; cut off there, it is refused.
    for (size_t n = 0; n < file.size(); ++n) {
        const Bytes part(file.begin(), file.begin() + static_cast<std::ptrdiff_t>(n));
        const auto found = gguf::parse_header(part, file.size());
        CHECK(!found || found->tensors.size() == 3);
        CHECK(!error_of([&] { gguf::parse_header(part, n); }).empty() || n > header->tensors[2].begin);
    }
}

// While it lives, the process gets no more than so many bytes of address space: an allocation that a header talks it
// into is a std::bad_alloc, which no test expects. Sanitizers need theirs, so that they have no limit.
class MemoryLimit {
public:
    explicit MemoryLimit(rlim_t bytes) {
        CHECK(getrlimit(RLIMIT_AS, &before_) == 0);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
        long pages = 0;
        std::FILE* const file = std::fopen("/proc/self/statm", "r");
        if (!file || std::fscanf(file, "%ld", &pages) != 1) pages = -1;
        if (file) std::fclose(file);
        if (pages < 0) return;  // another system
        const rlim_t now = static_cast<rlim_t>(pages) * static_cast<rlim_t>(sysconf(_SC_PAGESIZE));
        const rlimit limit{std::min(now + bytes, before_.rlim_max), before_.rlim_max};
        CHECK(setrlimit(RLIMIT_AS, &limit) == 0);
#else
        static_cast<void>(bytes);
#endif
    }
    ~MemoryLimit() { setrlimit(RLIMIT_AS, &before_); }
    MemoryLimit(const MemoryLimit&) = delete;
    MemoryLimit& operator=(const MemoryLimit&) = delete;

private:
    rlimit before_{};
};

TEST(gguf_mutations) {
    if (rounds == 0) rounds = 20000;
    const MemoryLimit limit(16 << 20);  // of files below 10 KB
    std::mt19937_64 random(1);
    const auto below = [&](uint64_t n) { return random() % n; };
    const uint64_t interesting[] = {0,          1,          2,          9,          12,         13,
                                    0xff,       0xffff,     0x7fffffff, 0x80000000, 0xffffffff, uint64_t{1} << 32,
                                    1ull << 60, 1ull << 61, 1ull << 63, ~0ull,      ~0ull - 7,  1000000};
    int accepted = 0, refused = 0, unfinished = 0;
    for (int round = 0; round < rounds; ++round) {
        Bytes file = sample(static_cast<int>(below(5)));
        for (uint64_t change = 1 + below(4); change > 0 && !file.empty(); --change) {
            const uint64_t at = below(file.size());
            switch (below(6)) {
                case 0: file[at] = static_cast<std::byte>(random()); break;
                case 1: file[at] ^= static_cast<std::byte>(1 << below(8)); break;
                case 2: {  // a count, a length, an offset
                    const uint64_t value = interesting[below(std::size(interesting))];
                    const uint64_t bytes = std::min<uint64_t>(below(2) ? 8 : 4, file.size() - at);
                    std::memcpy(file.data() + at, &value, bytes);
                    break;
                }
                case 3: file.resize(at); break;
                case 4:  // some bytes are missing
                    file.erase(file.begin() + static_cast<std::ptrdiff_t>(at),
                               file.begin() + static_cast<std::ptrdiff_t>(std::min(file.size(), at + 1 + below(16))));
                    break;
                default: {  // some are there twice
                    const uint64_t n = std::min<uint64_t>(1 + below(32), file.size() - at);
                    const Bytes piece(file.begin() + static_cast<std::ptrdiff_t>(at),
                                      file.begin() + static_cast<std::ptrdiff_t>(at + n));
                    file.insert(file.begin() + static_cast<std::ptrdiff_t>(below(file.size())), piece.begin(),
                                piece.end());
                }
            }
        }
        // The bytes at hand are those of the file, or its beginning.
        const uint64_t file_size = file.size() + (below(4) == 0 ? below(1 << 20) : 0);
        try {
            const auto header = gguf::parse_header(file, file_size);
            if (header) check_header(*header, file, file_size);
            ++(header ? accepted : unfinished);
            CHECK(header || file_size > file.size());
        } catch (const WeightError& error) {
            CHECK(std::strlen(error.what()) > 10);
            ++refused;
        }
    }
    CHECK(accepted > rounds / 100 && refused > rounds / 10 && unfinished > 0);
}

// Any bytes are numbers of some kind: no type reads or writes beyond its blocks, with any number of threads.
TEST(gguf_blocks) {
    std::mt19937 random(2);
    int num_types = 0;
    for (uint32_t number = 0; number < 64; ++number) {
        const gguf::Type* const type = gguf::find_type(number);
        if (!type || !type->readable) continue;
        ++num_types;
        const int64_t rows = 66, columns = 256 * 33, row_bytes = columns / type->block * type->bytes;
        const auto bytes = static_cast<size_t>(rows * row_bytes);
        const auto data = std::make_unique<std::byte[]>(bytes);
        std::generate_n(data.get(), bytes, [&] { return static_cast<std::byte>(random()); });
        const auto read = [&](int num_threads, int64_t step) {  // of `step` rows the first
            auto out = std::make_unique<float[]>(static_cast<size_t>(rows / step * columns));
            const gguf::Rows from{*type, data.get(), step * row_bytes, rows / step, columns};
            gguf::dequantise(from, {out.get(), DType::float32, {rows / step, columns}}, num_threads);
            return out;
        };
        const auto one = read(1, 1), several = read(3, 1), thirds = read(2, 3);
        const size_t size = static_cast<size_t>(columns) * sizeof(float);
        CHECK(std::memcmp(one.get(), several.get(), size * static_cast<size_t>(rows)) == 0);
        for (int64_t row = 0; row < rows / 3; ++row)
            CHECK(std::memcmp(thirds.get() + row * columns, one.get() + 3 * row * columns, size) == 0);
        for (int64_t row = 0; row < rows; ++row)  // all were written
            CHECK(std::any_of(one.get() + row * columns, one.get() + (row + 1) * columns,
                              [](float x) { return x != 0; }));
    }
    CHECK(num_types == 26);
}

}  // namespace
}  // namespace infinilm::test
