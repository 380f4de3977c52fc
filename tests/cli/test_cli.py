"""The command line: in this process where it can be, in one of its own for signals, pipes and encodings."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files.writer import File, Stored
from goldens import golden
from llm import tiny
from llm.support import PATIENCE

import infinilm
from cli.support import run, start, wait_until_at_rest
from infinilm import LLM
from infinilm.bench import limits as bench
from infinilm.bench.work import Work, count_work

LONG = 100_000  # tokens of a context that no test waits to be full


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_checkpoint(tmp_path_factory.mktemp("cli") / "tiny")


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_checkpoint(tmp_path_factory.mktemp("cli") / "endless", max_position_embeddings=LONG)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder) as made:
        yield made


# ---- generate ----


@pytest.mark.parametrize(
    "sampling", [["--temperature", "0"], ["--seed", "3"], ["--seed", "4", "--top-k", "5", "--stop", "e"]]
)
def test_generate_prints_what_llm_generates(
    folder: Path, llm: LLM, capsys: pytest.CaptureFixture[str], sampling: list[str]
) -> None:
    keywords: dict[str, Any] = {}
    for key, value in zip(sampling[::2], sampling[1::2], strict=True):
        keywords[key[2:].replace("-", "_")] = value if key == "--stop" else int(value)
    expected = llm.generate("the", max_tokens=50, **keywords)[0].outputs[0].text
    assert run("generate", "the", "--model", folder, "--max-tokens", "50", *sampling) == 0
    assert capsys.readouterr().out == f"the{expected}\n"
    assert run("generate", "the", "--model", folder, "--max-tokens", "50", "--no-echo", *sampling) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{expected}\n"
    assert captured.err == ""


def test_generate_of_token_ids(folder: Path, llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    expected = llm.generate([[1, 2, 3]], temperature=0, max_tokens=9, ignore_eos=True)[0].outputs[0].token_ids
    options = ["--token-ids", "--model", str(folder), "--temperature", "0", "--max-tokens", "9", "--ignore-eos"]
    assert run("generate", "1, 2 3", *options) == 0
    assert capsys.readouterr().out.split() == [str(i) for i in (1, 2, 3, *expected)]
    assert run("generate", "1,2,3", "--no-echo", "--stop-token-ids", str(expected[4]), *options) == 0
    end = list(expected).index(expected[4]) + 1
    assert capsys.readouterr().out.split() == [str(i) for i in expected[:end]]
    assert run("generate", "1,x", *options) == 2
    assert "'1,x'" in capsys.readouterr().err


@pytest.mark.parametrize("ending", ["", "\n", "\r\n"])
def test_prompt_from_stdin(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ending: str
) -> None:
    options = ["--model", str(folder), "--temperature", "0", "--max-tokens", "9"]
    assert run("generate", "the\none", *options) == 0
    expected = capsys.readouterr().out
    for prompt in (["-"], []):
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"the\none{ending}"))
        assert run("generate", *prompt, *options) == 0
        assert capsys.readouterr().out == expected


@pytest.mark.parametrize("is_terminal", [True, False])
def test_generate_needs_a_prompt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_terminal: bool
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setattr(sys.stdin, "isatty", lambda: is_terminal)
    assert run("generate") == 2
    assert "there is no prompt: infinilm generate PROMPT" in capsys.readouterr().err


def test_short_options(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They mean what they mean in llama.cpp."""
    assert run("generate", "the", "--model", folder, "--max-tokens", "7", "--num-threads", "1", "--seed", "1") == 0
    expected = capsys.readouterr().out
    assert run("generate", "-p", "the", "-m", folder, "-n", "7", "-t", "1", "--seed", "1") == 0
    assert capsys.readouterr().out == expected


def test_structure(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text('{"enum": [17]}')
    grammar.write_text('start: "a" "b"')
    for option, value, expected in (
        ("--json-schema", '{"const": true}', "true"),
        ("--json-schema", schema, "17"),
        ("--regex", "(ab){3}", "ababab"),
        ("--choice", "x y", "x y"),
        ("--grammar", 'start: "c"', "c"),
        ("--grammar", grammar, "ab"),
    ):
        assert run("generate", "the", "--no-echo", "--model", folder, option, value) == 0
        assert capsys.readouterr().out == f"{expected}\n"


def test_what_is_wrong_with_a_constraint_is_told_before_the_prompt(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--model", str(folder), "--grammar"]
    for command, grammar, message in (
        ("generate", "start: absent", 'unknown name: "absent"'),
        ("generate", 'start: "a"', "the package llguidance is not installed; pip install"),
        ("chat", 'start: "a"', "the package llguidance is not installed; pip install"),
    ):
        if message.startswith("the package"):
            monkeypatch.setitem(sys.modules, "llguidance", None)
        template = ["--chat-template", "{{ messages[0].content }}"] if command == "chat" else []
        assert run(command, "the", *arguments, grammar, *template) == 2
        captured = capsys.readouterr()
        assert message in captured.err and captured.out == ""


def test_several_texts(folder: Path, llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", str(folder), "--seed", "3", "--max-tokens", "9", "--ignore-eos"]
    expected = llm.generate("the", seed=3, max_tokens=9, ignore_eos=True, n=3)[0].outputs
    assert run("generate", "the", "--n", "3", *options) == 0
    assert capsys.readouterr().out == "".join(f"--- {i + 1} of 3 ---\n{o.text}\n" for i, o in enumerate(expected))


def test_penalties_and_another_tokenizer(folder: Path, llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    penalties = {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    expected = llm.generate("the", temperature=0, max_tokens=20, ignore_eos=True, **penalties)[0].outputs[0].text
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in penalties.items()]
    options = ["--model", str(folder), "--temperature", "0", "--max-tokens", "20", "--ignore-eos", "--no-echo"]
    assert run("generate", "the", *options, *flags, "--tokenizer", folder / "tokenizer.json") == 0
    assert capsys.readouterr().out == f"{expected}\n"
    assert run("generate", "the", *options) == 0
    assert capsys.readouterr().out != f"{expected}\n"


def test_stats(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "the", "--model", folder, "--max-tokens", "9", "--ignore-eos", "--stats") == 0
    err = capsys.readouterr().err
    assert "2 prompt tokens, 9 new tokens (length)" in err
    assert "tokens/s" in err
    assert err.count("\n") == 1


def test_utf8_whatever_the_locale(folder: Path, llm: LLM) -> None:
    expected = llm.generate("tü", seed=3, max_tokens=60, ignore_eos=True)[0].outputs[0].text
    assert not expected.isascii()
    options = ["--model", str(folder), "--seed", "3", "--max-tokens", "60", "--ignore-eos"]
    for encoding in ("ascii", "latin-1", "utf-16"):
        env = os.environ | {"LC_ALL": "C", "PYTHONIOENCODING": encoding}
        with start("generate", "-", *options, env=env) as process:
            out, err = process.communicate("tü".encode(), timeout=PATIENCE)
        assert (process.returncode, err) == (0, b"")
        assert out.decode("utf-8") == f"tü{expected}\n"


def test_the_demo_tells_a_story(capsys: pytest.CaptureFixture[str]) -> None:
    with LLM("demo") as model:
        expected = model.generate("Once upon a time", temperature=0, max_tokens=40)[0].outputs[0].text
    assert run("generate", "Once upon a time", "--temperature", "0", "--max-tokens", "40") == 0
    assert capsys.readouterr().out == f"Once upon a time{expected}\n"
    assert len(expected.split()) > 10


def test_control_vectors(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Several are added, each times its scale, so that these cancel each other out."""
    file = tmp_path / "calm.gguf"
    direction = Stored("F32", (32,), np.full(32, 3, np.float32).tobytes())
    File({"general.architecture": "controlvector"}, {"direction.1": direction}).write(file)
    options = ["--model", folder, "--temperature", "0", "--max-tokens", "9", "--control-vector"]
    outs = []
    for vectors in ([f"{file}:0"], [f"{file}:-2", "--control-vector", file, "--control-vector", f"{file}:1"], [file]):
        assert run("generate", "the", *options, *vectors) == 0
        outs.append(capsys.readouterr().out)
    assert outs[0] == outs[1] != outs[2]
    assert run("generate", "the", *options, folder / "config.json") == 2
    assert "config.json: " in capsys.readouterr().err
    assert run("generate", "the", "--model", file) == 2
    assert "a control vector, not a model" in capsys.readouterr().err


@pytest.mark.parametrize("how", ["lookup", '{"method": "ngram", "num_speculative_tokens": 3}'])
def test_speculation(folder: Path, how: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", folder, "--temperature", "0", "--max-tokens", "20"]
    outs = []
    for more in ([], ["--speculation", how]):
        assert run("generate", "the one and the one and the", *options, *more) == 0
        outs.append(capsys.readouterr().out)
    assert outs[0] == outs[1]


@pytest.mark.parametrize(
    ("how", "told"),
    [
        (
            "best",
            "--speculation: expected a method among 'off', 'auto', 'lookup', 'mtp', 'eagle3', 'draft_model', got "
            "'best'",
        ),
        ('{"method": "lookup", "num_tokens": 99}', "--speculation: num_tokens must be an int in 1..15, got 99"),
        ('{"method"', "expected a method or a JSON object, got '{\"method\"'"),
    ],
)
def test_wrong_speculation(folder: Path, how: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "the", "--model", folder, "--speculation", how) == 2
    assert told in capsys.readouterr().err


def test_perplexity(
    folder: Path, llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "the one and the other " * 9
    file = tmp_path / "text.txt"
    file.write_text(text)
    whole = llm.perplexity(text[:30], use_tqdm=False)
    monkeypatch.setattr(sys, "stdin", io.StringIO(text[:30]))
    assert run("perplexity", "-", "--model", folder) == 0
    assert capsys.readouterr().out == f"perplexity {whole:.4f} of {len(llm.tokenize(text[:30]))} tokens\n"
    by_stride = llm.perplexity(text, max_length=40, stride=10, use_tqdm=False)
    options = ["--max-length", "40", "--stride", "10", "--json", "--quiet"]
    assert run("perplexity", file, "-m", folder, *options) == 0
    assert json.loads(capsys.readouterr().out)["perplexity"] == pytest.approx(by_stride, rel=1e-6)
    for arguments, message in (
        ([tmp_path / "absent.txt"], "absent.txt"),
        ([file, "--max-length", "4000"], "--max-length is 4000, and the context holds"),
    ):
        assert run("perplexity", *arguments, "--model", folder) == 2
        assert message in capsys.readouterr().err


# ---- errors ----


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["generate", "x", "--model", "/no/such/folder"], 2, "/no/such/folder"),
        (["generate", "x", "--model", "FOLDER", "--top-p", "1.5"], 2, "--top-p"),
        (["generate", "x", "--model", "FOLDER", "--temperature", "nan"], 2, "--temperature"),
        (["generate", "x", "--model", "FOLDER", "--max-tokens", "0"], 2, "--max-tokens"),
        (["generate", "x", "--model", "FOLDER", "--kv-cache", "lots"], 2, "--kv-cache"),
        (["generate", "x", "--model", "FOLDER", "--kv-cache", "1kB", "--max-model-len", "64"], 2, "--kv-cache"),
        (["generate", "x", "--kv-cache", "4"], 2, "4 would be bytes: say the unit, such as 4GiB"),
        (["plan", "--memory", "80"], 2, "80 would be bytes: say the unit, such as 80GiB"),
        (["generate", "x", "--model", "FOLDER", "--dtype", "int3"], 2, "--dtype"),
        (["generate", "x", "--model", "FOLDER", "--device", "abacus"], 2, "device"),
        (["generate", "x" * 500, "--model", "FOLDER"], 2, "--max-model-len"),
        (["generate", "x", "--num-threads", "0"], 2, "--num-threads"),
        (["generate", "x", "--num-threads", "two"], 2, "--num-threads"),
        (["generate", "x", "--temprature", "0"], 2, "did you mean --temperature?"),
        (["generate", "x", "--temp", "0"], 2, "did you mean --temperature?"),
        (["generate", "x", "--max", "8"], 2, "did you mean --max-model-len or --max-image-pixels or --max-tokens?"),
        (["generate", "--", "-x", "--seed", "1"], 2, "--seed must come before --"),
        (["genrate", "x"], 2, "there is no command 'genrate'; did you mean 'generate'? (see infinilm --help)"),
        (["demo"], 2, "there is no command 'demo'; there are generate, chat, "),
        (["help", "servr"], 2, "did you mean 'serve'?"),
        (["generate", "x", "--regex", "a", "--choice", "b"], 2, "not allowed with"),
        (["generate", "x", "--regex", ""], 2, "--regex: the regex is empty"),
        (["generate", "x", "--json-schema", "{"], 2, "--json-schema: the schema is not JSON"),
        (["generate", "x", "--json-schema", "/no/such"], 2, "/no/such"),
        (["generate", "x", "--choice", ""], 2, "--choice: choice 0 must not be the empty text"),
        (["bench", "--batch-sizes", "1,0"], 2, "--batch-sizes"),
        (["info", "--dtype", "float32"], 2, "--model"),
        (["info", "demo", "--revision", "v2"], 2, "revision"),
        (["generate", "x", "--model", "FOLDER", "--tokenizer", "/no/such"], 2, "--tokenizer="),
        (["generate", "x", "--model", "FOLDER", "--generation-config", "/no/such"], 2, "--generation-config="),
        (["generate", "x", "--model", "FOLDER", "--n", "0"], 2, "--n must be"),
        (["generate", "x", "--model", "FOLDER", "--frequency-penalty", "9"], 2, "--frequency-penalty"),
        (["plan", "--model", "FOLDER", "--memory", "plenty"], 2, "--memory"),
        (["plan", "--model", "FOLDER", "--kv-cache", "8KiB", "--max-model-len", "128"], 2, "--max-model-len"),
    ],
    ids=str,
)
def test_errors(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str
) -> None:
    assert run(*(str(folder) if a == "FOLDER" else a for a in arguments)) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert captured.err.count("error: ") == 1
    assert "usage" not in captured.err


def test_keys_of_a_file_are_not_written_as_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tiny.make_checkpoint(tmp_path)
    (other / "generation_config.json").write_text('{"top_k": "x"}')
    assert run("generate", "x", "--model", other) == 2
    error = capsys.readouterr().err
    assert "generation_config.json: top_k" in error
    assert ": top_k must be an int" in error
    assert "pass --generation-config='none'" in error


def test_a_damaged_model_can_be_put_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tiny.make_checkpoint(tmp_path)
    data = (other / "model.safetensors").read_bytes()
    (other / "model.safetensors").write_bytes(data[: len(data) // 2])
    assert run("generate", "x", "--model", other) == 2
    err = capsys.readouterr().err
    assert "model.safetensors" in err
    assert "Traceback" not in err
    assert run("generate", "x", "--model", other, "--debug") == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], *([c, "--help"] for c in ("generate", "chat", "info", "plan", "bench"))]
)
def test_help(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert run(*arguments) == 0
    captured = capsys.readouterr()
    assert "infinilm" in captured.out
    assert captured.err == ""


def test_words_for_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert run("help") == run("--help") == 0
    assert capsys.readouterr().out == 2 * captured.err
    assert run("help", "plan") == run("plan", "--help") == 0
    assert capsys.readouterr().out.count("usage: infinilm plan") == 2
    assert run("version") == 0
    assert capsys.readouterr().out == f"infinilm {infinilm.__version__}\n"


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from infinilm.cli.main import main; main(['generate', '--help'])\n"
        "print(sorted({'numpy', 'tokenizers', 'jinja2', 'tqdm', 'infinilm._core'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True, cwd="/")
    assert done.stdout.endswith("[]\n")


# ---- Ctrl-C and pipes ----


def test_ctrl_c_ends_a_generation(endless: Path) -> None:
    with start("generate", "the", "--model", endless, "--max-tokens", str(LONG), "--ignore-eos") as process:
        first = process.stdout.read(20)
        assert first.startswith(b"the")
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130  # not after all the tokens
    assert err == b""
    assert rest.endswith(b"\n")


def test_ctrl_c_before_the_first_token(endless: Path) -> None:
    with start("generate", "-", "--token-ids", "--model", endless, "--no-echo") as process:
        process.stdin.write(b"7 " * (LONG - 2))
        process.stdin.close()
        process.stdin = None
        time.sleep(2.0)  # a long prefill, or on a slow machine still the way there
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert rest.strip() == b""
    assert b"Traceback" not in err


def test_ctrl_c_while_modules_are_imported() -> None:
    """Which comes before there is anything to stop."""
    code = (
        "import sys\n"
        "class Stop:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'infinilm.cli.main': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Stop())\n"
        "from infinilm.__main__ import run; sys.exit(run())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_a_reader_that_leaves_is_no_error(endless: Path) -> None:
    with start("generate", "the", "--model", endless, "--max-tokens", str(LONG), "--ignore-eos") as process:
        process.stdout.read(10)
        process.stdout.close()
        assert process.wait(timeout=PATIENCE) == 0
        assert process.stderr.read() == b""


def test_module_and_main_are_the_same() -> None:
    command = [sys.executable, "-m", "infinilm", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True, cwd="/")
    assert done.stdout == f"infinilm {infinilm.__version__}\n"


# ---- chat ----


def chat(monkeypatch: pytest.MonkeyPatch, script: str, *arguments: str | Path) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(script))
    return run("chat", "--lines", *arguments)


def expected_answers(llm: LLM, messages: list[dict[str, str]], questions: list[str], **sampling: Any) -> list[str]:
    answers = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        answers.append(llm.chat(messages, **sampling)[0].outputs[0].text)
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


def test_chat_keeps_the_history(
    folder: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    system = [{"role": "system", "content": "on"}]
    first = expected_answers(llm, list(system), ["the", "an"], temperature=0, max_tokens=5)
    again = expected_answers(llm, list(system), ["an"], temperature=0, max_tokens=5)
    script = "the\n\nan\n/reset\n/what\nan\n/exit\nunheard\n"
    options = ["--model", str(folder), "--system", "on", "--temperature", "0", "--max-tokens", "5"]
    assert chat(monkeypatch, script, *options) == 0
    captured = capsys.readouterr()
    assert captured.out == "".join(f"{answer}\n" for answer in (*first, *again))
    assert "starts anew" in captured.err
    assert "/what" in captured.err


def test_chat_drops_the_oldest_when_the_context_is_full(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = "a message of some length\n" * 9
    options = ["--model", str(folder), "--temperature", "0", "--max-tokens", "20", "--ignore-eos"]
    assert chat(monkeypatch, script, *options) == 0
    err = capsys.readouterr().err
    assert "dropped: the context holds 128 tokens" in err
    assert err.count("cut off: --max-tokens 20") == 9


def test_chat_says_when_a_message_does_not_fit(
    folder: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = expected_answers(llm, [], ["the"], temperature=0, max_tokens=5)
    script = "x" * 500 + "\nthe\n"
    assert chat(monkeypatch, script, "--model", folder, "--temperature", "0", "--max-tokens", "5") == 0
    captured = capsys.readouterr()
    assert "the context holds 128" in captured.err
    assert captured.out == f"{expected[0]}\n"
    options = ["--model", str(folder), "--temperature", "0", "--max-tokens", "1000", "--ignore-eos"]
    assert chat(monkeypatch, "x" * 90 + "\n", *options) == 0
    assert "the context of 128 tokens is full" in capsys.readouterr().err


def test_the_demo_chats(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat(monkeypatch, "hello\n", "--temperature", "0") == 0
    captured = capsys.readouterr()
    assert captured.out.strip()
    assert captured.err == ""


def test_chat_without_a_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tiny.make_checkpoint(tmp_path)
    (other / "tokenizer_config.json").unlink()
    assert chat(monkeypatch, "the\n", "--model", other) == 2
    assert "chat template" in capsys.readouterr().err


def test_ctrl_c_stops_an_answer_and_ends_the_prompt(endless: Path) -> None:
    with start("chat", "--lines", "--model", endless, "--max-tokens", str(LONG), "--ignore-eos") as process:
        process.stdin.write(b"the\n")
        process.stdin.flush()
        process.stdout.read(20)
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline() == b"[stopped]\n"
        process.stdin.write(b"/reset\n")
        process.stdin.flush()
        assert process.stderr.readline() == b"[the conversation starts anew]\n"
        wait_until_at_rest(process)  # at the prompt again
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert err == b""


# ---- info, plan, bench ----


def test_info(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("info", "--json") == 0
    info = json.loads(capsys.readouterr().out)
    assert info["version"] == infinilm.__version__
    assert info["cpu"]["isa"] in info["cpu"]["isas"]
    assert info["cpu"]["num_threads"] >= 1
    assert info["cuda"]["available"] or info["cuda"]["reason"]
    assert "model" not in info
    assert run("info") == 0
    assert info["cpu"]["isa"] in capsys.readouterr().out


def test_info_of_a_model(folder: Path, tmp_path: Path, llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    config_only = tiny.make_checkpoint(tmp_path, weights=False)
    for model in (folder, config_only):
        assert run("info", "--json", "--model", model, "--max-model-len", "100", "--kv-cache", "1MiB") == 0
        about = json.loads(capsys.readouterr().out)["model"]
        assert about["config"]["hidden_size"] == 32
        assert about["num_parameters"] == sum(w.size for w in tiny.make_weights(tiny.CONFIG).values())
        assert about["memory"]["weight_bytes"] == 4 * about["num_parameters"]
        assert about["memory"]["max_model_len"] == 100
        assert about["sampling"] == {}
        assert about["memory"]["kv_bytes"] <= about["memory"]["kv_budget_bytes"] == 2**20
        assert run("info", "--model", model) == 0
        assert "LlamaForCausalLM" in capsys.readouterr().out


def test_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", "--model", folder, "--kv-cache", "1MiB", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    expected = infinilm.plan_memory(folder, kv_cache="1MiB")
    assert (plan["num_blocks"], plan["block_size"]) == (expected.num_blocks, expected.block_size)
    assert plan["num_full_seqs"] == expected.num_full_seqs
    assert plan["kv_bytes"] == expected.kv_bytes
    assert plan["num_tokens"] == expected.num_blocks * expected.block_size
    assert {"weight_bytes", "kv_bytes_per_token", "max_num_seqs", "max_model_len", "dtype", "devices"} <= set(plan)
    assert run("plan", folder, "--kv-cache", "1MiB") == 0
    out = capsys.readouterr().out
    assert "LlamaForCausalLM" in out
    assert f"{plan['num_tokens']:,} tokens in {plan['num_blocks']} blocks of 16" in out
    assert "budget 1.0 MiB" in out


def test_plan_for_a_machine_that_is_not_here(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for device, ids in (("cuda", []), ("cuda:3", []), ("cuda", ["--device-ids", "0,7", "--tensor-parallel-size", "2"])):
        assert run("plan", folder, "--json", "--device", device, *ids, "--memory", "1GiB") == 0
        plan = json.loads(capsys.readouterr().out)
        assert all(name.startswith("cuda") for name in plan["devices"])
        assert plan["dtype"] == "bfloat16"
        rest = 2**30 - plan["weight_bytes"] - plan["workspace_bytes"]
        assert plan["kv_budget_bytes"] == int(0.88 * rest)
    assert infinilm.plan_memory(folder, memory=2**30) == infinilm.plan_memory(folder, memory="1GiB")


def test_plan_of_what_does_not_fit(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, error in (
        (["--memory", "100KB"], "no memory is left for the KV cache"),
        (["--kv-cache", "8KiB", "--max-model-len", "99"], "the KV cache has"),
    ):
        assert run("plan", folder, *options) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "it does not fit; one sequence alone would take" in captured.err
        assert "128 tokens in 8 blocks" in captured.err or "112 tokens in 7 blocks" in captured.err
        assert "one sequence at a time" in captured.err
        assert f"error: {error}" in captured.err
        assert run("plan", folder, "--json", *options) == 2
        captured = capsys.readouterr()
        plan = json.loads(captured.out)
        assert plan["fits"] is False and plan["max_num_seqs"] == 1
        assert error in plan["refusal"] and f"error: {plan['refusal']}" in captured.err


def test_info_of_what_does_not_fit(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--kv-cache", "8KiB", "--max-model-len", "99"]
    assert run("info", folder, *options) == 0
    out = capsys.readouterr().out
    assert "hidden_size 32" in out
    assert "memory    the KV cache has" in out and "memory    one sequence alone would take:" in out
    assert run("info", folder, "--json", *options) == 0
    model = json.loads(capsys.readouterr().out)["model"]
    assert model["fits"] is False and "--max-model-len" in model["refusal"]
    assert model["memory"]["num_tokens"] == 112


def test_plan_for_so_many_sequences(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", folder, "--max-num-seqs", "3", "--max-model-len", "64", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["max_num_seqs"], plan["num_full_seqs"], plan["num_tokens"]) == (3, 3, 3 * 64)


def test_a_model_with_and_without_its_option(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for arguments in ([folder], ["--model", folder]):
        assert run("plan", *arguments, "--kv-cache", "1MiB") == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    assert run("plan") == run("info", "demo") == 0
    assert capsys.readouterr().out.count("assets/demo") == 2
    assert run("plan", folder, "--model", "demo") == 2
    assert "--model" in capsys.readouterr().err


def test_info_lists_the_defaults_of_sampling(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("info", "demo", "--json") == 0
    sampling = json.loads(capsys.readouterr().out)["model"]["sampling"]
    with LLM("demo") as demo:
        defaults = demo.default_sampling_params
    assert sampling["temperature"] == defaults.temperature != 1
    assert run("info", "demo") == 0
    assert f"temperature {defaults.temperature}" in capsys.readouterr().out


SPREAD = {"median", "min", "max"}
SMALL = [
    "--prompt-len",
    "16",
    "--decode-tokens",
    "4",
    "--decode-context",
    "8",
    "--batch-sizes",
    "1,3",
    "--repeats",
    "2",
]


def test_bench_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config_only = tiny.make_checkpoint(tmp_path, weights=False, tokenizer=False)
    options = ["--model", str(config_only), "--load-format", "dummy", "--num-threads", "1", *SMALL]
    assert run("bench", "--json", *options) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert "round 2 of 2" in captured.err
    assert {"version", "model", "dtype", "isa", "num_threads", "weight_bytes", "repeats"} <= set(result)
    prefill, decodes = result["prefill"], result["decode"]
    spreads = [result["read_bytes_per_second"], result["flops_per_second"]]
    spreads += [prefill[k] for k in ("ttft_seconds", "tokens_per_second", "flops_per_second", "share_of_peak")]
    assert [d["batch_size"] for d in decodes] == [1, 3]
    for decode in decodes:
        keys = ("ttft_seconds", "tokens_per_second", "read_bytes_per_second", "share_of_bandwidth")
        spreads += [decode[k] for k in keys]
        assert decode["steps_per_run"] == 4
        assert 0 < decode["itl_p50_seconds"] <= decode["itl_p99_seconds"]
    for spread in spreads:
        assert set(spread) == SPREAD
        assert 0 < spread["min"] <= spread["median"] <= spread["max"]


def test_bench_table(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench, "measure_limits", lambda *_: bench.Limits(1e10, 1e11))  # takes seconds
    assert run("bench", "--model", folder, "--num-threads", "1", *SMALL) == 0
    out = capsys.readouterr().out
    assert "prefill of 16 tokens" in out
    assert "decode of 3 x 4 tokens" in out
    assert "10.0 (10.0 .. 10.0) GB/s" in out


def test_bench_needs_room_for_its_batch(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "--model", folder, "--kv-cache", "8KiB", *SMALL) == 2
    assert "--kv-cache" in capsys.readouterr().err


@pytest.mark.parametrize("tied", [False, True])
def test_counted_work(tmp_path: Path, tied: bool) -> None:
    other = tiny.make_checkpoint(tmp_path, tie_word_embeddings=tied)
    weights = tiny.make_weights(tiny.CONFIG | {"tie_word_embeddings": tied})
    linear = sum(w.size for name, w in weights.items() if w.ndim == 2 and "layers" in name)
    table = tiny.VOCAB_SIZE * 32
    with LLM(other) as model:
        work = count_work(model)
    assert work.prefill_flops(10) == 2 * (10 * linear + table)
    assert work.weight_bytes == 4 * (sum(w.size for w in weights.values()) - (0 if tied else table))
    kv_bytes = 4 * 2 * (2 * 2 * 8)  # float32, layers, K and V of 2 heads of 8
    assert work.decode_bytes(3, 50.0) == work.weight_bytes + 3 * 50 * kv_bytes


def test_work_of_states() -> None:
    """They are read and written once a step and sequence, and each token goes through them."""
    with LLM(golden("qwen3-5-text"), max_model_len=64) as model:
        work, memory, layers = count_work(model), model.memory, model.config.num_hidden_layers
    assert work.state_bytes == memory.state_bytes > 0
    one, three = work.decode_bytes(1, 20), work.decode_bytes(3, 20)
    attention = (layers - 3) * work.kv_bytes_per_token_layer * 20
    assert three - one == 2 * (attention + 2 * memory.state_bytes)
    step, prompt = work.ops(3, 1, 20)["states"], work.ops(1, 12, 12, 2)["states"]
    assert step.num_bytes == 3 * 2 * memory.state_bytes
    assert prompt.num_bytes == 2 * 2 * memory.state_bytes
    assert prompt.flops == 4 * step.flops > 0


def test_work_of_a_pipeline() -> None:
    """Steps are smaller, and each reads the weights."""
    work = Work({"lm_head": 100}, {"lm_head": 100}, 0, 10, multiplied=1, vocab_size=1, sliding_window=(0,))
    staged = replace(work, num_stages=3)
    assert [staged.decode_steps(n) for n in (1, 2, 3, 4, 6, 8)] == [1, 2, 3, 2, 3, 3]
    assert staged.decode_bytes(6, 5) == 3 * 100 + 6 * 10 * 5
    assert staged.ops(6, 1, 5, staged.decode_steps(6))["lm_head"].num_bytes == 3 * 100
    assert staged.decode_bytes(1, 5) == work.decode_bytes(1, 5)
    needed = {"prompt_len": 1, "decode_context": [128], "decode_tokens": 6, "batch_sizes": [8]}
    # 4 steps for each stage: 256 tokens in place of 2048, of which 4 may be of sequences that decode.
    assert bench.context_needed(**needed, max_num_batched_tokens=2048, num_stages=2) == 128 + 6 + 1 + 5
    assert bench.context_needed(**needed, max_num_batched_tokens=2048) == 128 + 6 + 1 + 1


def test_sliding_windows_bound_the_bytes_of_a_step() -> None:
    work = Work({}, {"lm_head": 100}, 0, kv_bytes_per_token_layer=10, multiplied=1, vocab_size=1, sliding_window=(0, 8))
    assert work.decode_bytes(2, 5) == 100 + 2 * 10 * (5 + 5)
    assert work.decode_bytes(2, 50) == 100 + 2 * 10 * (50 + 8)


@pytest.mark.parametrize(
    ("chunk", "batch_size", "context", "stages"),
    [(2048, 1, 8, 1), (2048, 3, 8, 1), (7, 5, 20, 1), (1, 1, 9, 1), (32, 4, 60, 2)],
)
def test_decode_is_measured_on_whole_batches(
    folder: Path, chunk: int, batch_size: int, context: int, stages: int
) -> None:
    needed = bench.context_needed(
        prompt_len=1,
        decode_context=[context],
        decode_tokens=6,
        batch_sizes=[batch_size],
        max_num_batched_tokens=chunk,
        num_stages=stages,
    )
    settings = {"max_num_batched_tokens": chunk, "max_num_seqs": batch_size, "pipeline_parallel_size": stages}
    with LLM(folder, max_model_len=needed, device="cpu", **settings) as model:
        measured = bench.measure_decode(model, batch_size, context, 6, np.random.default_rng(0))
        assert not model._thread.scheduler.has_work
    assert len(measured.step_seconds) == 6
    assert min(measured.step_seconds) > 0
    assert measured.ttft > 0
    assert context + 3 <= measured.context_len <= needed


@pytest.mark.parametrize("command", [["perplexity", "none.txt"], ["serve", "--control-vector", "none.txt"]])
def test_a_file_that_is_missing_is_named_first(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*command) == 2
    assert capsys.readouterr().err == "infinilm: error: none.txt: No such file or directory\n"


@pytest.mark.parametrize(
    "command",
    [
        ["serve"],
        ["serve", "demo", "--lora-folder"],
        ["serve", "demo", "--api-key-file"],
        ["serve", "demo", "--ssl-certfile", "x", "--ssl-keyfile"],
        ["generate", "x", "--control-vector"],
        ["info"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("name", ["circle", "x" * 300], ids=["circle", "long"])
def test_paths_that_no_system_has(
    command: list[str], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A circle of links, or a name that is too long: the message names it, as any other path that is wrong."""
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    assert run(*command, tmp_path / name) == 2
    error = capsys.readouterr().err
    assert name in error and error.count("\n") == 1
