"""Measure a teacher's server by its URL alone, before there is a recipe."""

from collections.abc import Iterator

import torch

from prime_composer.backends.protocols import Rollout
from prime_composer.local.preflight import CheckResult, one_line
from prime_composer.local.probe.report import (
    Attempts,
    ModelFacts,
    ProbeReport,
    SupportSize,
    TeacherReport,
)
from prime_composer.local.probe.teacher import (
    Target,
    is_bfloat16_like,
    measure_column,
    plugin_report,
    recommendations,
)
from prime_composer.problems.config import Problem
from prime_composer.recipe.urls import public_url
from prime_composer.step.batch import Sample
from prime_composer.teachers.client import OWN_TOKENS
from prime_composer.teachers.compatibility import PROBES, OwnLogprobs, check_own_scores
from prime_composer.teachers.server import ServerScorer

COLUMNS: tuple[SupportSize, ...] = (1, 32, "states")

SEQUENCES, TOKENS = 32, 512  # That speeds are measured on, at most

PLAIN_IDS = range(1, 65)  # Of the sequences, where a server does not say how it reads a text


def probe_server(scorer: ServerScorer, url: str, seconds: float) -> ProbeReport:
    """Measure a server, each column for ``seconds``. A failure is a result."""
    found, window = Attempts(), scorer.limits.max_model_len or TOKENS
    plugin = plugin_report(found, scorer)
    facts = ModelFacts(
        model=scorer.model,
        backend="server",
        dtype=scorer.dtype,
        url=public_url(url),
        context=scorer.limits.max_model_len,
        vocabulary=scorer.limits.vocab_size,
    )
    samples = samples_of(scorer, min(TOKENS, window - 1))
    target = Target("teacher", facts, scorer, samples, 1.0, lambda: None)
    speeds = [measure_column(found, target, column, seconds, 0) for column in COLUMNS]
    top = found.attempt("output head", lambda: target.score(samples[:1], 4))
    prompt = samples[0].rollout.token_ids[: max(1, window - 1 - OWN_TOKENS)].tolist()
    own = found.attempt("own scores", lambda: scorer.own_logprobs(prompt))
    own = own or found.unmeasured["own scores"]
    report = TeacherReport(
        facts=facts,
        head_dtype=scorer.head_dtype,
        head_bfloat16=None if top is None else is_bfloat16_like(top[0].teacher_logprobs),
        plugin=plugin,
        max_logprobs=found.attempt("max logprobs", scorer.largest_k),
        sampled_logprob=None if isinstance(own, str) else float(own.sampled.mean()),
        scored_logprob=None if isinstance(own, str) else float(own.scored.mean()),
        throughput=speeds,
        wrong_answers=found.wrong_answers,
        unmeasured=found.unmeasured,
    )
    findings = list(findings_of(own, report))
    advice = [*recommendations(COLUMNS[-1], report)]
    return ProbeReport(findings, advice, teachers={"teacher": report})


def samples_of(scorer: ServerScorer, length: int) -> list[Sample]:
    """Return sequences of so many tokens, no two of which begin alike."""
    ids = [one for text in PROBES for one in scorer.tokenize(text) or ()] or [*PLAIN_IDS]
    ids = ids * (1 + (length + SEQUENCES) // len(ids))
    sequences = [torch.tensor(ids[at : at + length]) for at in range(SEQUENCES)]
    return [Sample(Rollout.not_sampled(one, 1, "length"), Problem("", "")) for one in sequences]


def findings_of(own: OwnLogprobs | str, report: TeacherReport) -> Iterator[CheckResult]:
    """Yield whether the server's answers may be true ones."""
    wrong = report.wrong_answers
    yield CheckResult("answers", "failed" if wrong else "ok", wrong[0] if wrong else "")
    name = "scores of what it samples"
    try:
        not_compared = check_own_scores(own)
    except ValueError as error:
        yield CheckResult(name, "failed", one_line(error))
    else:
        yield CheckResult(name, "skipped" if not_compared else "ok", not_compared)
