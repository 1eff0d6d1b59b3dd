"""Whether a teacher reads and writes the student's tokens: tokenizers, vocabularies, ids."""

import hashlib
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from prime_composer.backends.protocols import Limits, Scorer
from prime_composer.contract import Scores
from prime_composer.problems.prompts import Ends
from prime_composer.scoring.shared_vocabulary import LOG_FLOOR, MOST_PADDING, alien

PROBES = (  # Numbers, white space, byte-level characters: where tokenizers of one family differ
    "Natalia sold 48/2 = 24 clips in May.\nShe has $1,234.50 left.\n#### 72",
    "  def f(x):\n\treturn {'a': [x, -1e-5]}  # ok",
    "Größe, naïve, 東京, Привет, 👍🏽",
)


OWN_APART = 0.25  # Nats per token between what a server samples and scores, on average

SAMPLED_IDS = 256  # Ids of the vocabulary that a teacher's server is asked to write as text


COMPARE_TEXT = (  # What to do with a teacher that has another tokenizer
    'set tokenizer = "own" in its table, to compare probabilities of the student\'s own tokens'
)


class PreflightError(ValueError):
    """The recipe's parts do not fit together. The message names the remedy."""


def tokenizer_hash(tokenizer: Any) -> str:
    """Return a fingerprint of the vocabulary: every token with its id, added ones included."""
    digest = hashlib.sha256()
    for token, index in sorted(tokenizer.get_vocab().items()):
        digest.update(f"{token}\0{index}\n".encode())
    return digest.hexdigest()[:12]


def check_tokenizers(student: Any, teacher: Any) -> None:
    """Check that both have the same tokens with the same ids, and split the same text equally."""
    remedy = f"choose a teacher and a student with one tokenizer, or {COMPARE_TEXT}"
    student_vocab, teacher_vocab = student.get_vocab(), teacher.get_vocab()
    for token in sorted({*special_token_texts(student), *special_token_texts(teacher)}):
        student_id, teacher_id = student_vocab.get(token), teacher_vocab.get(token)
        if student_id != teacher_id:
            raise PreflightError(
                f"The special token {token!r} has id {student_id} for the student and {teacher_id} "
                f"for the teacher (None: it has no such token); {remedy}."
            )
    student_hash, teacher_hash = tokenizer_hash(student), tokenizer_hash(teacher)
    if student_hash != teacher_hash:
        token = min({*student_vocab.items()} ^ {*teacher_vocab.items()})[0]
        raise PreflightError(
            f"Student and teacher have different vocabularies ({len(student_vocab)} tokens, hash "
            f"{student_hash}, against {len(teacher_vocab)}, {teacher_hash}; for example {token!r} "
            f"is {student_vocab.get(token)} and {teacher_vocab.get(token)}); {remedy}."
        )
    for text in PROBES:
        student_ids, teacher_ids = (
            tokenizer.encode(text, add_special_tokens=False) for tokenizer in (student, teacher)
        )
        if student_ids != teacher_ids:
            raise PreflightError(
                f"Student and teacher split {text!r} into {len(student_ids)} and "
                f"{len(teacher_ids)} tokens that differ although their vocabularies are equal "
                f"(merges or pre-tokenizer); {remedy}."
            )


def common_ends(
    tokenizer: Any, own: Set[int], turns: Set[int], teachers: Mapping[str, Set[int]]
) -> tuple[Ends, list[str]]:
    """Return what ends a text for a student and its teachers, and what a user has to know of it.

    A text ends where one of them ends it by its files (``own``, and ``teachers`` by name), and
    where the chat template ends an answer (``turns``).
    """
    ends = Ends.of(tokenizer, turns, {*own}.union(*teachers.values()))
    lines = [
        f"warning: the student ends an answer with {token_with_id(ends.answer, tokenizer)}, which "
        f"does not end one for {name}: it finds that end improbable. Mask special tokens in the "
        "loss, or give both one end."
        for name, known in teachers.items()
        if ends.answer is not None and ends.answer not in known
    ]
    if more := [one for one in ends.ids if one not in own]:
        names = ", ".join(token_with_id(one, tokenizer) for one in more)
        lines.append(
            f"answers also end with {names}, as chat template or teachers do, which the student's "
            "generation_config.json does not say (rollout.stop overrides it)"
        )
    return ends, lines


def token_with_id(token: int, tokenizer: Any) -> str:
    """Return a token as text, with its id."""
    return f"{tokenizer.decode([token])!r} ({token})"


@runtime_checkable
class LimitedServer(Protocol):
    """A scorer whose server limits the size of an answer."""

    def check_room(
        self, tokens: int, support_size: int | Literal["full"], by_student: bool, hidden: bool
    ) -> None:
        """Check that the server answers for a rollout with so many tokens of its own."""
        ...


@runtime_checkable
class TokenizingServer(Protocol):
    """A scorer that can be asked how its server's tokenizer reads and writes."""

    def tokenize(self, text: str) -> list[int] | None:
        """Return the ids of a text without special tokens around it; None: it cannot be asked."""
        ...

    def detokenize(self, ids: list[int]) -> str | None:
        """Return the text of ids; None: it cannot be asked."""
        ...


@runtime_checkable
class GeneratingServer(Protocol):
    """A scorer whose server may sample too."""

    def own_logprobs(self, prompt: Sequence[int]) -> "OwnLogprobs | str":
        """Return what ``check_own_scores`` compares, or why the server does not give it."""
        ...


@dataclass(frozen=True, eq=False)
class OwnLogprobs:
    """A server's log-probs of tokens that it has sampled."""

    sampled: Float[Tensor, " n"]  # as it sampled them, [n]
    scored: Float[Tensor, " n"]  # as it scores them, [n]


def check_own_scores(own: OwnLogprobs | str) -> str:
    """Compare a server's scores of what it samples with its own log-probs of it.

    Both are log q of the same tokens by one model, and differ by rounding, which a model with
    experts carries further. Elsewhere nothing shows that they do not: a request with known scores
    repeats the same wrong numbers. The result says what could not be compared.
    """
    if isinstance(own, str):
        return (
            "The teacher's server does not generate with log-probs, so its scores were not "
            f"compared with those of what it samples: {own.rstrip('.')}."
        )
    if not float((own.scored - own.sampled).abs().mean()) <= OWN_APART:
        raise PreflightError(
            f"The teacher's server gives {len(own.sampled)} tokens a mean log-prob of "
            f"{float(own.sampled.mean()):.3f} where it samples them, and of "
            f"{float(own.scored.mean()):.3f} where it scores them: it scores by other weights or "
            "another head. Serve a LoRA adapter merged into its model (vLLM scores prompts without "
            "its part on the output head), leave --logprobs-mode out, and let one model answer at "
            "this url."
        )
    return ""


def check_served_tokenizer(
    student: Any,
    scorer: Any,
    whose: str = "the student",
    remedy: str = "choose a teacher and a student with one tokenizer",
) -> bool:
    """Compare tokenizers with a teacher's server, and return whether it could be asked."""
    if not isinstance(scorer, TokenizingServer):
        return False
    was_asked = False
    for text in PROBES:
        served = scorer.tokenize(text)
        if served is None:
            break
        was_asked = True
        own = student.encode(text, add_special_tokens=False)
        if served != own:
            pairs = enumerate(zip_longest(own, served))
            position, (a, b) = next((at, pair) for at, pair in pairs if pair[0] != pair[1])
            raise PreflightError(
                f"The teacher's server reads {text!r} as other tokens than {whose}: token "
                f"{position} is {b}, and {a} of {whose} (None: the text has ended); {remedy}."
            )
    ids = sampled_ids(student)
    served_text = scorer.detokenize(ids)
    if served_text is None:
        return was_asked
    if served_text != student.decode(ids):
        different = (i for i in ids if scorer.detokenize([i]) != student.decode([i]))
        token = next(different, None)
        example = "" if token is None else f", for example {token}, {student.decode([token])!r}"
        raise PreflightError(
            f"Some ids are other tokens for the teacher's server than for {whose}{example}; "
            f"{remedy}."
        )
    return True


def sampled_ids(tokenizer: Any) -> list[int]:
    """Return ids from the whole vocabulary, ``SAMPLED_IDS`` at least, and all special tokens."""
    size = len(tokenizer)
    special = tokenizer.convert_tokens_to_ids(special_token_texts(tokenizer))
    return sorted({*range(0, size, max(1, size // SAMPLED_IDS)), size - 1, *special})


def special_token_texts(tokenizer: Any) -> list[str]:
    """Return BOS, EOS, padding and added tokens."""
    return [*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()]


def check_vocabularies(
    vocab_size: int, limits: Limits, tokens: int, support_size: int | Literal["full"]
) -> list[str]:
    """Compare head sizes with ``tokens``, each other and K; return warnings of their padding."""
    teacher_size = limits.vocab_size
    if tokens > vocab_size:
        raise PreflightError(
            f"The tokenizer has {tokens} tokens and the student's head {vocab_size} entries; "
            "resize its embeddings."
        )
    if teacher_size is not None and tokens > teacher_size:
        raise PreflightError(
            f"The tokenizer has {tokens} tokens and the teacher's head {teacher_size} entries; "
            "choose a teacher with the student's tokenizer."
        )
    smallest = vocab_size if teacher_size is None else min(vocab_size, teacher_size)
    if support_size != "full" and support_size > smallest:
        raise PreflightError(
            f"The loss asks for K = {support_size} and the vocabulary has {smallest} entries; set "
            "k to "
            'at most that, or to "full".'
        )
    warnings = []
    if teacher_size is not None and teacher_size != vocab_size:
        if support_size == "full":
            raise PreflightError(
                "A loss on a support of the whole vocabulary needs heads of one size, and the "
                f"student's has {vocab_size} entries and the teacher's {teacher_size} (padding "
                f"beyond the tokenizer's {tokens}); use a top-K loss, or pad the smaller one."
            )
        warning = (
            f"The student's head has {vocab_size} entries and the teacher's {teacher_size} for "
            f"{tokens} tokens: the rest is padding. Ids from {smallest} on belong to the tail on "
            "both sides."
        )
        if vocab_size > teacher_size:
            warning += (
                " Where the student samples one of them, the teacher's log-prob of it counts as "
                f"{LOG_FLOOR:.1f}, and the teacher reads id {teacher_size - 1} in its place."
            )
        warnings.append(warning)
    k = teacher_size if support_size == "full" else support_size
    if limits.max_logprobs is not None and k is not None and k > limits.max_logprobs:
        raise PreflightError(
            f"The loss asks for K = {k} teacher log-probs per token and the teacher answers at "
            f"most {limits.max_logprobs}; start its server with --max-logprobs {k}, or set the "
            f"loss's k to {limits.max_logprobs}."
        )
    return warnings


def check_whole_kl(vocab_size: int, scorer: Scorer) -> None:
    """Check that a KL over all ids can be measured."""
    size = scorer.limits.vocab_size
    if size not in (None, vocab_size) and not scorer.gives_any_ids:
        raise PreflightError(
            f"eval.kl_support = 'full' with a student's head of {vocab_size} entries and a "
            f"teacher's of {size} compares hidden states, which the teacher's server gives with "
            "the scoring plugin: start it with prime-composer teacher, or set eval.kl_support to a "
            "number."
        )


def check_ids(scores: Scores, vocab_size: int) -> None:
    """Check that the ids of a teacher's support are the student's, or padding beyond them."""
    alien = alien_id(scores, vocab_size)
    if alien is not None:
        raise PreflightError(
            f"The teacher puts id {alien} into the support and the student's head has "
            f"{vocab_size} entries, of which padding explains at most {MOST_PADDING} more; choose "
            "a teacher with the student's vocabulary."
        )


def alien_id(scores: Scores, vocab_size: int) -> int | None:
    """Return an id of a support that a head of this size cannot lack as padding; None for none."""
    ids = scores.token_ids if scores.known is None else scores.token_ids[scores.known]
    if not ids.numel():
        return None
    smallest, largest = (int(bound) for bound in ids.aminmax())
    return alien(smallest, largest, vocab_size)
