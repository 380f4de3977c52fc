"""The methods of `LLM` for prompts without an answer: logits, log-probabilities and perplexity."""

from __future__ import annotations

import math
from typing import cast

import numpy as np
import numpy.typing as npt

from infinilm.calls.reduce import reduce_prompts
from infinilm.calls.streams import run_prompts
from infinilm.calls.windows import sliding_windows
from infinilm.checks import as_integer
from infinilm.config.json.model_config import ModelConfig
from infinilm.errors import RequestError
from infinilm.lora.adapters import Adapters
from infinilm.outputs import Score, perplexity_of
from infinilm.requests.prompts import Prompts, RequestMaker
from infinilm.requests.reducers import PromptLogprobs
from infinilm.requests.request import PromptRequest
from infinilm.requests.source import RequestSource
from infinilm.sampling_params import SamplingParams
from infinilm.scheduling.sequence import Sequence
from infinilm.serving.engine_thread import EngineThread
from infinilm.text.tokenizer import Tokenizer
from infinilm.token_ids import TokenIds, check_token_ids

__all__ = ["ScoreMethods"]

_GREEDY = SamplingParams(temperature=0.0)


class ScoreMethods:
    """What `LLM` has for prompts that are read and not continued."""

    config: ModelConfig
    tokenizer: Tokenizer
    max_model_len: int
    _thread: EngineThread
    _requests: RequestMaker
    _adapters: Adapters

    def forward(self, input_ids: TokenIds, *, lora: str | None = None) -> npt.NDArray[np.float32]:
        """Logits of every position of one prompt, float32 [num_tokens, vocab_size]; no cache is kept.

        Parameters
        ----------
        input_ids
            [num_tokens]: a list or array of token ids.
        lora
            The adapter that it runs through.

        Raises
        ------
        RequestError
            Ids that are empty, out of range, or more than `max_model_len`; or there is no such adapter.
        EngineDeadError
            The `LLM` is closed, or a rank has failed.
        """
        self._requests.check_writes()
        ids = self._requests.check_ids(input_ids, "input_ids", room=0)
        out = np.empty((len(ids), self.config.vocab_size), np.float32)

        def take(first: int, logits: npt.NDArray[np.float32]) -> None:
            out[first : first + len(logits)] = logits

        sequence = Sequence(ids, _GREEDY, seed=0, collect_logits=True, adapter=self._adapters.get(lora))
        run_prompts(self._thread, RequestSource(iter((PromptRequest(sequence, take),)), 1, 1))
        return out

    def score(
        self,
        prompts: Prompts,
        continuation: Prompts | None = None,
        *,
        top: int = 0,
        lora: str | None = None,
        use_tqdm: bool = True,
    ) -> list[Score]:
        """Log-probabilities of the tokens of given texts; they run as one batch.

        Parameters
        ----------
        prompts
            As in `generate`.
        continuation
            What may follow, as texts or token ids: any number for one prompt, such as the labels of a classification,
            or one for each prompt. The `total` and `perplexity` of a score are those of the continuation then. Texts
            are tokenised with their prompt, as they are in a longer text, and of several continuations of one prompt
            the same text counts, so that their totals can be compared.
        top
            How many of the most probable tokens to give at each place.
        lora
            The adapter that they run through.
        use_tqdm
            Show a progress bar on a terminal or in a notebook.

        Returns
        -------
        list[Score]
            One per prompt, or per continuation, in order.

        Raises
        ------
        RequestError
            A prompt that can never be served, or `top` out of range; nothing has run then. Or continuations that are
            empty, or as many as do not go with the prompts.

        Examples
        --------
        >>> scores = llm.score("The sky is", continuation=[" blue", " green"])  # doctest: +SKIP
        >>> [score.total for score in scores]  # doctest: +SKIP
        """
        self._requests.check_top("top", top)
        starts = None
        if continuation is not None:
            pairs = self._requests.read_pairs(prompts, continuation)
            prompts, starts = [pair for pair, _ in pairs], [start for _, start in pairs]
        reduced = reduce_prompts(
            self._thread,
            self._requests,
            prompts,
            lambda ids, _: PromptLogprobs(ids, top),
            lora=lora,
            description="scoring" if use_tqdm else "",
        )
        return [
            Score(
                text,
                ids.tolist(),
                score.logprobs,
                score.top(self.tokenizer or None) if top else None,
                start=1 if starts is None else starts[i],
            )
            for i, (text, ids, score) in enumerate(reduced)
        ]

    def perplexity(
        self,
        text: str | TokenIds,
        *,
        max_length: int | None = None,
        stride: int | None = None,
        lora: str | None = None,
        use_tqdm: bool = True,
    ) -> float:
        """Perplexity of a text of any length: exp of the mean negative log-probability of its tokens but the first.

        A text beyond `max_length` tokens is seen through windows that overlap, each token counting in the first window
        that has it, as https://huggingface.co/docs/transformers/perplexity describes.

        Parameters
        ----------
        text
            A text or token ids.
        max_length
            Tokens of a window, at least 2; default: `max_model_len`.
        stride
            Tokens from one window to the next, in [1, max_length); default: half of `max_length`. A smaller one shows
            each token more of the text before it, and takes more time.
        lora
            The adapter that the text runs through.
        use_tqdm
            Show a progress bar, of windows, on a terminal or in a notebook.

        Raises
        ------
        RequestError
            Fewer than two tokens, or a length or stride out of range.
        """
        length = self.max_model_len if max_length is None else max_length
        length = as_integer("max_length", length, least=2, error=RequestError)
        if length > self.max_model_len:
            raise RequestError(
                f"max_length is {length}, and the context holds {self.max_model_len}: raise max_model_len"
            )
        stride = as_integer("stride", length // 2 if stride is None else stride, error=RequestError)
        if stride >= length:
            raise RequestError(f"stride must be below max_length={length}, so that windows overlap; got {stride}")
        given = self.tokenizer.encode(text) if isinstance(text, str) else text
        ids = check_token_ids(given, "text", self.config.vocab_size, expected="a text or a flat list of token ids")
        if len(ids) < 2:
            raise RequestError("text: perplexity is that of tokens after others; expected at least two, got one")
        windows = list(sliding_windows(len(ids), length, stride))
        reduced = reduce_prompts(
            self._thread,
            self._requests,
            [ids[begin:end] for begin, end, _ in windows],
            lambda ids, _: PromptLogprobs(ids, 0),
            lora=lora,
            description="scoring" if use_tqdm else "",
        )
        logprobs = [
            cast(float, logprob)
            for (begin, _, counted), (_, _, score) in zip(windows, reduced, strict=True)
            for logprob in score.logprobs[counted - begin :]
        ]
        return perplexity_of(math.fsum(logprobs), len(logprobs))
