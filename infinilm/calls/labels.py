"""The methods of `LLM` that give scores of labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from infinilm.calls.reduce import areduce_prompts, reduce_prompts
from infinilm.checkpoint.heads import HostStep, activate, random_label_scores, read_label_scores
from infinilm.checkpoint.opening import open_checkpoint
from infinilm.config.families import family_of
from infinilm.config.json.model_config import ModelConfig
from infinilm.errors import RequestError
from infinilm.outputs import Classification
from infinilm.pooling.labels import LabelRecipe, check_activation
from infinilm.pooling.recipe import text_rules
from infinilm.requests.prompts import Prompts, RequestMaker
from infinilm.requests.reducers import HiddenPool
from infinilm.serving.engine_thread import EngineThread

__all__ = ["LabelMethods", "LabelScorer"]

Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class LabelScorer:
    """The head of labels: the scores of one token of a text.

    Attributes
    ----------
    steps : list of HostStep
        They make scores of a row that it reads of a text.
    pooling : str
        What that is: "last", or in encoders "cls", the first token, or the "mean" of all.
    """

    recipe: LabelRecipe
    steps: list[HostStep]
    pooling: str

    @classmethod
    def from_model(cls, model: Path, config: ModelConfig, seed: int | None = None) -> LabelScorer:
        """Read the labels and the head of a checkpoint, which is random if there is a `seed`.

        ConfigError, WeightError: the files do not have them.
        """
        family = family_of(config.architecture)
        recipe = LabelRecipe.from_model(model, family.label_head.pooling)
        if seed is not None:
            return cls(recipe, random_label_scores(family, len(recipe.names), config, seed), recipe.pooling)
        with open_checkpoint(model) as checkpoint:
            steps = read_label_scores(checkpoint, family, len(recipe.names), config)
        return cls(recipe, steps, recipe.pooling)

    def classify(
        self, states: Float32Array, nums_tokens: Sequence[int], activation: str | None
    ) -> list[Classification]:
        """Scores of texts, from the hidden states of the token of each that counts, [num_texts, hidden_size]."""
        for step in self.steps:
            states = step(states)
        scores = activate(states, activation or self.recipe.activation)
        return [
            Classification(tuple(row), self.recipe.names, count)
            for row, count in zip(scores.tolist(), nums_tokens, strict=True)
        ]


class LabelMethods:
    """What `LLM` has for labels of texts."""

    config: ModelConfig
    _thread: EngineThread
    _requests: RequestMaker
    _labels: LabelScorer | None
    _has_all_stages: bool

    def classify(
        self,
        prompts: Prompts,
        *,
        activation: str | None = None,
        truncate: bool | int = False,
        lora: str | None = None,
        use_tqdm: bool = True,
    ) -> list[Classification]:
        """Scores of the labels of texts, by a model of the class `...ForSequenceClassification`.

        Its head reads the last token of a text, or in encoders the first. A result has the same bits alone and in any
        batch.

        Parameters
        ----------
        prompts
            As in `generate`.
        activation
            What scores go through: "softmax" over all labels, "sigmoid", or "identity", the scores as they are. None:
            as config.json says; where it says nothing, sigmoid for one label and softmax for several.
        truncate, lora, use_tqdm
            As in `embed`.

        Returns
        -------
        list[Classification]
            One per prompt, in order.

        Raises
        ------
        RequestError
            The model has no labels, a text is empty, a prompt can never be served, or there is no such activation;
            nothing has run then.

        Examples
        --------
        >>> [result.label for result in llm.classify(["I like it", "no"])]  # doctest: +SKIP
        """
        labels = self.check_labels(activation)
        reduced = reduce_prompts(
            self._thread,
            self._requests,
            prompts,
            lambda *_: HiddenPool(labels.pooling),
            lora=lora,
            hidden=True,
            rules=text_rules(truncate),
            description="classifying" if use_tqdm else "",
        )
        return labels.classify(self._states(reduced), [len(ids) for _, ids, _ in reduced], activation)

    async def aclassify(
        self,
        prompts: Prompts,
        *,
        activation: str | None = None,
        truncate: bool | int = False,
        lora: str | None = None,
    ) -> list[Classification]:
        """`classify` for asyncio, without blocking the event loop. Cancelling the task cancels the prompts."""
        labels = self.check_labels(activation)
        rules = text_rules(truncate)
        reduced = await areduce_prompts(
            self._thread,
            self._requests,
            prompts,
            lambda *_: HiddenPool(labels.pooling),
            lora=lora,
            hidden=True,
            rules=rules,
        )
        return labels.classify(self._states(reduced), [len(ids) for _, ids, _ in reduced], activation)

    def check_labels(self, activation: str | None = None) -> LabelScorer:
        """The head of labels. RequestError: the model has none, or there is no such activation."""
        if self._labels is None:
            name = self.config.architectures[0]
            raise RequestError(
                f"{name} has no labels: classify() is for models of the class ...ForSequenceClassification"
            )
        if not self._has_all_stages:
            raise RequestError("labels need all stages of the model in one process")
        check_activation(activation)
        return self._labels

    def _states(self, reduced: list[tuple[Any, Any, HiddenPool]]) -> Float32Array:
        states = [pool.vector() for _, _, pool in reduced]
        return np.array(states, np.float32).reshape(-1, self.config.hidden_size)
