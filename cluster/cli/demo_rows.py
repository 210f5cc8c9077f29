"""What the demo sends: rows written for it, in the forms the bundled checkpoint has learned."""

from __future__ import annotations

from typing import NamedTuple


class DemoTask(NamedTuple):
    """Rows of one task of `models/bundled/tasks.json`, each with what a person would say."""

    task: str
    rows: list[tuple[str, str]]


TASKS = [
    DemoTask(
        "toxicity",
        [
            ("Thanks for taking the time to explain this, it really helped.", " no"),
            ("You are a pathetic idiot and everyone here hates you.", " yes"),
        ],
    ),
    DemoTask(
        "sms_spam",
        [
            ("Running ten minutes late, order me a coffee please?", " no"),
            ("WINNER! Claim your free 1000 pound prize now, call 09061701461.", " yes"),
        ],
    ),
    DemoTask(
        "sentiment",
        [
            ("The sound is crisp and the battery lasts all week, great buy.", " positive"),
            ("Terrible. It broke after two days and support never answered.", " negative"),
        ],
    ),
    DemoTask(
        "banking77",
        [
            ("My new card still has not come in the post, where is it?", " card_arrival"),
            ("Which exchange rate do you use when I pay in dollars?", " exchange_rate"),
        ],
    ),
    DemoTask(
        "goemotions",
        [
            ("Thank you so much, this made my whole week!", " gratitude"),
            ("I love this song so much.", " love"),
        ],
    ),
    DemoTask(
        "arxiv",
        [
            (
                "We prove that every compact Kähler manifold with vanishing first Chern class "
                "admits a finite cover that splits as a product.",
                " mathematics",
            ),
        ],
    ),
]


class DemoChat(NamedTuple):
    priority: str
    question: str


CHATS = [
    DemoChat("be", "Is this message spam?\nYou have won a free phone! Call now to claim it."),
    DemoChat("be", "What does this bank customer want?\nMy card was swallowed by the machine."),
    DemoChat("ls", "What emotion does this post show?\nThank you so much, you made my day!"),
    DemoChat("ls", "Is this review positive or negative?\nThe battery died after two days."),
    DemoChat("ls", "Who are you?"),
]
