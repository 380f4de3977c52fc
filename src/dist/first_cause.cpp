#include "dist/first_cause.h"

#include "core/error.h"

namespace infinilm {

bool FirstCause::set(std::exception_ptr cause) noexcept {
    if (!cause) cause = std::make_exception_ptr(Error("no cause given"));
    // The message is read before the lock is taken: an exception of Python needs the GIL for it, and a thread that
    // waits for the lock may hold the GIL.
    std::string message;
    try {
        std::rethrow_exception(cause);
    } catch (const std::exception& error) {
        message = error.what();
    } catch (...) {
        message = "an unknown error";
    }
    std::lock_guard lock(mutex_);
    if (cause_) return false;
    cause_ = std::move(cause);
    message_ = std::move(message);
    return true;
}

void FirstCause::clear() {
    std::exception_ptr cause;
    std::lock_guard lock(mutex_);
    std::swap(cause, cause_);  // destroyed after the lock
}

void FirstCause::throw_dead() const {
    std::unique_lock lock(mutex_);
    const EngineDeadError dead(concat(EngineDeadError::prefix, message_));
    const std::exception_ptr cause = cause_;
    lock.unlock();
    try {
        std::rethrow_exception(cause);
    } catch (...) {
        std::throw_with_nested(dead);
    }
}

}  // namespace infinilm
