"""The command line: `infinilm generate | chat | info | plan | bench`.

Answers go to stdout, everything else to stderr. Exit codes: 0; 2 for what the user can put right (arguments, settings,
a model that is not there); 1 for what failed on the way; 130 for Ctrl-C. Modules that take long to import are imported
inside the commands, so that `--help` is fast.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import signal
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import infinilm
from infinilm.cli.arguments import (
    Parser,
    add_model_settings,
    add_sampling,
    flag,
    integer_list,
    model_settings,
    positive,
    sampling_params,
)
from infinilm.cli.bench import add_bench, run_bench
from infinilm.cli.output import drop_stdout, note, put, stopped, use_utf8
from infinilm.errors import CacheFullError, ConfigError, DeviceError, InfinilmError, RequestError

if TYPE_CHECKING:
    from infinilm.llm import LLM
    from infinilm.outputs import TokenEvent
    from infinilm.sampling_params import SamplingParams

_PREFILL_CHUNK = 128  # tokens per step: Ctrl-C waits for a step to end, and larger chunks are hardly faster on a CPU
_USER_ERRORS = (
    ConfigError,
    RequestError,
    CacheFullError,
    DeviceError,
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
    UnicodeError,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    Parameters
    ----------
    argv
        Arguments without the program's name; default: those of the process.
    """
    use_utf8()
    try:
        args = _make_parser().parse_args(argv)
    except SystemExit as stop:  # --help, --version and wrong usage
        return stop.code if isinstance(stop.code, int) else 2
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        code = run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        if args.debug:
            traceback.print_exc()
        return stopped()
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        drop_stdout()
        return 0
    except (InfinilmError, OSError, UnicodeError, MemoryError) as error:
        if args.debug:
            traceback.print_exc()
        note(f"infinilm: error: {str(error) or type(error).__name__}")
        return 2 if isinstance(error, _USER_ERRORS) else 1


# ---- arguments ----


def _make_parser() -> argparse.ArgumentParser:
    common = Parser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser = Parser("infinilm", description="LLM inference on this machine.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"infinilm {infinilm.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, parents=[common], help=text, description=text, allow_abbrev=False)
        sub.set_defaults(run=run)
        return sub

    _add_generate(command("generate", _generate, "Complete a prompt, streaming the text."))
    _add_chat(command("chat", _chat, "Talk with a model."))
    _add_info(command("info", _info, "Describe this installation, this machine and, if asked, a model."))
    _add_plan(command("plan", _plan, "Tell how much memory a model takes, from its headers alone."))
    add_bench(command("bench", run_bench, "Measure speed against this machine's limits, or under many requests."))
    return parser


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", help='the text to continue; "-" reads it from stdin')
    parser.add_argument("--no-echo", action="store_true", help="print the continuation only, without the prompt")
    parser.add_argument(
        "--token-ids", action="store_true", help="the prompt is token ids, such as '1 5 7', and so is the output"
    )
    parser.add_argument("--stats", action="store_true", help="print a summary of the timing on stderr")
    add_model_settings(parser)
    add_sampling(parser, max_tokens=256)


def _add_chat(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="what the model is told before the conversation")
    add_model_settings(parser)
    add_sampling(parser, max_tokens=512)


def _add_info(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_model_settings(parser, model=None, positional=True, loads=False)


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--max-num-seqs", type=positive, default=64, metavar="N", help="sequences that run at the same time; default 64"
    )
    add_model_settings(parser, positional=True, loads=False)


@contextlib.contextmanager
def _open_llm(args: argparse.Namespace) -> Iterator[LLM]:
    from infinilm.llm import LLM

    with LLM(
        args.model,
        num_threads=args.num_threads,
        max_num_seqs=1,
        max_num_batched_tokens=_PREFILL_CHUNK,
        **model_settings(args),
    ) as llm:
        yield llm


# ---- streams and Ctrl-C ----


class _CtrlC:
    """While tokens stream, Ctrl-C is noted and acted on between tokens, not in the middle of the engine's work.

    Until the first token and on the second Ctrl-C it raises KeyboardInterrupt as ever: a long prompt takes a while.
    """

    def __init__(self) -> None:
        self.pressed = False
        self.streaming = False
        self._installed = False

    def __enter__(self) -> _CtrlC:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            with contextlib.suppress(ValueError):  # not the main thread: no signals here
                signal.signal(signal.SIGINT, self._handle)
                self._installed = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.pressed or not self.streaming:
            raise KeyboardInterrupt
        self.pressed = True


@dataclass(slots=True)
class _Reply:
    """What came out of a stream so far."""

    text: str = ""
    num_tokens: int = 0
    finish_reason: str | None = None
    interrupted: bool = False
    ttft: float = 0.0  # seconds from the request to the first token
    decode_seconds: float = 0.0  # from the first token to the last


def _print_stream(events: Iterator[TokenEvent], reply: _Reply, as_token_ids: bool = False) -> None:
    """Print a stream as it comes, with a line end behind it; `reply` is complete even when Ctrl-C cuts it short."""
    started = time.perf_counter()
    try:
        # Closing the generator frees the slot of what is unfinished.
        with _CtrlC() as ctrl_c, contextlib.closing(cast("Generator[TokenEvent]", events)):
            for event in events:
                ctrl_c.streaming = True
                elapsed = time.perf_counter() - started
                reply.ttft = reply.ttft or elapsed
                reply.decode_seconds = elapsed - reply.ttft
                reply.num_tokens += event.token_id is not None
                reply.finish_reason = event.finish_reason
                text = f"{event.token_id} " if as_token_ids and event.token_id is not None else event.text
                reply.text += text
                if text:
                    put(text)
                if ctrl_c.pressed and event.finish_reason is None:
                    reply.interrupted = True
                    break
    except KeyboardInterrupt:
        reply.interrupted = True
    finally:
        put("\n")


# ---- generate ----


def _read_prompt(args: argparse.Namespace) -> str | list[int]:
    text: str = args.prompt
    if text == "-":
        text = sys.stdin.read().removesuffix("\n").removesuffix("\r")
    if not args.token_ids:
        return text
    try:
        return integer_list(text)
    except argparse.ArgumentTypeError as error:
        raise RequestError(f"--token-ids: {error}") from None


def _generate(args: argparse.Namespace) -> int:
    params = sampling_params(args)
    prompt = _read_prompt(args)
    with _open_llm(args) as llm:
        events = llm.stream([prompt], params)  # a bad request raises here, before anything is printed
        if not args.no_echo:
            put(prompt if isinstance(prompt, str) else "".join(f"{i} " for i in prompt))
        reply = _Reply()
        _print_stream(events, reply, args.token_ids)
        if args.stats:
            num_prompt = len(llm.tokenize(prompt) if isinstance(prompt, str) else prompt)
            note(_stats(llm, num_prompt, reply))
    return stopped() if reply.interrupted else 0


def _stats(llm: LLM, num_prompt_tokens: int, reply: _Reply) -> str:
    rate = (reply.num_tokens - 1) / reply.decode_seconds if reply.num_tokens > 1 else 0.0
    decode = f", then {rate:.1f} tokens/s" if rate else ""
    return (
        f"{num_prompt_tokens} prompt tokens, {reply.num_tokens} new tokens ({reply.finish_reason or 'stopped'}); "
        f"first token after {reply.ttft:.3f} s{decode}; model loaded in {llm.load_time:.2f} s as {llm.dtype}"
    )


# ---- chat ----


def _chat(args: argparse.Namespace) -> int:
    params = sampling_params(args)
    interactive = sys.stdin.isatty()
    with _open_llm(args) as llm:
        if interactive:
            import readline  # noqa: F401 (line editing and history of input())

            note("/reset starts anew; /exit or Ctrl-D ends; Ctrl-C stops an answer")
        opening = [{"role": "system", "content": args.system}] if args.system is not None else []
        messages = list(opening)
        while (line := _read_line("> " if interactive else "")) is not None and line.strip() != "/exit":
            command = line.strip()
            if command == "/reset":
                messages = list(opening)
                note("[the conversation starts anew]")
            elif command.startswith("/") and " " not in command:
                note(f"[no command {command}; there are /reset and /exit]")
            elif command:
                _answer(llm, messages, line, params)
    return 0


def _read_line(prompt: str) -> str | None:
    """Read a line without its end; None at the end of the input."""
    try:
        return input(prompt)
    except EOFError:
        if prompt:
            put("\n")
        return None


def _answer(llm: LLM, messages: list[dict[str, str]], text: str, params: SamplingParams) -> None:
    """Print the model's answer to `text`; both become part of `messages`."""
    messages.append({"role": "user", "content": text})
    reply = _Reply()
    try:
        ids = _fit_context(llm, messages, reserve=min(params.max_tokens or 1, llm.max_model_len // 4))
        _print_stream(llm.stream([ids], params), reply)
    except RequestError as error:
        messages.pop()
        note(f"[{error}]")
        return
    messages.append({"role": "assistant", "content": reply.text})
    if reply.interrupted:
        note("[stopped]")
    elif reply.finish_reason == "length":
        full = len(ids) + reply.num_tokens >= llm.max_model_len
        why = f"the context of {llm.max_model_len} tokens is full" if full else f"--max-tokens {params.max_tokens}"
        note(f"[cut off: {why}]")


def _fit_context(llm: LLM, messages: list[dict[str, str]], reserve: int) -> list[int]:
    """Token ids of the conversation, without the oldest exchanges where `reserve` tokens would not be left."""
    dropped = 0
    while len(ids := llm.render_chat(messages)) + reserve > llm.max_model_len:
        begin = 1 if messages[0]["role"] == "system" else 0
        if len(messages) - begin < 3:  # the new message alone; `stream` says whether it fits
            break
        del messages[begin : begin + 2]
        dropped += 1
    if dropped:
        what = "exchange was" if dropped == 1 else f"{dropped} exchanges were"
        note(f"[the oldest {what} dropped: the context holds {llm.max_model_len} tokens]")
    return ids


# ---- info and plan ----


def _info(args: argparse.Namespace) -> int:
    from infinilm.cli import describe

    info: dict[str, Any] = {
        "version": infinilm.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        **infinilm.backends(),
    }
    if args.model is not None:
        info["model"] = describe.describe_model(args.model, model_settings(args))
    elif given := [name for name, value in model_settings(args).items() if value not in (None, "auto", 1)]:
        raise ConfigError(f"no model for {', '.join(flag(name) for name in given)}: pass --model too")
    if args.json:
        put(json.dumps(info, indent=1) + "\n")
    else:
        put("\n".join(describe.info_lines(info)) + "\n")
    return 0


def _plan(args: argparse.Namespace) -> int:
    from infinilm.cli import describe

    settings = model_settings(args) | {"max_num_seqs": args.max_num_seqs}
    plan = describe.describe_plan(describe.plan_any(args.model, settings))
    put((json.dumps(plan, indent=1) if args.json else "\n".join(describe.plan_lines(plan))) + "\n")
    return 0
