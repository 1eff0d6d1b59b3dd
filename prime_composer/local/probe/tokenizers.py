"""Measure what one pass of a teacher with a tokenizer of its own says of the student's tokens."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn

from prime_composer.backends.protocols import Rollout
from prime_composer.contract import Scores, Support, given
from prime_composer.cross_tokenizer.finish import NEVER
from prime_composer.cross_tokenizer.plan import Plan, plan_of
from prime_composer.cross_tokenizer.reference import Reference
from prime_composer.cross_tokenizer.sums import Candidates, Sums
from prime_composer.divergences import reverse_kl
from prime_composer.local.probe.report import BruteForce, NotMeasured, TokenizerPairFacts
from prime_composer.step.batch import Sample, with_scores
from prime_composer.step.student_forward import student_inputs
from prime_composer.teachers.own_tokenizer import READ, WHOLE_UP_TO, OwnTokenizerScorer, dense

OFF_PATH = 0.05
"""Share of the mass that other tokenizations of the text before may have, to be counted."""

SHOWN = 60
"""Characters of each prompt's end."""

SHOWN_TOKENS = 3

THRESHOLD = 1e-4
"""Share of the mass up to which brute force does not follow a text."""

SEED = 0
"""Of the positions that are compared with brute force."""


@dataclass(frozen=True, eq=False)
class Reading:
    """A rollout, what the teacher says of it, and the scores made of that."""

    sample: Sample  # the rollout with its problem
    plan: Plan  # how it is read
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
    model: nn.Module,
    k: int,
    references: int,
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
        brute_force=brute_force(scorer, readings, model, references) if references else None,
    )


def readings_of(
    scorer: OwnTokenizerScorer, samples: Sequence[Sample], scored: Sequence[Scores]
) -> list[Reading]:
    """Return what the teacher says of each rollout, in its own tokens too."""
    pair, sums = scorer.pair, Sums(scorer.pair)
    size = scorer.scorer.limits.vocab_size or len(pair.teacher.of_id)
    rollouts = [sample.rollout for sample in samples]
    read = scorer.scorer.score(scorer.readings(rollouts), size if size <= WHOLE_UP_TO else READ)
    found = []
    for sample, scores, own in zip(samples, scored, read, strict=True):
        plan = plan_of(pair, sample.rollout.token_ids[sample.rollout.start :].tolist())
        rows = dense(own, plan, max(size, len(pair.teacher.of_id)))
        candidates = sums.candidates(rows, plan, len(pair.student.of_id))
        if len(candidates.total):
            found.append(Reading(sample, plan, rows, candidates, scores))
    if not found:
        raise NotMeasured("no token of the rollouts has a score")
    return found


def openness(
    scorer: OwnTokenizerScorer, readings: Sequence[Reading]
) -> tuple[float, int, list[str]]:
    """Return the teacher's mass on closed tokens, the number of open ones, and the most frequent.

    That is where both begin a token, before a row of the teacher refines the rollout's own.
    """
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


def brute_force(
    scorer: OwnTokenizerScorer, readings: Sequence[Reading], model: nn.Module, count: int
) -> BruteForce:
    """Compare some positions with a search through the teacher's texts (``Reference``)."""
    places = [
        (reading, at)
        for reading in readings
        for at, position in enumerate(reading.plan.positions)
        if position is not None and position.canonical and is_scored(reading.scores, at)
    ]
    errors, differences, sequences, pruned = [], [], 0, []
    supports: dict[Reading, Support | None] = {}
    for reading, at in random.Random(SEED).sample(places, min(count, len(places))):
        rollout = reading.sample.rollout
        ids = rollout.token_ids[rollout.start :].tolist()
        prompt = scorer.prompts(rollout.token_ids[: rollout.start].tolist())
        asked = AskedRows(scorer, prompt)
        exact = Reference(scorer.pair, asked, THRESHOLD).target(ids, at)
        sequences += asked.count
        if exact is None:
            continue
        own = log_q(exact.q, ids[at])
        errors.append(abs(float(reading.scores.ref_logprobs[at]) - own))
        if reading not in supports:
            supports[reading] = support_of(reading, model)
        differences.append(kl_difference(reading, at, exact.q, supports[reading]))
        pruned.append(exact.pruned)
    if not errors:
        raise NotMeasured("no text of the teacher leads to a position of the rollouts")
    return BruteForce(
        positions=len(errors),
        mean=float(np.mean(errors)),
        largest=float(np.max(errors)),
        reverse_kl=float(np.mean(differences)),
        pruned=float(np.mean(pruned)),
        sequences=sequences,
    )


def log_q(exact: Mapping[int, float], token: int) -> float:
    """Return log Q of a token by brute force, floored as one pass of the teacher floors it."""
    return max(math.log(exact.get(token) or 1e-300), NEVER)


def is_scored(scores: Scores, at: int) -> bool:
    return scores.scored is None or bool(scores.scored[at])


class AskedRows:
    """Rows of a teacher after sequences of its own tokens, from its scorer; each is asked once."""

    def __init__(self, scorer: OwnTokenizerScorer, prompt: Sequence[int]):
        self.scorer, self.prompt = scorer.scorer, [*prompt]
        self.end = scorer.pair.teacher_ends[0]
        self.size = self.scorer.limits.vocab_size or len(scorer.pair.teacher.of_id)
        self.read = min(self.size, self.scorer.limits.max_logprobs or WHOLE_UP_TO)
        self.rows: dict[tuple[int, ...], NDArray[np.float32]] = {}
        self.width = len(scorer.pair.teacher.of_id)

    @property
    def count(self) -> int:
        """Sequences that were asked for."""
        return len(self.rows)

    def __call__(self, sequences: Sequence[tuple[int, ...]]) -> list[NDArray[np.float32]]:
        """Return the row after each sequence."""
        new = [sequence for sequence in dict.fromkeys(sequences) if sequence not in self.rows]
        rollouts = [
            Rollout.not_sampled(
                torch.tensor([*self.prompt, *sequence, self.end]),
                len(self.prompt) + len(sequence),
                "stop",
            )
            for sequence in new
        ]
        if rollouts:
            answers = self.scorer.score(rollouts, self.read)
            for sequence, scores in zip(new, answers, strict=True):
                row = np.zeros(max(self.width, self.size), dtype=np.float32)
                row[scores.token_ids[0].numpy()] = scores.teacher_logprobs[0].float().exp().numpy()
                self.rows[sequence] = row
        return [self.rows[sequence] for sequence in sequences]


@torch.no_grad()
def support_of(reading: Reading, model: nn.Module) -> Support | None:
    """Return student and teacher on the supports of a rollout's tokens with a score, None at k = 0.

    One pass of the student.
    """
    inputs = student_inputs(model, [given(with_scores(reading.sample, reading.scores))])
    return None if inputs.support is None else inputs.support.masked(inputs.loss_mask)


def kl_difference(
    reading: Reading, at: int, exact: dict[int, float], support: Support | None
) -> float:
    """Return by how much the reverse KL on a support is above that with the exact Q, in nats."""
    if support is None:
        return 0.0
    row = sum(is_scored(reading.scores, before) for before in range(at))
    known = reading.scores.all_known[at]
    ids = reading.scores.token_ids[at][known].tolist()
    p = support.student_logprobs[row][known].double()[None]
    q = support.teacher_logprobs[row][known].double()[None]
    true = torch.tensor([[log_q(exact, token) for token in ids]], dtype=torch.float64)
    one, other = (float(reverse_kl(p, logs, normalization="tail")) for logs in (q, true))
    return one - other
