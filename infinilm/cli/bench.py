"""`infinilm bench`: one model against the limits of this machine, or, with --trace, under many requests at once."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import infinilm
from infinilm.cli.arguments import (
    add_model_settings,
    flag,
    length_range,
    model_settings,
    non_negative,
    positive,
    positive_list,
    positive_number,
)
from infinilm.cli.output import note, put
from infinilm.errors import ConfigError

if TYPE_CHECKING:
    from infinilm.llm import LLM

_CHUNK = 2048  # tokens of a step where nothing is asked for
_BATCHES_DRAWN = (1, 2, 4, 8)
_LONGEST_DRAWN = 1024  # tokens in front of a decode


@dataclass(frozen=True, slots=True)
class _Option:
    """An option of one kind of bench alone; its default is written as on the command line, None is given in `text`."""

    kind: Callable[[str], Any]
    metavar: str
    default: str | None
    text: str


_LIMITS = {
    "prompt_len": _Option(positive, "N", "512", "tokens of the prefill, if the context holds them"),
    "decode_tokens": _Option(positive, "N", "64", "steps of a decode"),
    "decode_context": _Option(positive_list, "N,N", "128", "tokens in front of a decode"),
    "batch_sizes": _Option(positive_list, "N,N", "1,8", "sequences that decode at once"),
    "repeats": _Option(positive, "N", "3", "rounds, of which medians are reported"),
}
_TRACE = {
    "num_requests": _Option(positive, "N", "256", "requests of the trace"),
    "trace_lengths": _Option(
        length_range,
        "MIN:MAX",
        None,
        "tokens of a prompt, and of an output; default 100:1024, or what the context of the model has room for",
    ),
    "seed": _Option(non_negative, "N", "0", "of lengths, token ids, arrivals and sampling"),
    "request_rate": _Option(positive_number, "R", None, "arrivals a second, at random (Poisson); default: all at once"),
    "max_num_seqs": _Option(positive, "N", "64", "sequences that run at the same time"),
    "max_num_batched_tokens": _Option(positive, "N", str(_CHUNK), "tokens of a step"),
    "max_model_len": _Option(positive, "N", None, "tokens of prompt and output together; default: the longest request"),
}


def add_bench(parser: argparse.ArgumentParser) -> None:
    """Add the options of `infinilm bench`."""
    add_model_settings(parser, context=False, positional=True)
    parser.add_argument(
        "--load-format",
        choices=("auto", "dummy"),
        default="auto",
        help="dummy: random weights, so that a folder with a config.json is enough",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--trace", action="store_true", help="serve many requests of mixed lengths instead")
    limits = _add_group(
        parser, "without --trace", "Prefill and decode, as a share of the limits of this machine.", _LIMITS
    )
    limits.add_argument(
        "--ops",
        action="store_true",
        default=argparse.SUPPRESS,
        help="one more round, with time, bytes, operations and share of the limit of each op",
    )
    limits.add_argument(
        "--speculation",
        action="store_true",
        default=argparse.SUPPRESS,
        help="then also an answer that repeats its prompt, with drafts and without by turns; all else has no drafts",
    )
    limits.add_argument(
        "--plot",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="draw tokens/s over batch size and over context, with the limits, such as out.png; needs matplotlib",
    )
    group = _add_group(parser, "with --trace", "Throughput and latency; the default trace is nano-vllm's.", _TRACE)
    group.add_argument("--no-progress", action="store_true", default=argparse.SUPPRESS, help="show no progress bars")


def _add_group(
    parser: argparse.ArgumentParser, title: str, text: str, options: Mapping[str, _Option]
) -> argparse._ArgumentGroup:
    group = parser.add_argument_group(title, text)
    for name, option in options.items():
        about = option.text if option.default is None else f"{option.text}; default {option.default}"
        # What is not given is left out of the result, so that an option of the other kind is noticed.
        group.add_argument(flag(name), type=option.kind, metavar=option.metavar, default=argparse.SUPPRESS, help=about)
    return group


def _settings(args: argparse.Namespace, own: Mapping[str, _Option], other: Iterable[str]) -> dict[str, Any]:
    """Values of a kind's own options. ConfigError: one of the other kind was given."""
    for name in other:
        if hasattr(args, name):
            change = "leave out --trace" if args.trace else "add --trace"
            raise ConfigError(
                f"{flag(name)} is for bench {'without' if args.trace else 'with'} --trace: {change}, or it"
            )
    defaults = {name: None if o.default is None else o.kind(o.default) for name, o in own.items()}
    return {name: getattr(args, name, default) for name, default in defaults.items()}


def run_bench(args: argparse.Namespace) -> int:
    """Run `infinilm bench`; returns the exit code."""
    if args.trace:
        return _bench_trace(args, _settings(args, _TRACE, [*_LIMITS, "ops", "speculation", "plot"]))
    return _bench_limits(args, _settings(args, _LIMITS, [*_TRACE, "no_progress"]))


def _bench_limits(args: argparse.Namespace, settings: Mapping[str, Any]) -> int:
    from infinilm import _core
    from infinilm.bench import limits as bench, plot, speculation
    from infinilm.bench.work import count_work
    from infinilm.devices.system import resolve_device
    from infinilm.llm import LLM

    path: str | None = getattr(args, "plot", None)
    if path is not None:
        plot.check(path)  # now, not after minutes of measuring

    for name in ("gpu_layers", "cpu_moe"):
        if getattr(args, name) is not None:
            raise ConfigError(
                f"{name}: bench measures against the limits of one device; leave it out, or use bench --trace"
            )
    shared = model_settings(args)
    shared["device"] = device = resolve_device(args.device)
    if device != "cpu":
        raise ConfigError(
            f"bench measures against the limits of a CPU, not of {device}: pass --device cpu, or run "
            "'python -m bench.gpu' in the source tree, which measures a GPU; bench --trace runs on both"
        )
    num_threads = args.num_threads or _core.default_num_threads()
    if not hasattr(args, "prompt_len"):  # lengths that were not asked for fit into the model's context
        settings = {**settings, "prompt_len": max(1, min(settings["prompt_len"], _context(args) - 1))}
    if path is not None:
        settings = {**settings, **_points(args, settings)}
    needed = bench.context_needed(
        **{name: settings[name] for name in ("prompt_len", "decode_context", "decode_tokens", "batch_sizes")},
        max_num_batched_tokens=_CHUNK,
        num_stages=args.pipeline_parallel_size,
    )
    note(f"loading {args.model}")
    with LLM(
        args.model,
        **shared,
        max_model_len=needed,
        max_num_seqs=max(settings["batch_sizes"]),
        max_num_batched_tokens=_CHUNK,
        num_threads=num_threads,
        load_format=args.load_format,
    ) as llm:
        result = bench.run_bench(
            llm, num_threads=num_threads, progress=note, ops=getattr(args, "ops", False), **settings
        )
        about = _about(args, llm, num_threads)
        drafts = None
        if hasattr(args, "speculation"):
            drafts = speculation.measure_speculation(llm, max(settings["decode_tokens"], 2), settings["repeats"])
        if path is not None:
            plot.draw(path, about, result, count_work(llm))
            note(f"drawn: {path}")
    found, table = asdict(result), bench.format_table(about, result)
    if drafts is not None:
        found |= {"speculation": asdict(drafts)}
        table += "\n" + speculation.format_speculation(drafts)
    put((json.dumps(about | found, indent=1) if args.json else table) + "\n")
    return 0


def _context(args: argparse.Namespace) -> int:
    """Tokens that the model was made for."""
    from infinilm.checkpoint.folder import resolve_model
    from infinilm.config.json.model_config import AutoConfig

    return AutoConfig.from_pretrained(resolve_model(args.model, args.revision)).max_position_embeddings


def _points(args: argparse.Namespace, settings: Mapping[str, Any]) -> dict[str, list[int]]:
    """Enough batch sizes and contexts for a picture, where none were asked for."""
    points: dict[str, list[int]] = {}
    if not hasattr(args, "batch_sizes"):
        points["batch_sizes"] = list(_BATCHES_DRAWN)
    if not hasattr(args, "decode_context"):
        longest = min(_LONGEST_DRAWN, _context(args) - settings["decode_tokens"] - max(_BATCHES_DRAWN))
        points["decode_context"] = sorted({max(1, longest // part) for part in (8, 4, 2, 1)})
    return points


def _bench_trace(args: argparse.Namespace, settings: Mapping[str, Any]) -> int:
    from infinilm import _core
    from infinilm.bench import trace as bench_trace
    from infinilm.checkpoint.folder import resolve_model
    from infinilm.config.json.model_config import AutoConfig
    from infinilm.llm import LLM

    path = resolve_model(args.model, args.revision)
    context = settings["max_model_len"] or AutoConfig.from_pretrained(path).max_position_embeddings
    min_len, max_len = settings["trace_lengths"] or bench_trace.default_lengths(context)
    if settings["trace_lengths"] is None and (min_len, max_len) != bench_trace.DEFAULT_LENGTHS:
        note(f"lengths {min_len}:{max_len}, as the context holds {context} tokens; nano-vllm's trace has 100:1024")
    drawn_from = {
        "num_requests": settings["num_requests"],
        "min_len": min_len,
        "max_len": max_len,
        "seed": settings["seed"],
        "request_rate": settings["request_rate"],
    }
    progress = not hasattr(args, "no_progress")
    trace = bench_trace.make_trace(**drawn_from)
    trace.check_context(context)
    num_threads = args.num_threads or _core.default_num_threads()
    shared = model_settings(args) | {"max_model_len": settings["max_model_len"] or trace.context_needed}
    del shared["revision"]  # of the path that was found already
    note(f"loading {args.model}")
    with LLM(
        path,
        **shared,
        max_num_seqs=settings["max_num_seqs"],
        max_num_batched_tokens=settings["max_num_batched_tokens"],
        num_threads=num_threads,
        seed=settings["seed"],
        load_format=args.load_format,
        use_tqdm=progress,
    ) as llm:
        result = bench_trace.run_trace(llm, trace, progress=progress)
        about = _about(args, llm, num_threads) | drawn_from
        about |= {
            "kv_bytes": llm.memory.kv_bytes,
            "max_model_len": llm.max_model_len,
            "max_num_seqs": settings["max_num_seqs"],
            "max_num_batched_tokens": settings["max_num_batched_tokens"],
        }
    put((json.dumps(about | asdict(result), indent=1) if args.json else bench_trace.format_trace(about, result)) + "\n")
    return 0


def _about(args: argparse.Namespace, llm: LLM, num_threads: int) -> dict[str, Any]:
    """What was measured, for the head of a table and for JSON."""
    from infinilm import _core

    return {
        "version": infinilm.__version__,
        "model": str(llm.model_path),
        "architecture": llm.config.architecture,
        "load_format": args.load_format,
        "devices": list(llm.devices),
        "tensor_parallel_size": llm.engine.num_ranks,
        "pipeline_parallel_size": llm.num_stages,
        "dtype": llm.dtype,
        "quantization": args.quantization,
        "kv_cache_dtype": llm.memory.kv_cache_dtype,
        "isa": _core.selected_cpu_isa(),
        "num_threads": num_threads,
        "weight_bytes": llm.memory.weight_bytes,
        "load_seconds": llm.load_time,
    }
