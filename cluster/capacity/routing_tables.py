"""What `tandem profile --routing` shows of texts that were held out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.table import Table

from cluster.capacity.routing_judged import Judged
from cluster.files.terminal import Terminal
from models.foresight.count_guesses import (
    BOTH,
    PREVIOUS,
    SURER,
    TOKEN,
    TWO_LAYERS,
    TWO_TOKENS,
    USUAL,
)
from models.foresight.signals import AFTER, KINDS

_ENTROPIES = {USUAL: "H(e)", TOKEN: "H(e|token)", PREVIOUS: "H(e|previous)"}


def print_routing(judged: Judged) -> None:
    console = Terminal()
    console.print(
        f"{judged.counted} tokens of {judged.ids} ids counted, a fifth held out: "
        f"{judged.held_out}, {judged.unseen_fraction:.1%} of other ids"
    )
    for table in (_entropies(judged), _foretold(judged), _guesses(judged), _contiguous(judged)):
        console.print()
        console.print(table)


def _entropies(judged: Judged) -> Table:
    table = _table("an expert in bits, by what is known", ("layer", *_ENTROPIES.values()))
    for of in judged.layers:
        table.add_row(str(of.layer), *_shown(of.entropy_bits, _ENTROPIES, "{:.2f}"))
    return table


def _foretold(judged: Judged) -> Table:
    kinds = (USUAL, TOKEN, TWO_TOKENS, PREVIOUS, TWO_LAYERS, BOTH, SURER)
    table = _table("experts that are found, by what is known", ("layer", *kinds))
    for of in judged.layers:
        table.add_row(str(of.layer), *_shown(of.hit_fraction, kinds, "{:.3f}"))
    return table


def _guesses(judged: Judged) -> Table:
    kinds = (*KINDS, AFTER)
    table = _table("experts that are found, by guesses made in the layer before", ("layer", *kinds))
    for of in judged.layers:
        table.add_row(str(of.layer), *_shown(of.hit_fraction, kinds, "{:.3f}"))
    return table


def _contiguous(judged: Judged) -> Table:
    headings = ("ranks", "copies", "LAR by token id", "load", "load, worst layer")
    table = _table("contiguous experts, means over layers", headings)
    for of in judged.ranks:
        figures = (of.copies, of.local_fraction, of.load, of.worst_load)
        table.add_row(str(of.ranks), *(f"{figure:.3f}" for figure in figures))
    return table


def _table(title: str, headings: Iterable[str]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _shown(found: Mapping[str, float], names: Iterable[str], form: str) -> list[str]:
    return [form.format(found[name]) if name in found else "–" for name in names]
