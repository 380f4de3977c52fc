"""generation_config.json: how those who made a model want its tokens chosen.

`LLM` and `AutoModel` read it once; so do commands that do not load a model. What a caller says counts
more than the file does.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infinilm.errors import ConfigError, RequestError
from infinilm.files import read_optional_json
from infinilm.logs import logger
from infinilm.model_files import path_of, read_optional_model_json
from infinilm.sampling_params import SamplingParams
from infinilm.token_ids import token_id_tuple

__all__ = ["GenerationConfig"]

_FILE = "generation_config.json"

# Key of the file -> field of SamplingParams, which also checks the value.
_SAMPLING = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
}
_IDS = ("eos_token_id", "bos_token_id", "pad_token_id")
_ONLY_WHEN_DRAWING = ("temperature", "top_k", "top_p", "min_p")

# Keys that would change the answer and that nothing here can do, with the value at which they do nothing; null and an
# empty list do nothing either. All other keys say how to compute or what to return, not which tokens.
_NOT_HONOURED: Mapping[str, object] = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "min_length": 0,
    "typical_p": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "top_h": None,
    "penalty_alpha": 0,
    "no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "force_words_ids": None,
    "constraints": None,
    "sequence_bias": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "guidance_scale": 1,
    "watermarking_config": None,
    "max_time": None,
}


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """What a generation_config.json says, checked; None: it does not say.

    Attributes
    ----------
    do_sample : bool or None
        False: take the most probable tokens.
    sampling_params : SamplingParams
        The defaults of requests: temperature, top_k, top_p, min_p, repetition_penalty, max_new_tokens, min_new_tokens
        and stop_strings of the file, all else as `SamplingParams()` has it. Greedy where `do_sample` is False.
    said : frozenset of str
        Which fields of `sampling_params` the file decides.
    max_length : int or None
        Tokens of prompt and output together; the file's max_new_tokens counts more.
    eos_token_ids : tuple of int
        Ids that end a text, of this file or of config.json; empty: neither says.
    bos_token_id, pad_token_id : int or None
    not_honoured : tuple of str
        Keys that would change the answer and are not available in this version.
    source : str
        The file; empty: none.
    """

    do_sample: bool | None = None
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    said: frozenset[str] = frozenset()
    max_length: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    not_honoured: tuple[str, ...] = ()
    source: str = ""

    @classmethod
    def from_folder(
        cls, folder: str | os.PathLike[str], generation_config: str | os.PathLike[str] = "auto"
    ) -> GenerationConfig:
        """Read the generation_config.json of a checkpoint folder, or a GGUF file's metadata; nothing is loaded.

        Parameters
        ----------
        folder
            The folder of a checkpoint, or a GGUF file.
        generation_config
            "auto": what the folder's file says. "none": only its special tokens, which are facts of the model. Or the
            path of another such file, or of the folder that has it.

        Raises
        ------
        ConfigError
            A file is damaged or holds an impossible value, which is named; or the path leads to no file.
        """
        home = Path(folder)
        own = generation_config in ("auto", "none")
        path = path_of(home, _FILE) if own else _given_path(generation_config)
        said = read_optional_model_json(home, _FILE)
        values = said if own else read_optional_json(path)
        config = read_optional_model_json(home, "config.json")
        nested = config.get("text_config")
        places = [(path, values)]
        if not own:
            places.append((path_of(home, _FILE), said))
        places += [(path_of(home, "config.json"), part) for part in (config, nested) if isinstance(part, dict)]
        ids = {key: next(filter(None, (_ids(str(file), key, part) for file, part in places)), ()) for key in _IDS}
        chosen = {} if generation_config == "none" else {key: values[key] for key in values if key not in _IDS}
        return cls.from_dict(chosen | {key: list(value) for key, value in ids.items()}, str(path))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str = "generation_config") -> GenerationConfig:
        """Check the content of such a file; `source` is named in errors.

        Raises
        ------
        ConfigError
            A value that is impossible.
        """
        values = {key: value for key, value in values.items() if value is not None}
        do_sample = values.get("do_sample")
        if not isinstance(do_sample, (bool, type(None))):
            raise ConfigError(f"{source}: do_sample must be true or false, got {do_sample!r:.80}")
        fields: dict[str, Any] = {}
        for key, name in _SAMPLING.items():
            if key in values and not (do_sample is False and key in _ONLY_WHEN_DRAWING):
                fields[name] = values[key]
                _check(source, f"{key} is {values[key]!r:.80}", {name: values[key]})
        if do_sample is False:
            fields["temperature"] = 0.0
        max_length = values.get("max_length")
        if max_length is not None:
            _check(source, f"max_length is {max_length!r:.80}", {"max_tokens": max_length})
        return cls(
            do_sample=do_sample,
            sampling_params=_check(source, f"the values {fields}", fields),
            said=frozenset(fields),
            max_length=max_length,
            eos_token_ids=_ids(source, "eos_token_id", values),
            bos_token_id=next(iter(_ids(source, "bos_token_id", values)), None),
            pad_token_id=next(iter(_ids(source, "pad_token_id", values)), None),
            not_honoured=tuple(k for k, neutral in _NOT_HONOURED.items() if values.get(k) not in (None, [], neutral)),
            source=source,
        )

    @staticmethod
    def knows(key: str) -> bool:
        """Whether it is a key of such files that changes the answer."""
        return key in _SAMPLING or key in _NOT_HONOURED

    def new_token_limit(self, num_prompt_tokens: int, name: str) -> int | None:
        """New tokens of a request that says no number itself; None: no limit.

        Raises
        ------
        RequestError
            max_length leaves none; `name` is that of the prompt.
        """
        if self.sampling_params.max_tokens is not None or self.max_length is None:
            return self.sampling_params.max_tokens
        if num_prompt_tokens >= self.max_length:
            raise RequestError(
                f"{name} has {num_prompt_tokens} tokens, and max_length of {self.source} is {self.max_length} for "
                "prompt and output together: say how many new tokens there may be, or pass generation_config='none'"
            )
        return self.max_length - num_prompt_tokens

    def warn(self, also: Sequence[str] = ()) -> None:
        """Log what of the file is not honoured; `also`: fields of `sampling_params` that the caller has no use for."""
        keys = [*self.not_honoured, *(key for key, name in _SAMPLING.items() if name in also and name in self.said)]
        if keys:
            logger.warning(
                "%s asks for %s, which is not available here: answers will differ from those it was made for",
                self.source,
                ", ".join(keys),
            )


def _given_path(value: object) -> Path:
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"generation_config: expected 'auto', 'none' or a path, got {type(value).__name__}")
    path = Path(value).expanduser()
    path = path / _FILE if path.is_dir() else path
    if not path.exists():
        raise ConfigError(
            f"generation_config={os.fspath(value)!r}: expected 'auto', 'none', or the path of a {_FILE} or of the "
            "folder that has one; there is no such file"
        )
    return path


def _check(source: str, what: str, fields: Mapping[str, Any]) -> SamplingParams:
    try:
        return SamplingParams(**fields)
    except (TypeError, RequestError) as error:
        raise ConfigError(
            f"{source}: {what}: {error}; correct the file, or pass generation_config='none' to leave it out"
        ) from error


def _ids(source: str, key: str, values: Mapping[str, Any]) -> tuple[int, ...]:
    value = values.get(key)
    try:
        return () if value is None else token_id_tuple(value)
    except ValueError as error:
        raise ConfigError(f"{source}: {key} {error}") from error
