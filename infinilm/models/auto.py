"""`AutoLlamaModel`: opens a checkpoint as a model with `generate`, on the engine or in numpy."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

from infinilm.checkpoint.folder import resolve_model
from infinilm.checks import dtype_name
from infinilm.config.json.model_config import AutoConfig
from infinilm.errors import ConfigError
from infinilm.keywords import unknown_parameter
from infinilm.logs import logger
from infinilm.models.causal_lm import CausalLM
from infinilm.models.reference import ReferenceModel
from infinilm.signatures import name_keywords
from infinilm.text.generation_config import GenerationConfig

if TYPE_CHECKING:
    from infinilm.cache import CacheConfig
    from infinilm.distributed import DistConfig
    from infinilm.models.engine_model import EngineModel

__all__ = ["AutoLlamaModel", "AutoModelForCausalLM"]


class AutoLlamaModel:
    """Opens models; see `from_pretrained`, there are no objects of this class."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise TypeError(f"{type(self).__name__} has no objects; use {type(self).__name__}.from_pretrained(path)")

    @overload
    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        device: str | None = ...,
        dtype: Any = ...,
        backend: Literal["cpp"] = ...,
        distributed_config: DistConfig | None = ...,
        cache_config: CacheConfig | None = ...,
    ) -> EngineModel: ...

    @overload
    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        device: str | None = ...,
        dtype: Any = ...,
        *,
        backend: Literal["python"],
        distributed_config: DistConfig | None = ...,
        cache_config: CacheConfig | None = ...,
    ) -> ReferenceModel: ...

    @overload
    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        device: str | None = ...,
        dtype: Any = ...,
        backend: str = ...,
        distributed_config: DistConfig | None = ...,
        cache_config: CacheConfig | None = ...,
    ) -> EngineModel | ReferenceModel: ...

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        device: str | None = None,
        dtype: Any = None,
        backend: str = "cpp",
        distributed_config: DistConfig | None = None,
        cache_config: CacheConfig | None = None,
        **unknown: NoReturn,
    ) -> EngineModel | ReferenceModel:
        """Open a checkpoint.

        Parameters
        ----------
        path
            Folder of a Hugging Face checkpoint, a GGUF file, "demo", or a hub id.
        device
            "cpu", "cuda", "cuda:<index>", or None: a GPU if one is usable, else the CPU. The python backend
            has None and "cpu".
        dtype
            "float32", "bfloat16" or "float16" (or torch's objects of these names); None: that of config.json. For the
            python backend "float32" (the default) or "float64".
        backend
            "cpp", the engine, or "python", the numpy reference model: slow, readable, and the judge of the engine.
        distributed_config
            Devices of the engine; None: one.
        cache_config
            KV cache of the engine. None: a static one, which `generate` enlarges as its batches ask for. The python
            backend has a cache that grows by itself and takes none.

        Returns
        -------
        EngineModel or ReferenceModel
            Both have `generate`, `config`, `set_hook_registry` and `close`.

        Raises
        ------
        FileNotFoundError
            No such folder, or no config.json in it.
        ConfigError, WeightError, CacheFullError, DeviceError
            The model, the checkpoint or the settings do not fit; the message says what to do.
        TypeError
            An unknown parameter.
        """
        for name in unknown:
            raise unknown_parameter("from_pretrained()", name, _PARAMETERS)
        started = time.perf_counter()
        model: EngineModel | ReferenceModel
        if backend == "python":
            _check_plain(device, distributed_config, cache_config)
            model = ReferenceModel.from_pretrained(path, dtype="float32" if dtype is None else dtype_name(dtype))
        elif backend == "cpp":
            model = _open_engine(path, device, dtype, distributed_config, cache_config)
        else:
            raise ConfigError(f"backend: expected 'cpp' or 'python', got {backend!r}")
        elapsed = time.perf_counter() - started
        logger.info(
            "loaded %s: backend %s, device %s, dtype %s, %.2f s", path, backend, model.device, model.dtype, elapsed
        )
        return model


class AutoModelForCausalLM:
    """Opens models for programs that were written for transformers; see `from_pretrained`."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise TypeError("AutoModelForCausalLM has no objects; use AutoModelForCausalLM.from_pretrained(path)")

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        device: str | None = None,
        dtype: Any = None,
        backend: str = "cpp",
        distributed_config: DistConfig | None = None,
        cache_config: CacheConfig | None = None,
        *,
        torch_dtype: Any = None,
        device_map: Any = None,
        revision: str | None = None,
        **unknown: NoReturn,
    ) -> CausalLM:
        """Open a checkpoint; the same as `AutoLlamaModel.from_pretrained`, in the words of transformers.

        Parameters
        ----------
        path, device, dtype, backend, distributed_config, cache_config
            See there; a dtype may be "auto", too, that of config.json.
        torch_dtype
            Another name of `dtype`.
        device_map
            Another name of `device`: "auto", a device, or a dict that has one device for all.
        revision
            Branch, tag or commit of a hub id.

        Returns
        -------
        CausalLM
            Its `generate` takes and returns what that of transformers does.

        Raises
        ------
        TypeError
            An unknown parameter.
        Exception
            As `AutoLlamaModel.from_pretrained`.
        """
        for name in unknown:
            raise unknown_parameter("from_pretrained()", name, (*_PARAMETERS, "torch_dtype", "device_map", "revision"))
        if torch_dtype is not None:
            if dtype is not None and dtype_name(dtype) != dtype_name(torch_dtype):
                raise ConfigError(f"torch_dtype is {torch_dtype} and dtype is {dtype}; they mean the same, give one")
            dtype = torch_dtype
        if device_map is not None:
            if device is not None:
                raise ConfigError(f"device_map is {device_map!r} and device is {device!r}; give one")
            device = _one_device(device_map)
        dtype = None if isinstance(dtype, str) and dtype == "auto" else dtype
        path = path if revision is None else resolve_model(path, revision)
        return CausalLM(AutoLlamaModel.from_pretrained(path, device, dtype, backend, distributed_config, cache_config))


def _one_device(device_map: Any) -> str | None:
    devices = set(map(str, device_map.values())) if isinstance(device_map, dict) else {str(device_map)}
    if len(devices) != 1:
        raise ConfigError(f"device_map: expected 'auto' or one device for all, got {device_map!r:.80}")
    (device,) = devices
    if device.isdigit():  # a GPU by its number, as {"": 0} has it
        return f"cuda:{device}"
    return None if device == "auto" else device


_PARAMETERS = ("path", "device", "dtype", "backend", "distributed_config", "cache_config")


def _open_engine(
    path: str | os.PathLike[str],
    device: str | None,
    dtype: Any,
    distributed_config: DistConfig | None,
    cache_config: CacheConfig | None,
) -> EngineModel:
    from infinilm import _core
    from infinilm.distributed import DistConfig
    from infinilm.engine.infer_engine import InferEngine
    from infinilm.models.engine_model import EngineModel

    if device is not None and ":" in device:  # "cuda:1"
        device, index = _core.parse_device(device)
        if distributed_config is not None:
            raise ConfigError(f"device names device {index} and distributed_config is {distributed_config}; give one")
        distributed_config = DistConfig(tp_device_ids=[index])
    folder = resolve_model(path)
    config = AutoConfig.from_pretrained(folder)
    if dtype is not None:
        config.dtype = dtype_name(dtype)
        config.validate()
    defaults = GenerationConfig.from_folder(folder)
    engine = InferEngine(config, distributed_config, device, cache_config)
    try:
        engine.load_weights(folder)
    except BaseException:
        engine.close()
        raise
    return EngineModel(engine, generation_config=defaults, grow_cache=cache_config is None)


def _check_plain(device: str | None, distributed_config: DistConfig | None, cache_config: CacheConfig | None) -> None:
    """The numpy model runs on the CPU, alone, with its own cache."""
    if device not in (None, "cpu", "auto"):
        raise ConfigError(f"backend='python' runs on the CPU, got device={device!r}; use backend='cpp', or device=None")
    if distributed_config is not None and distributed_config.tp_size > 1:
        raise ConfigError(f"backend='python' runs on one device, got {distributed_config}; use backend='cpp'")
    if cache_config is not None:
        raise ConfigError(f"backend='python' has a cache that grows by itself, got {cache_config!r}; leave it out")


for _class in (AutoLlamaModel, AutoModelForCausalLM):
    name_keywords(_class.from_pretrained)
