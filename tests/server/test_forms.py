"""Answers have the form that the documents of OpenAI and Anthropic give them, beyond what their clients check."""

from __future__ import annotations

from typing import Any

import openai
import pytest


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("top", [0, 1, 3])
def test_the_chosen_token_is_among_the_log_probabilities(client: openai.OpenAI, top: int, stream: bool) -> None:
    """ "There may be up to logprobs + 1 elements": also where the chosen token is improbable, and for an echo."""
    call: dict[str, Any] = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 12, "logprobs": top, "seed": 3}
    call |= {"echo": True, "temperature": 2, "extra_body": {"top_k": -1, "top_p": 1.0}}
    if stream:
        pieces = [chunk.choices[0].logprobs for chunk in client.completions.create(**call, stream=True)]
    else:
        pieces = [client.completions.create(**call).choices[0].logprobs]
    told = [
        (token, logprob, best)
        for piece in pieces
        if piece is not None
        for token, logprob, best in zip(piece.tokens, piece.token_logprobs, piece.top_logprobs, strict=True)
    ]
    assert told[0][1:] == (None, None)
    for token, logprob, best in told[1:]:
        assert best[token] == logprob
    sizes = {len(best) for _, _, best in told[1:]}
    assert sizes == ({1} if top == 0 else {top, top + 1})  # both happen
