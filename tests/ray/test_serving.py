"""The whole server with both pipelines: Ray actors, channels, HTTP, the bundled checkpoint.

A placement file puts 16 experts on 2 ranks: 9 and 11 in each layer, four of them twice. The tests
run in order; the last ones kill processes.
"""

import asyncio
import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from openai.types import Batch
from prometheus_client.parser import text_string_to_metric_families

from cluster.classification.classify import ClassifyTask, TokenizedRow, classify_row, tokenize_rows
from cluster.cli.main import main
from cluster.fleet.model_folder import resolve_model_folder
from cluster.fleet.placements import write_placement
from cluster.routing.least_work_placer import LeastWorkPlacer
from cluster.routing.rank_set import RoutingConfig
from cluster.serving.ingress_app import rank_clients
from cluster.serving.server import RunningServer, serving
from cluster.tools.demo import TASKS
from cluster.tools.doctor import server_checks
from contracts.config import BUNDLED
from contracts.loading import load_config
from contracts.placement import Placement, PlacementFile
from contracts.ranks import RankStatus
from models.prediction.profile_file import checkpoint_digest
from models.spec.model import read_spec
from models.text.tokenizer import Tokenizer
from models.text.tokenizer_files import tokenizer_digest
from tests.support.attention_ranks import started
from tests.support.placements import replicated
from tests.support.ray_head import RayHead
from tests.support.ray_support import rank_pids
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

DEADLINE_S = 60.0
ENDPOINT: Any = "/v1/chat/completions"
ROWS = range(300)
CLIENTS = 2
LABELS = ["positive", "negative"]
PROMPT = "Message: WINNER! Claim your free prize now.\nSpam:"
CHAT: Any = [{"role": "user", "content": "Review: It broke after two days.\nSentiment?"}]


class Server:
    """A running server and its clients."""

    def __init__(self, stack: contextlib.ExitStack, app_settings: list[str], targets: Path) -> None:
        config = load_config(
            None,
            [
                *app_settings,
                "model.dtype=float32",
                "groups.expert_ranks=2",
                "groups.prefill_ranks=2",
                "kv.pool_tokens=16384",
                "groups.ready_timeout_s=150",  # fails before pytest's timeout
                f"metrics.targets={targets}",
                f"batch.storage={targets / 'batches'}",
                f"placement.file={_placement_file(targets)}",
            ],
        )
        self.targets = targets / f"{config.serve.name}_service_discovery.json"
        self.served: RunningServer = stack.enter_context(serving(config))
        self.http = stack.enter_context(httpx.Client(base_url=self.served.url, timeout=DEADLINE_S))
        self.openai = openai.OpenAI(
            base_url=f"{self.served.url}/v1", api_key="none", timeout=DEADLINE_S, max_retries=0
        )

    def status(self) -> dict[str, RankStatus]:
        answers = self.served.groups.status.remote().result(timeout_s=DEADLINE_S)
        return {status.name: status for status in answers}

    def classify(self, texts: list[str]) -> list[dict[str, Any]]:
        body = {"model": BUNDLED, "input": texts, "labels": LABELS}
        answer = self.http.post("/v1/classify", json=body)
        assert answer.status_code == 200, answer.text
        data: list[dict[str, Any]] = answer.json()["data"]
        return data

    def busy_s(self) -> dict[str, float]:
        stages = {name: one.sections["stage_s"] for name, one in self.status().items()}
        return {name: stage_s["attention"] + stage_s["expert"] for name, stage_s in stages.items()}

    def active_groups(self, before: dict[str, float]) -> set[str]:
        """Return the groups of ranks that have computed since `before`."""
        now = self.busy_s()
        return {name.partition("-")[0] for name in now if now[name] > before[name]}

    @property
    def is_healthy(self) -> bool:
        return self.http.get("/health").status_code == 200

    def scraped(self) -> dict[str, str]:
        """Return the exported text of each scrape target by rank."""
        texts = {}
        for entry in json.loads(self.targets.read_text()):
            (where,), labels = entry["targets"], entry["labels"]
            answer = httpx.get(f"http://{where}{labels['__metrics_path__']}", timeout=DEADLINE_S)
            assert answer.status_code == 200
            texts[labels["rank"]] = answer.text
        return texts

    def count(self, name: str, **labels: str) -> float:
        """Return the sum of all series of `name` with these labels."""
        return sum(
            float(sample.value)
            for family in text_string_to_metric_families(self.http.get("/metrics").text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )


def _placement_file(folder: Path) -> Path:
    model = resolve_model_folder(BUNDLED)
    file = PlacementFile(
        checkpoint=checkpoint_digest(model).hex(),
        tokenizer=tokenizer_digest(model).hex(),
        placement=_placed(),
    )
    write_placement(file, folder / "placement.json")
    return folder / "placement.json"


def _placed() -> Placement:
    spec = read_spec(resolve_model_folder(BUNDLED))
    layers, moe_layers = spec.num_layers, spec.moe_layers
    return replicated(16, [1, 3], num_layers=layers, moe_layers=moe_layers, seed=1)


@pytest.fixture(scope="module")
def server(app_settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with contextlib.ExitStack() as stack:
        yield Server(stack, app_settings, tmp_path_factory.mktemp("targets"))


def test_ranks_hold_experts_of_placement_file(server: Server) -> None:
    ranks = [server.status()[f"expert-{rank}"] for rank in range(2)]
    found = [status.sections["placement"]["experts"] for status in ranks]
    placed = _placed()
    assert found == [sum(map(len, placed.experts_of(rank).values())) for rank in range(2)]


def test_uneven_experts_are_all_served(server: Server) -> None:
    names = [rank.name for rank in server.served.directory.ranks]
    names = [name for name in names if not name.startswith("prefill-")]
    assert names == ["attention-0", "expert-0", "expert-1"]
    server.openai.completions.create(model=BUNDLED, prompt=PROMPT * 8, max_tokens=2)
    status = server.status()
    assert all(status[name].healthy for name in names)
    assert all(status[name].sections["stage_s"]["expert"] > 0 for name in names[1:])


def test_classification_equals_transformers(server: Server) -> None:
    import transformers

    folder = resolve_model_folder(BUNDLED)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    templates = {
        "toxicity": ("Comment: {text}\nToxic:", [" no", " yes"]),
        "sms_spam": ("Message: {text}\nSpam:", [" no", " yes"]),
        "sentiment": ("Review: {text}\nSentiment:", [" negative", " positive"]),
    }
    for name, rows in list(TASKS.items())[:3]:
        template, labels = templates[name]
        texts = [text for text, _ in rows]
        body = {"model": BUNDLED, "input": texts, "labels": labels, "template": template}
        answer = server.http.post("/v1/classify", json=body)
        assert answer.status_code == 200, answer.text
        ids = [tokenizer(label, add_special_tokens=False).input_ids for label in labels]
        assert all(len(label) == 1 for label in ids)
        for text, item in zip(texts, answer.json()["data"], strict=True):
            prompt = tokenizer(template.format(text=text), return_tensors="pt").input_ids
            with torch.no_grad():
                logits = oracle(prompt).logits[0, -1]
            expected = logits[[label[0] for label in ids]].softmax(-1).tolist()
            assert item["probs"] == pytest.approx(expected, abs=1e-4)
            assert item["label"] == labels[max(range(len(labels)), key=expected.__getitem__)]


def texts_of(client: int) -> list[str]:
    return [f"Request {client}, row {row}: it is fine." for row in range(20)]


def test_single_pass_requests_use_prefill_workers(server: Server) -> None:
    busy = server.busy_s()
    server.classify(texts_of(0))
    assert server.active_groups(busy) == {"prefill"}
    busy = server.busy_s()
    for max_tokens, pipeline in ((1, "prefill"), (3, "generation")):
        of = {"class": "ls", "outcome": "ok", "pipeline": pipeline}
        before = server.count("tandem_requests_total", **of)
        body = {"model": BUNDLED, "prompt": "Hello there, you", "max_tokens": max_tokens}
        answer = server.http.post("/v1/completions", json={**body, "ignore_eos": True})
        assert answer.json()["usage"]["completion_tokens"] == max_tokens
        assert server.count("tandem_requests_total", **of) == before + 1
    assert server.active_groups(busy) == {"attention", "expert", "prefill"}


def test_both_pipelines_return_equal_probabilities(server: Server) -> None:
    task = ClassifyTask(labels=tuple(LABELS))

    async def through_attention_ranks() -> list[list[float]]:
        directory = server.served.directory
        clients = rank_clients(directory.client_addresses, directory.token)
        rows = tokenize_rows(tokenizer, [(text, task) for text in texts_of(1)])
        known = [row for row in rows if isinstance(row, TokenizedRow)]
        assert known == rows
        async with started(LeastWorkPlacer(clients, RoutingConfig())) as backend:
            return [(await classify_row(backend, task, row)).probs for row in known]

    tokenizer = Tokenizer.load(resolve_model_folder(BUNDLED))
    expected = asyncio.run(through_attention_ranks())
    for row, probs in zip(server.classify(texts_of(1)), expected, strict=True):
        assert row["probs"] == pytest.approx(probs, abs=1e-5)


def test_metrics_of_ranks_and_ingress_are_on_one_page(server: Server) -> None:
    refused = server.count("tandem_requests_total", outcome="refused")
    assert server.http.post("/v1/completions", json={"model": BUNDLED}).status_code == 400
    assert server.count("tandem_requests_total", outcome="refused") == refused + 1
    assert server.count("tandem_kv_blocks", rank="attention-0") == 16384 / 16


def test_every_process_exports_at_most_500_series(server: Server) -> None:
    server.openai.completions.create(model=BUNDLED, prompt=PROMPT, max_tokens=2)
    texts = server.scraped()
    assert len(texts) == len(server.served.directory.ranks) + 3
    ingress = next(name for name in texts if name.startswith("ingress-"))
    ranks = {ready.name for ready in server.served.directory.ranks}
    assert texts.keys() == {*ranks, "planner-0", "launcher", ingress}
    for name in ranks:
        assert "tandem_stage_seconds_count" in texts[name]
        assert f'tandem_rank_up{{group="{name[:-2]}",rank="{name}"}} 1.0' in texts["launcher"]
    assert "tandem_requests_total" in texts[ingress]
    for name, text in texts.items():
        series = [line for line in text.splitlines() if not line.startswith("#")]
        assert 0 < len(series) <= 500, name


def test_doctor_checks_every_exporter_without_error(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server_checks, "SAMPLE_INTERVAL_S", 0.1)
    settings = ["--set", f"metrics.targets={server.targets.parent}"]
    settings += ["--set", f"serve.name={server.targets.name.partition('_')[0]}"]
    assert main(["doctor", "--url", server.served.url, *settings, "--json"]) == 0
    found = {one["check"]: one for one in json.loads(capsys.readouterr().out)}
    processes = len(json.loads(server.targets.read_text()))
    assert f"{processes} processes, all answer" in found["exporters"]["found"]
    assert {one["level"] for one in found.values()} <= {"ok", "warning"}


def test_planner_plans_are_executed_and_exported(server: Server) -> None:
    def planned() -> float:
        return server.count("tandem_plan_batches_total", chosen_by="planner")

    end_s = time.monotonic() + DEADLINE_S
    number = 0
    # The planner starts without measurements, and not every planned batch is reported.
    while not (planned() and server.count("tandem_plan_solve_seconds")):
        assert time.monotonic() < end_s, server.status()["attention-0"].notes["planner"]
        number += 1
        prompt = f"{number} " + PROMPT * (1 + number % 5)
        server.openai.completions.create(model=BUNDLED, prompt=prompt, max_tokens=4)
    text = server.http.get("/metrics").text
    for name in ("measured_seconds", "solve_seconds", 'info{order="asas"}', '{field="r1"}'):
        assert f"tandem_plan_{name}".replace("_{", "{") in text
    assert server.status()["attention-0"].sections["chosen_by"]["planner"] > 0


def test_trace_names_requests_in_spans_of_every_rank(server: Server, tmp_path: Path) -> None:
    ended = threading.Event()

    def request() -> None:
        body = {"model": "bundled", "messages": CHAT, "max_tokens": 8, "ignore_eos": True}
        while not ended.is_set():
            headers = {"x-request-id": "its-name"}
            server.http.post("/v1/chat/completions", json=body, headers=headers)

    path = tmp_path / "trace.json"
    requesting = threading.Thread(target=request)
    requesting.start()
    try:
        arguments = ["trace", "--url", server.served.url, "--seconds", "0.5"]
        assert main([*arguments, "--output", str(path)]) == 0
    finally:
        ended.set()
        requesting.join(DEADLINE_S)
    whole = json.loads(path.read_text())
    report = whole["otherData"]["tandem"]
    ranks = {"attention-0", *(f"expert-{number}" for number in range(2))}
    assert set(report["ranks"]) == {"ingress", "planner-0", "prefill-0", "prefill-1", *ranks}
    assert report["missing"] == {}
    assert all(one["clock"]["is_shared"] for one in report["ranks"].values()), "one machine"
    pids = {
        event["args"]["name"]: event["pid"]
        for event in whole["traceEvents"]
        if event["name"] == "process_name"
    }
    named = {
        event["pid"]
        for event in whole["traceEvents"]
        if "its-name" in str(event.get("args", {}).get("requests"))
    }
    assert named == {pids[rank] for rank in ranks}
    (first, *_) = (e for e in whole["traceEvents"] if e["pid"] == pids["ingress"] and "ts" in e)
    assert first["args"]["request_id"] == "its-name"
    spans = [event for event in whole["traceEvents"] if event["ph"] == "X"]
    first_us, last_us = (choose(event["ts"] for event in spans) for choose in (min, max))
    assert last_us - first_us < 2e6, "all on one axis"


def test_batch_continues_after_loss_of_its_service(server: Server, ray_cluster: RayHead) -> None:
    body = {"model": BUNDLED, "messages": CHAT, "max_tokens": 4, "temperature": 0}
    rows = [{"custom_id": f"{i}", "method": "POST", "url": ENDPOINT, "body": body} for i in ROWS]
    data = "\n".join(json.dumps(row) for row in rows).encode()
    client = server.openai.with_options(max_retries=5)  # while the service restarts
    file = client.files.create(file=("rows.jsonl", data), purpose="batch")
    made = client.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h")

    def counted() -> Batch:
        return client.batches.retrieve(made.id)

    wait_until(lambda: answered(counted()) > 20, "no answers", DEADLINE_S, 0.05)
    (service,) = ray_cluster.running("ray::BatchActor")
    service.kill()
    wait_until(lambda: counted().status == "completed", "not completed", DEADLINE_S)
    found = counted()
    assert found.output_file_id
    lines = client.files.content(found.output_file_id).text.splitlines()
    assert sorted(int(json.loads(line)["custom_id"]) for line in lines) == list(ROWS)
    choices = {
        json.loads(line)["response"]["body"]["choices"][0]["message"]["content"] for line in lines
    }
    direct = client.chat.completions.create(**body)
    assert choices == {direct.choices[0].message.content}


def answered(batch: Batch) -> int:
    return batch.request_counts.completed if batch.request_counts else 0


def test_killed_planner_is_replaced_without_failed_request(
    server: Server, ray_cluster: RayHead
) -> None:
    (planner,) = ray_cluster.running("ray::planner-0")
    planner.kill()
    end_s = time.monotonic() + DEADLINE_S
    seen: list[str] = []
    while not ("lost" in seen and seen[-1] != "lost"):
        assert time.monotonic() < end_s, seen
        seen.append(server.status()["attention-0"].notes["planner"])
        time.sleep(0.1)
    server.openai.completions.create(model=BUNDLED, prompt=PROMPT, max_tokens=4)
    assert server.http.get("/health").status_code == 200


@pytest.mark.parametrize(
    "number",  # by default test_bulk.py kills a worker under rows
    [pytest.param(signal.SIGKILL, marks=pytest.mark.slow), signal.SIGSTOP],
)
def test_lost_worker_is_replaced_and_no_request_fails(
    server: Server, number: signal.Signals
) -> None:
    expected = [server.classify(texts_of(client)) for client in range(CLIENTS)]
    pids, stop = rank_pids(server.served), threading.Event()

    def repeat(client: int) -> int:
        count = 0
        while not stop.is_set():
            for row, known in zip(server.classify(texts_of(client)), expected[client], strict=True):
                assert row["label"] == known["label"]
                assert row["probs"] == pytest.approx(known["probs"], abs=1e-4)
            count += 1
            stop.wait(0.1)
        return count

    restarts = server.count("tandem_rank_restarts_total", group="prefill")
    with ThreadPoolExecutor(CLIENTS) as threads:
        repeating = [threads.submit(repeat, client) for client in range(CLIENTS)]
        try:
            os.kill(pids["prefill-0"], number)
            wait_until(lambda: not server.is_healthy, "the loss was not noticed", DEADLINE_S, 0.05)
            wait_until(lambda: server.is_healthy, "it was not replaced", DEADLINE_S)
        finally:
            stop.set()
        assert all(future.result(DEADLINE_S) > 0 for future in repeating)
    assert rank_pids(server.served)["prefill-0"] != pids["prefill-0"]
    assert rank_pids(server.served)["prefill-1"] == pids["prefill-1"]
    assert server.count("tandem_rank_restarts_total", group="prefill") == restarts + 1
    assert server.count("tandem_group_epoch", group="prefill") == 2 + restarts
