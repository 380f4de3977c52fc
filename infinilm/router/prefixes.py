"""Which replica has computed the beginning of a prompt: chains of hashes of its text, and what each replica was sent.

A replica finds the beginning of a prompt in its cache by blocks of 16 tokens. The router has neither tokenizer nor chat
template, so it divides the text of the messages into blocks of 64 characters, which are about as many tokens. Messages
that begin alike are rendered alike, so the longest match of text is the longest match of tokens, up to a block or two:
enough to choose by, at a fiftieth of the time of rendering and tokenising. In the place of a picture the text has a
hash of its bytes, as long as the tokens that a picture usually becomes.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["BLOCK_CHARACTERS", "BLOCK_TOKENS", "PrefixIndex", "PrefixTable", "prefix_hashes"]

BLOCK_CHARACTERS = 64
BLOCK_TOKENS = 16

_LONGEST = 1 << 20  # characters or tokens that are looked at
_PICTURE_BLOCKS = 16  # that a picture counts as


def prefix_hashes(body: Mapping[str, Any]) -> list[int]:
    """The chain of a request: the hash of every full block of its prompt with all that stands before it.

    Parameters
    ----------
    body : mapping
        The body of a request to any route. A malformed one has no chain; the replica will say what is wrong.
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
    return value if isinstance(value, str) else json.dumps(_with_hashes(value), sort_keys=True)


def _with_hashes(value: Any) -> Any:
    """A part of a body with a hash in the place of each picture in it, in the forms of OpenAI and of Anthropic."""
    if isinstance(value, str):
        return _hash_of(value) if value.startswith("data:") else value
    if isinstance(value, list):
        return [_with_hashes(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.get("type") == "base64" and isinstance(data := value.get("data"), str):
        return _hash_of(data)
    return {key: _with_hashes(item) for key, item in value.items()}


def _hash_of(picture: str) -> str:
    digest = hashlib.sha256(picture.encode("utf-8", "surrogatepass")).hexdigest()  # as long as a block
    return digest * _PICTURE_BLOCKS


class PrefixTable:
    """Which replicas have a block, of all blocks that any has: one look at it answers for all of them.

    Each replica is a bit, so that the replicas of a block are one integer.
    """

    def __init__(self) -> None:
        self.holders: dict[int, int] = {}
        self._bits = 0  # those in use

    def take_bit(self) -> int:
        """The smallest bit that no index has."""
        bit = ~self._bits & (self._bits + 1)
        self._bits |= bit
        return bit

    def free_bit(self, bit: int) -> None:
        """No block has it any more."""
        self._bits &= ~bit

    def matches(self, chain: Sequence[int]) -> list[tuple[int, int]]:
        """Which replicas know how many blocks of a chain: (blocks, bits) of those that know any, the longest first.

        A replica that knows a block knows those before it, so the bits can only become fewer along the chain. Where two
        blocks have the same, so have all between them: the places where they change are found by halves.
        """
        holders = self.holders.get
        found: list[tuple[int, int]] = []
        begin, here = 0, holders(chain[0], 0) if chain else 0
        while here:
            low, high = begin, len(chain)  # chain[low] has the bits `here`, chain[high] has others, or is not there
            while high - low > 1:
                middle = (low + high) // 2
                if holders(chain[middle], 0) == here:
                    low = middle
                else:
                    high = middle
            behind = holders(chain[high], 0) if high < len(chain) else 0
            found.append((high, here & ~behind))
            begin, here = high, behind
        found.reverse()
        return found


class PrefixIndex:
    """What one replica has in its cache, as far as the router knows: the blocks of the prompts it was sent last.

    A block is always at least as recent as those behind it, as a replica itself keeps them. So what is forgotten are
    ends, and whatever block of a chain is known, all before it are.

    Parameters
    ----------
    capacity : int
        Blocks. More than that are forgotten, those longest unused first.
    table : PrefixTable, optional
        The table of all replicas that are chosen from; default: one of its own.

    Attributes
    ----------
    bit : int
        Its own in the table.
    """

    def __init__(self, capacity: int, table: PrefixTable | None = None) -> None:
        self._capacity = max(capacity, 1)
        self._known: OrderedDict[int, None] = OrderedDict()
        self.table = PrefixTable() if table is None else table
        self.bit = self.table.take_bit()

    def __len__(self) -> int:
        return len(self._known)

    def match(self, chain: Sequence[int]) -> int:
        """How many blocks of a chain are known."""
        return bisect.bisect_left(chain, True, key=lambda block: block not in self._known)

    def remember(self, chain: Sequence[int]) -> None:
        """Note that the replica computes this prompt."""
        known, holders, bit = self._known, self.table.holders, self.bit
        if not bit:  # closed while the request was on its way
            return
        for block in reversed(chain[: self._capacity]):
            if block in known:
                known.move_to_end(block)
            else:
                known[block] = None
                holders[block] = holders.get(block, 0) | bit
        while len(known) > self._capacity:
            self._forget(known.popitem(last=False)[0])

    def close(self) -> None:
        """Forget everything, and leave the table: the replica has gone, or begun anew."""
        for block in self._known:
            self._forget(block)
        self._known.clear()
        self.table.free_bit(self.bit)
        self.bit = 0

    def _forget(self, block: int) -> None:
        holders = self.table.holders
        if rest := holders[block] & ~self.bit:
            holders[block] = rest
        else:
            del holders[block]
