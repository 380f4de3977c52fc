"""Strict loading: every parameter of an engine from a checkpoint, or an error that says all that does not fit.

Called by the `LLM` and engine layers, and by `pack_writer.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from infinilm import _core
from infinilm.checkpoint.dtype_conversion import convert
from infinilm.checkpoint.folder import FLOATS, Checkpoint, is_used_in_place
from infinilm.checkpoint.gguf import GgufCheckpoint, GgufTensors
from infinilm.checkpoint.heads import label_tensors
from infinilm.checkpoint.mapped import MappedTensors
from infinilm.checkpoint.native import type_on
from infinilm.checkpoint.packed import expected_tensors, unread_of_head
from infinilm.checkpoint.quantised.checkpoint import QuantisedCheckpoint
from infinilm.checkpoint.quantised.config import METHODS
from infinilm.checkpoint.safetensors_header import STORED_DTYPES, TensorInfo
from infinilm.checkpoint.sources import FoundTensors, find_tensors
from infinilm.checks import DTYPES
from infinilm.config.families import family_of
from infinilm.config.json.model_config import ModelConfig
from infinilm.errors import ConfigError, WeightError
from infinilm.logs import logger
from infinilm.progress import progress_bar

__all__ = ["WeightEngine", "load_weights"]

_HEADS = ("lm_head.weight", "language_model.lm_head.weight")
_MAX_LISTED = 20  # names of one kind in one error message

_QUANTISED_DTYPES = frozenset(
    {"int8", "uint8", "float4"} | {n for n in STORED_DTYPES if n.startswith(("float8_", "float6_"))}
)
_QUANTISED_SUFFIXES = (
    ".qweight",
    ".qzeros",
    ".g_idx",
    ".weight_packed",
    ".weight_scale_inv",
    ".SCB",
    ".quant_map",
)


class WeightEngine(Protocol):
    """The methods of an engine that `load_weights` calls; `InferEngine` has them."""

    def param_shapes(self) -> Mapping[str, Sequence[int]]:
        """Return the full shape of each parameter expected, by its name in the checkpoint."""
        ...

    def load_param(self, name: str, tensor: Any, /) -> Sequence[str] | None:
        """Take one full tensor; each rank takes its shard. Return names whose memory is not read again."""
        ...


_MASKS = tuple(
    f".{module}.{name}" for module in ("attn", "attention") for name in ("bias", "masked_bias", "causal_mask")
)
_NORM_BEHIND_EXPERTS = ".post_mlp_layernorm.weight"


def is_harmless(name: str, expected: Mapping[str, Any]) -> bool:
    """Tensors that may be in a file without being asked for.

    `lm_head.weight` of a model with tied embeddings (the engine then has no such parameter); the rotary frequencies,
    the numbers of positions and the masks of what is later that old checkpoints store, which follow from the
    configuration; the two constants of the activation xIELU, which are those of all models; and where some layers have
    a norm behind experts, that of the others, which files of A.X K1 have, too.
    """
    if name.endswith(_NORM_BEHIND_EXPERTS):
        return any(other.endswith(_NORM_BEHIND_EXPERTS) for other in expected)
    return (name in _HEADS and name not in expected) or name.endswith(
        (".rotary_emb.inv_freq", "embeddings.position_ids", ".act_fn.beta", ".act_fn.eps", *_MASKS)
    )


def _listed(items: Sequence[str]) -> str:
    more = f", and {len(items) - _MAX_LISTED} more" if len(items) > _MAX_LISTED else ""
    return ", ".join(items[:_MAX_LISTED]) + more


def _missing_shards(checkpoint: MappedTensors) -> str | None:
    """Name the shards that a file name like model-00001-of-00003.safetensors promises and that are absent."""
    present: dict[str, set[int]] = {}
    for file in {t.file.name for t in checkpoint.tensors.values()}:
        if match := re.fullmatch(r"(.*)-(\d{1,6})-of-(\d{1,6})\.safetensors", file):
            present.setdefault(f"{match[1]}|{match[3]}", set()).add(int(match[2]))
    for key, numbers in present.items():
        total = int(key.rpartition("|")[2])
        absent = sorted(set(range(1, total + 1)) - numbers)
        if absent:
            return f"shards {_listed([str(n) for n in absent])} of {total} are absent: is the download complete?"
    return None


def _causes(checkpoint: MappedTensors, missing: list[str], unexpected: list[str], shaped: list[str]) -> list[str]:
    """Guess what went wrong from the pattern of differences."""
    causes = []
    if missing and (shards := _missing_shards(checkpoint)):
        causes.append(shards)
    if missing == ["lm_head.weight"]:
        causes.append('the embeddings are tied: config.json should say "tie_word_embeddings": true')
    tails = {name.rpartition("model.")[2] for name in unexpected}
    if missing and unexpected and all(name.rpartition("model.")[2] in tails for name in missing):
        causes.append("the names differ only by a prefix such as 'model.': the checkpoint was saved from a submodule")
    if unexpected and all(name.endswith(".bias") for name in unexpected):
        causes.append("the checkpoint has biases that config.json does not announce (attention_bias, mlp_bias)")
    if "layers.0.attention.wq.weight" in unexpected:
        causes.append(
            "the files have Mistral's own names, as consolidated.safetensors has: fetch model.safetensors, or "
            "model-*.safetensors and their index, of the same repository"
        )
    if any("lora_" in name for name in unexpected):
        causes.append("the files hold a LoRA adapter: merge it into its base model first")
    if shaped or not causes:
        causes.append("config.json and the weights do not belong together (another size or another architecture)")
    return causes


def _check_readable(checkpoint: MappedTensors) -> None:
    """WeightError: weights are stored in a way that is not read, or that nothing explains."""
    if isinstance(checkpoint, GgufTensors):
        unread = [t for t in checkpoint.tensors.values() if t.dtype not in checkpoint.dtypes]
        if unread:
            first, types = unread[0], sorted({t.dtype for t in unread})
            raise WeightError(
                f"{first.file}: tensor {first.name!r} is stored as {first.dtype}, which is not read ({len(unread)} "
                f"such tensors, of {', '.join(types)}); types that are read: {_core.gguf_readable_types()}; use a "
                "file of the model in these, such as Q4_K_M"
            )
        return
    found = [
        t for t in checkpoint.tensors.values() if t.dtype in _QUANTISED_DTYPES or t.name.endswith(_QUANTISED_SUFFIXES)
    ]
    if found:
        first = found[0]
        raise WeightError(
            f"{first.file}: tensor {first.name!r} is stored as {first.dtype} ({len(found)} such tensors): quantised, "
            "but neither config.json nor a file beside it has a quantization_config, which says what that means; "
            "supported are "
            f"{', '.join(METHODS)}"
        )


def _check_tied(checkpoint: Checkpoint, head: str, found: FoundTensors) -> None:
    """Refuse an lm_head that is not read because config.json says that it is the embedding, where a few rows differ."""
    embedding = next((name for name in found.shapes if name.endswith("embed_tokens.weight")), None)
    if head not in _HEADS or embedding is None:
        return
    if any(checkpoint.info(name).dtype not in FLOATS for name in (head, embedding)):
        return  # quantised
    arrays = [checkpoint.array(name) for name in (head, embedding)]
    rows = np.linspace(0, len(arrays[1]) - 1, 16).astype(int)
    if arrays[0].dtype != arrays[1].dtype or arrays[0].shape != arrays[1].shape:
        return  # another precision or padding: the bits need not agree
    if not np.array_equal(arrays[0][rows], arrays[1][rows]):
        raise WeightError(
            f'{checkpoint.path}: config.json says "tie_word_embeddings": true, but {head} and {embedding} differ; '
            "set it to false there, so that both are used"
        )


def _match(
    checkpoint: MappedTensors,
    found: FoundTensors,
    packed_dtypes: Mapping[str, str],
    head: str,
    labels: Collection[str],
    *,
    is_whole: bool,
) -> None:
    """Compare headers with the expected set.

    `packed_dtypes`: of the tensors of packed linears; others have any floating dtype. `head`: see `ModelConfig.head`.
    `labels`: tensors of the head of labels, if there is one.

    Raises
    ------
    WeightError
        Reports all missing, unexpected and mis-shaped tensors together.
    """
    stored, expected = checkpoint.tensors, found.shapes
    missing = [name for name in expected if name not in stored]
    skipped = [name for name in stored if name not in expected and is_harmless(name, expected)]
    skipped += [name for name in found.of_heads if name not in (*skipped, *labels)]
    known = {*expected, *skipped, *found.not_read, *labels}
    unexpected = [name for name in stored if name not in known]
    if isinstance(checkpoint, QuantisedCheckpoint):
        zeros = [name for name in unexpected if checkpoint.is_zero_bias(name)]
        unexpected = [name for name in unexpected if name not in zeros]
        if zeros:
            logger.info(
                "%s: biases of zeros that the model does not have, skipped: %s", checkpoint.path, _listed(zeros)
            )
    shaped = [
        f"{name} (expected {list(shape)}, got {list(stored[name].shape)} in {stored[name].file.name})"
        for name, shape in expected.items()
        if name in stored and stored[name].shape != shape
    ]
    typed = [
        f"{name} ({stored[name].dtype} in {stored[name].file.name})"
        for name in expected
        if name in stored and name not in packed_dtypes and stored[name].dtype not in checkpoint.dtypes
    ]
    typed += [
        f"{name} (expected {dtype}, got {stored[name].dtype} in {stored[name].file.name})"
        for name, dtype in packed_dtypes.items()
        if name in stored and stored[name].dtype != dtype
    ]
    report = [
        f"\n  {len(items)} {label}: {_listed(items)}"
        for label, items in (
            ("missing from the files", missing),
            ("unexpected in the files", unexpected),
            ("of another shape", shaped),
            ("not of a floating dtype" if not packed_dtypes else "of another dtype", typed),
        )
        if items
    ]
    if report:
        causes = "; ".join(_causes(checkpoint, missing, unexpected, shaped))
        raise WeightError(
            f"{checkpoint.path}: the weights do not fit the model:{''.join(report)}\n  Likely cause: {causes}"
        )
    if isinstance(checkpoint, Checkpoint) and head == "lm_head":
        for name in skipped:
            _check_tied(checkpoint, name, found)
    if skipped:
        logger.info("%s: not needed by this model and skipped: %s", checkpoint.path, _listed(skipped))
    if found.not_read and is_whole:
        logger.warning(
            "%s: only a part of this model is computed; not read: %d tensors, such as %s",
            checkpoint.path,
            len(found.not_read),
            found.not_read[0],
        )


Find = Callable[[Mapping[str, tuple[int, ...]], Mapping[str, TensorInfo]], FoundTensors]
"""Finds parameters, by their shapes, among the tensors of a checkpoint."""


def _own(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Make a copy writable, which a view of a file is not: an engine keeps files, not copies, beside packed weights."""
    if isinstance(array.base, np.ndarray) and array.base.flags.owndata:
        array.base.flags.writeable = array.flags.writeable = True
    return array


def _tell_not_native(checkpoint: MappedTensors, others: Sequence[str], dtype: str | None) -> None:
    if others:
        logger.warning(
            "%s: %d weights are computed as %s, such as %s: weights that must be of one type are not (on CPUs gate and "
            "up; on GPUs the same weights of a layer's experts), ranks cut inputs inside a block, or their zero "
            "points, groups or scales do not fit blocks",
            checkpoint.path,
            len(others),
            dtype,
            others[0],
        )


def load_weights(
    checkpoint: MappedTensors,
    engine: WeightEngine,
    *,
    dtype: str,
    config: ModelConfig | None = None,
    progress: bool = True,
    from_numpy: Callable[..., Any] | None = None,
    native_on: str = "",
    quantised_dtype: str | None = None,
    change: Callable[[str, npt.NDArray[Any], str], npt.NDArray[Any]] | None = None,
    find: Find | None = None,
    is_whole: bool = True,
    is_wanted: Callable[[str], bool] | None = None,
    stage: int = -1,
) -> None:
    """Load every parameter of an engine from a checkpoint, strictly.

    Headers are compared with `engine.param_shapes()` before a byte of data is read. A matrix is used in place
    (no copy) when it is stored in the compute dtype, or when the compute dtype is float32 and it is stored in
    16 bits; otherwise it is converted to the compute dtype, to nearest, ties to even, and its pages of the
    file are released. Vectors are copied. Packed linears are used in place, always.

    Parameters
    ----------
    checkpoint : Checkpoint, QuantisedCheckpoint or GgufTensors
    engine : WeightEngine
    dtype : str
        The compute dtype: `"float32"`, `"bfloat16"` or `"float16"`.
    config : ModelConfig, optional
        The configuration of the model, whose family says what its checkpoints call the parameters. None: as the engine
        does.
    progress : bool
        Show a progress bar on stderr, if that is a terminal.
    from_numpy : callable, optional
        Makes the engine's tensor of an array: `from_numpy(array, dtype="bfloat16")`. Default: the core's own,
        zero-copy.
    native_on : str
        Keep integers and scales of a quantised checkpoint as they are, where the engine, a `_core.InferEngine` on
        devices of this kind, "cpu" or "cuda", computes with such. "": do not.
    quantised_dtype : str, optional
        What quantised weights of safetensors become otherwise; the compute dtype unless it is given.
    change : callable, optional
        Gives what is loaded in place of a parameter: `change(name, array, dtype)`, of the same shape and dtype.
    find : callable, optional
        Finds the parameters of a part of the model that `config` says nothing of, such as a tower, as `find_tensors`
        does.
    is_whole : bool
        Nothing else is read of the checkpoint, so that it is told what is not.
    is_wanted : callable, optional
        Tells by its name whether a parameter is loaded. Others are in another checkpoint. None: all are.
    stage : int
        The stage of a `_core.InferEngine` that gets its parameters, in what it computes in; -1: all that are here.

    Raises
    ------
    WeightError
        Tensors are missing, unexpected, mis-shaped, quantised or not floating, a value does not fit `dtype`, or a file
        was written to meanwhile.
    ConfigError
        `dtype` is none of the three, or contradicts how the weights are packed.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    expected = {
        name: tuple(int(n) for n in shape)
        for name, shape in engine.param_shapes().items()
        if is_wanted is None or is_wanted(name)
    }
    head = "lm_head" if config is None else config.head
    packed_dtypes: Mapping[str, str] = {}
    if checkpoint.packed:
        checkpoint.packed.check_dtype(dtype)
        expected, packed_dtypes = expected_tensors(engine, expected, checkpoint.tensors, checkpoint.packed)
        config = None  # its tensors are called as the engine does
    else:
        _check_readable(checkpoint)
    if find is not None:
        found = find(expected, checkpoint.tensors)
    elif isinstance(checkpoint, GgufCheckpoint):
        found = checkpoint.find(expected)
    else:
        found = find_tensors(config, expected, checkpoint.tensors)
    if checkpoint.packed:
        found = replace(found, not_read=unread_of_head(engine, checkpoint.tensors, checkpoint.packed))
    labels = label_tensors(family_of(config.architecture), checkpoint.tensors) if config and head == "score" else ()
    _match(checkpoint, found, packed_dtypes, head, labels, is_whole=is_whole)
    own: set[str] | None = None
    load: Callable[..., Sequence[str] | None] = engine.load_param
    if isinstance(engine, _core.InferEngine):
        own = set(engine.own_params(stage))
        load = load if stage < 0 else partial(engine.load_param, stage=stage)
    # Other stages have the rest: neither read nor converted here.
    sources = {name: source for name, source in found.sources.items() if own is None or name in own}
    make: Callable[..., Any] = from_numpy or _core.from_numpy

    def place(name: str) -> tuple[Path, int, int, int]:
        source = sources[name]
        info = checkpoint.info(source.tensor)
        return info.file, info.offset, source.matrix or 0, source.begin

    def release(name: str) -> None:
        source = sources[name]
        checkpoint.release(source.tensor, source.places)

    def read(name: str) -> tuple[npt.NDArray[Any], str]:
        """A parameter, in the dtype that it keeps."""
        array, kept = read_stored(name)
        if not sources[name].unit:
            return array, kept
        matrix = convert(array, kept, "float32", name=name)
        axis = 1 if sources[name].unit == "rows" else 0
        matrix /= np.maximum(np.linalg.norm(matrix, axis=axis, keepdims=True), np.float32(1e-12))
        return convert(matrix, "float32", dtype, name=name), dtype

    def read_stored(name: str) -> tuple[npt.NDArray[Any], str]:
        source = sources[name]
        if isinstance(checkpoint, QuantisedCheckpoint) and checkpoint.is_quantised(source.tensor):
            array = checkpoint.read(source, quantised_dtype or dtype)
            release(name)
            return array, quantised_dtype or dtype
        if not isinstance(checkpoint, Checkpoint):
            assert isinstance(checkpoint, GgufTensors)
            return checkpoint.read(source, dtype)
        stored = checkpoint.info(source.tensor).dtype
        array = source.take(checkpoint.array(source.tensor))
        if array.shape != expected[name]:  # a convolution over patches is a linear
            array = array.reshape(expected[name])
        if source.order is not None:
            release(name)  # it was copied
        if name in packed_dtypes or is_used_in_place(stored, dtype):
            # A vector is small, and read in every step, also when the file is not what it was: it is copied.
            return _own(array.copy() if array.ndim == 1 else array), stored
        array = convert(array, stored, dtype, name=source.tensor)
        release(name)
        return array, dtype

    native: Mapping[str, Callable[[], Sequence[str] | None]] = {}
    if native_on and isinstance(engine, _core.InferEngine):
        linears = _core.linears(engine.spec, engine.num_ranks)
        if isinstance(checkpoint, GgufCheckpoint):
            kept_blocks = checkpoint.native_weights(linears, sources, native_on)
            native = {
                name: partial(checkpoint.load_blocks, load, name, sources[name], native_on) for name in kept_blocks
            }
            for stored in sorted(set(kept_blocks.values())):
                if (kept := type_on(stored, native_on)) != stored:
                    logger.info("%s: weights stored as %s are kept as %s", checkpoint.path, stored, kept)
            others = [name for name, source in sources.items() if name not in native]
            others = [name for name in others if checkpoint.packed_bytes(sources[name], native_on)]
            _tell_not_native(checkpoint, others, dtype)
        elif isinstance(checkpoint, QuantisedCheckpoint) and change is None:
            kept_blocks = checkpoint.native_weights(linears, sources, native_on, by_headers=False)
            native = {
                name: partial(checkpoint.load_blocks, load, name, sources[name], type_name)
                for name, type_name in kept_blocks.items()
                if not sources[name].unit
            }
            expected_native = checkpoint.native_weights(linears, sources, native_on)
            _tell_not_native(checkpoint, [name for name in expected_native if name not in native], quantised_dtype)
    made = {checkpoint.info(source.tensor).dtype for name, source in sources.items() if name not in native}
    if changed := sorted(made - set(FLOATS) - set(packed_dtypes.values())):
        kept_as = dtype if isinstance(checkpoint, GgufTensors) else quantised_dtype or dtype
        logger.info("%s: weights stored as %s are computed as %s", checkpoint.path, " and ".join(changed), kept_as)
    num_bytes = sum(checkpoint.info(tensor).nbytes for tensor in {source.tensor for source in sources.values()})
    with progress_bar(num_bytes, "Loading weights", "B", wanted=progress) as advance:
        for param in sorted(sources, key=place):
            if param in native:
                prepared = native[param]() or ()
            else:
                array, kept = read(param)
                array = array if change is None else change(param, array, kept)
                prepared = load(param, make(array, dtype=kept)) or ()
            for name in prepared:
                release(name)  # packed: not read again
            info = checkpoint.info(sources[param].tensor)  # which may hold other parameters, too
            advance(info.nbytes * math.prod(expected[param]) // max(math.prod(info.shape), 1))
    for param, values in found.values.items():
        if own is None or param in own:
            load(param, make(values, dtype="float32"))
    checkpoint.check_unchanged()
