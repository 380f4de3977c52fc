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

// The exception of Python that this one of the core becomes.
nb::object translated(const std::exception_ptr& pointer) {
    try {
        translate(pointer, nullptr);
    } catch (const std::bad_alloc&) {
        PyErr_NoMemory();
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
#if PY_VERSION_HEX >= 0x030c0000
    return nb::steal(PyErr_GetRaisedException());
#else
    PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    return nb::steal(value);
#endif
}

// "ValueError: no", without the traceback that what() gives; a text that cannot be made is left out.
std::string describe(const nb::python_error& error) {
    const std::string name = nb::type_name(error.type()).c_str();
    const nb::object text = nb::steal(PyObject_Str(error.value().ptr()));
    const char* characters = text ? PyUnicode_AsUTF8AndSize(text.ptr(), nullptr) : nullptr;
    if (!characters) PyErr_Clear();
    return characters && *characters ? concat(name, ": ", characters) : name;
}

// EngineDeadError, whose __cause__ is the error that stopped the engine. An exception of Python stays as it is and
// where it is, for the next one who asks: raising it here would give it the exception being handled as its __context__,
// and so the engine, which keeps it, a reference to itself.
void raise_dead(const EngineDeadError& error) {
    const nb::object type = nb::module_::import_("infinilm.errors").attr("EngineDeadError");
    std::string message = error.what();
    nb::object cause;
    try {
        std::rethrow_if_nested(error);
    } catch (const nb::python_error& raised) {
        cause = nb::borrow(raised.value());
        message = concat(EngineDeadError::prefix, describe(raised));
    } catch (...) {
        cause = translated(std::current_exception());
    }
    const nb::object dead = type(message.c_str());
    if (cause) PyException_SetCause(dead.ptr(), cause.release().ptr());
    PyErr_SetObject(type.ptr(), dead.ptr());
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
    infinilm::bind_devices(m);
    infinilm::bind_ops(m);
    infinilm::bind_spec(m);
    infinilm::bind_engine(m);
    infinilm::bind_gguf(m);
    infinilm::bind_codes(m);
    infinilm::bind_lookup(m);
}
