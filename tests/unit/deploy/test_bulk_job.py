"""The RayJob of deploy/kubernetes: its command parses, and its paths exist in its pod."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import ray
import yaml

from cluster.cli.main import main

DEPLOY = Path(__file__).parents[3] / "deploy"
STOPPED = "no cluster in this test"


def document(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))
    return loaded


def entrypoint() -> list[str]:
    """Return the arguments of `python -m cluster.bulk`."""
    words = shlex.split(document("kubernetes/bulk_job.yaml")["spec"]["entrypoint"])
    assert words[:3] == ["python", "-m", "cluster.bulk"]
    return words[3:]


def value(words: list[str], option: str) -> str:
    return words[words.index(option) + 1]


def test_entrypoint_passes_all_checks_before_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Options, template, columns and folders are checked before Ray is asked for anything."""

    def no_ray(*_: object, **__: object) -> None:
        raise RuntimeError(STOPPED)

    monkeypatch.setattr(ray, "init", no_ray)
    words = [word.replace("/shared", str(tmp_path)) for word in entrypoint()]
    folder = Path(value(words, "--input")).parent
    folder.mkdir(parents=True)
    rows = pyarrow.table({"id": [1, 2], "text": ["good", "bad"]})
    pyarrow.parquet.write_table(rows, folder / "rows.parquet")
    assert main(["bulk", *words]) == 2
    assert STOPPED in capsys.readouterr().err


def test_job_resumes_and_uses_a_persistent_volume() -> None:
    words = entrypoint()
    assert "--resume" in words
    service = document("kubernetes/base/rayservice.yaml")
    head = service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]
    mounts = {m["mountPath"]: m["name"] for m in head["containers"][0]["volumeMounts"]}
    claims = {v["name"] for v in head["volumes"] if "persistentVolumeClaim" in v}
    for option in ("--input", "--output"):
        path = Path(value(words, option))
        assert any(mounts.get(str(parent)) in claims for parent in path.parents), path
    selector = document("kubernetes/bulk_job.yaml")["spec"]["clusterSelector"]["ray.io/cluster"]
    assert selector == f"{service['metadata']['name']}-SUFFIX"
    assert document("kubernetes/bulk_job.yaml")["spec"]["backoffLimit"] == 0
