"""What foretells the routing of a checkpoint: measured once, kept in a file of safetensors.

    mean.L          [E, D] float32   mean output of each expert, not weighted ("default vectors"),
                                     with its part of what shared experts give on average
    frequency.L     [E] float32      part of the tokens that go to it
    map.L           [D + E + 1, E]   to the logits of the next layer's router, from x, the weights
                                     of the experts of layer L, and 1 (least squares)
    after.L         [D + 1, E]       the same from what the next layer's experts would see of the
                                     residual before its attention, and 1
    estimator.NAME                   of a network (estimator.py)
    tokens          [V, K] int32     experts of the first layer that has some, by token id
    precision.KIND  [L, K]           of the guess of rank k for layer L, on texts held out

Source: Speculating Experts, Sections 3.1 to 3.3 and 6.1; the maps and the table are ours
(docs/deviations.md).
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
from models.foresight.estimator import Estimator, shapes
from models.spec.model import ModelSpec
from models.spec.safetensors_file import SafetensorsFile
from models.spec.stored_names import ROUTING

_DTYPES = {torch.float32: "F32", torch.uint8: "U8", torch.int32: "I32"}
_DIGEST = "checkpoint"


@dataclasses.dataclass(frozen=True, slots=True)
class RoutingProfile:
    """By layer with experts; `maps` and `after` of all but the last of them. precision: by kind of
    guess."""

    means: Mapping[int, Tensor]
    frequencies: Mapping[int, Tensor]
    maps: Mapping[int, Tensor]
    after: Mapping[int, Tensor]
    estimator: Estimator
    tokens_VK: Tensor
    precision: Mapping[str, Tensor]

    def write(self, path: Path, folder: Path) -> None:
        """For the checkpoint in `folder`. Raises CheckpointError."""
        tensors = {
            **{f"mean.{layer}": tensor for layer, tensor in self.means.items()},
            **{f"frequency.{layer}": tensor for layer, tensor in self.frequencies.items()},
            **{f"map.{layer}": tensor for layer, tensor in self.maps.items()},
            **{f"after.{layer}": tensor for layer, tensor in self.after.items()},
            **{f"estimator.{name}": each for name, each in self.estimator.tensors().items()},
            "tokens": self.tokens_VK,
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

        estimator = {
            name: _tensor(file, f"estimator.{name}", shape)
            for name, shape in shapes(hidden, spec.num_layers, experts).items()
        }
        kinds = [name for name in file.entries if name.startswith("precision.")]
        shape = (spec.num_layers, spec.top_k)
        return RoutingProfile(
            by_layer("mean", spec.moe_layers, experts, hidden),
            by_layer("frequency", spec.moe_layers, experts),
            by_layer("map", spec.moe_layers[:-1], hidden + experts + 1, experts),
            by_layer("after", spec.moe_layers[:-1], hidden + 1, experts),
            Estimator(**estimator),
            _ids(file, "tokens", (spec.vocab_size, spec.top_k), experts),
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


def _tensor(file: SafetensorsFile, name: str, shape: tuple[int, ...], dtype: str = "F32") -> Tensor:
    entry = file.entries.get(name)
    if entry is None or entry.shape != shape or entry.dtype != dtype:
        found = "missing" if entry is None else f"{entry.dtype} {list(entry.shape)}"
        raise CheckpointError(
            f"{file.path}: {name}: {found}, wanted {dtype} {list(shape)}; make it again with "
            "`tandem profile --routing`"
        )
    tensor = file.tensor(name).clone()
    if not tensor.isfinite().all():
        raise CheckpointError(f"{file.path}: {name}: not all of it is finite; make it again")
    return tensor


def _ids(file: SafetensorsFile, name: str, shape: tuple[int, ...], experts: int) -> Tensor:
    ids = _tensor(file, name, shape, "I32")
    if not ((ids >= 0) & (ids < experts)).all():
        raise CheckpointError(f"{file.path}: {name}: not all of it is an expert; make it again")
    return ids


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
