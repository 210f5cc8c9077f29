"""`tandem bulk`: checks, workers, rows, summary."""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import ray

from actors.telemetry.telemetry import Telemetry
from cluster.fleet.metrics_endpoint import MetricsEndpoint
from cluster.fleet.model_folder import resolve_model_folder
from cluster.fleet.placements import check_placement_file, read_local_shares
from cluster.fleet.replies import ScrapeTarget, checked
from cluster.observe.terminal import Terminal
from cluster.serving.application import check_present, groups_handle
from cluster.serving.ray_session import ray_session
from cluster.serving.serve_app import CLOSE_TIMEOUT_S, ON_HEAD, Groups
from cluster.tools.bulk.driver import Driver
from cluster.tools.bulk.job import IN_FLIGHT_ROWS, BulkJob, check_job, fingerprint
from cluster.tools.bulk.output import Committed, Output
from cluster.tools.bulk.progress import RowTally, duration, show
from cluster.tools.bulk.records import Window, split_windows
from cluster.tools.bulk.router import RayRouter, router_actor
from cluster.tools.bulk.sources import ReadProgress, Source, find_sources, read_all
from contracts.config import GroupsConfig, TandemConfig
from contracts.errors import LaunchError, ResourceError
from contracts.logs import event
from models.weights.checkpoint import check_checkpoint

log = logging.getLogger("tandem.bulk")

ROWS_PER_WORKER = 256
REPLY_TIMEOUT_S = 30.0


class WorkerSource(NamedTuple):
    """start: starts the workers and returns their owner; None: the running application's."""

    config: TandemConfig
    start: Callable[[], Any | None]


@contextlib.contextmanager
def running_workers(
    address: str, name: str, environment: Mapping[str, str]
) -> Iterator[WorkerSource]:
    """Use the workers of an application on the Ray cluster at `address`. Raises ResourceError."""
    config = TandemConfig(groups=GroupsConfig(address=address))
    with ray_session(config, environment, show_rank_logs=False):
        try:
            check_present(name)
            found: TandemConfig = (
                groups_handle(name).config.remote().result(timeout_s=REPLY_TIMEOUT_S)
            )
        except Exception as error:  # noqa: BLE001 - Serve raises various errors if no application is present
            first = str(error).strip().partition("\n")[0] or type(error).__name__
            raise ResourceError(
                f"no Tandem application {name} answers on the Ray cluster at {address}: {first}; "
                "start it (tandem serve), name another (--name), or give --model to start workers "
                "for this job"
            ) from None
        serve = msgspec.structs.replace(found.serve, name=name)  # `serve run` sets the name
        yield WorkerSource(msgspec.structs.replace(found, serve=serve), lambda: None)


@contextlib.contextmanager
def own_workers(config: TandemConfig, environment: Mapping[str, str]) -> Iterator[WorkerSource]:
    """Start workers for the job, and stop them afterwards.

    They run on the Ray cluster of groups.address or RAY_ADDRESS, or on a local one. Raises
    TandemError, as `start` does.
    """
    folder = resolve_model_folder(config.model.path)
    spec = check_checkpoint(folder)
    check_placement_file(config, folder, spec)
    read_local_shares(config, folder, spec)
    with contextlib.ExitStack() as stack:

        def start() -> Any:
            stack.enter_context(ray_session(config, environment, show_rank_logs=False))
            owner = ray.remote(num_cpus=0, resources=ON_HEAD)(Groups)
            groups = owner.remote(config, application="")
            stack.callback(_close, groups)
            timeout_s = config.groups.ready_timeout_s
            try:
                checked(ray.get(groups.directory.remote(), timeout=timeout_s))
            except ray.exceptions.GetTimeoutError:
                raise LaunchError(
                    f"the workers were not up within {timeout_s:g} s (groups.ready_timeout_s)"
                ) from None
            except ray.exceptions.RayError as error:
                first = str(error).strip().partition("\n")[0]
                raise LaunchError(f"the launcher of the workers is lost: {first}") from None
            return groups

        yield WorkerSource(config, start)


def _close(groups: Any) -> None:
    try:
        ray.get(groups.close.remote(), timeout=CLOSE_TIMEOUT_S)
    except Exception as error:  # noqa: BLE001 - it is killed next in any case
        event(log, "graceful_stop_failed", logging.WARNING, error=error)
    ray.kill(groups)


def run_bulk(
    job: BulkJob, workers: contextlib.AbstractContextManager[WorkerSource], console: Terminal
) -> dict[str, Any]:
    """Run the job, or the rest of it, and return the summary. Raises TandemError, one line."""
    check_job(job, Path.cwd())
    notify = partial(console.print, soft_wrap=True, highlight=False, markup=False)
    sources = find_sources(job.inputs, notify, job.output)
    for source in sources:
        source.open(job.fields)  # before workers start: report missing columns
    with workers as found, contextlib.ExitStack() as stack:
        folder = resolve_model_folder(found.config.model.path)
        output = Output(job.output, fingerprint(job, sources, folder), resume=job.resume)
        stack.callback(output.close)
        known = output.summary()
        if known is not None:
            console.print(f"{job.output}: complete already", soft_wrap=True)
            return known
        tally = RowTally()
        if job.in_flight_rows is None:
            job = msgspec.structs.replace(job, in_flight_rows=_in_flight_rows(found.config))
        groups = found.start()
        router = RayRouter(partial(router_actor, found.config, job, groups), notify)
        driver = Driver(output, router, job, tally)
        windows = _windows(job, sources, tally)
        endpoint = _metrics_endpoint(found.config, groups, tally)
        try:
            asyncio.run(_run(driver, router, windows, tally, console, endpoint))
        except (KeyboardInterrupt, SystemExit):  # Ctrl-C; SIGTERM, as of `ray job stop`
            notify(stopped_line(output.committed, job.output))
            raise
        summary = _summary(output.committed, router.restarts)
        output.finish(summary)
        return summary


async def _run(
    driver: Driver,
    router: RayRouter,
    windows: Iterator[Window],
    tally: RowTally,
    console: Terminal,
    endpoint: MetricsEndpoint,
) -> None:
    showing = asyncio.create_task(show(tally, console))
    try:
        await endpoint.open()
        await driver.run(windows)
    finally:
        showing.cancel()
        await asyncio.gather(showing, return_exceptions=True)
        await router.close()
        await endpoint.close()


def _metrics_endpoint(config: TandemConfig, groups: Any | None, tally: RowTally) -> MetricsEndpoint:
    """Publish the job's metrics.

    groups: the actor that owns the workers; None: the running application's.
    """
    telemetry = Telemetry()
    tally.show(telemetry)

    async def notify(target: ScrapeTarget) -> None:
        await (groups or groups_handle(config.serve.name)).export.remote(target)

    return MetricsEndpoint(config, telemetry, "bulk", f"bulk-{os.getpid()}", notify)


def _in_flight_rows(config: TandemConfig) -> int:
    workers = config.groups.prefill_ranks or config.groups.attention_ranks
    return max(IN_FLIGHT_ROWS, ROWS_PER_WORKER * workers)


def _windows(job: BulkJob, sources: Sequence[Source], tally: RowTally) -> Iterator[Window]:
    """Yield all windows; estimate the number of rows from the fraction of bytes read."""
    watch = ReadProgress(sum(source.file.size_bytes for source in sources))
    records = islice(read_all(sources, job.fields, watch), job.limit)
    rows = 0
    for window in split_windows(records, job.windows, ids=job.fields.id is not None):
        rows += window.records
        if watch.fraction > 0:
            expected = rows / watch.fraction
            tally.expected_rows = expected if job.limit is None else min(expected, job.limit)
        yield window
    tally.expected_rows = rows


def _totals(committed: Sequence[Committed]) -> Committed:
    summed = ("rows_ok", "rows_rejected", "prompt_tokens", "cached_tokens", "rows_sent_again")
    sums: dict[str, Any] = {
        name: sum(getattr(line, name) for line in committed) for name in (*summed, "seconds")
    }
    return Committed(window=len(committed), digest="", **sums)


def _summary(committed: Sequence[Committed], restarts: int) -> dict[str, Any]:
    """Return summary.json: of all runs, except router_restarts, of the last one."""
    total = _totals(committed)
    rows = total.rows_ok + total.rows_rejected
    seconds = max(total.seconds, 1e-9)
    cached = total.cached_tokens / total.prompt_tokens if total.prompt_tokens else 0.0
    return {
        "rows_in": rows,
        "rows_ok": total.rows_ok,
        "rows_rejected": total.rows_rejected,
        "rows_sent_again": total.rows_sent_again,
        "prompt_tokens": total.prompt_tokens,
        "cached_tokens": total.cached_tokens,
        "computed_tokens": total.prompt_tokens - total.cached_tokens,
        "cached_fraction": cached,
        "seconds": total.seconds,
        "tokens_per_s": total.prompt_tokens / seconds,
        "rows_per_s": rows / seconds,
        "parts": len(committed),
        "router_restarts": restarts,
    }


def summary_line(summary: dict[str, Any], output: Path) -> str:
    return (
        f"{output}: {summary['rows_ok']:,} rows answered, {summary['rows_rejected']:,} rejected, "
        f"in {duration(summary['seconds'])} ({summary['rows_per_s']:,.0f} rows/s, "
        f"{summary['tokens_per_s']:,.0f} tokens/s, {summary['cached_fraction']:.0%} cached)"
    )


def stopped_line(committed: Sequence[Committed], output: Path) -> str:
    total = _totals(committed)
    return (
        f"{output}: stopped with {total.rows_ok + total.rows_rejected:,} rows written; the same "
        "command with --resume continues from there"
    )
