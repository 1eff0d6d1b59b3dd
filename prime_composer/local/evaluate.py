"""Measure held-out problems: greedy answers, and divergences of sampled ones."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from prime_composer.backends.hf_model import token_batches
from prime_composer.backends.protocols import Rollout, Sampler, SamplingParams
from prime_composer.contract import Support, given
from prime_composer.divergences import Normalization, entropy, forward_kl, reverse_kl
from prime_composer.environments.episodes import EnvironmentFailed, Episode
from prime_composer.environments.tasks import Task, problems_and_tasks
from prime_composer.full_vocabulary import compare
from prime_composer.local.answers import KEPT, KeptAnswer
from prime_composer.local.collect import mean_by_environment
from prime_composer.local.engine import Engine
from prime_composer.local.tokenized_problems import TokenizedProblems
from prime_composer.losses.shared.metrics import in_top, overlap
from prime_composer.problems.config import Problem
from prime_composer.problems.math_verifier import TimeBudget
from prime_composer.problems.metrics import total_score
from prime_composer.recipe.routing import TeacherId
from prime_composer.recipe.schema import EvalConfig, Recipe
from prime_composer.samplers.registry import open_sampler
from prime_composer.step.batch import Sample, with_scores
from prime_composer.step.student_forward import student_inputs
from prime_composer.teachers.mixture import Teachers
from prime_composer.teachers.own_prompt import OwnPromptScorer
from prime_composer.teachers.policy import students_choice
from prime_composer.teachers.tape.scorer import NotOnTape

FULL_VOCABULARY_UP_TO = 8192  # Largest that ``kl_support = "auto"`` measures in full

OVERLAP = 16  # K of the overlap where the loss has none, as in the paper of ``overlap``

COUNTS = ("turns", "tool_calls")  # What is counted per rollout of an environment by id

EVALUATION_SEED = 20_251_017  # Of the measured rollouts: the same draws at every evaluation


class Graded(NamedTuple):
    problem: Problem  # what was asked
    # 1.0 where the recipe's metric accepts the answer, else 0.0; or a graded metric's value. Of a
    # task its reward, NaN where its rollout failed.
    reward: float
    text: str = ""  # the answer
    truncated: bool = False  # whether it was cut at ``max_tokens``
    turns: float = math.nan  # answers in the rollout of a task, NaN of a problem
    tool_calls: float = math.nan  # calls of tools in them, likewise


ENTROPIES = ("entropy", "teacher_entropy")

SUMS = ("reverse_kl", "forward_kl", *ENTROPIES, "overlap", "overlap_advantage", "tokens")
"""What is summed over the tokens of a rollout, in nats: KL(student || teacher), KL(teacher ||
student), the student's entropy and the teacher's, ``overlap``; and how many tokens were summed."""


@dataclass(frozen=True)
class Evaluator:
    """Measures the student and its teachers on the first held-out problems."""

    engine: Engine
    recipe: Recipe
    # the student's, at its latest evaluation
    answers: list[KeptAnswer] = field(default_factory=list)
    # of problems that have a single teacher
    teacher_answers: list[KeptAnswer] = field(default_factory=list)
    not_measured: set[str] = field(default_factory=set)  # what a tape that answers alone lacks

    @property
    def problems(self) -> TokenizedProblems:
        """The recipe's problems, in the student's tokens."""
        return self.engine.problems

    def student(self) -> dict[str, float]:
        """Return greedy accuracy, the share of truncated answers, and divergences from the teacher.

        Graded metrics replace ``eval/accuracy``. Several environments add ``eval/accuracy/NAME``
        and ``eval/reverse_kl/NAME``. Divergences are means over the N tokens of rollouts sampled
        from the current student at temperature 1 and top-p 1, in nats:

            eval/reverse_kl = (1/N) sum_t sum_v p(v) (log p(v) - log q(v))
            eval/forward_kl = (1/N) sum_t sum_v q(v) (log q(v) - log p(v))
            eval/entropy = -(1/N) sum_t sum_v p(v) log p(v)
            eval/teacher_entropy = -(1/N) sum_t sum_v q(v) log q(v)

        With ``kl_support`` = K the sums are over the teacher's top K and one tail bucket, lower
        bounds, and the entropies are left out. On a top K of a mixture they are no bounds
        (``teachers.mixture.mix``).

        ``eval/overlap`` and ``eval/overlap_advantage`` are means of ``overlap`` for the loss's K or
        16: in the whole vocabulary, and on the top K of one teacher with the student's tokenizer.
        """
        problems = self.problems.problem_set.held_out[: self.recipe.eval.size]
        if not problems:
            return {}
        graded = self._greedy_answers(self.engine.sampler, problems)
        self.answers[:] = map(self._answer, graded[:KEPT])
        measured = self._scores("eval", graded)
        measured["eval/truncated"] = sum(one.truncated for one in graded) / len(graded)
        if self.engine.environments is not None:
            failed = sum(math.isnan(one.reward) for one in graded)
            measured["eval/failed"] = failed / len(graded)
        if self.engine.teachers is not None and self.recipe.eval.kl_size:
            problems = self.problems.problem_set.held_out[: self.recipe.eval.kl_size]
            sums = self._divergence_sums(self.engine.teachers, problems)
            tokens = [] if sums is None else sums.pop("tokens")
            if sums is not None and any(tokens):  # a teacher's window may hold none of them
                count, names = sum(tokens), self.problems.problem_set.names
                measured |= {f"eval/{name}": sum(values) / count for name, values in sums.items()}
                measured |= mean_by_environment(
                    "eval/reverse_kl", names, problems, sums["reverse_kl"], tokens
                )
                if (support := kl_support(self.recipe.eval, self.engine)) != "full":
                    measured["eval/kl_ids"] = float(support)
        return measured

    def teachers(self) -> dict[str, float]:
        """Return the teachers' own greedy accuracy; empty where the loss needs no teacher.

        A policy teacher is the policy with the best hint that it may get. Each of several teachers
        is measured on the problems that it has a share in, as ``teacher/NAME/accuracy``.
        """
        engine, problem_set = self.engine, self.problems.problem_set
        held_out = problem_set.held_out[: self.recipe.eval.size]
        problems = [problem for problem in held_out if problem_set.is_scored(problem)]
        if not problems:
            return {}
        policy = engine.policy_teacher
        if policy is not None:
            room = None if engine.policy_overflow == "error" else engine.policy_room
            hinted = [(problem, policy.best_prompt(problem)) for problem in problems]
            hinted = [(problem, prompt) for problem, prompt in hinted if self._fits(prompt, room)]
            if not hinted:
                return {}
            readable, prompts = zip(*hinted, strict=True)
            graded = self._greedy_answers(engine.sampler, readable, prompts)
            self.teacher_answers[:] = map(self._answer, graded[:KEPT])
            return self._overall("teacher", graded)
        if engine.teachers is None:
            return {}
        prompt, read_as = self.problems.prompt, engine.teachers.prompt
        measured: dict[str, float] = {}
        shares = [engine.teachers.routing.of(problem) for problem in problems]
        answered: dict[int, Graded] = {}
        for teacher in engine.teachers.scorers:
            if not any(teacher in share for share in shares):
                continue
            sampler = self._teacher_sampler(engine.teachers, teacher)
            rule = engine.teachers.routing.teachers[teacher].on_overflow
            room = None if rule == "error" else sampler.limits.max_model_len
            tasks: Sequence[int] = ()
            if isinstance(engine.teachers.scorers[teacher], OwnPromptScorer):
                # Environments render the student's prompts.
                tasks = [*problems_and_tasks(problems).tasks]
                if tasks:
                    self.not_measured.add(f"the {teacher.display}'s own answers to tasks")
            indices = [
                index
                for index, share in enumerate(shares)
                if teacher in share
                and index not in tasks
                and (room is None or self._fits(read_as(teacher, prompt(problems[index])), room))
            ]
            if not indices:
                continue
            try:
                graded = self._greedy_answers(sampler, [problems[index] for index in indices])
            except NotOnTape:
                self.not_measured.add(f"the {teacher.display}'s own answers")
                continue
            answered |= zip(indices, graded, strict=True)
            if teacher.name is not None:
                measured |= self._overall(f"teacher/{teacher.name}", graded)
        if answered and all(len(share) == 1 for share in shares):
            kept = sorted(index for index in answered if index < KEPT)
            self.teacher_answers[:] = (self._answer(answered[index]) for index in kept)
            measured |= self._scores("teacher", [*answered.values()])
        return measured

    def _scores(self, prefix: str, graded: Sequence[Graded]) -> dict[str, float]:
        """Return the scores over all answers and, of several environments, over those of each."""
        measured = self._overall(prefix, graded)
        names = self.problems.problem_set.names
        for name in names if len(names) > 1 else ():
            own = [one for one in graded if one.problem.environment == name]
            if own and self.problems.problem_set.is_scored(own[0].problem):
                score = self._score_name(own[0].problem)
                measured[f"{prefix}/{score}/{name}"] = self._total(own)
        return measured

    def _overall(self, prefix: str, graded: Sequence[Graded]) -> dict[str, float]:
        """Return each score over all answers that are graded by it, and ``COUNTS`` of tasks."""
        by_score: dict[str, list[Graded]] = {}
        scored = [one for one in graded if self.problems.problem_set.is_scored(one.problem)]
        for one in scored:
            by_score.setdefault(f"{prefix}/{self._score_name(one.problem)}", []).append(one)
        measured = {name: self._total(own) for name, own in by_score.items()}
        for name in COUNTS:
            known = [value for one in graded if not math.isnan(value := getattr(one, name))]
            if known:
                measured[f"{prefix}/{name}"] = sum(known) / len(known)
        return measured

    def _score_name(self, problem: Problem) -> str:
        """Return the name of the mean over answers like this problem's."""
        if isinstance(problem, Task):
            return "accuracy"
        return self.problems.problem_set.config_of(problem).score_name

    def _total(self, graded: Sequence[Graded]) -> float:
        """Return the score over answers that are graded by the same metric."""
        known = [one for one in graded if not math.isnan(one.reward)]
        if not known:
            raise EnvironmentFailed(
                "every task of the evaluation failed; the warning before this names the first"
            )
        rewards = [one.reward for one in known]
        if any(isinstance(one.problem, Task) for one in known):
            return sum(rewards) / len(rewards)
        metric = self.problems.problem_set.config_of(known[0].problem).metric
        references = [one.problem.reference(metric) for one in known]
        return total_score(metric, [one.text for one in known], references, rewards)

    def _answer(self, graded: Graded) -> KeptAnswer:
        """Return an answer as the report shows it."""
        problem_set, problem, reward = self.problems.problem_set, graded.problem, graded.reward
        place = problem_set.held_out.index(problem)
        answer = KeptAnswer(problem.question, problem.answer, graded.text, None, place=place)
        if isinstance(problem, Task):
            return replace(answer, correct=reward >= 1)
        config = problem_set.config_of(problem)
        if config.graded:
            return replace(answer, score=reward, metric=config.metric)
        return replace(answer, correct=bool(reward) if config.scored else None)

    def _fits(self, prompt: Sequence[int], room: int | None) -> bool:
        """Return whether a prompt and its longest answer take at most ``room`` tokens."""
        return room is None or len(prompt) + self.recipe.rollout.max_tokens <= room

    def _teacher_sampler(self, teachers: Teachers, teacher: TeacherId) -> Sampler:
        """Return what generates with a teacher: its scorer's sampler, or one that is opened now."""
        scorer = teachers.scorers[teacher]
        if scorer.sampler is not None:
            return scorer.sampler
        sampler = open_sampler(self.engine.teacher_specs[teacher])
        return scorer.reading(sampler) if isinstance(scorer, OwnPromptScorer) else sampler

    def _greedy_answers(
        self,
        sampler: Sampler,
        problems: Sequence[Problem],
        prompts: Sequence[Sequence[int]] | None = None,
    ) -> list[Graded]:
        """Return a greedy answer per problem. ``prompts`` are read instead of the problems' own."""
        params = SamplingParams(temperature=0.0, max_tokens=self.recipe.rollout.max_tokens)
        rollouts, episodes = self._answers(sampler, problems, params, prompts)
        # What stays is a task whose rollout failed.
        graded = {place: Graded(problem, math.nan) for place, problem in enumerate(problems)}
        for place, episode in episodes.items():
            truncated = any(one.finish_reason == "length" for one in episode.rollouts)
            graded[place] = Graded(
                *(problems[place], episode.reward, episode.text, truncated),
                turns=episode.turns,
                tool_calls=episode.tool_calls,
            )
        budget = TimeBudget()
        for place, rollout in rollouts.items():
            problem, text = problems[place], self.problems.decode(rollout.completion_ids)
            reward = self.problems.reward(text, problem, budget)
            graded[place] = Graded(problem, reward, text, rollout.finish_reason == "length")
        return [*graded.values()]

    def _answers(
        self,
        sampler: Sampler,
        problems: Sequence[Problem],
        params: SamplingParams,
        prompts: Sequence[Sequence[int]] | None = None,
    ) -> tuple[dict[int, Rollout], dict[int, Episode]]:
        """Sample an answer to each problem, and play each task that does not fail, by its place."""
        parts = problems_and_tasks(problems)
        rollouts: dict[int, Rollout] = {}
        episodes: dict[int, Episode] = {}
        if parts.tasks:
            tasks = [*parts.tasks.values()]
            outcomes = given(self.engine.environments).run(sampler, tasks, params, EVALUATION_SEED)
            for place, outcome in zip(parts.tasks, outcomes, strict=True):
                if isinstance(outcome, Episode):
                    episodes[place] = outcome
        if parts.problems:
            read = [
                self.problems.prompt(problem) if prompts is None else prompts[place]
                for place, problem in parts.problems.items()
            ]
            sampled = sampler.generate(read, params, seed=EVALUATION_SEED)
            rollouts |= zip(parts.problems, sampled, strict=True)
        return rollouts, episodes

    def _sampled(self, problems: Sequence[Problem]) -> list[tuple[int, Sample]]:
        """Return a rollout of each problem and its place, as far as a teacher can read it."""
        params = SamplingParams(max_tokens=self.recipe.rollout.max_tokens)
        answers, episodes = self._answers(self.engine.sampler, problems, params)
        rollouts = [(place, one) for place, e in episodes.items() for one in e.rollouts]
        rollouts += answers.items()
        fitted = self.engine.fit([Sample(rollout, problems[place]) for place, rollout in rollouts])
        return [
            (place, sample)
            for (place, _), sample in zip(rollouts, fitted, strict=True)
            if sample is not None
        ]

    @torch.no_grad()
    def _divergence_sums(
        self, teachers: Teachers, problems: Sequence[Problem]
    ) -> dict[str, list[float]] | None:
        """Return ``SUMS`` over one rollout of each problem; None where a tape lacks one.

        ``tokens`` is 0 where no teacher could read the rollout. On a top K there are no entropies,
        and an overlap where the teacher's top K is exact: of one with the student's tokenizer.
        """
        engine, sampled = self.engine, self._sampled(problems)
        support, shared = kl_support(self.recipe.eval, engine), min(engine.head_sizes)
        full = support == "full"
        # A support of K = V is exact and simple. Large vocabularies lack the memory for one. Of
        # heads of unequal sizes it does not say what either side has beyond the shared ids.
        unequal = len(engine.head_sizes) > 1
        hidden = full and (unequal or engine.vocab_size > FULL_VOCABULARY_UP_TO)
        try:
            scores = teachers.score(
                [sample.rollout for _, sample in sampled],
                [sample.problem for _, sample in sampled],
                0 if hidden else support,
                hidden=hidden,
            )
        except NotOnTape:
            self.not_measured.add("the KL")
            return None
        scored = [
            (place, one)
            for (place, sample), own in zip(sampled, scores, strict=True)
            if (one := with_scores(sample, own)) is not None
        ]
        places, samples = [place for place, _ in scored], [sample for _, sample in scored]
        several = any(len(teachers.routing.of(sample.problem)) > 1 for sample in samples)
        exact = full or not (several or engine.tokenizer_pairs)
        request = engine.loss.support
        k = OVERLAP if request is None or request.k == "full" else request.k
        k = min(k, shared if support == "full" else support)
        top = None
        if exact and not full:
            rollouts = [sample.rollout for sample in samples]
            chosen = students_choice(engine.model, rollouts, k, shared)
            top = [ids[one.trained] for ids, one in zip(chosen, rollouts, strict=True)]
        sums = torch.zeros(len(SUMS), len(problems), dtype=torch.float64)
        lengths = [sample.length for sample in samples]
        for indices in token_batches(lengths, self.recipe.trainer.micro_batch_tokens):
            inputs = student_inputs(engine.model, [samples[i] for i in indices])
            if hidden:
                values = compare(given(inputs.hidden_states), _over_all_ids, size=shared, k=k)
            else:
                own = given(inputs.support).masked(inputs.loss_mask)
                p, q = own.student_logprobs, own.teacher_logprobs
                if full:
                    values = _over_all_ids(p, q, normalization="full", size=shared, k=k)
                else:
                    none = own.token_ids[:, :0]
                    ids = none if top is None else torch.cat([top[i] for i in indices]).to(none)
                    values = _over_some_ids(own, ids, k)
            rows = torch.tensor([places[i] for i in indices])[given(inputs.segment_ids).cpu()]
            columns = torch.cat([values.T, torch.ones_like(values.T[:1])]).double().cpu()
            sums.index_add_(1, rows, columns)
        known = dict.fromkeys(ENTROPIES, full) | {"overlap": exact, "overlap_advantage": exact}
        named = zip(SUMS, sums.tolist(), strict=True)
        return {name: values for name, values in named if known.get(name, True)}


def _kls_and_entropies(
    student: Tensor, teacher: Tensor, normalization: Normalization
) -> Float[Tensor, "n 4"]:
    """Return KL(p || q), KL(q || p) and the entropies of p and q per token."""
    values = (
        reverse_kl(student, teacher, normalization=normalization),
        forward_kl(student, teacher, normalization=normalization),
        entropy(student, normalization),
        entropy(teacher, normalization),
    )
    return torch.stack(values, dim=-1)


def _over_all_ids(
    student: Tensor, teacher: Tensor, *, normalization: Normalization, size: int, k: int
) -> Float[Tensor, "n 6"]:
    """Return KLs, entropies and ``overlap`` of all ids. The bucket beyond ``size`` has no rank."""
    p, q = student[:, :size], teacher[:, :size]
    agreed = overlap(p, q, in_top(p, k) & in_top(q, k), k)
    return torch.cat([_kls_and_entropies(student, teacher, normalization), agreed], dim=-1)


def _over_some_ids(support: Support, chosen: Int[Tensor, "n m"], k: int) -> Float[Tensor, "n 6"]:
    """Return the same of a teacher's top ids and a tail. ``chosen`` are the student's own K ids."""
    p, q = support.student_logprobs, support.teacher_logprobs
    in_both = (support.token_ids[:, :k].unsqueeze(-1) == chosen.unsqueeze(-2)).any(-1)
    agreed = overlap(p[:, :k], q[:, :k], in_both, k)
    return torch.cat([_kls_and_entropies(p, q, "tail"), agreed], dim=-1)


def kl_support(config: EvalConfig, engine: Engine) -> int | Literal["full"]:
    """Return the K of the measured KL.

    A server without the scoring plugin is asked for as many ids as the loss needs, or for vLLM's
    default of 20.
    """
    size = config.kl_support
    if size != "auto":
        return size
    if engine.loss.reads_hidden_states:
        return "full"
    if engine.teachers is not None and not engine.teachers.give_any_ids:
        return engine.loss.support_size or 20
    return "full" if engine.vocab_size <= FULL_VOCABULARY_UP_TO else 64
