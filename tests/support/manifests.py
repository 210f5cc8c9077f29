"""Manifests of deploy/kubernetes as kustomize renders them, and their schemas."""

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

KUBERNETES = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
OVERLAYS = ("base", "laptop", "gpu", "single", "monitoring")

Manifest = dict[str, Any]

_SCHEMAS = Path(__file__).with_name("schemas")
_KNOWN = {"apiVersion", "kind", "resources", "patches", "configMapGenerator"}


def render(folder: Path) -> list[Manifest]:
    """Return what `kubectl kustomize FOLDER` prints.

    Supports resources, JSON patches by kind and name, and ConfigMaps of files. Raises ValueError
    for anything else and for files above the kustomization, as kustomize does.
    """
    spec = yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8"))
    if unknown := set(spec) - _KNOWN:
        raise ValueError(f"{folder}: {unknown} is not rendered here")
    manifests = [one for name in spec.get("resources", ()) for one in _resource(folder, name)]
    manifests += [_config_map(folder, one) for one in spec.get("configMapGenerator", ())]
    for patch in spec.get("patches", ()):
        _patch(folder, manifests, patch)
    return manifests


def _resource(folder: Path, name: str) -> list[Manifest]:
    path = (folder / name).resolve()
    return render(path) if path.is_dir() else documents(_below(folder, name))


def documents(path: Path) -> list[Manifest]:
    # Through JSON, so that aliases become objects of their own.
    loaded = yaml.safe_load_all(path.read_text(encoding="utf-8"))
    return [json.loads(json.dumps(one)) for one in loaded]


def _below(folder: Path, name: str) -> Path:
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise ValueError(f"{folder}: {name} is not below it")
    return path


def _config_map(folder: Path, spec: Manifest) -> Manifest:
    options = spec.get("options", {})
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": spec["name"], "labels": options.get("labels", {})},
        "data": {
            Path(name).name: _below(folder, name).read_text(encoding="utf-8")
            for name in spec["files"]
        },
    }


def _patch(folder: Path, manifests: list[Manifest], patch: Manifest) -> None:
    target = patch["target"]
    found = [
        one
        for one in manifests
        if one["kind"] == target["kind"]
        and re.fullmatch(target.get("name", ".*"), one["metadata"]["name"])
    ]
    if not found:
        raise ValueError(f"{folder}: nothing matches {target}")
    for operation in yaml.safe_load(_below(folder, patch["path"]).read_text(encoding="utf-8")):
        for manifest in found:
            _apply(manifest, operation)


def _apply(manifest: Manifest, operation: Manifest) -> None:
    """RFC 6902, add and replace. Raises KeyError or IndexError for a missing path."""
    *path, last = [part.replace("~1", "/") for part in operation["path"].split("/")[1:]]
    at: Any = manifest
    for part in path:
        at = at[int(part) if isinstance(at, list) else part]
    key = int(last) if isinstance(at, list) else last
    if operation["op"] == "replace":
        _ = at[key]
    elif operation["op"] != "add" or isinstance(at, list):
        raise ValueError(f"{operation['op']} at {operation['path']} is not rendered here")
    at[key] = copy.deepcopy(operation["value"])


def faults(manifest: Manifest) -> Iterator[str]:
    """Yield schema violations; a kind without a schema is one."""
    registry: Registry[Any] = Registry()
    for name in ("kubernetes.json", "operators.json"):
        contents = json.loads((_SCHEMAS / name).read_text(encoding="utf-8"))
        registry = registry.with_resource(
            name, Resource.from_contents(contents, default_specification=DRAFT202012)
        )
    kind = manifest.get("kind")
    for name in ("operators.json", "kubernetes.json"):
        if kind in registry.contents(name)["$defs"]:
            schema = {"$ref": f"{name}#/$defs/{kind}"}
            found = jsonschema.Draft202012Validator(schema, registry=registry).iter_errors(manifest)
            yield from (f"{error.json_path}: {error.message[:300]}" for error in found)
            return
    yield f"no schema of kind {kind}"
