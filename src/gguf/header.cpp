#include "gguf/header.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <set>

#include "core/error.h"

namespace infinilm::gguf {

namespace {

static_assert(std::endian::native == std::endian::little);

constexpr uint64_t max_tensors = 1 << 17, max_entries = 1 << 16;  // the largest files have some thousands
constexpr uint64_t max_name_bytes = 1 << 16;                      // of a key, as the format says, and of a tensor
constexpr uint32_t max_dims = 4;
constexpr uint64_t default_alignment = 32, max_alignment = 1 << 20;

struct EndOfBytes {};  // the header goes on behind the bytes at hand

// Takes numbers and strings from the beginning of a file.
class Reader {
public:
    Reader(std::span<const std::byte> bytes, uint64_t file_size) : bytes_(bytes), file_size_(file_size) {}

    uint64_t position() const { return position_; }
    uint64_t left() const { return file_size_ - position_; }  // in the file

    const std::byte* take(uint64_t count) {
        if (count > left())
            throw WeightError(concat("the header goes on for ", count, " bytes from byte ", position_,
                                     ", but the file has only ", file_size_, " bytes: it is damaged or cut off"));
        if (count > bytes_.size() - position_) throw EndOfBytes();
        const std::byte* const begin = bytes_.data() + position_;
        position_ += count;
        return begin;
    }
    template <class T>
    T number() {
        T value;
        std::memcpy(&value, take(sizeof value), sizeof value);
        return value;
    }
    std::string_view string() {
        const auto length = number<uint64_t>();
        return {reinterpret_cast<const char*>(take(length)), static_cast<size_t>(length)};
    }
    std::string name(const char* what) {
        const uint64_t begin = position_;
        const auto length = number<uint64_t>();
        if (length == 0 || length > max_name_bytes)
            throw WeightError(concat(what, " at byte ", begin, ": expected a name of 1 to ", max_name_bytes,
                                     " bytes, got ", length, ": the file is damaged"));
        const std::string text(reinterpret_cast<const char*>(take(length)), static_cast<size_t>(length));
        // Names are used in messages and as keys of Python: no control characters, and no bytes that are no UTF-8.
        if (std::ranges::any_of(text, [](unsigned char c) { return c < 0x20 || c >= 0x7f; }))
            throw WeightError(concat(what, " at byte ", begin, ": expected a name in ASCII: the file is damaged"));
        return text;
    }

private:
    std::span<const std::byte> bytes_;
    uint64_t file_size_, position_ = 0;
};

// A count of things that take at least `least_bytes` each.
uint64_t checked_count(const Reader& reader, uint64_t count, uint64_t least_bytes, uint64_t most,
                       const std::string& what) {
    if (count > most || count > reader.left() / least_bytes)
        throw WeightError(concat("the header claims ", count, " ", what, ", more than ",
                                 count > most ? "any model has" : "the file has room for", ": it is damaged"));
    return count;
}

ValueType value_type(uint32_t number, const std::string& key) {
    if (number > static_cast<uint32_t>(ValueType::float64))
        throw WeightError(concat("metadata '", key, "': unknown type ", number, ": the file is damaged or too new"));
    return static_cast<ValueType>(number);
}

Value read_value(Reader& reader, const std::string& key) {
    Value value{.type = value_type(reader.number<uint32_t>(), key)};
    if (value.type == ValueType::array) {
        value.is_array = true;
        value.type = value_type(reader.number<uint32_t>(), key);
        if (value.type == ValueType::array)
            throw WeightError(concat("metadata '", key, "': arrays of arrays are not read"));
        value.count = reader.number<uint64_t>();
        const auto least = static_cast<uint64_t>(std::max<int64_t>(size_bytes(value.type), 1));
        checked_count(reader, value.count, value.type == ValueType::string ? 8 : least, UINT64_MAX,
                      concat("elements of '", key, "'"));
    }
    value.begin = reader.position();
    if (value.type == ValueType::string)
        for (uint64_t i = 0; i < value.count; ++i) reader.string();
    else  // no overflow: so many have room in the file
        reader.take(value.count * static_cast<uint64_t>(size_bytes(value.type)));
    return value;
}

void read_magic(Reader& reader, Header& header) {
    char magic[4];
    if (reader.left() < 24)
        throw WeightError(concat("a file of ", reader.left(), " bytes is too short for GGUF: it is cut off"));
    std::memcpy(magic, reader.take(4), 4);
    if (std::memcmp(magic, "GGUF", 4) != 0) {
        const bool ggml = std::memcmp(magic, "lmgg", 4) == 0 || std::memcmp(magic, "tjgg", 4) == 0;
        throw WeightError(ggml ? "a file of GGML, the format before GGUF, which is not read: convert the model again"
                               : "expected a GGUF file, which begins with 'GGUF': it is damaged or another kind");
    }
    header.version = reader.number<uint32_t>();
    if (header.version > 0xffff && (header.version & 0xffff) == 0)
        throw WeightError("a big-endian GGUF file, which is not read: convert the model for little-endian machines");
    if (header.version == 1)
        throw WeightError("GGUF version 1, which is not read: convert the model again (version 3)");
    if (header.version != 2 && header.version != 3)
        throw WeightError(concat("GGUF version ", header.version, ", and this version of infinilm reads 2 and 3"));
}

uint64_t read_alignment(const Header& header, std::span<const std::byte> bytes) {
    const auto found = header.metadata.find("general.alignment");
    if (found == header.metadata.end()) return default_alignment;
    uint32_t alignment = 0;
    const bool is_number = found->second.type == ValueType::uint32 && !found->second.is_array;
    if (is_number) std::memcpy(&alignment, bytes.data() + found->second.begin, sizeof alignment);
    if (!std::has_single_bit(alignment) || alignment > max_alignment)
        throw WeightError(concat("metadata 'general.alignment': expected a power of two up to ", max_alignment,
                                 " as uint32", is_number ? concat(", got ", alignment) : "", ": the file is damaged"));
    return alignment;
}

TensorEntry read_tensor(Reader& reader) {
    TensorEntry tensor{.name = reader.name("tensor"), .type = nullptr, .shape = {}, .begin = 0, .bytes = 0};
    const auto fail = [&](const std::string& trouble) {
        return WeightError(concat("tensor '", tensor.name, "': ", trouble));
    };
    const auto ndim = reader.number<uint32_t>();
    if (ndim > max_dims) throw fail(concat("expected at most ", max_dims, " dimensions, got ", ndim));
    uint64_t elements = 1;
    for (uint32_t i = 0; i < ndim; ++i) {
        const auto size = reader.number<uint64_t>();
        if (size == 0 || size > (uint64_t{1} << 60) / elements)
            throw fail(concat("a dimension of ", size, " elements: the file is damaged"));
        elements *= size;
        tensor.shape.insert(tensor.shape.begin(), static_cast<int64_t>(size));
    }
    const auto number = reader.number<uint32_t>();
    tensor.type = find_type(number);
    if (!tensor.type) throw fail(concat("unknown type ", number, "; known are ", readable_types()));
    if (tensor.type->block == 0)
        throw fail(concat("type ", tensor.type->name, ", which llama.cpp has removed: quantise the model again"));
    const auto block = static_cast<uint64_t>(tensor.type->block);
    const uint64_t row = tensor.shape.empty() ? 1 : static_cast<uint64_t>(tensor.shape.back());
    if (row % block != 0)
        throw fail(concat("rows of ", row, " elements are no whole blocks of ", block, ", which ", tensor.type->name,
                          " consists of"));
    tensor.bytes = elements / block * static_cast<uint64_t>(tensor.type->bytes);
    tensor.begin = reader.number<uint64_t>();  // of the data, until place_tensors
    return tensor;
}

// Makes offsets of the data offsets of the file.
void place_tensors(Header& header, uint64_t alignment, uint64_t file_size) {
    std::vector<const TensorEntry*> order;
    for (TensorEntry& tensor : header.tensors) {
        if (tensor.begin % alignment != 0)
            throw WeightError(concat("tensor '", tensor.name, "': its offset ", tensor.begin, " is no multiple of ",
                                     alignment, ": the file is damaged"));
        const uint64_t room = file_size - std::min(header.data_begin, file_size);
        if (tensor.begin > room || tensor.bytes > room - tensor.begin)
            throw WeightError(concat("tensor '", tensor.name, "' takes ", tensor.bytes, " bytes from byte ",
                                     tensor.begin, " of the data, which have only ", room,
                                     ": the file is damaged or cut off"));
        tensor.begin += header.data_begin;
        order.push_back(&tensor);
    }
    std::ranges::sort(order, {}, &TensorEntry::begin);
    for (size_t i = 1; i < order.size(); ++i)
        if (order[i - 1]->begin + order[i - 1]->bytes > order[i]->begin)
            throw WeightError(
                concat("tensors '", order[i - 1]->name, "' and '", order[i]->name, "' overlap: the file is damaged"));
}

}  // namespace

int64_t size_bytes(ValueType type) {
    switch (type) {
        case ValueType::uint8:
        case ValueType::int8:
        case ValueType::boolean: return 1;
        case ValueType::uint16:
        case ValueType::int16: return 2;
        case ValueType::uint32:
        case ValueType::int32:
        case ValueType::float32: return 4;
        case ValueType::uint64:
        case ValueType::int64:
        case ValueType::float64: return 8;
        case ValueType::string:
        case ValueType::array: return 0;
    }
    return 0;
}

std::optional<Header> parse_header(std::span<const std::byte> bytes, uint64_t file_size) {
    Reader reader(bytes.first(std::min<uint64_t>(bytes.size(), file_size)), file_size);
    Header header;
    try {
        read_magic(reader, header);
        const auto tensors = reader.number<uint64_t>(), entries = reader.number<uint64_t>();
        checked_count(reader, tensors, 24, max_tensors, "tensors");  // without name and dimensions
        checked_count(reader, entries, 13, max_entries, "entries of metadata");
        for (uint64_t i = 0; i < entries; ++i) {
            std::string key = reader.name("metadata");
            const Value value = read_value(reader, key);
            if (!header.metadata.emplace(key, value).second)
                throw WeightError(concat("metadata '", key, "' is there twice: the file is damaged"));
        }
        std::set<std::string> names;
        for (uint64_t i = 0; i < tensors; ++i) {
            header.tensors.push_back(read_tensor(reader));
            if (!names.insert(header.tensors.back().name).second)
                throw WeightError(concat("tensor '", header.tensors.back().name, "' is there twice"));
        }
    } catch (const EndOfBytes&) {
        return std::nullopt;
    }
    const uint64_t alignment = read_alignment(header, bytes);
    header.data_begin = (reader.position() + alignment - 1) / alignment * alignment;
    place_tensors(header, alignment, file_size);
    return header;
}

std::vector<std::string_view> strings(const Value& value, std::span<const std::byte> bytes) {
    std::vector<std::string_view> out;
    Reader reader(bytes.subspan(value.begin), bytes.size() - value.begin);
    for (uint64_t i = 0; i < value.count; ++i) out.push_back(reader.string());
    return out;
}

}  // namespace infinilm::gguf
