"""Clients that ask without a pause, compare each answer with the undisturbed one, and note when
each piece of a stream came."""

import asyncio
import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import httpx

from benchmarks.robustness.questions import Load, Question

DECIMALS = 3  # of probabilities: a batch changes the seventh
LIMIT_S = 120.0
RETRY_S = 0.1
WRONG = ("lost", "shorter", "longer", "changed")

Answer = Any


class Outcome(NamedTuple):
    """how: "same", or what is wrong, and detail: in words."""

    kind: str
    how: str
    detail: str
    began_s: float
    duration_s: float


class Stream:
    """An answer on its way. arrived_s: when each piece of it came, if it is streamed."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.began_s = time.monotonic()
        self.ended_s = float("inf")
        self.arrived_s: list[float] = []

    def has_come_on(self, since_s: float, pieces: int) -> bool:
        """Whether it has ended, or so many pieces of it have come since."""
        arrived = self.arrived_s[-pieces:]
        return self.ended_s < float("inf") or (len(arrived) == pieces and arrived[0] > since_s)

    def after(self, at_s: float) -> float | None:
        """How long after that its next piece came; None: none did, or it was not open."""
        if not self.began_s <= at_s < self.ended_s:
            return None
        return next((arrived - at_s for arrived in self.arrived_s if arrived > at_s), None)


class Clients:
    """urls: of the ingress replicas that answer now. ended: whether the one at a URL has been
    killed since a moment. exact: what is rounded otherwise counts as changed."""

    def __init__(
        self,
        urls: Callable[[], Sequence[str]],
        ended: Callable[[str, float], bool],
        *,
        exact: bool = True,
    ) -> None:
        self._urls, self._ended, self._exact = urls, ended, exact
        self.outcomes: list[Outcome] = []
        self.streams: list[Stream] = []
        self.cut_with_ingress = 0
        self._expected: dict[int, Answer] = {}
        self._open: list[Stream] = []
        self._turns = itertools.count()
        self._stopping = False

    async def learn(self, load: Load) -> Counter[str]:
        """Asks each `load.learned` times, of an undisturbed server. How many of a kind were
        answered differently than the first time."""
        differ: Counter[str] = Counter()
        async with httpx.AsyncClient(timeout=LIMIT_S) as http:
            for question in itertools.chain(*load.by_kind.values()):
                url = self._urls()[0]
                for _ in range(load.learned):
                    answer = await self._send(http, url, question, Stream(question.kind))
                    if _error(answer):
                        raise ValueError(f"{question} was answered {answer}")
                    first = self._expected.setdefault(id(question), answer)
                    differ[question.kind] += first != answer
        return differ

    async def run(self, load: Load) -> None:
        """Until `stop`."""
        async with httpx.AsyncClient(timeout=LIMIT_S) as http:
            await asyncio.gather(
                *(
                    self._send_all(http, itertools.islice(itertools.cycle(some), place, None), load)
                    for kind, some in load.by_kind.items()
                    for place in range(load.at_once[kind])
                )
            )

    def have_come_on(self, since_s: float, pieces: int) -> bool:
        """Whether all that were asked before that have an answer, or so many pieces since."""
        self._open = [one for one in self._open if one.ended_s == float("inf")]
        return all(one.has_come_on(since_s, pieces) for one in self._open if one.began_s < since_s)

    def stop(self) -> None:
        """What is under way is answered still."""
        self._stopping = True

    async def _send_all(self, http: httpx.AsyncClient, line: Any, load: Load) -> None:
        for question in line:
            if self._stopping:
                return
            self.outcomes.append(await self._outcome(http, question))
            if not question.is_streamed:
                await asyncio.sleep(load.rest_s)

    async def _outcome(self, http: httpx.AsyncClient, question: Question) -> Outcome:
        began_s = time.monotonic()
        while True:
            url, sent_s = await self._url(), time.monotonic()
            stream = Stream(question.kind)
            try:
                answer = await self._send(http, url, question, stream)
            except httpx.TransportError as error:
                if not self._ended(url, sent_s):
                    return self._make_outcome(question, "lost", repr(error), began_s)
                self.cut_with_ingress += 1
                await asyncio.sleep(RETRY_S)
                continue
            expected = self._expected[id(question)]
            return self._make_outcome(
                question, *compared(answer, expected, exact=self._exact), began_s
            )

    def _make_outcome(self, question: Question, how: str, detail: str, began_s: float) -> Outcome:
        return Outcome(question.kind, how, detail, began_s, time.monotonic() - began_s)

    async def _url(self) -> str:
        """Wait until there is an ingress and return its URL."""
        while not (urls := self._urls()):
            await asyncio.sleep(RETRY_S)
        return urls[next(self._turns) % len(urls)]

    async def _send(
        self, http: httpx.AsyncClient, url: str, question: Question, stream: Stream
    ) -> Answer:
        self._open.append(stream)
        try:
            if not question.is_streamed:
                return classified(await http.post(url + question.path, json=question.body))
            self.streams.append(stream)
            return await _streamed(http, url, question, stream)
        finally:
            stream.ended_s = time.monotonic()


async def _streamed(
    http: httpx.AsyncClient, url: str, question: Question, stream: Stream
) -> Answer:
    choices: dict[int, dict[str, Any]] = {}
    async with http.stream("POST", url + question.path, json=question.body) as response:
        if response.status_code != 200:
            return {"error": (await response.aread()).decode()[:300]}
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                stream.arrived_s.append(time.monotonic())
                _add(choices, json.loads(line[6:]))
    return choices


def _add(choices: dict[int, dict[str, Any]], piece: dict[str, Any]) -> None:
    """A piece of a stream to what has come of it."""
    if "error" in piece:
        choices[-1] = {"error": piece["error"]["message"]}
        return
    if piece.get("usage"):
        usage = piece["usage"]
        choices[-2] = {"usage": [usage["prompt_tokens"], usage["completion_tokens"]]}
    for part in piece["choices"]:
        choice = choices.setdefault(part["index"], {"text": "", "tokens": [], "finish": None})
        choice["text"] += part["text"]
        choice["finish"] = choice["finish"] or part["finish_reason"]
        if part.get("logprobs"):
            choice["tokens"] += part["logprobs"]["tokens"]


def classified(answer: httpx.Response) -> Answer:
    if answer.status_code != 200:
        return {"error": answer.text[:300]}
    found = answer.json()
    return [
        [row["label"], [round(probability, DECIMALS) for probability in row["probs"]]]
        for row in found["data"]
    ]


def compared(answer: Answer, expected: Answer, *, exact: bool = True) -> tuple[str, str]:
    """How it is, and what is wrong with it: "same", "lost", "shorter", "longer" or "changed"; if it
    need not be exact, "rounded" where it has as many tokens."""
    if answer == expected:
        return "same", ""
    detail = f"{answer!r} and not {expected!r}"[:2000]
    if error := _error(answer):
        return "lost", error
    if not exact and _shape(answer) == _shape(expected):
        return "rounded", detail
    if not isinstance(expected, dict):
        return "changed", detail
    length = len(_text(answer)) - len(_text(expected))
    return ("shorter" if length < 0 else "longer" if length > 0 else "changed"), detail


def _shape(answer: Answer) -> Any:
    """What rounding does not change."""
    if not isinstance(answer, dict):
        return len(answer)
    return {at: one.get("usage") or one["finish"] for at, one in answer.items()}


def _error(answer: Answer) -> str:
    """What it says in the place of an answer, or behind a part of one; empty: it is whole."""
    if not isinstance(answer, dict):
        return ""
    return str(answer.get("error") or answer.get(-1, ""))[:500]


def _text(answer: dict[int, dict[str, Any]]) -> str:
    return "".join(choice.get("text", "") for choice in answer.values())
