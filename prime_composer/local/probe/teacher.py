"""Measure one teacher on rollouts of the student: tokens, limits, numbers, speed, and a K."""

import hashlib
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from prime_composer.backends.hf_model import load_model, token_batches
from prime_composer.backends.protocols import (
    Sampler,
    SamplingParams,
    Scorer,
)
from prime_composer.contract import Scores, given
from prime_composer.divergences import entropy, reverse_kl
from prime_composer.local.probe.report import (
    NO_ROLLOUT,
    Agreement,
    Attempts,
    HiddenByK,
    ModelFacts,
    NotMeasured,
    PluginReport,
    SpecialToken,
    SupportFacts,
    SupportSize,
    TeacherReport,
    Throughput,
    TokenizerFacts,
)
from prime_composer.local.probe.tokenizers import pair_facts
from prime_composer.local.tokenized_problems import TokenizedProblems
from prime_composer.recipe.teacher import TeacherPromptConfig
from prime_composer.step.batch import Batch, Sample, with_scores
from prime_composer.step.student_forward import student_inputs
from prime_composer.teachers.compatibility import (
    PROBES,
    PreflightError,
    TokenizingServer,
    check_served_tokenizer,
    check_tokenizers,
    special_token_texts,
    tokenizer_hash,
)
from prime_composer.teachers.own_prompt import OwnPromptScorer, TeacherPrompts
from prime_composer.teachers.own_tokenizer import OwnTokenizerScorer
from prime_composer.teachers.server import ServerScorer
from prime_composer.teachers.transformers import TransformersScorer

COLUMNS = (0, 1, 8, 20, 32, 64)
"""The values of K whose speed is measured, beside the recipe's own. A vLLM server gives at most 20
unless it was told otherwise."""

CHECKPOINT_ROLLOUTS = 4  # Rollouts whose numbers are compared with a checkpoint's forward pass

LARGEST_HIDDEN_SHARE = 0.05  # Share of the KL at the largest K that the recommended K may hide


@dataclass(frozen=True, eq=False)
class Target:
    """A teacher and the rollouts that it is measured on."""

    table: str  # of the recipe
    facts: ModelFacts  # what recipe and backend say; the rest is added by the probe
    scorer: Scorer | None  # None for a policy teacher
    samples: Sequence[Sample]  # rollouts of the student
    share: float  # share of the recipe's rollouts that it scores
    load_tokenizer: Callable[[], Any]  # returns its tokenizer; None where the directory has none

    def score(self, samples: Sequence[Sample], column: SupportSize) -> list[Scores]:
        """Return the teacher's answers to one column of the table of speeds."""
        rollouts, hidden = [sample.rollout for sample in samples], column == "states"
        return given(self.scorer).score(
            rollouts, 0 if column == "states" else column, hidden=hidden
        )

    @property
    def has_own_tokenizer(self) -> bool:
        """Whether its scores of the student's tokens are made of those of its own."""
        return isinstance(self.scorer, OwnTokenizerScorer)

    @property
    def asked(self) -> Scorer | None:
        """The scorer that asks the teacher, in the teacher's tokens and with its prompts."""
        return self.scorer.scorer if isinstance(self.scorer, OwnPromptScorer) else self.scorer


def probe_teacher(
    target: Target,
    model: nn.Module,
    tokenized: TokenizedProblems,
    own: SupportSize,
    step_tokens: int,
    micro_batch_tokens: int,
    seconds: float,
) -> TeacherReport:
    """Measure a teacher on rollouts of the student, ``model``, each column for ``seconds``."""
    found = Attempts()
    tokenizer, facts, same = found.attempt(
        "tokenizer", lambda: find_tokenizer(target, tokenized.tokenizer)
    ) or (None, None, None)
    columns = [*COLUMNS, own] if isinstance(own, str) else sorted({*COLUMNS, own})
    compared, support, tokens = None, None, []
    if not target.samples:
        found.unmeasured["scoring"] = NO_ROLLOUT
        columns = []
    throughput = [measure_column(found, target, k, seconds, step_tokens) for k in columns]
    accepted = [entry.column for entry in throughput if entry.refused is None]
    widest = max((int(k) for k in accepted if k.isdigit()), default=0)
    if accepted:
        compared = found.attempt(
            "support", lambda: both_models(target, model, widest, micro_batch_tokens)
        )
    if compared is not None:
        support = found.attempt("support", lambda: support_facts(compared, columns))
        tokens = special_token_rows(tokenized.tokenizer, facts, compared)
        if not tokens:
            found.unmeasured["special tokens"] = "the rollouts have none, and none of them ended"
    mode: str | None = "raw"  # as scores always are
    if target.scorer is not None and (sampler := target.scorer.sampler) is not None:
        prompt = tokenized.prompt(tokenized.problem_set.practice[0])
        mode = found.attempt("log-prob mode", lambda: logprob_mode(sampler, prompt))
    pair, scorer = None, target.scorer
    if isinstance(scorer, OwnTokenizerScorer) and target.samples:
        k = own if isinstance(own, int) and own else widest
        pair = found.attempt(
            "tokenizers",
            lambda: pair_facts(scorer, target.samples, tokenized.tokenizer, tokenizer, k),
        )
    largest_k = target.facts.largest_k or widest or None
    return TeacherReport(
        facts=replace(
            target.facts,
            largest_k=largest_k,
            largest_k_exact=target.facts.largest_k is not None if largest_k else None,
            logprob_mode=mode,
            tokenizer=facts,
        ),
        same_tokenizer=same,
        same_prompts=found.attempt("prompts", lambda: equal_prompts(target, tokenized, tokenizer)),
        # Sums over tokens of a teacher show no rounding of its logits.
        head_bfloat16=None
        if compared is None or target.has_own_tokenizer
        else is_bfloat16_like(compared.teacher_support),
        agreement=found.attempt("agreement", lambda: checkpoint_agreement(target)),
        special_tokens=tokens,
        share=target.share,
        throughput=throughput,
        plugin=plugin_report(found, target.asked),
        support=support,
        tokenizers=pair,
        wrong_answers=found.wrong_answers,
        unmeasured=found.unmeasured,
    )


def find_tokenizer(target: Target, student: Any) -> tuple[Any, TokenizerFacts, bool]:
    """Return the teacher's tokenizer, its facts, and whether tokens and ids are the student's."""
    tokenizer, scorer, was_asked, same = target.load_tokenizer(), target.asked, True, True
    try:
        if tokenizer is not None:
            check_tokenizers(student, tokenizer)
        was_asked = scorer is not None and check_served_tokenizer(student, scorer)
    except PreflightError:
        same = False
    if tokenizer is not None:
        return tokenizer, read_tokenizer(tokenizer), same
    if not was_asked:
        raise NotMeasured("its tokenizer is not on this machine, and cannot be asked")
    return None, ask_tokenizer(scorer, student), same


def ask_tokenizer(scorer: Scorer | None, student: Any) -> TokenizerFacts:
    """Ask a server for the ids of the student's special tokens, those that are one token there."""
    assert isinstance(scorer, TokenizingServer)
    answers = {token: scorer.tokenize(token) for token in special_token_texts(student)}
    ids = {token: ids[0] for token, ids in answers.items() if ids is not None and len(ids) == 1}
    return TokenizerFacts(False, hash_of([scorer.tokenize(text) for text in PROBES]), ids)


def read_tokenizer(tokenizer: Any) -> TokenizerFacts:
    """Return hashes, EOS and special tokens of a tokenizer on this machine."""
    template = getattr(tokenizer, "chat_template", None)
    # The end comes first: a table shows some of many.
    special = sorted(special_token_texts(tokenizer), key=lambda token: token != tokenizer.eos_token)
    vocabulary = tokenizer.get_vocab()
    return TokenizerFacts(
        from_files=True,
        vocabulary_hash=tokenizer_hash(tokenizer),
        split_hash=hash_of([tokenizer.encode(t, add_special_tokens=False) for t in PROBES]),
        template_hash=None if template is None else hash_of(template),
        eos=tokenizer.eos_token,
        special_ids={token: vocabulary[token] for token in special if token in vocabulary},
    )


def hash_of(value: object) -> str:
    """Return 12 hexadecimal digits of the SHA-256 of what a value is printed as."""
    return hashlib.sha256(str(value).encode()).hexdigest()[:12]


def equal_prompts(target: Target, tokenized: TokenizedProblems, tokenizer: Any) -> bool:
    """Return whether the teacher is sent what its own chat template writes, or without one what
    its tokenizer does."""
    if tokenizer is None:
        raise NotMeasured("its tokenizer is not on this machine")
    if not target.samples:
        raise NotMeasured(NO_ROLLOUT)
    if isinstance(target.scorer, OwnPromptScorer):
        raise NotMeasured("it reads prompts of its own")
    has_template = getattr(tokenizer, "chat_template", None) is not None
    chats = TeacherPromptConfig(chat_template=True if has_template else None)
    own = TeacherPrompts(tokenized.problem_set, tokenizer, tokenized.prompt, target.table, chats)
    problems = [sample.problem for sample in target.samples]
    return all(own.of(problem) == tokenized.prompt(problem) for problem in problems)


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


def measure_column(
    found: Attempts, target: Target, k: SupportSize, seconds: float, step_tokens: int
) -> Throughput:
    """Measure the speed at one K; a refusal is kept in ``found`` too."""
    name = f"K = {k}"
    speed = found.attempt(name, lambda: tokens_per_second(target, k, seconds))
    if speed is None:
        return Throughput(str(k), refused=found.unmeasured[name])
    return Throughput(str(k), speed, target.share * step_tokens / speed if step_tokens else None)


def tokens_per_second(target: Target, k: SupportSize, seconds: float) -> float:
    """Score 1, 2, 4, ... rollouts at K until a call takes ``seconds``, or it has all of them."""
    samples, count = target.samples, 1
    while True:
        start = time.perf_counter()
        target.score(samples[:count], k)
        elapsed = time.perf_counter() - start
        if elapsed >= seconds or count >= len(samples):
            return Batch(samples[:count]).tokens / elapsed
        count *= 2


def plugin_report(found: Attempts, scorer: Scorer | None) -> PluginReport | None:
    """Return what a teacher's server says of its plugin; None where it is no server."""
    if not isinstance(scorer, ServerScorer):
        return None
    client = found.attempt("scoring plugin", lambda: scorer.client)
    if "scoring plugin" in found.unmeasured:
        return None
    if client is None or client.facts is None:
        return PluginReport(None, None, None, [], None)

    def head() -> dict[str, Any]:
        facts = scorer.served_head().facts()
        names = ("rows", "columns", "dtype", "computed_in", "sha256")
        return {name: getattr(facts, name) for name in names}

    return PluginReport(
        version=client.version,
        vllm=client.facts.vllm,
        runner=client.facts.runner,
        kinds=client.facts.kinds,
        head=found.attempt("output head", head),
    )


@dataclass(frozen=True, eq=False)
class Compared:
    """Student and teacher at every token of some rollouts."""

    token_ids: Int[Tensor, " n"]  # the sampled tokens, [n]
    endings: Bool[Tensor, " n"]  # whether the token ends a finished rollout, [n]
    student: Float[Tensor, " n"]  # log p of the sampled tokens, [n]
    teacher: Float[Tensor, " n"]  # log q of the sampled tokens, [n]
    # log p of the teacher's K ids, most probable for the teacher first, [n, k]
    student_support: Float[Tensor, "n k"]
    teacher_support: Float[Tensor, "n k"]  # log q of them, [n, k]


@torch.no_grad()
def both_models(target: Target, model: nn.Module, k: int, micro_batch_tokens: int) -> Compared:
    """Score rollouts at K, and run the student over them."""
    scores = target.score(target.samples, k)
    scored = [
        with_scores(Sample(sample.rollout, sample.problem), own)
        for sample, own in zip(target.samples, scores, strict=True)
    ]
    samples = [sample for sample in scored if sample is not None]
    if not samples:
        raise NotMeasured("the teacher has a score of no token of the rollouts")
    parts = []
    for indices in token_batches([sample.length for sample in samples], micro_batch_tokens):
        batch = [samples[index] for index in indices]
        inputs = student_inputs(model, batch)
        own = inputs.trainer_logprobs
        support = inputs.support and inputs.support.masked(inputs.loss_mask)
        none = own.new_empty((len(own), 0))
        # The last trained token ends a rollout that was not cut off.
        counts = torch.tensor([int(sample.rollout.loss_mask.sum()) for sample in batch])
        endings = torch.zeros(len(own), dtype=torch.bool)
        rollouts = [sample.rollout for sample in batch]
        stopped = [one.finish_reason == "stop" and bool(one.loss_mask[-1]) for one in rollouts]
        endings[counts.cumsum(0) - 1] = torch.tensor(stopped)
        parts.append(
            (
                given(inputs.token_ids),
                endings,
                own,
                given(inputs.ref_logprobs),
                none if support is None else support.student_logprobs,
                none if support is None else support.teacher_logprobs,
            )
        )
    return Compared(*(torch.cat(columns).cpu() for columns in zip(*parts, strict=True)))


def support_facts(compared: Compared, columns: Sequence[SupportSize]) -> SupportFacts:
    """Return what smaller supports hide of the measured one, and the smallest that hides little."""
    student, teacher = compared.student_support.double(), compared.teacher_support.double()
    largest = teacher.shape[1]
    if not largest:
        raise NotMeasured("the teacher gives no log-probs beside the sampled token's")
    sizes = {k for k in columns if isinstance(k, int) and 0 < k <= largest} | {largest}

    def hides_little(k: int) -> bool:
        return hidden_by_k(student, teacher, k).hidden <= LARGEST_HIDDEN_SHARE

    return SupportFacts(
        positions=len(teacher),
        largest_k=largest,
        entropy=float(entropy(teacher, normalization="tail").mean()),
        by_k=[hidden_by_k(student, teacher, k) for k in sorted(sizes)],
        # The KL never falls with K, so that bisection finds the smallest one.
        recommended_k=1 + bisect_left(range(1, largest), True, key=hides_little),
    )


def hidden_by_k(
    student: Float[Tensor, "n k_max"], teacher: Float[Tensor, "n k_max"], k: int
) -> HiddenByK:
    """Return what the teacher's top K hides of KL(p || q), the most probable ids first."""
    measured, largest = (
        float(reverse_kl(student[:, :size], teacher[:, :size], normalization="tail").mean())
        for size in (k, teacher.shape[1])
    )
    outside = 1 - teacher[:, :k].exp().sum(dim=-1)
    return HiddenByK(
        k=k,
        mass_outside=float(outside.clamp(min=0).mean()),
        reverse_kl=measured,
        hidden=max(0.0, 1 - measured / largest) if largest > 0 else 0.0,
    )


def is_bfloat16_like(teacher: Float[Tensor, "n k"]) -> bool:
    """Return whether log q, most probable first, shows logits that were rounded to bfloat16.

    Differences of log-probs are those of the logits: multiples of 2^-9 if these were rounded. A
    float16 head shows the same where its top logits are 2 and more.
    """
    # The bfloat16 numbers of 0.25 and more are multiples of the grid. A float32 log-softmax above
    # -32 rounds by less than the tolerance. The largest logits have the coarsest spacing.
    grid, tolerance = 2.0**-9, 2.0**-18
    top = teacher[:, :4].double()
    differences = top[:, :1] - top[:, 1:]
    counted = differences[(top[:, 1:] > -30) & (differences > tolerance)]
    on_grid = (counted - (counted / grid).round() * grid).abs() <= tolerance
    # Of a float32 head 0.004 of them are there by chance; a few differences prove nothing.
    return len(counted) >= 20 and float(on_grid.double().mean()) >= 0.9


def special_token_rows(
    tokenizer: Any, teacher: TokenizerFacts | None, compared: Compared
) -> list[SpecialToken]:
    """Return both models' mean probability of each special token, where the rollouts have it."""
    names = {index: token for token, index in read_tokenizer(tokenizer).special_ids.items()}
    teacher_ids = {} if teacher is None else teacher.special_ids
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
    """Compare a server's numbers with a float32 forward pass of its checkpoint on this machine."""
    if target.has_own_tokenizer:
        raise NotMeasured("its tokens are not the student's")
    if isinstance(target.scorer, OwnPromptScorer):
        raise NotMeasured("it reads prompts of its own")
    if target.facts.url is None:
        raise NotMeasured("it runs in this process, from its own checkpoint")
    folder = Path(target.facts.model)
    if not folder.is_dir():
        raise NotMeasured(f"{target.facts.model} is no directory on this machine")
    samples = target.samples[:CHECKPOINT_ROLLOUTS]
    if not samples:
        raise NotMeasured(NO_ROLLOUT)
    weights = 2 * sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if weights > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2:
        raise NotMeasured(f"the checkpoint takes {weights / 2**30:.0f} GiB in float32")
    logprobs = [
        own.ref_logprobs.masked_fill(~own.all_scored, torch.nan) for own in target.score(samples, 0)
    ]
    return forward_agreement(load_model(folder, "float32", "cpu"), samples, logprobs)


def forward_agreement(
    model: nn.Module, samples: Sequence[Sample], logprobs: Sequence[Float[Tensor, " _n"]]
) -> Agreement:
    """Compare log-probs of rollouts with those of a forward pass of the model.

    They are of each rollout from its first trained token on, NaN where a token has none.
    """
    expected = TransformersScorer(model).score([sample.rollout for sample in samples], 0)
    difference = torch.cat(list(logprobs)).double()
    difference -= torch.cat([own.ref_logprobs for own in expected])
    known = difference[~difference.isnan()].abs()
    if not len(known):
        raise NotMeasured("no rollout was sampled")
    return Agreement(float(known.max()), float(known.mean()), len(known))
