"""What foretells the routing of a checkpoint: measured once, kept in a file of safetensors.

    mean.L          [E, D] float32   mean output of each expert, not weighted ("default vectors")
    frequency.L     [E] float32      part of the tokens that go to it
    map.L           [D + E + 1, E]   to the logits of the next layer's router, from x, the weights
                                     of the experts of layer L, and 1 (least squares)
    precision.KIND  [L, K]           of the guess of rank k for layer L, on texts held out

Source: Speculating Experts, Sections 3.1 to 3.3; the map is ours (docs/deviations.md).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from contracts.errors import CheckpointError
from models.spec.model import ModelSpec
from models.spec.safetensors_file import SafetensorsFile
from models.spec.stored_names import ROUTING

_DTYPES = {torch.float32: "F32", torch.uint8: "U8"}
_DIGEST = "checkpoint"


@dataclasses.dataclass(frozen=True, slots=True)
class RoutingProfile:
    """By layer with experts; `maps` of all but the last of them. precision: by kind of guess."""

    means: Mapping[int, Tensor]
    frequencies: Mapping[int, Tensor]
    maps: Mapping[int, Tensor]
    precision: Mapping[str, Tensor]

    def write(self, path: Path, folder: Path) -> None:
        """For the checkpoint in `folder`. Raises CheckpointError."""
        tensors = {
            **{f"mean.{layer}": tensor for layer, tensor in self.means.items()},
            **{f"frequency.{layer}": tensor for layer, tensor in self.frequencies.items()},
            **{f"map.{layer}": tensor for layer, tensor in self.maps.items()},
            **{f"precision.{kind}": tensor for kind, tensor in self.precision.items()},
            _DIGEST: torch.frombuffer(bytearray(digest_of(folder)), dtype=torch.uint8),
        }
        try:
            path.write_bytes(b"".join(_safetensors(tensors)))
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be written: {error.strerror}") from None

    @staticmethod
    def read(path: Path, folder: Path, spec: ModelSpec) -> RoutingProfile:
        """Raises CheckpointError for what is no profile of the checkpoint in `folder`."""
        file = SafetensorsFile(path)
        if _DIGEST not in file.entries:
            raise CheckpointError(
                f"{path}: no routing profile; make one with `tandem profile --routing`"
            )
        if bytes(file.tensor(_DIGEST).tolist()) != digest_of(folder):
            raise CheckpointError(
                f"{path}: a routing profile of another checkpoint than {folder}; make one with "
                "`tandem profile --routing`"
            )
        experts, hidden = spec.num_experts, spec.hidden_size

        def by_layer(name: str, layers: Iterable[int], *shape: int) -> dict[int, Tensor]:
            return {layer: _tensor(file, f"{name}.{layer}", shape) for layer in layers}

        kinds = [name for name in file.entries if name.startswith("precision.")]
        shape = (spec.num_layers, spec.top_k)
        return RoutingProfile(
            by_layer("mean", spec.moe_layers, experts, hidden),
            by_layer("frequency", spec.moe_layers, experts),
            by_layer("map", spec.moe_layers[:-1], hidden + experts + 1, experts),
            {name.partition(".")[2]: _tensor(file, name, shape) for name in kinds},
        )


def digest_of(folder: Path) -> bytes:
    """Of the checkpoint's own words: its config, and the headers of its files with their sizes."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(set(folder.glob("*.safetensors")) - {folder / ROUTING}):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            digest.update(f"{path.name} {path.stat().st_size}".encode())
            digest.update(file.read(min(length, path.stat().st_size)))
    return digest.digest()


def _tensor(file: SafetensorsFile, name: str, shape: tuple[int, ...]) -> Tensor:
    entry = file.entries.get(name)
    if entry is None or entry.shape != shape or entry.dtype != "F32":
        found = "missing" if entry is None else f"{entry.dtype} {list(entry.shape)}"
        raise CheckpointError(f"{file.path}: {name}: {found}, wanted F32 {list(shape)}")
    tensor = file.tensor(name).clone()
    if not tensor.isfinite().all():
        raise CheckpointError(f"{file.path}: {name}: not all of it is finite; make it again")
    return tensor


def _safetensors(tensors: Mapping[str, Tensor]) -> list[bytes]:
    """A file's bytes: length of the header, header, tensors."""
    header: dict[str, object] = {"__metadata__": {"format": "tandem routing profile"}}
    parts: list[bytes] = []
    first = 0
    for name, tensor in tensors.items():
        data = tensor.contiguous().numpy().tobytes()
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [first, first + len(data)],
        }
        parts.append(data)
        first += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little"), text, *parts]
