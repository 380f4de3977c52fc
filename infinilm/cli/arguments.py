"""What the commands of the command line have in common: argument types, options of the model and of sampling."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import functools
import json
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from infinilm.errors import ConfigError

if TYPE_CHECKING:
    from infinilm.constraint import Constraint
    from infinilm.llm import LLM
    from infinilm.sampling_params import SamplingParams

_PREFILL_CHUNK = 128  # tokens per step: Ctrl-C waits for a step to end, and larger chunks are hardly faster on a CPU


class Parser(argparse.ArgumentParser):
    """An argument parser that reads --config, and whose errors are one line, with the nearest option for one unknown.

    Attributes
    ----------
    hints : mapping of str to str
        What is said of options that other programs have.
    """

    hints: Mapping[str, str] = {}

    def error(self, message: str) -> NoReturn:
        """End the program with what is wrong; the usage, which may have 24 lines, is in --help."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As the base class; unknown arguments end the program here."""
        if "--config" in self._option_string_actions and args is not None:
            from infinilm.cli.config_file import with_config

            args = with_config(self, args)
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._hint(unknown)}")
        return found, unknown

    def _hint(self, unknown: Iterable[str]) -> str:
        options = list(self._option_string_actions)
        for name in (argument.partition("=")[0] for argument in unknown):
            if name in options:
                return f"; {name} must come before --, which ends the options"
            if name in self.hints:
                return f"; {self.hints[name]}"
            longer = [option for option in options if name.startswith("--") and option.startswith(name)]
            if close := longer or difflib.get_close_matches(name, options, n=1):
                return f"; did you mean {' or '.join(close)}?"
        return ""


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of a program's commands, by their names."""
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return dict(commands.choices)


def add_text(parser: argparse.ArgumentParser, name: str, about: str) -> None:
    """Add a text that is given as it is or behind -p, as other programs have it; absent, it is None."""
    either = parser.add_mutually_exclusive_group()
    parser.set_defaults(**{name: None})  # not of the arguments: the one that is absent would overwrite the other
    either.add_argument(name, nargs="?", metavar=name.upper(), default=argparse.SUPPRESS, help=about)
    either.add_argument("-p", f"--{name}", dest=name, metavar="TEXT", default=argparse.SUPPRESS, help="the same")


def add_model_settings(
    parser: argparse.ArgumentParser,
    *,
    model: str | None = "demo",
    positional: bool = False,
    several: bool = False,
    loads: bool = True,
    context: bool = True,
) -> None:
    """Add what decides which model and how.

    `positional`: the model may also be given without --model. `several`: more models may be given, see `MoreModels`.
    `loads`: add what only loading needs. `context`: add --max-model-len.
    """
    group = parser.add_argument_group("model")
    default = ", which is bundled and the default" if model else ", which is bundled"
    parser.set_defaults(model=model)  # not of the arguments: the one that is absent would overwrite the other
    either = group.add_mutually_exclusive_group()
    about = f'checkpoint folder, GGUF file, hub id, or "demo"{default}'
    if several:
        group.add_argument(
            "-m",
            "--model",
            action=MoreModels,
            default=argparse.SUPPRESS,
            metavar="MODEL|NAME=MODEL[,OPTION=VALUE..]",
            help=f"{about}; or one more model by its name in the API, which may be repeated",
        )
        parser.set_defaults(models=[])
    else:
        either.add_argument("-m", "--model", default=argparse.SUPPRESS, help=about)
    if positional:
        action = MoreModels if several else "store"
        either.add_argument(
            "model", nargs="?", action=action, metavar="MODEL", default=argparse.SUPPRESS, help="the same"
        )
    group.add_argument("--dtype", default="auto", help="float32, bfloat16, float16 or auto (default)")
    group.add_argument(
        "--quantization", metavar="FORMAT", help="weights as int8, int4 or, on GPUs, fp8; default: as stored"
    )
    group.add_argument(
        "--activations",
        default="auto",
        metavar="FORMAT",
        help="what linears of FP8 weights read, on GPUs: fp8, dtype, or auto (default): as the checkpoint asks",
    )
    group.add_argument(
        "--kv-cache",
        type=size,
        metavar="SIZE",
        help="memory of the KV cache: 4GiB, 50%%; default: half of what is free, on a GPU 88%%",
    )
    group.add_argument(
        "--kv-cache-dtype",
        default="auto",
        metavar="DTYPE",
        help="of keys and values: float32, bfloat16, float16, int8, fp8 (on GPUs) or auto (default): the checkpoint's "
        "16 bits, if any",
    )
    if context:
        group.add_argument("--max-model-len", type=positive, metavar="N", help="tokens of prompt and output together")
    group.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 or auto (default): cuda if usable")
    group.add_argument(
        "--tensor-parallel-size", type=positive, default=1, metavar="N", help="ranks that share the model; default 1"
    )
    group.add_argument(
        "--pipeline-parallel-size",
        type=positive,
        default=1,
        metavar="N",
        help="stages that the layers are divided over, on CPUs; default 1",
    )
    group.add_argument(
        "--device-ids", type=integer_list, metavar="ID,ID", help="GPU of each rank; default: the first ones"
    )
    group.add_argument(
        "--gpu-layers",
        type=_count_or_auto,
        metavar="N",
        help="so many of the last layers on the GPU, the others on the CPU, or auto: as many as fit; default: all on "
        "one device",
    )
    group.add_argument(
        "--cpu-moe",
        type=_count_auto_or_all,
        metavar="N",
        help="the experts of so many first layers on the CPU, all else on the GPU; or all, or auto: as few as needed",
    )
    group.add_argument(
        "--max-image-pixels",
        type=non_negative,
        metavar="N",
        help="pixels of a picture, behind resizing; default: as the model's files say, on a CPU up to 1048576; 0: the "
        "tower is not loaded",
    )
    group.add_argument(
        "--mmproj",
        type=Path,
        metavar="FILE",
        help="the tower of a GGUF file, as llama.cpp writes it; default: that in the same folder or repository",
    )
    group.add_argument("--revision", metavar="NAME", help="branch, tag or commit of a hub id")
    if loads:
        group.add_argument("-t", "--num-threads", type=positive, metavar="N", help="CPU threads; default: one per core")


def add_images(parser: argparse.ArgumentParser, use: str) -> None:
    """Add --image; `use`: where the pictures come."""
    parser.add_argument(
        "--image",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help=f"a picture for models that see, {use}; may be repeated",
    )


class MoreModels(argparse.Action):
    """--model, which names the model of the command, or one more as NAME=MODEL with options of its own.

    The namespace gets `model`, and `models`: a list of [name, model, options].
    """

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        """Take in one value."""
        name, _, rest = values.partition("=")
        if not rest or Path(values).exists():
            if getattr(namespace, "has_model", False):
                parser.error("argument -m/--model: there is a MODEL already; more of them are NAME=MODEL")
            namespace.model, namespace.has_model = values, True
            return
        try:
            namespace.models = [*namespace.models, [name, *_model_and_options(rest)]]
        except argparse.ArgumentTypeError as error:
            parser.error(f"argument -m/--model: {error}")


def _model_and_options(text: str) -> tuple[str, dict[str, Any]]:
    """MODEL[,OPTION=VALUE..], where the path of a model may have commas itself."""
    model, *parts = text.split(",")
    options: dict[str, Any] = {}
    for part in parts:
        name, equals, value = part.partition("=")
        if not equals and not options:
            model = f"{model},{part}"
            continue
        if name not in _OF_MORE_MODELS:
            known = ", ".join(_OF_MORE_MODELS)
            raise argparse.ArgumentTypeError(f"{name!r} is no option of one model; there are {known}")
        options[name.replace("-", "_")] = _OF_MORE_MODELS[name](value)
    if not model:
        raise argparse.ArgumentTypeError(f"expected NAME=MODEL, such as embed=models/bge-small, got {text!r}")
    return model, options


def add_lora(parser: argparse.ArgumentParser, use: str) -> None:
    """Add the options for LoRA adapters; `use`: what names the one that a request goes through."""
    group = parser.add_argument_group("LoRA adapters", "Folders that PEFT saved.")
    group.add_argument("--lora", action="append", type=_named_folder, metavar="NAME=FOLDER", help=use)
    group.add_argument(
        "--merge-lora", action="append", metavar="FOLDER", help="make it part of the weights; may be repeated"
    )


def add_quiet(parser: argparse.ArgumentParser) -> None:
    """Add the option for those who want no progress bars."""
    parser.add_argument("--quiet", action="store_true", help="show no progress bars, of downloads neither")


def add_control_vector(parser: argparse.ArgumentParser) -> None:
    """Add the option for control vectors."""
    parser.add_argument(
        "--control-vector",
        action="append",
        type=_scaled_file,
        metavar="FILE[:SCALE]",
        help="a GGUF file of directions that are added to the hidden states of layers, times SCALE; may be repeated",
    )


def add_tiers(parser: argparse.ArgumentParser) -> None:
    """Add the options of `LLM` that keep prefixes outside of the KV cache."""
    parser.add_argument(
        "--host-cache", type=size, metavar="SIZE", help="memory for prefixes that the KV cache has no room for"
    )
    parser.add_argument(
        "--disk-cache", metavar="FOLDER", help="keep prefixes here, also for later runs; several processes may share it"
    )
    parser.add_argument(
        "--disk-cache-size", type=size, default="16GiB", metavar="SIZE", help="of all its files; default 16GiB"
    )


def add_speculation(parser: argparse.ArgumentParser) -> None:
    """Add the option for drafts."""
    parser.add_argument(
        "--speculation",
        type=_method_or_json,
        default="auto",
        metavar="METHOD",
        help="draft tokens that a step verifies, which changes no answer: lookup, mtp, auto (default) or off; or a "
        'JSON object such as {"method": "lookup", "num_tokens": 7}',
    )


def _count_or_auto(text: str) -> int | str:
    """Argument type: an integer >= 0, or "auto"."""
    if text == "auto":
        return text
    try:
        return non_negative(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"expected 'auto' or an integer >= 0, got {text!r}") from None


def _count_auto_or_all(text: str) -> int | str:
    """Argument type: an integer >= 0, "auto" or "all"."""
    try:
        return text if text == "all" else _count_or_auto(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"expected 'auto', 'all' or an integer >= 0, got {text!r}") from None


def _method_or_json(text: str) -> Any:
    """Argument type: a name, or a JSON object; what either may say is checked with the model."""
    if not text.lstrip().startswith("{"):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected a method or a JSON object, got {text!r}: {error}") from None


def _scaled_file(text: str) -> tuple[str, float]:
    """Argument type: FILE or FILE:SCALE."""
    file, colon, scale = text.rpartition(":")
    with contextlib.suppress(ValueError):
        if colon and math.isfinite(value := float(scale)):
            return file, value
    return text, 1.0


def _named_folder(text: str) -> tuple[str, str]:
    """Argument type: NAME=FOLDER."""
    name, _, folder = text.partition("=")
    if name.strip() and folder:
        return name, folder
    raise argparse.ArgumentTypeError(f"expected NAME=FOLDER, such as polite=adapters/polite, got {text!r}")


def flag(name: str) -> str:
    """An option as it is written on the command line."""
    return f"--{name.replace('_', '-')}"


def as_options(message: str, args: argparse.Namespace) -> str:
    """Write the settings that a message of the library names as options of the command, where they are such.

    Settings are known by an underscore, by a "=" behind them, or by standing first: others may be plain words. What
    follows ": " is a key of the file named before it, and stays.
    """
    names = sorted(vars(args).keys() - {"model", "prompt", "message"}, key=len, reverse=True)
    any_name = "|".join(names)
    spelled = "|".join(name for name in names if "_" in name) or "(?!)"  # which fits nothing
    setting = re.compile(
        rf"(?<![\w./'-])(?<!: )(?:(?P<given>{any_name})=(?P<blank>(?=\s|$))?|(?P<spelled>{spelled})(?![\w.]))"
        rf"|^(?P<first>{any_name})(?=: | must )"
    )

    def option(match: re.Match[str]) -> str:
        name = flag(match["given"] or match["spelled"] or match["first"])
        return f"{name}=" if match["given"] and match["blank"] is None else name

    return setting.sub(option, message)


def add_sampling(parser: argparse.ArgumentParser, max_tokens: int, *, several: bool = False) -> None:
    """Add what decides how tokens are chosen.

    `max_tokens`: the default of --max-tokens. `several`: there may be several texts for one prompt.
    """
    parser.add_argument(
        "--tokenizer", metavar="PATH", help="a tokenizer.json or the folder of one, instead of the model's"
    )
    parser.add_argument(
        "--generation-config",
        default="auto",
        metavar="PATH",
        help="where the defaults of sampling come from: another generation_config.json, or none",
    )
    group = parser.add_argument_group(
        "sampling", "What is not given is as the generation_config.json of the model says, else off."
    )
    group.add_argument("--temperature", type=float, metavar="T", help="0 is greedy; 1 where nothing is said")
    group.add_argument("--top-k", type=int, metavar="K", help="choose among the K most probable tokens")
    group.add_argument("--top-p", type=float, metavar="P", help="choose among the tokens that make up probability P")
    group.add_argument("--min-p", type=float, metavar="P", help="drop tokens below P times the most probable one")
    group.add_argument("--repetition-penalty", type=float, metavar="R", help="above 1: repeat less; 1 is off")
    group.add_argument("--presence-penalty", type=float, metavar="P", help="-2 to 2, for tokens that came; 0 is off")
    group.add_argument("--frequency-penalty", type=float, metavar="P", help="the same, for each time they came")
    if several:
        group.add_argument("--n", type=int, metavar="N", help="texts for the prompt; default 1")
    group.add_argument("--seed", type=int, metavar="N", help="makes the output repeatable")
    group.add_argument(
        "-n",
        "--max-tokens",
        type=int,
        metavar="N",
        help=f"new tokens; {max_tokens} where nothing is said",
    )
    parser.set_defaults(default_max_tokens=max_tokens)
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    group.add_argument("--stop-token-ids", type=integer_list, metavar="ID,ID", help="end after one of these tokens")
    group.add_argument("--ignore-eos", action="store_true", default=None, help="go on after the end-of-text token")


def add_constraint(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what the whole answer must be; one of them may be given."""
    group = parser.add_argument_group("structure", "What the whole answer must be.").add_mutually_exclusive_group()
    group.add_argument("--json-schema", metavar="FILE|JSON", help="JSON of this schema")
    group.add_argument("--regex", metavar="PATTERN", help="a text that this regular expression matches as a whole")
    group.add_argument("--choice", action="append", metavar="TEXT", help="one of these texts; to be repeated")
    group.add_argument("--grammar", metavar="FILE|GRAMMAR", help="a text of this context-free grammar")


def positive(text: str) -> int:
    """Argument type: an integer >= 1."""
    return _integer(text, least=1)


def non_negative(text: str) -> int:
    """Argument type: an integer >= 0."""
    return _integer(text, least=0)


def _integer(text: str, least: int) -> int:
    with contextlib.suppress(ValueError):
        if (value := int(text)) >= least:
            return value
    raise argparse.ArgumentTypeError(f"expected an integer >= {least}, got {text!r}")


def size(text: str) -> str:
    """Argument type: a size, whose unit is missing where it would be less than a MiB; others are read later."""
    if text.strip().isdigit() and int(text) < 1 << 20:
        raise argparse.ArgumentTypeError(f"{text} would be bytes: say the unit, such as {text.strip()}GiB")
    return text


def sizes(text: str) -> str:
    """Argument type: a size, or several with commas between them."""
    return ",".join(map(size, text.split(",")))


_OF_MORE_MODELS: Mapping[str, Callable[[str], Any]] = {
    "dtype": str,
    "quantization": str,
    "activations": str,
    "kv-cache": size,
    "kv-cache-dtype": str,
    "max-model-len": positive,
    "max-num-seqs": positive,
    "max-num-batched-tokens": positive,
    "revision": str,
    "chat-template": str,
    "mmproj": str,
    "tokenizer": str,
}
"""Options of one model among several, and how their values are read."""


def integer_list(text: str) -> list[int]:
    """Argument type: integers between commas or spaces."""
    try:
        return [int(item) for item in text.replace(",", " ").split()]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected integers such as 1,8, got {text!r}") from None


def positive_number(text: str) -> float:
    """Argument type: a number > 0."""
    with contextlib.suppress(ValueError):
        if 0 < (value := float(text)) < math.inf:
            return value
    raise argparse.ArgumentTypeError(f"expected a number > 0, got {text!r}")


def key_and_json(text: str) -> tuple[str, Any]:
    """Argument type: KEY=JSON."""
    key, equals, value = text.partition("=")
    with contextlib.suppress(ValueError):
        if key.isidentifier() and equals:
            return key, json.loads(value)
    raise argparse.ArgumentTypeError(
        f"expected KEY=JSON, such as enable_thinking=false or style='\"short\"', got {text!r}"
    )


def length_range(text: str) -> tuple[int, int]:
    """Argument type: MIN:MAX, or one number for both."""
    low, _, high = text.partition(":")
    with contextlib.suppress(ValueError):
        if 1 <= (least := int(low)) <= (most := int(high or low)):
            return least, most
    raise argparse.ArgumentTypeError(f"expected MIN:MAX with 1 <= MIN <= MAX, such as 100:1024, got {text!r}")


def positive_list(text: str) -> list[int]:
    """Argument type: different integers >= 1."""
    values = integer_list(text)
    if not values or min(values) < 1:
        raise argparse.ArgumentTypeError(f"expected integers >= 1 such as 1,8, got {text!r}")
    return list(dict.fromkeys(values))


def model_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Keywords of `plan_model` and `LLM` that decide what is loaded, as `add_model_settings` has added them."""
    names = (
        "device",
        "dtype",
        "quantization",
        "activations",
        "kv_cache",
        "kv_cache_dtype",
        "device_ids",
        "gpu_layers",
        "cpu_moe",
        "max_model_len",
        "revision",
        "max_image_pixels",
        "mmproj",
    )
    sizes = ("tensor_parallel_size", "pipeline_parallel_size")
    settings = {name: getattr(args, name) for name in (*names, *sizes) if name in args}
    if "lora" in args:
        settings |= {"lora": dict(args.lora or ()), "merge_lora": args.merge_lora or ()}
        if len(settings["lora"]) < len(args.lora or ()):
            raise ConfigError("lora: two adapters have the same name")
    return settings


_SAMPLING = [
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "n",
    "seed",
    "max_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
]


@contextlib.contextmanager
def open_llm(args: argparse.Namespace, **more: Any) -> Iterator[LLM]:
    """Open the model for one sequence at a time; `more`: further keywords of `LLM`."""
    with make_llm(
        args,
        num_threads=args.num_threads,
        max_num_seqs=getattr(args, "n", None) or 1,
        max_num_batched_tokens=_PREFILL_CHUNK,
        tokenizer=args.tokenizer,
        generation_config=args.generation_config,
        **model_settings(args),
        **more,
    ) as llm:
        yield llm


def make_llm(args: argparse.Namespace, **settings: Any) -> LLM:
    """Make the LLM of a command: options of `add_control_vector`, `add_tiers`, `add_speculation`, `add_quiet`."""
    from infinilm.engine import ControlVector, HookRegistry
    from infinilm.llm import LLM

    hooks = HookRegistry() if args.control_vector else None
    vectors = [ControlVector.from_gguf(file) * scale for file, scale in args.control_vector or ()]
    settings |= {name: getattr(args, name) for name in ("host_cache", "disk_cache", "disk_cache_size")}
    llm = LLM(args.model, hooks=hooks, speculation=args.speculation, use_tqdm=not args.quiet, **settings)
    if hooks is not None:
        try:
            functools.reduce(operator.add, vectors).register(hooks, llm.config)
        except BaseException:  # they are of another model
            llm.close()
            raise
    return llm


def sampling_params(args: argparse.Namespace, llm: LLM | None = None) -> SamplingParams:
    """Make the parameters; what is not given is as the model of `llm` has it.

    With `llm`, a constraint is compiled, so that what is wrong with it is told before anything is printed.
    """
    from infinilm.sampling_params import make_sampling_params

    defaults = None if llm is None else llm.default_sampling_params
    given = {name: getattr(args, name) for name in _SAMPLING if getattr(args, name, None) is not None}
    if names := [name for name, _ in getattr(args, "lora", None) or ()]:
        if len(names) > 1:
            raise ConfigError(f"lora: this command answers with one adapter, got {', '.join(names)}")
        given["lora"] = names[0]
    if (constraint := _constraint(args)) is not None:
        given["constraint"] = constraint
        if llm is not None:
            llm.grammars.matcher(constraint)
    if defaults is None or defaults.max_tokens is None:
        given = {"max_tokens": args.default_max_tokens} | given
    return make_sampling_params(defaults, given)


def _constraint(args: argparse.Namespace) -> Constraint | None:
    """What the options of `add_constraint` ask for."""
    from infinilm.constraint import Constraint

    if args.json_schema is not None:
        return Constraint.json_schema(_text_or_file(args.json_schema, "{"), name="--json-schema")
    if args.regex is not None:
        return Constraint.regex(args.regex, name="--regex")
    if args.choice is not None:
        return Constraint.choice(args.choice, name="--choice")
    if args.grammar is not None:
        return Constraint.grammar(_text_or_file(args.grammar, ":"), name="--grammar")
    return None


def _text_or_file(given: str, mark: str) -> str:
    """The text itself if it has `mark`, as each such text does and hardly any path, else the content of the file."""
    from infinilm.files import read_text

    return given if mark in given else read_text(Path(given).expanduser())
