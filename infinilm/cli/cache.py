"""`infinilm cache`: folders of `--disk-cache`, which keep prefixes."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from infinilm.cli.arguments import add_lora, add_model_settings, add_quiet, model_settings, size
from infinilm.cli.output import put, stdin_text
from infinilm.errors import ConfigError

if TYPE_CHECKING:
    from infinilm.tiers import DiskTier

__all__ = ["add_cache", "run_cache"]

_ALL = 1 << 62  # bytes: a command that only looks removes nothing


def add_cache(parser: argparse.ArgumentParser) -> None:
    """Add the three commands."""
    commands = parser.add_subparsers(dest="action", metavar="save|list|prune", required=True)
    save = commands.add_parser("save", help="Compute a prompt, so that later runs find it there.")
    _add_folder(save)
    save.add_argument("prompt", nargs="?", metavar="PROMPT", help='the text; "-" is stdin')
    save.add_argument("-f", "--file", metavar="FILE", help="a file with the text")
    save.add_argument("--size", type=size, default="16GiB", metavar="SIZE", help="of all files; default 16GiB")
    save.add_argument("--name", metavar="NAME", help="the adapter of --lora that computes it")
    add_quiet(save)
    add_model_settings(save)
    add_lora(save, "an adapter that may compute it")
    listed = commands.add_parser("list", help="Tell what a folder holds, the least recently used first.")
    _add_folder(listed)
    listed.add_argument("--json", action="store_true", help="print one JSON object for each file")
    prune = commands.add_parser("prune", help="Remove what was not used for the longest time.")
    _add_folder(prune)
    prune.add_argument("--size", type=size, required=True, metavar="SIZE", help="what may stay, such as 10GiB")


def _add_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", help="the folder of --disk-cache")


def run_cache(args: argparse.Namespace) -> int:
    """Run one of them."""
    return {"save": _save, "list": _list, "prune": _prune}[args.action](args)


def _save(args: argparse.Namespace) -> int:
    from infinilm.llm import LLM

    if (args.prompt is None) == (args.file is None):
        raise ConfigError("expected a PROMPT or --file FILE, and not both")
    if args.file is not None:
        text = Path(args.file).expanduser().read_text(encoding="utf-8")
    else:
        text = stdin_text() if args.prompt == "-" else args.prompt
    with LLM(
        args.model,
        num_threads=args.num_threads,
        use_tqdm=not args.quiet,
        disk_cache=args.folder,
        disk_cache_size=args.size,
        **model_settings(args),
    ) as llm:
        count = llm.keep_prefix(text, lora=args.name)
    put(f"{args.folder}: {count} tokens\n")
    return 0


def _list(args: argparse.Namespace) -> int:
    from infinilm.planning.sizes import format_bytes

    files = _tier(args.folder).files()
    for file in files:
        used = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(file.last_used))
        if args.json:
            put(json.dumps({"file": str(file.path), "bytes": file.num_bytes, "last_used": file.last_used}) + "\n")
        else:
            put(f"{file.path.name}  {format_bytes(file.num_bytes)}  {used}\n")
    if not args.json:
        put(f"{len(files)} files, {format_bytes(sum(file.num_bytes for file in files))}\n")
    return 0


def _prune(args: argparse.Namespace) -> int:
    from infinilm.planning.sizes import format_bytes, parse_size

    removed = _tier(args.folder).prune(parse_size("size", args.size))
    put(f"{args.folder}: {format_bytes(removed)} removed\n")
    return 0


def _tier(folder: str) -> DiskTier:
    """The files of a folder. ConfigError: there is none."""
    from infinilm.tiers import DiskTier

    if not Path(folder).expanduser().is_dir():
        raise ConfigError(f"there is no folder {folder}: name that of --disk-cache")
    return DiskTier(folder, _ALL)
