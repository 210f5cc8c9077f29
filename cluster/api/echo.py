"""`echo`: a prompt given back, with the log-probability of each of its tokens if wanted."""

from __future__ import annotations

from cluster.api.schemas import GenerationOptions
from cluster.api.session import Services
from cluster.text import Delta, ShownToken
from contracts.messages import Scored, Submit, TokenLogprob
from contracts.requests import Usage


async def echo(
    services: Services,
    text: str,
    token_ids: list[int],
    options: GenerationOptions,
    *,
    patient: bool,
) -> tuple[Delta, Usage]:
    """The prompt as a delta (ended, if nothing is to be generated), and what scoring it took.
    patient: as in `Backend.score`."""
    reason = "length" if options.max_tokens == 0 else None
    top = options.sampling.logprobs
    if top is None:
        return Delta(text, [], reason), Usage(prompt_tokens=len(token_ids))
    scored = await _score(services, token_ids, options, top, patient)
    logprobs = [None, *_token_logprobs(scored)]  # nothing comes before the first token
    detokenizer = services.tokenizer.detokenizer()
    tokens, offset = [], 0
    for token_id, logprob in zip(token_ids, logprobs, strict=True):
        tokens.append(ShownToken(token_id, offset, logprob))
        offset += len(detokenizer.push((token_id,)))
    return Delta(text, tokens, reason), scored.usage


async def _score(
    services: Services, token_ids: list[int], options: GenerationOptions, top: int, patient: bool
) -> Scored:
    if len(token_ids) == 1:
        return Scored(0, Usage(prompt_tokens=1), token_logprobs=[])
    return await services.backend.score(
        Submit(
            request_id=0,
            token_ids=token_ids,
            sampling=None,
            priority=options.priority,
            score_from=1,
            score_top=top,
        ),
        patient=patient,
    )


def _token_logprobs(scored: Scored) -> list[TokenLogprob]:
    values = scored.token_logprobs or []
    tops = scored.token_tops or [[] for _ in values]
    return [TokenLogprob(value, top) for value, top in zip(values, tops, strict=True)]
