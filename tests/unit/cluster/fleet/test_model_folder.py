"""What `model.path` may name, and what is said when it names nothing."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from cluster.fleet import model_folder
from cluster.fleet.model_folder import resolve_model_folder
from contracts.errors import CheckpointError


def test_the_bundled_checkpoint_and_a_folder_are_found(tmp_path: Path) -> None:
    assert (resolve_model_folder("bundled") / "config.json").is_file()
    assert resolve_model_folder(str(tmp_path)) == tmp_path.resolve()


def test_missing_folder_is_one_line_without_a_hub_request(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder; give a Hugging Face") as caught:
        resolve_model_folder(str(tmp_path / "absent"))
    assert "\n" not in str(caught.value)


def test_a_hub_id_is_downloaded_without_pickles_or_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[tuple[str, list[str]]] = []

    def download(hub_id: str, *, allow_patterns: list[str]) -> str:
        requests.append((hub_id, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(model_folder, "snapshot_download", download)
    assert resolve_model_folder("organisation/model") == tmp_path
    assert requests == [("organisation/model", ["*.json", "*.safetensors", "*.jinja"])]


def test_unreachable_hub_is_one_line_with_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def download(hub_id: str, *, allow_patterns: list[str]) -> str:
        raise httpx.ConnectError("Name or service\nnot known")

    monkeypatch.setattr(model_folder, "snapshot_download", download)
    with pytest.raises(CheckpointError, match="not to be had from the hub") as caught:
        resolve_model_folder("organisation/model")
    assert "\n" not in str(caught.value)
    assert "organisation/model" in str(caught.value)
