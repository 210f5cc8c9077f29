"""Evaluation of chats with the bundled checkpoint through `transformers`: endings and labels."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from transformers import PreTrainedTokenizerFast

from training.bundled.tasks import TASKS, LabelTask, TaskRow

MAX_ANSWER_TOKENS = 64
EXAMPLES = (
    "Is this review positive or negative?\nThe battery died after two days and nobody wrote back.",
    "What emotion does this post show?\nThank you so much, this made my whole week!",
    "What does this bank customer want?\nMy new card still has not come in the post.",
    "Is this message spam?\nYou have won a free phone! Call 0900 123 now to claim your prize.",
    "Who are you?",
)


class ChatEvaluation(msgspec.Struct, frozen=True, kw_only=True):
    """Greedy chats over test rows. Fractions are 0..1."""

    chats: int
    stopped_fraction: float
    right_label_fraction: float


@torch.no_grad()
def answer(model: Any, tokenizer: PreTrainedTokenizerFast, question: str) -> tuple[str, bool]:
    """Return the greedy answer to one user message, and whether it ended by itself."""
    messages = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    prompt_tokens = inputs["input_ids"].shape[1]
    output = model.generate(**inputs, max_new_tokens=MAX_ANSWER_TOKENS, do_sample=False)[
        0, prompt_tokens:
    ]
    stopped = int(output[-1]) == tokenizer.eos_token_id
    return tokenizer.decode(output, skip_special_tokens=True), stopped


def expected_answer(task: LabelTask, row: TaskRow) -> str:
    """Return the trained answer for one row."""
    return task.answer.format(
        label=task.labels[row.label], gloss=task.glosses[row.label] if task.glosses else ""
    )


def evaluate_chat(
    model: Any,
    tokenizer: PreTrainedTokenizerFast,
    rows: Mapping[str, Sequence[TaskRow]],
    *,
    per_task: int,
    seed: int,
) -> ChatEvaluation:
    """Evaluate greedy answers for `per_task` random rows of every task."""
    rng = random.Random(seed)
    stopped = right = chats = 0
    for task in TASKS:
        for row in rng.sample(list(rows[task.name]), min(per_task, len(rows[task.name]))):
            reply, ended = answer(
                model, tokenizer, rng.choice(task.chat_questions).format(body=row.prefix + row.text)
            )
            chats, stopped, right = (
                chats + 1,
                stopped + ended,
                right + (reply == expected_answer(task, row)),
            )
    return ChatEvaluation(
        chats=chats, stopped_fraction=stopped / chats, right_label_fraction=right / chats
    )
