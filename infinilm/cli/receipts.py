"""`infinilm verify`, and the receipts that `infinilm generate` writes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinilm.cli.arguments import add_images, add_lora, add_model_settings, add_quiet, model_settings
from infinilm.cli.output import put, stdin_text
from infinilm.errors import ConfigError, ReceiptError

if TYPE_CHECKING:
    from infinilm.receipts import Receipt, Verdict

__all__ = ["add_receipt", "add_sign", "add_verify", "check_receipt", "run_verify", "signing_key", "write_receipts"]


def add_receipt(parser: argparse.ArgumentParser) -> None:
    """Add the options of a command that can write receipts."""
    parser.add_argument("--receipt", metavar="FILE", help="write the receipt of each text here, a line of JSON")
    add_sign(parser)


def add_sign(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add the option of what can sign receipts."""
    parser.add_argument("--sign", metavar="KEY", help="sign receipts with this Ed25519 private key (PEM)")


def signing_key(path: str | None, gives_receipts: bool, option: str) -> Any:
    """The key that signs receipts, if one was named. ConfigError: `option`, which asks for receipts, was not given."""
    if path is None:
        return None
    if not gives_receipts:
        raise ConfigError(f"--sign is for receipts: pass {option}, too")
    from infinilm.receipts import read_key

    return read_key(path, is_private=True)


def check_receipt(args: argparse.Namespace) -> None:
    """ConfigError, OSError: the receipt cannot be written or signed, as far as can be told before the answer."""
    signing_key(args.sign, args.receipt is not None, "--receipt FILE")
    if args.receipt is None:
        return
    with open(args.receipt, "x", encoding="ascii"):
        pass


def write_receipts(receipts: Sequence[Receipt], args: argparse.Namespace) -> None:
    """Write the receipts that `args` asks for."""
    signed = [one if args.sign is None else one.signed(args.sign) for one in receipts]
    Path(args.receipt).write_text("".join(f"{one.to_json()}\n" for one in signed), encoding="ascii")


def add_verify(parser: argparse.ArgumentParser) -> None:
    """Add the options of `infinilm verify`."""
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help='receipts, each a line of JSON in any of these files; "-" is stdin'
    )
    parser.add_argument(
        "--key", metavar="KEY", help="the public key (PEM) that must have signed them; default: any, or none"
    )
    add_images(parser, "of which receipts tell, in any order")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each receipt")
    add_quiet(parser)
    add_model_settings(parser)
    add_lora(parser, "an adapter that receipts may name")


def run_verify(args: argparse.Namespace) -> int:
    """Run `infinilm verify`; returns the exit code: 1 where a receipt is not equal."""
    from infinilm.llm import LLM
    from infinilm.receipts import Verdict, read_key

    if args.key is not None:
        read_key(args.key, is_private=False)
    read = list(_read(args.files))
    failed: dict[int, Verdict] = {}
    for i, (_, receipt) in enumerate(read):
        if args.key is not None or receipt.signature is not None:
            try:
                receipt.check_signature(args.key)
            except ReceiptError as error:
                failed[i] = Verdict("different", str(error))
    with LLM(args.model, num_threads=args.num_threads, use_tqdm=not args.quiet, **model_settings(args)) as llm:
        asked = (one for i, (_, one) in enumerate(read) if i not in failed)
        found = iter(llm.verify(asked, images=args.image, use_tqdm=not args.quiet))
        verdicts = [failed[i] if i in failed else next(found) for i in range(len(read))]
    for (name, _), verdict in zip(read, verdicts, strict=True):
        if args.json:
            shown = {"receipt": name, "status": verdict.status, "reason": verdict.reason, "position": verdict.position}
            put(json.dumps(shown) + "\n")
        else:
            put(f"{name}: {verdict}\n")
    return 0 if all(verdicts) else 1


def _read(files: Sequence[str]) -> Iterator[tuple[str, Receipt]]:
    """The receipts of files, with what they are called. ReceiptError: names the file and the line of what is none."""
    from infinilm.receipts import Receipt

    for name in files:
        text = stdin_text() if name == "-" else Path(name).expanduser().read_text(encoding="utf-8")
        lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
        if not lines:
            raise ReceiptError(f"{name}: holds no receipt")
        for number, line in lines:
            shown = name if len(lines) == 1 else f"{name}:{number}"
            try:
                yield shown, Receipt.from_json(line)
            except ReceiptError as error:
                raise ReceiptError(f"{shown}: {error}") from None
