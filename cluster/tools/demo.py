"""`tandem demo`: serves the bundled model, sends requests, and shows the answers."""

import sys
import time
from collections.abc import Mapping, Sequence
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
from cluster.observe.operator_client import fetch_status, print_status
from cluster.observe.server_client import Server
from cluster.observe.terminal import Terminal
from cluster.serving.server import RunningServer, serving
from cluster.serving.settings import KEY_VARIABLE
from contracts.config import BUNDLED, TandemConfig
from contracts.errors import TandemError
from contracts.loading import load_config

# Rows of tasks of `models/bundled/tasks.json`, each with its expected label.
TASKS = {
    "toxicity": [
        ("Thanks for taking the time to explain this, it really helped.", " no"),
        ("You are a pathetic idiot and everyone here hates you.", " yes"),
    ],
    "sms_spam": [
        ("Running ten minutes late, order me a coffee please?", " no"),
        ("WINNER! Claim your free 1000 pound prize now, call 09061701461.", " yes"),
    ],
    "sentiment": [
        ("The sound is crisp and the battery lasts all week, great buy.", " positive"),
        ("Terrible. It broke after two days and support never answered.", " negative"),
    ],
    "banking77": [
        ("My new card still has not come in the post, where is it?", " card_arrival"),
        ("Which exchange rate do you use when I pay in dollars?", " exchange_rate"),
    ],
}
CHATS = [  # priority class, question
    ("be", "Is this message spam?\nYou have won a free phone! Call now to claim it."),
    ("be", "What does this bank customer want?\nMy card was swallowed by the machine."),
    ("ls", "What emotion does this post show?\nThank you so much, you made my day!"),
    ("ls", "Who are you?"),
]
SETTINGS = (
    "groups.attention_ranks=1",
    "groups.expert_ranks=2",
    "groups.prefill_ranks=2",
    "serve.name=demo",
    "schedule.r1=2",
    "schedule.r2=2",
    "kv.pool_tokens=32768",
)
MAX_CHAT_TOKENS = 48
TIMEOUT_S = 60.0


class _Labels(msgspec.Struct):
    name: str
    template: str
    labels: list[str]


class _TaskFile(msgspec.Struct):
    tasks: list[_Labels]


class ChatResult(NamedTuple):
    answer: str
    ttft_s: float
    tpot_s: float
    tokens: int


def run_demo(trace: Path | None, environment: Mapping[str, str]) -> int:
    """Run the demo and return the exit status. trace: file for a Perfetto trace."""
    console = Terminal(width=None if sys.stdout.isatty() else 140)
    started_s = time.monotonic()
    config: TandemConfig = load_config(None, [*SETTINGS, f"http.port={free_port()}"])
    groups = config.groups
    console.print(
        f"Starting {groups.attention_ranks} attention and {groups.expert_ranks} expert ranks and "
        f"{groups.prefill_ranks} prefill workers on a local Ray cluster …"
    )
    environment = {k: v for k, v in environment.items() if k != KEY_VARIABLE}
    with serving(config, environment=environment) as served:
        console.print(f"Serving the bundled model at {served.url}/v1: {served.ready_s:.1f} s\n")
        for table in (_classification, _chats):
            console.print(table(served))
        server = Server(served.url)
        print_status(server, fetch_status(server))
        if trace is not None:
            write_chrome_trace(served.groups.spans.remote().result(timeout_s=TIMEOUT_S), trace)
            console.print(f"Trace: {trace} (open it in https://ui.perfetto.dev)")
    console.print(f"Done in {time.monotonic() - started_s:.1f} s; nothing is left running.")
    return 0


def _classification(served: RunningServer) -> Table:
    path = resolve_model_folder(BUNDLED) / "tasks.json"
    known = {t.name: t for t in msgspec.json.decode(path.read_bytes(), type=_TaskFile).tasks}
    title = "Classification, one request per task, all at once (POST /v1/classify)"
    table = _table(title, ("task", "text", "answer"), ("probability", "labels", "request ms"))
    with (
        httpx.Client(base_url=served.url, timeout=TIMEOUT_S, trust_env=False) as client,
        ThreadPoolExecutor(len(TASKS)) as threads,
    ):
        answers = threads.map(lambda name: _classify(client, known[name]), TASKS)
        for (name, rows), (items, milliseconds) in zip(TASKS.items(), answers, strict=True):
            for (text, expected), item in zip(rows, items, strict=True):
                mark = "[green]✓[/]" if item["label"] == expected else f"[yellow]≠{expected}[/]"
                table.add_row(
                    name,
                    _short(text, 48),
                    f"{item['label'].strip()} {mark}",
                    f"{max(item['probs']):.2f}",
                    str(item["num_classes"]),
                    f"{milliseconds:.0f}",
                )
    return table


def _classify(client: httpx.Client, labels: _Labels) -> tuple[list[dict[str, Any]], float]:
    """Return the answers to the rows of a task, and the milliseconds of the request."""
    started_s = time.monotonic()
    body = {
        "model": BUNDLED,
        "input": [text for text, _ in TASKS[labels.name]],
        "labels": labels.labels,
        "template": labels.template,
    }
    response = client.post("/v1/classify", json=body)
    if response.status_code != 200:
        raise TandemError(f"/v1/classify answered {response.status_code}: {response.text}")
    return response.json()["data"], 1e3 * (time.monotonic() - started_s)


def _chats(served: RunningServer) -> Table:
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", timeout=TIMEOUT_S)
    with ThreadPoolExecutor(len(CHATS)) as threads:
        results = list(threads.map(lambda chat: _chat(client, *chat), CHATS))
    title = "Chats, streamed at the same time (openai client)"
    table = _table(title, ("class", "question", "answer"), ("tokens", "TTFT ms", "TPOT ms"))
    for (priority, question), result in zip(CHATS, results, strict=True):
        table.add_row(
            priority.upper(),
            _short(question.replace("\n", " "), 44),
            _short(result.answer, 60),
            str(result.tokens),
            f"{1e3 * result.ttft_s:.0f}",
            f"{1e3 * result.tpot_s:.1f}",
        )
    return table


def _chat(client: openai.OpenAI, priority: str, question: str) -> ChatResult:
    started_s = first_s = time.monotonic()
    pieces: list[str] = []
    stream = client.chat.completions.create(
        model=BUNDLED,
        messages=[{"role": "user", "content": question}],
        max_tokens=MAX_CHAT_TOKENS,
        temperature=0,
        stream=True,
        extra_body={"priority": priority},
    )
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            if not pieces:
                first_s = time.monotonic()
            pieces.append(chunk.choices[0].delta.content)
    tpot_s = (time.monotonic() - first_s) / max(1, len(pieces) - 1)
    return ChatResult("".join(pieces), first_s - started_s, tpot_s, len(pieces))


def _table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(*left, title=title, title_justify="left")
    for heading in right:
        table.add_column(heading, justify="right")
    return table


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
