"""What a checkpoint says of the vectors that it was trained to make: the files of sentence-transformers, and of GGUF.

`modules.json` lists what a text goes through: the model, a pooling, linears, and a scaling to length 1. Each module has
a folder with a config.json. Two spellings are read: that of sentence-transformers 2 to 5 and that of 6. A module or a
setting that is not known is refused by name, since a vector without it would look right and be wrong. A GGUF file has
the pooling alone.

The facts are those of sentence_transformers 6.2: base/modules, sentence_transformer/modules/pooling.py and
base/model.py; of GGUF, those of `llama_pooling_type` in llama.cpp's include/llama.h.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from infinilm.checks import INT_LIMIT, as_boolean, as_integer, short_repr
from infinilm.errors import ConfigError, RequestError, WeightError, did_you_mean
from infinilm.files import read_json, read_json_list, read_optional_json
from infinilm.gguf.file import is_gguf, open_gguf, reading

__all__ = [
    "GGUF_DENSE",
    "POOLINGS",
    "SIMILARITIES",
    "Dense",
    "Module",
    "Norm",
    "TextRules",
    "VectorRecipe",
    "num_pooled",
    "read_modules",
    "text_rules",
]

POOLINGS = ("mean", "cls", "last", "max", "weightedmean", "mean_sqrt_len")
"""How the hidden states of a text become one: see `infinilm.requests.reducers.HiddenPool`."""

SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
"""How alike two vectors are; the last two are negative distances."""

# Names of these in the files, in both spellings.
_OLD_POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "last",
}
_NEW_POOLINGS = {"mean_sqrt_len_tokens": "mean_sqrt_len", "lasttoken": "last"}
_GGUF_POOLINGS: tuple[str | None, ...] = (None, "mean", "cls", "last")  # by the number of llama.cpp

_ACTIVATIONS = {"Identity": "identity", "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "Sigmoid": "sigmoid"}
# Settings of a Transformer module, and their values under which it gives the hidden states of a text, or its logits.
_KNOWN_TASKS: Mapping[str, tuple[Any, ...]] = {
    "transformer_task": ("feature-extraction", "text-generation"),
    "module_output_name": ("token_embeddings", "causal_logits"),
    "query_expansion": (),
}
# The same of a Transformer that is alone, as a cross-encoder is: it gives the scores of labels.
_SCORE_TASKS: Mapping[str, tuple[Any, ...]] = {
    "transformer_task": ("sequence-classification",),
    "module_output_name": ("scores",),
    "query_expansion": (),
}
GGUF_DENSE = ("dense_2", "dense_3")
"""Linears behind the pooling of EmbeddingGemma, as llama.cpp's converter calls them; they have no bias."""
_MODULES_FILE = "modules.json"
_NO_NAMES: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Module:
    """An entry of modules.json: the name of its class, and its folder."""

    kind: str
    folder: Path


@dataclass(frozen=True, slots=True)
class Dense:
    """A linear that a pooled vector goes through.

    Attributes
    ----------
    place : Path
        A folder, with its weights in model.safetensors; or a GGUF file.
    name : str
        The names of its tensors, up to ".weight" and ".bias".
    in_features, out_features : int
    bias : bool
    activation : str
        "identity", "tanh", "relu", "gelu" or "sigmoid".
    """

    place: Path
    name: str
    in_features: int
    out_features: int
    bias: bool
    activation: str


@dataclass(frozen=True, slots=True)
class Norm:
    """A LayerNorm of a pooled vector, of a module's folder."""

    place: Path
    out_features: int


@dataclass(frozen=True, slots=True)
class VectorRecipe:
    """How a checkpoint makes vectors.

    Attributes
    ----------
    pooling : str
        One of `POOLINGS`, or several joined by "+": see `infinilm.requests.reducers.HiddenPool`.
    pools_prompt : bool
        Tokens of the prompt are pooled with those of the text.
    steps : tuple of Dense and Norm
        What the pooled vector goes through, in order.
    normalize : bool
        It is scaled to length 1 at the end.
    prompts : mapping of str to str
        Texts that stand before a text, by name.
    default_prompt_name : str or None
        The one that counts where nothing is asked for.
    similarity : str
        One of `SIMILARITIES`.
    max_tokens : int or None
        Tokens of a text, special ones included; None: as many as the model takes.
    lower_case : bool
        Texts are made lower case.
    dimensions : tuple of int
        Sizes that vectors may be cut to by training (Matryoshka); empty: the checkpoint does not say.
    any_dimension : bool
        It says that vectors may be cut to any size.
    yes_no : tuple of (int, int or None), optional
        For rerankers: ids of the tokens whose logits tell that a document fits, and that it does not.
    source : str
        The file that says so; "": none does, and these are the defaults.
    """

    pooling: str = "mean"
    steps: tuple[Dense | Norm, ...] = ()
    normalize: bool = True
    prompts: Mapping[str, str] = field(default_factory=lambda: _NO_NAMES)
    default_prompt_name: str | None = None
    similarity: str = "cosine"
    max_tokens: int | None = None
    lower_case: bool = False
    dimensions: tuple[int, ...] = ()
    any_dimension: bool = False
    yes_no: tuple[int, int | None] | None = None
    pools_prompt: bool = True
    source: str = ""

    @classmethod
    def from_model(cls, model: Path, hidden_size: int) -> VectorRecipe:
        """Read what the files of a model say.

        Parameters
        ----------
        model : Path
            The folder of a checkpoint, or a GGUF file.
        hidden_size : int
            Elements of a hidden state.

        Raises
        ------
        ConfigError
            A file is damaged, or asks for what is not supported.
        """
        if is_gguf(model):
            return _of_gguf(model, hidden_size)
        modules = read_modules(model)
        return _of_folder(model, modules, hidden_size) if modules else cls()

    def size(self, hidden_size: int, pooling: str | None = None) -> int:
        """Elements of a vector that is not cut, of this pooling or of the checkpoint's own."""
        return self.steps[-1].out_features if self.steps else hidden_size * num_pooled(pooling or self.pooling)

    def prompt(self, name: str | None) -> str:
        """The text that stands before a text; None: the default. RequestError: there is none of that name."""
        if name is None:
            return self.prompts[self.default_prompt_name] if self.default_prompt_name is not None else ""
        if name not in self.prompts:
            known = ", ".join(map(repr, self.prompts)) or "none"
            raise RequestError(
                f"prompt_name: {name!r:.80} is no prompt of this model{did_you_mean(str(name), self.prompts)}; "
                f"there are {known}"
            )
        return self.prompts[name]

    def rules(self, prompt_name: str | None, truncate: bool | int) -> TextRules:
        """What becomes of texts. RequestError: there is no such prompt, or `truncate` is neither bool nor number."""
        prefix = self.prompt(prompt_name)
        return text_rules(
            truncate, self.max_tokens, prefix=prefix, lower_case=self.lower_case, pools_prefix=self.pools_prompt
        )

    def has_dimension(self, size: int) -> bool:
        """Whether the checkpoint says that vectors may be cut to this size."""
        return self.any_dimension or size in self.dimensions


def num_pooled(pooling: str) -> int:
    """How many hidden states a pooling leaves of a text: as many as are joined."""
    return pooling.count("+") + 1


@dataclass(frozen=True, slots=True)
class TextRules:
    """What becomes of a text before it is read.

    Attributes
    ----------
    prefix : str
        Stands before it.
    lower_case : bool
        It is made lower case, without the prefix.
    max_tokens : int or None
        Tokens that it may have, special ones included; None: as many as the model takes.
    truncate : bool
        The end of a longer text is left out; else such a text is an error.
    pools_prefix : bool
        Tokens of the prefix are pooled with those of the text.
    allow_empty : bool
        A text may be empty. What is then said of it would be of special tokens alone.
    """

    prefix: str = ""
    lower_case: bool = False
    max_tokens: int | None = None
    truncate: bool = False
    pools_prefix: bool = True
    allow_empty: bool = False

    def apply(self, text: str, name: str) -> str:
        """The text that is tokenised. RequestError: it is empty; `name` is what it is called then."""
        if not text and not self.allow_empty:
            raise RequestError(f"{name}: expected a text that is not empty, got ''")
        return self.prefix + (text.lower() if self.lower_case else text)


def text_rules(truncate: bool | int, max_tokens: int | None = None, **others: Any) -> TextRules:
    """Rules for texts of at most `max_tokens`, and of `truncate` if that is a number >= 1, else a RequestError.

    `others`: further fields of the rules.
    """
    if type(truncate) is not bool:
        most = as_integer("truncate", truncate, error=RequestError)
        max_tokens = most if max_tokens is None else min(most, max_tokens)
    return TextRules(max_tokens=max_tokens, truncate=bool(truncate), **others)


def read_modules(model: Path) -> tuple[Module, ...]:
    """The modules that a folder lists, in order; empty: it has no modules.json. ConfigError: one is not known."""
    path = model / _MODULES_FILE
    try:
        entries = read_json_list(path)
    except FileNotFoundError:
        return ()
    return tuple(_module(path, entry) for entry in entries)


def _module(path: Path, entry: Any) -> Module:
    kind, place = (entry.get("type"), entry.get("path")) if isinstance(entry, dict) else (None, None)
    if not isinstance(kind, str) or not isinstance(place, str):
        raise ConfigError(f"{path}: expected objects with a 'type' and a 'path', got {short_repr(entry)}")
    if not kind.startswith("sentence_transformers."):
        raise ConfigError(
            f"{path}: the module {kind!r:.80} is code of the checkpoint's own, which is not run; supported are "
            f"those of sentence-transformers: {', '.join(_READERS)}"
        )
    if place.startswith("/") or ".." in Path(place).parts:
        raise ConfigError(f"{path}: the path of a module must be inside the folder, got {place!r:.80}")
    return Module(kind.rpartition(".")[2], path.parent / place)


def _of_gguf(model: Path, hidden_size: int) -> VectorRecipe:
    dense: list[Dense] = []
    with reading(model):
        gguf = open_gguf(model)
        for name in GGUF_DENSE:
            if (tensor := gguf.tensors.get(f"{name}.weight")) is None:
                continue
            size = dense[-1].out_features if dense else hidden_size
            if len(tensor.shape) != 2 or tensor.shape[1] != size:
                raise WeightError(f"{model}: {name}.weight is {list(tensor.shape)}, and what comes before gives {size}")
            dense.append(Dense(model, name, size, tensor.shape[0], False, "identity"))
        metadata = gguf.metadata
        key = f"{metadata['general.architecture']}.pooling_type"
        kind = metadata.get(key, 0)
    if type(kind) is not int or not 0 <= kind < len(_GGUF_POOLINGS):
        told = "a reranker with a head of its own" if kind == 4 else f"{kind!r:.80}"
        raise ConfigError(f"{model}: {key} is {told}; supported are 1 (mean), 2 (cls) and 3 (last)")
    pooling = _GGUF_POOLINGS[kind]
    if pooling is None:
        return VectorRecipe(steps=tuple(dense))
    return VectorRecipe(pooling, tuple(dense), source=f"{key} of {model.name}")


def _of_folder(model: Path, modules: tuple[Module, ...], hidden_size: int) -> VectorRecipe:
    path = model / _MODULES_FILE
    for module in modules:
        if module.kind not in _READERS:
            raise ConfigError(
                f"{path}: the module {module.kind!r:.80} is not supported; supported are {', '.join(_READERS)}"
            )
    if modules[0].kind != "Transformer" or any(module.kind == "Transformer" for module in modules[1:]):
        raise ConfigError(f"{path}: expected a Transformer first and no other one, got {_kinds(modules)}")
    if len(modules) == 1 and _gives_scores(modules[0]):
        return VectorRecipe(**_transformer_of(modules[0], _SCORE_TASKS) | _prompts(model))
    said: dict[str, Any] = {"normalize": False, "steps": (), "source": _MODULES_FILE}
    if (count := sum(module.kind in ("Pooling", "LogitScore") for module in modules)) != 1:
        raise ConfigError(f"{path}: expected one Pooling, or a LogitScore, got {count}: {_kinds(modules)}")
    size = hidden_size
    for module in modules:
        if said["normalize"] and module.kind != "Dropout":
            raise ConfigError(f"{path}: nothing may follow Normalize, got {_kinds(modules)}")
        if "pooling" not in said and module.kind in ("Dense", "LayerNorm", "Normalize"):
            raise ConfigError(f"{path}: {module.kind} before the Pooling is not supported, got {_kinds(modules)}")
        said |= _READERS[module.kind](module, size, said)
        size = said["steps"][-1].out_features if said["steps"] else hidden_size * num_pooled(said.get("pooling", ""))
    return VectorRecipe(**said | _prompts(model) | _dimensions(model))


def _kinds(modules: tuple[Module, ...]) -> str:
    return ", ".join(module.kind for module in modules)


def _gives_scores(transformer: Module) -> bool:
    task = read_optional_json(transformer.folder / "sentence_bert_config.json").get("transformer_task")
    return task in _SCORE_TASKS["transformer_task"]


def _transformer(module: Module, size: int, said: Mapping[str, Any]) -> dict[str, Any]:
    return _transformer_of(module, _KNOWN_TASKS)


def _transformer_of(module: Module, tasks: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    path = module.folder / "sentence_bert_config.json"
    values = read_optional_json(path)
    for key, known in tasks.items():
        if values.get(key) not in (None, *known):
            expected = " or ".join(map(repr, known)) or "null"
            raise ConfigError(f"{path}: {key} is {short_repr(values[key])}; only {expected} is supported")
    max_tokens = values.get("max_seq_length")
    if max_tokens is not None:
        max_tokens = as_integer(f"{path}: max_seq_length", max_tokens)
    else:  # since version 6 the tokenizer says it, with a huge number where there is no limit
        given = read_optional_json(module.folder / "tokenizer_config.json").get("model_max_length")
        max_tokens = given if type(given) is int and 0 < given < INT_LIMIT else None
    lower_case = values.get("do_lower_case") or False
    return {"max_tokens": max_tokens, "lower_case": as_boolean(f"{path}: do_lower_case", lower_case, error=ConfigError)}


def _pooling(module: Module, size: int, said: Mapping[str, Any]) -> dict[str, Any]:
    path = module.folder / "config.json"
    values = read_json(path)
    if (given := values.get("pooling_mode")) is not None:
        modes = given if isinstance(given, list) else [given]
        modes = [_NEW_POOLINGS.get(mode, mode) if isinstance(mode, str) else mode for mode in modes]
    else:
        modes = [mode for key, mode in _OLD_POOLINGS.items() if values.get(key)] or ["mean"]
    others = [key for key in values if key.startswith("pooling_mode_") and key not in _OLD_POOLINGS and values[key]]
    if not modes or any(mode not in POOLINGS for mode in modes) or others:
        got = others[0] if others else " and ".join(map(str, modes))
        raise ConfigError(f"{path}: pooling is {got!r:.80}; supported are {', '.join(POOLINGS)}, and several of these")
    width = values.get("embedding_dimension", values.get("word_embedding_dimension", size))
    if width != size:
        raise ConfigError(f"{path}: pools vectors of {short_repr(width)} elements, and the model gives {size}")
    pools_prompt = as_boolean(f"{path}: include_prompt", values.get("include_prompt", True), error=ConfigError)
    return {"pooling": "+".join(modes), "pools_prompt": pools_prompt}


def _dense(module: Module, size: int, said: Mapping[str, Any]) -> dict[str, Any]:
    path = module.folder / "config.json"
    values = read_json(path)
    sizes = [as_integer(f"{path}: {key}", values.get(key)) for key in ("in_features", "out_features")]
    if sizes[0] != size:
        raise ConfigError(f"{path}: in_features is {sizes[0]}, and what comes before gives {size} elements")
    bias = as_boolean(f"{path}: bias", values.get("bias", True), error=ConfigError)
    name = values.get("activation_function", "torch.nn.modules.activation.Tanh")
    activation = _ACTIVATIONS.get(str(name).rpartition(".")[2]) if str(name).startswith("torch.nn.") else None
    if activation is None:
        known = ", ".join(_ACTIVATIONS)
        raise ConfigError(f"{path}: activation_function is {name!r:.80}; supported are torch.nn's {known}")
    for key, neutral in (
        ("use_residual", False),
        ("module_input_name", "sentence_embedding"),
        ("module_output_name", "sentence_embedding"),
    ):
        if values.get(key) not in (None, neutral):
            raise ConfigError(f"{path}: {key} is {short_repr(values[key])}; only {neutral!r} is supported")
    return {"steps": (*said["steps"], Dense(module.folder, "linear", sizes[0], sizes[1], bias, activation))}


def _layer_norm(module: Module, size: int, said: Mapping[str, Any]) -> dict[str, Any]:
    path = module.folder / "config.json"
    dimension = as_integer(f"{path}: dimension", read_json(path).get("dimension"))
    if dimension != size:
        raise ConfigError(f"{path}: dimension is {dimension}, and what comes before gives {size} elements")
    return {"steps": (*said["steps"], Norm(module.folder, size))}


def _logit_score(module: Module, size: int, said: Mapping[str, Any]) -> dict[str, Any]:
    path = module.folder / "config.json"
    values = read_json(path)
    yes = as_integer(f"{path}: true_token_id", values.get("true_token_id"), least=0)
    no = values.get("false_token_id")
    return {"yes_no": (yes, None if no is None else as_integer(f"{path}: false_token_id", no, least=0))}


_READERS = {
    "Transformer": _transformer,
    "Pooling": _pooling,
    "Dense": _dense,
    "LayerNorm": _layer_norm,
    "Dropout": lambda *_: {},  # of training alone
    "Normalize": lambda *_: {"normalize": True},
    "LogitScore": _logit_score,
}


def _prompts(model: Path) -> dict[str, Any]:
    path = model / "config_sentence_transformers.json"
    values = read_optional_json(path)
    prompts = values.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(prompt, str) for prompt in prompts.values()):
        raise ConfigError(f"{path}: prompts must be an object of names and texts, got {short_repr(prompts)}")
    default = values.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise ConfigError(f"{path}: default_prompt_name is {default!r:.80}, which prompts does not have")
    similarity = values.get("similarity_fn_name") or "cosine"
    if similarity not in SIMILARITIES:
        raise ConfigError(f"{path}: similarity_fn_name is {similarity!r:.80}; supported are {', '.join(SIMILARITIES)}")
    return {"prompts": MappingProxyType(prompts), "default_prompt_name": default, "similarity": similarity}


def _dimensions(model: Path) -> dict[str, Any]:
    """What config.json says of sizes that vectors may be cut to, by the keys that vLLM reads."""
    values = read_optional_json(model / "config.json")
    sizes = values.get("matryoshka_dimensions") or ()
    if not isinstance(sizes, (list, tuple)):
        raise ConfigError(f"{model / 'config.json'}: matryoshka_dimensions must be a list, got {short_repr(sizes)}")
    dimensions = tuple(as_integer("matryoshka_dimensions", size) for size in sizes)
    return {"dimensions": dimensions, "any_dimension": bool(values.get("is_matryoshka")) and not dimensions}
