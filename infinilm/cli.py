"""The command line: `infinilm generate | chat | info | plan | bench`.

Answers go to stdout, everything else to stderr. Exit codes: 0; 2 for what the user can put right (arguments, settings,
a model that is not there); 1 for what failed on the way; 130 for Ctrl-C. Modules that take long to import are imported
inside the commands, so that `--help` is fast.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import infinilm
from infinilm.errors import CacheFullError, ConfigError, DeviceError, InfinilmError, RequestError

if TYPE_CHECKING:
    from infinilm.llm import LLM
    from infinilm.outputs import TokenEvent
    from infinilm.sampling_params import SamplingParams

_PREFILL_CHUNK = 128  # tokens per step: Ctrl-C waits for a step to end, and larger chunks are hardly faster on a CPU
_BENCH_CHUNK = 2048
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
    _use_utf8()
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
        return _stopped()
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        _drop_stdout()
        return 0
    except (InfinilmError, OSError, UnicodeError, MemoryError) as error:
        if args.debug:
            traceback.print_exc()
        _note(f"infinilm: error: {str(error) or type(error).__name__}")
        return 2 if isinstance(error, _USER_ERRORS) else 1


# ---- arguments ----


class _Parser(argparse.ArgumentParser):
    """An argument parser that suggests the nearest option for one it does not know."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._hint(unknown)}")
        return found, unknown

    def _hint(self, unknown: Iterable[str]) -> str:
        options = list(self._option_string_actions)
        for argument in unknown:
            if close := difflib.get_close_matches(argument.partition("=")[0], options, n=1):
                return f"; did you mean {close[0]}?"
        return ""


def _make_parser() -> argparse.ArgumentParser:
    common = _Parser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser = _Parser("infinilm", description="LLM inference on this machine.", allow_abbrev=False)
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
    _add_bench(command("bench", _bench, "Measure prefill and decode against the limits of this machine."))
    return parser


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", help='the text to continue; "-" reads it from stdin')
    parser.add_argument("--no-echo", action="store_true", help="print the continuation only, without the prompt")
    parser.add_argument(
        "--token-ids", action="store_true", help="the prompt is token ids, such as '1 5 7', and so is the output"
    )
    parser.add_argument("--stats", action="store_true", help="print a summary of the timing on stderr")
    _add_model_settings(parser)
    _add_sampling(parser, max_tokens=256)


def _add_chat(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="what the model is told before the conversation")
    _add_model_settings(parser)
    _add_sampling(parser, max_tokens=512)


def _add_info(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    _add_model_settings(parser, model=None, loads=False)


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    _add_model_settings(parser, loads=False)


def _add_bench(parser: argparse.ArgumentParser) -> None:
    _add_model_settings(parser, context=False)
    parser.add_argument(
        "--load-format",
        choices=("auto", "dummy"),
        default="auto",
        help="dummy: random weights, so that a folder with a config.json is enough",
    )
    parser.add_argument("--prompt-len", type=_positive, default=512, metavar="N", help="tokens of the prefill")
    parser.add_argument("--decode-tokens", type=_positive, default=64, metavar="N", help="steps of a decode")
    parser.add_argument(
        "--decode-context", type=_positive, default=128, metavar="N", help="tokens in front of a decode"
    )
    parser.add_argument(
        "--batch-sizes", type=_positive_list, default=[1, 8], metavar="N,N", help="sequences that decode at once"
    )
    parser.add_argument("--repeats", type=_positive, default=3, metavar="N", help="rounds; medians are reported")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _add_model_settings(
    parser: argparse.ArgumentParser, *, model: str | None = "demo", loads: bool = True, context: bool = True
) -> None:
    """Add what decides which model and how; `loads`: also what only loading it needs."""
    group = parser.add_argument_group("model")
    default = ", which is bundled and the default" if model else ", which is bundled"
    group.add_argument("--model", default=model, help=f'checkpoint folder, hub id, or "demo"{default}')
    group.add_argument("--dtype", default="auto", help="float32, bfloat16, float16 or auto (default)")
    group.add_argument(
        "--kv-cache", metavar="SIZE", help="memory of the KV cache: 4GiB, 50%%; default: half of what is free"
    )
    if context:
        group.add_argument("--max-model-len", type=_positive, metavar="N", help="tokens of prompt and output together")
    group.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 or auto (default): cuda if usable")
    if loads:
        group.add_argument("--num-threads", type=_positive, metavar="N", help="CPU threads; default: one per core")


def _add_sampling(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--temperature", type=float, metavar="T", help="0 is greedy; default 1")
    group.add_argument("--top-k", type=int, metavar="K", help="choose among the K most probable tokens")
    group.add_argument("--top-p", type=float, metavar="P", help="choose among the tokens that make up probability P")
    group.add_argument("--min-p", type=float, metavar="P", help="drop tokens below P times the most probable one")
    group.add_argument("--seed", type=int, metavar="N", help="makes the output repeatable")
    group.add_argument(
        "--max-tokens", type=int, default=max_tokens, metavar="N", help=f"new tokens; default {max_tokens}"
    )
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    group.add_argument("--stop-token-ids", type=_integer_list, metavar="ID,ID", help="end after one of these tokens")
    group.add_argument("--ignore-eos", action="store_true", default=None, help="go on after the end-of-text token")


def _positive(text: str) -> int:
    with contextlib.suppress(ValueError):
        if (value := int(text)) >= 1:
            return value
    raise argparse.ArgumentTypeError(f"expected an integer >= 1, got {text!r}")


def _integer_list(text: str) -> list[int]:
    try:
        return [int(item) for item in text.replace(",", " ").split()]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected integers such as 1,8, got {text!r}") from None


def _positive_list(text: str) -> list[int]:
    values = _integer_list(text)
    if not values or min(values) < 1:
        raise argparse.ArgumentTypeError(f"expected integers >= 1 such as 1,8, got {text!r}")
    return list(dict.fromkeys(values))


def _model_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Keywords of `plan_model` and `LLM` that decide what is loaded."""
    return {
        "device": args.device,
        "dtype": args.dtype,
        "kv_cache": args.kv_cache,
        "max_model_len": args.max_model_len,
    }


def _sampling_params(args: argparse.Namespace) -> SamplingParams:
    """Make the parameters; an option that is not given keeps the library's default."""
    from infinilm.sampling_params import make_sampling_params

    names = ("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "stop", "stop_token_ids", "ignore_eos")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return make_sampling_params(None, given)


@contextlib.contextmanager
def _open_llm(args: argparse.Namespace) -> Iterator[LLM]:
    from infinilm.llm import LLM

    with LLM(
        args.model,
        num_threads=args.num_threads,
        max_num_seqs=1,
        max_num_batched_tokens=_PREFILL_CHUNK,
        **_model_settings(args),
    ) as llm:
        yield llm


# ---- streams and Ctrl-C ----


def _use_utf8() -> None:
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)  # pytest and notebooks put other objects there
        if reconfigure is not None:
            reconfigure(encoding="utf-8", errors="strict" if stream is sys.stdin else "backslashreplace")


def _put(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _note(text: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        print(text, file=sys.stderr, flush=True)


def _stopped() -> int:
    """Exit code of Ctrl-C; what was written so far reaches its reader."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_stdout()
    return 128 + signal.SIGINT


def _drop_stdout() -> None:
    """Nobody reads: keep the flush at exit from complaining."""
    with contextlib.suppress(OSError, ValueError):  # a stdout without a file descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
                    _put(text)
                if ctrl_c.pressed and event.finish_reason is None:
                    reply.interrupted = True
                    break
    except KeyboardInterrupt:
        reply.interrupted = True
    finally:
        _put("\n")


# ---- generate ----


def _read_prompt(args: argparse.Namespace) -> str | list[int]:
    text: str = args.prompt
    if text == "-":
        text = sys.stdin.read().removesuffix("\n").removesuffix("\r")
    if not args.token_ids:
        return text
    try:
        return _integer_list(text)
    except argparse.ArgumentTypeError as error:
        raise RequestError(f"--token-ids: {error}") from None


def _generate(args: argparse.Namespace) -> int:
    params = _sampling_params(args)
    prompt = _read_prompt(args)
    with _open_llm(args) as llm:
        events = llm.stream([prompt], params)  # a bad request raises here, before anything is printed
        if not args.no_echo:
            _put(prompt if isinstance(prompt, str) else "".join(f"{i} " for i in prompt))
        reply = _Reply()
        _print_stream(events, reply, args.token_ids)
        if args.stats:
            num_prompt = len(llm.tokenize(prompt) if isinstance(prompt, str) else prompt)
            _note(_stats(llm, num_prompt, reply))
    return _stopped() if reply.interrupted else 0


def _stats(llm: LLM, num_prompt_tokens: int, reply: _Reply) -> str:
    rate = (reply.num_tokens - 1) / reply.decode_seconds if reply.num_tokens > 1 else 0.0
    decode = f", then {rate:.1f} tokens/s" if rate else ""
    return (
        f"{num_prompt_tokens} prompt tokens, {reply.num_tokens} new tokens ({reply.finish_reason or 'stopped'}); "
        f"first token after {reply.ttft:.3f} s{decode}; model loaded in {llm.load_time:.2f} s as {llm.dtype}"
    )


# ---- chat ----


def _chat(args: argparse.Namespace) -> int:
    params = _sampling_params(args)
    interactive = sys.stdin.isatty()
    with _open_llm(args) as llm:
        if interactive:
            import readline  # noqa: F401 (line editing and history of input())

            _note("/reset starts anew; /exit or Ctrl-D ends; Ctrl-C stops an answer")
        opening = [{"role": "system", "content": args.system}] if args.system is not None else []
        messages = list(opening)
        while (line := _read_line("> " if interactive else "")) is not None and line.strip() != "/exit":
            command = line.strip()
            if command == "/reset":
                messages = list(opening)
                _note("[the conversation starts anew]")
            elif command.startswith("/") and " " not in command:
                _note(f"[no command {command}; there are /reset and /exit]")
            elif command:
                _answer(llm, messages, line, params)
    return 0


def _read_line(prompt: str) -> str | None:
    """Read a line without its end; None at the end of the input."""
    try:
        return input(prompt)
    except EOFError:
        if prompt:
            _put("\n")
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
        _note(f"[{error}]")
        return
    messages.append({"role": "assistant", "content": reply.text})
    if reply.interrupted:
        _note("[stopped]")
    elif reply.finish_reason == "length":
        full = len(ids) + reply.num_tokens >= llm.max_model_len
        why = f"the context of {llm.max_model_len} tokens is full" if full else f"--max-tokens {params.max_tokens}"
        _note(f"[cut off: {why}]")


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
        _note(f"[the oldest {what} dropped: the context holds {llm.max_model_len} tokens]")
    return ids


# ---- info and plan ----


def _info(args: argparse.Namespace) -> int:
    from infinilm import describe

    info: dict[str, Any] = {
        "version": infinilm.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        **infinilm.backends(),
    }
    if args.model is not None:
        info["model"] = describe.describe_model(args.model, _model_settings(args))
    elif _model_settings(args) != {"device": "auto", "dtype": "auto", "kv_cache": None, "max_model_len": None}:
        raise ConfigError("--device, --dtype, --kv-cache and --max-model-len describe a model: pass --model too")
    if args.json:
        _put(json.dumps(info, indent=1) + "\n")
    else:
        _put("\n".join(describe.info_lines(info)) + "\n")
    return 0


def _plan(args: argparse.Namespace) -> int:
    from infinilm import describe

    memory = describe.describe_memory(describe.plan_any(args.model, _model_settings(args)))
    _put((json.dumps(memory, indent=1) if args.json else "\n".join(describe.memory_lines(memory))) + "\n")
    return 0


# ---- bench ----


def _bench(args: argparse.Namespace) -> int:
    from infinilm import _core, bench
    from infinilm.errors import ConfigError
    from infinilm.llm import LLM
    from infinilm.system import resolve_device

    device = resolve_device(args.device)
    if device != "cpu":
        raise ConfigError(
            f"bench measures against the limits of a CPU, not of {device}: pass --device cpu, or run "
            "'python -m tests.bench.gpu' in the source tree, which measures a GPU"
        )
    num_threads = args.num_threads or _core.default_num_threads()
    needed = bench.context_needed(
        prompt_len=args.prompt_len,
        decode_context=args.decode_context,
        decode_tokens=args.decode_tokens,
        batch_sizes=args.batch_sizes,
        max_num_batched_tokens=_BENCH_CHUNK,
    )
    _note(f"loading {args.model}")
    with LLM(
        args.model,
        device=device,
        dtype=args.dtype,
        max_model_len=needed,
        max_num_seqs=max(args.batch_sizes),
        max_num_batched_tokens=_BENCH_CHUNK,
        kv_cache=args.kv_cache,
        num_threads=num_threads,
        load_format=args.load_format,
    ) as llm:
        result = bench.run_bench(
            llm,
            num_threads=num_threads,
            prompt_len=args.prompt_len,
            decode_tokens=args.decode_tokens,
            decode_context=args.decode_context,
            batch_sizes=args.batch_sizes,
            repeats=args.repeats,
            progress=_note,
        )
        about = {
            "version": infinilm.__version__,
            "model": str(llm.model_path),
            "architecture": llm.config.architecture,
            "load_format": args.load_format,
            "dtype": llm.dtype,
            "isa": _core.selected_cpu_isa(),
            "num_threads": num_threads,
            "weight_bytes": llm.memory.weight_bytes,
            "load_seconds": llm.load_time,
        }
    _put((json.dumps(about | asdict(result), indent=1) if args.json else bench.format_table(about, result)) + "\n")
    return 0
