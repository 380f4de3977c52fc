// Tests of C++ classes that Python cannot reach, in one program: `cpp_tests NAME [rounds]`. See tests/dist.
#pragma once

#include <cstdint>
#include <cstdio>
#include <exception>
#include <functional>
#include <ranges>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <vector>

#include "core/error.h"

namespace infinilm::test {

struct Failure : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// What became of a condition and, if it does not hold, what it was about.
struct Verdict {
    bool holds;
    std::string seen{};
    explicit operator bool() const { return holds; }
};

template <class T>
std::string shown(const T& value) {
    if constexpr (std::is_arithmetic_v<T>)
        return concat(value);
    else if constexpr (std::is_convertible_v<const T&, int64_t>)  // an atomic one
        return concat(static_cast<int64_t>(value));
    else if constexpr (std::is_convertible_v<const T&, std::string_view> && !std::is_null_pointer_v<T>)
        return concat('"', std::string_view(value), '"');
    else if constexpr (std::ranges::range<const T>) {
        std::string out;
        for (const auto& each : value) out += concat(out.empty() ? "" : ", ", shown(each));
        return concat('[', out, ']');
    } else {
        return "what has no text";
    }
}

// The left side of a comparison, and the whole of a condition that is none. That `<<` binds tighter than a comparison
// and looser than arithmetic lets one macro show both sides without a macro for each operator: the idea is Catch2's.
template <class T>
struct Left {
    const T& value;

    explicit operator bool() const { return static_cast<bool>(value); }
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wsign-compare"  // of literals, which are values here
#define INFINILM_COMPARE(op)                                                                  \
    template <class U>                                                                        \
    Verdict operator op(const U& right) const {                                               \
        if (value op right) return {true};                                                    \
        return {false, concat(": the left is ", shown(value), ", the right ", shown(right))}; \
    }
    INFINILM_COMPARE(==)
    INFINILM_COMPARE(!=)
    INFINILM_COMPARE(<)
    INFINILM_COMPARE(<=)
    INFINILM_COMPARE(>)
    INFINILM_COMPARE(>=)
#undef INFINILM_COMPARE
#pragma GCC diagnostic pop
};
struct Condition {
    template <class T>
    Left<T> operator<<(const T& value) const {
        return {value};
    }
};

inline Verdict judge(const Verdict& verdict) { return verdict; }
inline Verdict judge(const Left<Verdict>& whole) { return whole.value; }
template <class T>
Verdict judge(const T& other) {  // conditions joined by && or ||, of which nothing is shown, among them
    return {static_cast<bool>(other)};
}

#define CHECK(...)                                                                                             \
    do {                                                                                                       \
        const auto verdict = ::infinilm::test::judge(::infinilm::test::Condition() << __VA_ARGS__);            \
        if (!verdict)                                                                                          \
            throw ::infinilm::test::Failure(concat(__FILE__, ":", __LINE__, ": " #__VA_ARGS__, verdict.seen)); \
    } while (false)

// TEST(name) { .. rounds .. }: `rounds` scales how much is tried; 0: the test's own number.
struct Registered {
    Registered(const char* name, void (*run)(int rounds));
};
#define TEST(test_name)                                                                      \
    static void test_name(int rounds);                                                       \
    static const ::infinilm::test::Registered registered_##test_name(#test_name, test_name); \
    static void test_name([[maybe_unused]] int rounds)

// Runs f(rank) on a thread per rank; what each threw, or null.
template <class F>
std::vector<std::exception_ptr> run_ranks(int size, F f) {
    std::vector<std::exception_ptr> errors(static_cast<size_t>(size));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank)
        threads.emplace_back([&, rank] {
            try {
                f(rank);
            } catch (...) {
                errors[static_cast<size_t>(rank)] = std::current_exception();
            }
        });
    for (std::thread& thread : threads) thread.join();
    return errors;
}

inline std::string message(const std::exception_ptr& error) {
    if (!error) return "";
    try {
        std::rethrow_exception(error);
    } catch (const std::exception& e) {
        return e.what();
    }
}

template <class E>
bool is(const std::exception_ptr& error) {
    if (!error) return false;
    try {
        std::rethrow_exception(error);
    } catch (const E&) {
        return true;
    } catch (...) {
        return false;
    }
}

// The first error, for tests where there should be none.
inline void rethrow_any(const std::vector<std::exception_ptr>& errors) {
    for (const std::exception_ptr& error : errors)
        if (error) std::rethrow_exception(error);
}

template <class F>
std::string error_of(F f) {
    try {
        f();
    } catch (const std::exception& error) {
        return error.what();
    }
    return "";
}

inline Verdict contains(const std::string& text, std::string_view part) {
    if (text.find(part) != std::string::npos) return {true};
    return {false, concat(": the text is ", shown(text))};
}

}  // namespace infinilm::test
