"""Measure what one pass of a teacher with a tokenizer of its own says of the student's tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from prime_composer.contract import Scores
from prime_composer.cross_tokenizer.plan import ReadingPlan, plan_of
from prime_composer.cross_tokenizer.sums import Candidates, Sums
from prime_composer.local.probe.report import NotMeasured, TokenizerPairFacts
from prime_composer.step.batch import Sample
from prime_composer.teachers.own_tokenizer import OwnTokenizerScorer, dense

OFF_PATH = 0.05  # Mass on other tokenizations of the text before, to be counted

SHOWN = 60  # Characters of each prompt's end

SHOWN_TOKENS = 3


@dataclass(frozen=True, eq=False)
class Reading:
    """A rollout, what the teacher says of it, and the scores made of that."""

    sample: Sample  # the rollout with its problem
    plan: ReadingPlan  # how it is read
    rows: Float[Tensor, "rows vocab"]  # the teacher's, as far as they were read, [rows, V_T]
    candidates: Candidates  # masses of all student tokens at the positions with a score
    scores: Scores  # of the student's tokens, at K

    @property
    def whole(self) -> Float[Tensor, " n"]:
        """Mass that Q is normalized by at each position, before refinement."""
        return self.candidates.total + self.candidates.end + self.candidates.nobody


def pair_facts(
    scorer: OwnTokenizerScorer,
    samples: Sequence[Sample],
    student: Any,
    teacher: Any,
    k: int,
) -> TokenizerPairFacts:
    """Return what a teacher with a tokenizer of its own says of the student's rollouts."""
    scorer.take_metrics()
    scored = scorer.score([sample.rollout for sample in samples], k)
    metrics = scorer.take_metrics()
    readings = readings_of(scorer, samples, scored)
    rollout = samples[0].rollout
    prompt = rollout.token_ids[: rollout.start].tolist()
    closed, count, often = openness(scorer, readings)
    masses = [support_masses(reading, k) for reading in readings]
    chosen, best = (float(torch.cat(parts).mean()) for parts in zip(*masses, strict=True))
    bounds = torch.cat([one.candidates.off_path / one.whole for one in readings])
    return TokenizerPairFacts(
        positions=sum(len(reading.plan.positions) for reading in readings),
        aligned=metrics["xtok/aligned"],
        teacher_tokens=metrics["xtok/teacher_tokens"],
        closed_mass=closed,
        open_tokens=count,
        often_open=often,
        k=k,
        support_mass=chosen,
        best_mass=best,
        noncanonical=metrics["xtok/noncanonical"],
        unscored=metrics["xtok/unscored"],
        off_path=float((bounds > OFF_PATH).double().mean()),
        student_prompt=student.decode(prompt)[-SHOWN:],
        teacher_prompt=teacher.decode(scorer.prompts(prompt))[-SHOWN:],
    )


def readings_of(
    scorer: OwnTokenizerScorer, samples: Sequence[Sample], scored: Sequence[Scores]
) -> list[Reading]:
    """Return what the teacher says of each rollout, in its own tokens too."""
    pair, sums = scorer.pair, Sums(scorer.pair)
    rollouts = [sample.rollout for sample in samples]
    read = scorer.scorer.score(scorer.readings(rollouts), scorer.ids_read)
    found = []
    for sample, scores, own in zip(samples, scored, read, strict=True):
        plan = plan_of(pair, sample.rollout.token_ids[sample.rollout.start :].tolist())
        rows = dense(own, plan, max(scorer.size, len(pair.teacher.of_id)))
        candidates = sums.candidates(rows, plan, len(pair.student.of_id))
        if len(candidates.total):
            found.append(Reading(sample, plan, rows, candidates, scores))
    if not found:
        raise NotMeasured("no token of the rollouts has a score")
    return found


def openness(
    scorer: OwnTokenizerScorer, readings: Sequence[Reading]
) -> tuple[float, int, list[str]]:
    """Return the teacher's mass on closed tokens, the number of open ones, the most frequent."""
    pair = scorer.pair
    order = torch.from_numpy(pair.tables.order)
    is_open = torch.from_numpy(pair.tables.open[pair.tables.start[pair.tables.order]])
    aligned = [
        reading.rows[position.row]
        for reading in readings
        for position in reading.plan.positions
        if position is not None and position.aligned
    ]
    if not aligned:
        raise NotMeasured("no token of the student begins where one of the teacher does")
    mass = torch.stack(aligned).double().mean(0)[order]
    often = torch.where(is_open, mass, 0.0).topk(min(SHOWN_TOKENS, len(mass))).indices
    shown = [pair.contents[at].decode(errors="replace") for at in often.tolist() if is_open[at]]
    return float(mass[~is_open].sum() / mass.sum()), int(is_open.sum()), shown


def support_masses(reading: Reading, k: int) -> tuple[Tensor, Tensor]:
    """Return the mass of each support, and that of the K student tokens with most mass."""
    scores = reading.scores
    given_scored = torch.tensor([position is not None for position in reading.plan.positions])
    known = scores.all_known[given_scored]
    chosen = torch.where(known, scores.teacher_logprobs[given_scored].exp(), 0.0).sum(-1)
    candidates = reading.candidates
    mass = candidates.closed + candidates.open
    both = torch.cat([mass, candidates.end[:, None]], -1) / reading.whole[:, None]
    return chosen, both.topk(min(k, both.shape[1]), dim=-1).values.sum(-1)
