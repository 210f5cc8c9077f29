"""From the hidden states after the last layer to answers: logits, sampling, scores, events."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import torch

from actors.sampler import sample, token_logprob
from actors.scheduled_batch import Chunk
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
        scoring: dict[int, Sequence] = {}
        for row, (sequence, position, _) in enumerate(piece):
            last = position == len(sequence.token_ids) - 1
            if sequence.submit.score_from is not None and not last:
                token, wanted = sequence.token_ids[position + 1], sequence.submit.score_top
                sequence.scored.append(token_logprob(logits_RV[row], token, wanted))
            if last and sequence.submit.sampling is None:
                scoring[row] = sequence
            elif last:
                generating.append(row)
        self._finish_scoring(scoring, logits_RV)
        if generating:
            rows_RV = logits_RV if len(generating) == len(piece) else logits_RV[generating]
            self._generate([piece[row].sequence for row in generating], rows_RV)

    def _finish_scoring(self, sequences: dict[int, Sequence], logits_RV: torch.Tensor) -> None:
        """sequences: by row. Those with the same candidates, as a job's are, together."""
        rows_of: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        for row, sequence in sequences.items():
            if sequence.submit.candidates is None:
                self._score(sequence, None, None)
            else:
                rows_of[tuple(sequence.submit.candidates)].append(row)
        for candidates, rows in rows_of.items():
            columns = torch.tensor(candidates, dtype=torch.int64, device=logits_RV.device)
            chosen_RV = logits_RV if len(rows) == len(logits_RV) else logits_RV[rows]
            logits = chosen_RV[:, columns].tolist()
            logprobs = chosen_RV.log_softmax(-1)[:, columns].tolist()
            for place, row in enumerate(rows):
                self._score(sequences[row], logits[place], logprobs[place])

    def _score(
        self, sequence: Sequence, logits: list[float] | None, logprobs: list[float] | None
    ) -> None:
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
