"""Zero-shot classification as prefill-only work: the likeliest label as a continuation.

A row's prompt is the template with its text and the shared prefix filled in. Each label becomes the
tokens that continue the prompt (`Tokenizer.continuations`), with a space in front unless the prompt
ends with white space or the label begins with it.

A label's score is its log-probability: the sum over its tokens, each given the prompt and the
tokens before it. The probabilities are the softmax over these sums. Sums are not divided by the
label's length, which would favour labels whose later tokens follow from the first ones. So of two
labels that begin alike, the shorter is never less likely.

Labels are scored together, by passes over the trie of their tokens:

    labels          a b | a c d e | f            passes            scores
                                                 prompt            a, f
         (prompt)── a ── b                       prompt a          b, c
              │     └─── c ── d ── e             prompt a c d      d on the way, e
              └──── f

A pass scores the candidates after its last token, and those of its own tokens that had no
alternative. With shared prefixes each position that a label continues from is computed once. Labels
of one token each need no pass beyond the prompt.

Options: with `{options}` in the template, the labels are listed there, one per line, with a letter
each ("A. sports"), and the letters are scored, in one pass.

Multi-label: with `{label}` in the template, each label becomes a task of its own with the answers
"yes" and "no". A label's probability is that of "yes", and labels of at least 0.5 apply. The tasks
of a text share their tokens up to `{label}`: put it last. (MoE-Prefill, Section 3.1: one request
with K candidates becomes K binary siblings.)
"""

import asyncio
import math
import re
import string
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from contracts.errors import RankError, RequestError, TooCostlyError, TooLongError
from contracts.messages import Scored, Submit
from contracts.requests import Caller, Priority, Usage, add_usage
from contracts.token_trie import ROOT, TokenTrie
from models.text.chat_template import PIECE_CHARACTERS, PIECE_TEXTS, EncodingSteps, finish
from models.text.tokenizer import SUFFIX_CHARACTERS, Tokenizer

Item = TypeVar("Item")
Result = TypeVar("Result")

DEFAULT_TEMPLATE = "{prefix}{text}"
MAX_LABELS = 256
OPTIONS = "{options}"
SYMBOLS = string.ascii_uppercase
_PLACEHOLDER = re.compile(r"\{(text|prefix|label|options)\}")
TRIE_TOKENS = 8  # memory of a trie node, in list tokens
CONCURRENT_PASSES = 64  # per row; each holds the prompt and its path
ANSWERS = ("yes", "no")
YES = 0
THRESHOLD = 0.5


async def map_bounded(
    function: Callable[[Item], Awaitable[Result]], items: Iterable[Item], limit: int
) -> list[Result]:
    """Return results in the order of `items`, with at most `limit` calls at a time.

    The first error, or cancelling the caller, cancels the rest and is raised.
    """
    listed = list(items)
    if len(listed) == 1:  # the usual case: saves a task
        return [await function(listed[0])]
    numbered = enumerate(listed)
    results: dict[int, Result] = {}

    async def work() -> None:
        for index, item in numbered:
            results[index] = await function(item)

    tasks = [asyncio.ensure_future(work()) for _ in range(min(limit, len(listed)))]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    return [results[index] for index in range(len(listed))]


class Scorer(Protocol):
    async def score(self, submit: Submit, *, wait_for_slot: bool = False) -> Scored:
        """Return the answer of a prefill-only request, as a pipeline's backend does."""


class PlaceholderCounts(NamedTuple):
    text: int
    prefix: int
    label: int
    options: int


class ClassifyTask(msgspec.Struct, frozen=True, kw_only=True):
    """Task shared by all rows.

    target: replaces {label}; None: {label} is plain text.
    placeholders: of the template, if already counted.
    """

    labels: tuple[str, ...]
    prefix: str = ""
    template: str = DEFAULT_TEMPLATE
    priority: Priority = Priority.BE
    max_context_tokens: int = 1 << 30
    max_label_tokens: int = 1 << 30
    target: str | None = None
    placeholders: PlaceholderCounts | None = None

    @property
    def answers(self) -> Sequence[str]:
        """Texts scored after the prompt, in the order of the labels."""
        return SYMBOLS[: len(self.labels)] if OPTIONS in self.template else self.labels


class LabelPass(msgspec.Struct, frozen=True):
    """The prompt followed by `path`, the tokens to node `end`.

    candidates: tokens to score after it.
    scored_from: index in `path` of the first token to score.
    """

    trie: TokenTrie
    end: int
    scored_from: int
    candidates: list[int]

    @property
    def length(self) -> int:
        return self.trie.depth(self.end)

    @property
    def path(self) -> tuple[int, ...]:
        """Tokens to `end`, computed on each access: the paths take more memory than the trie."""
        return self.trie.tokens_to(self.end)

    def edges(
        self, token_logprobs: Sequence[float], candidate_logprobs: Sequence[float]
    ) -> dict[int, float]:
        """Return by trie node the log-probability of its token, given the prompt and its path."""
        path_nodes = self.trie.path_to(self.end, start=self.scored_from)
        after = self.trie.followers(self.end).values()
        scored = dict(zip(path_nodes, token_logprobs, strict=True))
        return scored | dict(zip(after, candidate_logprobs, strict=True))


class LabelTrie:
    """The labels of a row, each of at least one token.

    passes: the fewest that score all labels; the one over the prompt alone, if any, is the first.
    """

    __slots__ = ("_trie", "passes")

    def __init__(self, label_ids: Sequence[Sequence[int]]) -> None:
        self._trie = TokenTrie(label_ids)
        self.passes = tuple(_passes(self._trie))

    def __len__(self) -> int:
        return len(self._trie)

    def logprobs(self, edges: Mapping[int, float]) -> list[float]:
        """Return the log-probability of each label: the sum over its tokens.

        edges: of all passes.
        """
        trie = self._trie
        return [math.fsum(edges[node] for node in trie.path_to(end)) for end in trie.ends]


def _passes(trie: TokenTrie) -> list[LabelPass]:
    passes: list[LabelPass] = []
    starts = [ROOT]
    for start in starts:  # grows during the loop
        end, followers = start, trie.followers(start)
        while len(followers) == 1:
            (after,) = followers.values()
            if not trie.followers(after):
                break
            end, followers = after, trie.followers(after)
        passes.append(LabelPass(trie, end, trie.depth(start), list(followers)))
        starts += [after for after in followers.values() if trie.followers(after)]
    return passes


class TokenizedRow(msgspec.Struct, frozen=True):
    """A prompt and the labels' tokens that continue it."""

    prompt_ids: list[int]
    labels: LabelTrie
    wait_for_slot: bool = False
    caller: Caller = Caller()


class Classified(msgspec.Struct, frozen=True):
    """Probabilities in the order of the labels; the usage of all passes."""

    probs: list[float]
    usage: Usage

    @property
    def best(self) -> int:
        return max(range(len(self.probs)), key=self.probs.__getitem__)


def check_task(task: ClassifyTask) -> None:
    """Raise RequestError for unusable labels or templates."""
    if not task.labels:
        raise RequestError("labels: at least one is needed", "labels")
    if len(task.labels) > MAX_LABELS:
        raise RequestError(f"labels: {len(task.labels)} are more than {MAX_LABELS}", "labels")
    for index, label in enumerate(task.labels):
        if not label.strip():
            raise RequestError(f"labels[{index}] is empty", "labels")
    if len(set(task.labels)) != len(task.labels):
        repeated = next(label for label in task.labels if task.labels.count(label) > 1)
        raise RequestError(f"labels: {repeated!r} occurs more than once", "labels")
    if "{text}" not in task.template:
        raise RequestError("template: {text} does not occur in it", "template")
    if task.prefix and "{prefix}" not in task.template:
        raise RequestError("template: a prefix is given, but {prefix} does not occur", "template")

    if OPTIONS in task.template and len(task.labels) > len(SYMBOLS):
        raise RequestError(
            f"labels: {len(task.labels)} are more than the {len(SYMBOLS)} letters that {OPTIONS} in"
            " the template gives them; take it out, or give fewer labels",
            "labels",
        )


def render_prompt(task: ClassifyTask, text: str) -> str:
    """Return the row's prompt. Placeholders are replaced once: braces in `text` are plain text."""
    values = {"text": text, "prefix": task.prefix}
    if task.target is not None:
        values["label"] = task.target
    if OPTIONS in task.template:
        options = zip(task.answers, task.labels, strict=True)
        values["options"] = "\n".join(f"{symbol}. {label}" for symbol, label in options)
    return fill_template(task.template, values)


def fill_template(template: str, values: dict[str, str]) -> str:
    return _PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), template)


def count_placeholders(template: str) -> PlaceholderCounts:
    return PlaceholderCounts(*(template.count(f"{{{name}}}") for name in PlaceholderCounts._fields))


def prompt_characters(task: ClassifyTask, text: str) -> int:
    """Return the length of the rendered prompt without rendering it."""
    placeholders = (
        count_placeholders(task.template) if task.placeholders is None else task.placeholders
    )
    count = len(task.template) + placeholders.text * (len(text) - len("{text}"))
    count += placeholders.prefix * (len(task.prefix) - len("{prefix}"))
    if task.target is not None:
        count += placeholders.label * (len(task.target) - len("{label}"))
    if placeholders.options:
        listed = sum(len(label) + len("A. \n") for label in task.labels) - 1
        count += placeholders.options * (listed - len(OPTIONS))
    return count


def tokenize_rows(
    tokenizer: Tokenizer, inputs: Sequence[tuple[str, ClassifyTask]]
) -> list[TokenizedRow | RequestError]:
    """Tokenize texts with their tasks. A row's error takes its place."""
    found: list[TokenizedRow | RequestError] = []
    finish(tokenize_steps(tokenizer, inputs, found.append))
    return found


def tokenize_steps(
    tokenizer: Tokenizer,
    inputs: Sequence[tuple[str, ClassifyTask]],
    on_row: Callable[[TokenizedRow | RequestError], None],
) -> EncodingSteps[None]:
    """Render and tokenize rows a piece at a time, and build the tries of their labels.

    on_row: receives each row or its error, in order; an error that it raises ends the steps.
    """
    tries = _TrieCache()
    for batch in _pieces(inputs):
        pairs = []
        for text, task in batch:
            prompt = render_prompt(task, text)
            pairs.append((prompt, _label_texts(prompt, task)))
        max_tokens = max(task.max_context_tokens for _, task in batch)
        try:
            rows = yield from tokenizer.continuation_steps(
                pairs, param="input", max_tokens=max_tokens
            )
        except TooLongError as error:  # a too long text is alone in its piece
            on_row(error)
            continue
        for (_, task), (prompt_ids, label_ids) in zip(batch, rows, strict=True):
            try:
                row = _check_row(task, prompt_ids, label_ids, tries)
            except RequestError as error:
                on_row(error)
            else:
                on_row(row)
        yield tries.take_new_tokens()


def _pieces(inputs: Sequence[tuple[str, ClassifyTask]]) -> Iterator[list[tuple[str, ClassifyTask]]]:
    """Yield groups of neighbouring rows that are short enough to tokenize together."""
    batch: list[tuple[str, ClassifyTask]] = []
    room = 0
    for text, task in inputs:
        labels = sum(map(len, task.answers)) + SUFFIX_CHARACTERS * len(task.answers)
        characters = prompt_characters(task, text) + labels
        if batch and (len(batch) == PIECE_TEXTS or characters > room):
            yield batch
            batch = []
        if not batch:
            room = PIECE_CHARACTERS
        batch.append((text, task))
        room -= characters
    yield batch


class _TrieCache:
    """Tries of one request. Neighbouring rows with the same labels share one."""

    def __init__(self) -> None:
        self._ids: list[list[int]] = []
        self._trie: LabelTrie | None = None
        self._new_tokens = 0

    def of(self, label_ids: list[list[int]]) -> LabelTrie:
        if self._trie is None or self._ids != label_ids:
            self._ids, self._trie = label_ids, LabelTrie(label_ids)
            self._new_tokens += len(self._trie) * TRIE_TOKENS
        return self._trie

    def take_new_tokens(self) -> int:
        """Return the memory of the tries since the last call, in list tokens."""
        new, self._new_tokens = self._new_tokens, 0
        return new


def _check_row(
    task: ClassifyTask, prompt_ids: list[int], label_ids: list[list[int]], tries: _TrieCache
) -> TokenizedRow:
    if not prompt_ids:
        raise RequestError("input: the prompt is empty", "input")
    for label, ids in zip(task.answers, label_ids, strict=True):
        if not ids:
            raise RequestError(f"labels: {label!r} adds no token of its own", "labels")
    tokens = sum(map(len, label_ids))
    if tokens > task.max_label_tokens:
        raise TooCostlyError(
            f"labels: together they have {tokens} tokens, at most {task.max_label_tokens} are"
            " accepted (limits.label_tokens): give fewer or shorter ones",
            "labels",
        )
    longest = len(prompt_ids) + max(map(len, label_ids))
    if longest > task.max_context_tokens:
        raise TooLongError(
            f"input: prompt and label have {longest} tokens, the model's context holds"
            f" {task.max_context_tokens}",
            "input",
        )
    return TokenizedRow(prompt_ids, tries.of(label_ids))


def _label_texts(prompt: str, task: ClassifyTask) -> list[str]:
    """Return the labels as they follow the prompt."""
    spaced = prompt[-1:].isspace()
    return [label if spaced or label[:1].isspace() else f" {label}" for label in task.answers]


async def classify_row(scorer: Scorer, task: ClassifyTask, row: TokenizedRow) -> Classified:
    """Return the row's probabilities. Raises what `scorer` raises."""
    passes = row.labels.passes

    async def score(numbered: tuple[int, LabelPass]) -> Scored:
        number, each = numbered
        wait_for_slot = row.wait_for_slot or number > 0
        return await scorer.score(_submit(task, row, each), wait_for_slot=wait_for_slot)

    scores = await map_bounded(score, enumerate(passes), CONCURRENT_PASSES)
    edges: dict[int, float] = {}
    for each, scored in zip(passes, scores, strict=True):
        path_tokens = each.length - each.scored_from
        tokens = checked_scores(scored.token_logprobs, path_tokens) if path_tokens else ()
        edges |= each.edges(tokens, checked_scores(scored.candidate_logprobs, len(each.candidates)))
    probs = softmax(row.labels.logprobs(edges))
    return Classified(probs, add_usage([scored.usage for scored in scores]))


def _submit(task: ClassifyTask, row: TokenizedRow, each: LabelPass) -> Submit:
    path_tokens = each.scored_from < each.length
    return Submit(
        request_id=0,
        token_ids=[*row.prompt_ids, *each.path],
        sampling=None,
        priority=task.priority,
        candidates=each.candidates,
        score_from=len(row.prompt_ids) + each.scored_from if path_tokens else None,
        caller=row.caller,
    )


def checked_scores(values: Sequence[float] | None, expected: int) -> Sequence[float]:
    """Return `values` if they are finite and as many as expected."""
    if values is None or len(values) != expected or not all(map(math.isfinite, values)):
        got = "none" if values is None else str(list(values)[:8])
        raise RankError(
            f"expected {expected} finite scores from the rank, got {got}", "bad_score", 500
        )
    return values


def softmax(scores: Sequence[float]) -> list[float]:
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def check_questions(task: ClassifyTask) -> None:
    if "{label}" not in task.template:
        raise RequestError(
            "multi_label needs a template with {label} in it, a question whether a label applies",
            "template",
        )
    if OPTIONS in task.template:
        raise RequestError(
            f"multi_label evaluates each label by itself: the template cannot have {OPTIONS}",
            "template",
        )


def label_tasks(task: ClassifyTask) -> list[ClassifyTask]:
    """Return one yes-or-no task per label."""
    return [msgspec.structs.replace(task, labels=ANSWERS, target=label) for label in task.labels]


def applicable_labels(labels: Sequence[str], probs: Sequence[float]) -> list[str]:
    return [label for label, p in zip(labels, probs, strict=True) if p >= THRESHOLD]
