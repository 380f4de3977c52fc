"""The methods of `LLM` that make vectors of texts, and compare these."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from infinilm.calls.labels import LabelScorer
from infinilm.calls.reduce import areduce_prompts, reduce_prompts
from infinilm.checkpoint.heads import HostStep, read_vector_step
from infinilm.checks import as_boolean, as_integer
from infinilm.config.json.model_config import ModelConfig
from infinilm.errors import RequestError
from infinilm.logs import logger
from infinilm.pooling.recipe import POOLINGS, VectorRecipe, num_pooled
from infinilm.requests.prompts import Prompts, RequestMaker
from infinilm.requests.reducers import HiddenPool
from infinilm.serving.engine_thread import EngineThread

__all__ = ["VectorMaker", "VectorMethods"]

Float32Array = npt.NDArray[np.float32]


class VectorMaker:
    """What follows the pooling: the linears and norms of the checkpoint, a cut, a scaling.

    Parameters
    ----------
    model : Path
        The folder of a checkpoint, or a GGUF file.
    hidden_size : int

    Attributes
    ----------
    recipe : VectorRecipe

    Raises
    ------
    ConfigError, WeightError
        What the files say is not supported, or weights are missing.
    """

    def __init__(self, model: Path, hidden_size: int) -> None:
        self.recipe = VectorRecipe.from_model(model, hidden_size)
        self._steps: list[HostStep] = [read_vector_step(step) for step in self.recipe.steps]
        self._hidden_size = hidden_size
        self.size = self.recipe.size(hidden_size)
        self._told_sizes: set[int] = set()

    def check(self, pooling: str | None, normalize: bool | None, dimensions: int | None) -> str:
        """Check what a call asks for, and give its pooling."""
        if self.recipe.yes_no is not None:
            raise RequestError("this checkpoint is a reranker and makes no vectors: use rerank()")
        if pooling is not None and not (isinstance(pooling, str) and set(pooling.split("+")) <= set(POOLINGS)):
            raise RequestError(
                f"pooling: expected one of {', '.join(map(repr, POOLINGS))}, several joined by '+', or None, got "
                f"{pooling!r:.80}"
            )
        own, kind = self.recipe.pooling, pooling or self.recipe.pooling
        if self._steps and num_pooled(kind) != num_pooled(own):
            raise RequestError(
                f"pooling: the modules behind that of this checkpoint read what {own!r} gives, {num_pooled(own)} "
                f"joined; got {kind!r:.80}"
            )
        size = self.recipe.size(self._hidden_size, kind)
        if normalize is not None:
            as_boolean("normalize", normalize)
        if dimensions is not None and as_integer("dimensions", dimensions, error=RequestError) > size:
            raise RequestError(f"dimensions: expected at most {size}, the size of the vectors, got {dimensions}")
        known = (size, *self._told_sizes)
        if dimensions is not None and dimensions not in known and not self.recipe.has_dimension(dimensions):
            self._told_sizes.add(dimensions)
            logger.warning(
                "dimensions=%d: the checkpoint does not say that its vectors may be cut to this size%s; those of a "
                "model that was not trained for it lose much",
                dimensions,
                f", but to {', '.join(map(str, self.recipe.dimensions))}" if self.recipe.dimensions else "",
            )
        return kind

    def finish(self, pooled: Float32Array, normalize: bool | None, dimensions: int | None) -> Float32Array:
        """[num_texts, hidden_size] to [num_texts, `dimensions` or `size`]; each row depends on its own alone."""
        for step in self._steps:
            pooled = step(pooled)
        vectors = pooled[:, :dimensions]
        return unit_rows(vectors) if (self.recipe.normalize if normalize is None else normalize) else vectors


def unit_rows(vectors: Float32Array) -> Float32Array:
    """Rows scaled to length 1, computed in float64."""
    wide = vectors.astype(np.float64)
    lengths = np.sqrt((wide * wide).sum(1, keepdims=True))
    scaled: Float32Array = (wide / np.maximum(lengths, 1e-300)).astype(np.float32)
    return scaled


class VectorMethods:
    """What `LLM` has for vectors of texts."""

    config: ModelConfig
    _thread: EngineThread
    _requests: RequestMaker
    vectors: VectorMaker
    _labels: LabelScorer | None
    _has_all_stages: bool

    def embed(
        self,
        prompts: Prompts,
        pooling: str | None = None,
        *,
        normalize: bool | None = None,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncate: bool | int = False,
        lora: str | None = None,
        use_tqdm: bool = True,
    ) -> Float32Array:
        """Vectors of texts, from the hidden states after the final norm: float32 [num_prompts, size].

        What is left out is as the checkpoint says it in the files of sentence-transformers (modules.json and what that
        names), or a GGUF file in `pooling_type`. Where nothing is said, it is the mean of all tokens, scaled to length
        1. `infinilm info` tells. A vector has the same bits alone and in any batch.

        Parameters
        ----------
        prompts
            As in `generate`.
        pooling
            "mean" of all tokens, "cls" (the first token), "last" (token), "max" of each element, "weightedmean" (token
            i counts i times) or "mean_sqrt_len" (the sum divided by the root of the number of tokens).
        normalize
            Whether vectors are scaled to length 1.
        dimensions
            Elements that are kept, the first; they are scaled after the cut. A warning tells if the checkpoint does not
            say that it was trained for that.
        prompt_name
            Which of the prompts of the checkpoint stands before the texts, such as "query". Prompts of token ids get
            none.
        truncate
            Leave out the end of a text that is longer than the model takes, or than so many tokens; special tokens
            stay. False: such a text is an error.
        lora
            The adapter that they run through.
        use_tqdm
            Show a progress bar on a terminal or in a notebook.

        Raises
        ------
        RequestError
            A text is empty, a prompt can never be served, the model has a head of labels, or no meaning for an
            argument; nothing has run then.

        Examples
        --------
        >>> vectors = llm.embed(["a fox", "a hen"], prompt_name="document")  # doctest: +SKIP
        """
        kind = self.check_vectors(pooling, normalize, dimensions)
        reduced = reduce_prompts(
            self._thread,
            self._requests,
            prompts,
            lambda _, num_unpooled: HiddenPool(kind, num_unpooled),
            lora=lora,
            hidden=True,
            rules=self.vectors.recipe.rules(prompt_name, truncate),
            description="embedding" if use_tqdm else "",
        )
        return self.vectors.finish(self._pooled(reduced), normalize, dimensions)

    async def aembed(
        self,
        prompts: Prompts,
        pooling: str | None = None,
        *,
        normalize: bool | None = None,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncate: bool | int = False,
        lora: str | None = None,
    ) -> Float32Array:
        """`embed` for asyncio, without blocking the event loop. Cancelling the task cancels the prompts."""
        kind = self.check_vectors(pooling, normalize, dimensions)
        rules = self.vectors.recipe.rules(prompt_name, truncate)
        reduced = await areduce_prompts(
            self._thread,
            self._requests,
            prompts,
            lambda _, num_unpooled: HiddenPool(kind, num_unpooled),
            lora=lora,
            hidden=True,
            rules=rules,
        )
        return self.vectors.finish(self._pooled(reduced), normalize, dimensions)

    def similarity(self, a: npt.ArrayLike, b: npt.ArrayLike) -> Float32Array:
        """How alike vectors are, as the checkpoint compares them: float32 [len(a), len(b)].

        Parameters
        ----------
        a, b
            Vectors, [n, size], or one, [size]: what `embed` returns.

        Returns
        -------
        float32 array
            Cosines where the checkpoint says nothing; else as its config_sentence_transformers.json says: "cosine",
            "dot", "euclidean" or "manhattan". The last two give the negative distance: the larger, the more alike.

        Raises
        ------
        RequestError
            They are no vectors of one size.
        """
        left, right = (np.asarray(x, np.float64) for x in (a, b))
        left, right = (x[None] if x.ndim == 1 else x for x in (left, right))
        if left.ndim != 2 or right.ndim != 2 or left.shape[1] != right.shape[1]:
            raise RequestError(
                f"similarity compares vectors [n, size] of one size, got shapes {left.shape} and {right.shape}"
            )
        kind = self.vectors.recipe.similarity
        if kind == "cosine":
            left, right = (x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-300) for x in (left, right))
        if kind in ("cosine", "dot"):
            products: Float32Array = (left @ right.T).astype(np.float32)
            return products
        order = 1 if kind == "manhattan" else 2
        rows = [-np.linalg.norm(right - row, ord=order, axis=1) for row in left]
        return np.array(rows, np.float32).reshape(len(left), len(right))

    def check_vectors(self, pooling: str | None, normalize: bool | None, dimensions: int | None) -> str:
        """The pooling of a call. RequestError: the model makes no vectors, or none as asked for."""
        if self._labels is not None:
            use = "rerank()" if len(self._labels.recipe.names) == 1 else "classify()"
            raise RequestError(f"{self.config.architectures[0]} gives scores of labels and makes no vectors: use {use}")
        if not self._has_all_stages:  # the last one has what is pooled
            raise RequestError("embeddings need all stages of the model in one process")
        return self.vectors.check(pooling, normalize, dimensions)

    def _pooled(self, reduced: list[tuple[Any, Any, HiddenPool]]) -> Float32Array:
        pooled = [pool.vector() for _, _, pool in reduced]
        width = self.config.hidden_size * num_pooled(self.vectors.recipe.pooling)
        return np.concatenate(pooled).reshape(len(pooled), -1) if pooled else np.empty((0, width), np.float32)
