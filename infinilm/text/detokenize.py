"""Token ids to text while they come: streaming detokenisation and stop strings.

Called by `requests`. Invariant: the deltas of a stream, joined, are exactly what decoding all ids at once gives, cut at
the earliest stop string.
"""

from __future__ import annotations

import codecs
import copy
from collections.abc import Sequence

from infinilm.errors import RequestError
from infinilm.sampling_params import SamplingParams
from infinilm.text.tokenizer import Tokenizer

__all__ = ["IncrementalDetokenizer", "OutputText", "StopStrings", "overlap"]

_MAX_STEPS_BACK = 4  # deltas that the window of a stream may grow back by at once


def _may_be_byte(token: str) -> bool:
    """Whether a byte-fallback decoder may read the token as one byte, `<0xE2>`."""
    return len(token) <= 6 and token.startswith("<0x") and token.endswith(">")


class IncrementalDetokenizer:
    """Token ids in, one by one; text out: the deltas joined are exactly `tokenizer.decode(all ids)`.

    What a later token may still change is held back: an incomplete UTF-8 sequence, and, for tokenizers with
    byte fallback, a run of byte tokens until it ends (one bad byte would spoil the decoding of the whole
    run). The cost of a token does not depend on how many came before: byte-level tokenizers decode each
    token's bytes once, all others decode a window that begins with the tokens of the previous delta.

    Parameters
    ----------
    tokenizer : Tokenizer
    skip_special_tokens : bool
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        tokenizer._require()
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._bytes = tokenizer._visible_bytes if skip_special_tokens else tokenizer._all_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._window: list[int] = []  # ids of the previous delta, then ids whose text is still to come
        self._num_read = 0  # how many of the window belong to the previous delta
        self._read_text = ""  # the text of those
        self._borders: list[int] = []  # where in the window the text of a delta began

    def copy(self) -> IncrementalDetokenizer:
        """One that goes on from here by itself."""
        other = copy.copy(self)
        other._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        other._utf8.setstate(self._utf8.getstate())
        other._window, other._borders = self._window.copy(), self._borders.copy()
        return other

    def push(self, token_id: int) -> str:
        """Take the next token id; return the text that is now certain (often empty).

        Raises
        ------
        RequestError
            The id is negative or above 2**32 - 1.
        """
        if self._tokenizer._byte_level:
            return self._utf8.decode(self._bytes[token_id])
        token = self._tokenizer._visible(token_id, self._skip_special)
        if token is None:
            return ""
        self._window.append(token_id)
        if self._tokenizer._byte_fallback and _may_be_byte(token):
            return ""
        return self._advance(final=False)

    def push_some(self, token_ids: list[int]) -> str:
        """`push` for several tokens, at a fraction of the time."""
        if self._tokenizer._byte_level:
            return self._utf8.decode(b"".join([self._bytes[token_id] for token_id in token_ids]))
        return "".join([self.push(token_id) for token_id in token_ids])

    def finish(self) -> str:
        """Return what was held back; incomplete UTF-8 comes as U+FFFD."""
        if self._tokenizer._byte_level:
            return self._utf8.decode(b"", final=True)
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        """Decode the window and move it on, unless the end of its text may still change."""
        if len(self._window) == self._num_read:
            return ""
        text = self._decode(self._window)
        unsettled = self._tokenizer._hold_replacement and text.endswith("�")
        if not final and (unsettled or not text.startswith(self._read_text)):
            return ""
        delta = text[len(self._read_text) :]
        self._borders.append(self._num_read)
        self._move_window(text)
        return delta

    def _move_window(self, text: str) -> None:
        """Begin the window with the tokens of the delta just given out.

        Rules for a first token (a leading space stripped) then act on text that is out already. If those
        tokens decode to nothing, the rule may not be spent on them: begin one delta earlier.
        """
        begin, read_text = 0, text
        for border in self._borders[: -_MAX_STEPS_BACK - 1 : -1]:
            if border and (tail_text := self._decode(self._window[border:])):
                begin, read_text = border, tail_text
                break
        self._window = self._window[begin:]
        self._borders = [b - begin for b in self._borders if b >= begin]
        self._num_read, self._read_text = len(self._window), read_text

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special)


class StopStrings:
    """Text in, in pieces; text out up to the earliest stop string, whatever borders it spans.

    The earliest stop is the one that completes first; of two that complete at the same character, the one
    that begins first. Text that may be the beginning of a stop string is held back.

    Parameters
    ----------
    stop : sequence of str
        None of them empty.
    include_stop : bool
        Whether the stop string itself is part of the text.

    Attributes
    ----------
    stopped_by : str or None
        The stop string that was found.
    """

    def __init__(self, stop: Sequence[str], include_stop: bool = False) -> None:
        if isinstance(stop, str) or not all(isinstance(s, str) and s for s in stop):
            raise RequestError(f"stop strings must be nonempty strings, got {stop!r}")
        self._stop = tuple(stop)
        self._include = include_stop
        self._held = ""
        self.stopped_by: str | None = None

    def push(self, text: str) -> str:
        """Take more text; return what is certain to be output. Nothing more comes once a stop was found."""
        if not self._stop:
            return text
        if self.stopped_by is not None or not text:
            return ""
        text = self._held + text
        found = [(begin + len(s), begin, s) for s in self._stop if (begin := text.find(s)) >= 0]
        if found:
            end, begin, self.stopped_by = min(found)
            self._held = ""
            return text[: end if self._include else begin]
        keep = max(overlap(text, s) for s in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """Return what was held back: no more text comes, so that it begins no stop string."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`, which is not empty."""
    begin = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while begin >= 0:
        if stop.startswith(text[begin:]):
            return len(text) - begin
        begin = text.find(stop[0], begin + 1)
    return 0


class OutputText:
    """The text of one generated sequence: detokenised token by token and cut at the earliest stop string.

    Without a tokenizer the text stays empty; stop strings are then refused.

    Parameters
    ----------
    tokenizer : Tokenizer
    params : SamplingParams, optional
        Its `stop`, `include_stop_str_in_output` and `skip_special_tokens` are read; None: the defaults.

    Attributes
    ----------
    finished : bool
        After a stop string or `finish()`; what is pushed then is ignored.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams | None = None) -> None:
        params = SamplingParams() if params is None else params
        if params.stop:
            tokenizer._require()
        skip = params.skip_special_tokens
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip) if tokenizer else None
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output)
        self._parts: list[str] = []
        self.finished = False

    def copy(self) -> OutputText:
        """The text of a sequence that begins as this one does."""
        other = copy.copy(self)
        other._detokenizer = None if self._detokenizer is None else self._detokenizer.copy()
        other._stops, other._parts = copy.copy(self._stops), self._parts.copy()
        return other

    @property
    def text(self) -> str:
        """All text put out so far: the deltas joined."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._stops.stopped_by

    def push(self, token_id: int, search: bool = True) -> str:
        """Take the next token id; return the text that it makes certain. Look at `stopped_by` afterwards.

        `search`: look for stop strings from here on; once it was True, it stays so.
        """
        if self.finished or self._detokenizer is None:
            return ""
        delta = self._detokenizer.push(token_id)
        return self._put(self._stops.push(delta) if search else delta)

    def finish(self) -> str:
        """Return the text held back. A stop string may be found even now, in what the detokenizer held."""
        if self.finished or self._detokenizer is None:
            return ""
        delta = self._stops.push(self._detokenizer.finish())
        if self.stopped_by is None:
            delta += self._stops.finish()
        self.finished = True
        return self._put(delta)

    def push_some(self, token_ids: list[int]) -> str:
        """`push` for several tokens of a text without stop strings."""
        if self.finished or self._detokenizer is None:
            return ""
        return self._put(self._detokenizer.push_some(token_ids))

    def push_all(self, token_ids: list[int]) -> str:
        """All tokens of a text at once, in place of `push` for each and `finish`; for one without stop strings."""
        if self._detokenizer is None:
            return ""
        self.finished = True
        return self._put(self._detokenizer._decode(token_ids))

    def _put(self, delta: str) -> str:
        if delta:
            self._parts.append(delta)
        self.finished = self.finished or self.stopped_by is not None
        return delta
