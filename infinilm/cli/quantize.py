"""`infinilm quantize`: a checkpoint with few bits, and what that costs."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

from infinilm.cli.arguments import add_quiet
from infinilm.cli.output import note, put

_TEXT = """\
The river had risen in the night, and by morning the lower meadow was a lake. Anna stood at the window with her tea and
counted the fence posts that were still to be seen. There were eleven. "Yesterday it was thirty," she said, but nobody
was there to hear it. She put on her boots and went out to the barn. The old dog came as far as the gate, looked at the
water, and lay down. A bridge is a simple thing until it is gone: the school, the shop and the doctor were all on
the other side. In 1954, her grandfather used to say, the water reached the second step of the church, and people went
to Mass by boat. She had never believed him. Now she wondered what else in his stories had been true.
"""
_FOREIGN = 200.0  # a perplexity beyond which a text is not of the kind that a model was made for


def add_quantize(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("model", metavar="MODEL", help='checkpoint folder, hub id, or "demo"')
    parser.add_argument("out", metavar="OUT", help="the new folder")
    parser.add_argument(
        "--scheme",
        metavar="NAME",
        help="w4a16 (4 bits, groups of 128; default), w4a16-g32 (of 32; default where 128 do not divide all inputs), "
        "w8a16 (8 bits, a scale for each output) or w8a8 (the same, for inputs of 8 bits)",
    )
    parser.add_argument(
        "--calibration",
        metavar="FILE",
        help="a text of some thousand tokens: weights are rounded so that outputs over it change least (GPTQ); loads "
        "the model, and takes its time",
    )
    parser.add_argument("--text", metavar="FILE", help="measure the loss over this text; default: a short one")
    parser.add_argument("--no-loss", action="store_true", help="do not measure it: both models are loaded for that")
    parser.add_argument(
        "--device", default="auto", metavar="DEVICE", help="computes the loss and the calibration; default: auto"
    )
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit of a hub id")
    add_quiet(parser)


def run_quantize(args: argparse.Namespace) -> int:
    """Run the command."""
    from infinilm.checkpoint.folder import resolve_model
    from infinilm.checkpoint.quantised.writer import default_scheme, quantise_model
    from infinilm.debug.loss import measure_loss
    from infinilm.files import read_text
    from infinilm.planning.sizes import format_bytes

    text = read_text(Path(args.text)) if args.text else _TEXT
    scheme = args.scheme or default_scheme(args.model, args.revision)
    with contextlib.ExitStack() as stack:
        gram_of = None
        if args.calibration:
            from infinilm.debug.calibration import Calibration

            given = read_text(Path(args.calibration))
            gram_of = stack.enter_context(
                Calibration(resolve_model(args.model, args.revision), given, device=args.device)
            ).gram
        folder = quantise_model(
            args.model, args.out, scheme, revision=args.revision, use_tqdm=not args.quiet, gram_of=gram_of
        )
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    put(f"{folder}: {format_bytes(size)} in {scheme}\n")
    if not args.no_loss:
        loss = measure_loss(resolve_model(args.model, args.revision), folder, [text], device=args.device)
        whose = f"of {args.text}" if args.text else "of a text of its own"
        put(
            f"over {loss.num_tokens} tokens {whose}: "
            f"perplexity {loss.perplexity:.4f}, quantised {loss.other_perplexity:.4f} "
            f"(x {loss.other_perplexity / loss.perplexity:.4f}); KL {loss.kl:.2e} nats per token; another best token "
            f"{100 * loss.other_best:.2f} %\n"
        )
        if not args.text and loss.perplexity > _FOREIGN:
            note("the model does not write texts of that kind, so that these numbers say little: pass one with --text")
    return 0
