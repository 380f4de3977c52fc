// What stopped the ranks of a group. Any rank, and any thread outside, may fail; the first failure is the cause, and
// the ones that come after it are its consequences, which are not kept.
#pragma once

#include <exception>
#include <mutex>
#include <string>

namespace infinilm {

class FirstCause {
public:
    bool set(std::exception_ptr cause) noexcept;  // false: there is one already
    [[noreturn]] void throw_dead() const;         // EngineDeadError, in which the cause is nested
    void clear();  // frees the cause, which may keep alive what it names: Python's frames

private:
    mutable std::mutex mutex_;
    std::exception_ptr cause_;
    std::string message_;  // what() of cause_
};

}  // namespace infinilm
