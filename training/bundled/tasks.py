"""Tasks of the bundled checkpoint: prompts, labels, licences, and reading of rows.

A classification request is ``template.format(prefix=..., text=...)`` followed by one label. Every
label starts with a space and is one token after the prompt; `tokenizer.check_contract` verifies
every row.
"""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec


class LabelTask(msgspec.Struct, frozen=True, kw_only=True):
    """One data set posed as prompts. `labels` follows the order of the labels in the data file."""

    name: str
    file: str
    template: str
    labels: tuple[str, ...]
    chat_questions: tuple[str, ...]  # chat questions about one row, with {body} = prefix + text
    answer: str  # chat answer, with {label} (which brings its own leading space) and {gloss}
    glosses: tuple[str, ...] = ()  # one per label, or none
    licence: str
    source: str
    linear_accuracy: float  # TF-IDF + logistic regression on the same splits
    share: float  # of the training rows, before normalisation
    lender: str = ""  # another task whose train rows serve here too, under `borrowed_labels`
    borrowed_labels: tuple[
        tuple[str, str], ...
    ] = ()  # (label there, label here); other rows are skipped


class TaskRow(msgspec.Struct, frozen=True):
    """One data row. `label` indexes `LabelTask.labels`; `group` never crosses a split."""

    prefix: str
    text: str
    label: int
    group: str


def _words(text: str) -> tuple[str, ...]:
    """Return the words of `text`, each with a leading space."""
    return tuple(" " + word for word in text.split())


BANKING_LABELS = _words("""
Refund_not_showing_up activate_my_card age_limit apple_pay_or_google_pay atm_support
automatic_top_up balance_not_updated_after_bank_transfer
balance_not_updated_after_cheque_or_cash_deposit beneficiary_not_allowed cancel_transfer
card_about_to_expire card_acceptance card_arrival card_delivery_estimate card_linking
card_not_working card_payment_fee_charged card_payment_not_recognised
card_payment_wrong_exchange_rate card_swallowed cash_withdrawal_charge
cash_withdrawal_not_recognised change_pin compromised_card contactless_not_working country_support
declined_card_payment declined_cash_withdrawal declined_transfer
direct_debit_payment_not_recognised disposable_card_limits edit_personal_details exchange_charge
exchange_rate exchange_via_app extra_charge_on_statement failed_transfer fiat_currency_support
get_disposable_virtual_card get_physical_card getting_spare_card getting_virtual_card
lost_or_stolen_card lost_or_stolen_phone order_physical_card passcode_forgotten
pending_card_payment pending_cash_withdrawal pending_top_up pending_transfer pin_blocked
receiving_money request_refund reverted_card_payment? supported_cards_and_currencies
terminate_account top_up_by_bank_transfer_charge top_up_by_card_charge top_up_by_cash_or_cheque
top_up_failed top_up_limits top_up_reverted topping_up_by_card transaction_charged_twice
transfer_fee_charged transfer_into_account transfer_not_received_by_recipient transfer_timing
unable_to_verify_identity verify_my_identity verify_source_of_funds verify_top_up
virtual_card_not_working visa_or_mastercard why_verify_identity wrong_amount_of_cash_received
wrong_exchange_rate_for_cash_withdrawal
""")

EMOTION_LABELS = _words("""
admiration amusement anger annoyance approval caring confusion curiosity desire disappointment
disapproval disgust embarrassment excitement fear gratitude grief joy love nervousness optimism
pride realization relief remorse sadness surprise neutral
""")

POSITIVE = _words("""
admiration amusement approval caring desire excitement gratitude joy love optimism pride relief
""")
NEGATIVE = _words("""
anger annoyance disappointment disapproval disgust embarrassment fear grief nervousness remorse
sadness
""")

TASKS: tuple[LabelTask, ...] = (
    LabelTask(
        name="toxicity",
        file="surge_toxicity.jsonl",
        template="Comment: {text}\nToxic:",
        labels=(" no", " yes"),
        chat_questions=(
            "Is this comment toxic?\n{body}",
            "Is the following toxic: {body}",
            "{body}\nIs that toxic?",
        ),
        answer="Toxic:{label}. {gloss}",
        glosses=("This comment is civil.", "This comment insults or attacks someone."),
        licence="MIT",
        source="Surge AI toxicity data set (surge-ai/toxicity)",
        linear_accuracy=0.836,
        share=0.07,
        lender="hate_offensive",
        borrowed_labels=((" hate", " yes"), (" offensive", " yes"), (" neither", " no")),
    ),
    LabelTask(
        name="hate_offensive",
        file="hate_offensive.jsonl.gz",
        template="Tweet: {text}\nKind:",
        labels=(" hate", " offensive", " neither"),
        chat_questions=(
            "Is this tweet hate speech, offensive or neither?\n{body}",
            "What kind of tweet is this?\n{body}",
        ),
        answer="Kind:{label}. {gloss}",
        glosses=(
            "This tweet is hate speech.",
            "This tweet is rude, but it is not hate speech.",
            "This tweet is neither hate speech nor offensive.",
        ),
        licence="MIT",
        source="Davidson et al. 2017 (t-davidson/hate-speech-and-offensive-language)",
        linear_accuracy=0.856,
        share=0.14,
    ),
    LabelTask(
        name="goemotions",
        file="goemotions.jsonl.gz",
        template="Post: {text}\nEmotion:",
        labels=EMOTION_LABELS,
        chat_questions=(
            "What emotion does this post show?\n{body}",
            "Which emotion is this: {body}",
            "{body}\nWhat do I feel?",
        ),
        answer="The emotion of this post is{label}.",
        licence="Apache-2.0",
        source="GoEmotions, Demszky et al. 2020 (google-research, rows with exactly one emotion)",
        linear_accuracy=0.548,
        share=0.21,
    ),
    LabelTask(
        name="banking77",
        file="banking77.jsonl.gz",
        template="Question: {text}\nIntent:",
        labels=BANKING_LABELS,
        chat_questions=(
            "What does this bank customer want?\n{body}",
            "Which intent is this: {body}",
        ),
        answer="The intent of this question is{label}.",
        licence="CC BY 4.0",
        source="Banking77, Casanueva et al. 2020, PolyAI (PolyAI-LDN/task-specific-datasets)",
        linear_accuracy=0.869,
        share=0.19,
    ),
    LabelTask(
        name="moral_stories",
        file="moral_stories.jsonl",
        template="{prefix}{text}\nJudgement:",
        labels=(" immoral", " moral"),
        chat_questions=("Is this action moral or immoral?\n{body}", "{body}\nIs that moral?"),
        answer="Judgement:{label}. {gloss}",
        glosses=("The action goes against the norm.", "The action follows the norm."),
        licence="MIT",
        source="Moral Stories, Emelin et al. 2021 (demelin/moral_stories, norm and action only)",
        linear_accuracy=0.682,
        share=0.15,
    ),
    LabelTask(
        name="sms_spam",
        file="sms_spam.jsonl",
        template="Message: {text}\nSpam:",
        labels=(" no", " yes"),
        chat_questions=(
            "Is this message spam?\n{body}",
            "Spam or not: {body}",
            "I got this message: {body}\nIs it spam?",
        ),
        answer="Spam:{label}. {gloss}",
        glosses=(
            "This looks like an ordinary message.",
            "This looks like an advertisement or a fraud.",
        ),
        licence="CC BY 4.0",
        source="SMS Spam Collection, Almeida and Hidalgo 2011, UCI Machine Learning Repository",
        linear_accuracy=0.981,
        share=0.07,
    ),
    LabelTask(
        name="sentiment",
        file="uci_sentences.jsonl",
        template="Review: {text}\nSentiment:",
        labels=(" negative", " positive"),
        chat_questions=(
            "Is this review positive or negative?\n{body}",
            "What is the sentiment of: {body}",
        ),
        answer="Sentiment:{label}. {gloss}",
        glosses=("The writer is not happy with it.", "The writer likes it."),
        licence="CC BY 4.0",
        source="Sentiment Labelled Sentences, Kotzias et al. 2015, UCI Machine Learning Repository",
        linear_accuracy=0.827,
        share=0.12,
        lender="goemotions",
        borrowed_labels=(
            *((label, " positive") for label in POSITIVE),
            *((label, " negative") for label in NEGATIVE),
        ),
    ),
    LabelTask(
        name="arxiv",
        file="arxiv_abstracts.jsonl",
        template="Abstract: {text}\nField:",
        labels=(
            " computing",
            " economics",
            " engineering",
            " mathematics",
            " physics",
            " biology",
            " finance",
            " statistics",
        ),
        chat_questions=(
            "Which field is this abstract from?\n{body}",
            "{body}\nWhat field of science is that?",
        ),
        answer="The field of this abstract is{label}.",
        licence="CC0 1.0",
        source="arXiv titles and abstracts (arXiv metadata)",
        linear_accuracy=0.763,
        share=0.05,
    ),
)


def raw_rows(path: Path) -> Iterator[dict[str, Any]]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def read_rows(task: LabelTask, data: Path, split: str) -> list[TaskRow]:
    """Read the rows of one split ("train" or "test") in file order, without outer white space."""
    rows = []
    for raw in raw_rows(data / "classification" / task.file):
        if len(raw["labels"]) != len(task.labels):
            raise ValueError(
                f"{task.file}: row {raw['id']} has {len(raw['labels'])} labels, "
                f"not {len(task.labels)}"
            )
        if raw["split"] == split:
            rows.append(
                TaskRow(raw.get("prefix") or "", raw["text"].strip(), raw["label"], raw["group"])
            )
    return rows


def borrowed_rows(task: LabelTask, rows: dict[str, list[TaskRow]]) -> list[TaskRow]:
    """Return rows of the lender of `task` with translated labels; none without a lender."""
    if not task.lender:
        return []
    lender = next(other for other in TASKS if other.name == task.lender)
    here = {lender.labels.index(a): task.labels.index(b) for a, b in task.borrowed_labels}
    return [
        TaskRow(row.prefix, row.text, here[row.label], row.group)
        for row in rows[lender.name]
        if row.label in here
    ]


def prompt_of(task: LabelTask, row: TaskRow) -> str:
    """Return the prompt of one row; one of `task.labels` follows it directly."""
    return task.template.format(prefix=row.prefix, text=row.text)


def chance_of(rows: list[TaskRow]) -> float:
    """Return the share (0..1) of the most frequent label."""
    counts: dict[int, int] = {}
    for row in rows:
        counts[row.label] = counts.get(row.label, 0) + 1
    return max(counts.values()) / len(rows)
