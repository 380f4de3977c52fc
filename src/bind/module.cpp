// The module, and the translation of the core's exceptions into the classes of infinilm.errors.
#include "bind/bind.h"

namespace infinilm {
namespace {

// The Python class is looked up when it is needed, so that the module imports on its own (stub generation does that).
void raise(const char* class_name, const char* message) {
    nb::object type = nb::module_::import_("infinilm.errors").attr(class_name);
    PyErr_SetString(type.ptr(), message);
}

void translate(const std::exception_ptr& pointer, void*);

// EngineDeadError, whose __cause__ is the error that stopped the engine.
void raise_dead(const EngineDeadError& error) {
    const nb::object type = nb::module_::import_("infinilm.errors").attr("EngineDeadError");
    try {
        std::rethrow_if_nested(error);
        PyErr_SetString(type.ptr(), error.what());
        return;
    } catch (const nb::python_error& cause) {  // it stays where it is, for the next one who asks
        PyErr_SetObject(cause.type().ptr(), cause.value().ptr());
    } catch (const Error&) {
        translate(std::current_exception(), nullptr);
    } catch (const std::bad_alloc&) {
        PyErr_NoMemory();
    } catch (const std::exception& cause) {
        PyErr_SetString(PyExc_RuntimeError, cause.what());
    }
    nb::chain_error(type, "%s", error.what());
}

void translate(const std::exception_ptr& pointer, void*) {
    try {
        std::rethrow_exception(pointer);
    } catch (const ConfigError& e) {
        raise("ConfigError", e.what());
    } catch (const WeightError& e) {
        raise("WeightError", e.what());
    } catch (const CacheFullError& e) {
        raise("CacheFullError", e.what());
    } catch (const DeviceError& e) {
        raise("DeviceError", e.what());
    } catch (const RequestError& e) {
        raise("RequestError", e.what());
    } catch (const EngineDeadError& e) {
        raise_dead(e);
    } catch (const Error& e) {
        raise("InfinilmError", e.what());
    }
}

}  // namespace
}  // namespace infinilm

NB_MODULE(_core, m) {
    m.doc() = "The C++ core of infinilm: tensors, ops and the engine.";
    nanobind::set_leak_warnings(false);  // an LLM that is alive at exit is no error
    nanobind::register_exception_translator(infinilm::translate);
    infinilm::bind_tensor(m);
    infinilm::bind_ops(m);
    infinilm::bind_engine(m);
}
