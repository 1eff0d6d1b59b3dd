"""A teacher with a tokenizer of its own: it reads its own prompt and the rollout's text.

Its rows become scores of the student's tokens (``cross_tokenizer``), so that everybody else sees a
teacher with the student's tokenizer. In front of any scorer: transformers, vLLM, a server.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from prime_composer.backends.hf_model import (
    ModelUnavailable,
    load_tokenizer,
    read_eos_token_ids,
)
from prime_composer.backends.protocols import Limits, Rollout, Sampler, SamplingParams, Scorer
from prime_composer.contract import Scores
from prime_composer.cross_tokenizer.finish import Rows, token_scores
from prime_composer.cross_tokenizer.pair import Pair
from prime_composer.cross_tokenizer.plan import Plan, plan_of
from prime_composer.cross_tokenizer.sums import Sums
from prime_composer.cross_tokenizer.token_bytes import TokenBytes, UnsupportedTokenizer
from prime_composer.losses import LossConfig
from prime_composer.problems.config import Problem
from prime_composer.problems.loading import ProblemSet
from prime_composer.problems.prompts import answer_text, prompt_text, render_prompt
from prime_composer.teachers.compatibility import (
    PreflightError,
    TokenServer,
    check_served_tokenizer,
    tokenizer_hash,
)
from prime_composer.teachers.watch import starts_of

WHOLE_UP_TO = 4096
"""Entries of a teacher's vocabulary up to which all of a row is read."""

READ = 256
"""Entries of a row that are read of a larger vocabulary, the most probable ones."""

FEWEST_CANDIDATES = 64
"""Student tokens at least among which a support is chosen."""

COUNTED_PROBLEMS = 2000
"""Problems on whose texts two tokenizers are compared."""

COUNTED_ANSWERS = 200
"""Answers on which the teacher's tokens per student token are counted."""

LONGER = 1.2
"""Margin on that number."""

Prompts = Callable[[Sequence[int]], Sequence[int]]
"""Returns the teacher's prompt of a student's."""


class TeacherPrompts:
    """The prompts of a recipe's problems, in the teacher's tokens.

    Called with the student's token ids of a prompt, it returns the teacher's.

    Args:
        problem_set: the problems.
        student: the student's tokenizer.
        teacher: the teacher's.
        student_prompt: returns the student's prompt of a problem.
    """

    def __init__(
        self,
        problem_set: ProblemSet,
        student: Any,
        teacher: Any,
        student_prompt: Callable[[Problem], Sequence[int]],
    ):
        self.problem_set, self.student, self.teacher = problem_set, student, teacher
        self._student_prompt = student_prompt
        self._problems: dict[tuple[int, ...], Problem] = {}
        # A problem is asked in many steps.
        self._prompt = cache(self._rendered)

    def __call__(self, prompt: Sequence[int]) -> list[int]:
        """Return the teacher's prompt of the problem whose prompt this is.

        Raises:
            ValueError: it is the prompt of no problem of the recipe.
        """
        if not self._problems:
            self._problems = {
                tuple(self._student_prompt(problem)): problem
                for problem in [*self.problem_set.held_out, *self.problem_set.practice]
            }
        problem = self._problems.get(tuple(prompt))
        if problem is None:
            raise ValueError(
                'a teacher with tokenizer = "own" renders its own prompts, and this is the prompt '
                "of no problem of the recipe"
            )
        return self._prompt(problem)

    def texts(self) -> list[str]:
        """Return prompts and worked answers of the first problems to train on, as text."""
        return [
            text
            for problem in self.problem_set.practice[:COUNTED_PROBLEMS]
            for text in (
                prompt_text(problem, self.problem_set.config_of(problem)),
                self.answer(problem),
            )
        ]

    def answer(self, problem: Problem) -> str:
        """Return the data's answer as it follows the prompt."""
        return answer_text(problem.answer, self.problem_set.config_of(problem))

    def longest(self, problems: Sequence[Problem], max_tokens: int) -> int:
        """Return how many of the teacher's tokens a prompt and a full answer may take."""
        prompt = max(len(self._prompt(problem)) for problem in problems)
        answers = [self.answer(problem) for problem in problems[:COUNTED_ANSWERS]]
        own, other = (
            1 + sum(len(tokenizer.encode(text, add_special_tokens=False)) for text in answers)
            for tokenizer in (self.teacher, self.student)
        )
        return prompt + math.ceil(max_tokens * max(1.0, LONGER * own / other))

    def _rendered(self, problem: Problem) -> list[int]:
        return render_prompt(problem, self.problem_set.config_of(problem), self.teacher)


def with_own_tokenizer(
    scorer: Scorer,
    model: str | Path,
    problem_set: ProblemSet,
    student: Any,
    student_prompt: Callable[[Problem], Sequence[int]],
    loss: LossConfig,
    vocab_size: int,
    table: str,
) -> "OwnTokenizerScorer":
    """Let a teacher with a tokenizer of its own score the student's tokens.

    Args:
        scorer: the teacher's.
        model: the teacher's directory or hub id, which has its tokenizer.
        problem_set: the recipe's problems.
        student: the student's tokenizer.
        student_prompt: returns the student's prompt of a problem.
        loss: the recipe's loss.
        vocab_size: entries of the student's head.
        table: the teacher's table, for messages.

    Raises:
        PreflightError: the tokenizers cannot be compared.
    """
    try:
        tokenizer = load_tokenizer(model)
    except ModelUnavailable as error:
        raise PreflightError(
            f'[{table}] tokenizer = "own" needs the teacher\'s tokenizer: give `model` its '
            f"directory or hub id. {error}"
        ) from None
    if tokenizer is None:
        raise PreflightError(
            f'[{table}] tokenizer = "own": {model} has no tokenizer; add its files.'
        )
    prompts = TeacherPrompts(problem_set, student, tokenizer, student_prompt)
    sizes = scorer.limits.vocab_size or 0, vocab_size
    pair = make_pair(tokenizer, student, read_eos_token_ids(model), prompts.texts(), table, sizes)
    parts = [part for part, _ in loss.needs_by_section().values()]
    fixed = any(part.needs_fixed_support for part in parts)
    return OwnTokenizerScorer(scorer, pair, prompts, vocab_size, fixed=fixed)


def make_pair(
    teacher: Any,
    student: Any,
    teacher_ends: Iterable[int],
    texts: Iterable[str],
    table: str,
    sizes: tuple[int, int] = (0, 0),
) -> Pair:
    """Return the tables of two tokenizers of transformers.

    Args:
        teacher: the teacher's tokenizer.
        student: the student's.
        teacher_ends: the teacher's ids that end a text.
        texts: texts as the teacher writes them.
        table: the teacher's table in the recipe, for messages.
        sizes: entries of the teacher's and the student's heads.

    Raises:
        PreflightError: both are the same, or one of them is none that can be compared.
    """
    own = f'[{table}] tokenizer = "own"'
    if tokenizer_hash(teacher) == tokenizer_hash(student):
        raise PreflightError(
            f"{own}, and both tokenizers are the same: leave it out, the comparison is exact and "
            "cheaper without it."
        )
    codes = []
    both = ((teacher, "the teacher"), (student, "the student"))
    for (tokenizer, who), size in zip(both, sizes, strict=True):
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise PreflightError(
                f"{own}: {who}'s tokenizer is not of the library `tokenizers`, so its tokens' "
                f"bytes are unknown; choose {who.replace('the', 'a')} with a tokenizer.json."
            )
        try:
            codes.append(TokenBytes(backend, who, size))
        except UnsupportedTokenizer as error:
            raise PreflightError(
                f"{own}: {error}; choose {who.replace('the', 'a')} with a byte-level BPE tokenizer."
            ) from None
    if student.eos_token_id is None:
        raise PreflightError(f"{own}: the student's tokenizer has no end of text; set eos_token.")
    return Pair(codes[0], codes[1], teacher_ends, student.eos_token_id, texts)


class OwnTokenizerScorer:
    """Scores of the student's tokens by a teacher with a tokenizer of its own.

    A support has the sampled token, then the most probable ids whose probability one pass of the
    teacher resolves; other columns are not known. A token of which the teacher has no probability
    is not ``scored``.

    Args:
        scorer: the teacher's, in its own tokens.
        pair: the tokenizers.
        prompts: returns the teacher's prompt of a student's.
        vocab_size: entries of the student's head.
        fixed: supports must not depend on the sampled token.
    """

    gives_any_ids = False

    def __init__(
        self,
        scorer: Scorer,
        pair: Pair,
        prompts: Prompts,
        vocab_size: int,
        *,
        fixed: bool = False,
    ):
        self.scorer, self.pair, self.prompts = scorer, pair, prompts
        self._vocab_size, self._fixed = vocab_size, fixed
        self._sums = Sums(pair)
        self._metrics, self._tokens = Counter[str](), 0

    @property
    def limits(self) -> Limits:
        """Those of the student's vocabulary. Lengths are the teacher's, in its own tokens."""
        return Limits(vocab_size=self._vocab_size, max_logprobs=self._vocab_size)

    @property
    def starts(self) -> int | None:
        """Starts that the teacher's server has named."""
        return starts_of(self.scorer)

    @property
    def sampler(self) -> Sampler | None:
        """The teacher's sampler, whose answers are encoded for the student."""
        sampler = self.scorer.sampler
        return None if sampler is None else OwnTokenizerSampler(sampler, self.pair, self.prompts)

    def score(
        self,
        rollouts: Sequence[Rollout],
        support_size: int | Literal["full"],
        prompts: Sequence[Sequence[int]] | None = None,
        *,
        candidate_ids: Sequence[Int[Tensor, "_ _k"]] | None = None,
        hidden: bool = False,
    ) -> list[Scores]:
        """Score as ``protocols.Scorer`` says, K ids at most.

        Raises:
            ValueError: what is asked for needs one tokenizer for both, or a rollout does not fit
                into the teacher's window.
        """
        if support_size == "full" or candidate_ids is not None or hidden or prompts is not None:
            raise ValueError(
                'a teacher with tokenizer = "own" scores top-K supports of its own choice under '
                "its own prompt; set k to a number and chosen_by to 'teacher'"
            )
        plans = [
            plan_of(self.pair, rollout.token_ids[rollout.start :].tolist()) for rollout in rollouts
        ]
        readings = [
            self._reading(rollout, plan) for rollout, plan in zip(rollouts, plans, strict=True)
        ]
        size = self.scorer.limits.vocab_size or len(self.pair.teacher.of_id)
        read = size if size <= WHOLE_UP_TO else READ
        return [
            self._of_student(rollout, plan, given, size, support_size)
            for rollout, plan, given in zip(
                rollouts, plans, self.scorer.score(readings, read), strict=True
            )
        ]

    def check(self, problems: Sequence[Problem], max_tokens: int) -> list[str]:
        """Check the teacher's window and its server's tokenizer.

        Args:
            problems: those whose rollouts it scores.
            max_tokens: longest answer, in the student's tokens.

        Returns:
            A warning where its server could not be asked how it reads a text.

        Raises:
            PreflightError: its server has another tokenizer or no scoring plugin, or a full answer
                does not fit.
        """
        if isinstance(self.scorer, TokenServer) and not self.scorer.gives_any_ids:
            raise PreflightError(
                f'The teacher\'s server has no scoring plugin, and tokenizer = "own" reads {READ} '
                "ids of each row, which cost a server about 4 ms per token in JSON: start it with "
                "`prime-rl teacher`."
            )
        limit, prompts = self.scorer.limits.max_model_len, self.prompts
        assert isinstance(prompts, TeacherPrompts)
        if problems and limit is not None:
            needed = prompts.longest(problems, max_tokens)
            if needed > limit - 1:
                raise PreflightError(
                    f"A prompt with a full answer may take {needed} of the teacher's tokens, and "
                    f"the teacher takes {limit - 1}; raise rollout.max_model_len (a server's "
                    f"--max-model-len) to {needed + 1}, or lower rollout.max_tokens."
                )
        try:
            was_asked = check_served_tokenizer(prompts.teacher, self.scorer)
        except PreflightError as error:
            raise PreflightError(
                f"The teacher's server and the tokenizer of its `model` differ: {error} With "
                'tokenizer = "own", `model` names what the server serves.'
            ) from None
        if was_asked or not isinstance(self.scorer, TokenServer):
            return []
        return ["The teacher's server could not be asked how it reads a text."]

    def take_metrics(self) -> dict[str, float]:
        """Return means over the tokens that were scored since the last call."""
        metrics = {f"xtok/{name}": value / self._tokens for name, value in self._metrics.items()}
        self._metrics, self._tokens = Counter(), 0
        return metrics

    def close(self) -> None:
        """Close the teacher's scorer."""
        self.scorer.close()

    def _reading(self, rollout: Rollout, plan: Plan) -> Rollout:
        """Return what the teacher reads, in its own tokens, with an end to score after the text."""
        if not rollout.trained.all():
            raise ValueError(
                'a teacher with tokenizer = "own" reads one answer per rollout; rollouts of '
                "several turns need the student's tokenizer"
            )
        prompt = self.prompts(rollout.token_ids[: rollout.start].tolist())
        ids = torch.tensor([*prompt, *plan.teacher_ids, self.pair.teacher_ends[0]])
        return Rollout.not_sampled(ids, len(prompt), rollout.finish_reason, rollout.prompt_index)

    def _of_student(self, rollout: Rollout, plan: Plan, read: Scores, size: int, k: int) -> Scores:
        rows = dense(read, plan, max(size, len(self.pair.teacher.of_id)))
        candidates = self._sums.candidates(rows, plan, max(4 * k, FEWEST_CANDIDATES))
        scores, metrics = token_scores(
            self.pair, plan, candidates, Rows(rows), k, fixed=self._fixed
        )
        tokens = len(plan.positions)
        self._tokens += tokens
        self._metrics.update({name: value * tokens for name, value in metrics.items()})
        return replace(scores, start=rollout.start)


def dense(read: Scores, plan: Plan, size: int) -> Float[Tensor, "rows vocab"]:
    """Return the rows that were read as probabilities of the whole vocabulary; 0 elsewhere."""
    rows = torch.zeros(len(read), size)
    rows.scatter_(1, read.token_ids, read.teacher_logprobs.float().exp())
    sampled = torch.tensor(plan.teacher_ids, dtype=torch.long)
    own = read.ref_logprobs[: len(sampled)].float().exp()
    rows[torch.arange(len(sampled)), sampled] = own
    return rows


class OwnTokenizerSampler:
    """A teacher's sampler for a student with another tokenizer: its answers are encoded again.

    Their log mu is NaN: the teacher drew other tokens.
    """

    def __init__(self, sampler: Sampler, pair: Pair, prompts: Prompts):
        self._sampler, self._pair, self._prompts = sampler, pair, prompts

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
        content = self._pair.teacher.bytes_of(rollout.completion_ids)
        ids = list(self._pair.student.encode(content.decode(errors="ignore")))
        if rollout.finish_reason == "stop" or not ids:
            ids.append(self._pair.student_end)
        return Rollout.not_sampled(
            torch.tensor([*prompt, *ids[:most]]),
            len(prompt),
            "length" if len(ids) > most else rollout.finish_reason,
            rollout.prompt_index,
        )

    def update_weights(self, model: nn.Module) -> None:
        """Refuse: a teacher's weights are fixed."""
        raise NotImplementedError("the weights of a teacher are fixed")

    def close(self) -> None:
        """Do nothing: the scorer closes its sampler."""
