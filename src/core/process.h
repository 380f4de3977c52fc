// The process that an object with threads was made in. A fork copies the object but none of its threads, so the child
// must neither wait for them nor join them: it gets an error, and lets the memory be.
#pragma once

#include <sys/types.h>

namespace infinilm {

class OwnerProcess {
public:
    OwnerProcess();  // this one
    bool is_current() const noexcept;
    void check() const;  // EngineDeadError: this process was forked from it

private:
    pid_t id_;
    unsigned generation_;
};

}  // namespace infinilm
