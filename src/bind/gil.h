// The GIL at the end of the program. Until Python 3.14 a thread other than the main one that asks for the GIL while the
// interpreter finalizes is ended by pthread_exit, which unwinds its stack: through the destructor of a guard that is
// std::terminate. Here such a thread stops for ever instead, as it does since 3.14, and the process ends around it.
#pragma once

#include <Python.h>
#include <dlfcn.h>
#include <unistd.h>

namespace infinilm {

// True while Python shuts down: its objects are left to the end of the process, since no thread may free them.
inline bool is_finalizing() noexcept {
#if defined(Py_LIMITED_API)  // that of 3.12 lacks it; the name without the underscore has been there since 3.13
    static const auto ask = [] {
        void* const found = dlsym(RTLD_DEFAULT, "Py_IsFinalizing");
        return reinterpret_cast<int (*)()>(found ? found : dlsym(RTLD_DEFAULT, "_Py_IsFinalizing"));
    }();
    return ask && ask();
#elif PY_VERSION_HEX >= 0x030d0000
    return Py_IsFinalizing();
#else
    return _Py_IsFinalizing();
#endif
}

namespace detail {

template <class F>
auto or_stop(F f) noexcept -> decltype(f()) {
    try {
        return f();
    } catch (...) {  // no exception comes out of C, and what unwinds the stack is no object that could have a name
        for (;;) pause();
    }
}

}  // namespace detail

class AcquireGil {
public:
    AcquireGil() noexcept : state_(detail::or_stop([] { return PyGILState_Ensure(); })) {}
    ~AcquireGil() { PyGILState_Release(state_); }
    AcquireGil(const AcquireGil&) = delete;
    AcquireGil& operator=(const AcquireGil&) = delete;

private:
    const PyGILState_STATE state_;
};

class ReleaseGil {
public:
    ReleaseGil() noexcept : state_(PyEval_SaveThread()) {}
    ~ReleaseGil() {
        detail::or_stop([this] { PyEval_RestoreThread(state_); });
    }
    ReleaseGil(const ReleaseGil&) = delete;
    ReleaseGil& operator=(const ReleaseGil&) = delete;

private:
    PyThreadState* const state_;
};

// For objects whose last reference may go on any thread.
template <class T>
void delete_with_gil(T* object) {
    if (is_finalizing()) return;
    const AcquireGil gil;
    delete object;
}

}  // namespace infinilm
