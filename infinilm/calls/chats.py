"""The methods of `LLM` for conversations: the chat template makes prompts of them, the rest is as for any prompt."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from infinilm.calls import streams
from infinilm.errors import RequestError
from infinilm.logs import logger
from infinilm.outputs import RequestOutput, TokenEvent
from infinilm.requests.prompts import Conversations, Params, RequestMaker
from infinilm.requests.request import GenerationRequest
from infinilm.requests.source import RequestSource
from infinilm.sampling_params import SAMPLING, SamplingKeywords, check_keywords
from infinilm.serving.engine_thread import EngineThread
from infinilm.signatures import name_keywords
from infinilm.text.answers import AnswerFormat, ChoiceMaker
from infinilm.text.chat_template import ChatTemplate
from infinilm.text.tokenizer import Tokenizer
from infinilm.token_ids import TokenIds

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["ChatMethods"]


class ChatMethods:
    """The calls of `LLM` for conversations, made of those for prompts."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate
    _requests: RequestMaker
    _thread: EngineThread
    _told_of_calls = False

    def chat(
        self,
        messages: Conversations,
        sampling_params: Params = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        reasoning_effort: str | None = None,
        use_tqdm: bool = True,
        **sampling: Unpack[SamplingKeywords],
    ) -> list[RequestOutput]:
        """Answer one conversation or several; the model's chat template turns each into a prompt.

        Parameters
        ----------
        messages
            A list of ``{"role": ..., "content": ...}``, or any number of such lists: a list of them, a column of a
            table, a generator; see `ChatTemplate.render`. The `prompt` of an output is the text that the template made.
        sampling_params, use_tqdm, **sampling
            As in `generate`.
        tools
            JSON schemas of functions that the model may call.
        add_generation_prompt
            End with the beginning of the assistant's answer.
        continue_final_message
            The model goes on with the last message, a text of the assistant, instead of beginning an answer.
        chat_template_kwargs
            More variables for the template, for example ``{"enable_thinking": False}``.
        reasoning_effort
            How much the model reasons before it answers, in the variable that its template reads: "none", "minimal",
            "low", "medium", "high", "xhigh" or "max". Where the template has a switch alone, "none" switches reasoning
            off, and all others on. None: as the template has it.

        Returns
        -------
        list[RequestOutput]
            One per conversation. Its completions have `reasoning`, `content` and `tool_calls` besides the whole `text`.

        Raises
        ------
        RequestError
            As in `generate`, for conversations that are malformed or that the template refuses, and for a
            `reasoning_effort` that the model does not know, with the levels that it knows.
        ConfigError
            The model has no chat template.

        Examples
        --------
        >>> messages = [{"role": "user", "content": "Tell me a story."}]
        >>> answer = llm.chat(messages, temperature=0)[0].outputs[0]  # doctest: +SKIP
        >>> messages += [{"role": "assistant", "content": answer.content}]  # doctest: +SKIP
        """
        source = self._chat_source(
            messages,
            sampling_params,
            tools,
            add_generation_prompt,
            continue_final_message,
            chat_template_kwargs,
            reasoning_effort,
            sampling,
        )
        return streams.finish(self, self._thread, source, use_tqdm=use_tqdm)

    def stream_chat(
        self,
        messages: Conversations,
        sampling_params: Params = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        reasoning_effort: str | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> Iterator[TokenEvent]:
        """`chat` token by token, see `stream`.

        An event has the new text whole, and what is certain now of its parts apart: `reasoning`, `content` and
        `tool_calls`, and in their order `piece.parts`. Joined, they are those of `chat`.

        Examples
        --------
        >>> for event in llm.stream_chat(messages, tools=tools):  # doctest: +SKIP
        ...     print(event.content, end="", flush=True)
        ...     for call in event.tool_calls:
        ...         print(call["index"], call["function"])
        """
        source = self._chat_source(
            messages,
            sampling_params,
            tools,
            add_generation_prompt,
            continue_final_message,
            chat_template_kwargs,
            reasoning_effort,
            sampling,
        )
        return streams.stream(self, self._thread, source)

    async def achat(
        self,
        messages: Conversations,
        sampling_params: Params = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        reasoning_effort: str | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> list[RequestOutput]:
        """`chat` for asyncio, see `agenerate`."""
        source = self._chat_source(
            messages,
            sampling_params,
            tools,
            add_generation_prompt,
            continue_final_message,
            chat_template_kwargs,
            reasoning_effort,
            sampling,
        )
        return await streams.afinish(self, self._thread, source)

    def astream_chat(
        self,
        messages: Conversations,
        sampling_params: Params = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        reasoning_effort: str | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> AsyncIterator[TokenEvent]:
        """`chat` token by token for asyncio, see `stream_chat` and `astream`."""
        source = self._chat_source(
            messages,
            sampling_params,
            tools,
            add_generation_prompt,
            continue_final_message,
            chat_template_kwargs,
            reasoning_effort,
            sampling,
        )
        return streams.astream(self, self._thread, source)

    def chat_parser(self, prompt: str, tools: Sequence[Mapping[str, Any]] | None = None) -> ChoiceMaker:
        """Make what divides one answer to a rendered conversation into reasoning, content and tool calls.

        Its ``push(text, final=False)`` takes the text in pieces of any sizes, such as those of `stream_chat`, and
        returns what is certain now, with `reasoning`, `content` and `tool_calls`. Where reasoning or calls are marked
        by special tokens, as those of gpt-oss and Mistral are, `chat` and its siblings keep these in the text.

        Parameters
        ----------
        prompt
            The text that the chat template made, which may end inside the reasoning.
        tools
            As in `chat`.
        """
        form = self._answer_format(tools)
        return form.maker(prompt, tools or (), form.hidden(self.tokenizer))

    def _answer_format(self, tools: Sequence[Mapping[str, Any]] | None) -> AnswerFormat:
        """How answers are written; that calls would be content is told once."""
        form = AnswerFormat.of(self.chat_template.source_text(bool(tools)), has_tools=bool(tools))
        if tools and form.calls is None and not self._told_of_calls:
            self._told_of_calls = True
            logger.warning(
                "tools: the chat template of %s (of the format %s) teaches no way to call them that is known here: "
                "calls stay in the content as the model writes them; to read them, pass a chat_template of a format "
                "that docs/chat-formats.md lists",
                self.chat_template.source,
                form.chat.name,
            )
        return form

    def _chat_source(
        self,
        messages: Conversations,
        sampling_params: Params,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        chat_template_kwargs: Mapping[str, Any] | None,
        reasoning_effort: str | None,
        sampling: SamplingKeywords,
    ) -> RequestSource[GenerationRequest]:
        """The requests of conversations, whose texts have the special tokens that their parts are found by."""
        check_keywords(sampling, "chat()", _CHAT_KEYWORDS)
        kwargs = dict(chat_template_kwargs or {})
        if reasoning_effort is not None:
            try:
                kwargs = self.chat_template.thinking(bool(tools)).at(reasoning_effort) | kwargs
            except RequestError as error:
                raise RequestError(f"reasoning_effort: {error}") from None
        prompts = self._requests.of_chats(messages, tools, add_generation_prompt, continue_final_message, kwargs)
        form = self._answer_format(tools)
        if form.needs_special_tokens(self.tokenizer):
            sampling.setdefault("skip_special_tokens", False)
        make_answer = partial(form.maker, tools=tools or (), hidden=form.hidden(self.tokenizer))
        return self._requests.source(prompts, sampling_params, sampling, make_answer)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> list[int]:
        """Token ids of a conversation under the chat template, which are a prompt for `generate`, `submit` and others.

        Special tokens come from the template alone. The text is that of `chat_template.render`; `kwargs` are more
        variables of the template. Where there are pictures, the list has what stands in their places, too.
        """
        if not self.chat_template:
            self._requests.check_writes()  # else a template is what is missing
        messages, pictures = self.take_images(messages)
        ids = self.chat_template.encode(
            self.tokenizer, messages, tools=tools, add_generation_prompt=add_generation_prompt, **kwargs
        )
        return self.place_images(ids, pictures) if pictures else ids

    @property
    def reads_images(self) -> bool:
        """Whether the model reads pictures; where it does not, an error at the first of them says why."""
        return not isinstance(self._requests.pictures, str)

    def take_images(self, messages: Any) -> tuple[Any, list[Any]]:
        """Take the pictures out of a conversation: it and they, in order. RequestError: the model reads none."""
        return self._requests.take_pictures(messages)

    def place_images(self, prompt_token_ids: TokenIds, images: Sequence[Any]) -> list[int]:
        """Put pictures into a prompt, and compute what the model sees of them.

        Parameters
        ----------
        prompt_token_ids
            With one placeholder for each picture.
        images
            See `PromptDict`.

        Returns
        -------
        list[int]
            With a placeholder for each token that a picture takes. The list is a prompt for `generate` and others, and
            has the pictures in it, which a copy of it has not.

        Raises
        ------
        RequestError
            The model reads no pictures, a picture cannot be read, or there are more or less of them than placeholders.
        """
        return self._requests.place(prompt_token_ids, images, "the prompt")


_CHAT_KEYWORDS = tuple(ChatMethods.chat.__kwdefaults__ or ())

for _method in (ChatMethods.chat, ChatMethods.stream_chat, ChatMethods.achat, ChatMethods.astream_chat):
    name_keywords(_method, SAMPLING)
