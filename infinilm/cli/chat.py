"""`infinilm chat`: a conversation in the terminal, or of the lines of stdin."""

from __future__ import annotations

import argparse
import json
import select
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinilm.cli.arguments import add_lora, add_model_settings, add_sampling, key_and_json, open_llm, sampling_params
from infinilm.cli.output import note, put, stdin_lines, stopped
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
/exit          end, as Ctrl-D
//...          a message that begins with a slash
Ctrl-C stops an answer, or clears the line; twice at an empty prompt ends.
Lines that are pasted together are one message."""
_PASTE_SECONDS = 0.05  # within which the next line of a paste is there


def add_chat(parser: argparse.ArgumentParser) -> None:
    """Add the options of `infinilm chat`."""
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


def run_chat(args: argparse.Namespace) -> int:
    """Run `infinilm chat`; returns the exit code."""
    sampling_params(args)  # a bad option is told before the model is loaded
    with open_llm(args, chat_template=args.chat_template) as llm:
        if not llm.chat_template:
            raise ConfigError(
                f"{llm.model_path} has no chat template (a base model?): pass --chat-template, or use infinilm generate"
            )
        params = sampling_params(args, llm.default_sampling_params)
        chat = _Chat(llm, params, dict(args.chat_template_kwarg), args.system)
        return _talk(chat) if sys.stdin.isatty() else _answer_lines(chat)


def _answer_lines(chat: _Chat) -> int:
    """Each line of stdin is a message or a command; 2 if there were messages and none was answered."""
    for line in stdin_lines():
        if not chat.take(line.rstrip("\r\n")):
            break
    return 2 if chat.num_failed and not chat.num_answered else 0


def _talk(chat: _Chat) -> int:
    """Read messages from a terminal until the end."""
    try:
        import readline
    except ImportError:  # no line editing then
        pass
    else:
        readline.parse_and_bind("set enable-bracketed-paste on")  # Python switches it off
    note("/help lists the commands; Ctrl-D ends")
    was_pressed = False
    while True:
        try:
            if (text := _read_message()) is None or not chat.take(text):
                return 0
            was_pressed = False
        except KeyboardInterrupt:
            put("\n")
            if was_pressed:
                return stopped()
            was_pressed = True
            note("[Ctrl-C again, or Ctrl-D, ends]")


def _read_message() -> str | None:
    """A line, with those that were pasted behind it; None at the end of the input."""
    try:
        lines = [input("> ")]
    except EOFError:
        put("\n")
        return None
    # Where the terminal or readline does not tell what is pasted, the next line is there at once.
    # A command is one line.
    is_command = lines[0].startswith("/") and not lines[0].startswith("//")
    while not is_command and select.select([sys.stdin], [], [], _PASTE_SECONDS)[0]:
        try:
            lines.append(input())
        except EOFError:
            break
    return "\n".join(lines)


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
    """

    def __init__(self, llm: LLM, params: SamplingParams, template_kwargs: dict[str, Any], system: str | None) -> None:
        self._llm = llm
        self._params = params
        self._template_kwargs = template_kwargs
        self._system = system
        self._exchanges: list[tuple[str, str]] = []  # what the user said, and the model
        self._first = 0  # of the exchanges, that the context still holds
        self._last: str | None = None  # message, whether it was answered or not
        self.num_answered = self.num_failed = 0

    def take(self, text: str) -> bool:
        """Answer a message or obey a command; returns whether the conversation goes on."""
        stripped = text.strip()
        if not stripped.startswith("/") or "\n" in stripped:
            if stripped:
                self._answer(text)
            return True
        if stripped.startswith("//"):
            self._answer(stripped[1:])
            return True
        command, _, rest = stripped.partition(" ")
        rest = rest.strip()
        if command == "/exit":
            return False
        if command == "/help":
            note(_HELP)
        elif command == "/reset":
            self._exchanges, self._first = [], 0
            note("[the conversation starts anew]")
        elif command == "/system":
            self._set_system(rest)
        elif command == "/retry":
            self._retry()
        elif command == "/save":
            self._save(rest)
        else:
            note(f"[no command {command}; /help lists them, and // begins a message with a slash]")
        return True

    def _set_system(self, text: str) -> None:
        self._system = text or self._system
        note("[no system message]" if self._system is None else f"[system message: {self._system}]")

    def _retry(self) -> None:
        if self._last is None:
            note("[nothing to answer once more]")
            return
        if self._exchanges and self._exchanges[-1][0] == self._last:
            self._exchanges.pop()
            self._first = min(self._first, len(self._exchanges))
        self._answer(self._last)

    def _save(self, name: str) -> None:
        if not name:
            note("[/save FILE: name a file]")
            return
        try:
            with Path(name).expanduser().open("x", encoding="utf-8") as file:
                json.dump(self._messages(0), file, ensure_ascii=False, indent=1)
                file.write("\n")
            note(f"[saved to {name}]")
        except FileExistsError:
            note(f"[{name} exists; name another file]")
        except OSError as error:
            note(f"[not saved: {error}]")

    def _messages(self, first: int, text: str | None = None) -> list[dict[str, str]]:
        """The conversation from an exchange on, and the user's next message."""
        messages = [] if self._system is None else [{"role": "system", "content": self._system}]
        for question, answer in self._exchanges[first:]:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return messages if text is None else [*messages, {"role": "user", "content": text}]

    def _answer(self, text: str) -> None:
        """Print the model's answer; both become part of the conversation, unless there is none."""
        self._last = text
        reply = Reply()
        params, llm = self._params, self._llm
        try:
            ids = self._fit_context(text, reserve=min(params.max_tokens or 1, llm.max_model_len // 4))
            print_stream(llm.stream([ids], params), reply)
        except (ConfigError, EngineDeadError):
            raise
        except InfinilmError as error:
            self.num_failed += 1
            note(f"[{error}]" if isinstance(error, RequestError) else f"[the request failed: {error}]")
            return
        if reply.interrupted and not reply.text:
            note("[stopped before the answer began; /retry asks again]")
            return
        self.num_answered += 1
        self._exchanges.append((text, reply.text))
        if reply.interrupted:
            note("[stopped]")
        elif reply.finish_reason == "length":
            full = len(ids) + reply.num_tokens >= llm.max_model_len
            why = f"the context of {llm.max_model_len} tokens is full" if full else f"--max-tokens {params.max_tokens}"
            note(f"[cut off: {why}]")

    def _fit_context(self, text: str, reserve: int) -> list[int]:
        """Token ids of the conversation, without the oldest exchanges where `reserve` tokens would not be left."""
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
            note(f"[the oldest {what} dropped: the context holds {limit} tokens]")
        return ids
