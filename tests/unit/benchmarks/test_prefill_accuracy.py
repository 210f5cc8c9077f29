"""What the accuracy benchmark reads out of decoded text, and what it asks."""

from __future__ import annotations

import pytest

from benchmarks.asked_server import Question, parse
from benchmarks.prefill_accuracy import Compared, check, questions_of
from benchmarks.task_templates import TASKS, Posed, Row, prompt_of
from training.bundled import tasks as bundled


@pytest.mark.parametrize(
    ("text", "labels", "expected"),
    [
        (" yes", ("no", "yes"), 1),
        (" Yes, it is.", ("no", "yes"), 1),
        (" yesterday", ("no", "yes"), None),
        ("", ("no", "yes"), None),
        (" it is no", ("no", "yes"), None),
        (" B. because", ("A", "B"), 1),
        (" Because", ("A", "B"), None),
        (" card arrival time", ("card", "card arrival", "arrival"), 1),
        (" Sci/Tech", ("World", "Sci/Tech"), 1),
        (" is it (a)?", ("is it (a)", "is"), 0),
    ],
)
def test_the_longest_label_that_the_text_begins_with_is_read(
    text: str, labels: tuple[str, ...], expected: int | None
) -> None:
    assert parse(text, labels) == expected


def test_the_bundled_models_tasks_are_asked_in_its_own_words() -> None:
    posed = {task.name: task for task in TASKS}
    for task in bundled.TASKS:
        prefix, text = "Norm: {text} is a word.\n", "Is {label} here?"
        row = Row(prefix, text, posed[task.name].labels or (), 0)
        theirs = bundled.prompt_of(task, bundled.TaskRow(prefix, text, 0, "group"))
        assert prompt_of(posed[task.name], row) == theirs


def test_multi_selection_is_a_question_for_each_label() -> None:
    task = Posed(name="each", file="", template="{text} Is it {label}?", asks_each=True)
    asked = questions_of(task, [Row("", "Red.", ("warm", "cold"), 0)])
    assert asked == [
        Question("Red. Is it warm?", ("yes", "no"), 0),
        Question("Red. Is it cold?", ("yes", "no"), 1),
    ]


def test_rows_that_differ_from_the_oracle_are_told_from_ties() -> None:
    row = Compared(
        task="", familiar="no", questions=3, labels=2, left_out=0, chance=0.5,
        greedy_accuracy=0, prefill_accuracy=0, unparsable=0, agreement=0, greedy_rows_per_s=1,
        prefill_rows_per_s=1, greedy_tokens_per_s=1, prefill_tokens_per_s=1,
    )  # fmt: skip
    ours = [[0.9, 0.1], [0.50001, 0.49999], [0.6, 0.4]]
    theirs = [[0.9, 0.1], [0.49999, 0.50001], [0.4, 0.6]]
    checked = check(row, ours, theirs)
    assert (checked.differ_from_transformers, checked.ties) == (2, 1)
    assert checked.max_probability_difference == pytest.approx(0.2)
