// Values of enums by their names. An enum has name(value), a switch, so that the compiler tells of values without one;
// all else follows from it.
#pragma once

#include <string>
#include <string_view>

#include "core/error.h"

namespace infinilm {

// The value of that name. The enum counts from 0, and name(value) is "?" behind the last. ConfigError: lists the names.
template <class Enum>
Enum from_string(std::string_view what, std::string_view text) {
    std::string list;
    for (int value = 0;; ++value) {
        const std::string_view own = name(static_cast<Enum>(value));
        if (own == "?") throw ConfigError(concat(what, " '", text, "' is not one of ", list));
        if (own == text) return static_cast<Enum>(value);
        list += concat(list.empty() ? "" : ", ", own);
    }
}

}  // namespace infinilm
