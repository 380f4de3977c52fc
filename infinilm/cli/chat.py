"""`infinilm chat`: a conversation in the terminal, or of the lines of stdin."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinilm.cli.arguments import (
    add_constraint,
    add_control_vector,
    add_lora,
    add_model_settings,
    add_quiet,
    add_sampling,
    add_speculation,
    add_text,
    key_and_json,
    open_llm,
    sampling_params,
)
from infinilm.cli.output import has_piped_text, note, put, stdin_lines, stdin_text, stopped
from infinilm.cli.stream import Reply, print_stream
from infinilm.errors import ConfigError, EngineDeadError, InfinilmError, RequestError

if TYPE_CHECKING:
    from infinilm.llm import LLM
    from infinilm.sampling_params import SamplingParams

_HELP = """\
/help          these lines
/reset         begin anew; the system message stays
/system TEXT   what the model is told before the conversation; without TEXT: show it
/retry         answer the last message once more
/save FILE     write the conversation as JSON
/load FILE     go on with a conversation that was saved
/exit          end, as Ctrl-D
//...          a message that begins with a slash
Ctrl-C stops an answer, or clears the line; twice at an empty prompt ends.
Lines that are pasted together are one message, and so is what stands between two \"\"\"."""
_COMMANDS = ("/help", "/reset", "/system ", "/retry", "/save ", "/load ", "/exit")


def add_chat(parser: argparse.ArgumentParser) -> None:
    """Add the options of `infinilm chat`."""
    add_text(parser, "message", "answer this and end; a text at stdin comes before it, or is the message alone")
    parser.add_argument("--lines", action="store_true", help="each line of stdin is a message of one conversation")
    parser.add_argument(
        "--hide-thoughts", action="store_true", help="do not show what a model thinks before it answers"
    )
    parser.add_argument(
        "--no-history", action="store_true", help="keep no file of what was typed; INFINILM_HISTORY names another file"
    )
    parser.add_argument("--system", metavar="TEXT", help="what the model is told before the conversation")
    parser.add_argument(
        "--chat-template", metavar="TEMPLATE", help="Jinja text or the path of a file, instead of the model's template"
    )
    parser.add_argument(
        "--chat-template-kwarg",
        type=key_and_json,
        action="append",
        default=[],
        metavar="KEY=JSON",
        help="a variable for the template, such as enable_thinking=false; may be repeated",
    )
    add_model_settings(parser)
    add_lora(parser, "the adapter that answers")
    add_sampling(parser, max_tokens=512)
    add_constraint(parser)
    add_control_vector(parser)
    add_speculation(parser)
    add_quiet(parser)


def run_chat(args: argparse.Namespace) -> int:
    """Run `infinilm chat`; returns the exit code."""
    sampling_params(args)  # a bad option is told before the model is loaded
    message = _read_message(args)
    with open_llm(args, chat_template=args.chat_template) as llm:
        if not llm.chat_template:
            raise ConfigError(
                f"{llm.model_path} has no chat template (a base model?): pass --chat-template, or use infinilm generate"
            )
        params = sampling_params(args, llm)
        chat = _Chat(llm, params, dict(args.chat_template_kwarg), args.system, not args.hide_thoughts)
        if message is not None:
            return _answer_one(chat, message)
        if args.lines:
            return _answer_lines(chat)
        _tell(f"{args.model}: {llm.config.architecture}, {llm.dtype} on {', '.join(llm.devices)}")
        return _talk(chat, keeps_history=not args.no_history)


def _read_message(args: argparse.Namespace) -> str | None:
    """The one message of the command line, of stdin, or of both, stdin first; None: there is a conversation."""
    message: str | None = args.message
    if args.lines:
        if message is not None:
            raise RequestError("--lines reads messages from stdin: leave it out, or MESSAGE")
        return None
    if message is None:
        message = None if sys.stdin.isatty() else stdin_text()
    elif has_piped_text():
        message = f"{stdin_text()}\n\n{message}"
    if message is not None and not message.strip():
        raise RequestError("the message is empty: infinilm chat MESSAGE, or a text at stdin")
    return message


def _answer_one(chat: _Chat, message: str) -> int:
    """Answer a message and end."""
    reply = chat.answer(message)
    if reply is None:
        return 2
    return stopped() if reply.interrupted else 0


def _answer_lines(chat: _Chat) -> int:
    """Each line of stdin is a message or a command; 2 if there were messages and none was answered."""
    for line in stdin_lines():
        if not chat.take(line.rstrip("\r\n")):
            break
    return 2 if chat.num_failed and not chat.num_answered else 0


def _talk(chat: _Chat, *, keeps_history: bool) -> int:
    """Read messages from a terminal until the end."""
    from infinilm.cli.prompt import Prompt, history_file

    with Prompt(_COMMANDS, history_file() if keeps_history else None) as prompt:
        _tell("/help lists the commands; Ctrl-D ends")
        was_pressed = False
        while True:
            is_reading = True
            try:
                text = prompt.read()
                is_reading = False
                if text is None or not chat.take(text):
                    return 0
                was_pressed = False
            except KeyboardInterrupt:
                put("\n")
                if is_reading and prompt.has_typed:  # cleared, which is no wish to end
                    was_pressed = False
                    continue
                if was_pressed:
                    return stopped()
                was_pressed = True
                _tell("[Ctrl-C again, or Ctrl-D, ends]")


def _tell(text: str) -> None:
    """Write a line that is no part of an answer."""
    from infinilm.cli.terminal import dim

    note(dim(text))


class _Chat:
    """A conversation.

    Parameters
    ----------
    llm : LLM
    params : SamplingParams
    template_kwargs : dict
        Variables of the chat template.
    system : str, optional
        The system message.
    shows_thoughts : bool
        What a model thinks before it answers is shown; it is no part of the conversation in any case.
    """

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        template_kwargs: dict[str, Any],
        system: str | None,
        shows_thoughts: bool,
    ) -> None:
        self._llm = llm
        self._params = params
        self._template_kwargs = template_kwargs
        self._system = system
        self._shows_thoughts = shows_thoughts
        self._exchanges: list[tuple[str, str]] = []  # what the user said, and the model
        self._first = 0  # of the exchanges, that the context still holds
        self._last: str | None = None  # message, whether it was answered or not
        self.num_answered = self.num_failed = 0

    def take(self, text: str) -> bool:
        """Answer a message or obey a command; returns whether the conversation goes on."""
        stripped = text.strip()
        if not stripped.startswith("/") or "\n" in stripped:
            if stripped:
                self.answer(text)
            return True
        if stripped.startswith("//"):
            self.answer(stripped[1:])
            return True
        command, _, rest = stripped.partition(" ")
        rest = rest.strip()
        if command == "/exit":
            return False
        if command == "/help":
            _tell(_HELP)
        elif command == "/reset":
            self._exchanges, self._first = [], 0
            _tell("[the conversation starts anew]")
        elif command == "/system":
            self._set_system(rest)
        elif command == "/retry":
            self._retry()
        elif command == "/save":
            self._save(rest)
        elif command == "/load":
            self._load(rest)
        else:
            _tell(f"[no command {command}; /help lists them, and // begins a message with a slash]")
        return True

    def _set_system(self, text: str) -> None:
        self._system = text or self._system
        _tell("[no system message]" if self._system is None else f"[system message: {self._system}]")

    def _retry(self) -> None:
        if self._last is None:
            _tell("[nothing to answer once more]")
            return
        if self._exchanges and self._exchanges[-1][0] == self._last:
            self._exchanges.pop()
            self._first = min(self._first, len(self._exchanges))
        self.answer(self._last)

    def _save(self, name: str) -> None:
        if not name:
            _tell("[/save FILE: name a file]")
            return
        try:
            with Path(name).expanduser().open("x", encoding="utf-8") as file:
                json.dump(self._messages(0), file, ensure_ascii=False, indent=1)
                file.write("\n")
            _tell(f"[saved to {name}]")
        except FileExistsError:
            _tell(f"[{name} exists; name another file]")
        except OSError as error:
            _tell(f"[not saved: {error}]")

    def _load(self, name: str) -> None:
        if not name:
            _tell("[/load FILE: name a file]")
            return
        from infinilm.files import read_text

        try:
            saved = json.loads(read_text(Path(name).expanduser()))
            system, exchanges, last = _read_conversation(saved)
        except (OSError, ValueError, RecursionError, ConfigError) as error:
            _tell(f"[not loaded: {error}]")
            return
        self._system, self._exchanges, self._first, self._last = system, exchanges, 0, last
        count = "1 exchange" if len(exchanges) == 1 else f"{len(exchanges)} exchanges"
        _tell(f"[loaded {count} of {name}; /retry asks the last question again]")

    def _messages(self, first: int, text: str | None = None) -> list[dict[str, str]]:
        """The conversation from an exchange on, and the user's next message."""
        messages = [] if self._system is None else [{"role": "system", "content": self._system}]
        for question, answer in self._exchanges[first:]:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return messages if text is None else [*messages, {"role": "user", "content": text}]

    def answer(self, text: str) -> Reply | None:
        """Print the model's answer; both become part of the conversation, unless there is none (None: it failed)."""
        from infinilm.cli.answer import AnswerPrinter
        from infinilm.text.answers import AnswerFormat

        self._last = text
        reply = Reply()
        params, llm = self._params, self._llm
        try:
            messages, ids = self._fit_context(text, reserve=min(params.max_tokens or 1, llm.max_model_len // 4))
            form = AnswerFormat.of(llm.chat_template.source_text(with_tools=False), has_tools=False)
            if form.needs_special_tokens(llm.tokenizer):
                params = replace(params, skip_special_tokens=False)
            prompt = llm.chat_template.render(messages, **self._template_kwargs)
            printer = AnswerPrinter(form.maker(prompt, (), form.hidden(llm.tokenizer)), self._shows_thoughts)
            print_stream(llm.stream([ids], params), reply, printer)
        except (ConfigError, EngineDeadError):
            raise
        except InfinilmError as error:
            self.num_failed += 1
            _tell(f"[{error}]" if isinstance(error, RequestError) else f"[the request failed: {error}]")
            return None
        if reply.interrupted and not printer.text:
            _tell("[stopped before the answer began; /retry asks again]")
            return reply
        self.num_answered += 1
        self._exchanges.append((text, printer.text))
        if reply.interrupted:
            _tell("[stopped]")
        elif reply.finish_reason == "length":
            full = len(ids) + reply.num_tokens >= llm.max_model_len
            why = f"the context of {llm.max_model_len} tokens is full" if full else f"--max-tokens {params.max_tokens}"
            _tell(f"[cut off: {why}]")
        return reply

    def _fit_context(self, text: str, reserve: int) -> tuple[list[dict[str, str]], list[int]]:
        """The conversation and its token ids, without the oldest exchanges where `reserve` tokens would not be left."""
        num_dropped, limit = 0, self._llm.max_model_len
        while True:
            messages = self._messages(self._first, text)
            ids = self._llm.render_chat(messages, **self._template_kwargs)
            if len(ids) + reserve <= limit or self._first == len(self._exchanges):  # `stream` says whether it fits
                break
            self._first += 1
            num_dropped += 1
        if num_dropped:
            what = "exchange was" if num_dropped == 1 else f"{num_dropped} exchanges were"
            _tell(f"[the oldest {what} dropped: the context holds {limit} tokens]")
        return messages, ids


def _read_conversation(saved: Any) -> tuple[str | None, list[tuple[str, str]], str | None]:
    """What `/save` has written: the system message, the exchanges and the last question. ValueError: it is not that."""
    if not isinstance(saved, list) or not all(
        isinstance(m, dict) and all(isinstance(m.get(key), str) for key in ("role", "content")) for m in saved
    ):
        raise ValueError("expected a JSON list of messages, each with the texts role and content")
    system = saved[0]["content"] if saved and saved[0]["role"] == "system" else None
    turns = saved[system is not None :]
    for i, (message, role) in enumerate(zip(turns, itertools.cycle(("user", "assistant")), strict=False)):
        if message["role"] != role:
            raise ValueError(f"expected role {role!r} in message {i + (system is not None)}, got {message['role']!r}")
    texts = [message["content"] for message in turns]
    exchanges = list(zip(texts[::2], texts[1::2], strict=False))
    return system, exchanges, texts[(len(texts) - 1) // 2 * 2] if texts else None
