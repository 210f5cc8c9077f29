"""The tokenizer of the bundled checkpoint: a byte-level BPE in which every label is one token.

Single words (" joy", " physics") become single tokens because the training corpus repeats them;
the banking intents (" card_arrival"), which the pre-tokenizer would split at each underscore, are
ordinary added tokens.
"""

from collections.abc import Iterable, Iterator

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from training.bundled.tasks import TASKS, LabelTask, TaskRow, prompt_of

VOCAB_TOKENS = 4096
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
LABEL_REPEATS = 4000  # enough for every merge inside a label to beat the rarest ordinary merge

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)


def _word_labels() -> list[str]:
    return sorted({label for task in TASKS for label in task.labels if label.strip().isalpha()})


def _other_labels() -> list[str]:
    return sorted({label for task in TASKS for label in task.labels if not label.strip().isalpha()})


def _corpus(rows: dict[str, list[TaskRow]]) -> Iterator[str]:
    for task in TASKS:
        for row in rows[task.name]:
            yield prompt_of(task, row)
        phrases = [*task.chat_questions, *task.glosses, task.answer]
        yield from (phrase.format(body="", label="", gloss="") for phrase in phrases * 50)
    yield from (label for label in _word_labels() for _ in range(LABEL_REPEATS))


def train_tokenizer(rows: dict[str, list[TaskRow]]) -> PreTrainedTokenizerFast:
    """Train a tokenizer of `VOCAB_TOKENS` tokens on the train rows of every task."""
    others = _other_labels()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_TOKENS - len(others),
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(rows), trainer)
    tokenizer.add_tokens([AddedToken(label, normalized=False, special=False) for label in others])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


def label_ids(tokenizer: PreTrainedTokenizerFast, task: LabelTask) -> list[int]:
    """Return the token id of each label, in the order of `task.labels`."""
    encoded = [tokenizer.encode(label, add_special_tokens=False) for label in task.labels]
    for label, ids in zip(task.labels, encoded, strict=True):
        if len(ids) != 1:
            raise ValueError(
                f"{task.name}: label {label!r} is {len(ids)} tokens, must be 1: raise LABEL_REPEATS"
            )
    ids = [one[0] for one in encoded]
    if len(set(ids)) != len(ids):
        raise ValueError(f"{task.name}: two labels share one token")
    return ids


def check_contract(
    tokenizer: PreTrainedTokenizerFast, task: LabelTask, rows: Iterable[TaskRow]
) -> int:
    """Check tokens(prompt + label) = tokens(prompt) + [label]; return the number of rows."""
    ids = label_ids(tokenizer, task)
    checked = 0
    for row in rows:
        prompt = prompt_of(task, row)
        before = tokenizer.encode(prompt, add_special_tokens=False)
        for label, label_id in zip(task.labels, ids, strict=True):
            if tokenizer.encode(prompt + label, add_special_tokens=False) != [*before, label_id]:
                raise ValueError(f"{task.name}: {label!r} is not one token after {prompt!r}")
        checked += 1
    return checked
