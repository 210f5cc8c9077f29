"""Multi-label classification: for each label by itself, does it apply?

The template holds `{text}` and `{label}`; filled in for each label it asks K questions of one text,
for example `{text} Is this about {label}? Answer:`. The answer is classification between the labels
"yes" and "no" as `classify.py` does it, with its space in front: the softmax over the logits of the
tokens " yes" and " no" at the prompt's last position, or of their summed log-probabilities where
one of them is more than a token. The probability of a label is that of "yes"; those of a row do not
add up to 1. Labels with a probability of at least 0.5 apply: several, or none.

The questions of a text share their tokens up to `{label}` (less what the tokenizer merges with it),
which are computed once: put `{label}` last. (MoE-Prefill, Section 3.1: one request with K
candidates becomes K binary siblings.)
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from cluster.classification.classify import OPTIONS, ClassifyTask
from contracts.errors import RequestError

ANSWERS = ("yes", "no")
YES = 0  # its place among the answers
THRESHOLD = 0.5


def check_questions(task: ClassifyTask) -> None:
    if "{label}" not in task.template:
        raise RequestError(
            "multi_label needs a template with {label} in it, which asks whether a label applies",
            "template",
        )
    if OPTIONS in task.template:
        raise RequestError(
            f"multi_label asks for each label by itself: the template cannot have {OPTIONS}",
            "template",
        )


def label_tasks(task: ClassifyTask) -> list[ClassifyTask]:
    """One task per label, to be answered with yes or no."""
    return [msgspec.structs.replace(task, labels=ANSWERS, target=label) for label in task.labels]


def applicable_labels(labels: Sequence[str], probs: Sequence[float]) -> list[str]:
    return [label for label, p in zip(labels, probs, strict=True) if p >= THRESHOLD]
