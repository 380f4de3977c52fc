"""The command line: `infinilm COMMAND`, such as generate, chat, serve, plan or bench.

Answers go to stdout, everything else to stderr. Exit codes: 0; 2 for what the user can put right (arguments, settings,
a model that is not there); 1 for what failed on the way; 130 for Ctrl-C. Modules that take long to import are imported
inside the commands, so that `--help` is fast.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import platform
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import infinilm
from infinilm.cli.arguments import (
    Parser,
    add_constraint,
    add_control_vector,
    add_images,
    add_lora,
    add_model_settings,
    add_quiet,
    add_sampling,
    add_speculation,
    add_text,
    add_tiers,
    as_options,
    flag,
    integer_list,
    model_settings,
    open_llm,
    positive,
    sampling_params,
    sizes,
    subcommands,
)
from infinilm.cli.bench import add_bench, run_bench
from infinilm.cli.cache import add_cache, run_cache
from infinilm.cli.chat import add_chat, run_chat
from infinilm.cli.output import drop_stdout, note, prepare_streams, put, stdin_text, stopped
from infinilm.cli.pack import add_pack, run_pack
from infinilm.cli.perplexity import add_perplexity, run_perplexity
from infinilm.cli.quantize import add_quantize, run_quantize
from infinilm.cli.receipts import add_receipt, add_verify, check_receipt, run_verify, write_receipts
from infinilm.cli.route import add_route, run_route
from infinilm.cli.serve import add_serve, run_serve
from infinilm.cli.stream import PlainPrinter, Reply, event_text, print_stream, read_stream
from infinilm.errors import (
    CacheFullError,
    ConfigError,
    DeviceError,
    InfinilmError,
    ReceiptError,
    RequestError,
    WeightError,
    did_you_mean,
)

if TYPE_CHECKING:
    from infinilm.llm import LLM
    from infinilm.outputs import TokenEvent
    from infinilm.planning.memory import ModelPlan

_USER_ERRORS = (
    ConfigError,
    WeightError,
    RequestError,
    ReceiptError,
    CacheFullError,
    DeviceError,
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
    UnicodeError,
)
_WRONG_PATHS = (errno.ELOOP, errno.ENAMETOOLONG)  # which have no exceptions of their own


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    Parameters
    ----------
    argv
        Arguments without the program's name; default: those of the process.
    """
    prepare_streams()
    try:
        args = _parse(sys.argv[1:] if argv is None else argv)
    except SystemExit as stop:  # --help, --version and wrong usage
        return stop.code if isinstance(stop.code, int) else 2
    return run_command(args)


def run_command(args: argparse.Namespace) -> int:
    """Run what was parsed; returns the exit code."""
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
        note(f"infinilm: error: {as_options(_told(error), args)}")
        is_users = isinstance(error, _USER_ERRORS) or (isinstance(error, OSError) and error.errno in _WRONG_PATHS)
        return 2 if is_users else 1


def _told(error: BaseException) -> str:
    """What an error says, one of the system as "FILE: No such file or directory"."""
    if isinstance(error, OSError) and error.strerror and isinstance(error.filename, str):
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, MemoryError):
        return str(error) or "out of memory, or of what ulimit -v allows"
    return str(error) or repr(error)


# ---- arguments ----


def _parse(words: Sequence[str]) -> argparse.Namespace:
    """Read the arguments; SystemExit: there is nothing to run. `help` and `version` are --help and --version."""
    parser = make_parser()
    if not words:
        parser.print_help(sys.stderr)
        raise SystemExit(2)
    first, *rest = words
    if first == "help":
        first, *rest = [*rest, "--help"]
    elif first == "version":
        first = "--version"
    commands = subcommands(parser)
    if not first.startswith("-") and first not in commands:
        hint = did_you_mean(first, commands) or f"; there are {', '.join(commands)}"
        parser.error(f"there is no command {first!r}{hint}")
    return parser.parse_args([first, *rest])


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    common = Parser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser = Parser("infinilm", description="LLM inference on this machine.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"infinilm {infinilm.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> Parser:
        sub = commands.add_parser(name, parents=[common], help=text, description=text, allow_abbrev=False)
        sub.set_defaults(run=run)
        return sub

    _add_generate(command("generate", _generate, "Continue a text as it is, without the model's chat template."))
    add_chat(command("chat", run_chat, "Talk with a model, or ask it one MESSAGE."))
    _add_info(command("info", _info, "Describe this installation, this machine and, if asked, a model."))
    _add_plan(command("plan", _plan, "Tell how much memory a model takes, from its headers alone."))
    add_quantize(command("quantize", run_quantize, "Write a quantised checkpoint, which transformers reads, too."))
    add_pack(command("pack", run_pack, "Write a folder with weights packed for CPUs, which starts at once."))
    add_perplexity(command("perplexity", run_perplexity, "Tell how well a model foretells a text of any length."))
    add_verify(command("verify", run_verify, "Check that a model gives the answers of receipts."))
    add_cache(command("cache", run_cache, "Fill, list or prune a folder of prefixes, as --disk-cache keeps them."))
    add_serve(command("serve", run_serve, "Serve a model over HTTP: the API of OpenAI, and a chat page at /."))
    add_route(command("route", run_route, "One address for several running servers of one model."))
    add_bench(command("bench", run_bench, "Measure speed against this machine's limits, or under many requests."))
    _add_completion(
        command("completion", _completion, "Print a script by which a shell completes commands and options.")
    )
    return parser


def _add_completion(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="where the script goes is in docs/guide.md")


def _completion(args: argparse.Namespace) -> int:
    from infinilm.cli.completion import completion_script

    put(completion_script(args.shell, make_parser()))
    return 0


def _add_generate(parser: argparse.ArgumentParser) -> None:
    add_text(parser, "prompt", 'the text to continue; default: stdin, if that is no terminal, as is "-"')
    parser.add_argument("--no-echo", action="store_true", help="print the continuation only, without the prompt")
    parser.add_argument(
        "--token-ids", action="store_true", help="the prompt is token ids, such as '1 5 7', and so is the output"
    )
    parser.add_argument("--stats", action="store_true", help="print a summary of the timing on stderr")
    add_images(parser, "one for each of the model's marks in the prompt")
    add_model_settings(parser)
    add_lora(parser, "the adapter that the prompt goes through")
    add_sampling(parser, max_tokens=256, several=True)
    add_constraint(parser)
    add_control_vector(parser)
    add_tiers(parser)
    add_speculation(parser)
    add_receipt(parser)
    add_quiet(parser)


def _add_info(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_model_settings(parser, model=None, positional=True, loads=False)


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--max-num-seqs", type=positive, default=64, metavar="N", help="sequences that run at the same time; default 64"
    )
    parser.add_argument(
        "--memory",
        type=sizes,
        metavar="SIZE[,SIZE]",
        help="plan for devices with so much that is free, such as 80GiB; it need not be here. With --gpu-layers "
        "or --cpu-moe, that of the host and that of the GPU",
    )
    add_model_settings(parser, positional=True, loads=False)
    add_lora(parser, "an adapter that requests can name; may be repeated")
    add_speculation(parser)


# ---- generate ----


def _read_prompt(args: argparse.Namespace) -> str | list[int]:
    text: str | None = args.prompt
    if text is None:
        text = "" if sys.stdin.isatty() else stdin_text()
        if not text:
            raise RequestError("there is no prompt: infinilm generate PROMPT, or a text at stdin")
    elif text == "-":
        text = stdin_text()
    if not args.token_ids:
        return text
    try:
        return integer_list(text)
    except argparse.ArgumentTypeError as error:
        raise RequestError(f"--token-ids: {error}") from None


def _generate(args: argparse.Namespace) -> int:
    sampling_params(args)  # a bad option is told before the model is loaded
    check_receipt(args)
    prompt = _read_prompt(args)
    with open_llm(args) as llm:
        params = replace(sampling_params(args, llm), return_receipt=args.receipt is not None)
        asked: Any = prompt
        if args.image:
            asked = llm.place_images(llm.tokenize(prompt) if isinstance(prompt, str) else prompt, args.image)
        events = llm.stream([asked], params)  # a bad request raises here, before anything is printed
        if not args.no_echo and params.n == 1:
            put(prompt if isinstance(prompt, str) else "".join(f"{i} " for i in prompt))
        reply = Reply()
        if params.n > 1:
            _print_several(events, params.n, reply, args.token_ids)
        else:
            print_stream(events, reply, PlainPrinter(), args.token_ids)
        if reply.receipts:
            write_receipts(reply.receipts, args)
        if args.stats:
            num_prompt = len(llm.tokenize(asked) if isinstance(asked, str) else asked)
            note(_stats(llm, num_prompt, reply))
    return stopped() if reply.interrupted else 0


def _print_several(events: Iterator[TokenEvent], num_texts: int, reply: Reply, as_token_ids: bool) -> None:
    """Print the texts of one prompt one after the other, each as soon as it and those before it are done."""
    texts, is_done, num_printed = [""] * num_texts, [False] * num_texts, 0
    for event in read_stream(events, reply):
        texts[event.completion] += event_text(event, as_token_ids)
        is_done[event.completion] = event.finish_reason is not None
        while num_printed < num_texts and is_done[num_printed]:
            put(f"--- {num_printed + 1} of {num_texts} ---\n{texts[num_printed]}\n")
            num_printed += 1


def _stats(llm: LLM, num_prompt_tokens: int, reply: Reply) -> str:
    rate = (reply.num_tokens - 1) / reply.decode_seconds if reply.num_tokens > 1 else 0.0
    decode = f", then {rate:.1f} tokens/s" if rate else ""
    return (
        f"{num_prompt_tokens} prompt tokens, {reply.num_tokens} new tokens ({reply.finish_reason or 'stopped'}); "
        f"first token after {reply.ttft:.3f} s{decode}; model loaded in {llm.load_time:.2f} s as {llm.dtype}"
    )


# ---- info and plan ----


def _info(args: argparse.Namespace) -> int:
    from infinilm.cli import describe

    info: dict[str, Any] = {
        "version": infinilm.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        **infinilm.backends(),
    }
    refusal = None
    if args.model is not None:
        with _planned(args, {}) as (name, plan, refusal):
            info["model"] = describe.describe_model(plan, name) | _fits(refusal, args)
    elif given := [name for name, value in model_settings(args).items() if value not in (None, "auto", 1)]:
        raise ConfigError(f"no model for {', '.join(flag(name) for name in given)}: pass --model too")
    put((json.dumps(info, indent=1) if args.json else "\n".join(describe.info_lines(info))) + "\n")
    return 0


def _plan(args: argparse.Namespace) -> int:
    from infinilm.cli import describe

    settings = {"max_num_seqs": args.max_num_seqs, "memory": args.memory, "speculation": args.speculation}
    with _planned(args, settings) as (name, plan, refusal):
        about = describe.describe_plan(plan, name)
    if args.json:
        put(json.dumps(about | _fits(refusal, args), indent=1) + "\n")
    elif refusal is None:
        put("\n".join(describe.plan_lines(about)) + "\n")
    else:
        note("\n".join(["it does not fit; one sequence alone would take", *describe.plan_lines(about)]))
    if refusal is not None:
        raise refusal
    return 0


@contextlib.contextmanager
def _planned(
    args: argparse.Namespace, more: Mapping[str, Any]
) -> Iterator[tuple[str, ModelPlan, CacheFullError | None]]:
    """What to call the model, its plan from headers alone, and why it does not fit; `more`: settings of the plan."""
    from infinilm.checkpoint.sketch import open_headers
    from infinilm.cli import describe

    settings = {**model_settings(args), **more}
    with open_headers(args.model, settings.pop("revision")) as headers:
        plan, refusal = describe.plan_or_least(headers.path, settings)
        yield headers.name, plan, refusal


def _fits(refusal: CacheFullError | None, args: argparse.Namespace) -> dict[str, Any]:
    """Whether a model fits, for JSON: the numbers of one that does not are those of one sequence alone."""
    return {"fits": True} if refusal is None else {"fits": False, "refusal": as_options(str(refusal), args)}
