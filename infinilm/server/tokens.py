"""/tokenize and /detokenize: between texts and token ids, as vLLM has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infinilm.server.bodies import ApiError, Body, Kind, UnknownFields, anything, boolean, list_of, mapping, text
from infinilm.server.chat import MESSAGES, take_ending
from infinilm.server.service import Service, bad_request

__all__ = ["detokenize", "tokenize"]

_TOKENS = Kind(anything.check, {"type": "array", "items": {"type": "integer", "minimum": 0}})
_TOOLS = Kind(anything.check, list_of(mapping).schema)


def tokenize(service: Service, values: Mapping[str, Any], unknown: UnknownFields | None = None) -> dict[str, Any]:
    """The token ids of a prompt, or of the messages of a chat. Raises ApiError that names the field."""
    body, llm = Body(values, unknown=unknown), service.llm
    service.check_model(body.take("model", text))
    special = body.take("add_special_tokens", boolean)
    wants_texts = body.take("return_token_strs", boolean)
    if "messages" in values:
        messages: Any = body.need("messages", Kind(anything.check, MESSAGES.schema))
        tools: Any = body.take("tools", _TOOLS) or None
        kwargs, ending = body.take("chat_template_kwargs", mapping) or {}, take_ending(body)
        if special:
            raise ApiError("add_special_tokens: the chat template writes them", param="add_special_tokens")
        body.refuse("prompt", "there are messages; send one or the other")
        body.finish()
        _, ids = service.render(messages, tools, ending, kwargs)
    else:
        prompt = body.need("prompt", text)
        body.finish()
        service.check_text(len(prompt), "prompt", "characters")
        with bad_request("prompt"):
            ids = llm.tokenize(prompt, add_special_tokens=special is not False)
    texts = [llm.tokenizer.id_to_token(i) for i in ids] if wants_texts else None
    return {"count": len(ids), "max_model_len": llm.max_model_len, "tokens": ids, "token_strs": texts}


def detokenize(service: Service, values: Mapping[str, Any], unknown: UnknownFields | None = None) -> dict[str, Any]:
    """The text of token ids. Raises ApiError that names the field."""
    body = Body(values, unknown=unknown)
    service.check_model(body.take("model", text))
    tokens: Any = body.need("tokens", _TOKENS)
    body.finish()
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise ApiError("tokens: expected a list of token ids", param="tokens")
    service.check_text(len(tokens), "tokens", "token ids")
    size = service.llm.config.vocab_size
    for token in tokens:
        if not 0 <= token < size:
            raise ApiError(f"tokens: {token} is none of the model's, which are 0..{size - 1}", param="tokens")
    with bad_request("tokens"):
        return {"prompt": service.llm.tokenizer.decode(tokens, skip_special_tokens=False)}
