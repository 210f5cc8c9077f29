"""What the demo sends: rows written for it, in the forms the bundled checkpoint has learned."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import openai
from rich.table import Table

from actors.telemetry.chrome_trace import write_chrome_trace
from cluster.fleet.model_folder import resolve_model_folder
from cluster.http.server import free_port
from cluster.observe.terminal import Terminal
from cluster.serving.server import RunningServer, serving
from contracts.config import BUNDLED, TandemConfig
from contracts.errors import TandemError
from contracts.loading import load_config
from contracts.ranks import Group, RankStatus
from contracts.traces import TaskSpan
from planner.schedule.exposed_communication import exposed_communication


class DemoTask(NamedTuple):
    """Rows of one task of `models/bundled/tasks.json`, each with what a person would say."""

    task: str
    rows: list[tuple[str, str]]


TASKS = [
    DemoTask(
        "toxicity",
        [
            ("Thanks for taking the time to explain this, it really helped.", " no"),
            ("You are a pathetic idiot and everyone here hates you.", " yes"),
        ],
    ),
    DemoTask(
        "sms_spam",
        [
            ("Running ten minutes late, order me a coffee please?", " no"),
            ("WINNER! Claim your free 1000 pound prize now, call 09061701461.", " yes"),
        ],
    ),
    DemoTask(
        "sentiment",
        [
            ("The sound is crisp and the battery lasts all week, great buy.", " positive"),
            ("Terrible. It broke after two days and support never answered.", " negative"),
        ],
    ),
    DemoTask(
        "banking77",
        [
            ("My new card still has not come in the post, where is it?", " card_arrival"),
            ("Which exchange rate do you use when I pay in dollars?", " exchange_rate"),
        ],
    ),
    DemoTask(
        "goemotions",
        [
            ("Thank you so much, this made my whole week!", " gratitude"),
            ("I love this song so much.", " love"),
        ],
    ),
    DemoTask(
        "arxiv",
        [
            (
                "We prove that every compact Kähler manifold with vanishing first Chern class "
                "admits a finite cover that splits as a product.",
                " mathematics",
            ),
        ],
    ),
]


class DemoChat(NamedTuple):
    priority: str
    question: str


CHATS = [
    DemoChat("be", "Is this message spam?\nYou have won a free phone! Call now to claim it."),
    DemoChat("be", "What does this bank customer want?\nMy card was swallowed by the machine."),
    DemoChat("ls", "What emotion does this post show?\nThank you so much, you made my day!"),
    DemoChat("ls", "Is this review positive or negative?\nThe battery died after two days."),
    DemoChat("ls", "Who are you?"),
]


MAX_CHAT_TOKENS = 48
TIMEOUT_S = 60.0


class _Labels(msgspec.Struct):
    name: str
    template: str
    labels: list[str]


class _TaskFile(msgspec.Struct):
    tasks: list[_Labels]


class ChatResult(NamedTuple):
    chat: DemoChat
    answer: str
    ttft_s: float
    tpot_s: float
    tokens: int
    cached_tokens: int


def run_demo(trace: Path | None) -> int:
    """Starts, asks, shows, stops. Returns the exit status."""
    console = Terminal(width=None if sys.stdout.isatty() else 140)
    config = _config()
    groups = config.groups
    console.print(
        f"Starting {groups.attention_ranks} attention and {groups.expert_ranks} expert ranks and "
        f"{groups.prefill_ranks} prefill workers on a local Ray cluster …"
    )
    started_s = time.monotonic()
    with serving(config) as served:
        console.print(f"Serving the bundled model at {served.url}/v1: {served.ready_s:.1f} s\n")
        for show in (_classification, _chats):
            before = _busy_s(served)
            console.print(show(served))
            console.print(f"Answered by {_busy_ranks(before, _busy_s(served))}.\n")
        spans = served.groups.spans.remote().result(timeout_s=TIMEOUT_S)
        console.print(_ranks(served, spans))
        if trace is not None:
            write_chrome_trace(spans, trace)
            console.print(f"Trace: {trace} (open it in https://ui.perfetto.dev)")
    console.print(f"Done in {time.monotonic() - started_s:.1f} s; nothing is left running.")
    return 0


def _config() -> TandemConfig:
    return load_config(
        None,
        [
            "groups.attention_ranks=1",
            "groups.expert_ranks=2",
            "groups.prefill_ranks=2",
            "serve.name=demo",
            "schedule.r1=2",
            "schedule.r2=2",
            "kv.pool_tokens=32768",
            f"http.port={free_port()}",
        ],
    )


def _classification(served: RunningServer) -> Table:
    path = resolve_model_folder(BUNDLED) / "tasks.json"
    known = {t.name: t for t in msgspec.json.decode(path.read_bytes(), type=_TaskFile).tasks}
    table = Table(
        title="Classification, one request per task, all at once (POST /v1/classify)",
        title_justify="left",
    )
    for heading in ("task", "text", "answer"):
        table.add_column(heading)
    for heading in ("probability", "labels", "request ms"):
        table.add_column(heading, justify="right")
    with (
        httpx.Client(base_url=served.url, timeout=TIMEOUT_S) as client,
        ThreadPoolExecutor(len(TASKS)) as threads,
    ):
        answers = threads.map(lambda task: _classify(client, task, known[task.task]), TASKS)
        for task, (answer, milliseconds) in zip(TASKS, answers, strict=True):
            for (text, expected), item in zip(task.rows, answer["data"], strict=True):
                mark = "[green]✓[/]" if item["label"] == expected else f"[yellow]≠{expected}[/]"
                table.add_row(
                    task.task,
                    _short(text, 48),
                    f"{item['label'].strip()} {mark}",
                    f"{max(item['probs']):.2f}",
                    str(item["num_classes"]),
                    f"{milliseconds:.0f}",
                )
    return table


def _classify(
    client: httpx.Client, task: DemoTask, labels: _Labels
) -> tuple[dict[str, Any], float]:
    """The answer of one request with all rows of the task, and its milliseconds."""
    started_s = time.monotonic()
    response = client.post(
        "/v1/classify",
        json={
            "model": BUNDLED,
            "input": [text for text, _ in task.rows],
            "labels": labels.labels,
            "template": labels.template,
        },
    )
    if response.status_code != 200:
        raise TandemError(f"/v1/classify answered {response.status_code}: {response.text}")
    answer: dict[str, Any] = response.json()
    return answer, 1e3 * (time.monotonic() - started_s)


def _chats(served: RunningServer) -> Table:
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", timeout=TIMEOUT_S)
    with ThreadPoolExecutor(len(CHATS)) as threads:
        results = list(threads.map(lambda chat: _chat(client, chat), CHATS))
    table = Table(title="Chats, streamed at the same time (openai client)", title_justify="left")
    for heading in ("class", "question", "answer"):
        table.add_column(heading)
    for heading in ("tokens", "TTFT ms", "TPOT ms"):
        table.add_column(heading, justify="right")
    for result in results:
        table.add_row(
            result.chat.priority.upper(),
            _short(result.chat.question.replace("\n", " "), 44),
            _short(result.answer, 60),
            str(result.tokens),
            f"{1e3 * result.ttft_s:.0f}",
            f"{1e3 * result.tpot_s:.1f}",
        )
    return table


def _chat(client: openai.OpenAI, chat: DemoChat) -> ChatResult:
    started_s = first_s = time.monotonic()
    pieces: list[str] = []
    usage = None
    stream = client.chat.completions.create(
        model=BUNDLED,
        messages=[{"role": "user", "content": chat.question}],
        max_tokens=MAX_CHAT_TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"priority": chat.priority},
    )
    for chunk in stream:
        usage = chunk.usage or usage
        if chunk.choices and chunk.choices[0].delta.content:
            if not pieces:
                first_s = time.monotonic()
            pieces.append(chunk.choices[0].delta.content)
    ended_s = time.monotonic()
    tokens = usage.completion_tokens if usage else len(pieces)
    details = usage.prompt_tokens_details if usage else None
    return ChatResult(
        chat,
        "".join(pieces),
        first_s - started_s,
        (ended_s - first_s) / max(1, tokens - 1),
        tokens,
        (details.cached_tokens or 0) if details else 0,
    )


def _statuses(served: RunningServer) -> list[RankStatus]:
    found: list[RankStatus] = served.groups.status.remote().result(timeout_s=TIMEOUT_S)
    return found


def _busy_s(served: RunningServer) -> dict[str, float]:
    """Seconds that each rank has computed so far."""
    return {status.name: _compute_s(status) for status in _statuses(served)}


def _compute_s(status: RankStatus) -> float:
    stage_s = status.sections.get("stage_s", {})
    return sum(stage_s.get(stage, 0.0) for stage in ("attention", "expert", "finish"))


def _busy_ranks(before: dict[str, float], after: dict[str, float]) -> str:
    return ", ".join(name for name, busy_s in after.items() if busy_s > before.get(name, 0.0))


def _ranks(served: RunningServer, spans: Sequence[TaskSpan]) -> Table:
    routed = [span for span in spans if not span.resource.startswith(Group.PREFILL)]
    _, exposed = exposed_communication(_within_batches(routed))
    table = Table(
        title=f"Ranks ({served.directory.backend} channels; exposed communication {exposed:.0%} "
        "of the batches' time)",
        title_justify="left",
    )
    for heading in ("rank", "plans (batches)", "chosen by"):
        table.add_column(heading)
    for heading in ("compute ms", "A2E+E2A sent kB", "KV blocks used"):
        table.add_column(heading, justify="right")
    for status in _statuses(served):
        sections = defaultdict(dict[str, float], status.sections)
        blocks = sections["kv_blocks"]
        table.add_row(
            status.name,
            _counted(sections["plans"]),
            _counted(sections["chosen_by"]),
            f"{1e3 * _compute_s(status):.0f}",
            f"{sections['channel_bytes'].get('sent', 0) / 1e3:.0f}",
            f"{sum(blocks.values()) - blocks['free']:.0f}" if blocks else "–",
        )
    return table


def _counted(counts: dict[str, float]) -> str:
    """The three most frequent."""
    most = sorted(counts.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{name} ({count:.0f})" for name, count in most) or "–"


def _within_batches(spans: Sequence[TaskSpan]) -> list[TaskSpan]:
    """Spans with the idle time between batches cut out, so that shares are of busy time."""
    shifted: list[TaskSpan] = []
    end_s = skipped_s = 0.0
    for span in sorted(spans, key=lambda span: span.start_s):
        if not shifted or span.start_s > end_s:
            skipped_s += span.start_s - end_s
        end_s = max(end_s, span.end_s)
        moved = {"start_s": span.start_s - skipped_s, "end_s": span.end_s - skipped_s}
        shifted.append(msgspec.structs.replace(span, **moved))
    return shifted


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
