"""Files, headings and configurations in documents exist and load."""

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.app import serve_config
from tests.architecture.support import ROOT, tracked_files

DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
TEXT = {".py", ".md", ".toml", ".yaml", ".yml", ".json", ".txt", ".cfg", ".sh", ".svg", ""}
MAX_LINES, MAX_COLUMNS = {"README.md": 150, "docs/structure.md": 130}, 100

# `planner/scheduling/task_order.py`, `docs/`, [words](docs/structure.md)
_TICKED = re.compile(r"`([\w./-]+)`")
_LINKED = re.compile(r"\]\(([^)#]+)[^)]*\)|src=\"([^\"]+)\"")
_HEADED = re.compile(r"\]\(([^)#]*)#([^)]+)\)")
_ELSEWHERE = ("http:", "https:", "mailto:")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_named_in_documents_exist(document: Path) -> None:
    missing = [
        name
        for name in _named_files(document)
        if not any(p.exists() for p in _places(document, name))
    ]
    names = {path.name for path in tracked_files()}
    modules = re.findall(r"`(\w+\.py)`", document.read_text(encoding="utf-8"))
    missing += [name for name in modules if name not in names]
    assert not missing, f"{document.name} names what does not exist: {missing}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_linked_headings_exist(document: Path) -> None:
    missing = [
        f"{name}#{heading}"
        for name, heading in _HEADED.findall(document.read_text(encoding="utf-8"))
        if not name.startswith(_ELSEWHERE)
        and heading not in _headings(document.parent / name if name else document)
    ]
    assert not missing, f"{document.name} links to what does not exist: {missing}"


def test_class_names_in_documents_exist() -> None:
    """CamelCase names in backticks, but for those of other projects."""
    code = " ".join(
        path.read_text(encoding="utf-8", errors="replace")
        for path in tracked_files()
        if path.suffix in (".py", ".yaml", ".yml")
    )
    known = {*re.findall(r"\w+", code), "RestartPreventExitStatus", "Dots1ForCausalLM", "BurnsSlow"}
    missing = [
        f"{document.name}: {name}"
        for document in DOCUMENTS
        if document.name != "CHANGELOG.md"
        for quoted in re.findall(r"`([^`\n]+)`", document.read_text(encoding="utf-8"))
        for name in re.findall(r"\b[A-Z]\w*[a-z]\w*[A-Z]\w*\b", quoted)
        if name not in known
    ]
    assert not missing


@pytest.mark.parametrize("name", MAX_LINES)
def test_introductory_documents_are_short(name: str) -> None:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MAX_LINES[name], (
        f"{name}: {len(lines)} lines; the rest has pages of its own"
    )
    prose = [line for line in lines if not line.startswith(("|", "!"))]
    assert not [line for line in prose if len(line) > MAX_COLUMNS]


def test_no_file_names_local_paths() -> None:
    folders = "|".join(("work", "home", "Users"))
    pattern = re.compile(rf"(?<![\w.}}$])/({folders})/\w")
    found: list[str] = []
    for path in tracked_files():
        if path.suffix in TEXT and path.stat().st_size < 1 << 20 and path.name != "LICENSE":
            text = path.read_text(encoding="utf-8", errors="ignore")
            found.extend(f"{path.relative_to(ROOT)}: {m[0]}" for m in pattern.finditer(text))
    assert not found


def test_serve_files_load() -> None:
    trees: list[dict[str, Any]] = []
    for path in sorted((ROOT / "deploy").glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            trees.extend(application["args"] for application in document["applications"])
    assert trees  # those in deploy/kubernetes: tests/unit/deploy
    for tree in trees:
        assert serve_config(tree).http.front == "serve"


def test_documented_configuration_loads(tmp_path: Path) -> None:
    from contracts.loading import load_config

    text = (ROOT / "docs" / "usage.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert blocks
    for block in blocks:
        path = tmp_path / "tandem.yaml"
        path.write_text(block)
        load_config(path)


def _named_files(document: Path) -> list[str]:
    text = document.read_text(encoding="utf-8")
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    ticked = [name for name in _TICKED.findall(prose) if _is_a_file_of_ours(name)]
    linked = [a or b for a, b in _LINKED.findall(text)]
    return ticked + [name for name in linked if not name.startswith(_ELSEWHERE)]


def _headings(document: Path) -> set[str]:
    """As GitHub makes anchors of them."""
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def _is_a_file_of_ours(name: str) -> bool:
    """A path below one of our folders; or a bare file name of the root."""
    first, slash, _ = name.partition("/")
    ours = bool(slash) and first in _tops()
    return ours or name in {"Makefile", "LICENSE", "pyproject.toml"}


@functools.cache
def _tops() -> set[str]:
    return {path.relative_to(ROOT).parts[0] for path in tracked_files()}


def _places(document: Path, name: str) -> tuple[Path, Path]:
    return ROOT / name, document.parent / name
