"""`compare`: the first layer and site at which two models diverge.

Both models compute the same tokens. The first is recorded at every hook site; in the second, each activation is held
against what the first had there and then replaced by it. So errors do not travel: every site is judged on the same
inputs, its error is its own, and the tolerance needs to know nothing of depth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from infinilm.debug.comparison_sides import Side, TextSide, TowerSide, open_side
from infinilm.errors import InfinilmError, RequestError
from infinilm.generation import as_token_rows
from infinilm.images import Patches
from infinilm.models.reference.tower import ReferenceTower
from infinilm.serving.tower import TowerTile, tiles_of

__all__ = ["Comparison", "SiteDifference", "compare"]

Array = npt.NDArray[Any]

_NUM_TOKENS = 32  # of the prompt where none is given
_SIZES_OF_PICTURES = ((60, 90), (64, 64))  # height and width, where none are given

# Half the distance between 1 and the next number.
_UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-9}


@dataclass(frozen=True, slots=True)
class SiteDifference:
    """How two models differ at one site.

    Attributes
    ----------
    name : str
        The name of the hook, such as "layer1_k_proj".
    layer : int
        -1 outside layers.
    site : str
        The name without the layer, such as "k_proj".
    shape : tuple of int
        The shape of both tensors; the first axis is the tokens.
    error : float
        The largest over the tokens of |difference| / |reference|, as Euclidean norms. NaN and infinity where only
        one model has them, or both.
    token : int
        Where it is largest.
    tolerance : float
        What rounding explains.
    max_abs_error : float
        The largest difference of two elements.
    norm : float
        Euclidean norm of the reference's activation, all tokens together.
    """

    name: str
    layer: int
    site: str
    shape: tuple[int, ...]
    error: float
    token: int
    tolerance: float
    max_abs_error: float
    norm: float

    @property
    def diverges(self) -> bool:
        """Whether the error is more than rounding explains; NaN is."""
        return not self.error <= self.tolerance

    def __str__(self) -> str:
        """One line."""
        where = "outside the layers" if self.layer < 0 else f"layer {self.layer}"
        return f"{where}, {self.site}: error {self.error:.3g} at token {self.token}, tolerance {self.tolerance:.3g}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `compare` found; printing it gives a table.

    Attributes
    ----------
    sites : tuple of SiteDifference
        In the order of computation.
    input_ids : tuple of int
        The tokens that both models computed; of towers none.
    unmatched : tuple of str
        Sites that only one of the models has.
    """

    sites: tuple[SiteDifference, ...]
    input_ids: tuple[int, ...]
    unmatched: tuple[str, ...] = ()

    @property
    def diverging(self) -> tuple[SiteDifference, ...]:
        """The sites whose error is beyond their tolerance."""
        return tuple(site for site in self.sites if site.diverges)

    @property
    def first(self) -> SiteDifference | None:
        """The first diverging site, or None."""
        return next((site for site in self.sites if site.diverges), None)

    @property
    def layer(self) -> int | None:
        """Layer of the first diverging site, -1 outside the layers; None: nothing diverges."""
        return None if self.first is None else self.first.layer

    @property
    def site(self) -> str | None:
        """Name of the first diverging site without its layer; None: nothing diverges."""
        return None if self.first is None else self.first.site

    @property
    def equal(self) -> bool:
        """Whether the models agree at every site, and have the same sites."""
        return self.first is None and not self.unmatched

    def __str__(self) -> str:
        """The verdict and a line per site."""
        verdict = f"first divergence: {self.first}" if self.first else "no divergence"
        num_tokens = self.sites[0].shape[0] if self.sites else 0
        lines = [f"{verdict} ({len(self.diverging)} of {len(self.sites)} sites diverge, {num_tokens} tokens)"]
        width = max((len(site.name) for site in self.sites), default=4)
        lines.append(f"  {'site':<{width}}  {'error':>9}  {'tolerance':>9}  {'max diff':>9}  {'norm':>9}")
        lines += [
            f"{'*' if site.diverges else ' '} {site.name:<{width}}  {site.error:9.2e}  {site.tolerance:9.2e}  "
            f"{site.max_abs_error:9.2e}  {site.norm:9.3g}"
            for site in self.sites
        ]
        lines += [f"only in one of the models: {', '.join(self.unmatched)}"] if self.unmatched else []
        return "\n".join(lines)


def compare(
    model: Any,
    reference: Any,
    prompt: str | Sequence[int] | Sequence[Any] | None = None,
    *,
    tolerance: float | None = None,
    isolate: bool = True,
) -> Comparison:
    """Find the first layer and site at which two models diverge.

    Parameters
    ----------
    model, reference
        Each an `LLM`, an `InferEngine` (its cache is overwritten), or a model of `AutoLlamaModel` or `ReferenceModel`.
        They need the same architecture and sizes, not the same dtype or device. Or both are towers: `LLM.tower`, and
        what its `reference()` gives.
    prompt
        Token ids, or a text if one of the two is an `LLM` with a tokenizer. None: 32 fixed ids spread over the
        vocabulary. For towers, pictures, as `LLM.tower.rows_of` takes them; None: two of fixed noise.
    tolerance
        Relative error that is still no divergence. None: what rounding in the coarser of the two dtypes explains,
        per site (see `SiteDifference`).
    isolate
        Replace each activation of `reference` by that of `model`, so that a site shows its own error only. False:
        let errors travel; then the tolerance should be given.

    Returns
    -------
    Comparison

    Raises
    ------
    RequestError
        The models differ in their sizes, or the prompt cannot be computed.
    TypeError
        Something else than a model.
    """
    one, other = open_side(model, "model"), open_side(reference, "reference")
    ids: list[int] = []
    runs: list[Callable[[_Recorder], None]]
    if isinstance(one, TowerSide) and isinstance(other, TowerSide):
        _check_same_sizes(one, other)
        pictures, tiles = _pictures(prompt, (one, other))
        num_tokens, last_only = sum(len(tile.tokens) for tile in tiles), False
        runs = [partial(side.run, pictures, tiles) for side in (one, other)]
    elif isinstance(one, TextSide) and isinstance(other, TextSide):
        _check_same_sizes(one, other)
        ids = _prompt_ids(prompt, (one, other))
        num_tokens, last_only = len(ids), not (one.gives_every_position and other.gives_every_position)
        runs = [partial(side.run, ids, last_only=last_only) for side in (one, other)]
    else:
        raise RequestError("the models cannot be compared: one is a tower, and the other a model of texts")
    recorded = _Recorder()
    runs[0](recorded)
    got = recorded.activations()
    if last_only:  # of all positions, where the other gives the last one
        got |= {name: got[name][-1:] for name in ("final_norm", "logits") if name in got}
    judged = _Recorder(got if isolate else None)
    runs[1](judged)
    want, layers = judged.activations(), judged.layers

    for name, found in (("model", got), ("reference", want)):
        if len(found["embedding"]) != num_tokens:
            raise InfinilmError(
                f"{name}: hooks saw {len(found['embedding'])} tokens, expected {num_tokens}; compare it while it is "
                "idle"
            )
    dtype = max((*one.dtypes, *other.dtypes), key=lambda name: _UNIT_ROUNDOFF[name])
    allowed = _rounding(dtype, max(one.longest_sum, num_tokens)) if tolerance is None else tolerance
    differences = (_difference(name, layers[name], got[name], want[name], allowed) for name in want if name in got)
    return Comparison(tuple(differences), tuple(ids), tuple(sorted(got.keys() ^ want.keys())))


class _Recorder:
    """A tap that keeps copies, and replaces activations by those of another recording if there is one."""

    def __init__(self, replacements: Mapping[str, Array] | None = None) -> None:
        self._replacements = replacements or {}
        self._parts: dict[str, list[Array]] = {}  # a prompt may be computed in chunks
        self.layers: dict[str, int] = {}

    def __call__(self, name: str, layer: int, activation: Array) -> Array | None:
        parts = self._parts.setdefault(name, [])
        begin = sum(map(len, parts))
        parts.append(np.array(activation))
        self.layers[name] = layer
        replacement = self._replacements.get(name, activation)[begin : begin + len(activation)]
        fits = name in self._replacements and replacement.shape == activation.shape
        return replacement.astype(activation.dtype) if fits else None

    def activations(self) -> dict[str, Array]:
        """By name, in the order of computation: [num_tokens, ...]."""
        return {name: np.concatenate(parts) for name, parts in self._parts.items()}


def _difference(name: str, layer: int, got: Array, want: Array, tolerance: float) -> SiteDifference:
    rows = min(len(got), len(want))  # one model gives logits of the last token only
    got, want = (array[len(array) - rows :].astype(np.float64) for array in (got, want))
    if got.shape != want.shape:
        raise InfinilmError(f"{name}: the models have activations of shapes {got.shape} and {want.shape}")
    gap = np.abs(got - want).reshape(rows, -1)
    errors = np.linalg.norm(gap, axis=-1)
    sizes = np.linalg.norm(want.reshape(rows, -1), axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.where(errors == 0, 0.0, errors / sizes)
    token = int(np.argmax(relative))  # the first NaN, if there is one
    site = name.removeprefix(f"layer{layer}_")
    return SiteDifference(
        name, layer, site, want.shape, float(relative[token]), token, tolerance, float(gap.max()),
        float(np.linalg.norm(want)),
    )  # fmt: skip


def _rounding(dtype: str, longest_sum: int) -> float:
    """The relative error that two correct computations of one site may have, on the same inputs.

    A sum of n terms in float32 errs by about u sqrt(n / 2) of its size, u = 2^-24, and 8 u (1 + sqrt(n)) is far beyond
    that. A 16-bit dtype rounds the inputs of a linear or its result, or the keys and values in the cache: a few units
    of its own. Twice it all, as a token's sum may be smaller than its terms.
    """
    accumulated = 8 * min(_UNIT_ROUNDOFF[dtype], _UNIT_ROUNDOFF["float32"]) * (1 + math.sqrt(longest_sum))
    stored = 4 * _UNIT_ROUNDOFF[dtype] if dtype in ("float16", "bfloat16") else 0.0
    return 2 * (stored + accumulated)


def _check_same_sizes(one: Side, other: Side) -> None:
    for name, size in one.sizes.items():
        if size != other.sizes[name]:
            raise RequestError(f"the models cannot be compared: {name} is {size} and {other.sizes[name]}")


def _pictures(prompt: Any, sides: Sequence[TowerSide]) -> tuple[list[Patches], list[TowerTile]]:
    """What towers read of pictures."""
    engine = next((side.model for side in sides if not isinstance(side.model, ReferenceTower)), None)
    if engine is None:
        raise RequestError("one of two towers that are compared must be that of an LLM, which reads pictures")
    if prompt is None:
        rng = np.random.default_rng(0)
        prompt = [rng.integers(256, size=(*size, 3), dtype=np.uint8) for size in _SIZES_OF_PICTURES]
    if isinstance(prompt, (str, bytes)) or not isinstance(prompt, Sequence):
        raise RequestError(f"prompt: expected a list of pictures, got {type(prompt).__name__}")
    pictures = engine.prepare(prompt)
    return pictures, tiles_of(pictures, engine.config)


def _prompt_ids(prompt: Any, sides: Sequence[TextSide]) -> list[int]:
    """Token ids of the prompt, checked against both contexts."""
    vocab_size = sides[0].vocab_size
    limit = min(side.max_model_len for side in sides)
    if prompt is None:
        ids = np.random.default_rng(0).integers(vocab_size, size=min(_NUM_TOKENS, limit)).tolist()
    elif isinstance(prompt, str):
        tokenize = next((side.tokenize for side in sides if side.tokenize is not None), None)
        if tokenize is None:
            raise RequestError("prompt is a text, but neither model has a tokenizer: pass token ids")
        ids = tokenize(prompt)
    else:
        ids = prompt
    rows = as_token_rows(ids, vocab_size)
    if len(rows) > 1:
        raise RequestError(f"prompt: expected one sequence of token ids, got {len(rows)}")
    if len(rows[0]) > limit:
        raise RequestError(f"prompt has {len(rows[0])} tokens; the models hold {limit}")
    checked: list[int] = rows[0].tolist()
    return checked
