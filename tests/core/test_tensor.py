"""Tensor: zero-copy in and out by the buffer protocol and DLPack, ownership, and what is refused."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from infinilm import _core
from infinilm.errors import InfinilmError

NUMPY_DTYPES = ("float32", "float16", "int32", "int64", "uint8", "int8")


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_dtypes(dtype: str) -> None:
    """Every dtype that numpy has keeps its name, shape and memory."""
    array = np.arange(24).astype(dtype).reshape(2, 3, 4)
    t = _core.from_numpy(array)
    assert (t.dtype, tuple(t.shape), tuple(t.strides), t.device) == (dtype, (2, 3, 4), (12, 4, 1), "cpu")
    back = t.numpy()
    assert back.dtype == array.dtype and np.array_equal(back, array)
    assert address(back) == address(array)


def test_numpy_functions_take_a_tensor() -> None:
    """np.asarray of what is no array makes an array of one object, without a word."""
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    t = _core.from_numpy(array)
    assert np.shares_memory(np.asarray(t), array) and np.asarray(t).shape == (2, 3)
    assert np.argmax(t) == 5 and np.array_equal(np.exp(t), np.exp(array))
    assert np.asarray(t, np.float64).dtype == np.float64
    assert not np.shares_memory(np.array(t), array)
    wide = _core.from_numpy(np.array([0x3F80, 0x4000], np.uint16), dtype="bfloat16")
    assert np.asarray(wide).tolist() == [1.0, 2.0] and np.asarray(wide).dtype == np.float32
    with pytest.raises(ValueError, match="numpy has no bfloat16"):
        wide.__array__(copy=False)


def test_bfloat16_widens() -> None:
    """bfloat16 comes as uint16; numpy() widens to float32, and that is a copy."""
    bits = np.array([[0x3F80, 0x4000, 0xC040], [0x7F80, 0x0001, 0x8000]], np.uint16)
    t = _core.from_numpy(bits, dtype="bfloat16")
    assert t.dtype == "bfloat16"
    back = t.numpy()
    assert back.dtype == np.float32
    assert np.array_equal(back, (bits.astype(np.uint32) << 16).view(np.float32))
    bits[0, 0] = 0x4040
    assert t.numpy()[0, 0] == 3.0  # the tensor itself is a view


def test_bfloat16_widens_with_strides() -> None:
    """numpy() of a strided bfloat16 view has the right elements."""
    wide = np.arange(40, dtype=np.uint16).reshape(5, 8) + 0x3F80
    part = wide[1:4, 2:7]
    expected = (part.astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(_core.from_numpy(part, dtype="bfloat16").numpy(), expected)


def test_float16_as_uint16() -> None:
    """uint16 with dtype="float16" reinterprets."""
    array = np.array([1.5, -2.0], np.float16)
    t = _core.from_numpy(array.view(np.uint16), dtype="float16")
    assert t.dtype == "float16"
    assert np.array_equal(t.numpy().view(np.float16), array)


def test_writes_go_both_ways() -> None:
    """numpy() and np.from_dlpack() share the memory of the array they came from."""
    array = np.zeros((3, 4), np.float32)
    t = _core.from_numpy(array)
    t.numpy()[1, 2] = 5
    assert array[1, 2] == 5
    shared = np.from_dlpack(t)
    assert address(shared) == address(array) and shared.shape == (3, 4)
    array[0, 0] = 7
    assert shared[0, 0] == 7


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_dlpack_round_trip(dtype: str) -> None:
    """numpy -> Tensor -> numpy by DLPack: same memory, dtype and strides."""
    array = np.arange(60).astype(dtype).reshape(5, 12)[1:4, 3:8]
    t = _core.from_dlpack(array)
    assert (t.dtype, tuple(t.shape), tuple(t.strides)) == (dtype, (3, 5), (12, 1))
    back = np.from_dlpack(t)
    assert address(back) == address(array) and back.strides == array.strides
    assert np.array_equal(back, array)
    assert tuple(t.__dlpack_device__()) == (1, 0)


def test_dlpack_of_our_own() -> None:
    """A Tensor of a Tensor, bfloat16 included, which numpy cannot carry."""
    bits = np.array([0x3F80, 0x4000], np.uint16)
    t = _core.from_dlpack(_core.from_numpy(bits, dtype="bfloat16"))
    assert t.dtype == "bfloat16"
    bits[1] = 0x4040
    assert t.numpy().tolist() == [1.0, 3.0]


class Old:
    """A consumer and producer that knows DLPack before 1.0 only."""

    def __init__(self, tensor: _core.Tensor, **settings: object) -> None:
        self._ask = lambda: tensor.__dlpack__(**settings)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, **_: object) -> object:
        return self._ask()


def test_read_only_tensors_have_no_unversioned_capsule() -> None:
    """Such a capsule cannot say that it is read-only: who wrote to it would write into a mapped file."""
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    array.flags.writeable = False
    t = _core.from_numpy(array)
    for settings in ({}, {"max_version": None}, {"max_version": (0, 8)}, {"copy": False}):
        with pytest.raises(BufferError, match=r"read-only.*take a copy"):
            t.__dlpack__(**settings)
    assert not np.from_dlpack(t).flags.writeable and not _core.from_dlpack(t).numpy().flags.writeable
    assert not _core.from_dlpack(Old(t, max_version=(1, 0))).numpy().flags.writeable
    for settings in ({"copy": True}, {"copy": True, "max_version": (1, 0)}):
        copied = _core.from_dlpack(Old(t, **settings)).numpy()
        assert copied.flags.writeable and np.array_equal(copied, array)
        copied[:] = -1
        assert np.array_equal(array, np.arange(6).reshape(2, 3))
    array = array.copy()  # of a writable one as ever
    assert address(_core.from_dlpack(Old(_core.from_numpy(array))).numpy()) == address(array)


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_dlpack_copies_of_any_strides(dtype: str) -> None:
    """copy=True of a view with steps and turned around."""
    array = np.arange(120).astype(dtype).reshape(4, 5, 6)
    for view in (array, array[::-1, 1::2, ::-3], array.transpose(2, 0, 1), array[:0], array[1, 2]):
        copied = _core.from_dlpack(Old(_core.from_numpy(view), copy=True)).numpy()
        assert np.array_equal(copied, view)
        if view.size:
            assert not np.shares_memory(copied, array)


class Made:
    """A capsule made by hand."""

    def __init__(self, shape: tuple[int, ...], data: int | None, strides: tuple[int, ...] | None = None) -> None:
        n = len(shape)
        self.shape = (ctypes.c_int64 * n)(*shape)
        self.strides = (ctypes.c_int64 * n)(*strides) if strides else None
        self.managed = Managed(data, 1, 0, n, 2, 32, 1, self.shape, self.strides, 0, None, None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, **_: object) -> object:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(ctypes.addressof(self.managed), b"dltensor", None)


class Managed(ctypes.Structure):
    """DLManagedTensor of float32."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


def test_capsules_that_lie() -> None:
    """No data where there should be some, and sizes whose bytes no int64 counts."""
    memory = (ctypes.c_float * 4)(1, 2, 3, 4)
    at = ctypes.addressof(memory)
    assert _core.from_dlpack(Made((2, 2), at)).numpy().tolist() == [[1, 2], [3, 4]]
    with pytest.raises(InfinilmError, match=r"expected an array with data, got a null pointer for shape \[2\]"):
        _core.from_dlpack(Made((2,), None))
    assert _core.from_dlpack(Made((2, 0), None)).shape == (2, 0)
    for shape in ((1 << 62,), (1 << 32, 1 << 32), (1 << 61, 1), (3, 1 << 40, 0, 1 << 40)):
        with pytest.raises(InfinilmError, match="has more bytes than there are addresses"):
            _core.from_dlpack(Made(shape, at))
    for strides in ((1 << 62, 1), (-(1 << 62), 1), (-(1 << 63), 1), (1 << 61, 1 << 61)):
        with pytest.raises(InfinilmError, match="has more bytes than there are addresses"):
            _core.from_dlpack(Made((3, 3), at, strides))
    with pytest.raises(InfinilmError, match=r"cannot have the shape \[-1, 2\]"):
        _core.from_dlpack(Made((-1, 2), at))


def test_the_owner_is_kept_alive() -> None:
    """The array's name may go; the values stay, through every kind of view."""
    for make in (_core.from_numpy, _core.from_dlpack):
        array = np.arange(1000, dtype=np.float32)
        t = make(array)
        del array
        gc.collect()
        _ = [np.full(1000, -1, np.float32) for _ in range(16)]
        assert np.array_equal(t.numpy(), np.arange(1000))
        views = [t.numpy(), np.from_dlpack(t)]
        del t
        gc.collect()
        _ = [np.full(1000, -1, np.float32) for _ in range(16)]
        for view in views:
            assert np.array_equal(view, np.arange(1000))


class Owner(np.ndarray):
    """An array that tells when it goes, and to which there is no hidden reference."""


HOLDERS: dict[str, Callable[[Any], Any]] = {
    "tensor": lambda t: t,
    "numpy": lambda t: t.numpy(),
    "dlpack": np.from_dlpack,
    "capsule": lambda t: t.__dlpack__(),
}


@pytest.mark.parametrize("last", HOLDERS)
def test_the_owner_is_released(last: str) -> None:
    """The last view that goes takes the array with it, exactly then."""
    array = np.zeros(16, np.float32).view(Owner)
    alive = weakref.ref(array)
    holder = HOLDERS[last](_core.from_numpy(array))
    del array
    gc.collect()
    assert alive() is not None
    del holder
    gc.collect()
    assert alive() is None


def test_prepared_weights_keep_and_release_their_owner() -> None:
    """A linear layer holds its weights as long as it lives, and no longer."""
    array = np.ones((4, 8), np.float32).view(Owner)
    alive = weakref.ref(array)
    backend = _core.Backend("cpu", isa="generic", num_threads=1, compute_dtype="float32")
    layer = backend.prepare_linear([(_core.from_numpy(array), None)], kind="plain")
    del array
    gc.collect()
    # a backend may pack instead; then the array may go at once, but the results must be right
    out = np.zeros((1, 4), np.float32)
    backend.linear(_core.from_numpy(np.ones((1, 8), np.float32)), layer, _core.from_numpy(out), None)
    assert out.tolist() == [[8.0] * 4]
    del layer
    gc.collect()
    assert alive() is None


def test_strides() -> None:
    """Rows in a wider array, reversed rows, and permuted outer dimensions: numpy's view, strides in
    elements.
    """
    base = np.arange(120, dtype=np.float32).reshape(4, 5, 6)
    for array in (base[1:3, ::2, 1:4], base[::-1], base.transpose(1, 0, 2), base[:, 2:3]):
        t = _core.from_numpy(array)
        assert tuple(t.shape) == array.shape
        assert tuple(t.strides) == tuple(s // 4 for s in array.strides)
        assert np.array_equal(t.numpy(), array)
        assert address(t.numpy()) == address(array)


def test_zero_dimensions_and_no_elements() -> None:
    """A scalar has shape (); empty tensors keep their shape."""
    scalar = _core.from_numpy(np.array(2.5, np.float32))
    assert tuple(scalar.shape) == () and scalar.numpy() == 2.5
    assert np.from_dlpack(scalar).shape == ()
    for shape in ((0,), (0, 3), (3, 0), (2, 0, 4)):
        t = _core.from_numpy(np.zeros(shape, np.float32))
        assert tuple(t.shape) == shape and t.numpy().shape == shape
        assert np.from_dlpack(t).shape == shape
    assert _core.from_numpy(np.zeros((0, 3), np.uint16), dtype="bfloat16").numpy().shape == (0, 3)


def test_five_dimensions_at_most() -> None:
    """A cache of all layers has five; six are refused with the count, by either way in."""
    five = np.zeros((1, 2, 1, 2, 1), np.float32)
    assert tuple(_core.from_numpy(five).shape) == five.shape
    for make in (_core.from_numpy, _core.from_dlpack):
        with pytest.raises(InfinilmError, match=r"5.*6"):
            make(five[None])


@pytest.mark.parametrize(
    "dtype", ("float64", "complex64", "bool", "uint16", "uint32", "int16", "datetime64[s]", "object")
)
def test_other_dtypes_are_refused(dtype: str) -> None:
    """The error says what is taken instead."""
    with pytest.raises((InfinilmError, TypeError), match=r"float16|expected"):
        _core.from_numpy(np.zeros(3, dtype))


@pytest.mark.parametrize(
    ("array", "dtype"),
    (
        (np.zeros(2, np.float32), "bfloat16"),
        (np.zeros(2, np.int32), "float32"),
        (np.zeros(2, np.uint16), "float32"),
        (np.zeros(2, np.uint16), "bf16"),
        (np.zeros(2, np.float32), "double"),
    ),
)
def test_reinterpretations_are_refused(array: np.ndarray, dtype: str) -> None:
    """Only uint16 reinterprets, and only as a 16-bit float; unknown names are named."""
    with pytest.raises((InfinilmError, TypeError, ValueError), match=f"{dtype}|uint16"):
        _core.from_numpy(array, dtype=dtype)


def test_dtype_that_agrees_is_accepted() -> None:
    """Saying what the array already is does no harm."""
    assert _core.from_numpy(np.zeros(2, np.float32), dtype="float32").dtype == "float32"


def test_byte_order_is_refused() -> None:
    """A big-endian array is not read as if it were native."""
    with pytest.raises((InfinilmError, TypeError, BufferError)):
        _core.from_numpy(np.zeros(2, ">f4"))


def test_not_an_array() -> None:
    """Lists, None and numbers are refused by from_numpy and from_dlpack."""
    for wrong in ([1.0, 2.0], None, 3, "abc"):
        for make in (_core.from_numpy, _core.from_dlpack):
            with pytest.raises((InfinilmError, TypeError, AttributeError)):
                make(wrong)


def test_read_only_stays_read_only() -> None:
    """A read-only array is taken, and neither numpy() nor DLPack hands out a way to write to it."""
    array = np.arange(6, dtype=np.float32)
    array.flags.writeable = False
    t = _core.from_numpy(array)
    view = t.numpy()
    assert address(view) == address(array)
    assert not view.flags.writeable
    try:
        shared = np.from_dlpack(t)
    except BufferError:  # no way to say read-only in the protocol version asked for
        return
    assert not shared.flags.writeable or address(shared) != address(array)


def test_a_read_only_mapping_is_a_weight() -> None:
    """bytes, as a mapped checkpoint gives them: zero-copy and read-only."""
    data = np.arange(12, dtype=np.float32).tobytes()
    array = np.frombuffer(data, np.float32).reshape(3, 4)
    t = _core.from_numpy(array)
    assert address(t.numpy()) == address(array)


def test_repr_tells_shape_and_dtype() -> None:
    """A tensor in a debugger shows what it is."""
    text = repr(_core.from_numpy(np.zeros((2, 3), np.int32)))
    assert "int32" in text and "2" in text and "3" in text


def test_torch_bfloat16_is_zero_copy() -> None:
    """torch.bfloat16 comes in and goes out by DLPack without a copy (only where torch is installed)."""
    torch = pytest.importorskip("torch")
    source = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16)
    t = _core.from_dlpack(source)
    assert t.dtype == "bfloat16"
    source[0, 1] = 8.0
    assert t.numpy().tolist() == [[1.0, 8.0], [3.0, 4.0]]
    back = torch.from_dlpack(t)
    assert back.dtype == torch.bfloat16 and back.data_ptr() == source.data_ptr()
    del source
    gc.collect()
    assert back.tolist() == [[1.0, 8.0], [3.0, 4.0]]
