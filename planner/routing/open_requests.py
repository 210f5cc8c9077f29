"""Open requests of one worker and their remaining work (MoE-Prefill, Eq. 2)."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from contracts.requests import Priority
from contracts.routing_messages import OpenRequest, Prompt, RequestKey
from planner.costs.model_shape import ModelShape, causal_pairs, chunk_work

RequestWork = Callable[[int, int], int]
"""(done_tokens, prompt_tokens) → work of the tokens in between, in FLOPs or tokens."""


def token_work(done_tokens: int, prompt_tokens: int) -> int:
    """Return the number of tokens: the unit for a model without FLOP counts."""
    return prompt_tokens - done_tokens


def work_of(shape: ModelShape | None) -> RequestWork:
    """Return work in FLOPs, or in tokens without a shape."""
    return token_work if shape is None else flops_work(shape)


def flops_work(shape: ModelShape) -> RequestWork:
    """Return FLOPs of new tokens [done, prompt) of one sequence in all layers.

    Projections, router, top-k and shared experts, dense layers, and attention to all tokens before;
    without norms and logits.
    """
    per_token = _linear_flops_per_token(shape)
    windows = Counter(shape.windows)
    windows[None] += shape.num_layers - shape.moe_layers  # dense layers see everything
    if shape.latent is not None:
        return _latent_work(shape, per_token)
    pair_flops = 4 * shape.num_heads * shape.head_dim
    layers = [(window, count * pair_flops) for window, count in windows.items() if count]

    def flops(done_tokens: int, prompt_tokens: int) -> int:
        total = per_token * (prompt_tokens - done_tokens)
        for window, flops_per_pair in layers:
            pairs = causal_pairs(prompt_tokens, window) - causal_pairs(done_tokens, window)
            total += flops_per_pair * pairs
        return total

    return flops


def _linear_flops_per_token(shape: ModelShape) -> int:
    router = shape.hidden_size * shape.num_experts
    experts = shape.top_k * shape.expert_elements + shape.shared_elements
    elements = (
        shape.num_layers * shape.projection_elements
        + shape.moe_layers * (router + experts)
        + shape.dense_elements
    )
    return 2 * elements


def _latent_work(shape: ModelShape, per_token: int) -> RequestWork:
    """Return the work of latent attention, expanded or absorbed, whichever is cheaper."""
    counted_once = 2 * (
        shape.projection_elements + shape.hidden_size * shape.num_experts
    )  # the part of `chunk_work`'s linear FLOPs that `per_token` includes

    def flops(done_tokens: int, prompt_tokens: int) -> int:
        tokens = prompt_tokens - done_tokens
        if tokens == 0:
            return 0
        layer = chunk_work(shape, done_tokens, prompt_tokens, None)
        attention = layer.attended_flops + layer.linear_flops - tokens * counted_once
        return per_token * tokens + shape.num_layers * round(attention)

    return flops


class _Open(NamedTuple):
    request: OpenRequest
    remaining: int
    in_progress: int


class RequestTotals:
    """Sums over open requests.

    load    = Σ work(done, prompt)
    queued  = load − Σ work(done, until)   of requests in a running batch
    """

    __slots__ = ("load", "queued")

    def __init__(self) -> None:
        self.load = self.queued = 0


class OpenRequests:
    """Open requests of one worker; each stores its share of the totals, so they cannot drift."""

    def __init__(self, work: RequestWork) -> None:
        self._totals = {priority: RequestTotals() for priority in Priority}
        self._work = work
        self._requests: dict[RequestKey, _Open] = {}

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._requests

    def __iter__(self) -> Iterator[RequestKey]:
        return iter(self._requests)

    def visible_to(self, priority: Priority) -> RequestTotals:
        """Return the totals that a request of that class waits for; LS ignores BE work."""
        return self._totals[priority]

    def remaining(self, key: RequestKey) -> int:
        return self._entry(key).remaining

    def entries(self) -> Iterator[OpenRequest]:
        """Return the requests in order of arrival; `add` rebuilds the state from them."""
        return (entry.request for entry in self._requests.values())

    def prompts(self) -> list[Prompt]:
        return [entry.request.prompt for entry in self._requests.values()]

    def open(self, prompt: Prompt, done_tokens: int) -> None:
        """Add a request of which `done_tokens` are expected to be cached."""
        self.add(OpenRequest(prompt, done_tokens, False))

    def add(self, request: OpenRequest) -> None:
        key = request.prompt.key
        if key in self._requests:
            raise ValueError(f"request {tuple(key)} is already open on this worker")
        self._put(request)

    def advance(self, key: RequestKey, done_tokens: int, until_tokens: int = 0) -> None:
        """Set the tokens that are done, and the end of what a running batch computes."""
        entry = self._entry(key)
        prompt = entry.request.prompt
        if max(done_tokens, until_tokens) > prompt.prompt_tokens:
            raise ValueError(
                f"request {tuple(key)}: done_tokens={done_tokens}, until_tokens={until_tokens} of "
                f"a prompt of {prompt.prompt_tokens} tokens"
            )
        self._count(entry, -1)
        self._put(OpenRequest(prompt, done_tokens, True, until_tokens))

    def close(self, key: RequestKey) -> Prompt:
        """Remove an ended request."""
        entry = self._entry(key)
        self._count(entry, -1)
        del self._requests[key]
        return entry.request.prompt

    def _put(self, request: OpenRequest) -> None:
        done, until = request.done_tokens, request.until_tokens
        remaining = self._work(done, request.prompt.prompt_tokens)
        in_progress = self._work(done, until) if until > done else 0
        entry = self._requests[request.prompt.key] = _Open(request, remaining, in_progress)
        self._count(entry, 1)

    def _entry(self, key: RequestKey) -> _Open:
        entry = self._requests.get(key)
        if entry is None:
            raise ValueError(f"request {tuple(key)} is not open on this worker")
        return entry

    def _count(self, entry: _Open, sign: int) -> None:
        for priority, totals in self._totals.items():
            if entry.request.prompt.priority <= priority:
                totals.load += sign * entry.remaining
                totals.queued += sign * (entry.remaining - entry.in_progress)
