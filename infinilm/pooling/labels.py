"""What a checkpoint says of the labels that its head gives scores of: `id2label` and others of config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infinilm.checks import as_integer, short_repr
from infinilm.errors import ConfigError, RequestError
from infinilm.files import read_json, read_optional_json

__all__ = ["SCORE_ACTIVATIONS", "LabelRecipe", "check_activation"]

SCORE_ACTIVATIONS = ("identity", "sigmoid", "softmax", "tanh")
"""What scores of labels go through."""


def check_activation(activation: str | None) -> None:
    """RequestError: there is no such activation; None is that of the checkpoint."""
    if activation not in (None, *SCORE_ACTIVATIONS):
        raise RequestError(
            f"activation: expected one of {', '.join(SCORE_ACTIVATIONS)}, or None, got {activation!r:.80}"
        )


# By the `problem_type` of transformers.
_OF_PROBLEMS = {
    "regression": "identity",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
# By the class of torch that a cross-encoder of sentence-transformers names.
_OF_CLASSES = {"Identity": "identity", "Sigmoid": "sigmoid", "Softmax": "softmax", "Tanh": "tanh"}
# By the `classifier_pooling` of transformers: what a head reads of a text.
_POOLINGS = {"cls": "cls", "bos": "cls", "last": "last", "mean": "mean"}
_MOST_LABELS = 2**20


@dataclass(frozen=True, slots=True)
class LabelRecipe:
    """The labels of a checkpoint.

    Attributes
    ----------
    names : tuple of str
        In the order of their scores.
    activation : str
        One of `SCORE_ACTIVATIONS`.
    pooling : str
        What the head reads of a text: its token "last" or "cls", the first, or the "mean" of all.
    """

    names: tuple[str, ...]
    activation: str
    pooling: str

    @classmethod
    def from_model(cls, model: Path, pooling: str) -> LabelRecipe:
        """Read config.json. ConfigError: it is damaged, or names an activation or a pooling that is not supported.

        `pooling`: that of the family, where config.json does not say one.

        Where nothing is said, one score goes through a sigmoid, as in rerankers, and several through a softmax.
        """
        path = model / "config.json"
        values = read_json(path)
        names = _names(path, values)
        sentence_transformers = values.get("sentence_transformers")
        said = sentence_transformers if isinstance(sentence_transformers, dict) else {}
        of_modules = read_optional_json(model / "config_sentence_transformers.json")  # of version 6
        if of_modules.get("model_type") != "CrossEncoder":
            of_modules = {}
        chosen = (
            of_modules.get("activation_fn")
            or said.get("activation_fn")
            or values.get("sbert_ce_default_activation_function")
        )
        problem = values.get("problem_type")
        if chosen is not None:
            activation = _OF_CLASSES.get(str(chosen).rpartition(".")[2])
        elif problem is not None:
            activation = _OF_PROBLEMS.get(problem) if isinstance(problem, str) else None
        else:
            activation = "sigmoid" if len(names) == 1 else "softmax"
        if activation is None:
            known = ", ".join((*_OF_PROBLEMS, *_OF_CLASSES))
            raise ConfigError(f"{path}: scores go through {short_repr(chosen or problem)}; supported are {known}")
        told = values.get("classifier_pooling") or pooling
        if told not in _POOLINGS:
            raise ConfigError(f"{path}: classifier_pooling is {short_repr(told)}; supported are {', '.join(_POOLINGS)}")
        return cls(names, activation, _POOLINGS[told])


def _names(path: Path, values: Mapping[str, Any]) -> tuple[str, ...]:
    given = values.get("id2label")
    if given is None:
        count = as_integer(f"{path}: num_labels", values.get("num_labels", 2), below=_MOST_LABELS)
        return tuple(f"LABEL_{i}" for i in range(count))  # as transformers calls them
    try:
        names = tuple(str(given[str(i)]) for i in range(len(given)))
    except (KeyError, TypeError):
        names = ()
    if not names:
        raise ConfigError(f'{path}: id2label must be an object from "0", "1", ... to labels, got {short_repr(given)}')
    return names
