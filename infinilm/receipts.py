"""Receipts: what an answer is a function of, so that anyone with the model can check that the model gave it.

Here an answer is a function of weights, token ids, parameters, seed and the kernels that compute it, bit for bit,
whatever else ran beside it. A receipt names all of these, and the answer with the log-probability of each token.
`LLM.verify` computes prompt and answer once more, many tokens a step, and draws every token again.

A receipt is JSON in one canonical form: keys in order, no blanks, numbers as Python writes them. A signature (Ed25519,
RFC 8032) is of that text, with the key `signature` left out.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from infinilm.checks import short_repr
from infinilm.errors import ReceiptError
from infinilm.extras import how_to_install

__all__ = ["Receipt", "Verdict", "read_key"]

_FORMAT = 1
_PARTS = ("model", "engine", "request", "answer")
_ANSWER = ("token_ids", "num_given", "logprobs", "finish_reason", "stop_reason")
_MAX_BYTES = 1 << 26  # of a receipt; one of a million tokens has some 16 MB


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Receipt:
    """What an answer is a function of, and the answer; made by ``generate(..., return_receipt=True)``.

    Attributes
    ----------
    model : Mapping
        ``weights``, ``computation``, ``adapter``, ``tokenizer``: SHA-256 of the files of the weights, of what is
        computed with them, of the adapter and of the tokenizer, in hexadecimal digits; ``architecture``,
        ``eos_token_ids``.
    engine : Mapping
        ``version`` of infinilm, ``kernels`` (the instruction set or the kind of GPU), ``dtype``, ``quantization``,
        ``kv_cache_dtype``, ``num_ranks``: what decides how sums are rounded.
    request : Mapping
        Fields of `SamplingParams` with the seed that was drawn; a constraint as its kind and text.
    prompt_token_ids, token_ids : tuple of int
        [num_prompt_tokens], [num_tokens]: what was asked and what was answered.
    num_given : int
        Tokens at the beginning of the answer that came with the request, so that nothing is claimed of them.
    logprobs : float32 array, [num_tokens - num_given]
        The log-probability of each token of the answer, as `SamplingParams.logprobs` gives it.
    finish_reason : str
        "stop" or "length".
    stop_reason : str, int or None
        As in `CompletionOutput`.
    images : tuple of Mapping
        For each picture of the prompt, ``sha256`` of its size and pixels once it is decoded, ``detail`` ("high", or
        "low" where it was first made small), ``grid`` and ``tiles`` (rows and columns of patches of a tile, and of
        tiles), and ``prepared``, SHA-256 of what the tower was shown, behind resizing.
    signature : Mapping or None
        ``key`` and ``value``: the public key and the signature, base64.
    """

    model: Mapping[str, Any]
    engine: Mapping[str, Any]
    request: Mapping[str, Any]
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    num_given: int
    logprobs: npt.NDArray[np.float32]
    finish_reason: str
    stop_reason: str | int | None
    images: tuple[Mapping[str, Any], ...] = ()
    signature: Mapping[str, str] | None = None

    def __repr__(self) -> str:
        """Name the model, the number of tokens and whether it is signed."""
        signed = "not signed" if self.signature is None else "signed"
        return f"<Receipt of {self.model.get('architecture')}: {len(self.token_ids)} tokens, {signed}>"

    def __eq__(self, other: object) -> bool:
        """Whether both are the same text."""
        return self.to_json() == other.to_json() if isinstance(other, Receipt) else NotImplemented

    def __hash__(self) -> int:
        """The hash of its text."""
        return hash(self.to_json())

    # ---- as text ----

    def to_json(self) -> str:
        """The receipt in its canonical form, one line of JSON."""
        return _canonical(
            {**self._content(), **({} if self.signature is None else {"signature": dict(self.signature)})}
        )

    def _content(self) -> dict[str, Any]:
        logprobs = base64.b64encode(self.logprobs.astype("<f4").tobytes()).decode("ascii")
        return {
            "receipt": _FORMAT,
            "model": dict(self.model),
            "engine": dict(self.engine),
            "request": {
                **self.request,
                "prompt_token_ids": list(self.prompt_token_ids),
                **({"images": [dict(image) for image in self.images]} if self.images else {}),
            },
            "answer": {
                "token_ids": list(self.token_ids),
                "num_given": self.num_given,
                "logprobs": logprobs,
                "finish_reason": self.finish_reason,
                "stop_reason": self.stop_reason,
            },
        }

    @classmethod
    def from_json(cls, text: str | bytes | Mapping[str, Any]) -> Receipt:
        """Read a receipt from JSON, or from what JSON gives.

        Raises
        ------
        ReceiptError
            It is none: names the part that is absent, unknown or of a wrong type.
        """
        value: Any = text
        if not isinstance(text, Mapping):
            if len(text) > _MAX_BYTES:
                raise ReceiptError(f"a receipt has at most {_MAX_BYTES} bytes, this one has {len(text)}")
            try:
                value = json.loads(text, parse_constant=_no_number)
            except (ValueError, RecursionError) as error:
                raise ReceiptError(f"a receipt is JSON: {error}") from None
        if not isinstance(value, Mapping) or value.get("receipt") != _FORMAT or isinstance(value["receipt"], bool):
            raise ReceiptError(f'expected a JSON object with "receipt": {_FORMAT}, got {short_repr(value)}')
        known = ("receipt", *_PARTS, "signature")
        if unknown := [key for key in value if key not in known]:
            raise ReceiptError(f"a receipt has the keys {', '.join(known)}; got {short_repr(unknown[0])}")
        model, engine, request, answer = (_mapping(value.get(part), part) for part in _PARTS)
        if set(answer) != set(_ANSWER):
            raise ReceiptError(f"answer: expected the keys {', '.join(_ANSWER)}, got {short_repr(sorted(answer))}")
        request = dict(request)
        prompt = _token_ids(request.pop("prompt_token_ids", None), "request.prompt_token_ids")
        images = _images(request.pop("images", None))
        token_ids = _token_ids(answer["token_ids"], "answer.token_ids")
        num_given, reason, stop_reason = answer["num_given"], answer["finish_reason"], answer["stop_reason"]
        if isinstance(num_given, bool) or not isinstance(num_given, int) or not 0 <= num_given < len(token_ids):
            raise ReceiptError(f"answer.num_given: expected 0..{len(token_ids) - 1}, got {short_repr(num_given)}")
        if reason not in ("stop", "length"):
            raise ReceiptError(f"answer.finish_reason: expected 'stop' or 'length', got {short_repr(reason)}")
        if isinstance(stop_reason, bool) or not isinstance(stop_reason, (str, int, type(None))):
            raise ReceiptError(
                f"answer.stop_reason: expected a text, a token id or null, got {short_repr(stop_reason)}"
            )
        signature = value.get("signature")
        if "signature" in value:
            signature = _mapping(signature, "signature")
            if set(signature) != {"key", "value"} or not all(isinstance(part, str) for part in signature.values()):
                raise ReceiptError(f"signature: expected the texts key and value, got {short_repr(signature)}")
        return cls(
            model=model,
            engine=engine,
            request=request,
            prompt_token_ids=prompt,
            token_ids=token_ids,
            num_given=num_given,
            logprobs=_floats(answer["logprobs"], len(token_ids) - num_given),
            finish_reason=reason,
            stop_reason=stop_reason,
            images=images,
            signature=signature,
        )

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Receipt:
        """Read the receipt in a file. OSError, ReceiptError: there is none."""
        return cls.from_json(Path(path).read_bytes())

    # ---- signatures ----

    def signed(self, key: Any) -> Receipt:
        """The receipt with a signature.

        Parameters
        ----------
        key
            Path of an Ed25519 private key as PEM (``openssl genpkey -algorithm ed25519``), or an ``Ed25519PrivateKey``
            of the package `cryptography`.

        Raises
        ------
        ReceiptError
            The file has no such key.
        ImportError
            The package `cryptography` is not installed.
        """
        private = read_key(key, is_private=True) if isinstance(key, (str, os.PathLike)) else key
        value = private.sign(_canonical(self._content()).encode())
        return replace(
            self,
            signature={
                "key": base64.b64encode(private.public_key().public_bytes_raw()).decode("ascii"),
                "value": base64.b64encode(value).decode("ascii"),
            },
        )

    def check_signature(self, key: str | os.PathLike[str] | None = None) -> None:
        """Do nothing if the signature fits.

        Parameters
        ----------
        key
            Path of the public key of the one who must have signed it, as PEM. None: any key, so that the signature
            says only that nothing has been changed since.

        Raises
        ------
        ReceiptError
            There is no signature, it does not fit, or another key made it.
        ImportError
            The package `cryptography` is not installed.
        """
        ed25519 = _ed25519()
        from cryptography.exceptions import InvalidSignature

        if self.signature is None:
            raise ReceiptError("the receipt has no signature")
        try:
            public = base64.b64decode(self.signature["key"], validate=True)
            value = base64.b64decode(self.signature["value"], validate=True)
            ed25519.Ed25519PublicKey.from_public_bytes(public).verify(value, _canonical(self._content()).encode())
        except (InvalidSignature, ValueError):
            raise ReceiptError(
                "the signature does not fit the receipt, which was changed after it was signed"
            ) from None
        if key is not None and read_key(key, is_private=False).public_bytes_raw() != public:
            raise ReceiptError(f"the receipt was signed with another key than {os.fspath(key)}")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What `LLM.verify` has found.

    Attributes
    ----------
    status : str
        "equal": the model draws this answer. "different": it does not. "incomparable": this engine computes with other
        weights or kernels, or cannot run the request, so nothing follows.
    reason : str
        Why it is not equal, in a sentence.
    position : int or None
        The first token of the answer that differs, from 0; None: all tokens are equal, or none was compared.
    """

    status: str
    reason: str = ""
    position: int | None = None

    def __bool__(self) -> bool:
        """Whether the answer is equal."""
        return self.status == "equal"

    def __str__(self) -> str:
        """The status and the reason."""
        return f"{self.status}: {self.reason}" if self.reason else self.status


def _canonical(value: Mapping[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _no_number(text: str) -> Any:
    raise ReceiptError(f"a receipt has no {text}")


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ReceiptError(f"{name}: expected an object, got {short_repr(value)}")
    return value


def _token_ids(value: Any, name: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise ReceiptError(f"{name}: expected a list of token ids, got {short_repr(value)}")
    if not all(type(token_id) is int and 0 <= token_id < 2**31 for token_id in value):
        raise ReceiptError(f"{name}: expected integers in 0..2**31-1, got {short_repr(value)}")
    return tuple(value)


_IMAGE = ("sha256", "detail", "grid", "tiles", "prepared")


def _images(value: Any) -> tuple[Mapping[str, Any], ...]:
    """What a receipt says of the pictures of its prompt; None: there are none."""
    if value is None:
        return ()
    if not isinstance(value, list) or not value or not all(isinstance(image, Mapping) for image in value):
        raise ReceiptError(f"request.images: expected a list of objects, got {short_repr(value)}")
    for i, image in enumerate(value):
        pairs = [image.get(key) for key in ("grid", "tiles")]
        hashes = [image.get(key) for key in ("sha256", "prepared")]
        if (
            set(image) != set(_IMAGE)
            or image["detail"] not in ("high", "low")
            or not all(isinstance(one, str) and len(one) == 64 for one in hashes)
            or not all(
                isinstance(pair, list) and len(pair) == 2 and all(type(n) is int for n in pair) for pair in pairs
            )
        ):
            raise ReceiptError(
                f"request.images[{i}]: expected {', '.join(_IMAGE)}: hashes of 64 digits, 'high' or 'low', and pairs "
                f"of numbers; got {short_repr(image)}"
            )
    return tuple(value)


def _floats(value: Any, count: int) -> npt.NDArray[np.float32]:
    """The float32 numbers, [count], of their base64 text; none of them is NaN or above 0."""
    try:
        data = base64.b64decode(value if isinstance(value, str) else "!", validate=True)
        numbers = np.frombuffer(data, "<f4").astype(np.float32)
    except (binascii.Error, ValueError):
        raise ReceiptError(f"answer.logprobs: expected float32 numbers in base64, got {short_repr(value)}") from None
    if len(numbers) != count or not (numbers <= 0).all():
        raise ReceiptError(
            f"answer.logprobs: expected {count} numbers of at most 0, one for each token behind num_given, got "
            f"{len(numbers)}"
        )
    return numbers


def _ed25519() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise ImportError(f"signatures of receipts need cryptography: {how_to_install('receipts')}") from None
    return ed25519


def read_key(path: str | os.PathLike[str], *, is_private: bool) -> Any:
    """The Ed25519 key of a PEM file. ReceiptError: it has none. ImportError: `cryptography` is not installed."""
    ed25519 = _ed25519()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization

    kind, data = "private" if is_private else "public", Path(path).read_bytes()
    key: Any = None
    try:
        load: Any = serialization.load_pem_public_key
        if is_private:
            load = partial(serialization.load_pem_private_key, password=None)
        key = load(data)
    except (ValueError, TypeError, UnsupportedAlgorithm):  # TypeError: it is encrypted
        pass
    if not isinstance(key, ed25519.Ed25519PrivateKey if is_private else ed25519.Ed25519PublicKey):
        raise ReceiptError(
            f"{os.fspath(path)}: expected an Ed25519 {kind} key as PEM without a password; `openssl genpkey -algorithm "
            "ed25519` makes a private one, `openssl pkey -pubout` the public one of it"
        )
    return key
