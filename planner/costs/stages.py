"""Inputs of planning: stage times of one layer, and the limits of a batch.

FinDEP (Section 3.1) models every stage as alpha + beta * x. Here alpha and beta come from
measurements or from a hardware file.
"""

import math

import msgspec

MAX_MS = 1e9  # 11 days: larger times are unit errors, and sums of them would overflow
MAX_LAYERS = 10_000
MAX_SAMPLES = 1_000_000
MAX_TOKEN_GROUPS = 65_536
MAX_TOKENS_PER_EXPERT = 1e9
LEAST_ME = 1 - 1e-9  # tokens per expert of a token group: 1, and 49 * (1 / 49) counts as 1


class Linear(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A stage's time in ms: `alpha_ms` to start it, `beta_ms` per unit of x."""

    alpha_ms: float
    beta_ms: float

    def __post_init__(self) -> None:
        for name in ("alpha_ms", "beta_ms"):
            value = getattr(self, name)
            if not 0 <= value <= MAX_MS:  # false for NaN too
                raise ValueError(f"{name}={value}: give a time from 0 to {MAX_MS:g} ms")

    def at(self, x: float) -> float:
        return self.alpha_ms + self.beta_ms * x

    @property
    def is_free(self) -> bool:
        return self.alpha_ms == 0 and self.beta_ms == 0


FREE = Linear(0.0, 0.0)


class StageModels(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times of one layer's stages on one attention rank, its links and one expert rank.

    attention, shared: x is ma, the samples of a micro-batch. expert, a2e, e2a: x is me, the tokens
    per expert of a token group. `shared` is None for a model without shared experts.
    """

    attention: Linear
    expert: Linear
    a2e: Linear
    e2a: Linear
    shared: Linear | None = None

    def __post_init__(self) -> None:
        for name in ("attention", "expert"):
            if getattr(self, name).is_free:
                raise ValueError(
                    f"{name}: alpha_ms=0 and beta_ms=0: a stage that computes takes time"
                )

    def colocated_gain(self, samples: float, tokens_per_expert: float) -> float:
        """Return how many times faster one process passes a layer than two groups in turn."""
        computed_ms = self.attention.at(samples) + self.expert.at(tokens_per_expert)
        if self.shared is not None:
            computed_ms += self.shared.at(samples)
        sent_ms = self.a2e.at(tokens_per_expert) + self.e2a.at(tokens_per_expert)
        return (computed_ms + sent_ms) / computed_ms


class PlanSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One planning problem.

    tokens_per_expert_per_sample: ag*K*S/E, the tokens per expert of one sample on each attention
    rank (FinDEP's constraint `ma*ag*K*S = me*r2*E`). num_layers: T in the paper. max_samples: the
    most samples of one attention rank in memory at once, `r1*ma <= max_samples`. max_r2: the most
    token groups of a micro-batch.

    Beyond the paper; None excludes the schedules that need it. attention_quadratic_fraction: the
    fraction of `stages.attention.beta_ms` that is spent on pairs of tokens rather than per token.
    Each chunk of a sample but its first costs attention_chunk_ms to start it, and the fraction of
    attention_context_ms (the time to read all keys and values of a sample) that lies before its
    end.
    """

    stages: StageModels
    tokens_per_expert_per_sample: float
    num_layers: int
    max_samples: int
    max_r2: int
    has_shared: bool
    attention_quadratic_fraction: float | None = None
    attention_chunk_ms: float = 0.0
    attention_context_ms: float = 0.0

    def __post_init__(self) -> None:
        _check_whole("num_layers", self.num_layers, MAX_LAYERS)
        _check_whole("max_samples", self.max_samples, MAX_SAMPLES)
        _check_whole("max_r2", self.max_r2, MAX_TOKEN_GROUPS)
        if self.has_shared and self.stages.shared is None:
            raise ValueError("stages.shared is missing: give it, or set has_shared to false")
        fraction = self.attention_quadratic_fraction
        if fraction is not None and not 0 <= fraction <= 1:
            raise ValueError(f"attention_quadratic_fraction={fraction}: give a number from 0 to 1")
        for name in ("attention_chunk_ms", "attention_context_ms"):
            if not 0 <= getattr(self, name) <= MAX_MS:
                raise ValueError(
                    f"{name}={getattr(self, name)}: give a time from 0 to {MAX_MS:g} ms"
                )
        self._check_tokens()

    def _check_tokens(self) -> None:
        tokens = self.tokens_per_expert_per_sample
        if not 0 < tokens <= MAX_TOKENS_PER_EXPERT:
            raise ValueError(
                f"tokens_per_expert_per_sample={tokens}: "
                f"give a number above 0, at most {MAX_TOKENS_PER_EXPERT:g}"
            )
        if self.max_samples * tokens < LEAST_ME:
            raise ValueError(
                f"max_samples={self.max_samples} with tokens_per_expert_per_sample={tokens} is "
                f"{self.max_samples * tokens:g} tokens per expert, and at least 1 is needed: "
                f"raise max_samples to {math.ceil(1 / tokens)}"
            )

    @property
    def shared(self) -> Linear:
        """The shared experts' model; FREE without shared experts."""
        shared = self.stages.shared
        return shared if self.has_shared and shared is not None else FREE

    def me(self, ma: float, r2: int) -> float:
        """Return the mean tokens per expert of a token group (FinDEP Eq. 5, last line)."""
        return ma * self.tokens_per_expert_per_sample / r2


def _check_whole(name: str, value: int, most: int) -> None:
    if not 1 <= value <= most:
        raise ValueError(f"{name}={value}: give a whole number from 1 to {most}")
