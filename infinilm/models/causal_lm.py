"""`CausalLM`: a model with `generate` as transformers has it, for programs that were written for transformers.

It says the same as `GenerationMixin.generate`, which does the work, in other words: padded arrays with a mask in,
arrays that begin with the prompt out. Who gives tensors of torch gets tensors of torch, all others arrays of numpy;
torch and transformers are not needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from infinilm.checks import dtype_name
from infinilm.errors import ConfigError, RequestError, did_you_mean
from infinilm.generation import pad_rows
from infinilm.keywords import unknown_attribute
from infinilm.text.generation_config import GenerationConfig
from infinilm.token_ids import host_array

if TYPE_CHECKING:
    from infinilm.config.json.model_config import ModelConfig
    from infinilm.engine.hooks import HookRegistry
    from infinilm.models.engine_model import EngineModel
    from infinilm.models.reference import ReferenceModel

__all__ = ["CausalLM", "GenerateOutput"]

Int64Array = npt.NDArray[np.int64]

# Keywords of transformers that are not here, with the values that do nothing.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "use_cache": (None, True),
    "output_scores": (None, False),
    "output_logits": (None, False),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "min_new_tokens": (None, 0),
    "stop_strings": (None, []),
    "stopping_criteria": (None, []),
    "logits_processor": (None, []),
    "assistant_model": (None,),
    "synced_gpus": (None, False),
    "past_key_values": (None,),
}


class GenerateOutput(dict[str, Any]):
    """The result of `CausalLM.generate` with `return_dict_in_generate`: a `GenerationResult` and `sequences`.

    Its entries are attributes, too.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the output of generate() has no {name!r}; it has {', '.join(self)}") from None


class CausalLM:
    """A model for programs written for transformers; `AutoModelForCausalLM.from_pretrained` makes it.

    A context manager.

    Attributes
    ----------
    model : EngineModel or ReferenceModel
        What computes.
    """

    def __init__(self, model: EngineModel | ReferenceModel) -> None:
        self.model = model

    @property
    def config(self) -> ModelConfig:
        """The configuration of the model."""
        return self.model.config

    @property
    def dtype(self) -> str:
        """The dtype in which the model computes."""
        return self.model.dtype

    @property
    def device(self) -> str:
        """Where it computes."""
        return self.model.device

    @property
    def max_model_len(self) -> int:
        """Tokens of a row, prompt and output together."""
        return self.model.max_model_len

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """End a row."""
        return self.model.eos_token_ids

    @property
    def generation_config(self) -> GenerationConfig:
        """The settings of `generate` that its caller leaves out."""
        return self.model.generation_config

    def set_hook_registry(self, registry: HookRegistry | None) -> None:
        """Use the hooks of a registry; see `InferEngine.set_hook_registry`."""
        self.model.set_hook_registry(registry)

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse to be called: a TypeError that says where logits are."""
        raise TypeError(
            "CausalLM is not called, it has generate(): logits of every position, [num_tokens, vocab_size], are given "
            "by infinilm.LLM(path).forward(token_ids)"
        )

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Say what names of transformers are called here."""
            raise unknown_attribute("CausalLM", name, dir(self))

    def to(self, *wanted: Any, device: Any = None, dtype: Any = None) -> CausalLM:
        """Return the model, if it is on this device and of this dtype already.

        ConfigError: it is not, and a model cannot move: pass `device` and `dtype` to `from_pretrained`.
        """
        for item in (*wanted, device, dtype):
            # torch's devices and dtypes, and their names; "cuda" is any GPU.
            text = dtype_name(item)
            if item is not None and text not in (self.device, self.device.partition(":")[0], self.dtype):
                raise ConfigError(
                    f"the model is in {self.dtype} on {self.device} and stays so; asked for {text}: pass device= or "
                    "dtype= to from_pretrained"
                )
        return self

    def cpu(self) -> CausalLM:
        """Like `to`, for the CPU."""
        return self.to("cpu")

    def eval(self) -> CausalLM:
        """Return the model: there is nothing to train here."""
        return self

    def close(self) -> None:
        """Free the model. Idempotent."""
        self.model.close()

    def __enter__(self) -> CausalLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<CausalLM of {self.model!r}>"

    def generate(
        self,
        input_ids: Any = None,
        max_new_tokens: int | None = None,
        *,
        attention_mask: Any = None,
        generation_config: Any = None,
        do_sample: bool | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        max_length: int | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        streamer: Any = None,
        tokenizer: Any = None,
        seed: int | None = None,
        num_beams: int | None = None,
        length_penalty: float | None = None,
        early_stopping: bool | str | None = None,
        return_dict_in_generate: bool = False,
        **others: Any,
    ) -> Any:
        """Continue sequences of tokens, all in one batch.

        Parameters
        ----------
        input_ids
            [num_rows, seq_len] or [seq_len], an array of numpy, torch or DLPack, or a list of lists of any lengths.
            None: the BOS token alone.
        max_new_tokens, do_sample, temperature, top_k, top_p, min_p, repetition_penalty, streamer, tokenizer, seed
            See `GenerationMixin.generate`.
        attention_mask
            [num_rows, seq_len], 1 for tokens and 0 for padding, on either side of them. None: what is the padding id at
            either end of a row is padding, unless that id also ends texts.
        generation_config
            A `GenerationConfig`, one of transformers, or a dict of its keys; instead of the model's own.
        max_length
            Tokens of a row of the result; `max_new_tokens` counts more.
        eos_token_id, pad_token_id
            Instead of those of the model.
        num_beams, length_penalty, early_stopping
            A beam search, see `GenerationMixin.generate`; None: there is none. The best output of each row is returned.
        return_dict_in_generate
            Return more than the tokens.
        **others
            Other keywords of transformers, with values that change nothing, such as ``num_return_sequences=1``.

        Returns
        -------
        array or GenerateOutput
            int64 [num_rows, seq_len + longest], prompts and new tokens, filled up with the padding id on the right; a
            tensor of torch if `input_ids` is one, else an array of numpy. With `return_dict_in_generate` a dict, with
            this as `sequences` and all that `GenerationMixin.generate` returns.

        Raises
        ------
        TypeError
            A keyword that there is not, or an argument of the wrong type.
        RequestError
            What is out of range, does not fit, or asks for what is not available, such as groups of beams.
        """
        _refuse(others)
        config = self._config(generation_config)
        pad = self._pad(pad_token_id, config)
        if input_ids is None:
            input_ids = [[self._bos(config)]]
        ends = config.eos_token_ids if eos_token_id is None else np.atleast_1d(eos_token_id).tolist()
        rows = _rows(input_ids)
        prompts = _unpadded(rows, attention_mask, pad if pad not in ends else None)
        width = max(map(len, rows), default=0)
        if max_new_tokens is None and max_length is not None:
            max_new_tokens = _room(max_length, width)
        result = self.model.generate(
            prompts,
            max_new_tokens,
            tokenizer,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            do_sample=do_sample,
            seed=seed,
            eos_token_id=eos_token_id,
            num_beams=1 if num_beams is None else num_beams,
            length_penalty=1.0 if length_penalty is None else length_penalty,
            early_stopping=False if early_stopping is None else early_stopping,
            generation_config=config,
            streamer=streamer,
        )
        fill = self.model.pad_token_id if pad is None else pad
        sequences: Any = np.concatenate(
            [pad_rows(rows, fill), pad_rows(result["output_token_ids"], fill, left=False)], axis=1
        )
        if type(input_ids).__module__.partition(".")[0] == "torch":
            sequences = input_ids.new_tensor(sequences)
        return GenerateOutput(result, sequences=sequences) if return_dict_in_generate else sequences

    def _config(self, given: Any) -> GenerationConfig:
        if given is None:
            return self.model.generation_config
        if isinstance(given, GenerationConfig):
            return given
        for name in ("to_diff_dict", "to_dict"):  # methods of transformers; the first leaves out defaults
            if hasattr(given, name):
                given = getattr(given, name)()
        if not isinstance(given, Mapping):
            raise TypeError(f"generation_config: expected a GenerationConfig or a dict, got {type(given).__name__}")
        config = GenerationConfig.from_dict(given)
        config.warn(also=("min_tokens", "stop"))
        return config

    def _pad(self, pad_token_id: int | None, config: GenerationConfig) -> int | None:
        if pad_token_id is None:
            known = (config.pad_token_id, self.model.generation_config.pad_token_id, self.config.pad_token_id)
            return next((i for i in known if i is not None), None)
        if isinstance(pad_token_id, bool) or not isinstance(pad_token_id, (int, np.integer)):
            raise TypeError(f"pad_token_id must be an int or None, got {pad_token_id!r}")
        return int(pad_token_id)

    def _bos(self, config: GenerationConfig) -> int:
        known = (config.bos_token_id, self.model.generation_config.bos_token_id, *self.config.bos_token_id)
        for token_id in known:
            if token_id is not None:
                return token_id
        raise RequestError("input_ids is missing, and the model names no BOS token to begin with")


def _refuse(others: Mapping[str, Any]) -> None:
    """Keywords of transformers may be there if they do nothing."""
    for name, value in others.items():
        neutral = _NEUTRAL.get(name)
        known = neutral is not None or GenerationConfig.knows(name)
        if not known:
            names = [*(CausalLM.generate.__kwdefaults__ or ()), "input_ids", "max_new_tokens"]
            raise TypeError(f"generate() has no parameter {name!r}{did_you_mean(name, names)}")
        harmless = (
            value in neutral if neutral is not None else not GenerationConfig.from_dict({name: value}).not_honoured
        )
        if not harmless:
            raise RequestError(
                f"{name}={value!r:.80} is not available in this version; LLM has stop strings, several sequences per "
                "prompt (n, with beam_width the best ones of a beam search), log-probabilities and logits processors"
            )


def _rows(input_ids: Any) -> list[Int64Array]:
    """Rows as they were given, padding included, not checked yet."""
    if isinstance(input_ids, (str, bytes)):
        raise TypeError("input_ids: expected token ids, got a text: pass tokenizer(text)['input_ids']")
    array = host_array(input_ids)
    if isinstance(array, np.ndarray):
        if array.ndim not in (1, 2) or array.dtype.kind not in "iu":
            raise RequestError(
                f"input_ids: expected integers [num_rows, seq_len] or [seq_len], got {array.dtype} {list(array.shape)}"
            )
        return [np.asarray(row, np.int64) for row in np.atleast_2d(array)]
    items = list(input_ids)
    flat = not items or not hasattr(items[0], "__len__")
    try:
        return [_integers(row) for row in ([items] if flat else items)]
    except (ValueError, TypeError):
        raise RequestError(f"input_ids: expected lists of token ids, got {input_ids!r:.80}") from None


def _integers(row: Any) -> Int64Array:
    array = np.asarray(row)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError
    return array.astype(np.int64)


def _unpadded(rows: Sequence[Int64Array], attention_mask: Any, pad: int | None) -> list[Int64Array]:
    """The tokens of each row without the padding at its ends."""
    if attention_mask is None:
        masks = [np.ones(len(row), np.bool_) if pad is None else row != pad for row in rows]
    else:
        given = np.atleast_2d(np.asarray(host_array(attention_mask)))
        if given.shape != (len(rows), len(rows[0]) if rows else 0) or len({len(row) for row in rows}) > 1:
            raise RequestError(
                f"attention_mask: expected the shape of input_ids, rows of {[len(row) for row in rows]}, got "
                f"{list(given.shape)}"
            )
        if not np.isin(given, (0, 1)).all():
            raise RequestError("attention_mask: expected 1 for tokens and 0 for padding, got other numbers")
        masks = list(given.astype(np.bool_))
    prompts = []
    for index, (row, mask) in enumerate(zip(rows, masks, strict=True)):
        places = np.flatnonzero(mask)
        part = slice(places[0], places[-1] + 1) if places.size else slice(0, 0)
        if attention_mask is not None and not mask[part].all():
            raise RequestError(f"attention_mask, row {index}: padding lies before or behind the tokens, not among them")
        prompts.append(row[part])
    return prompts


def _room(max_length: Any, width: int) -> int:
    if isinstance(max_length, bool) or not isinstance(max_length, (int, np.integer)):
        raise TypeError(f"max_length must be an int or None, got {max_length!r}")
    if max_length <= width:
        raise RequestError(f"max_length is {max_length}, and input_ids has {width} tokens already: give max_new_tokens")
    return int(max_length) - width
