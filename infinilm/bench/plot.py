"""Draws what `infinilm bench` measured: tokens/s over the batch size and over the context, with the limits."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinilm.errors import ConfigError
from infinilm.extras import how_to_install

if TYPE_CHECKING:
    from infinilm.bench.limits import BenchResult, DecodeResult
    from infinilm.bench.work import Work

__all__ = ["check", "draw", "fastest"]

_FORMATS = (".png", ".pdf", ".svg")


def check(path: str) -> None:
    """See, before anything is measured, that it can be drawn.

    Raises
    ------
    ConfigError
        matplotlib is not installed, the folder is not there, or the name says no format that is known.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"plot: needs matplotlib, which is not installed: {how_to_install('plot')}")
    file = Path(path)
    if file.suffix not in _FORMATS:
        raise ConfigError(f"plot: expected a file that ends in {', '.join(_FORMATS)}, got {path!r}")
    if not file.absolute().parent.is_dir():
        raise ConfigError(f"plot: there is no folder {str(file.parent)!r} for {file.name!r}; make it first")


def fastest(work: Work, batch_size: int, context_len: float, read: float, flops: float) -> float:
    """Tokens/s of a decode that reads at `read` bytes/s and computes at `flops`, whichever takes longer."""
    total = sum(op.flops for op in work.ops(batch_size, 1, context_len).values())
    return batch_size / max(work.decode_bytes(batch_size, context_len) / read, total / flops)


def draw(path: str, about: Mapping[str, Any], result: BenchResult, work: Work) -> None:
    """Write the picture: a curve for each context over the batch sizes, and the other way round; limits are dashed."""
    from matplotlib.figure import Figure

    read, flops = result.read_bytes_per_second.max, result.flops_per_second.max
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    contexts = sorted({decode.prompt_len for decode in result.decode})
    sizes = sorted({decode.batch_size for decode in result.decode})

    def curve(axes: Any, decodes: Sequence[DecodeResult], xs: Sequence[int], label: str) -> None:
        ys = [decode.tokens_per_second for decode in decodes]
        errors = [[y.median - y.min for y in ys], [y.max - y.median for y in ys]]
        line = axes.errorbar(xs, [y.median for y in ys], errors, marker="o", capsize=3, label=label)
        limits = [fastest(work, decode.batch_size, decode.context_len, read, flops) for decode in decodes]
        axes.plot(xs, limits, "--", marker="_", color=line.lines[0].get_color())

    for context in contexts:
        of = [d for size in sizes for d in result.decode if (d.prompt_len, d.batch_size) == (context, size)]
        curve(left, of, sizes, f"after {context} tokens")
    for size in sizes:
        of = [d for context in contexts for d in result.decode if (d.prompt_len, d.batch_size) == (context, size)]
        curve(right, of, contexts, f"{size} sequence{'s' if size > 1 else ''}")
    for axes, label, ticks in ((left, "sequences", sizes), (right, "tokens before the decode", contexts)):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_xlabel(label)
        axes.set_ylabel("tokens/s, dashed: the limit")
        axes.grid(alpha=0.3)
        axes.legend()
    weights = about["quantization"] or about["dtype"]
    figure.suptitle(
        f"{Path(about['model']).name}, {weights}, {about['isa']}, {about['num_threads']} threads: "
        f"{read / 1e9:.1f} GB/s, {flops / 1e9:.0f} Gflop/s, prefill of {result.prefill.prompt_len}: "
        f"{result.prefill.tokens_per_second.median:.0f} tokens/s",
        fontsize=10,
    )
    figure.savefig(path, dpi=150)
