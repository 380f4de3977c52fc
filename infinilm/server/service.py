"""State that all routes share: the model, admission, and counters."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.metadata
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import ClientDisconnect

from infinilm.calls import AsyncRequests
from infinilm.constraint import Constraint
from infinilm.errors import (
    CacheFullError,
    EngineDeadError,
    InfinilmError,
    QueueFullError,
    RequestError,
    TimeLimitError,
    told,
)
from infinilm.llm import LLM
from infinilm.outputs import EngineMetrics
from infinilm.pooling.recipe import TextRules
from infinilm.receipts import Receipt
from infinilm.requests.prompts import PLAIN, Prompt
from infinilm.sampling_params import SamplingParams
from infinilm.server.bodies import ApiError, Kind, UnknownFields, anything, text
from infinilm.server.drain import Drainable
from infinilm.server.guard import Receive, attended
from infinilm.server.keys import Keys
from infinilm.server.metrics import Metrics
from infinilm.server.records import Record, current, fail_current, log_request, name_of_current
from infinilm.server.settings import ServerSettings
from infinilm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from infinilm.server.traces import Traces

__all__ = ["PROMPTS", "Service", "bad_request", "make_traces", "queue_full"]

logger = logging.getLogger("infinilm.server")

T = TypeVar("T")

# Every event of a stream takes some 80 us of CPU with its sockets (docs/measurements/benchmarks.md, "Serving"), which
# the engine may need. So the next tokens of a stream wait a little for each other; the first and the last do not wait.
_REST_SECONDS = 0.02  # faster than people read
_EVENTS_PER_SECOND = 800  # of all streams together, about: less than a tenth of a core

# Requests that come together start together, see `Service._others_are_read`.
_TOGETHER_SECONDS = 0.005
_TURNS_OF_A_REQUEST = 3  # of the event loop, from its first byte until it is read

_GRACE_SECONDS = 10.0  # behind the time limit, which the engine keeps where it can

# What the library's messages say to who made the LLM: clients of a server cannot set it, and should not read its names.
_FOR_OPERATORS = re.compile(
    r"; this LLM was made with limits\..*|,? or raise (limits\.)?[a-z_]+.*| \(max_num_seqs \+ limits\.max_queued_seqs\)"
)

# What may be tokenised at a time without being answered: 1 MiB, which takes half a second and 200 MB, and in any case a
# text that fills the context.
_LONGEST_TEXT = 1 << 20
_CHARACTERS_OF_A_TOKEN = 32

_AGENTS_PATHS = ("/v1/messages", "/v1/responses")  # which Claude Code and Codex call
_FIELD_NAME = re.compile(r"[A-Za-z0-9_.\-\[\]]{1,64}")  # what goes into a log and a header; a client may send any text
_MAX_TOLD_FIELDS = 256
_MAX_FIELDS_IN_HEADER = 32

# Variables of a template that `chat_template_kwargs` cannot set.
_OF_TEMPLATES = {"self", "messages", "tools", "add_generation_prompt", "continue_final_message"}

# What the library's errors begin with, if a field is at fault.
_FIELDS = {field.name for field in dataclasses.fields(SamplingParams)} | {"messages", "prompt", "tools"}


_PROMPT = {"anyOf": [text.schema, {"type": "array", "items": {"type": "integer", "minimum": 0}}]}
PROMPTS = Kind(anything.check, {"anyOf": [_PROMPT, {"type": "array", "items": _PROMPT}]})
"""What `Service.prompts` reads."""


@dataclasses.dataclass(slots=True, eq=False)
class _Call:
    """What the queue holds of a call."""

    num_tokens: int  # of its prompts
    num_seqs: int  # of which the engine hears when `running` is there
    running: AsyncRequests | None = None

    @property
    def waits(self) -> bool:
        """Whether a prompt of it is still to be computed."""
        return self.running is None or not self.running.has_begun


class Service(Drainable):
    """The state of one model of a server.

    Attributes
    ----------
    settings : ServerSettings
    metrics : Metrics
    keys : Keys
    traces : Traces or None
        Where the settings want them.
    is_draining : bool
        SIGTERM has come: what runs may end, nothing new begins.
    names_elsewhere : callable
        Gives the names of the other models of the server, and of their adapters.
    on_death : callable
        Is called when the engine has died.
    """

    def __init__(self, settings: ServerSettings, beside: Service | None = None) -> None:
        """`beside`: another service of the same server, whose keys, threads and traces this one shares."""
        super().__init__()
        self.settings = settings
        self.metrics = Metrics(settings.model_names[0])
        self.names_elsewhere: Callable[[], Sequence[str]] = tuple
        self.on_death: Callable[[], object] = tuple
        self.keys: Keys = Keys(settings.api_keys, settings.api_key_file) if beside is None else beside.keys
        self.traces = make_traces(settings.traces_to, "infinilm", settings.model_names[0]) if beside is None else None
        self._death: BaseException | None = None
        self._died = asyncio.Event()
        self.created = int(time.time())
        self.version = importlib.metadata.version("infinilm")
        self.fingerprint = f"infinilm-{self.version}"
        self.instance = secrets.token_hex(8)  # of this process, which begins with an empty cache
        self.identity: asyncio.Future[dict[str, Any]] | None = None  # once a router has asked
        self._llm: LLM | None = None
        self._told_fields: set[tuple[str, str]] = set()  # route and name of fields that the log has named
        if beside is None:
            self.compilers = ThreadPoolExecutor(2, thread_name_prefix="infinilm-grammar")
            # Reads long bodies one after the other: each may take some hundred times its size while it is tokenised.
            self.long_reader = ThreadPoolExecutor(1, thread_name_prefix="infinilm-long-body")
            # The same for texts that are to be tokenised and no more, so that they never hold up who asks for an
            # answer.
            self.long_tokenizer = ThreadPoolExecutor(1, thread_name_prefix="infinilm-long-text")
        else:
            self.compilers, self.long_reader = beside.compilers, beside.long_reader
            self.long_tokenizer = beside.long_tokenizer
        self._num_read = 0  # calls, in all
        self._together: asyncio.Event | None = None  # of the calls that wait for others, see `_others_are_read`
        # The admitted calls whose prompts were not all computed when last looked at.
        self._waiting: list[_Call] = []

    def beside(self, names: tuple[str, ...]) -> Service:
        """A service of another model of the same server."""
        return Service(dataclasses.replace(self.settings, model_names=names, lora_folder=None, traces_to=None), self)

    # ---- the model ----

    @property
    def death(self) -> BaseException | None:
        """What ended the engine."""
        return self._death

    def _die(self, error: BaseException) -> None:
        if self._death is None:
            self._death = error.__cause__ or error
            self._died.set()
            self.on_death()

    async def died(self) -> None:
        """Wait until the engine is dead."""
        await self._died.wait()

    @property
    def llm(self) -> LLM:
        """The model, for what begins now. Raises ApiError while it is not there, and when nothing new may begin."""
        if (state := self.state()) != "ok" or self._llm is None:
            raise ApiError(f"the server is {state}", 503, code=state, headers={"Retry-After": "5"})
        return self._llm

    @property
    def loaded(self) -> LLM | None:
        """The model, if it is there, whatever may begin now."""
        return self._llm

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, also for answers that end when nothing new may begin."""
        assert self._llm is not None
        return self._llm.tokenizer

    def engine_metrics(self) -> EngineMetrics | None:
        """Counts of the engine; None where none runs."""
        return self._llm.metrics() if self._llm is not None and self.death is None else None

    def serve(self, llm: LLM) -> None:
        """Begin to serve a model."""
        # What clients are told names no path of this machine.
        name = self.settings.model_names[0]
        llm.chat_template.source, llm.tokenizer.source = f"the model {name!r}", f"tokenizer.json of the model {name!r}"
        self._llm = llm
        self.compilers.submit(_make_ready, llm)
        if self.settings.receipts:
            self.compilers.submit(llm.prepare_receipts)  # what fails is told to the first who asks for one
        if llm.prefix_store is not None or llm.fetches_prefixes:
            self.compilers.submit(llm.prepare_prefixes)  # which no prompt waits for
        self.metrics.serve(llm)

    def leave(self) -> LLM | None:
        """Serve no model any more, until `serve` is called again; returns the one that was served."""
        llm, self._llm = self._llm, None
        self.metrics.serve(None)
        self._death = None
        self._died = asyncio.Event()
        return llm

    @property
    def loras(self) -> Mapping[str, Path]:
        """The adapters that are loaded, and their folders."""
        return {} if self._llm is None else self._llm.loras

    def state(self) -> str:
        """Whether requests are served, "ok", or why not: "loading", "draining", "dead"."""
        if self.death is not None:
            return "dead"
        if self._llm is None:
            return "loading"
        return "draining" if self.is_draining else "ok"

    def check_model(self, name: str | None) -> str:
        """The name a request gives, of the model or of a LoRA adapter; ApiError if it is not served here.

        A request that names none means the model, also where there are adapters.
        """
        if name is None:
            return self.settings.model_names[0]
        if name not in self.model_names:
            served = ", ".join(map(repr, self.model_names))
            raise ApiError(
                f"the model {name!r} does not exist here; served: {served}", 404, param="model", code="model_not_found"
            )
        return name

    @property
    def model_names(self) -> tuple[str, ...]:
        """What requests may name: the model, then its adapters."""
        return (*self.settings.model_names, *self.llm.loras)

    def adapter_of(self, name: str) -> str | None:
        """The adapter that a served name means; None: the model as it is."""
        return None if name in self.settings.model_names else name

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        ending: Mapping[str, bool],
        kwargs: Mapping[str, Any],
    ) -> tuple[str, list[int]]:
        """The prompt of a conversation, as text and token ids; `ending`: how it ends, see `ChatTemplate.render`."""
        template = self.llm.chat_template
        for name in sorted(kwargs.keys() & _OF_TEMPLATES):
            raise ApiError(
                f"chat_template_kwargs.{name}: it is set by the server, or is a field of the body",
                param="chat_template_kwargs",
            )
        with bad_request("messages"):
            messages, pictures = self.llm.take_images(messages)
            prompt = template.render(messages, tools=tools, **ending, **kwargs)
            self._check_length(prompt, "messages")
            ids = self.llm.tokenizer.encode(prompt, add_special_tokens=False)
            if not ids:
                raise RequestError(f"messages: the chat template of {template.source} makes an empty prompt of them")
            return prompt, self.llm.place_images(ids, pictures) if pictures else ids

    def room(self, num_tokens: int, param: str) -> int:
        """Tokens that the context has left behind a prompt, a field of the body; ApiError if there are none."""
        limit = self.llm.max_model_len
        if num_tokens >= limit:
            raise self._too_long(num_tokens, param)
        return limit - num_tokens

    def _check_length(self, prompt: str, param: str) -> None:
        """ApiError, before a prompt is tokenised, if it cannot fit the context."""
        least = self.tokenizer.least_tokens(prompt)
        if least > self.llm.max_model_len:
            raise self._too_long(least, param, "at least ")

    def check_text(self, size: int, param: str, unit: str) -> None:
        """ApiError if a text that is to be tokenised and no more, or its token ids, are more than anything needs."""
        most = max(_LONGEST_TEXT, _CHARACTERS_OF_A_TOKEN * self.llm.max_model_len)
        if size > most:
            raise ApiError(f"{param}: expected at most {most} {unit}, got {size}: send it in parts", param=param)

    def _too_long(self, num_tokens: int, param: str, bound: str = "") -> ApiError:
        limit = self.llm.max_model_len
        return ApiError(
            # By these words LiteLLM and Claude Code know that a conversation must be shortened.
            f"prompt is too long: {bound}{num_tokens} tokens; this model's maximum context length is {limit} tokens, "
            "one of which must be left for the answer",
            code="context_length_exceeded",
            param=param,
            details={"n_prompt_tokens": num_tokens, "n_ctx": limit},  # by llama.cpp's names
        )

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to a text, special tokens as their names."""
        return self.tokenizer.token_bytes(token_id)

    def prompts(
        self, name: str, value: object, most: int, add_special_tokens: bool = True, rules: TextRules = PLAIN
    ) -> list[list[int]]:
        """Token ids of a field that is a text, a list of token ids, or a list of either; ApiError if it is not.

        `rules`: what becomes of texts.
        """
        several = isinstance(value, list) and not (value and type(value[0]) is int)
        items = value if isinstance(value, list) and several else [value]
        if not 1 <= len(items) <= most:
            raise ApiError(f"{name}: expected 1 to {most} texts or lists of token ids, got {len(items)}", param=name)
        result: list[list[int]] = []
        limit = min(rules.max_tokens or self.llm.max_model_len, self.llm.max_model_len)
        for i, item in enumerate(items):
            if isinstance(item, str):
                with bad_request(name):
                    given = rules.apply(item, f"{name}[{i}]" if several else name)
                    if rules.truncate:
                        result.append(self.tokenizer.encode_within([given], limit))
                        continue
                    self._check_length(given, name)
                    result.append(self.llm.tokenize(given, add_special_tokens=add_special_tokens))
            elif isinstance(item, list) and all(type(token_id) is int for token_id in item):
                result.append(item[:limit] if rules.truncate else item)
            else:
                raise ApiError(f"{name}: expected a text, a list of token ids, or a list of either", param=name)
        return result

    # ---- requests ----

    def unknown_fields(self, path: str) -> UnknownFields:
        """What becomes of fields of a request that are not known here, where the settings leave it open.

        Programs of people send what the people wrote, and a name that is wrong must not go unnoticed: it is refused.
        The bodies of agents are their vendors' own, who add fields at any time, and who uses the agent cannot take them
        out again: there such fields are told and ignored.
        """
        rule = self.settings.unknown_fields or ("warn" if path.startswith(_AGENTS_PATHS) else "refuse")
        return UnknownFields(is_lenient=rule == "warn")

    def tell_ignored(self, path: str, ignored: Mapping[str, str]) -> str:
        """Say in the log which fields were ignored, once for each name and route; gives the value of a header.

        `ignored`: see `UnknownFields`.
        """
        shown = {
            name if _FIELD_NAME.fullmatch(name) else "(a name of other characters)": why
            for name, why in ignored.items()
        }
        for name, why in shown.items():
            if (path, name) not in self._told_fields and len(self._told_fields) < _MAX_TOLD_FIELDS:
                self._told_fields.add((path, name))
                logger.warning("%s: the field %s %s, and is ignored", path, name, why)
        return ", ".join(list(shown)[:_MAX_FIELDS_IN_HEADER])

    def rest(self) -> float:
        """Seconds between two events of a stream, at least."""
        return max(_REST_SECONDS, self._num_admitted / _EVENTS_PER_SECOND)

    def failed(self, error: BaseException) -> ApiError:
        """What a client gets whose request failed on the way."""
        if isinstance(error, QueueFullError):
            return queue_full(_for_clients(error))
        if isinstance(error, (CacheFullError, RequestError)):  # such as a grammar that proves too costly
            named = re.match(r"[a-z_.]+(?=: )", str(error))
            return ApiError(_for_clients(error), param=named[0] if named is not None else None)
        if isinstance(error, TimeLimitError):
            assert self._llm is not None
            return ApiError(
                f"the request took longer than {self._llm.limits.max_seconds:g} s, the time limit of this server: try "
                "again later, or ask for less at a time",
                504,
                code="timeout",
            )
        if isinstance(error, EngineDeadError):
            self._die(error)
            return ApiError("the engine died; the server must be started again", 503, code="dead")
        return ApiError(f"the request failed: {told(error)}", 500)

    async def attended(self, receive: Receive, work: Coroutine[Any, Any, T]) -> T:
        """`guard.attended`, which raises what a client is told of a failure: ApiError.

        The engine keeps the time limit, between steps. Where a step does not end, or a client does not read what it is
        sent, the time is over here, later.
        """
        assert self._llm is not None
        limit = self._llm.limits.max_seconds
        try:
            return await attended(receive, work, None if limit is None else limit + max(limit, _GRACE_SECONDS))
        except ClientDisconnect:
            raise
        except ApiError as error:
            fail_current(error.status)
            raise
        except asyncio.TimeoutError:
            fail_current(504)
            raise ApiError(
                f"the request took much longer than {limit:g} s, its time limit: the engine does not come to an end of "
                "its step, or the client does not read",
                504,
                code="timeout",
            ) from None
        except Exception as error:  # of this request alone
            logger.warning("the request %s failed: %s", name_of_current(), told(error))
            failure = self.failed(error)
            fail_current(failure.status)
            raise failure from error

    @contextlib.asynccontextmanager
    async def running(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        ends_only: bool,
        given: Sequence[int] = (),
        prefixes_at: str | None = None,
    ) -> AsyncIterator[AsyncRequests]:
        """Run prompts as one call; what is unfinished at the end of the block is cancelled.

        `given`: the tokens with which the answer begins, of a call with one answer. `prefixes_at`: see `LLM.asubmit`.
        """
        llm = self.llm
        with self.admitted(sum(map(len, prompts)), len(prompts) * params.n) as call:
            if params.constraint is not None:
                await self._compile(llm, params.constraint)
            if params.return_receipt:
                await self._prepare_receipts(llm, params)
            with bad_request():
                asked: list[Prompt] = [prompt if isinstance(prompt, list) else list(prompt) for prompt in prompts]
                if given:
                    asked = [{"prompt_token_ids": prompts[0], "output_token_ids": given}]
                await self._others_are_read()
                started = llm.asubmit(asked, params, ends_only=ends_only, prefixes_at=prefixes_at)
            async with started as running:
                call.running = running
                self.metrics.follow(running)
                if (record := current.get()) is not None:
                    record.running = running
                try:
                    await asyncio.sleep(0)  # they all start before one of them writes, and lets the engine run
                    yield running
                finally:
                    # After the answers of others that ended at the same time; and, as the loop makes its calls in turn,
                    # before it reads a request that a client sends once it has its answer.
                    asyncio.get_running_loop().call_soon(self.metrics.finish, running)

    async def _compile(self, llm: LLM, constraint: Constraint) -> None:
        """Compile a constraint, which may take seconds, before a copy of it is made; the time limit counts them."""
        limit = llm.limits.max_seconds
        compiling = asyncio.get_running_loop().run_in_executor(self.compilers, llm.grammars.matcher, constraint, limit)
        try:
            with bad_request(constraint.name):
                await asyncio.wait_for(compiling, limit)
        except asyncio.TimeoutError:
            raise ApiError(
                f"the constraint was not compiled within {limit:g} s, the time limit", 504, code="timeout"
            ) from None
        except TimeLimitError as error:  # whose words say which limit
            raise ApiError(f"{told(error)}; try again later", 504, code="timeout") from error
        except InfinilmError as error:
            raise self.failed(error) from error

    async def _prepare_receipts(self, llm: LLM, params: SamplingParams) -> None:
        """Wait until the files that receipts name are read."""
        if not self.settings.receipts:
            raise ApiError(
                "return_receipt: this server gives no receipts: who runs it must start it with --receipts",
                param="return_receipt",
            )
        with bad_request("return_receipt"):
            await asyncio.to_thread(llm.prepare_receipts, params.lora)

    def told_receipt(self, receipt: Receipt | None) -> dict[str, Any]:
        """The field of a choice that has one, signed if there is a key.

        It is a text and no object, since a client that reads numbers and writes them again may change them.
        """
        if receipt is None:
            return {}
        key = self.settings.receipt_key
        return {"receipt": (receipt if key is None else receipt.signed(key)).to_json()}

    async def _others_are_read(self) -> None:
        """Wait a little while every turn of the event loop brings more requests.

        Those that come together then start together. Otherwise the engine, once it has the first of them, takes the
        interpreter and the cores from the reading of the others, and computes them in small steps.
        """
        loop = asyncio.get_running_loop()
        self._num_read += 1
        together = self._together
        if together is None:  # which the first look may set and forget at once, if this machine is busy
            together = self._together = asyncio.Event()
            self._look_for_others(together, loop.time() + _TOGETHER_SECONDS, 0, self._num_read)
        await together.wait()

    def _look_for_others(self, together: asyncio.Event, end: float, num_turns: int, num_read: int) -> None:
        """Once a turn of the event loop; `num_turns`: those without another call, of which there were `num_read`."""
        loop = asyncio.get_running_loop()
        num_turns = num_turns + 1 if num_read == self._num_read else 0
        if num_turns > _TURNS_OF_A_REQUEST or loop.time() >= end:
            self._together = None
            together.set()
        else:
            loop.call_soon(self._look_for_others, together, end, num_turns, self._num_read)

    @contextlib.contextmanager
    def admitted(self, num_tokens: int, num_seqs: int = 0) -> Iterator[_Call]:
        """Count a call whose prompts have so many tokens; ApiError if too many wait.

        `num_seqs`: sequences that the engine does not know of until the call has `running`.
        """
        call = self._admit(num_tokens, num_seqs)
        try:
            yield call
        except EngineDeadError as error:
            raise self.failed(error) from error
        finally:
            if call in self._waiting:
                self._waiting.remove(call)
            self._leave()

    def _admit(self, num_tokens: int, num_seqs: int) -> _Call:
        limits, llm = self.settings, self.llm
        known = llm.metrics()
        self._waiting = [call for call in self._waiting if call.waits]
        num_coming = sum(call.num_seqs for call in self._waiting if call.running is None)
        num_others = known.num_running + known.num_waiting + num_coming
        num_waiting = num_others - llm.memory.max_num_seqs
        waiting_tokens = sum(call.num_tokens for call in self._waiting)
        # A call that is alone may have a prompt as long as the context, and more sequences than the queue takes: it
        # would be refused for ever.
        over = waiting_tokens + num_tokens > limits.max_queued_tokens and waiting_tokens
        if over or (num_others and num_waiting + max(num_seqs, 1) > limits.max_queued_requests):
            what = f"{max(num_waiting, 0)} sequences" if not over else f"prompts of {waiting_tokens} tokens"
            self.metrics.num_refused += 1
            raise queue_full(f"{what} wait already, and {max(num_seqs, 1)} more were asked for; try again later")
        self._enter()
        call = _Call(num_tokens, num_seqs)
        self._waiting.append(call)
        return call

    def ended(self, record: Record) -> None:
        """Count a request of HTTP that has ended, and write its line of the log if there is to be one."""
        self.metrics.http.add(record)
        if self.traces is not None:
            self.traces.end(record)
        if self.settings.log_requests:
            log_request(record)


def _for_clients(error: BaseException) -> str:
    return _FOR_OPERATORS.sub("", told(error))


def _make_ready(llm: LLM) -> None:
    """Start what the first constraint needs; where that fails, the first constraint says why."""
    with contextlib.suppress(InfinilmError):
        llm.grammars.start()


def make_traces(endpoint: str | None, name: str, model_name: str) -> Traces | None:
    """Writes spans for a service of this name, if there is an address for them."""
    if endpoint is None:
        return None
    from infinilm.server.traces import Traces  # of an extra

    return Traces.to(endpoint, name, model_name)


def queue_full(message: str) -> ApiError:
    """What a client gets for whom there is no room."""
    return ApiError(message, 429, code="queue_full", headers={"Retry-After": "1"})


@contextlib.contextmanager
def bad_request(param: str | None = None) -> Iterator[None]:
    """What the library refuses is the client's to put right; `param`: the field at fault, if its words do not say."""
    try:
        yield
    except QueueFullError as error:
        raise queue_full(_for_clients(error)) from error
    except (CacheFullError, TypeError, ValueError) as error:
        message = _for_clients(error)
        begin = re.match(r"[a-z_]*", message)
        named = begin[0] if begin is not None and begin[0] in _FIELDS else param
        if named == "prompt" and param is not None:  # as the library calls it, whatever the field is called
            named, message = param, message.replace(named, param, 1)
        raise ApiError(message, param=named) from error
