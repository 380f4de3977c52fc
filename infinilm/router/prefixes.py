"""Which replica has computed the beginning of a prompt: chains of hashes of its text, and what each replica was sent.

A replica finds the beginning of a prompt in its cache by blocks of 16 tokens. The router has neither tokenizer nor chat
template, so it divides the text of the messages into blocks of 64 characters, which are about as many tokens. Messages
that begin alike are rendered alike, so the longest match of text is the longest match of tokens, up to a block or two:
enough to choose by, at a hundredth of the time of rendering and tokenising.
"""

from __future__ import annotations

import contextlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["BLOCK_CHARACTERS", "BLOCK_TOKENS", "PrefixIndex", "prefix_hashes"]

BLOCK_CHARACTERS = 64
BLOCK_TOKENS = 16

_LONGEST = 1 << 20  # characters or tokens that are looked at


def prefix_hashes(body: Mapping[str, Any]) -> list[int]:
    """The chain of a request: the hash of every full block of its prompt with all that stands before it.

    Parameters
    ----------
    body : mapping
        Of any route. What is not as it should be has no chain; the replica will say what is wrong with it.
    """
    prompt = body.get("prompt", body.get("input"))
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], Mapping):  # a list of prompts, or token ids
        prompt = prompt if isinstance(prompt[0], int) else prompt[0]
    root = hash(str(body.get("model")))
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        prompt = prompt[:_LONGEST]
        return _chain(root, [tuple(prompt[i : i + BLOCK_TOKENS]) for i in _begins(len(prompt), BLOCK_TOKENS)])
    text = prompt if isinstance(prompt, str) else _conversation(body, prompt)
    text = text[:_LONGEST]
    return _chain(root, [text[i : i + BLOCK_CHARACTERS] for i in _begins(len(text), BLOCK_CHARACTERS)])


def _begins(length: int, size: int) -> range:
    """Where full blocks begin."""
    return range(0, length - size + 1, size)


def _chain(root: int, blocks: Sequence[object]) -> list[int]:
    chain: list[int] = []
    with contextlib.suppress(TypeError):  # a list that only begins like token ids
        for block in blocks:
            root = hash((root, block))
            chain.append(root)
    return chain


def _conversation(body: Mapping[str, Any], messages: object) -> str:
    """The text of a conversation in the order in which templates write it: tools, instructions, messages."""
    parts = [_text(body[name]) for name in ("tools", "system", "instructions") if body.get(name)]
    listed = messages if isinstance(messages, list) else body.get("messages")
    for message in listed if isinstance(listed, list) else ():
        if isinstance(message, Mapping) and message.keys() <= {"role", "content"}:
            parts.append(f"{message.get('role')}:{_text(message.get('content'))}")
        else:
            parts.append(_text(message))
    return "\n".join(parts)


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


class PrefixIndex:
    """What one replica has in its cache, as far as the router knows: the blocks of the prompts it was sent last.

    A block is always at least as recent as those behind it, as a replica itself keeps them. So what is forgotten are
    ends, and whatever block of a chain is known, all before it are.

    Parameters
    ----------
    capacity : int
        Blocks. More than that are forgotten, those longest unused first.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = max(capacity, 1)
        self._known: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def match(self, chain: Sequence[int]) -> int:
        """How many blocks of a chain are known."""
        known, low, high = self._known, 0, len(chain)
        while low < high:
            middle = (low + high) // 2
            if chain[middle] in known:
                low = middle + 1
            else:
                high = middle
        return low

    def remember(self, chain: Sequence[int]) -> None:
        """Note that the replica computes this prompt."""
        known = self._known
        for block in reversed(chain[: self._capacity]):
            known[block] = None
            known.move_to_end(block)
        while len(known) > self._capacity:
            known.popitem(last=False)

    def clear(self) -> None:
        """Forget everything: the replica has begun anew."""
        self._known.clear()
