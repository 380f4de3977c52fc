#include "ops/timed_backend.h"

namespace infinilm {

TimedBackend::TimedBackend(Backend& inner, LinearNames names) : inner_(inner), names_(std::move(names)) {
    if (inner.queue())
        throw ConfigError(concat("the time of single ops is taken on CPUs alone, and this is ",
                                 to_string(inner.device()), ": there the host goes on while an op runs"));
}

}  // namespace infinilm
