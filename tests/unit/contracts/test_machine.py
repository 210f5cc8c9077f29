"""Memory and processors within control groups, on fake files of /proc and /sys."""

import os
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import actors.ranks.serving_rank
import contracts.machine
from actors.ranks.serving_rank import kv_pool_blocks
from cluster.fleet.model_folder import resolve_model_folder
from contracts.config import BUNDLED
from contracts.errors import ResourceError
from contracts.loading import load_config
from contracts.machine import (
    _cpu_list,
    available_bytes,
    free_bytes,
    numa_nodes,
    pinned_cpus,
    total_bytes,
    usable_cores,
    whole_cores,
)
from models.decoder.attention import kv_bytes_per_token
from models.spec.model import read_spec

GIB = 1 << 30
CORES = len(os.sched_getaffinity(0))


def machine(root: Path, group: str, files: dict[str, str]) -> Path:
    """A host of 64 GiB, 40 of them free. group: the content of /proc/self/cgroup."""
    proc = {"meminfo": f"MemTotal: {64 << 20} kB\nMemAvailable: {40 << 20} kB\n"}
    for name, text in {**proc, "self/cgroup": group}.items():
        write(root / "proc" / name, text)
    for name, text in files.items():
        write(root / "sys/fs/cgroup" / name, text)
    return root


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def limited(limit: str, current_gib: float, inactive_gib: float = 0.0) -> dict[str, str]:
    return {
        "memory.max": f"{limit}\n",
        "memory.current": f"{int(current_gib * GIB)}\n",
        "memory.stat": f"anon 1\ninactive_file {int(inactive_gib * GIB)}\nactive_file 5\n",
    }


def at(folder: str, files: dict[str, str]) -> dict[str, str]:
    return {f"{folder}/{name}": text for name, text in files.items()}


def test_host_memory_applies_without_control_groups(tmp_path: Path) -> None:
    assert available_bytes(machine(tmp_path, "0::/\n", {})) == 40 * GIB
    assert total_bytes(tmp_path) == 64 * GIB
    assert usable_cores(tmp_path) == CORES


@pytest.mark.parametrize(
    ("group", "files", "available_gib"),
    [
        pytest.param("0::/", limited(str(2 * GIB), 1.5, 0.5), 1, id="reclaimable"),
        pytest.param("0::/", limited(str(GIB), 2), 0, id="over its limit"),
        pytest.param("0::/../../docker/ab12", limited(str(2 * GIB), 1), 1, id="outside"),
        pytest.param(
            "0::/", {**limited(str(8 * GIB), 1), "memory.high": str(3 * GIB)}, 2, id="memory.high"
        ),
    ],
)
def test_container_limit_is_reduced_by_unreclaimable_memory(
    tmp_path: Path, group: str, files: dict[str, str], available_gib: int
) -> None:
    assert available_bytes(machine(tmp_path, f"{group}\n", files)) == available_gib * GIB
    assert total_bytes(tmp_path) <= 8 * GIB


@pytest.mark.parametrize("tight", ["pod", "pod/container"])
def test_lowest_limit_of_the_hierarchy_applies(tmp_path: Path, tight: str) -> None:
    files = {
        **at("pod", limited("max", 5)),
        **at("pod/container", limited("max", 1)),
        **at(tight, limited(str(3 * GIB), 1)),
    }
    assert available_bytes(machine(tmp_path, "0::/pod/container\n", files)) == 2 * GIB


def test_version_1_files_are_read(tmp_path: Path) -> None:
    memory = {
        "memory.limit_in_bytes": str(4 * GIB),
        "memory.usage_in_bytes": str(3 * GIB),
        "memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}\n",
    }
    unlimited = {"memory.limit_in_bytes": "9223372036854771712", "memory.usage_in_bytes": "1"}
    cpu = {"cpu.cfs_quota_us": "150000", "cpu.cfs_period_us": "100000"}
    files = {
        **at("memory", unlimited),
        **at("memory/docker/ab", memory),
        **at("cpu/docker/ab", cpu),
        **at("cpu", {"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}),
    }
    group = "3:cpu,cpuacct:/docker/ab\n2:memory:/docker/ab\n1:name=systemd:/docker/ab\n"
    machine(tmp_path, group, files)
    assert available_bytes(tmp_path) == 2 * GIB
    assert usable_cores(tmp_path) == min(CORES, 1.5)


@pytest.mark.parametrize(
    ("quota", "cores", "threads"), [("max 100000", CORES, CORES), ("50000 100000", 0.5, 1)]
)
def test_cpu_quota_limits_cores(tmp_path: Path, quota: str, cores: float, threads: int) -> None:
    machine(tmp_path, "0::/a\n", {"a/cpu.max": quota, "cpu.max": "max 100000"})
    assert (usable_cores(tmp_path), whole_cores(tmp_path)) == (cores, threads)


def nodes_of(nodes: int, cores: int, siblings: int = 1) -> list[list[frozenset[int]]]:
    """NUMA nodes whose second siblings have the higher numbers, as Linux counts them."""
    whole = nodes * cores
    return [
        [
            frozenset(core + whole * n for n in range(siblings))
            for core in range(first, first + cores)
        ]
        for first in range(0, whole, cores)
    ]


@pytest.mark.parametrize(
    ("nodes", "ranks", "threads", "expected"),
    [
        pytest.param(nodes_of(1, 8), 2, 4, ["0-3", "4-7"], id="one socket"),
        pytest.param(nodes_of(1, 8), 2, 8, [], id="threads take turns"),
        pytest.param(nodes_of(1, 2), 2, 1, [], id="one core each"),
        pytest.param(nodes_of(2, 64, 2), 2, 64, ["0-63,128-191", "64-127,192-255"], id="sockets"),
        pytest.param(nodes_of(2, 64, 2), 1, 8, ["0-63,128-191"], id="one of two sockets"),
        pytest.param(nodes_of(2, 64, 2), 1, 96, ["0-255"], id="more than a socket"),
        pytest.param(nodes_of(4, 4), 3, 4, ["0-3", "4-7", "12-15"], id="nodes to spare"),
        pytest.param(nodes_of(4, 4), 8, 2, [f"{n}-{n + 1}" for n in range(0, 16, 2)], id="halves"),
        pytest.param(nodes_of(4, 4), 2, 6, ["0-7", "8-15"], id="two nodes each"),
        pytest.param([nodes_of(1, 8)[0][:3], nodes_of(2, 8)[1][:6]], 3, 2, ["0-2", "8-10", "11-13"],
                     id="control group"),
        pytest.param(nodes_of(1, 8), 9, 1, [], id="more ranks than cores"),
        pytest.param([], 2, 1, [], id="a quota"),
    ],
)  # fmt: skip
def test_ranks_have_cores_of_their_own_in_one_numa_node_where_they_fit(
    nodes: list[list[frozenset[int]]], ranks: int, threads: int, expected: list[str]
) -> None:
    assert pinned_cpus(nodes, ranks, threads) == [_cpu_list(text) for text in expected]


@given(st.lists(st.integers(0, 9), max_size=5), st.integers(0, 12), st.integers(1, 9))
def test_pinned_ranks_share_no_core(sizes: list[int], ranks: int, threads: int) -> None:
    nodes = [[frozenset({100 * n + core}) for core in range(size)] for n, size in enumerate(sizes)]
    sets = pinned_cpus(nodes, ranks, threads)
    assert len(sets) in (0, ranks)
    assert len(frozenset().union(*sets)) == sum(map(len, sets))
    assert all(len(cpus) >= max(2, threads) for cpus in sets)


def test_topology_is_read_within_the_affinity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = tmp_path / "sys/devices/system"
    for node, cpus in enumerate(("0-1,4-5", "2-3,6-7")):
        write(system / f"node/node{node}/cpulist", f"{cpus}\n")
    for cpu in range(8):
        write(system / f"cpu/cpu{cpu}/topology/thread_siblings_list", f"{cpu % 4},{cpu % 4 + 4}")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2, 3, 6})
    assert numa_nodes(tmp_path) == [[{1}], [{2, 6}, {3}]]
    machine(tmp_path, "0::/a\n", {"a/cpu.max": "300000 100000"})
    assert numa_nodes(tmp_path) == []


def test_kv_pool_size_follows_container_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(tmp_path, "0::/\n", limited(str(GIB // 64), 0))
    monkeypatch.setattr(
        actors.ranks.serving_rank, "available_bytes", lambda: available_bytes(tmp_path)
    )
    model = read_spec(resolve_model_folder(BUNDLED))
    config = load_config(None, ["kv.memory_fraction=0.5"])
    blocks = kv_pool_blocks(model, torch.bfloat16, config, None, ranks_on_node=1)
    used = blocks * config.kv.block_tokens * kv_bytes_per_token(model, torch.bfloat16)
    assert 0 < used <= GIB // 128
    kept = partial(kv_pool_blocks, model, torch.bfloat16, config, None, ranks_on_node=1)
    fewer = kept(kept_bytes=GIB // 128)
    assert fewer == pytest.approx(blocks / 2, abs=1), "the experts have memory of their own"
    with pytest.raises(ResourceError, match=r"kv\.memory_fraction"):
        kept(kept_bytes=GIB)


def test_memory_file_system_is_limited_by_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contracts.machine, "available_bytes", lambda: 5)
    shm = Path("/dev/shm")
    if shm.is_dir() and os.path.ismount(shm):
        assert free_bytes(shm) == 5
    assert free_bytes(Path("/sys")) != 5, "no folder in memory"
