"""What the samples of benchmarks/cases/offloaded_on_gpu.py amount to.

C_l: what layer l computes, as measured where all experts are there; X_l: what its missing experts
take, by the link's rate. On demand sum_l (C_l + X_l); with perfect foresight of one layer sum_l
max(C_l, X_l), the first layer on demand (Speculating Experts, Eq. 1; docs/notation.md).
"""

import statistics
from typing import Any

from models.decoder.attention import kv_bytes_per_token
from models.experts.expert_layout import ExpertLayout
from models.spec.model import ModelSpec
from models.weights import layout as weights

Samples = dict[str, dict[str, list[dict[str, Any]]]]
ON_DEMAND, THERE, NO_CACHE = "on demand", "there", "no cache"


def summarise(
    samples: Samples, rates: dict[str, float], spec: ModelSpec, layout: ExpertLayout
) -> dict[str, Any]:
    """rates: of the link and of the device's memory, in bytes/s. Medians; ratios turn by turn."""
    expert_ms = 1e3 * layout.num_bytes(1) / rates["link"]
    found: dict[str, Any] = {
        "layers": spec.num_layers,
        "expert_bytes": layout.num_bytes(1),
        "expert_ms": expert_ms,
        "bytes_per_s": rates,
    }
    for setting, by_variant in samples.items():
        context = int(setting.rpartition(" ")[2])
        compute_ms = _compute_ms(samples, context)
        on_demand = by_variant[ON_DEMAND]
        missing_LS = [turn["missing_LS"] for turn in on_demand]
        rows = {name: _row(turns, by_variant, rates["link"]) for name, turns in by_variant.items()}
        found[setting] = {
            "compute_ms": compute_ms,
            "compute_by_bytes_ms": 1e3 * _bytes_read(spec, layout, context) / rates["memory"],
            "on_demand_modelled_ms": statistics.median(
                _token_ms(each, compute_ms, expert_ms, hidden=False) for each in missing_LS
            ),
            "bound_ms": statistics.median(
                _token_ms(each, compute_ms, expert_ms, hidden=True) for each in missing_LS
            ),
            "variants": rows,
        }
        for row in rows.values():
            row["of_bound"] = found[setting]["bound_ms"] / row["tpot_ms"]
    return found


def shortened(samples: Samples) -> Samples:
    """With what was missing by layer, in the place of by layer and step."""

    def short(turn: dict[str, Any]) -> dict[str, Any]:
        kept = {name: value for name, value in turn.items() if name != "missing_LS"}
        return {**kept, "missing_L": [sum(missing_S) for missing_S in turn["missing_LS"]]}

    return {
        setting: {name: list(map(short, turns)) for name, turns in by_variant.items()}
        for setting, by_variant in samples.items()
    }


def _compute_ms(samples: Samples, context: int) -> float:
    """Of a token behind that context, of turns in which nothing was missing; of any, if there are
    none."""
    turns = [
        turn
        for setting, by_variant in samples.items()
        if int(setting.rpartition(" ")[2]) == context
        for turn in by_variant[THERE]
    ]
    whole = [turn for turn in turns if not any(map(any, turn["missing_LS"]))]
    times_ms: list[float] = [turn["tpot_ms"] for turn in whole or turns]
    return statistics.median(times_ms)


def _token_ms(
    missing_LS: list[list[int]], compute_ms: float, expert_ms: float, *, hidden: bool
) -> float:
    """Eq. 1, on average over the steps. hidden: behind the layer before, but for the first."""
    layer_ms, total_ms = compute_ms / len(missing_LS), 0.0
    for at, missing_S in enumerate(missing_LS):
        for missing in missing_S:
            copy_ms = missing * expert_ms
            is_hidden = hidden and at > 0
            total_ms += max(layer_ms, copy_ms) if is_hidden else layer_ms + copy_ms
    return total_ms / max(1, len(missing_LS[0]))


def _row(
    turns: list[dict[str, Any]], by_variant: dict[str, list[dict[str, Any]]], link: float
) -> dict[str, Any]:
    tpot_ms = [turn["tpot_ms"] for turn in turns]
    row: dict[str, Any] = {
        "tpot_ms": statistics.median(tpot_ms),
        "missing_per_token": statistics.mean(
            sum(map(sum, turn["missing_LS"])) / max(1, len(turn["missing_LS"][0])) for turn in turns
        ),
        "exposed_s": statistics.median(turn["exposed_s"] for turn in turns),
        "peak_bytes": max(turn["peak_bytes"] for turn in turns),
    }
    copied_s = sum(turn["copied_s"] for turn in turns)
    if copied_s:
        copied_bytes = sum(turn["copied_bytes"] for turn in turns)
        row["copies_of_link"] = copied_bytes / copied_s / link
    for other in (NO_CACHE, ON_DEMAND):
        if other in by_variant:
            pairs = zip(by_variant[other], turns, strict=True)
            row[f"over_{other.replace(' ', '_')}"] = statistics.median(
                base["tpot_ms"] / turn["tpot_ms"] for base, turn in pairs
            )
    return row


def _bytes_read(spec: ModelSpec, layout: ExpertLayout, context: int) -> int:
    """By a token: all weights but the embedding's rows, its experts, and its context's keys and
    values."""
    half = weights.total_bytes(weights.attention_half_tensors(spec), layout.dtype.itemsize)
    embedding = spec.vocab_size * spec.hidden_size * layout.dtype.itemsize
    experts = len(spec.moe_layers) * spec.top_k * layout.num_bytes(1)
    return half - embedding + experts + context * kv_bytes_per_token(spec, layout.dtype)
