"""Turns the caller's texts, token ids and sampling parameters into checked requests."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set, Sized
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypedDict, cast

import numpy as np
import numpy.typing as npt

from infinilm.checks import as_integer
from infinilm.config.json.model_config import ModelConfig
from infinilm.errors import RequestError
from infinilm.images.opening import ImageArray
from infinilm.lora.adapters import Adapters
from infinilm.pooling.recipe import TextRules
from infinilm.receipts import Receipt
from infinilm.requests.beam_search import BeamSearch
from infinilm.requests.limits import RequestLimits
from infinilm.requests.logits import LogitsPipeline
from infinilm.requests.pictures import PictureReader, PlacedPrompt
from infinilm.requests.receipts import ReceiptMaker, Replay, replayed_params
from infinilm.requests.request import Completion, GenerationRequest
from infinilm.requests.source import RequestSource
from infinilm.sampling_params import SamplingParams, make_sampling_params
from infinilm.scheduling import sequence as seq
from infinilm.scheduling.given import GivenTokens
from infinilm.speculation.prediction import Prediction
from infinilm.text.answers import ChoiceMaker
from infinilm.text.chat_template import ChatTemplate
from infinilm.text.detokenize import OutputText
from infinilm.text.generation_config import GenerationConfig
from infinilm.text.grammars import Grammars
from infinilm.text.messages import take_pictures
from infinilm.text.tokenizer import Tokenizer
from infinilm.token_ids import TokenIds, check_token_ids, host_array

__all__ = ["Conversations", "Prompt", "PromptDict", "Prompts", "RequestMaker"]


class PromptDict(TypedDict, total=False):
    """A prompt as text, token ids, or both. With both, the ids are run, and the text appears in the result.

    `output_token_ids`: the beginning of the answer, from an engine that could not end it. With the same seed the rest
    is, bit for bit, what that engine would have said. Results hold all of the answer, events and deltas the rest.
    `token_type_ids`: of `prompt_token_ids`, for encoders that tell the texts of a pair apart by them.
    `num_unpooled_tokens`: how many of the first are left out of the pooling of a vector, as a prompt's tokens may be.
    `images`: pictures for models that see, one for each placeholder of the prompt, which for Qwen3-VL is written
    ``<|vision_start|><|image_pad|><|vision_end|>``. A picture is one of Pillow, an array of uint8 [height, width, 3],
    the bytes or the path of a file, or an address that begins with ``data:``.
    """

    prompt: str
    prompt_token_ids: TokenIds
    output_token_ids: TokenIds
    token_type_ids: TokenIds
    num_unpooled_tokens: int
    images: Sequence[Any]


Prompt = str | TokenIds | PromptDict
Prompts = Prompt | Iterable[Prompt]
"""One or several. An iterable without a length, such as a generator, is read as the engine has room for more."""
Conversations = Iterable[Mapping[str, Any]] | Iterable[Sequence[Mapping[str, Any]]]
PLAIN = TextRules(allow_empty=True)
Params = SamplingParams | Sequence[SamplingParams] | None
"""One for all prompts of a call, or one for each prompt; None: the model's defaults."""
MakeAnswer = Callable[[str], ChoiceMaker]
"""Makes of a rendered conversation what divides an answer to it into its parts."""


@dataclass(slots=True)
class _Draft:
    """A prompt that was read and checked, of which a request can be made."""

    prompt_index: int
    text: str | None
    ids: npt.NDArray[np.int32]  # [num_tokens]
    given: list[int]  # token ids of the beginning of its output
    params: SamplingParams
    prediction: Prediction | None  # that its completions share
    embedded: GivenTokens | None  # what stands in the places of its pictures
    expected: tuple[int, ...] | None = None  # the output, if it is replayed


class RequestMaker:
    """Makes requests, and checks all that can be checked before they run.

    Parameters
    ----------
    config : ModelConfig
    tokenizer : Tokenizer
    chat_template : ChatTemplate
    grammars : Grammars
        Compiles constraints.
    generation_config : GenerationConfig
        Defaults of requests without `SamplingParams`; keywords of the request take precedence.
    max_model_len : int
        Tokens of a sequence, prompt and output together.
    seed : int or None
        Makes requests without a seed of their own repeatable.
    limits : RequestLimits
    max_open : int
        Sequences that can run or wait at the same time.
    adapters : Adapters
        The LoRA adapters that requests can name.
    receipts : ReceiptMaker
        Makes the receipts of answers.
    pictures : PictureReader or str
        Puts pictures into prompts. A str says why this model reads none.

    Attributes
    ----------
    collects_hidden : bool
        Hidden states are a part of a step's work, and not all that comes of it, as in encoders.
    """

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate,
        grammars: Grammars,
        generation_config: GenerationConfig,
        max_model_len: int,
        seed: int | None,
        limits: RequestLimits,
        max_open: int,
        adapters: Adapters,
        receipts: ReceiptMaker,
        pictures: PictureReader | str,
    ) -> None:
        self._receipts = receipts
        self._config = config
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._grammars = grammars
        self._generation_config = generation_config
        self._max_model_len = max_model_len
        self._limits = limits
        self._max_open = max_open
        self.adapters = adapters
        self.pictures = pictures
        self.collects_hidden = not config.is_encoder
        self._seed = seed
        self._num_seeds = itertools.count()  # no lock: a child forked while it is held would wait for ever
        self._request_ids = itertools.count()

    def make(self, prompts: Prompts, params: Params, overrides: Mapping[str, Any]) -> list[GenerationRequest]:
        """Requests of a call, one per prompt, that run or wait at once.

        RequestError: one of them can never be served, or they are too many.
        """
        listed = list(itertools.islice(as_prompts(prompts), self._max_open + 1))
        self._check_number(len(listed))
        requests: list[GenerationRequest] = []
        count = 0
        for request in self.source(listed, params, overrides).requests:
            count += len(request.all_requests)
            self._check_number(count)
            requests.append(request)
        return requests

    def source(
        self,
        prompts: Prompts,
        params: Params,
        overrides: Mapping[str, Any],
        make_answer: MakeAnswer | None = None,
    ) -> RequestSource[GenerationRequest]:
        """The requests of a call, one per prompt.

        If `prompts` has a length, all are read and checked here, otherwise each when its request is made. Where they
        are conversations, `make_answer` makes of the text of a prompt what divides its answer.

        Raises
        ------
        RequestError
            A prompt can never be served.
        """
        self.check_writes()
        source = as_prompts(prompts)
        each: Iterable[SamplingParams]
        if params is None or isinstance(params, SamplingParams):
            base = self._generation_config.sampling_params if params is None else params
            one = make_sampling_params(base, overrides)
            self._check_params(one)
            each = itertools.repeat(one)
        elif not isinstance(params, (list, tuple)):
            raise TypeError(
                f"sampling_params: expected SamplingParams, a list of them, or None, got {type(params).__name__}; pass "
                "single settings as keywords, for example temperature=0"
            )
        else:
            source = list(source)  # there are as many as parameters
            if len(params) != len(source):
                raise RequestError(f"expected one SamplingParams, or one per prompt ({len(source)}), got {len(params)}")
            each = [make_sampling_params(p, overrides) for p in params]
            for one in {id(p): p for p in each}.values():
                self._check_params(one)
        has_max_length = self._generation_config.max_length is not None
        uses_max_length = has_max_length and params is None and "max_tokens" not in overrides
        drafts: Iterable[_Draft]
        pairs = enumerate(zip(source, each, strict=False))  # which may be endless
        drafts = (self._read_one(i, prompt, one, uses_max_length) for i, (prompt, one) in pairs)
        total = None
        if isinstance(source, list):
            drafts = list(drafts)
            total = sum(draft.params.n for draft in drafts)
        requests = (self._build(draft, make_answer) for draft in drafts)
        return RequestSource(requests, total, self.room(is_sized=total is not None))

    def replay(self, receipt: Receipt, pictures: Mapping[str, ImageArray]) -> GenerationRequest:
        """The request that computes the answer of a receipt once more; `pictures`: by their `hash_of_pixels`.

        ReceiptError, RequestError: there cannot have been such a request, or this engine cannot run it.
        """
        params = replayed_params(receipt, self._receipts.adapter_of(receipt))
        self._check_params(params)
        prompt: PromptDict = {
            "prompt_token_ids": self._place_again(receipt, pictures),
            "output_token_ids": list(receipt.token_ids[: receipt.num_given]),
        }
        draft = self._read_one(0, prompt, params, False)
        draft.expected = receipt.token_ids
        return self._build(draft, None)

    def _place_again(self, receipt: Receipt, pictures: Mapping[str, ImageArray]) -> list[int]:
        """The prompt of a receipt, with its pictures. RequestError: one is missing, or is prepared otherwise here."""
        if not receipt.images:
            return list(receipt.prompt_token_ids)
        if isinstance(self.pictures, str):
            raise RequestError(f"this model reads no pictures: {self.pictures}")
        for i, image in enumerate(receipt.images):
            if image["sha256"] not in pictures:
                raise RequestError(
                    f"picture {i} of its prompt is missing, whose pixels have the SHA-256 {image['sha256']}: pass it "
                    "(images=, --image)"
                )
        self._check_length(len(receipt.prompt_token_ids), "the prompt", "the receipt", 1)
        found = [pictures[image["sha256"]] for image in receipt.images]
        return self.pictures.place_again(receipt.prompt_token_ids, found, receipt.images, "the prompt")

    def fork(
        self, completion: Completion, prompt: str | None, num_tokens: int | None, overrides: Mapping[str, Any]
    ) -> GenerationRequest:
        """A request whose output begins with tokens of another one.

        Parameters
        ----------
        completion : Completion
            The other one, which may be running.
        prompt : str or None
            The text of its prompt.
        num_tokens : int or None
            Tokens of its output to begin with; None: all so far.
        overrides : mapping of str to object
            Changes to its parameters.

        Raises
        ------
        RequestError
            There are not so many tokens, or they end the output.
        """
        sequence = completion.sequence
        output = sequence.output_token_ids.copy()  # the engine thread adds to it meanwhile
        if num_tokens is None:
            num_tokens = len(output)
        elif not 0 <= as_integer("num_tokens", num_tokens, least=0) <= len(output):
            raise RequestError(f"num_tokens: expected 0 to {len(output)}, the tokens of the output, got {num_tokens}")
        params = make_sampling_params(sequence.params, {"n": 1, "seed": None, **overrides})
        self._check_params(params)
        given = self._read_given(output[:num_tokens], "fork", params)
        prediction = self._read_prediction(params.prediction)
        return self._build(
            _Draft(0, prompt, sequence.prompt_token_ids, given, params, prediction, sequence.given), None
        )

    def room(self, *, is_sized: bool) -> int:
        """Sequences that one call may have open; where prompts are read one by one, enough to keep the engine busy."""
        if is_sized:
            return self._max_open
        return min(self._max_open, 4 * (self._max_open - self._limits.max_queued_seqs))

    def read(
        self, prompt: Prompt, name: str, room: int, rules: TextRules = PLAIN, *, takes_pictures: bool = False
    ) -> tuple[str | None, npt.NDArray[np.int32]]:
        """Text (or None) and token ids [num_tokens] of a prompt; `room` tokens must be left for the output.

        `rules`: what becomes of the text, and how many tokens it may have. RequestError: see `check_ids`.
        """
        text, ids = _text_and_ids(prompt, name)
        if not takes_pictures and _embedded_in(prompt) is not None:
            raise RequestError(f"{name}: prompts with pictures are answered, and nothing else is made of them")
        most = min(rules.max_tokens or self._max_model_len, self._max_model_len)
        if text is not None and ids is None:
            text = rules.apply(text, name)
            if rules.truncate:
                ids = self._tokenizer.encode_within([text], most)
            else:
                ids = self._encode(text, name, room, add_special_tokens=True)
        elif rules.truncate and isinstance(cut := host_array(ids), (list, np.ndarray)):
            ids = cut[:most]
        array = self.check_ids(ids, name, room, expected="a text or a flat list of token ids", most=most)
        return text, array

    def read_types(self, prompt: Prompt, ids: npt.NDArray[np.int32], name: str) -> npt.NDArray[np.int32] | None:
        """Types of the tokens of a prompt; None: all are 0. RequestError: the model has not so many."""
        given = prompt.get("token_type_ids") if isinstance(prompt, Mapping) else None
        if given is None:
            return None
        count = self._config.type_vocab_size
        if not count:
            raise RequestError(f"{name}: token_type_ids: tokens of this model have no types")
        types = check_token_ids(given, f"{name}: token_type_ids", count, expected="a flat list of types")
        if types.size != ids.size:
            raise RequestError(f"{name}: token_type_ids: expected {ids.size}, as token ids, got {types.size}")
        return types

    def read_unpooled(self, prompt: Prompt, ids: npt.NDArray[np.int32], name: str, rules: TextRules) -> int:
        """How many of the first tokens are left out of a pooling: what the prompt says, or those of the rules' prefix.

        RequestError: no token is left.
        """
        given = prompt.get("num_unpooled_tokens") if isinstance(prompt, Mapping) else None
        count = 0
        if given is not None:
            count = as_integer(f"{name}: num_unpooled_tokens", given, least=0, error=RequestError)
        elif not rules.pools_prefix and _text_and_ids(prompt, name)[1] is None:
            count = self._tokenizer.num_prefix_tokens(rules.prefix)
        if count >= len(ids):
            raise RequestError(
                f"{name}: {count} tokens of its prompt are left out of the pooling, and the text has {len(ids)} in "
                "all: give one that goes on behind its prompt"
            )
        return count

    def check_writes(self) -> None:
        """RequestError: the model has no lm_head, so that no text and no log-probability can come of it."""
        is_encoder = self._config.is_encoder
        if self._config.head != "lm_head" or is_encoder:
            reason = "is an encoder, whose tokens see those behind them," if is_encoder else "has no lm_head"
            makes = "labels: use classify() or rerank()" if self._config.head == "score" else "vectors: use embed()"
            raise RequestError(f"prompt: {self._config.architectures[0]} {reason} and writes no text; it makes {makes}")

    def read_pairs(self, prompts: Prompts, continuations: Prompts) -> list[tuple[PromptDict, int]]:
        """Prompts with continuations behind them, and which of their tokens is the first that counts.

        One prompt goes with each continuation, one continuation with each prompt, or else they are pairs.

        Where both are texts the whole is tokenised at once, as it is tokenised in a longer text, so that tokens may
        reach across the border. What counts begins with the first token that is not as in the prompt alone. Where
        one prompt has several continuations, the first of these places is that of all: their log-probabilities are of
        the same text behind the same tokens, and can be compared.

        Raises
        ------
        RequestError
            Numbers that do not go together; an empty continuation; no token of the prompt is left before it.
        """
        befores, behinds = list(as_prompts(prompts)), list(as_prompts(continuations))
        if len(befores) != len(behinds) and 1 not in (len(befores), len(behinds)):
            raise RequestError(
                f"continuation: expected one, or one per prompt ({len(befores)}), got {len(behinds)}; one prompt takes "
                "any number"
            )
        count = max(len(befores), len(behinds)) if befores and behinds else 0
        pairs = [
            self._read_pair(befores[i if len(befores) > 1 else 0], behinds[i if len(behinds) > 1 else 0], i)
            for i in range(count)
        ]
        if len(befores) == 1 and pairs:
            start = min(start for _, start in pairs)
            pairs = [(pair, start) for pair, _ in pairs]
        for i, (_, start) in enumerate(pairs):
            if start == 0:
                raise RequestError(
                    f"continuation {i}: no token of the prompt is left as it is, so nothing stands before what is "
                    "scored: give the prompt another beginning, such as the BOS token"
                )
        return pairs

    def _read_pair(self, prompt: Prompt, continuation: Prompt, index: int) -> tuple[PromptDict, int]:
        text, before = self.read(prompt, f"prompt {index}", room=0)
        name = f"continuation {index}"
        more, ids = _text_and_ids(continuation, name)
        if more is not None and ids is None and text is not None:
            if not more:
                raise RequestError(f"{name} is empty: there is nothing to score")
            whole = np.array(self._encode(text + more, name, 0, add_special_tokens=True), np.int32)
            size = min(len(before), len(whole))
            differ = np.flatnonzero(before[:size] != whole[:size])
            return {"prompt": text + more, "prompt_token_ids": whole}, int(differ[0]) if differ.size else size
        if more is not None and ids is None:
            ids = self._encode(more, name, 0, add_special_tokens=False)
        behind = self.check_ids(ids, name, room=0, expected="a text or a flat list of token ids")
        return {"prompt_token_ids": np.concatenate([before, behind])}, len(before)

    def of_chats(
        self,
        messages: Conversations,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        template_kwargs: Mapping[str, Any] | None,
    ) -> Iterable[PromptDict]:
        """Prompts of one conversation or several, text and token ids; see `ChatTemplate.render`.

        Where `messages` has no length, each prompt is made when it is read.
        """
        options = {
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            **(template_kwargs or {}),
        }

        def prompt_of(conversation: Any) -> PromptDict:
            if not self._chat_template:
                self.check_writes()  # a template would not help
            conversation, pictures = self.take_pictures(conversation)
            text = self._chat_template.render(conversation, **options)
            # The template writes the special tokens itself.
            ids = self._encode(text, "the prompt", 1, add_special_tokens=False)
            made: PromptDict = {"prompt": text, "prompt_token_ids": ids}
            return {**made, "images": pictures} if pictures else made

        if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Iterable):
            return [prompt_of(messages)]  # which says what it should be
        each: Iterator[Any] = iter(messages)
        first = next(each, None)
        if first is None or isinstance(first, (str, Mapping)):  # the messages of one conversation
            return [prompt_of([] if first is None else [first, *each])]

        def prompt_of_one(index: int, conversation: Any) -> PromptDict:
            try:  # tables of pandas have arrays of messages
                return prompt_of(conversation.tolist() if isinstance(conversation, np.ndarray) else conversation)
            except RequestError as error:
                raise RequestError(f"conversation {index}: {error}") from error

        prompts = itertools.starmap(prompt_of_one, enumerate(itertools.chain([first], each)))
        return list(prompts) if isinstance(messages, Sized) else prompts

    def check_ids(
        self,
        ids: TokenIds | None,
        name: str,
        room: int,
        *,
        expected: str = "a flat list of token ids",
        most: int | None = None,
    ) -> npt.NDArray[np.int32]:
        """Token ids as an array, or a RequestError; `room` tokens must be left for the output, `most` may there be."""
        array = check_token_ids(ids, name, self._config.vocab_size, expected=expected)
        self._check_length(array.size, f"{array.size}", name, room)
        if most is not None and array.size > most:
            raise RequestError(
                f"{name} has {array.size} tokens; {most} may there be: shorten it, or pass truncate=True"
            )
        return array

    def _encode(self, text: str, name: str, room: int, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text; RequestError, before it is tokenised, if it cannot fit the context."""
        least = self._tokenizer.least_tokens(text)
        self._check_length(least, f"at least {least}", name, room)
        return self._tokenizer.encode(text, add_special_tokens)

    def _check_length(self, num_tokens: int, shown: str, name: str, room: int) -> None:
        if num_tokens + room > self._max_model_len:
            raise RequestError(
                f"{name} has {shown} tokens; the context holds {self._max_model_len}"
                f"{' and one must be left for the answer' if room else ''}: shorten it, or raise max_model_len "
                f"(the model was made for {self._config.max_position_embeddings} positions)"
            )

    def _read_one(self, prompt_index: int, prompt: Prompt, params: SamplingParams, uses_max_length: bool) -> _Draft:
        name = f"prompt {prompt_index}"
        given: list[int] = []
        if isinstance(prompt, Mapping) and "output_token_ids" in prompt:
            given = self._read_given(prompt["output_token_ids"], f"{name}: output_token_ids", params)
            prompt = cast(PromptDict, {key: value for key, value in prompt.items() if key != "output_token_ids"})
        pictures: Any = prompt.get("images") if isinstance(prompt, Mapping) else None
        if isinstance(prompt, Mapping) and "images" in prompt:
            prompt = cast(PromptDict, {key: value for key, value in prompt.items() if key != "images"})
        embedded = _embedded_in(prompt)
        text, ids = self.read(prompt, name, room=1, takes_pictures=True)
        if pictures is not None and embedded is None:
            placed = self.place(ids, pictures, name)
            if isinstance(placed, PlacedPrompt):
                ids, embedded = np.array(placed, np.int32), placed.embedded
        if uses_max_length and params.max_tokens is None:
            params = replace(params, max_tokens=self._generation_config.new_token_limit(len(ids), name))
        return _Draft(prompt_index, text, ids, given, params, self._read_prediction(params.prediction), embedded)

    def take_pictures(self, messages: Any) -> tuple[Any, list[Any]]:
        """Take the pictures out of a conversation; see `messages.take_pictures`. RequestError: the model reads none."""
        placeholder = "" if isinstance(self.pictures, str) else self.pictures.placeholder
        messages, pictures = take_pictures(messages, placeholder)
        if pictures and isinstance(self.pictures, str):
            raise RequestError(f"messages: this model reads no pictures: {self.pictures}")
        return messages, pictures

    def place(self, ids: TokenIds, pictures: Any, name: str) -> list[int]:
        """Token ids of a prompt with its pictures, if there are any. RequestError: see `PictureReader.place`."""
        if isinstance(pictures, (str, bytes, Mapping)) or not isinstance(pictures, Sequence):
            raise RequestError(f"{name}: images: expected a list of pictures, got {type(pictures).__name__}")
        array = self.check_ids(ids, name, room=1)
        if not pictures:
            return list(array.tolist())
        if isinstance(self.pictures, str):
            raise RequestError(f"{name}: images: this model reads no pictures: {self.pictures}")
        return self.pictures.place(array, pictures, name, lambda count: self._check_length(count, f"{count}", name, 1))

    def _build(self, draft: _Draft, make_answer: MakeAnswer | None) -> GenerationRequest:
        ids, params = draft.ids, draft.params
        room = self._max_model_len - len(ids)
        eos_token_ids = self._tokenizer.eos_token_ids
        seed = params.seed if params.seed is not None else self._new_seed()
        adapter = self.adapters.get(params.lora)
        request_id = str(next(self._request_ids))
        make_text: Callable[[], OutputText | None]
        make_text = partial(OutputText, self._tokenizer, params) if self._tokenizer.available else _no_text
        receipt_model = (
            self._receipts.prepare(params.lora, sees=draft.embedded is not None)
            if params.return_receipt and draft.expected is None
            else None
        )
        kind = Completion if draft.expected is None else partial(Replay, draft.expected)
        completions = [
            kind(
                request_id,
                draft.prompt_index,
                index,
                seq.Sequence(
                    ids,
                    params,
                    seed=(seed + index) % 2**64,
                    adapter=adapter,
                    prediction=draft.prediction,
                    given=draft.embedded,
                ),
                make_text,
                LogitsPipeline(params, ids, eos_token_ids, self._config.vocab_size),
                eos_token_ids,
                room if params.max_tokens is None else min(params.max_tokens, room),
                self._tokenizer if self._tokenizer.available else None,
            )
            for index in range(params.n)
        ]
        if make_answer is not None:
            for completion in completions:
                completion.make_answer = partial(make_answer, draft.text or "")
        if receipt_model is not None:
            for completion in completions:
                completion.make_receipt = partial(self._receipts.receipt, model=receipt_model)
        matcher = None
        if params.constraint is not None:
            matcher = self._grammars.matcher(params.constraint, self._limits.max_seconds)
        search = None if params.beam_width is None else BeamSearch(completions)
        request = GenerationRequest(request_id, draft.text, completions, matcher, search)
        if draft.given:
            completions[0].continue_from(draft.given)
        return request

    def _read_prediction(self, given: str | Sequence[int] | None) -> Prediction | None:
        """The prediction of an answer. RequestError: no context holds so many tokens, or one is out of range."""
        if given is None:
            return None
        if isinstance(given, str):
            given = self._encode(given, "prediction", 0, add_special_tokens=False)
        return Prediction(self.check_ids(given, "prediction", 0).tolist())

    def _read_given(self, ids: TokenIds, name: str, params: SamplingParams) -> list[int]:
        """Token ids of an answer's beginning, checked."""
        if params.n != 1:
            raise RequestError(f"{name} needs n=1, got {params.n}: they are of one answer")
        if params.beam_width is not None:
            raise RequestError(f"{name}: a beam search begins behind a prompt: leave out beam_width")
        given: list[int] = check_token_ids(ids, name, self._config.vocab_size, allow_empty=True).tolist()
        return given

    def _check_params(self, params: SamplingParams) -> None:
        """Check what `SamplingParams` cannot check without the model and the limits."""
        self._limits.check(params)
        if params.return_receipt:
            self._receipts.check(params)
        self._check_number(params.n + (params.prompt_logprobs is not None) + (params.beam_width is not None))
        if params.stop and not self._tokenizer.available:
            raise RequestError("stop strings need a tokenizer, and this model folder has none; use stop_token_ids")
        vocab_size = self._config.vocab_size
        for name in ("allowed_token_ids", "logit_bias", "stop_token_ids"):
            for token_id in getattr(params, name) or ():
                if token_id >= vocab_size:
                    raise RequestError(
                        f"{name}: token id {token_id} is out of range; the vocabulary has ids 0..{vocab_size - 1}"
                    )
        for name in ("logprobs", "prompt_logprobs"):
            self.check_top(name, getattr(params, name) or 0)

    def check_top(self, name: str, count: Any) -> None:
        """RequestError unless `count` most probable tokens can be given."""
        vocab_size = self._config.vocab_size
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= vocab_size:
            raise RequestError(f"{name} must be an int in 0..{vocab_size}, the size of the vocabulary; got {count!r}")
        self._limits.check_top(name, count)

    def _check_number(self, num_sequences: int) -> None:
        """RequestError if a call asks for too many sequences; called before they are made, which takes memory."""
        if num_sequences > self._max_open:
            raise RequestError(
                f"the call asks for {num_sequences} sequences at once, and {self._max_open} can run and wait: make "
                "several calls, or raise limits.max_queued_seqs"
            )

    def _new_seed(self) -> int:
        if self._seed is None:
            return secrets.randbits(64)
        sequence = np.random.SeedSequence((self._seed, next(self._num_seeds)))
        return int(sequence.generate_state(1, np.uint64)[0])


_KEYS = ("prompt", "prompt_token_ids", "token_type_ids", "num_unpooled_tokens")  # of a dict that is no request to write


def _text_and_ids(prompt: Prompt, name: str) -> tuple[str | None, TokenIds | None]:
    """Text and token ids of a prompt; one of them may be None."""
    if isinstance(prompt, str):
        return prompt, None
    if not isinstance(prompt, Mapping):
        return None, prompt
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    unknown = [key for key in prompt if key not in _KEYS]
    if unknown or (text is None and ids is None):
        got = f"the key {unknown[0]!r}" if unknown else "neither"
        raise RequestError(
            f"{name}: a dict has 'prompt' (text), 'prompt_token_ids' or both, and to be generated from also 'images', "
            f"and 'output_token_ids', the beginning of the answer; got {got}"
        )
    if not isinstance(text, (str, type(None))):
        raise RequestError(f"{name}: 'prompt' must be a str, got {type(text).__name__}")
    return text, ids


def _embedded_in(prompt: Prompt) -> GivenTokens | None:
    """What a prompt has in the places of its pictures, if these were put there before."""
    ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else prompt
    return ids.embedded if isinstance(ids, PlacedPrompt) else None


def _no_text() -> None:
    """Stands for `make_text` in a model without a tokenizer."""


def as_prompts(prompts: Prompts) -> list[Prompt] | Iterator[Prompt]:
    """One prompt or several: a list, or an iterator where they have no length. TypeError: neither."""
    if isinstance(prompts, (str, Mapping)):
        return [cast(Prompt, prompts)]
    if isinstance(prompts, (bytes, bytearray, Set)):  # a set has no order
        raise TypeError(_EXPECTED.format(type(prompts).__name__))
    given: Any = host_array(prompts)
    if isinstance(given, np.ndarray) and given.ndim == 1 and given.dtype.kind in "iu" and given.size:
        return [given]
    if not isinstance(given, Iterable):
        raise TypeError(_EXPECTED.format(type(prompts).__name__))
    if not isinstance(given, Sized):
        each = iter(given)
        first = next(each, None)
        if isinstance(first, (int, np.integer)):  # the ids of one prompt
            return [[int(first), *cast(Iterator[int], each)]]
        return iter(()) if first is None else itertools.chain([first], each)
    listed: list[Any] = list(given)
    if listed and all(isinstance(p, (int, np.integer)) for p in listed):
        return [prompts if type(prompts) is PlacedPrompt else listed]
    return listed


_EXPECTED = "prompts: expected a text, token ids, or an iterable of either, got {}"
