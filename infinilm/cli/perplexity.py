"""`infinilm perplexity`: how well a model foretells a text of any length."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from infinilm.cli.arguments import add_lora, add_model_settings, add_quiet, model_settings, positive
from infinilm.cli.output import put, stdin_text
from infinilm.errors import ConfigError

__all__ = ["add_perplexity", "run_perplexity"]


def add_perplexity(parser: argparse.ArgumentParser) -> None:
    """Add the options of `infinilm perplexity`."""
    parser.add_argument("file", metavar="FILE", help='a text; "-" is stdin')
    parser.add_argument(
        "--max-length", type=positive, metavar="N", help="tokens of a window; default: what the context holds"
    )
    parser.add_argument(
        "--stride",
        type=positive,
        metavar="N",
        help="tokens from one window to the next, where the text has several; default: half a window",
    )
    parser.add_argument("--tokenizer", metavar="PATH", help="a tokenizer.json, the folder of one, or a hub id")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_quiet(parser)
    add_model_settings(parser)
    add_lora(parser, "the adapter that the text runs through")


def run_perplexity(args: argparse.Namespace) -> int:
    """Run `infinilm perplexity`; returns the exit code."""
    from infinilm.files import read_text
    from infinilm.llm import LLM

    text = stdin_text() if args.file == "-" else read_text(Path(args.file).expanduser())
    settings = model_settings(args)
    if len(settings["lora"]) > 1:
        raise ConfigError(f"lora: the text runs through one adapter, got {', '.join(settings['lora'])}")
    with LLM(
        args.model, num_threads=args.num_threads, tokenizer=args.tokenizer, use_tqdm=not args.quiet, **settings
    ) as llm:
        perplexity = llm.perplexity(
            text,
            max_length=args.max_length,
            stride=args.stride,
            lora=next(iter(settings["lora"]), None),
            use_tqdm=not args.quiet,
        )
        about = {"perplexity": perplexity, "num_tokens": len(llm.tokenize(text)), "model": str(llm.model_path)}
    put(json.dumps(about) + "\n" if args.json else f"perplexity {perplexity:.4f} of {about['num_tokens']} tokens\n")
    return 0
