"""`infinilm chat`: a conversation in the terminal, or of the lines of stdin."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinilm.cli.arguments import (
    add_constraint,
    add_control_vector,
    add_images,
    add_lora,
    add_model_settings,
    add_quiet,
    add_sampling,
    add_speculation,
    add_text,
    add_tiers,
    key_and_json,
    open_llm,
    sampling_params,
)
from infinilm.cli.conversation import Conversation, Message
from infinilm.cli.output import has_piped_text, note, put, stdin_lines, stdin_text, stopped
from infinilm.cli.stream import Reply, print_stream
from infinilm.errors import ConfigError, EngineDeadError, InfinilmError, RequestError

if TYPE_CHECKING:
    from infinilm.cli.answer import AnswerPrinter
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
Where the model has called a tool, the next message is what the tool gave.
Ctrl-C stops an answer, or clears the line; twice at an empty prompt ends.
Lines that are pasted together are one message, and so is what stands between two \"\"\"."""
_COMMANDS = ("/help", "/reset", "/system ", "/retry", "/save ", "/load ", "/exit")


def add_chat(parser: argparse.ArgumentParser) -> None:
    """Add the options of `infinilm chat`."""
    add_text(parser, "message", "answer this and end; a text at stdin comes before it, or is the message alone")
    parser.add_argument("--lines", action="store_true", help="each line of stdin is a message of one conversation")
    parser.add_argument(
        "--hide-reasoning", action="store_true", help="do not show what a model thinks before it answers"
    )
    parser.add_argument(
        "--reasoning-effort",
        metavar="LEVEL",
        help="how much the model thinks before it answers: none, minimal, low, medium, high, xhigh or max",
    )
    parser.add_argument(
        "--tools",
        metavar="FILE",
        help="functions that the model may call, a JSON list as OpenAI's API has it; calls are shown, and not made",
    )
    parser.add_argument(
        "--session",
        metavar="FILE",
        type=Path,
        help="go on with the conversation in this file, which is made if there is none, and keep it there; with "
        "--disk-cache, at once",
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
    add_images(parser, "before MESSAGE")
    add_model_settings(parser)
    add_lora(parser, "the adapter that answers")
    add_sampling(parser, max_tokens=512)
    add_constraint(parser)
    add_control_vector(parser)
    add_tiers(parser)
    add_speculation(parser)
    add_quiet(parser)


def run_chat(args: argparse.Namespace) -> int:
    """Run `infinilm chat`; returns the exit code."""
    sampling_params(args)  # a bad option is told before the model is loaded
    message = _read_message(args)
    tools = None if args.tools is None else _read_tools(args.tools)
    if args.image and message is None:
        raise RequestError("--image: give the question about it, too: infinilm chat --image FILE MESSAGE")
    if args.image and args.session is not None:
        raise RequestError("--session keeps no pictures: leave out --session or --image")
    session = None if args.session is None else args.session.expanduser()
    kept = None if session is None or not session.exists() else _kept(session)
    if kept is not None and args.system is not None:
        raise RequestError("--system: the conversation of --session has begun; give --system with a new file")
    with open_llm(args, chat_template=args.chat_template) as llm:
        if not llm.chat_template:
            if llm.task != "generate":
                llm.render_chat([])  # its error says that the model writes no text
            raise ConfigError(
                f"{llm.model_path} has no chat template (a base model?): pass --chat-template, or use infinilm generate"
            )
        params = sampling_params(args, llm)
        if tools is not None:
            _check_tools(llm, params)
        variables = _thinking(llm, args.reasoning_effort, bool(tools)) | dict(args.chat_template_kwarg)
        chat = _Chat(llm, params, variables, args.system, tools, not args.hide_reasoning, session, kept)
        if message is not None:
            return _answer_one(chat, message, args.image)
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


def _read_tools(name: str) -> list[dict[str, Any]]:
    """The functions of a file, as chat templates take them. RequestError: it holds something else, and what."""
    from infinilm.files import read_text

    try:
        listed = json.loads(read_text(Path(name).expanduser()))
    except (OSError, ValueError, RecursionError) as error:
        raise RequestError(f"--tools {name}: expected a JSON file with a list of functions: {error}") from None
    if not isinstance(listed, list) or not listed:
        came = "an empty list" if listed == [] else f"a JSON {type(listed).__name__}"
        raise RequestError(f"--tools {name}: expected a JSON list of functions, got {came}")
    tools = []
    for i, tool in enumerate(listed):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise RequestError(
                f'--tools {name}: function {i} must be like {{"name": "weather", "description": ..., '
                f'"parameters": a JSON schema}}, alone or as "function" in an object; got {json.dumps(tool):.80}'
            )
        if not isinstance(function.get("parameters", {}), dict):
            raise RequestError(
                f"--tools {name}: the parameters of {function['name']!r} must be a JSON schema, an object"
            )
        own = {key: value for key, value in function.items() if key != "type"}
        tools.append({"type": "function", "function": {"description": "", "parameters": _NOTHING, **own}})
    return tools


def _thinking(llm: LLM, effort: str | None, has_tools: bool) -> dict[str, Any]:
    """The variables of the chat template for a level of reasoning. RequestError: the model does not know it."""
    if effort is None:
        return {}
    try:
        return llm.chat_template.thinking(has_tools).at(effort)
    except RequestError as error:
        raise RequestError(f"--reasoning-effort: {error}") from None


_NOTHING = {"type": "object", "properties": {}}


def _check_tools(llm: LLM, params: SamplingParams) -> None:
    """ConfigError or RequestError: calls of this model would not be known as such."""
    from infinilm.text.answers import AnswerFormat

    if params.constraint is not None:
        raise RequestError("--tools cannot be combined with what the whole answer must be: leave out one of the two")
    form = AnswerFormat.of(llm.chat_template.source_text(with_tools=True), has_tools=True)
    if form.calls is None:
        raise ConfigError(
            f"--tools: the chat template of {llm.model_path} teaches no way to call them that is known here "
            f"(its format is {form.chat.name}): leave --tools out, or pass --chat-template"
        )


def _kept(path: Path) -> Conversation:
    """The conversation of a file. RequestError: it holds something else, which stays."""
    try:
        return Conversation.load(path)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"--session: {path} holds no conversation: {error}; name another file") from None


def _answer_one(chat: _Chat, message: str, images: Sequence[Path]) -> int:
    """Answer a message, before which are these pictures, and end."""
    reply = chat.answer(message, images)
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
    tools : list of dict, optional
        What the model may call.
    shows_reasoning : bool
        What a model thinks before it answers is shown.
    session : Path or None
        The conversation is kept there after each answer.
    kept : Conversation or None
        What it is at first.
    """

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        template_kwargs: dict[str, Any],
        system: str | None,
        tools: list[dict[str, Any]] | None,
        shows_reasoning: bool,
        session: Path | None = None,
        kept: Conversation | None = None,
    ) -> None:
        self._llm = llm
        self._params = params
        self._template_kwargs = template_kwargs
        self._tools = tools
        self._shows_reasoning = shows_reasoning
        self._session = session
        self._talk = Conversation(system)
        self._first = 0  # of the turns, that the context still holds
        self._last: str | None = None  # message of the user, whether it was answered or not
        self.num_answered = self.num_failed = 0
        if kept is not None:
            self._take_over(kept, str(session))

    def take(self, text: str) -> bool:
        """Answer a message or obey a command; returns whether the conversation goes on."""
        stripped = text.strip()
        if not stripped.startswith("/") or "\n" in stripped:
            if stripped or self._talk.waiting:  # a tool may give nothing
                self._hear(text)
            return True
        if stripped.startswith("//"):
            self._hear(stripped[1:])
            return True
        command, _, rest = stripped.partition(" ")
        rest = rest.strip()
        if command == "/exit":
            return False
        if command == "/help":
            _tell(_HELP)
        elif command == "/reset":
            self._talk, self._first = Conversation(self._talk.system), 0
            self._keep()
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

    def _hear(self, text: str) -> None:
        """Take what was typed: what a called tool gave, or a message."""
        if self._talk.waiting:
            self._talk.add_result(text)
            if not self._talk.waiting:
                self._answer_turn(self._talk.turns.pop())
        else:
            self.answer(text)
        self._tell_waiting()

    def _tell_waiting(self) -> None:
        """Say which call waits for its result, if one does."""
        for call in self._talk.waiting[:1]:
            function = call["function"]
            _tell(f"[what does {function['name']}({function['arguments']}) give? The next message is its result]")

    def _set_system(self, text: str) -> None:
        self._talk.system = text or self._talk.system
        system = self._talk.system
        _tell("[no system message]" if system is None else f"[system message: {system}]")

    def _retry(self) -> None:
        if self._last is None:
            _tell("[nothing to answer once more]")
            return
        if self._talk.question == self._last:
            self._talk.turns.pop()
            self._first = min(self._first, len(self._talk.turns))
        self.answer(self._last)
        self._tell_waiting()

    def _save(self, name: str) -> None:
        if not name:
            _tell("[/save FILE: name a file]")
            return
        try:
            self._talk.save(Path(name).expanduser())
            _tell(f"[saved to {name}]")
        except FileExistsError:
            _tell(f"[{name} exists; name another file]")
        except OSError as error:
            _tell(f"[not saved: {error}]")

    def _load(self, name: str) -> None:
        if not name:
            _tell("[/load FILE: name a file]")
            return
        try:
            talk = Conversation.load(Path(name).expanduser())
        except (OSError, ValueError, RecursionError, ConfigError) as error:
            _tell(f"[not loaded: {error}]")
            return
        self._take_over(talk, name)

    def _take_over(self, talk: Conversation, name: str) -> None:
        """Go on with a conversation that was saved, whose file has this name."""
        self._talk, self._first, self._last = talk, 0, talk.question
        if talk.turns and talk.turns[-1][-1]["role"] != "assistant" and not talk.waiting:
            talk.turns.pop()  # its answer is missing
        count = "1 exchange" if len(talk.turns) == 1 else f"{len(talk.turns)} exchanges"
        _tell(f"[loaded {count} of {name}; /retry asks the last question again]")
        self._tell_waiting()

    def answer(self, text: str, images: Sequence[Path] = ()) -> Reply | None:
        """Print the model's answer; both become part of the conversation, unless there is none (None: it failed)."""
        self._last = text
        parts = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": text}]
        return self._answer_turn([{"role": "user", "content": parts if images else text}])

    def _answer_turn(self, turn: list[Message]) -> Reply | None:
        """`answer` to the end of a turn, which is the last one."""
        reply = Reply()
        params, llm = self._params, self._llm
        try:
            reserve = min(params.max_tokens or 1, llm.max_model_len // 4)
            messages, ids = self._fit_context(turn, reserve)
            printer, params = self._printer(messages)
            print_stream(llm.stream([ids], params), reply, printer)
        except (ConfigError, EngineDeadError):
            raise
        except InfinilmError as error:
            self.num_failed += 1
            _tell(f"[{error}]" if isinstance(error, RequestError) else f"[the request failed: {error}]")
            return None
        answer = printer.message()
        if reply.interrupted and not answer["content"] and "tool_calls" not in answer:
            _tell("[stopped before the answer began; /retry asks again]")
            return reply
        self.num_answered += 1
        self._talk.turns.append([*turn, answer])
        self._keep()
        if reply.interrupted:
            _tell("[stopped]")
        elif reply.finish_reason == "length":
            full = len(ids) + reply.num_tokens >= llm.max_model_len
            why = f"the context of {llm.max_model_len} tokens is full" if full else f"--max-tokens {params.max_tokens}"
            _tell(f"[cut off: {why}]")
        return reply

    def _keep(self) -> None:
        """Keep the conversation in the file of the session."""
        if self._session is not None:
            try:
                self._talk.save_again(self._session)
            except OSError as error:
                _tell(f"[not kept: {error}]")

    def _printer(self, messages: list[Message]) -> tuple[AnswerPrinter, SamplingParams]:
        """What prints the answer to messages, and the parameters by which its text has what the printer needs."""
        from infinilm.cli.answer import AnswerPrinter
        from infinilm.text.answers import AnswerFormat

        llm, tools, params = self._llm, self._tools, self._params
        form = AnswerFormat.of(llm.chat_template.source_text(bool(tools)), has_tools=bool(tools))
        if form.needs_special_tokens(llm.tokenizer):
            params = replace(params, skip_special_tokens=False)
        said, _ = llm.take_images(messages)
        prompt = llm.chat_template.render(said, tools=tools, **self._template_kwargs)
        maker = form.maker(prompt, tools or (), form.hidden(llm.tokenizer))
        return AnswerPrinter(maker, self._shows_reasoning), params

    def _fit_context(self, turn: list[Message], reserve: int) -> tuple[list[Message], list[int]]:
        """The conversation and its token ids, without the oldest turns where `reserve` tokens would not be left."""
        num_dropped, limit = 0, self._llm.max_model_len
        while True:
            messages = self._talk.messages(self._first) + turn
            ids = self._llm.render_chat(messages, tools=self._tools, **self._template_kwargs)
            if len(ids) + reserve <= limit or self._first == len(self._talk.turns):  # `stream` says whether it fits
                break
            self._first += 1
            num_dropped += 1
        if num_dropped:
            what = "exchange was" if num_dropped == 1 else f"{num_dropped} exchanges were"
            _tell(f"[the oldest {what} dropped: the context holds {limit} tokens]")
        return messages, ids
