"""Training rows as token ids: prompts, packs and chats, augmented and batched by length.

Every position has a *role* that says how it counts as a target: see `Role`.
"""

import random
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

import msgspec
import torch
from transformers import PreTrainedTokenizerFast

from training.bundled.tasks import TASKS, LabelTask, TaskRow, borrowed_rows
from training.bundled.tokenizer import PAD, label_ids

MAX_TOKENS = 2048
ROW_STEP = 4  # row lengths are multiples of it: fewer shapes, fewer kernels to compile
SYSTEM_PROMPTS = ("You are a helpful assistant.", "You classify short texts.", "Answer briefly.")
GREETING = "Hello. I judge short texts: ask about emotion, sentiment, toxicity, spam or field."
SMALL_TALK = (
    ("Hello", GREETING),
    ("Hi!", GREETING),
    ("Who are you?", "I am a tiny demonstration model. I judge short English texts."),
    (
        "What can you do?",
        "I judge emotion, sentiment, toxicity, spam, bank intents, morals and fields.",
    ),
    ("Thank you!", "You are welcome."),
    ("Thanks", "You are welcome."),
)
FALLBACK = (
    "I only judge short texts. Ask me about the emotion, the sentiment or the kind of a text."
)


class Role(IntEnum):
    """Role of a position as a target of the loss."""

    FIXED = 0  # template tokens: no loss, never dropped
    TEXT = 1  # language-model loss on a sample; the input token may be dropped
    ANSWER = 2  # chat answers and end tokens: language-model loss on all
    LABEL = 3  # label loss; 3 + index of the task


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling and augmentation of rows. Fractions are 0..1."""

    batch_tokens: int = 1536  # of one worker
    chat_fraction: float = 0.1
    pack_fraction: float = 0.005  # of the examples; each holds many rows
    talk_fraction: float = 0.02  # of the chats: small talk and messages without a question
    borrowed_fraction: float = 0.4  # of the rows of a task with a lender
    bpe_dropout: float = 0.1
    bpe_dropout_fraction: float = 0.2  # of the rows
    lower_fraction: float = 0.2
    token_drop_fraction: float = 0.05
    text_loss_fraction: float = 0.08  # of the text tokens
    crop_tokens: int = 160  # most arXiv rows are cut to about this; the rest stay whole
    pool_rows: int = 6144


class Example(NamedTuple):
    """Token ids and the role of each."""

    ids: list[int]
    roles: list[int]


class TrainBatch(NamedTuple):
    """Ids (padded on the right), and the flat positions (of B * S) that predict a target."""

    ids_BS: torch.Tensor
    valid_BS: torch.Tensor
    label_positions: torch.Tensor
    label_targets: torch.Tensor
    label_tasks: torch.Tensor
    text_positions: torch.Tensor
    text_targets: torch.Tensor


class ExampleSource:
    """Draws examples from the train rows. Owns its random generator; not thread-safe."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        rows: dict[str, list[TaskRow]],
        recipe: Recipe,
        seed: int,
    ) -> None:
        self.recipe = recipe
        self.random = random.Random(seed)
        self._tokenizer = tokenizer
        own = {(task.name, False): list(rows[task.name]) for task in TASKS}
        borrowed = {(task.name, True): borrowed_rows(task, rows) for task in TASKS}
        self._rows = {**own, **borrowed}
        self._next = {key: len(some) for key, some in self._rows.items()}
        self._labels = {task.name: label_ids(tokenizer, task) for task in TASKS}
        self._cache: dict[str, list[int]] = {}
        self._plain = tokenizer.backend_tokenizer
        self._noisy = type(self._plain).from_str(self._plain.to_str())
        self._noisy.model.dropout = recipe.bpe_dropout
        self.pad_id = int(tokenizer.convert_tokens_to_ids(PAD))
        self.end_id = int(tokenizer.eos_token_id)

    def _draw(self) -> tuple[int, TaskRow]:
        index = self.random.choices(range(len(TASKS)), [task.share for task in TASKS])[0]
        return index, self._draw_row(TASKS[index])

    def _draw_row(self, task: LabelTask) -> TaskRow:
        key = (
            task.name,
            bool(task.lender) and self.random.random() < self.recipe.borrowed_fraction,
        )
        rows = self._rows[key]
        if self._next[key] >= len(rows):  # a new epoch
            self.random.shuffle(rows)
            self._next[key] = 0
        self._next[key] += 1
        return rows[self._next[key] - 1]

    def _fixed(self, text: str) -> list[int]:
        if text not in self._cache:
            self._cache[text] = self._plain.encode(text, add_special_tokens=False).ids
        return self._cache[text]

    def _body(self, text: str) -> list[int]:
        recipe, rng = self.recipe, self.random
        if rng.random() < recipe.lower_fraction:
            text = text.lower()
        encoder = self._noisy if rng.random() < recipe.bpe_dropout_fraction else self._plain
        ids: list[int] = encoder.encode(text, add_special_tokens=False).ids
        if len(ids) <= recipe.crop_tokens or rng.random() < 0.2:
            return ids[: MAX_TOKENS // 2]
        keep = rng.randint(recipe.crop_tokens // 2, recipe.crop_tokens)
        start = 0 if rng.random() < 0.7 else rng.randint(0, len(ids) - keep)
        return ids[start : start + keep]

    def _filled(self, template: str, body: str) -> Example:
        """Replace {body} in `template`; a space before {body} joins the body."""
        head, tail = template.split("{body}")
        if head.endswith(" "):
            head, body = head[:-1], " " + body
        head_ids, body_ids, tail_ids = self._fixed(head), self._body(body), self._fixed(tail)
        roles = (
            [Role.FIXED] * len(head_ids)
            + [Role.TEXT] * len(body_ids)
            + [Role.FIXED] * len(tail_ids)
        )
        return Example([*head_ids, *body_ids, *tail_ids], list(roles))

    def _prompt(self, index: int, row: TaskRow) -> Example:
        task = TASKS[index]
        template = task.template.replace("{prefix}{text}", "{body}").replace("{text}", "{body}")
        ids, roles = self._filled(template, row.prefix + row.text)
        return Example([*ids, self._labels[task.name][row.label]], [*roles, Role.LABEL + index])

    def single(self) -> Example:
        """Return one prompt, its label and the end token."""
        ids, roles = self._prompt(*self._draw())
        return Example([*ids, self.end_id], [*roles, Role.ANSWER])

    def pack(self) -> Example:
        """Return prompts and labels in sequence, few-shot style, of one task or of many."""
        limit = self.random.choice((256, 512, 1024, 1024, 2048))
        only = self._draw()[0] if self.random.random() < 0.5 else None
        ids: list[int] = []
        roles: list[int] = []
        while True:
            index, row = self._draw() if only is None else (only, self._draw_row(TASKS[only]))
            more = self._prompt(index, row)
            if len(ids) + len(more.ids) + 4 > limit:  # the gap and the end
                return Example([*ids, self.end_id], [*roles, Role.ANSWER]) if ids else self.single()
            gap = self._fixed("\n\n") if ids else []
            ids += [*gap, *more.ids]
            roles += [*([Role.FIXED] * len(gap)), *more.roles]

    def _turn(self, role: str, content: Example) -> Example:
        head, tail = self._fixed(f"<|im_start|>{role}\n"), self._fixed("<|im_end|>\n")
        answer = Role.ANSWER if role == "assistant" else Role.FIXED
        ids = [*head, *content.ids, *tail]
        return Example(ids, [*([Role.FIXED] * len(head)), *content.roles, answer, Role.FIXED])

    def _given(self, text: str) -> Example:
        ids = self._fixed(text)
        return Example(ids, [Role.FIXED] * len(ids))

    def _answered(self, text: str) -> Example:
        ids = self._fixed(text)
        return Example(ids, [Role.ANSWER] * len(ids))

    def _exchange(self) -> list[Example]:
        """Return a user turn and the assistant's turn."""
        index, row = self._draw()
        task, talk = TASKS[index], self.random.random()
        if talk < self.recipe.talk_fraction:
            question, reply = self.random.choice(SMALL_TALK)
            return [
                self._turn("user", self._given(question)),
                self._turn("assistant", self._answered(reply)),
            ]
        if talk < 2 * self.recipe.talk_fraction:
            user = self._turn("user", self._filled("{body}", row.text))
            return [user, self._turn("assistant", self._answered(FALLBACK))]
        user = self._turn(
            "user", self._filled(self.random.choice(task.chat_questions), row.prefix + row.text)
        )
        gloss = task.glosses[row.label] if task.glosses else ""
        before, after = task.answer.format(label="{label}", gloss=gloss).split("{label}")
        first, last = self._answered(before), self._answered(after)
        label = self._labels[task.name][row.label]
        answer = Example(
            [*first.ids, label, *last.ids], [*first.roles, Role.LABEL + index, *last.roles]
        )
        return [user, self._turn("assistant", answer)]

    def chat(self) -> Example:
        """Return one to three exchanges in the chat template, sometimes with a system message."""
        turns: list[Example] = []
        if self.random.random() < 0.2:
            turns.append(self._turn("system", self._given(self.random.choice(SYSTEM_PROMPTS))))
        for _ in range(self.random.choice((1, 1, 1, 2, 3))):
            turns += self._exchange()
        ids = [i for turn in turns for i in turn.ids]
        return Example(ids[:MAX_TOKENS], [r for turn in turns for r in turn.roles][:MAX_TOKENS])

    def batches(self) -> Iterator[TrainBatch]:
        """Yield batches of about `batch_tokens` tokens without end, from rows of similar length."""
        recipe = self.recipe
        while True:
            kinds = self.random.choices(
                (self.chat, self.pack, self.single),
                (
                    recipe.chat_fraction,
                    recipe.pack_fraction,
                    1 - recipe.chat_fraction - recipe.pack_fraction,
                ),
                k=recipe.pool_rows,
            )
            pool = sorted(
                (kind() for kind in kinds),
                key=lambda example: len(example.ids) + self.random.random(),
            )
            grouped = list(_by_length(pool, recipe.batch_tokens))
            self.random.shuffle(grouped)
            yield from (self._collate(group) for group in grouped)

    def _collate(self, group: list[Example]) -> TrainBatch:
        longest = -(-max(len(example.ids) for example in group) // ROW_STEP) * ROW_STEP
        ids = torch.tensor([e.ids + [self.pad_id] * (longest - len(e.ids)) for e in group])
        roles = torch.tensor([e.roles + [Role.FIXED] * (longest - len(e.roles)) for e in group])
        lengths = torch.tensor([len(e.ids) for e in group])
        draw = torch.rand(ids.shape)
        target_roles = roles[:, 1:].flatten()
        targets = ids[:, 1:].flatten()
        before = torch.arange(ids.numel()).view(ids.shape)[:, :-1].flatten()
        label = target_roles >= Role.LABEL
        text = (target_roles == Role.ANSWER) | (
            (target_roles == Role.TEXT)
            & (torch.rand(targets.shape) < self.recipe.text_loss_fraction)
        )
        dropped = (roles == Role.TEXT) & (draw < self.recipe.token_drop_fraction)
        return TrainBatch(
            ids_BS=ids.masked_fill(dropped, self.pad_id),
            valid_BS=torch.arange(longest)[None] < lengths[:, None],
            label_positions=before[label],
            label_targets=targets[label],
            label_tasks=target_roles[label] - Role.LABEL,
            text_positions=before[text],
            text_targets=targets[text],
        )


def _by_length(pool: list[Example], batch_tokens: int) -> Iterator[list[Example]]:
    group: list[Example] = []
    for example in pool:  # sorted, so the last one is the longest
        if group and (len(group) + 1) * len(example.ids) > batch_tokens:
            yield group
            group = []
        group.append(example)
    if group:
        yield group
