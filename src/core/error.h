// The exceptions of the core. The Python binding raises the class of the same name in infinilm.errors.
#pragma once

#include <stdexcept>
#include <string>

namespace infinilm {

struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
};
struct ConfigError : Error {
    using Error::Error;
};
struct WeightError : Error {
    using Error::Error;
};
struct CacheFullError : Error {
    using Error::Error;
};
struct DeviceError : Error {
    using Error::Error;
};
struct RequestError : Error {
    using Error::Error;
};
struct EngineDeadError : Error {
    using Error::Error;
    static constexpr std::string_view prefix = "the ranks have stopped: ";  // then the first cause
};

// concat("expected ", 3, ", got ", shape): messages without iostreams at the call site.
namespace detail {
inline void append(std::string& out, std::string_view text) { out += text; }
inline void append(std::string& out, const char* text) { out += text; }
inline void append(std::string& out, char c) { out += c; }
template <class T>
    requires std::is_arithmetic_v<T>
void append(std::string& out, T value) {
    out += std::to_string(value);
}
}  // namespace detail
template <class... Parts>
std::string concat(const Parts&... parts) {
    std::string out;
    (detail::append(out, parts), ...);
    return out;
}

}  // namespace infinilm
