"""Turns hidden states of the last layer into answers: logits, sampling, scores, events."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import NamedTuple

import torch

from actors.batching.batch_builder import Chunk
from actors.batching.sampler import MIN_LOGPROB, TokenSampler, not_finite, token_logprob
from actors.batching.sequence import Sequence, SequenceKey, logged_failure_reply
from contracts.errors import SamplingError
from contracts.messages import Event, Finished, Scored, TokenLogprob, Tokens
from kernels.steps import Steps
from models.decoder.batch import AttentionBatch
from models.decoder.decoder import AttentionHalf

LOGIT_ROWS = 256  # bounds the fp32 logits [rows, vocabulary] of a long echoed prompt


class _OutputRow(NamedTuple):
    sequence: Sequence
    position: int
    row: int

    @property
    def last(self) -> bool:
        return self.position == len(self.sequence.token_ids) - 1


class _PieceLogits(NamedTuple):
    """Results for all rows of a piece, indexed by the row in the piece."""

    logits_RV: torch.Tensor
    sampler: TokenSampler | None
    places: dict[int, int]  # in next_tokens
    scores: dict[int, tuple[list[float], list[float]]]  # logits and logprobs of the candidates


class Finisher:
    """The executor's sink. `answers` collects (sequence, event) pairs for the worker.

    An exception for a sequence ends that sequence only (actors/batching/sequence.py). So everything
    that several rows share is computed before any sequence changes, and is retried for each
    sequence alone if it raises.
    """

    def __init__(self, half: AttentionHalf, *, max_context_tokens: int) -> None:
        self._half = half
        self._max_context_tokens = max_context_tokens
        self.answers: list[tuple[Sequence, Event]] = []

    def __call__(
        self, chunks: list[Chunk], batch: AttentionBatch, hidden_TD: torch.Tensor
    ) -> Steps[None]:
        """Finish the chunks of a batch. A step is LOGIT_ROWS rows of logits."""
        requested: list[_OutputRow] = []
        for chunk, rows in zip(chunks, batch.sequences, strict=True):
            if not chunk.sequence.done:
                requested.extend(
                    _OutputRow(chunk.sequence, position, rows.first + position - rows.start)
                    for position in chunk.sequence.output_positions(chunk.start, chunk.stop)
                )
        for start in range(0, len(requested), LOGIT_ROWS):
            if start:
                yield  # not after the last piece: its answers are sent with the batch's end
            self._finish(requested[start : start + LOGIT_ROWS], hidden_TD)

    def _finish(self, piece: list[_OutputRow], hidden_TD: torch.Tensor) -> None:
        try:
            computed = self._compute(piece, hidden_TD)
        except Exception as error:  # noqa: BLE001 - retried for each sequence
            self._finish_each(piece, hidden_TD, error)
            return
        for row, item in enumerate(piece):
            if item.sequence.done:
                continue
            try:
                self._apply(item, row, computed)
            except Exception as error:  # noqa: BLE001 - ends this sequence only
                self._fail(item.sequence, error)
        matchers = [item.sequence.grammar for item in piece if not item.sequence.done]
        constrained = [matcher for matcher in matchers if matcher is not None]
        if constrained:
            constrained[0].owner.prepare_masks(constrained)

    def _finish_each(
        self, piece: list[_OutputRow], hidden_TD: torch.Tensor, error: Exception
    ) -> None:
        """Finish the rows of each sequence alone, after `error` for all of them."""
        rows_of: defaultdict[SequenceKey, list[_OutputRow]] = defaultdict(list)
        for item in piece:
            rows_of[item.sequence.key].append(item)
        if len(rows_of) == 1:
            self._fail(piece[0].sequence, error)
            return
        for rows in rows_of.values():
            self._finish(rows, hidden_TD)

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        sequence.done, sequence.failure = True, error
        failure = logged_failure_reply(sequence.submit, error, SamplingError)
        self.answers.append((sequence, failure))

    def _compute(self, piece: list[_OutputRow], hidden_TD: torch.Tensor) -> _PieceLogits:
        """Compute what the rows share, without changing the sequences."""
        logits_RV, best_R = self._half.row_logits(hidden_TD, [item.row for item in piece])
        generating: list[int] = []
        rows_of: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        for row, item in enumerate(piece):
            if item.last:
                submit = item.sequence.submit
                if submit.sampling is not None:
                    generating.append(row)
                elif submit.candidates is not None:
                    rows_of[tuple(submit.candidates)].append(row)
        scores: dict[int, tuple[list[float], list[float]]] = {}
        for candidates, rows in rows_of.items():  # equal within a bulk job
            pairs = _candidate_scores(_rows(logits_RV, rows), candidates)
            scores.update(zip(rows, pairs, strict=True))
        sampler = None
        if generating:
            sequences = [piece[row].sequence for row in generating]
            best = None if best_R is None else best_R[generating].tolist()
            sampler = TokenSampler(_rows(logits_RV, generating), sequences, best)
        places = {row: place for place, row in enumerate(generating)}
        return _PieceLogits(logits_RV, sampler, places, scores)

    def _apply(self, item: _OutputRow, row: int, computed: _PieceLogits) -> None:
        """Apply row `row` of the piece to its sequence."""
        sequence, submit = item.sequence, item.sequence.submit
        if not item.last:
            token, requested = sequence.token_ids[item.position + 1], submit.score_top
            sequence.scored.append(token_logprob(computed.logits_RV[row], token, requested))
        elif submit.sampling is None:
            self._score(sequence, *computed.scores.get(row, (None, None)))
        elif sequence.grammar is not None and sequence.grammar.is_complete:
            self._end(sequence, "stop")  # on the rank that was lost
        else:
            assert computed.sampler is not None
            token, logprob = computed.sampler.sample(computed.places[row], sequence)
            self._append(sequence, token, logprob)

    def _score(
        self, sequence: Sequence, logits: list[float] | None, logprobs: list[float] | None
    ) -> None:
        if logprobs is not None and math.isnan(sum(logprobs)):
            raise not_finite()
        scored = None if sequence.submit.score_from is None else sequence.scored
        tops = scored if sequence.submit.score_top else None
        sequence.done = True
        answer = Scored(
            sequence.submit.request_id,
            sequence.usage(),
            candidate_logits=logits,
            candidate_logprobs=logprobs,
            token_logprobs=None if scored is None else [token.logprob for token in scored],
            token_tops=None if tops is None else [token.top for token in tops],
            queued_s=sequence.queued_s,
        )
        self.answers.append((sequence, answer))

    def _append(self, sequence: Sequence, token: int, logprob: TokenLogprob | None) -> None:
        submit = sequence.submit
        assert submit.sampling is not None
        sequence.token_ids.append(token)
        request_id = submit.request_id
        logprobs = None if logprob is None else [logprob]
        cached_tokens = sequence.num_cached if sequence.generated == 1 else None
        queued_s = sequence.queued_s if sequence.generated == 1 else None
        event = Tokens(request_id, [token], logprobs, cached_tokens, queued_s)
        self.answers.append((sequence, event))
        stopped = token in sequence.end_token_ids or (
            sequence.logits_processor is not None
            and sequence.logits_processor.has_chosen(sequence.token_ids)
        )
        full = (
            sequence.generated >= submit.sampling.max_tokens
            or len(sequence.token_ids) >= self._max_context_tokens
        )
        if stopped or full:
            self._end(sequence, "stop" if stopped else "length")

    def _end(self, sequence: Sequence, reason: str) -> None:
        sequence.done = True
        finished = Finished(sequence.submit.request_id, reason, sequence.usage())
        self.answers.append((sequence, finished))


def _rows(logits_RV: torch.Tensor, rows: list[int]) -> torch.Tensor:
    return logits_RV if len(rows) == len(logits_RV) else logits_RV[rows]


def _candidate_scores(
    logits_RV: torch.Tensor, candidates: tuple[int, ...]
) -> list[tuple[list[float], list[float]]]:
    """Return logits and log-probabilities of the candidates per row, at least MIN_LOGPROB."""
    columns = torch.tensor(candidates, dtype=torch.int64, device=logits_RV.device)
    logits = logits_RV[:, columns].clamp_(min=MIN_LOGPROB).tolist()
    logprobs = logits_RV.log_softmax(-1)[:, columns].clamp_(min=MIN_LOGPROB).tolist()
    return list(zip(logits, logprobs, strict=True))
