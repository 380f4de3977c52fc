"""The methods of `LLM` for conversations: the chat template makes prompts of them, the rest is as for any prompt."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from infinilm.outputs import RequestOutput, TokenEvent
from infinilm.requests.prompts import Conversations, Params, Prompts, RequestMaker
from infinilm.sampling_params import SAMPLING, SamplingKeywords
from infinilm.signatures import name_keywords
from infinilm.text.chat_template import ChatTemplate
from infinilm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["ChatMethods"]


class ChatMethods:
    """What `LLM` has for conversations, made of what it has for prompts."""

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
            A list of ``{"role": ..., "content": ...}``, or a list of such lists; see `ChatTemplate.render`. The
            `prompt` of an output is the text that the template made.
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

        Raises
        ------
        RequestError
            As in `generate`, and for conversations that are malformed or that the template refuses.
        ConfigError
            The model has no chat template.
        """
        prompts = self._requests.of_chats(
            messages, tools, add_generation_prompt, continue_final_message, chat_template_kwargs
        )
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, **sampling)

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
        """`chat` token by token, see `stream`."""
        prompts = self._requests.of_chats(
            messages, tools, add_generation_prompt, continue_final_message, chat_template_kwargs
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
        prompts = self._requests.of_chats(
            messages, tools, add_generation_prompt, continue_final_message, chat_template_kwargs
        )
        return await self.agenerate(prompts, sampling_params, **sampling)

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
        prompts = self._requests.of_chats(
            messages, tools, add_generation_prompt, continue_final_message, chat_template_kwargs
        )
        return self.astream(prompts, sampling_params, **sampling)

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


for _method in (ChatMethods.chat, ChatMethods.stream_chat, ChatMethods.achat, ChatMethods.astream_chat):
    name_keywords(_method, SAMPLING)
