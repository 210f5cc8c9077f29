"""From the hidden states after the last layer to answers: logits, sampling, scores, events."""

from __future__ import annotations

from typing import NamedTuple

import torch

from actors.sampler import sample, token_logprob
from actors.scheduler import Chunk
from actors.sequence import Sequence
from contracts.messages import Event, Finished, Scored, TokenLogprob, Tokens
from models.batch import AttentionBatch
from models.decoder import AttentionHalf

LOGIT_ROWS = 256  # logits are [rows, vocabulary] in fp32: bounded, however long an echoed prompt is


class _Wanted(NamedTuple):
    sequence: Sequence
    position: int
    row: int


class Finisher:
    """The executor's sink. `answers` collects (sequence, event) pairs; the worker takes them."""

    def __init__(self, half: AttentionHalf, *, max_context_tokens: int) -> None:
        self._half = half
        self._max_context_tokens = max_context_tokens
        self.answers: list[tuple[Sequence, Event]] = []

    def __call__(self, chunks: list[Chunk], batch: AttentionBatch, hidden_TD: torch.Tensor) -> None:
        wanted: list[_Wanted] = []
        for chunk, rows in zip(chunks, batch.sequences, strict=True):
            if not chunk.sequence.done:
                wanted.extend(
                    _Wanted(chunk.sequence, position, rows.first + position - rows.start)
                    for position in chunk.sequence.wanted_positions(chunk.start, chunk.stop)
                )
        for start in range(0, len(wanted), LOGIT_ROWS):
            piece = wanted[start : start + LOGIT_ROWS]
            rows_R = torch.tensor([item.row for item in piece], device=hidden_TD.device)
            self._answer(piece, self._half.logits(hidden_TD[rows_R]))

    def _answer(self, piece: list[_Wanted], logits_RV: torch.Tensor) -> None:
        generating: list[int] = []
        for row, (sequence, position, _) in enumerate(piece):
            last = position == len(sequence.token_ids) - 1
            if sequence.submit.score_from is not None and not last:
                token, wanted = sequence.token_ids[position + 1], sequence.submit.score_top
                sequence.scored.append(token_logprob(logits_RV[row], token, wanted))
            if last and sequence.submit.sampling is None:
                self._finish_scoring(sequence, logits_RV[row])
            elif last:
                generating.append(row)
        if generating:
            rows_RV = logits_RV if len(generating) == len(piece) else logits_RV[generating]
            self._generate([piece[row].sequence for row in generating], rows_RV)

    def _finish_scoring(self, sequence: Sequence, logits_V: torch.Tensor) -> None:
        candidates = sequence.submit.candidates
        logits = logprobs = None
        if candidates is not None:
            logits = logits_V[candidates].tolist()
            logprobs = logits_V.log_softmax(-1)[candidates].tolist()
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
        )
        self.answers.append((sequence, answer))

    def _generate(self, sequences: list[Sequence], logits_RV: torch.Tensor) -> None:
        tokens, logprobs = sample(logits_RV, sequences)
        for sequence, token, logprob in zip(sequences, tokens, logprobs, strict=True):
            self._append(sequence, token, logprob)

    def _append(self, sequence: Sequence, token: int, logprob: TokenLogprob | None) -> None:
        submit = sequence.submit
        assert submit.sampling is not None
        sequence.token_ids.append(token)
        request_id = submit.request_id
        logprobs = None if logprob is None else [logprob]
        cached_tokens = sequence.num_cached if sequence.generated == 1 else None
        event = Tokens(request_id, [token], logprobs, cached_tokens)
        self.answers.append((sequence, event))
        stopped = token in submit.eos_token_ids and not submit.sampling.ignore_eos
        full = (
            sequence.generated >= submit.sampling.max_tokens
            or len(sequence.token_ids) >= self._max_context_tokens
        )
        if stopped or full:
            sequence.done = True
            reason = "stop" if stopped else "length"
            self.answers.append((sequence, Finished(request_id, reason, sequence.usage())))
