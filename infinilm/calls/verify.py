"""The method of `LLM` that checks receipts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from infinilm.calls import streams
from infinilm.errors import EngineDeadError, InfinilmError, ReceiptError, RequestError
from infinilm.images import MediaRules, hash_of_pixels, open_image
from infinilm.progress import progress_bar
from infinilm.receipts import Receipt, Verdict
from infinilm.requests.prompts import RequestMaker
from infinilm.requests.receipts import ReceiptMaker, verdict_of
from infinilm.requests.request import GenerationRequest
from infinilm.requests.source import RequestSource
from infinilm.serving.engine_thread import EngineThread

__all__ = ["VerifyMethods"]


class VerifyMethods:
    """What `LLM` has for receipts."""

    _thread: EngineThread
    _requests: RequestMaker
    _receipts: ReceiptMaker

    def prepare_receipts(self, lora: str | None = None) -> None:
        """Read the files of the weights and of an adapter, which receipts name.

        The first request with ``return_receipt=True`` does so otherwise, before it begins.

        Parameters
        ----------
        lora : str, optional
            The name of an adapter.

        Raises
        ------
        OSError
            A file is not there any more, or cannot be read.
        """
        self._receipts.prepare(lora)

    def verify(
        self,
        receipts: Receipt | str | Mapping[str, Any] | Iterable[Receipt | str | Mapping[str, Any]],
        *,
        images: Sequence[Any] = (),
        use_tqdm: bool = True,
    ) -> list[Verdict]:
        """Check that this model gives the answers of receipts.

        Prompt and answer are computed once more, and every token of the answer is drawn again from the seed, as many
        tokens a step as there is room for. What the receipt says of its signature is not looked at, see
        `Receipt.check_signature`.

        Parameters
        ----------
        receipts
            One or any number, as objects, JSON texts, or what JSON gives. They are read as the engine has room.
        images
            The pictures of their prompts, in any order, as in prompts: of Pillow, arrays, bytes or paths. Receipts name
            pictures by their pixels, so that any file that shows the same will do. A receipt whose pictures are not all
            among them is incomparable, and its reason names the missing one.
        use_tqdm
            Show a progress bar on a terminal or in a notebook.

        Returns
        -------
        list[Verdict]
            One for each, in order.

        Raises
        ------
        ReceiptError
            Something else than a receipt: names its place. What was checked before is lost.
        RequestError
            Hooks are registered, of which no receipt can say what they do; or a picture cannot be read.
        EngineDeadError
            The `LLM` is closed, or a rank has failed.
        """
        each: Iterable[Any] = (
            [receipts] if isinstance(receipts, (Receipt, str, bytes, Mapping)) else cast(Any, receipts)
        )
        self._receipts.check_hooks("verify")
        opened = (open_image(image, f"picture {i}", MediaRules(), may_be_path=True) for i, image in enumerate(images))
        pictures = {hash_of_pixels(image): image for image in opened}
        total = len(each) if isinstance(each, Sequence) else None
        verdicts: list[Verdict | None] = []
        waiting: dict[str, tuple[int, Receipt]] = {}  # by the id of the request

        def requests() -> Iterator[GenerationRequest]:
            for place, one in enumerate(each):
                try:
                    receipt = one if isinstance(one, Receipt) else Receipt.from_json(one)
                    verdicts.append(self._compare(receipt))
                    if verdicts[place] is None:
                        request = self._requests.replay(receipt, pictures)
                        waiting[request.request_id] = place, receipt
                        yield request
                except ReceiptError as error:
                    raise ReceiptError(f"receipt {place}: {error}") from None
                except RequestError as error:
                    verdicts[place] = Verdict("incomparable", f"this engine cannot run the request: {error}")

        with progress_bar(total, "verifying", "receipt", wanted=use_tqdm and total != 0) as advance:

            def take(request: GenerationRequest) -> None:
                place, receipt = waiting.pop(request.request_id)
                verdicts[place] = verdict_of(receipt, request.completions[0])
                advance(1, "")

            source = RequestSource(requests(), None, self._requests.room(is_sized=False))
            try:
                for _ in streams.stream(self, self._thread, source, ends_only=True, take=take):
                    pass
            except (EngineDeadError, ReceiptError):
                raise
            except InfinilmError:  # every request failed, as the verdicts say
                if None in verdicts:
                    raise
        return cast(list[Verdict], verdicts)

    def _compare(self, receipt: Receipt) -> Verdict | None:
        """A verdict of what computes the answer; None: it is the same here."""
        differing = self._receipts.differences(receipt)
        return Verdict("incomparable", "; ".join(differing)) if differing else None
