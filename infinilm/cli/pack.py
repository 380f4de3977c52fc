"""`infinilm pack`: a folder with a model's weights as the CPU kernels read them."""

from __future__ import annotations

import argparse

from infinilm.cli.arguments import add_quiet, positive
from infinilm.cli.output import put


def add_pack(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("model", metavar="MODEL", help='checkpoint folder, hub id, or "demo"')
    parser.add_argument("out", metavar="OUT", help="the new folder")
    parser.add_argument("--quantization", metavar="FORMAT", help="weights as int8 or int4; default: as stored")
    parser.add_argument(
        "--dtype", default="auto", help="bfloat16 or float16 instead of what is stored; or auto (default) or float32"
    )
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit of a hub id")
    parser.add_argument("--num-threads", type=positive, metavar="N", help="CPU threads; default: one per core")
    add_quiet(parser)


def run_pack(args: argparse.Namespace) -> int:
    """Run the command."""
    from infinilm.checkpoint.pack_writer import pack_model
    from infinilm.planning.sizes import format_bytes

    folder = pack_model(
        args.model,
        args.out,
        quantization=args.quantization,
        dtype=args.dtype,
        revision=args.revision,
        num_threads=args.num_threads,
        use_tqdm=not args.quiet,
    )
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    put(f"{folder}: {format_bytes(size)} of packed weights\n")
    return 0
