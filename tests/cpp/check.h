// Tests of C++ classes that Python cannot reach, in one program: `cpp_tests NAME [rounds]`. See tests/dist.
#pragma once

#include <cstdio>
#include <exception>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"

namespace infinilm::test {

struct Failure : std::runtime_error {
    using std::runtime_error::runtime_error;
};

#define CHECK(condition)                                                                                     \
    do {                                                                                                     \
        if (!(condition)) throw ::infinilm::test::Failure(concat(__FILE__, ":", __LINE__, ": " #condition)); \
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

inline bool contains(const std::string& text, std::string_view part) { return text.find(part) != std::string::npos; }

}  // namespace infinilm::test
