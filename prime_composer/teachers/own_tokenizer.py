"""A teacher with a tokenizer of its own: it reads its own prompt and the rollout's text.

Its rows become scores of the student's tokens (``cross_tokenizer``), so that everybody else sees a
teacher with the student's tokenizer. In front of any scorer: transformers, vLLM, a server.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from prime_composer.backends.protocols import Limits, Rollout, Sampler, SamplingParams, Scorer
from prime_composer.contract import Scores
from prime_composer.cross_tokenizer.finish import Totals, means, token_scores
from prime_composer.cross_tokenizer.pair import TokenizerPair
from prime_composer.cross_tokenizer.plan import ReadingPlan, plan_of
from prime_composer.cross_tokenizer.sums import Sums
from prime_composer.cross_tokenizer.teacher_rows import TeacherRows
from prime_composer.losses import LossConfig
from prime_composer.problems.config import Problem
from prime_composer.problems.loading import ProblemSet
from prime_composer.recipe.teacher import TeacherPromptConfig
from prime_composer.step.overflow import Rule
from prime_composer.teachers.compatibility import (
    LimitedServer,
    PreflightError,
    TokenizingServer,
    check_served_tokenizer,
)
from prime_composer.teachers.own_prompt import (
    PLAIN,
    OwnPromptSampler,
    OwnPromptScorer,
    StudentAnswer,
    TeacherPrompts,
    all_joined,
)
from prime_composer.teachers.tape.scorer import live_of
from prime_composer.teachers.tokenizer_pair import (
    LONGER,
    PromptsAndTexts,
    aligned_share,
    ends_of,
    lead_of,
    make_pair,
    own_tokenizer_of,
)
from prime_composer.teachers.watch import COMPARED_IDS, KnownRequest

WHOLE_UP_TO = 4096
"""Entries of a teacher's vocabulary up to which all of a row is read."""

READ = 256
"""Entries of a row that are read of a larger vocabulary, the most probable ones."""

ALIGNED = 0.97
"""Share of the student's tokens that have to begin where one of the teacher's does. Of the others
these ids say too little (losses/another_tokenizer.md)."""

JUDGED_TOKENS = 4096
"""Tokens of a student's first turns on which that share is counted inside prime-rl."""

FEWEST_CANDIDATES = 64
"""Student tokens at least among which a support is chosen."""


def with_own_tokenizer(
    scorer: Scorer,
    model: str | Path,
    problem_set: ProblemSet,
    student: Any,
    student_prompt: Callable[[Problem], Sequence[int]],
    loss: LossConfig,
    vocab_size: int,
    table: str,
    scored: Sequence[Problem],
    student_end: int | None = None,
    asks: TeacherPromptConfig = PLAIN,
) -> "OwnTokenizerScorer":
    """Let a teacher with a tokenizer of its own, that of ``model``, score the student's tokens.

    ``scored`` are the problems whose rollouts it scores. ``student_end`` is the student's id that
    ends an answer; None takes its tokenizer's. ``asks`` says what of its prompts is its own.
    """
    tokenizer = own_tokenizer_of(model, table)
    prompts = PromptsAndTexts(student, problem_set, tokenizer, student_prompt, table, asks)
    sizes = scorer.limits.vocab_size or 0, vocab_size
    own_lead = lead_of(prompts.tokenizer, problem_set, table, prompts.config_of)
    leads = own_lead, lead_of(student, problem_set, table)
    ends = ends_of(model) or ()
    pair = make_pair(tokenizer, student, ends, prompts.texts(), table, sizes, leads, student_end)
    aligned = aligned_share(pair, prompts.written(scored))
    parts = [part for part, _ in loss.needs_by_section().values()]
    fixed = any(part.needs_fixed_support for part in parts)
    return OwnTokenizerScorer(
        scorer, pair, prompts, vocab_size, fixed=fixed, table=table, aligned=aligned
    )


class OwnTokenizerScorer(OwnPromptScorer):
    """Scores of the student's tokens by a teacher with a tokenizer of its own.

    A support has the sampled token, then the most probable ids whose probability one pass of the
    teacher resolves; other columns are not known. A token of which the teacher has no probability
    is not ``scored``. Where ``fixed``, supports must not depend on the sampled token. ``aligned``
    is ``aligned_share`` of the run's own texts.
    """

    def __init__(
        self,
        scorer: Scorer,
        pair: TokenizerPair,
        prompts: PromptsAndTexts,
        vocab_size: int,
        *,
        fixed: bool = False,
        table: str = "teacher",
        aligned: float = 1.0,
    ):
        super().__init__(scorer, prompts)
        self.prompts: PromptsAndTexts = prompts
        self.pair, self._aligned = pair, aligned
        self._vocab_size, self._table = vocab_size, table
        self._by_rows = ByRows(pair, fixed=fixed)
        self._totals = Counter[str]()

    @property
    def limits(self) -> Limits:
        """Those of the student's vocabulary. Lengths are the teacher's, in its own tokens."""
        return Limits(vocab_size=self._vocab_size, max_logprobs=self._vocab_size)

    @property
    def gives_any_ids(self) -> bool:
        """No: some ids are not resolved."""
        return False

    def reading(self, sampler: Sampler) -> Sampler:
        """Return the teacher's sampler, whose answers are encoded for the student."""
        return OwnTokenizerSampler(sampler, self.pair, self.prompts)

    def score(
        self,
        rollouts: Sequence[Rollout],
        support_size: int | Literal["full"],
        prompts: Sequence[Sequence[int]] | None = None,
        *,
        candidate_ids: Sequence[Int[Tensor, "_ _k"]] | None = None,
        hidden: bool = False,
    ) -> list[Scores]:
        """Score as ``protocols.Scorer`` says, K ids at most."""
        if support_size == "full" or candidate_ids is not None or hidden or prompts is not None:
            raise ValueError(
                'a teacher with tokenizer = "own" scores top-K supports of its own choice under '
                "its own prompt; set k to a number and chosen_by to 'teacher'"
            )
        by_rollout = [self.pieces(rollout) for rollout in rollouts]
        pieces = [piece for own in by_rollout for piece in own]
        plans = [self._plan(piece.rollout) for piece in pieces]
        readings = [*map(self._reading, pieces, plans)]
        self._check_fits(readings)
        found = []
        for plan, given in zip(plans, self._rows(readings), strict=True):
            scores, totals = self._by_rows.scores(plan, given, support_size, self.size)
            self._totals.update(totals)
            found.append(scores)
        return all_joined(rollouts, by_rollout, found)

    def _rows(self, readings: Sequence[Rollout]) -> Iterable[Scores]:
        if self.ids_read <= WHOLE_UP_TO:
            return self.scorer.score(readings, self.ids_read)
        # Whole rows of a large vocabulary fill the memory: those of one rollout at a time.
        return (self.scorer.score([one], self.ids_read)[0] for one in readings)

    def readings(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Return what the teacher reads of each rollout of one answer, in its own tokens."""
        pieces = [self.pieces(rollout)[0] for rollout in rollouts]
        return [self._reading(piece, self._plan(piece.rollout)) for piece in pieces]

    def known_request(self, rollout: Rollout) -> KnownRequest:
        """Return a request to the teacher's own scorer, in its own tokens, with its scores.

        Finished scores are no measure of whether a teacher is the same one: a little noise moves an
        id across the limit of what is resolved, and with it a whole log-prob.
        """
        (reading,) = self.readings([rollout])
        # Not from a tape: it says whether the teacher is the same one.
        asked = live_of(self.scorer) or self.scorer
        (scores,) = asked.score([reading], min(COMPARED_IDS, self.ids_read))
        return KnownRequest(reading, scores, sign=self.starts)

    def _fits(self, piece: StudentAnswer, limit: int) -> int:
        """Return how many tokens of an answer fit into the teacher's window."""
        ids = piece.rollout.token_ids[piece.start :].tolist()
        # One token less than the window, and the end behind the text.
        most, length = limit - 2 - len(piece.prompt), len(ids)
        while length and most > 0 and len(self.pair.student.bytes_of(ids[:length])) > most:
            teacher_ids = plan_of(self.pair, ids[:length]).teacher_ids
            if len(teacher_ids) <= most:
                break
            last = self.pair.teacher.starts(teacher_ids)[most]
            ends = self.pair.student.starts(ids[:length])[1:]
            length = min(length - 1, bisect_right(ends, last))
        return length if most > 0 else 0

    def check(self, problems: Sequence[Problem], max_tokens: int, rule: Rule) -> list[str]:
        """Check the teacher's window, its server's limits, and its server's tokenizer.

        ``problems`` are those whose rollouts it scores, and ``max_tokens`` counts the student's
        tokens. The result warns of an unusual rollout that may be longer than the window, and of a
        server that could not be asked how it reads a text.
        """
        live = live_of(self.scorer)
        if isinstance(live, TokenizingServer) and not live.gives_any_ids:
            raise PreflightError(
                f'The teacher\'s server has no scoring plugin, and tokenizer = "own" reads {READ} '
                "ids of each row, which cost a server about 4 ms per token in JSON: start it with "
                "`prime-composer teacher`."
            )
        if self._is_served and (loss := what_is_lost(self._aligned, self.size)):
            raise PreflightError(
                f"{loss} Run the teacher in this process, which reads whole rows (in "
                f'[{self._table}], backend = "transformers" or "vllm" and no url), or choose a '
                "teacher whose tokenizer splits texts as the student's does."
            )
        warnings = self._check_window(problems, max_tokens, rule) if problems else []
        try:
            was_asked = live is None or check_served_tokenizer(self.prompts.tokenizer, live)
        except PreflightError as error:
            raise PreflightError(
                f"The teacher's server and the tokenizer of its `model` differ: {error} With "
                'tokenizer = "own", `model` names what the server serves.'
            ) from None
        if not was_asked and isinstance(live, TokenizingServer):
            warnings.append("The teacher's server could not be asked how it reads a text.")
        return warnings

    def take_metrics(self) -> dict[str, float]:
        """Return means over the tokens of the rollouts since the last call."""
        metrics = {f"xtok/{name}": value for name, value in means(self._totals).items()}
        self._totals.clear()
        return metrics

    @property
    def size(self) -> int:
        return self.scorer.limits.vocab_size or len(self.pair.teacher.of_id)

    @property
    def _is_served(self) -> bool:
        return isinstance(live_of(self.scorer), TokenizingServer)

    @property
    def ids_read(self) -> int:
        """Ids that are read of each row."""
        lost = what_is_lost(self._aligned, self.size)
        return self.size if lost and not self._is_served else served_ids(self.size)

    def _plan(self, rollout: Rollout) -> ReadingPlan:
        return plan_of(self.pair, rollout.token_ids[rollout.start :].tolist())

    def _check_fits(self, readings: Sequence[Rollout]) -> None:
        limit = self.scorer.limits.max_model_len
        for index, reading in enumerate(readings):
            length = len(reading.token_ids)
            if limit is not None and length >= limit:
                raise ValueError(
                    f"[{self._table}]: rollout {index} takes {length} of the teacher's tokens "
                    f"with its prompt, and the teacher takes {limit - 1}; set on_overflow = "
                    f'"score_head" in [{self._table}] to train on what fits.'
                )

    def _check_window(self, problems: Sequence[Problem], max_tokens: int, rule: Rule) -> list[str]:
        """Check that prompts and answers fit; return a warning where an unusual one may not."""
        prompt = self.prompts.longest(problems)
        ratio = self.prompts.tokens_per_student_token(problems)
        answer = ceil(max_tokens * ratio)
        if isinstance(live := live_of(self.scorer), LimitedServer):
            live.check_room(answer, self.ids_read, False, False)
        limit = self.scorer.limits.max_model_len
        if limit is None or rule != "error":
            return []
        needed = prompt + answer
        if needed >= limit:
            raise PreflightError(
                f"A prompt with a full answer may take {needed} of the teacher's tokens "
                f"({ratio:.2f} for one of the student's, with a margin of {LONGER - 1:.0%}), and "
                f"the teacher takes {limit - 1}; raise rollout.max_model_len (a server's "
                f"--max-model-len) to {needed + 1}, lower rollout.max_tokens, or set on_overflow = "
                f'"score_head" in [{self._table}].'
            )
        # No teacher token writes less than a byte.
        widest = max(len(content or b"") for content in self.pair.student.of_id)
        worst = prompt + max_tokens * widest + 1
        if worst < limit:
            return []
        return [
            f"The data's texts take {ratio / LONGER:.2f} of the teacher's tokens for one of the "
            f"student's. A rollout of unusual text may take more, in the worst case {worst} with "
            f"its prompt, and the teacher takes {limit - 1}: such a rollout ends the run. Set "
            f'on_overflow = "score_head" in [{self._table}] to train on what fits.'
        ]

    def _reading(self, piece: StudentAnswer, plan: ReadingPlan) -> Rollout:
        """Return what the teacher reads, in its own tokens, with an end to score after the text."""
        ids = torch.tensor([*piece.prompt, *plan.teacher_ids, self.pair.teacher_ends[0]])
        return Rollout.not_sampled(ids, len(piece.prompt), piece.rollout.finish_reason)


def served_ids(size: int) -> int:
    """Return how many ids are read of each row of a served head with ``size`` entries."""
    return size if size <= WHOLE_UP_TO else READ


def what_is_lost(aligned: float, size: int) -> str:
    """Say that these ids are too few; empty where they are enough.

    ``aligned`` is the share of the student's tokens that begin where one of the teacher's does.
    """
    if size <= WHOLE_UP_TO or aligned >= ALIGNED:
        return ""
    return (
        f"Of the student's tokens, {aligned:.2%} begin where one of the teacher's does, and "
        f"{ALIGNED:.0%} have to: a served teacher with more than {WHOLE_UP_TO:,} entries is asked "
        f"for {READ} ids of each row, which say too little of the others."
    )


class FirstTokens:
    """The tokens that a student wrote first, by which a pair is judged where no data is known."""

    def __init__(self) -> None:
        self._aligned: list[bool] = []

    def judge(self, plan: ReadingPlan, size: int) -> str:
        """Return ``what_is_lost``, once enough tokens were seen; before and after it nothing."""
        if len(self._aligned) >= JUDGED_TOKENS:
            return ""
        self._aligned += [one.aligned for one in plan.positions if one is not None]
        count = len(self._aligned)
        return what_is_lost(sum(self._aligned) / count, size) if count >= JUDGED_TOKENS else ""


class ByRows:
    """Scores of a student's tokens from a teacher's rows.

    Where ``fixed``, supports must not depend on the sampled token.
    """

    def __init__(self, pair: TokenizerPair, *, fixed: bool = False):
        self.pair, self._fixed, self._sums = pair, fixed, Sums(pair)

    def scores(self, plan: ReadingPlan, read: Scores, k: int, size: int) -> tuple[Scores, Totals]:
        """Return the scores of the student's tokens, and sums over them.

        ``read`` are the teacher's scores of its own tokens, by a head with ``size`` entries.
        """
        rows = dense(read, plan, max(size, len(self.pair.teacher.of_id)))
        candidates = self._sums.candidates(rows, plan, max(4 * k, FEWEST_CANDIDATES))
        if read.token_ids.shape[1] >= size:
            # What whole rows lack of 1 is rounding, which is much beside an improbable text.
            candidates = replace(candidates, unlisted=torch.zeros_like(candidates.unlisted))
        return token_scores(self.pair, plan, candidates, TeacherRows(rows), k, fixed=self._fixed)


def dense(read: Scores, plan: ReadingPlan, size: int) -> Float[Tensor, "rows vocab"]:
    """Return the rows that were read as probabilities of the whole vocabulary; 0 elsewhere."""
    rows = torch.zeros(len(read), size)
    rows.scatter_(1, read.token_ids, read.teacher_logprobs.float().exp())
    sampled = torch.tensor(plan.teacher_ids, dtype=torch.long)
    own = read.ref_logprobs[: len(sampled)].float().exp()
    rows[torch.arange(len(sampled)), sampled] = own
    return rows


class OwnTokenizerSampler(OwnPromptSampler):
    """A teacher's sampler for a student with another tokenizer: its answers are encoded again.

    Their log mu is NaN: the teacher drew other tokens.
    """

    def __init__(self, sampler: Sampler, pair: TokenizerPair, prompts: TeacherPrompts):
        super().__init__(sampler, prompts)
        self._pair = pair

    @property
    def limits(self) -> Limits:
        """None: lengths are the teacher's, in its own tokens."""
        return Limits()

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seed: int
    ) -> list[Rollout]:
        """Return the teacher's answers in the student's tokens, ``params.max_tokens`` at most."""
        own = [self._prompts(prompt) for prompt in prompts]
        return [
            self._encoded(rollout, prompts[rollout.prompt_index], params.max_tokens)
            for rollout in self._sampler.generate(own, params, seed)
        ]

    def _encoded(self, rollout: Rollout, prompt: Sequence[int], most: int) -> Rollout:
        pair = self._pair
        content = pair.teacher.bytes_of(rollout.completion_ids).removeprefix(pair.teacher_lead)
        text = content.decode(errors="ignore")
        ids = list(pair.student.encode(pair.student_lead.decode() + text if text else ""))
        if rollout.finish_reason == "stop" or not ids:
            ids.append(pair.student_end)
        return Rollout.not_sampled(
            torch.tensor([*prompt, *ids[:most]]),
            len(prompt),
            "length" if len(ids) > most else rollout.finish_reason,
            rollout.prompt_index,
        )
