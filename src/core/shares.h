// Work that is divided over threads of its own, where no pool is at hand: while a model is read.
#pragma once

#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

namespace infinilm {

// Calls f(share) for the shares 0 to num_shares - 1 at once; throws what the first one of them threw.
template <class F>
void run_shares(int64_t num_shares, F f) {
    std::vector<std::exception_ptr> errors(static_cast<size_t>(num_shares));
    const auto run = [&](int64_t share) {
        try {
            f(share);
        } catch (...) {
            errors[static_cast<size_t>(share)] = std::current_exception();
        }
    };
    {
        std::vector<std::jthread> threads;
        for (int64_t share = 1; share < num_shares; ++share) threads.emplace_back(run, share);
        run(0);
    }
    for (const std::exception_ptr& error : errors)
        if (error) std::rethrow_exception(error);
}

}  // namespace infinilm
