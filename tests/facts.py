"""The facts of a model: what its specification says that changes which code runs, and which goldens have each.

A fact is a text such as "AttentionSpec.qk_norm=head". A switch or a choice is a fact by its value, a number by whether
it is set, a part of a layer by being there; `LAYOUTS` has what only several fields say together. Code that is right for
one golden of each fact can still be wrong for two facts that meet, so the whole suite runs all goldens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from goldens import GOLDENS, config_of, entry_of

from infinilm import ConfigError, LlamaConfig, _core
from infinilm.config.spec import build_spec

ROOMS: tuple[type, ...] = (
    _core.ModelSpec,
    _core.LayerSpec,
    _core.AttentionSpec,
    _core.LatentSpec,
    _core.IndexerSpec,
    _core.DeltaSpec,
    _core.ShortConvSpec,
    _core.MambaSpec,
    _core.MlpSpec,
    _core.SharedBlockSpec,
    _core.ExpertsSpec,
    _core.LaurelSpec,
    _core.OwnVectorsSpec,
    _core.AltUpSpec,
    _core.EmbeddingSumSpec,
    _core.PositionBiasSpec,
    _core.RopeSpec,
)
OF_ENGINE = ("dtype", "quantization", "fp8_inputs")  # fields of a ModelSpec that no family sets

_NOT_OF_MLPS = "no `hidden_act` gives it; what uses it is the gate of attention, AttentionSpec.output_gate"
_ONLY_GELU = "the one family with vectors of their own has gelu_tanh; MLPs have the others by the same code"
_OF_ENCODERS = "tests/golden_encoders has it, which tests/llm/test_encoders.py holds to transformers"
WITHOUT_GOLDEN = {
    **dict.fromkeys(
        (
            *("AttentionSpec.two_way=True", "MlpSpec.down_bias=True"),
            "PositionBiasSpec.num_buckets=set",
            *("ModelSpec.lm_head=False", "ModelSpec.stream_norms=all", "ModelSpec.stream_norms=embedding"),
            "EmbeddingSumSpec.num_types=set",
        ),
        _OF_ENCODERS,
    ),
    **dict.fromkeys(
        ("ModelSpec.clipped_linears=True", "OwnVectorsSpec.pad_id=set"),
        "only Gemma 4 E2B and E4B with their tower have it: tests/golden_vision",
    ),
    "ModelSpec.given_levels=set": "only models that see have it, whose goldens have a tower: tests/golden_vision",
    "ExpertsSpec.on_host=True": "a setting (cpu_moe), and not of a checkpoint: tests/cuda/test_gpu_layers.py",
    "MlpSpec.activation=quick_gelu": "the tower of Qwen2-VL alone has it: tests/golden_vision",
    "OwnVectorsSpec.activation=gelu": _ONLY_GELU,
    "OwnVectorsSpec.activation=quick_gelu": _ONLY_GELU,
    "MlpSpec.activation=sigmoid": _NOT_OF_MLPS,
    "OwnVectorsSpec.activation=sigmoid": _NOT_OF_MLPS,
    "OwnVectorsSpec.activation=silu": _ONLY_GELU,
    "OwnVectorsSpec.activation=relu": _ONLY_GELU,
    "OwnVectorsSpec.activation=relu2": _ONLY_GELU,
    "OwnVectorsSpec.activation=xielu": "it has weights of its own there, which these vectors have not",
    "OwnVectorsSpec.activation=clamped_swiglu": _ONLY_GELU,
    "OwnVectorsSpec.activation=clamped_silu": _ONLY_GELU,
    **dict.fromkeys(("MlpSpec.activation=softplus", "OwnVectorsSpec.activation=softplus"), _NOT_OF_MLPS),
}
"""{fact: why no golden has it}: what a specification can say and no family does."""

TOLD_BY_PICTURES = ("AttentionSpec.spans=True",)
"""Facts that change nothing in a text: prompts with pictures tell them (tests/golden_vision, tests/llm)."""


def field_names(room: type) -> list[str]:
    """What can be set of a spec; what follows from other fields has no setter."""
    members = ((name, member) for name, member in vars(room).items() if isinstance(member, property))
    return [name for name, member in members if member.fset is not None and name not in OF_ENGINE]


def facts_of_spec(spec: Any) -> Iterator[str]:
    """The facts of a specification and of all specifications that it contains."""
    room, default = type(spec), type(spec)()
    for name in field_names(room):
        value = getattr(spec, name)
        field = f"{room.__name__}.{name}"
        if isinstance(value, list):
            for part in value:
                if isinstance(part, ROOMS):
                    yield from facts_of_spec(part)
        elif value is None or isinstance(value, ROOMS):
            yield f"{field}={type(value).__name__}"
            if value is not None:
                yield from facts_of_spec(value)
        elif isinstance(value, (bool, str)):
            yield f"{field}={value}"
        else:
            yield f"{field}={'default' if value == getattr(default, name) else 'set'}"


def possible_facts() -> Iterator[str]:
    """What fields can say: both values of switches, all choices, each number set."""
    for room in ROOMS:
        spec = room()
        for name in field_names(room):
            value, field = getattr(spec, name), f"{room.__name__}.{name}"
            if isinstance(value, bool):
                yield from (f"{field}={choice}" for choice in (False, True))
            elif isinstance(value, str):
                yield from (f"{field}={choice}" for choice in _choices(spec, name))
            elif isinstance(value, (int, float)):
                yield f"{field}=set"


def _choices(spec: Any, name: str) -> list[str]:
    """The error of a value that is none of them lists them."""
    try:
        setattr(spec, name, "?")
    except ConfigError as error:
        return str(error).partition(" is not one of ")[2].split(", ")
    raise AssertionError(f"{type(spec).__name__}.{name} takes any text, so it is no choice; leave it out of the facts")


# ---- what a model is without one of its facts ----


def wrong_facts() -> Iterator[tuple[str, str, Any, Any]]:
    """(room, field, value, wrong value) of each fact that a golden has: as if what makes the fact true did not exist.

    A switch that is on is off then, a choice is the default or else the first other one, and a number that is the
    default in some golden is that in all of them; its value here is None, which is any. Left out are sizes, which
    all models set, and facts of being off or the default.
    """
    for room in ROOMS:
        for name in field_names(room):
            default, field = getattr(room(), name), f"{room.__name__}.{name}="
            found = sorted(fact.removeprefix(field) for fact in all_facts() if fact.startswith(field))
            if isinstance(default, bool):
                if "True" in found and f"{field}True" not in TOLD_BY_PICTURES:
                    yield room.__name__, name, True, False
            elif isinstance(default, str):
                for value in found if len(found) > 1 else ():
                    others = [other for other in (default, *found) if other != value]
                    yield room.__name__, name, value, others[0]
            elif isinstance(default, (int, float)) and found == ["default", "set"]:
                yield room.__name__, name, None, default


def change_field(spec: Any, room: str, name: str, value: Any, wrong: Any) -> bool:
    """Set a field to `wrong` where it is `value` (None: anything), in all parts of `spec`; tells if any was changed."""
    changed = False
    if type(spec).__name__ == room and getattr(spec, name) != wrong and value in (None, getattr(spec, name)):
        setattr(spec, name, wrong)
        changed = True
    for own in field_names(type(spec)):
        part = getattr(spec, own)  # a copy, which is written back
        parts = part if isinstance(part, list) else [part]
        if any([change_field(each, room, name, value, wrong) for each in parts if isinstance(each, ROOMS)]):
            setattr(spec, own, part)
            changed = True
    return changed


# ---- facts that several fields say together ----


def _of_attention(holds: Callable[[Any, Any], bool]) -> Callable[[Any], bool]:
    """Whether it holds of some layer's attention, beside its model."""

    def of_some(spec: Any) -> bool:
        return any(holds(layer.mixer, spec) for layer in spec.layers if isinstance(layer.mixer, _core.AttentionSpec))

    return of_some


def _differ(value: Callable[[Any], Any]) -> Callable[[Any], bool]:
    """Whether the layers of a model have several values."""
    return lambda spec: len({value(layer) for layer in spec.layers}) > 1


def _groups_matter(layer: Any) -> bool:
    """A token's best experts are always in as many groups as are best by their best one."""
    experts = layer.experts
    return bool(experts) and experts.num_groups > 1 and (experts.group_best > 1 or experts.top_k > experts.top_groups)


LAYOUTS: dict[str, Callable[[Any], bool]] = {
    "every query head has keys of its own": _of_attention(lambda mixer, _: mixer.num_kv_heads == mixer.num_heads),
    "some query heads share keys": _of_attention(lambda mixer, _: 1 < mixer.num_kv_heads < mixer.num_heads),
    "all query heads share keys": _of_attention(lambda mixer, _: 1 == mixer.num_kv_heads < mixer.num_heads),
    "heads are as wide as the model": _of_attention(lambda mixer, s: mixer.num_heads * mixer.head_dim == s.hidden_size),
    "heads are wider than the model": _of_attention(lambda mixer, s: mixer.num_heads * mixer.head_dim > s.hidden_size),
    "a part of a head is turned": _of_attention(
        lambda mixer, spec: mixer.rope >= 0 and 2 * len(spec.ropes[mixer.rope].inv_freq) < mixer.head_dim
    ),
    "layers have several tables of rotations": _differ(lambda layer: getattr(layer.mixer, "rope", -1)),
    "layers have several windows": _differ(lambda layer: getattr(layer.mixer, "sliding_window", 0)),
    "layers have heads of several sizes": _differ(lambda layer: getattr(layer.mixer, "head_dim", 0)),
    "layers have several kinds of mixers": _differ(lambda layer: type(layer.mixer)),
    "layers have MLPs of several sizes": _differ(lambda layer: layer.mlp and layer.mlp.intermediate_size),
    "some layers have experts": _differ(lambda layer: layer.experts is not None),
    "groups rule out experts that are among the best": lambda spec: any(map(_groups_matter, spec.layers)),
    "experts beside an MLP": lambda spec: any(layer.mlp and layer.experts for layer in spec.layers),
}


def facts_of_golden(name: str) -> frozenset[str]:
    entry = entry_of(name)
    config = LlamaConfig.from_dict(config_of(name))
    spec = build_spec(config, dtype="float32", max_model_len=int(entry["max_model_len"]))
    found = set(facts_of_spec(spec))
    found |= {f"cache={layer.cache.kind}" for layer in spec.layers}
    found |= {layout for layout, holds in LAYOUTS.items() if holds(spec)}
    found |= {f"file: {entry['dtype']}", f"files: {'several' if entry.get('num_files', 1) > 1 else 'one'}"}
    return frozenset(found)


@functools.cache
def facts_of_goldens() -> dict[str, frozenset[str]]:
    return {name: facts_of_golden(name) for name in GOLDENS}


def all_facts() -> set[str]:
    return set().union(*facts_of_goldens().values())


def greedy_cover(sets: dict[str, frozenset[str]]) -> list[str]:
    """Some of the names, whose sets together hold all elements; each next one adds the most.

    They are at most 1 + ln(n) times as many as the fewest (Chvatal, "A Greedy Heuristic for the Set-Covering Problem",
    1979). Among names that add as much the first is taken, so the cover is the same each time.
    """
    missing: set[str] = set().union(*sets.values())
    taken: list[str] = []
    while missing:
        best = max(sorted(sets), key=lambda name: len(sets[name] & missing))
        taken.append(best)
        missing -= sets[best]
    return _without_spare(sorted(taken), sets)


def _without_spare(taken: Iterable[str], sets: dict[str, frozenset[str]]) -> list[str]:
    """Leave out what later choices made superfluous."""
    kept = list(taken)
    for name in list(kept):
        others = [sets[other] for other in kept if other != name]
        if sets[name] <= frozenset().union(*others):
            kept.remove(name)
    return kept
