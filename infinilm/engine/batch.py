"""Inputs and outputs of a step of the engine layer: checks every field of `Input` and makes the core's `Batch`.

With a static cache, the input is `[batch, seq_len]`, and row i belongs to row i of the cache. With a paged cache, the
input is one row of tokens, the requests one after another, and block tables. Both become `_Requests`, which has for
each token its position and the slot of its keys and values. All of it is numpy, without loops over tokens or requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from infinilm import _core
from infinilm.cache import CacheLayout
from infinilm.checks import short_repr
from infinilm.devices.arrays import as_tensor
from infinilm.errors import CacheFullError, RequestError, did_you_mean
from infinilm.signatures import name_keywords

Int64Array = npt.NDArray[np.int64]

_INT32_END = 2**31
_BELOW_ONE = np.nextafter(np.float32(1), np.float32(0))

_FIELDS = (
    "input_ids",
    "position_ids",
    "cache_lengths",
    "input_lengths",
    "input_offsets",
    "block_tables",
    "slot_mapping",
    "temperature",
    "top_k",
    "top_p",
    "random_val",
)


class Input:
    """One forward of `InferEngine`. Every field is optional, readable and writable; forward checks them.

    Arrays are anything with DLPack or the buffer protocol, or lists, of any integer dtype. A request is one sequence
    and its new tokens: a prompt, a chunk of a prompt, or one token in decode. One forward may mix them.

    Parameters
    ----------
    input_ids
        [batch, seq_len]. Static cache: one request per row. Paged cache: batch is 1 and the requests stand one after
        another.
    position_ids
        [batch, seq_len] or [seq_len], for RoPE. Default: cache_lengths and up.
    cache_lengths
        [num_requests]: tokens of each request that are in the cache already. Default: 0.
    input_lengths
        [num_requests]: new tokens of each request, at least 1. Static cache: how many tokens of the row count; default:
        the whole row. Paged cache: needed for several requests unless `input_offsets` is given.
    input_offsets
        [num_requests] or [num_requests + 1]: where each request begins in the tokens, and the end.
    block_tables
        [num_requests, max_blocks]: the blocks of each request in order. Paged cache only, and needed there; entries
        behind a request's last token are not looked at.
    slot_mapping
        [seq_len]: block * block_size + offset of each token. Paged cache only; follows from block_tables.
    temperature, top_k, top_p
        A number each, or one per request. temperature 0 is greedy. top_k keeps the k most probable tokens (-1 or 0:
        all). top_p keeps the most probable tokens that together reach this probability.
    random_val
        A number in [0, 1), or one per request: the uniform draw that picks the token.

    Raises
    ------
    TypeError
        An unknown field.
    """

    __slots__ = _FIELDS

    def __init__(
        self,
        input_ids: Any = None,
        position_ids: Any = None,
        cache_lengths: Any = None,
        input_lengths: Any = None,
        input_offsets: Any = None,
        block_tables: Any = None,
        slot_mapping: Any = None,
        temperature: Any = 1.0,
        top_k: Any = 50,
        top_p: Any = 1.0,
        random_val: Any = 0.1,
        **unknown: NoReturn,
    ) -> None:
        for name in unknown:
            raise TypeError(f"Input has no field {name!r}{did_you_mean(name, _FIELDS)}")
        self.input_ids = input_ids
        self.position_ids = position_ids
        self.cache_lengths = cache_lengths
        self.input_lengths = input_lengths
        self.input_offsets = input_offsets
        self.block_tables = block_tables
        self.slot_mapping = slot_mapping
        self.temperature = temperature
        self.top_k = top_k
        self.top_p = top_p
        self.random_val = random_val

    def __repr__(self) -> str:
        fields = ((name, getattr(self, name)) for name in _FIELDS)
        return f"Input({', '.join(f'{name}={value!r}' for name, value in fields if value is not None)})"


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """The result of a forward, in the order of the requests."""

    output_ids: _core.Tensor  # [num_requests] int32: a sampled token each
    logits: _core.Tensor | None = None  # [num_requests, vocab_size] float32 of each last token, when asked for


@dataclass(frozen=True, slots=True, eq=False)
class OutputWithLogits(Output):
    """The result of a forward that was asked for logits: type checkers know that they are there."""

    logits: _core.Tensor


@dataclass(slots=True)
class _Requests:
    """The checked input in one form for both kinds of cache."""

    ids: Int64Array  # [num_tokens]
    positions: Int64Array  # [num_tokens]
    slots: Int64Array  # [num_tokens]
    block_table: Int64Array  # [num_requests, max_blocks]
    lengths: Int64Array  # [num_requests]: new tokens
    context_lens: Int64Array  # [num_requests]: tokens in the cache afterwards


def make_batch(
    fields: Input,
    cache: CacheLayout,
    *,
    vocab_size: int,
    sliding_window: int,
    has_states: bool = False,
    return_logits: bool,
) -> _core.Batch:
    """The core's batch of an input.

    Parameters
    ----------
    fields
        From the user.
    cache
        The cache in use.
    vocab_size
        Ids are below it.
    sliding_window
        The widest window of all layers; 0: some layer sees all keys. Blocks before the window need not be valid.
    has_states
        The model keeps a state of each sequence; the cache is static, and a row has one.
    return_logits
        Whether logits are wanted.

    Raises
    ------
    RequestError
        A field that is missing, of another shape or dtype, or out of range.
    CacheFullError
        A request that is longer than what the cache has for it.
    """
    if fields.input_ids is None:
        raise RequestError("input_ids is missing; expected [batch, seq_len]")
    ids = _integers("input_ids", fields.input_ids)
    if ids.ndim != 2 or 0 in ids.shape:
        raise RequestError(f"input_ids: expected shape [batch, seq_len], at least one token, got {list(ids.shape)}")
    if cache.kind == "static":
        requests = _static(fields, ids, cache, vocab_size)
    else:
        requests = _paged(fields, ids, cache, vocab_size, sliding_window)
    cu_seqlens_q = np.zeros(len(requests.lengths) + 1, np.int32)
    np.cumsum(requests.lengths, out=cu_seqlens_q[1:])
    return _core.Batch(
        input_ids=requests.ids.astype(np.int32),
        positions=requests.positions.astype(np.int32),
        slot_mapping=np.ascontiguousarray(requests.slots),
        block_table=requests.block_table.astype(np.int32),
        cu_seqlens_q=cu_seqlens_q,
        context_lens=requests.context_lens.astype(np.int32),
        logits_rows=cu_seqlens_q[1:] - np.int32(1),
        return_logits=return_logits,
        **(_states(requests) if has_states else {}),
        **_sampling(fields, len(requests.lengths)),
    )


def _states(requests: _Requests) -> dict[str, Any]:
    """Row i has state i, and begins with zeros."""
    rows = np.arange(len(requests.lengths), dtype=np.int32)
    begins = requests.context_lens == requests.lengths
    return {"state_in": np.where(begins, np.int32(-1), rows), "state_out": rows}


def _static(fields: Input, ids: Int64Array, cache: CacheLayout, vocab_size: int) -> _Requests:
    batch, seq_len = ids.shape
    for name in ("block_tables", "slot_mapping"):
        if getattr(fields, name) is not None:
            raise RequestError(f"{name}: not a field of a static KV cache; leave it out, or use a PagedKVCacheConfig")
    if batch > cache.num_blocks:
        raise CacheFullError(
            f"input_ids has {batch} rows, but the static KV cache has {cache.num_blocks}; raise max_batch_size"
        )
    lengths = _per_request("input_lengths", fields.input_lengths, batch, default=seq_len)
    _check_range("input_lengths", lengths, 1, seq_len + 1, "seq_len tokens at most")
    if fields.input_offsets is not None:
        starts = np.arange(batch + 1) * seq_len
        offsets = _offsets(fields.input_offsets, batch)
        if not np.array_equal(offsets, starts[: len(offsets)]):
            raise RequestError(
                f"input_offsets: with a static KV cache row i begins at i * seq_len, here {starts.tolist()}; got "
                f"{_short(offsets)}"
            )
    cached = _cache_lengths(fields, batch)
    _check_room(
        cached + lengths, cache.block_size, f"the static KV cache has {cache.block_size} per row; raise max_cache_len"
    )
    column = np.arange(seq_len)
    counted = column < lengths[:, None]  # [batch, seq_len]
    _check_range("input_ids", ids, 0, vocab_size, "vocab_size", where=counted)
    in_cache = cached[:, None] + column
    slots = np.arange(batch)[:, None] * cache.block_size + in_cache
    return _Requests(
        ids=ids[counted],
        positions=_positions(fields, ids.shape, in_cache, counted)[counted],
        slots=slots[counted],
        block_table=np.arange(batch)[:, None],
        lengths=lengths,
        context_lens=cached + lengths,
    )


def _paged(fields: Input, ids: Int64Array, cache: CacheLayout, vocab_size: int, sliding_window: int) -> _Requests:
    batch, num_tokens = ids.shape
    if batch != 1:
        raise RequestError(
            f"input_ids: with a paged KV cache batch is 1, the requests one after another, got {list(ids.shape)}"
        )
    _check_range("input_ids", ids, 0, vocab_size, "vocab_size")
    if fields.block_tables is None:
        raise RequestError("block_tables is missing; a paged KV cache needs it, [num_requests, max_blocks]")
    tables = _integers("block_tables", fields.block_tables)
    if tables.ndim != 2 or 0 in tables.shape:
        raise RequestError(f"block_tables: expected shape [num_requests, max_blocks], got {list(tables.shape)}")
    lengths = _lengths(fields, len(tables), num_tokens)
    cached = _cache_lengths(fields, len(tables))
    context_lens = cached + lengths
    room = tables.shape[1] * cache.block_size
    _check_room(
        context_lens,
        room,
        f"block_tables has room for {room}: {tables.shape[1]} blocks of {cache.block_size}; widen it",
    )
    # The blocks that attention reads: all, or those from the window of the first new token on.
    first_key = np.maximum(cached + 1 - sliding_window, 0) if sliding_window else np.zeros_like(cached)
    column = np.arange(tables.shape[1])
    used = (column >= (first_key // cache.block_size)[:, None]) & (column * cache.block_size < context_lens[:, None])
    _check_range("block_tables", tables, 0, cache.num_blocks, "num_blocks", where=used)
    request = np.repeat(np.arange(len(tables)), lengths)  # [num_tokens]
    in_cache = np.arange(num_tokens) - np.repeat(np.cumsum(lengths) - context_lens, lengths)
    block, offset = np.divmod(in_cache, cache.block_size)
    slots = tables[request, block] * cache.block_size + offset
    _check_slots(fields, slots, request, cache)
    return _Requests(
        ids=ids[0],
        positions=_positions(fields, ids.shape, in_cache[None], None)[0],
        slots=slots,
        block_table=np.where(used, tables, -1),
        lengths=lengths,
        context_lens=context_lens,
    )


def _check_slots(fields: Input, slots: Int64Array, request: Int64Array, cache: CacheLayout) -> None:
    """Given slots are those of the block tables, and no two tokens go to one."""
    if fields.slot_mapping is not None:
        given = _integers("slot_mapping", fields.slot_mapping)
        if given.shape not in (slots.shape, (1, *slots.shape)):
            raise RequestError(f"slot_mapping: expected shape [{len(slots)}], got {list(given.shape)}")
        given = given.reshape(-1)
        _check_range("slot_mapping", given, 0, cache.num_slots, "num_blocks * block_size")
        wrong = np.flatnonzero(given != slots)
        if wrong.size:
            i = wrong[0]
            raise RequestError(
                f"slot_mapping[{i}] is {given[i]}, but by block_tables this token of request {request[i]} has slot "
                f"{slots[i]} (block * block_size + offset); leave slot_mapping out to have it derived"
            )
    order = np.argsort(slots, kind="stable")
    twice = np.flatnonzero(np.diff(slots[order]) == 0)
    if twice.size:
        first, second = order[twice[0]], order[twice[0] + 1]
        raise RequestError(
            f"block_tables: block {slots[first] // cache.block_size} is written twice at the same place, by requests "
            f"{request[first]} and {request[second]}; blocks may be shared only where their tokens are in the cache"
        )


def _lengths(fields: Input, num_requests: int, num_tokens: int) -> Int64Array:
    """New tokens of each request of one row of tokens, by lengths, by offsets or by both."""
    lengths = None
    if fields.input_lengths is not None:
        lengths = _per_request("input_lengths", fields.input_lengths, num_requests)
    if fields.input_offsets is not None:
        offsets = _offsets(fields.input_offsets, num_requests)
        ends = offsets[1:] if len(offsets) > num_requests else np.append(offsets[1:], num_tokens)
        starts = offsets[:num_requests]
        if starts[0] != 0 or ends[-1] != num_tokens or (starts >= ends).any():
            raise RequestError(
                f"input_offsets: expected to rise from 0 to the {num_tokens} tokens of input_ids, got {_short(offsets)}"
            )
        if lengths is not None and not np.array_equal(ends - starts, lengths):
            raise RequestError(
                f"input_offsets {_short(offsets)} and input_lengths {_short(lengths)} differ; requests stand one after "
                "another without gaps, either field is enough"
            )
        return ends - starts
    if lengths is None:
        if num_requests > 1:
            raise RequestError(
                f"input_lengths is missing; a paged KV cache with {num_requests} requests needs it, or input_offsets"
            )
        return np.array([num_tokens])
    _check_range("input_lengths", lengths, 1, num_tokens + 1, "seq_len tokens at most")
    if lengths.sum() != num_tokens:
        raise RequestError(
            f"input_lengths: expected a sum of {num_tokens}, the tokens of input_ids, got {lengths.sum()}"
        )
    return lengths


def _offsets(value: Any, num_requests: int) -> Int64Array:
    offsets = _integers("input_offsets", value)
    if offsets.shape not in ((num_requests,), (num_requests + 1,)):
        raise RequestError(
            f"input_offsets: expected shape [{num_requests}] (starts) or [{num_requests + 1}] (and the end), got "
            f"{list(offsets.shape)}"
        )
    return offsets


def _cache_lengths(fields: Input, num_requests: int) -> Int64Array:
    cached = _per_request("cache_lengths", fields.cache_lengths, num_requests, default=0)
    _check_range("cache_lengths", cached, 0, _INT32_END, "32 bits")
    return cached


def _check_room(context_lens: Int64Array, room: int, otherwise: str) -> None:
    over = np.flatnonzero(context_lens > min(room, _INT32_END - 1))
    if over.size:
        i = over[0]
        raise CacheFullError(
            f"request {i} would have {context_lens[i]} tokens in the cache (cache_lengths + input_lengths), but "
            f"{otherwise}"
        )


def _positions(
    fields: Input, shape: tuple[int, ...], default: Int64Array, counted: npt.NDArray[np.bool_] | None
) -> Int64Array:
    """One entry for each token, [batch, seq_len]."""
    if fields.position_ids is None:
        return default
    positions = _integers("position_ids", fields.position_ids)
    if positions.shape not in (shape, shape[1:]):
        raise RequestError(
            f"position_ids: expected shape {list(shape)} or {list(shape[1:])}, as input_ids, got "
            f"{list(positions.shape)}"
        )
    if counted is not None and positions.ndim == 1:
        counted = np.asarray(counted.any(axis=0))
    _check_range("position_ids", positions, 0, _INT32_END, "32 bits", where=counted)
    return np.broadcast_to(positions, shape)


def _sampling(fields: Input, num_requests: int) -> dict[str, Any]:
    """The core's arrays of sampling parameters, [num_requests] each."""
    draws = _numbers("random_val", fields.random_val, num_requests, 0.1)
    temperature = _numbers("temperature", fields.temperature, num_requests, 1.0)
    top_p = _numbers("top_p", fields.top_p, num_requests, 1.0)
    _check("temperature", temperature, (temperature >= 0) & (temperature <= np.finfo(np.float32).max), "finite, >= 0")
    _check("top_p", top_p, (top_p > 0) & (top_p <= 1), "above 0 and at most 1")
    _check("random_val", draws, (draws >= 0) & (draws < 1), "in [0, 1)")
    value = 50 if fields.top_k is None else fields.top_k
    top_k = _integers("top_k", value)
    top_k = _spread("top_k", top_k, num_requests)
    _check("top_k", top_k, (top_k >= -1) & (top_k < _INT32_END), "-1 or 0 (all), or positive and below 2**31")
    return {
        "temperature": temperature.astype(np.float32),
        "top_k": top_k.astype(np.int32),
        "top_p": top_p.astype(np.float32),
        "min_p": np.zeros(num_requests, np.float32),
        "random_val": np.minimum(draws.astype(np.float32), _BELOW_ONE),  # rounding must not reach 1
    }


def _numbers(name: str, value: Any, num_requests: int, default: float) -> npt.NDArray[np.float64]:
    array = _as_array(name, default if value is None else value)
    if array.dtype.kind not in "iuf":
        raise RequestError(f"{name}: expected numbers, got dtype {array.dtype}")
    return _spread(name, array.astype(np.float64), num_requests)


def _spread(name: str, array: npt.NDArray[Any], num_requests: int) -> npt.NDArray[Any]:
    if array.shape not in ((), (num_requests,)):
        raise RequestError(f"{name}: expected a number or [{num_requests}], one per request, got {list(array.shape)}")
    return np.broadcast_to(array, (num_requests,))


def _per_request(name: str, value: Any, num_requests: int, default: int = 0) -> Int64Array:
    if value is None:
        return np.full(num_requests, default, np.int64)
    array = _integers(name, value)
    if array.shape != (num_requests,):
        raise RequestError(f"{name}: expected shape [{num_requests}], one per request, got {list(array.shape)}")
    return array


def _integers(name: str, value: Any) -> Int64Array:
    array = _as_array(name, value)
    if array.dtype.kind not in "iu" and array.size:
        raise RequestError(f"{name}: expected integers, got dtype {array.dtype}")
    if array.dtype == np.uint64 and array.size and array.max() >= 2**63:
        raise RequestError(f"{name}: {array.max()} does not fit in 64 bits with a sign")
    return array.astype(np.int64)


def _as_array(name: str, value: Any) -> npt.NDArray[Any]:
    """A numpy array of an array or (nested) list."""
    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "__dlpack__"):
        return as_tensor(value, name, error=RequestError).numpy()
    try:
        return np.asarray(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise RequestError(f"{name}: expected an array or a rectangular list, got {_short(value)}: {error}") from None


def _check_range(
    name: str, values: Int64Array, low: int, end: int, what: str, where: npt.NDArray[np.bool_] | None = None
) -> None:
    good = (values >= low) & (values < end)
    _check(name, values, good if where is None else good | ~where, f"{low}..{end - 1} ({what})")


def _check(name: str, values: npt.NDArray[Any], good: npt.NDArray[np.bool_], expected: str) -> None:
    """RequestError that names the first value that is not good."""
    if not good.all():
        index = tuple(np.argwhere(~good)[0].tolist())
        raise RequestError(f"{name}{list(index)} is {values[index]}, expected {expected}")


def _short(value: Any) -> str:
    return short_repr(value.tolist() if isinstance(value, np.ndarray) else value)


name_keywords(Input.__init__)
