"""Measure one teacher on rollouts of the student: tokens, limits, numbers, speed, and a K."""

import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from prime_composer.backends.alignment import make_rollout, sequences_to_score
from prime_composer.backends.answers import InvalidAnswer
from prime_composer.backends.hf_model import (
    lm_head_weight,
    load_model,
    sequence_logprobs,
    token_batches,
)
from prime_composer.backends.protocols import (
    Limits,
    PluginServer,
    Rollout,
    Sampler,
    SamplingParams,
    Scorer,
    TeacherScores,
)
from prime_composer.contract import given
from prime_composer.local.batch import Sample
from prime_composer.local.preflight import (
    PROBES,
    PreflightError,
    TokenServer,
    check_served_tokenizer,
    special_tokens,
    tokenizer_hash,
)
from prime_composer.local.probe_numbers import (
    hidden_by_k,
    is_bfloat16_like,
    mean_entropy,
    recommended_k,
)
from prime_composer.local.probe_report import (
    Agreement,
    Attempts,
    HeadShape,
    ModelFacts,
    NotMeasured,
    PluginReport,
    SpecialToken,
    SupportFacts,
    TeacherReport,
    Throughput,
    TokenizerFacts,
)
from prime_composer.local.student_forward import student_inputs
from prime_composer.local.tokenized_problems import TokenizedProblems

COLUMNS = (0, 1, 8, 32, 64)
"""The values of K whose speed is measured, beside the recipe's own."""

MOST_K = 1024
"""Largest K that a server is asked for when its own limit is not known."""

MOST_ENTRIES = 2**24
"""Positions times K of the rollouts that a support is measured on: 128 MiB in float64."""

CHECKPOINT_TOKENS = 512
"""Tokens of prompt and completion whose numbers are compared with a checkpoint's forward pass."""

NO_ROLLOUT = "there is no rollout for it"

SupportSize = int | Literal["full", "states"]
"""What a teacher is asked for: K ids, the whole vocabulary, or hidden states instead of it."""


@dataclass(frozen=True, eq=False)
class Target:
    """A teacher and the rollouts that it scores.

    Attributes:
        table: of the recipe.
        facts: model, backend and dtype; limits are added by the probe.
        limits: what its backend reports.
        scorer: None for a policy teacher.
        score_rollouts: scores rollouts at a K, after the given prompts or their own.
        samples: rollouts of the student.
        prompts: what the teacher reads instead of each rollout's own prompt.
        share: share of the recipe's rollouts that it scores.
        load_tokenizer: returns its tokenizer; None where the directory has none.
    """

    table: str
    facts: ModelFacts
    limits: Limits
    scorer: Scorer | None
    score_rollouts: Callable[
        [Sequence[Rollout], SupportSize, Sequence[Sequence[int]] | None], list[TeacherScores]
    ]
    samples: Sequence[Sample]
    prompts: Sequence[Sequence[int]] | None
    share: float
    load_tokenizer: Callable[[], Any]

    def score(self, count: int, k: SupportSize) -> list[TeacherScores]:
        """Score the first ``count`` rollouts at K."""
        rollouts = [sample.rollout for sample in self.samples[:count]]
        return self.score_rollouts(rollouts, k, self.prompts and self.prompts[:count])


@dataclass(frozen=True, eq=False)
class Compared:
    """Student and teacher at every token of some rollouts.

    Attributes:
        token_ids: the sampled tokens, [n].
        endings: whether the token ends a finished rollout, [n].
        student: log p of the sampled tokens, [n].
        teacher: log q of the sampled tokens, [n].
        student_support: log p of the teacher's K ids, [n, k].
        teacher_support: log q of them, [n, k].
    """

    token_ids: Int[Tensor, " n"]
    endings: Bool[Tensor, " n"]
    student: Float[Tensor, " n"]
    teacher: Float[Tensor, " n"]
    student_support: Float[Tensor, "n k"]
    teacher_support: Float[Tensor, "n k"]


def probe_teacher(
    target: Target,
    model: nn.Module,
    tokenized: TokenizedProblems,
    columns: Sequence[SupportSize],
    own_column: SupportSize,
    step_tokens: float,
    micro_batch_tokens: int,
    seconds: float,
) -> TeacherReport:
    """Measure a teacher.

    Args:
        target: the teacher and its rollouts.
        model: the student that trains.
        tokenized: the problems, in the student's tokens.
        columns: values of K whose speed is measured.
        own_column: the recipe's, which is among them.
        step_tokens: rollout tokens of a step of the recipe.
        micro_batch_tokens: padded tokens per forward of the student.
        seconds: time for each column.
    """
    found = Attempts()
    tokenizer, tokenizer_facts, same_tokenizer = found.attempt(
        "tokenizer", lambda: find_tokenizer(target, tokenized.tokenizer)
    ) or (None, None, None)
    same_prompts = found.attempt(
        "prompts", lambda: equal_prompts(target.samples, tokenized, tokenizer)
    )
    largest, exact = found.attempt("largest K", lambda: largest_k(target)) or (None, False)
    facts = replace(
        target.facts,
        context=target.limits.max_model_len,
        vocabulary=target.limits.vocab_size,
        largest_k=largest,
        largest_k_exact=exact,
        logprob_mode=found.attempt("log-prob mode", lambda: scoring_mode(target)),
        tokenizer=tokenizer_facts,
    )
    count = found.attempt("scoring", lambda: rollouts_within(target, seconds)) or 0
    throughput = [
        measure_column(found, target, k, count, seconds, target.share * step_tokens)
        for k in (columns if count else ())
    ]
    plugin = plugin_report(found, target, own_column, throughput, count, seconds)
    compared = found.attempt(
        "support",
        lambda: compare(target, model, largest_measured(throughput, largest), micro_batch_tokens),
    )
    support, rows = None, []
    if compared is not None:
        support = found.attempt("support", lambda: support_facts(compared, columns))
        teacher_ids = {} if tokenizer_facts is None else tokenizer_facts.special_ids
        rows = special_token_rows(tokenized.tokenizer, teacher_ids, compared)
        if not rows:
            found.unmeasured["special tokens"] = "the rollouts have none, and none of them ended"
    return TeacherReport(
        facts=facts,
        same_tokenizer=same_tokenizer,
        same_prompts=same_prompts,
        head_bfloat16=None if compared is None else is_bfloat16_like(compared.teacher_support),
        agreement=found.attempt("agreement", lambda: checkpoint_agreement(target)),
        special_tokens=rows,
        share=target.share,
        throughput=throughput,
        plugin=plugin,
        support=support,
        wrong_answers=found.wrong_answers,
        unmeasured=found.unmeasured,
    )


def find_tokenizer(target: Target, student: Any) -> tuple[Any, TokenizerFacts, bool]:
    """Return the teacher's tokenizer, its facts, and whether its tokens and ids are the student's.

    A server is asked too, also where its tokenizer is on this machine.

    Returns:
        None in place of a tokenizer that is not on this machine.

    Raises:
        NotMeasured: it is not on this machine, and cannot be asked.
    """
    tokenizer = target.load_tokenizer()
    served = served_alike(target.scorer, student)
    if tokenizer is not None:
        own, facts = read_tokenizer(student), read_tokenizer(tokenizer)
        same = (own.vocabulary_hash, own.split_hash) == (facts.vocabulary_hash, facts.split_hash)
        return tokenizer, facts, same and served is not False
    if served is None:
        raise NotMeasured("its tokenizer is not on this machine, and cannot be asked")
    return None, ask_tokenizer(target.scorer, student), served


def served_alike(scorer: Scorer | None, student: Any) -> bool | None:
    """Return whether a server reads and writes as the student's tokenizer; None: not known."""
    if scorer is None:
        return None
    try:
        return check_served_tokenizer(student, scorer) or None
    except PreflightError:
        return False


def ask_tokenizer(scorer: Scorer | None, student: Any) -> TokenizerFacts:
    """Ask a server for the ids of the student's special tokens, those that are one token there."""
    assert isinstance(scorer, TokenServer)
    ids = {}
    for token in read_tokenizer(student).special_ids:
        answer = scorer.tokenize(token)
        if answer is not None and len(answer) == 1:
            ids[token] = answer[0]
    return TokenizerFacts("server", split_hash=split_hash(scorer.tokenize), special_ids=ids)


def read_tokenizer(tokenizer: Any) -> TokenizerFacts:
    """Return hashes, EOS and special tokens of a tokenizer on this machine."""
    template = getattr(tokenizer, "chat_template", None)
    vocabulary = tokenizer.get_vocab()
    return TokenizerFacts(
        source="files",
        tokens=len(tokenizer),
        vocabulary_hash=tokenizer_hash(tokenizer),
        split_hash=split_hash(partial(tokenizer.encode, add_special_tokens=False)),
        template_hash=None if template is None else short_hash(str(template)),
        eos=tokenizer.eos_token,
        special_ids={
            token: vocabulary[token] for token in special_tokens(tokenizer) if token in vocabulary
        },
    )


def short_hash(text: str) -> str:
    """Return 12 hexadecimal digits of a text's SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def split_hash(encode: Callable[[str], list[int] | None]) -> str:
    """Return a hash of how the preflight's texts are split."""
    return short_hash(repr([encode(text) for text in PROBES]))


def equal_prompts(samples: Sequence[Sample], tokenized: TokenizedProblems, tokenizer: Any) -> bool:
    """Return whether the teacher's own tokenizer and template write the rollouts' prompts alike.

    Raises:
        NotMeasured: its tokenizer is not on this machine, or there is no rollout.
        ValueError: the recipe asks for a chat template and the tokenizer has none.
    """
    if tokenizer is None:
        raise NotMeasured("its tokenizer is not on this machine")
    if not samples:
        raise NotMeasured(NO_ROLLOUT)
    own = TokenizedProblems(tokenized.problem_set, tokenizer)
    return all(own.prompt(sample.problem) == tokenized.prompt(sample.problem) for sample in samples)


def largest_k(target: Target) -> tuple[int, bool]:
    """Return the largest K that scoring accepts, and whether a larger one is refused.

    A server does not report its --max-logprobs. It is asked for one token at several K.

    Raises:
        ValueError: it refuses K = 1, or gives a wrong answer.
    """
    if target.limits.max_logprobs is not None:
        return target.limits.max_logprobs, True
    if not target.samples:
        raise NotMeasured(NO_ROLLOUT)
    prompt, token = target.samples[0].rollout.token_ids.tolist()[:2]
    rollout = make_rollout([prompt], [token], [0.0], "length", 0)

    def accepts(k: int) -> bool:
        try:
            target.score_rollouts([rollout], k, None)
        except InvalidAnswer:
            raise
        except ValueError:
            return False
        return True

    target.score_rollouts([rollout], 1, None)
    vocab_size = target.limits.vocab_size
    low, high = 1, MOST_K if vocab_size is None else min(MOST_K, vocab_size)
    if accepts(high):
        return high, high == vocab_size
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if accepts(middle) else (low, middle)
    return low, True


def scoring_mode(target: Target) -> str:
    """Return the mode of the log-probs that the teacher's engine samples with.

    Scores themselves are always those of the full vocabulary at temperature 1.
    """
    sampler = None if target.scorer is None else target.scorer.sampler
    if sampler is None:
        return "raw"
    if not target.samples:
        raise NotMeasured(NO_ROLLOUT)
    return logprob_mode(sampler, target.samples[0].rollout.token_ids.tolist()[:2])


def logprob_mode(sampler: Sampler, prompt: Sequence[int]) -> str:
    """Return "processed" where log mu is that after temperature and top-p, else "raw"."""
    mode: str | None = getattr(sampler, "logprobs_mode", None)
    if mode is not None:
        return mode.removesuffix("_logprobs")
    try:
        sampler.generate([prompt], SamplingParams(temperature=2.0, max_tokens=1), seed=0)
    except ValueError as error:
        if "--logprobs-mode" not in str(error):
            raise
        return "raw"
    return "processed"


def rollouts_within(target: Target, seconds: float) -> int:
    """Return how many rollouts the teacher scores in about ``seconds``, at least one.

    Raises:
        NotMeasured: there is no rollout for it.
    """
    if not target.samples:
        raise NotMeasured(NO_ROLLOUT)
    target.score(1, 0)  # connects and warms up
    start = time.perf_counter()
    target.score(1, 0)
    elapsed = time.perf_counter() - start
    return max(1, min(len(target.samples), int(seconds / elapsed)))


def measure_column(
    found: Attempts,
    target: Target,
    k: SupportSize,
    count: int,
    seconds: float,
    step_tokens: float,
) -> Throughput:
    """Measure one column of the table of speeds.

    Args:
        found: keeps the teacher's reason where it refuses.
        target: the teacher and its rollouts.
        k: K.
        count: rollouts of a call.
        seconds: time for the column.
        step_tokens: rollout tokens that this teacher scores in a step.
    """
    name = f"K = {k}"
    speed = found.attempt(name, lambda: tokens_per_second(target, k, count, seconds))
    if speed is None:
        return Throughput(str(k), refused=found.unmeasured[name])
    return Throughput(str(k), speed, step_tokens / speed)


def tokens_per_second(target: Target, k: SupportSize, count: int, seconds: float) -> float:
    """Score ``count`` rollouts at K again and again, until ``seconds`` are over."""
    tokens = sum(int(sample.rollout.loss_mask.sum()) for sample in target.samples[:count])
    start = time.perf_counter()
    scored, elapsed = 0, 0.0
    while elapsed < seconds:
        target.score(count, k)
        scored += tokens
        elapsed = time.perf_counter() - start
    return scored / elapsed


def plugin_report(
    found: Attempts,
    target: Target,
    own_column: SupportSize,
    throughput: Sequence[Throughput],
    count: int,
    seconds: float,
) -> PluginReport | None:
    """Return what a teacher's server answers in binary; None where it is no server.

    Args:
        found: keeps the reasons of what cannot be measured.
        target: the teacher and its rollouts.
        own_column: the recipe's K.
        throughput: the measured speeds, in binary where the server can.
        count: rollouts of a call; 0 for none.
        seconds: time for the speed in JSON.
    """
    scorer = target.scorer
    if not isinstance(scorer, PluginServer):
        return None
    client = found.attempt("scoring plugin", scorer.plugin)
    if "scoring plugin" in found.unmeasured:
        return None
    name = str(own_column)
    speed = next((e.tokens_per_second for e in throughput if e.column == name), None)
    if client is None:
        falls_back = ["every score"]
        return PluginReport(None, None, [], None, name, None, speed, falls_back)

    def head_shape() -> HeadShape:
        head = client.head_facts()
        return HeadShape(head.rows, head.columns, head.dtype, head.computed_in, head.sha256)

    plain = replace(target, score_rollouts=partial(scorer.score, binary=False))
    return PluginReport(
        version=client.version,
        vllm=client.facts.vllm,
        kinds=client.facts.kinds,
        head=found.attempt("output head", head_shape),
        column=name,
        tokens_per_second=speed,
        json_tokens_per_second=found.attempt(
            "JSON", lambda: tokens_per_second(plain, own_column, count, seconds)
        )
        if count and own_column != "states"
        else None,
        falls_back=[],
    )


def largest_measured(throughput: Sequence[Throughput], limit: int | None) -> int:
    """Return the K of the support: the largest one of the table that the teacher gives.

    Args:
        throughput: what was accepted, and what was refused.
        limit: the largest K that scoring accepts, where known.

    Raises:
        NotMeasured: the teacher accepted no K.
    """
    accepted = [entry.column for entry in throughput if entry.tokens_per_second is not None]
    sizes = [int(column) for column in accepted if column.isdigit()]
    if not sizes:
        raise NotMeasured("no K was accepted")
    return max(*sizes, 0 if limit is None else min(limit, max(COLUMNS)))


@torch.no_grad()
def compare(target: Target, model: nn.Module, k: int, micro_batch_tokens: int) -> Compared:
    """Score rollouts at K, and run the student over them.

    Raises:
        ValueError: the teacher refused.
    """
    lengths = [sample.length for sample in target.samples]
    count, positions = 0, 0
    while count < len(lengths) and (count == 0 or positions * max(k, 1) <= MOST_ENTRIES):
        positions += lengths[count]
        count += 1
    scores = target.score(count, k)
    samples = [
        replace(sample, scores=own, advantage=None)
        for sample, own in zip(target.samples[:count], scores, strict=True)
    ]
    parts = []
    for indices in token_batches(lengths[:count], micro_batch_tokens):
        batch = [samples[index] for index in indices]
        inputs = student_inputs(model, batch)
        own = inputs.trainer_logprobs
        support = inputs.support
        none = own.new_empty((len(own), 0))
        parts.append(
            (
                given(inputs.token_ids),
                torch.cat([ends(sample.rollout) for sample in batch]),
                own,
                given(inputs.ref_logprobs),
                none if support is None else support.student_logprobs,
                none if support is None else support.teacher_logprobs,
            )
        )
    return Compared(*(torch.cat(columns).cpu() for columns in zip(*parts, strict=True)))


def ends(rollout: Rollout) -> Bool[Tensor, " n"]:
    """Return which trained token ends the rollout: the last one, if it was not cut off."""
    last = torch.zeros(int(rollout.loss_mask.sum()), dtype=torch.bool)
    last[-1] = rollout.finish_reason == "stop"
    return last


def support_facts(compared: Compared, columns: Sequence[SupportSize]) -> SupportFacts:
    """Return what smaller supports hide of the measured one.

    Raises:
        NotMeasured: the teacher gave no support.
    """
    student, teacher = compared.student_support, compared.teacher_support
    largest = teacher.shape[1]
    if not largest:
        raise NotMeasured("the teacher gives no log-probs beside the sampled token's")
    sizes = sorted({k for k in columns if isinstance(k, int) and 0 < k <= largest} | {largest})
    return SupportFacts(
        positions=len(teacher),
        largest_k=largest,
        entropy=mean_entropy(teacher),
        by_k=[hidden_by_k(student, teacher, k) for k in sizes],
        recommended_k=recommended_k(student, teacher),
    )


def special_token_rows(
    tokenizer: Any, teacher_ids: Mapping[str, int], compared: Compared
) -> list[SpecialToken]:
    """Return both models' mean probability of each special token, where the rollouts have it.

    Args:
        tokenizer: the student's.
        teacher_ids: the teacher's special tokens.
        compared: student and teacher at the rollouts' tokens.
    """
    names = {index: token for token, index in read_tokenizer(tokenizer).special_ids.items()}
    last = {int(index) for index in compared.token_ids[compared.endings]}
    rows = []
    for index in sorted(names.keys() | last):
        here = compared.token_ids == index
        if not here.any():
            continue
        token = names.get(index, tokenizer.decode([index]))
        rows.append(
            SpecialToken(
                token=token,
                student_id=index,
                teacher_id=teacher_ids.get(token),
                occurrences=int(here.sum()),
                endings=int((here & compared.endings).sum()),
                student_probability=float(compared.student[here].double().exp().mean()),
                teacher_probability=float(compared.teacher[here].double().exp().mean()),
            )
        )
    return rows


def checkpoint_agreement(target: Target) -> Agreement:
    """Compare a server's numbers with a float32 forward pass of its checkpoint on this machine.

    Raises:
        NotMeasured: the teacher is no server, or its checkpoint is not here or too large.
        ValueError: the checkpoint cannot be loaded.
    """
    if target.facts.backend != "server":
        raise NotMeasured("it runs in this process, from its own checkpoint")
    folder = Path(target.facts.model)
    if not folder.is_dir():
        raise NotMeasured(f"{target.facts.model} is no directory on this machine")
    if not target.samples:
        raise NotMeasured(NO_ROLLOUT)
    weights = 2 * sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if weights > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2:
        raise NotMeasured(f"the checkpoint takes {weights / 2**30:.0f} GiB in float32")
    count, tokens = 0, 0
    while count < len(target.samples) and (count == 0 or tokens < CHECKPOINT_TOKENS):
        tokens += target.samples[count].length
        count += 1
    scores = target.score(count, 0)
    model = load_model(folder, "float32", "cpu")
    sequences = sequences_to_score(
        [sample.rollout for sample in target.samples[:count]],
        vocab_size=lm_head_weight(model).shape[0],
    )
    expected = sequence_logprobs(model, [sequence.token_ids for sequence in sequences])
    has = ~torch.cat([sequence.lacks for sequence in sequences])
    return agreement(
        torch.cat([own.ref_logprobs for own in scores])[has],
        torch.cat([row[s.start :] for s, row in zip(sequences, expected, strict=True)])[has],
    )


def agreement(one: Float[Tensor, " n"], other: Float[Tensor, " n"]) -> Agreement:
    """Return the distance between two lists of log-probs."""
    difference = (one.double() - other.double()).abs()
    return Agreement(float(difference.max()), float(difference.mean()), len(difference))
