"""Checks of single values, hints about keywords, progress bars, and where warnings go."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import types
from typing import Any

import numpy as np
import pytest

import infinilm
from infinilm import LLM, SamplingParams, checks, keywords, logs, progress
from infinilm.cli.output import note
from infinilm.errors import ConfigError, RequestError
from infinilm.models.causal_lm import CausalLM


@pytest.mark.parametrize("value", [1, 2**31 - 1, np.int64(5), np.uint8(7)])
def test_integers(value: Any) -> None:
    number = checks.as_integer("x", value)
    assert (number, type(number)) == (int(value), int)


@pytest.mark.parametrize(
    "value", [0, -1, 2**31, True, np.True_, 1.0, "1", None, [1], 10**5000], ids=lambda value: type(value).__name__
)
def test_no_integers(value: Any) -> None:
    with pytest.raises(RequestError, match=r"^x must be an integer in \[1, 2\*\*31\); got ") as caught:
        checks.as_integer("x", value, error=RequestError)
    assert len(str(caught.value)) < 150


def test_booleans() -> None:
    assert checks.as_boolean("x", np.True_) is True
    for value in (0, "false", None, np.float32(1)):
        with pytest.raises(TypeError, match=r"^x must be True or False; got "):
            checks.as_boolean("x", value)
    with pytest.raises(ConfigError):
        checks.as_boolean("x", 1, error=ConfigError)


def test_dtype_names() -> None:
    class Dtype:  # as torch's
        def __str__(self) -> str:
            return "torch.bfloat16"

    same = {"bfloat16": [Dtype(), "torch.bfloat16", "bf16"], "float16": ["half", np.float16, np.dtype("<f2"), "fp16"]}
    for name, values in same.items():
        assert [checks.dtype_name(value) for value in values] == [name] * len(values)
    assert checks.dtype_name("int8") == "int8"


def test_names_that_are_hinted_at_exist() -> None:
    known = {*(LLM.__init__.__kwdefaults__ or ()), *SamplingParams.__dataclass_fields__, "model"}
    assert set(keywords._OTHER_NAMES.values()) <= known
    advice = {name for _, table in keywords._ADVICE for name in table}
    of_llm_alone = {"chat_template", "quantization"}
    assert known & {*keywords._OTHER_NAMES, *keywords._ABSENT, *advice} == of_llm_alone
    assert not advice & set(keywords._OTHER_NAMES)
    assert {anchor for anchor, _ in keywords._ADVICE} <= known | {"chat_template_kwargs"}
    for owner, kind in (("LLM", LLM), ("CausalLM", CausalLM), ("Tokenizer", infinilm.Tokenizer)):
        assert not set(dir(kind)) & set(keywords._ATTRIBUTES[owner])


def test_hints() -> None:
    for name, expected in {
        "temprature": "X has no parameter 'temprature'; did you mean 'temperature'?",
        "num_beam_groups": "X has no parameter 'num_beam_groups': diverse beam search is not available in this version",
        "n_ctx": "X has no parameter 'n_ctx': it is said when the model is loaded: LLM(model, max_model_len=...)",
        "max_length": "X has no parameter 'max_length'",  # what it is called elsewhere is no help here
        "zzz": "X has no parameter 'zzz'",
    }.items():
        assert str(keywords.unknown_parameter("X", name, ["temperature", "presence_penalty"])) == expected


# ---- progress ----


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress.progress_bar(3, "counting", "sheep") as advance:
        advance()
        advance(2, "two more")
    assert "counting: 100%" in sys.stderr.getvalue()
    monkeypatch.setattr(sys, "stderr", Terminal())
    for options in ({"wanted": False}, {"delay": 60.0}):
        with progress.progress_bar(3, "counting", "sheep", **options) as advance:  # type: ignore[arg-type]
            advance()
    assert sys.stderr.getvalue() == ""


def test_progress_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel's stderr is no terminal, and is seen all the same."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert not progress.can_show()
    kernel = types.SimpleNamespace(get_ipython=lambda: types.SimpleNamespace(kernel=None))
    monkeypatch.setitem(sys.modules, "IPython", kernel)  # type: ignore[arg-type]
    with progress.progress_bar(3, "counting", "sheep") as advance:
        advance(3)
    assert "counting: 100%" in sys.stderr.getvalue()


# ---- warnings ----


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True, cwd="/"
    )
    return done.stderr


WARN = "import infinilm, logging; logging.getLogger('infinilm').warning('a %s', 'fish'); "


def test_warnings_say_whose_they_are() -> None:
    assert run(WARN) == "infinilm: warning: a fish\n"


@pytest.mark.parametrize(
    "configure",
    [
        "import logging; logging.basicConfig(format='mine: %(message)s');",
        "import infinilm, logging; logging.basicConfig(format='mine: %(message)s');",
        "import logging; h = logging.StreamHandler(); h.setFormatter(logging.Formatter('mine: %(message)s'));"
        "logging.getLogger('infinilm').addHandler(h);",
    ],
)
def test_an_application_that_configures_logging_has_it_its_way(configure: str) -> None:
    assert run(configure + WARN) == "mine: a fish\n"


def test_messages_move_no_cursor_and_begin_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert logs.printable("plain, é, 日本") == "plain, é, 日本"
    assert logs.printable("a\nb\x1b[2J\u2028") == "a\\nb\\x1b[2J\\u2028"
    note("one\ntwo\x1b[2J\r")
    assert capsys.readouterr().err == "one\ntwo\\x1b[2J\\r\n"


SERVER = """
import infinilm, logging, sys
from infinilm.logs import configure

configure(sys.argv[1], logging.INFO, ("a",))
fields = {"n": 2, "text": "two \\n words", "none": ""}
logging.getLogger("infinilm.x").info("b", extra={"fields": fields})
logging.getLogger("a").warning("c")
logging.getLogger("infinilm").debug("no")
"""


@pytest.mark.parametrize("form", ["text", "json"])
def test_lines_of_a_server(form: str) -> None:
    """Each with its time; what it tells by name stays on its line; what other loggers say has the same form."""
    first, second = run(f"import sys; sys.argv[1:] = [{form!r}]\n{SERVER}").splitlines()
    if form == "json":
        one, other = json.loads(first), json.loads(second)
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", one.pop("time"))
        told = {"n": 2, "text": "two \n words", "none": ""}
        assert one == {"level": "info", "logger": "infinilm.x", "message": "b", **told}
        assert (other["logger"], other["message"]) == ("a", "c")
    else:
        assert first.partition("Z ")[2] == 'info: b n=2 text="two \\n words" none=""'
        assert second.partition("Z ")[2] == "warning: c"
