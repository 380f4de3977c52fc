"""The methods of `LLM` that order documents by how well they answer a query."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from infinilm.calls import streams
from infinilm.calls.labels import LabelScorer
from infinilm.calls.vectors import VectorMaker
from infinilm.checkpoint.heads import activate
from infinilm.checks import as_integer
from infinilm.config.json.model_config import ModelConfig
from infinilm.errors import RequestError
from infinilm.outputs import Classification, RankedDocument, RequestOutput
from infinilm.pooling.labels import check_activation
from infinilm.pooling.recipe import text_rules
from infinilm.pooling.task import task_of
from infinilm.requests.prompts import PromptDict, RequestMaker
from infinilm.requests.request import GenerationRequest
from infinilm.requests.source import RequestSource
from infinilm.sampling_params import SamplingParams
from infinilm.serving.engine_thread import EngineThread
from infinilm.text.chat_template import ChatTemplate
from infinilm.text.tokenizer import Tokenizer

__all__ = ["RerankMethods", "ranked"]

# What Qwen3-Reranker was trained with, by its model card: https://huggingface.co/Qwen/Qwen3-Reranker-0.6B.
_JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the "
    'answer can only be "yes" or "no".'
)
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_PAIR_ROLES = (re.compile(r"[\"']query[\"']"), re.compile(r"[\"']document[\"']"))


class _YesNo:
    """Reads the logits of two tokens where the answer to a prompt begins, as its logits processor."""

    def __init__(self, yes: int, no: int | None) -> None:
        self._yes, self._no = yes, no
        self._difference = np.float32("nan")

    def __call__(self, _: npt.NDArray[np.int32], logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Keep their difference."""
        self._difference = np.float32(logits[self._yes] - (0 if self._no is None else logits[self._no]))
        return logits

    def score(self, activation: str | None) -> float:
        """What an activation makes of the difference; None: a sigmoid, the share of "yes" in a softmax over both."""
        return float(activate(np.array([self._difference], np.float32), activation or "sigmoid")[0])


class RerankMethods:
    """What `LLM` has for the order of documents."""

    config: ModelConfig
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    max_model_len: int
    _thread: EngineThread
    _requests: RequestMaker
    vectors: VectorMaker
    _labels: LabelScorer | None

    if TYPE_CHECKING:

        def classify(  # noqa: D102 (see `LabelMethods`)
            self,
            prompts: Sequence[PromptDict],
            *,
            activation: str | None = None,
            lora: str | None = None,
            use_tqdm: bool = True,
        ) -> list[Classification]: ...

        async def aclassify(  # noqa: D102
            self, prompts: Sequence[PromptDict], *, activation: str | None = None, lora: str | None = None
        ) -> list[Classification]: ...

    @property
    def task(self) -> str:
        """What the checkpoint is made for, by its class and its files: "generate", "embed", "classify" or "rerank"."""
        labels = None if self._labels is None else self._labels.recipe
        return task_of(self.config.head, labels, self.vectors.recipe, is_encoder=self.config.is_encoder)

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        instruction: str | None = None,
        top_n: int | None = None,
        activation: str | None = None,
        truncate: bool | int = False,
        lora: str | None = None,
        use_tqdm: bool = True,
    ) -> list[RankedDocument]:
        """Documents in the order in which they answer a query, the best first.

        A model of the class `...ForSequenceClassification` with one label gives its score. Any other is asked, in the
        words of Qwen3-Reranker, whether a document meets the query: the score is the probability of "yes" beside "no".
        Such a model should be trained for it. A score has the same bits alone and in any batch.

        Parameters
        ----------
        query
            A text.
        documents
            Texts, any number.
        instruction
            What is asked of a document, for models that read one. None: what the checkpoint says, else that of
            Qwen3-Reranker, for a web search.
        top_n
            How many of the best to return; None: all.
        activation
            What a score goes through, as in `classify`; "identity" leaves it as it is: of a model that writes, how much
            larger the logit of "yes" is than that of "no".
        truncate
            Leave out the end of a document where it is too long with what stands around it; True, or a number of
            tokens for all together. False: such a document is an error.
        lora, use_tqdm
            As in `embed`.

        Returns
        -------
        list[RankedDocument]
            By falling score; equal ones in the order of `documents`.

        Raises
        ------
        RequestError
            The model makes vectors or has several labels, a text is no str, empty, or too long, or there is no such
            activation; nothing has run then.

        Examples
        --------
        >>> best = llm.rerank("What do pandas eat?", ["Bamboo.", "Two wheels."])[0]  # doctest: +SKIP
        """
        check_activation(activation)
        pairs = self.read_pairs(query, documents, instruction=instruction, truncate=truncate)
        if self._labels is not None:
            results = self.classify(pairs, activation=activation, lora=lora, use_tqdm=use_tqdm)
            scores = [result.scores[0] for result in results]
        else:
            readers, source = self._questions(pairs, lora)
            _check(streams.finish(self, self._thread, source, use_tqdm=use_tqdm))
            scores = [reader.score(activation) for reader in readers]
        return ranked(scores, pairs, top_n)

    async def arerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        instruction: str | None = None,
        top_n: int | None = None,
        activation: str | None = None,
        truncate: bool | int = False,
        lora: str | None = None,
    ) -> list[RankedDocument]:
        """`rerank` for asyncio, without blocking the event loop. Cancelling the task cancels the requests."""
        import asyncio  # it takes a while, and most programs do without

        read = partial(self.read_pairs, query, documents, instruction=instruction, truncate=truncate)
        check_activation(activation)
        pairs = await asyncio.to_thread(read)
        return ranked(await self.ascore_pairs(pairs, activation=activation, lora=lora), pairs, top_n)

    async def ascore_pairs(
        self, pairs: Sequence[PromptDict], *, activation: str | None = None, lora: str | None = None
    ) -> list[float]:
        """Scores of what `read_pairs` gives, in its order: what servers need."""
        if self._labels is not None:
            return [result.scores[0] for result in await self.aclassify(pairs, activation=activation, lora=lora)]
        readers, source = self._questions(pairs, lora)
        _check(await streams.afinish(self, self._thread, source))
        return [reader.score(activation) for reader in readers]

    def read_pairs(
        self,
        query: str,
        documents: Sequence[str],
        *,
        instruction: str | None = None,
        truncate: bool | int = False,
    ) -> list[PromptDict]:
        """Prompts of a query with each document, checked and tokenised; arguments and errors are those of `rerank`."""
        if self.task == "classify" and self._labels is not None:
            raise RequestError(
                f"a reranker has one label, and this model has {len(self._labels.recipe.names)}: use classify()"
            )
        if self.task == "embed":
            raise RequestError("this checkpoint makes vectors and reads no pairs: use embed() and similarity()")
        if self._labels is None:
            self._yes_no()
        if isinstance(documents, (str, bytes)):
            raise RequestError("documents: expected a list of texts, got one text")
        documents = list(documents)
        texts = {"query": query} | {f"document {i}": text for i, text in enumerate(documents)}
        for name, text in texts.items():
            if not isinstance(text, str) or not text:
                raise RequestError(f"{name}: expected a text that is not empty, got {text!r:.80}")
        most = min(text_rules(truncate).max_tokens or self.max_model_len, self.max_model_len) - (self._labels is None)
        return [
            self._read_pair(query, document, f"document {i}", instruction, most, bool(truncate))
            for i, document in enumerate(documents)
        ]

    # ---- inside ----

    def _read_pair(
        self, query: str, document: str, name: str, instruction: str | None, most: int, truncate: bool
    ) -> PromptDict:
        source = self.chat_template.source_text(False)
        has_roles = all(role.search(source) for role in _PAIR_ROLES)
        tokenizer = self.tokenizer
        if self._labels is not None and not has_roles:
            if instruction is not None:
                raise RequestError("instruction: this model reads a query and a document alone; leave it out")
            ids = (
                tokenizer.encode_within([query, document], most) if truncate else tokenizer.encode_pair(query, document)
            )
            pair = self._checked(document, ids, name)
            if self.config.type_vocab_size > 1:
                pair["token_type_ids"] = tokenizer.pair_types(query, document, len(ids))
            return pair
        default = self.vectors.recipe.prompt(None)

        def render(text: str) -> list[int]:
            messages: list[dict[str, Any]]
            if has_roles:
                told = instruction or default
                messages = [{"role": "system", "content": told}] if told else []
                messages += [{"role": "query", "content": query}, {"role": "document", "content": text}]
                if "content[0]" in source:
                    messages = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
                options: dict[str, Any] = {}
            else:
                asked = f"<Instruct>: {instruction or default or _INSTRUCTION}\n<Query>: {query}\n<Document>: {text}"
                messages = [{"role": "system", "content": _JUDGE}, {"role": "user", "content": asked}]
                options = {"enable_thinking": False} if "enable_thinking" in source else {}
            prompt = self.chat_template.render(messages, add_generation_prompt=True, **options)
            return tokenizer.encode(prompt, add_special_tokens=False)

        ids = render(document)
        if truncate and len(ids) > most:
            ids = _cut_to(document, ids, most, render, name)
        return self._checked(document, ids, name)

    def _checked(self, document: str, ids: list[int], name: str) -> PromptDict:
        self._requests.check_ids(ids, name, room=int(self._labels is None))
        return {"prompt": document, "prompt_token_ids": ids}

    def _yes_no(self) -> tuple[int, int | None]:
        """The tokens that say whether a document fits. RequestError: the vocabulary does not have them."""
        yes_no = self.vectors.recipe.yes_no
        if yes_no is None:
            yes, no = map(self.tokenizer.token_to_id, ("yes", "no"))
            if yes is None or no is None:
                raise RequestError("the vocabulary has no tokens 'yes' and 'no', by which a model judges documents")
            yes_no = yes, no
        size = self.config.vocab_size
        if any(token is not None and token >= size for token in yes_no):
            raise RequestError(f"LogitScore names a token beyond the {size} of the vocabulary: {yes_no}")
        return yes_no

    def _questions(
        self, pairs: Sequence[PromptDict], lora: str | None
    ) -> tuple[list[_YesNo], RequestSource[GenerationRequest]]:
        """What reads the scores of pairs, and the requests that they read them from."""
        yes_no = self._yes_no()
        readers = [_YesNo(*yes_no) for _ in pairs]
        params = [
            SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logits_processor=reader)
            for reader in readers
        ]
        return readers, self._requests.source(pairs, params, {} if lora is None else {"lora": lora})


def _cut_to(document: str, ids: list[int], most: int, render: Callable[[str], list[int]], name: str) -> list[int]:
    """Token ids with as much of a document as fits; its length in characters is found by halving."""
    low, high = 0, len(document)
    best: list[int] = []
    while low < high:
        middle = (low + high + 1) // 2
        ids = render(document[:middle])
        if len(ids) <= most:
            low, best = middle, ids
        else:
            high = middle - 1
    if not best:
        raise RequestError(f"{name} cannot be cut: the query and what stands around it take {most} tokens and more")
    return best


def _check(outputs: list[RequestOutput]) -> None:
    """Raise the first failure."""
    for output in outputs:
        error = output.outputs[0].error
        if error is not None:
            raise error


def ranked(scores: Sequence[float], pairs: Sequence[PromptDict], top_n: int | None) -> list[RankedDocument]:
    """The best `top_n` documents of pairs that `read_pairs` gave; None: all."""
    if top_n is not None:
        as_integer("top_n", top_n, error=RequestError)
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    return [
        RankedDocument(i, scores[i], pairs[i]["prompt"], len(cast(list[int], pairs[i]["prompt_token_ids"])))
        for i in order[:top_n]
    ]
