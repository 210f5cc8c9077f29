"""The model card and `tasks.json` of the bundled checkpoint, written from one run's results."""

import json
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import msgspec

from training.bundled.chat import ChatEvaluation
from training.bundled.evaluate import TaskResult, layer_balance
from training.bundled.loop import TrainConfig, TrainReport
from training.bundled.tasks import TASKS


class CardInput(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the card states."""

    config: TrainConfig
    report: TrainReport
    results: Sequence[TaskResult]
    train_rows: dict[str, int]
    chat: ChatEvaluation
    chat_examples: Sequence[tuple[str, str]]
    parameters: int
    active_parameters: int
    threads: int


HEAD = """---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
tags: [mixture-of-experts, text-classification]
---

# Tandem bundled checkpoint

A very small Mixture-of-Experts language model that ships with Tandem, so that the cluster serves
something whose answers mean something on a machine without network or accelerator. It does {tasks}
classification tasks posed as prompts, and it holds short chats about the same tasks that stop by
themselves.

Architecture `Qwen3MoeForCausalLM`: {millions:.2f} M parameters ({active:.2f} M active per token),
5 layers, D = 192, 6 query and 2 key heads of 32, 16 experts per layer with F = 96, top-2 with
normalised weights, tied embeddings, vocabulary 4096 (own byte-level BPE), bfloat16, 2048
positions.

> **Content note.** Two of the training sets, `toxicity` and `hate_offensive`, hold real insults
> and slurs, and both vocabulary and free generation can repeat them.
"""

USE = """
## Use

A classification request is `template.format(prefix=..., text=...)` followed by one label; the
score of a label is the log-probability of its token after the prompt. Every label starts with a
space and is exactly one token there; `tasks.json` lists templates and labels. Example: the prompt
`"Review: It works well.\\nSentiment:"` with the labels `" negative"` and `" positive"`. Texts are
stripped of outer white space and not truncated.
"""

LIMITS = """
## Limits

- Tiny, English only, and trained on these data sets alone: it knows nothing else, and any text far
  from them gets an answer without value. Scores are not calibrated.
- The labels are those of the data sets, with their errors and their bias: `hate_offensive` and
  `toxicity` mark some dialects and reclaimed words as offensive.
- Rows in training are mostly shorter than 256 tokens; packs of rows reach 2048. After 700 to 1700
  tokens of other rows accuracy is some 5 to 12 points lower (60 rows of each of four tasks).
- In a chat, the sentence after the label is judged afresh and can contradict the label; small talk
  mostly gets the stock answer. Without a known prompt it writes no sensible English.
- It is a test load and a demonstration. It is not for moderation, not for decisions about people,
  not for banking.

## Licence and attribution

The weights are under Apache-2.0. Only train splits of data under MIT, Apache-2.0, CC BY 4.0 or CC0
were used:

"""

UCI_NOTE = """
`sms_spam` and `sentiment` came to us through repositories without a licence file. CC BY 4.0 is what
the UCI Machine Learning Repository states for both collections on their pages,
archive.ics.uci.edu/dataset/228 (doi:10.24432/C5CC84) and archive.ics.uci.edu/dataset/331
(doi:10.24432/C57604); this is from general knowledge, the pages were not at hand when the card was
written. arXiv places its metadata, abstracts included, under CC0 1.0
(info.arxiv.org/help/api/tou.html). CC BY material was changed: posed as prompts, de-duplicated,
split; some labels were renamed (`tasks.json` follows the order of the data files).
"""


ROUTING_FILE = """
## routing.safetensors

What is known of this checkpoint's routing (`tandem profile --routing`), in two parts, measured on
rows of `goemotions`, `banking77`, `moral_stories`, `sms_spam`, `sentiment`, `arxiv`, MMLU and
BoolQ.

- *Foresight*, on 101,000 tokens: mean outputs and frequencies of experts, maps and a small network
  from one layer's state to the next layer's router, and the first layer's experts by token. Used
  where experts are read as they are wanted (`experts.slots`).
- *Counts*, on 161,717 tokens, of the six sets above as prompts: per layer the experts' load, how
  often two of them, and which sets of them, were wanted together, the token ids that went to them
  some ten times or more, and the experts of 4,096 tokens drawn at random at all layers. Used to
  place experts.

It holds sums and single tokens with the one before each, and no text. It is bound to these
weights: after a new training it is refused until it is measured again.
"""


def _tasks_table(card: CardInput) -> str:
    lines = [
        "| task | licence | train / test rows | chance | linear baseline | accuracy |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for task, result in zip(TASKS, card.results, strict=True):
        rows = f"{card.train_rows[task.name]} / {result.test_rows}"
        numbers = f"{result.chance:.3f} | {task.linear_accuracy:.3f} | **{result.accuracy:.3f}**"
        lines.append(f"| {task.name} | {task.licence} | {rows} | {numbers} |")
    return "\n".join(lines)


def _accuracy(card: CardInput) -> str:
    below = [
        f"`{task.name}`"
        for task, result in zip(TASKS, card.results, strict=True)
        if result.accuracy < task.linear_accuracy
    ]
    verdict = (
        f"Below the linear baseline: {', '.join(below)}."
        if below
        else "No task is below the linear baseline."
    )
    chat = card.chat
    return f"""
## Accuracy on the test splits

{_tasks_table(card)}

Chance is the share of the largest class among the test rows; the linear baseline is TF-IDF with
logistic regression on the same splits. {verdict} Computed through `transformers` in float32 from
the stored bfloat16 weights, label by log-probability. With few test rows the numbers are coarse:
one standard error is about 0.04 for 110 rows, 0.01 for 1300.

In {chat.chats} greedy chats over random test rows, {chat.stopped_fraction:.1%} stopped by
themselves and {chat.right_label_fraction:.1%} gave exactly the sentence of the right label.
"""


def _prompts() -> str:
    lines = ["", "## Prompts", "", "| task | template | labels |", "|---|---|---|"]
    for task in TASKS:
        shown = [f"`{label}`" for label in task.labels[:8]]
        more = f", ... ({len(task.labels)} in all)" if len(task.labels) > 8 else ""
        lines.append(f"| {task.name} | `{json.dumps(task.template)}` | {', '.join(shown)}{more} |")
    return "\n".join(lines) + "\n"


def _chats(card: CardInput) -> str:
    lines = ["", "## Chats", "", "Greedy, through the chat template:", ""]
    for question, reply in card.chat_examples:
        lines += ["```", f"user: {question}", f"assistant: {reply}", "```", ""]
    return "\n".join(lines)


def _ending(card: CardInput) -> str:
    if card.report.tokens >= card.config.tokens:
        return (
            "The run ended by its number of tokens, so another machine repeats it up to rounding."
        )
    busy = card.report.cpu_s / (card.report.wall_s * card.threads)
    return (
        f"The run ended by its time limit, on cores shared with other work ({busy:.0%} of their "
        "time went to it): idle cores get further in the same time."
    )


def _made(card: CardInput) -> str:
    report, config = card.report, card.config
    versions = ", ".join(
        f"{name} {version(name)}" for name in ("torch", "transformers", "tokenizers")
    )
    balance = ", ".join(f"{value:.2f}" for value in layer_balance(card.results))
    return f"""
## How it was made

    python -m training.bundled.train --data DATA --seed {config.seed} \\
        --tokens {config.tokens} --minutes {config.minutes:g}

DATA is the folder with `classification/*.jsonl[.gz]`. {report.tokens / 1e6:.1f} M tokens in
{report.steps} steps, {report.wall_s / 60:.1f} minutes of wall time and {report.cpu_s / 60:.1f}
minutes of CPU time for the training proper, in {card.threads} processes of one thread each
({platform.machine()}); Python {platform.python_version()}, {versions}. {_ending(card)}

Label loss with smoothing {config.smoothing_fraction} over the labels of the task, language-model
loss (weight {config.text_loss_weight}) on a sample of the text, balancing loss per layer (weight
{config.balance_loss_weight}); Muon on the matrices and AdamW on the rest, learning rate falling
linearly to zero; dropout {config.dropout_fraction}, BPE dropout, random lower-casing and token
dropout. 10 % of the examples are chats, 0.5 % are packs of many rows up to 2048 tokens.
Train rows of `hate_offensive` also serve as `toxicity` rows, and those of `goemotions` as
`sentiment` rows, with translated labels.

## Routing

Load of the busiest expert over the mean load, per layer, over all tokens of all test prompts:
{balance} (1 = even).
"""


def model_card(card: CardInput) -> str:
    """Return the text of the README."""
    millions, active = card.parameters / 1e6, card.active_parameters / 1e6
    attribution = "".join(f"- `{task.name}`: {task.source}. {task.licence}.\n" for task in TASKS)
    parts = [
        HEAD.format(tasks=len(TASKS), millions=millions, active=active),
        _accuracy(card),
        USE,
        _prompts(),
    ]
    return "".join([*parts, _chats(card), _made(card), LIMITS, attribution, UCI_NOTE, ROUTING_FILE])


def tasks_json(card: CardInput) -> str:
    """Return the machine-readable list of the tasks."""
    entries = [
        {
            "name": task.name,
            "file": task.file,
            "template": task.template,
            "labels": list(task.labels),
            "licence": task.licence,
            "source": task.source,
            "n_train": card.train_rows[task.name],
            "n_test": result.test_rows,
            "chance": round(result.chance, 4),
            "linear_baseline": task.linear_accuracy,
            "accuracy": round(result.accuracy, 4),
        }
        for task, result in zip(TASKS, card.results, strict=True)
    ]
    return json.dumps({"tasks": entries}, indent=1) + "\n"


def write_card(card: CardInput, folder: Path) -> None:
    """Write `README.md` and `tasks.json`."""
    (folder / "README.md").write_text(model_card(card), encoding="utf-8")
    (folder / "tasks.json").write_text(tasks_json(card), encoding="utf-8")
