"""The methods of `LLM` for conversations: the chat template makes prompts of them, the rest is as for any prompt."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from infinilm.outputs import RequestOutput, TokenEvent
from infinilm.requests.prompts import Conversations, Params, PromptDict, Prompts, RequestMaker
from infinilm.sampling_params import SAMPLING, SamplingKeywords, check_keywords
from infinilm.signatures import name_keywords
from infinilm.text.answers import AnswerFormat, ChoiceMaker
from infinilm.text.chat_template import ChatTemplate
from infinilm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["ChatMethods"]


class ChatMethods:
    """The calls of `LLM` for conversations, made of those for prompts."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate
    _requests: RequestMaker

    if TYPE_CHECKING:

        def generate(  # noqa: D102 (see `LLM`)
            self,
            prompts: Prompts,
            sampling_params: Params = None,
            *,
            use_tqdm: bool = True,
            **sampling: Unpack[SamplingKeywords],
        ) -> list[RequestOutput]: ...

        def stream(  # noqa: D102
            self, prompts: Prompts, sampling_params: Params = None, **sampling: Unpack[SamplingKeywords]
        ) -> Iterator[TokenEvent]: ...

        async def agenerate(  # noqa: D102
            self, prompts: Prompts, sampling_params: Params = None, **sampling: Unpack[SamplingKeywords]
        ) -> list[RequestOutput]: ...

        def astream(  # noqa: D102
            self, prompts: Prompts, sampling_params: Params = None, **sampling: Unpack[SamplingKeywords]
        ) -> AsyncIterator[TokenEvent]: ...

    def chat(
        self,
        messages: Conversations,
        sampling_params: Params = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
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

        Returns
        -------
        list[RequestOutput]
            One per conversation. Its completions have `reasoning`, `content` and `tool_calls` besides the whole `text`.

        Raises
        ------
        RequestError
            As in `generate`, and for conversations that are malformed or that the template refuses.
        ConfigError
            The model has no chat template.

        Examples
        --------
        >>> messages = [{"role": "user", "content": "Tell me a story."}]
        >>> answer = llm.chat(messages, temperature=0)[0].outputs[0]  # doctest: +SKIP
        >>> messages += [{"role": "assistant", "content": answer.content}]  # doctest: +SKIP
        """
        prompts = self._chat_prompts(
            messages, tools, add_generation_prompt, continue_final_message, chat_template_kwargs, sampling
        )
        outputs = self.generate(prompts, sampling_params, use_tqdm=use_tqdm, **sampling)
        return [self._parsed(output, tools) for output in outputs]

    def stream_chat(
        self,
        messages: Conversations,
        sampling_params: Params = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> Iterator[TokenEvent]:
        """`chat` token by token, see `stream`. The texts of the events are whole; `chat_parser` divides them."""
        prompts = self._chat_prompts(
            messages, tools, add_generation_prompt, continue_final_message, chat_template_kwargs, sampling
        )
        return self.stream(prompts, sampling_params, **sampling)

    async def achat(
        self,
        messages: Conversations,
        sampling_params: Params = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> list[RequestOutput]:
        """`chat` for asyncio, see `agenerate`."""
        prompts = self._chat_prompts(
            messages, tools, add_generation_prompt, continue_final_message, chat_template_kwargs, sampling
        )
        outputs = await self.agenerate(prompts, sampling_params, **sampling)
        return [self._parsed(output, tools) for output in outputs]

    def astream_chat(
        self,
        messages: Conversations,
        sampling_params: Params = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> AsyncIterator[TokenEvent]:
        """`chat` token by token for asyncio, see `astream`."""
        prompts = self._chat_prompts(
            messages, tools, add_generation_prompt, continue_final_message, chat_template_kwargs, sampling
        )
        return self.astream(prompts, sampling_params, **sampling)

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
        return AnswerFormat.of(self.chat_template.source_text(bool(tools)), has_tools=bool(tools))

    def _chat_prompts(
        self,
        messages: Conversations,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        chat_template_kwargs: Mapping[str, Any] | None,
        sampling: SamplingKeywords,
    ) -> Iterable[PromptDict]:
        """Prompts of conversations; `sampling` gets what finding the calls of the answers needs."""
        check_keywords(sampling, "chat()", _CHAT_KEYWORDS)
        prompts = self._requests.of_chats(
            messages, tools, add_generation_prompt, continue_final_message, chat_template_kwargs
        )
        if self._answer_format(tools).needs_special_tokens(self.tokenizer):
            sampling.setdefault("skip_special_tokens", False)
        return prompts

    def _parsed(self, output: RequestOutput, tools: Sequence[Mapping[str, Any]] | None) -> RequestOutput:
        """The output with the parts of its answers."""
        form = self._answer_format(tools)
        hidden = form.hidden(self.tokenizer)
        completions = []
        for completion in output.outputs:
            said = form.maker(output.prompt or "", tools or (), hidden).push(completion.text, final=True)
            calls = [{key: value for key, value in call.items() if key != "index"} for call in said.tool_calls]
            reasoning = None if form.reasoning is None else said.reasoning
            completions.append(replace(completion, reasoning=reasoning, content=said.content, tool_calls=calls))
        return replace(output, outputs=completions)

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
        variables of the template.
        """
        return self.chat_template.encode(
            self.tokenizer, messages, tools=tools, add_generation_prompt=add_generation_prompt, **kwargs
        )


_CHAT_KEYWORDS = tuple(ChatMethods.chat.__kwdefaults__ or ())

for _method in (ChatMethods.chat, ChatMethods.stream_chat, ChatMethods.achat, ChatMethods.astream_chat):
    name_keywords(_method, SAMPLING)
