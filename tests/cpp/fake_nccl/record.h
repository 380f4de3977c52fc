// What both libraries that tests put in NCCL's place keep: which calls came, and which are told to fail. Each of them
// includes it once.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "dist/nccl_library.h"
#include "fake_nccl.h"

namespace {

std::mutex mutex;                                     // guards all that a library keeps
std::map<std::string, std::pair<int, int>> failures;  // function: rank, result
std::string calls, shown;

int failure(const std::string& function, int rank) {
    const auto found = failures.find(function);
    return found != failures.end() && (found->second.first == -1 || found->second.first == rank)
               ? found->second.second
               : infinilm::nccl::success;
}

void write(int rank, const std::string& what) { calls += std::to_string(rank) + " " + what + "\n"; }

std::string text(const char* name, int64_t value) { return std::string(name) + "=" + std::to_string(value); }

}  // namespace

#pragma GCC visibility push(default)
void fake_nccl_fail(const char* function, int rank, int result) {
    const std::lock_guard lock(mutex);
    failures[function] = {rank, result};
}
const char* fake_nccl_log() {
    const std::lock_guard lock(mutex);
    shown = std::exchange(calls, "");
    return shown.c_str();
}
#pragma GCC visibility pop
