"""How far Q from one pass of a teacher is from brute force, for students with other tokenizers.

    python -m tests.studies.cross_tokenizer --teacher DIR --data FILE --texts FILE
        [--students 1536 8000 tekken] [--answers 12] [--per-answer 6] [--threshold 1e-4]

The teacher reads the worked answers of ``--data`` (GSM8K's JSONL, each after its question). The
students are byte-level BPEs of as many tokens, trained on ``--texts``, and tekken; each has an
n-gram model of ``--texts`` for its probabilities, which are far from the teacher's. Compared are
tokens drawn at random from each answer. The reference is ``tests.cross_tokenizer.reference``.
Printed per student, from whole rows of the teacher and from the 256 ids of each row that a run
reads:

    aligned   share of positions where a token of the teacher begins as well
    log Q     absolute error of the sampled token's log-prob, in nats: mean, median, 90th
              percentile, largest
    others    that of the other ids of a support of 16: mean, 90th percentile
    mass      the teacher's mass on the support, and on its 16 most probable ids
    RKL       on the support and a tail: of the exact Q, and of Q as computed
    unscored  share of positions without a score
    pruned    share of the mass that the reference has not followed to its end
"""

import argparse
import json
import math
import random
import re
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from prime_composer.cli.machine import set_environment

set_environment()

import numpy as np  # noqa: E402
import torch  # noqa: E402
from numpy.typing import NDArray  # noqa: E402

from prime_composer.backends.hf_model import (  # noqa: E402
    load_model,
    load_tokenizer,
    read_eos_token_ids,
)
from prime_composer.contract import Scores  # noqa: E402
from prime_composer.cross_tokenizer.pair import TokenizerPair  # noqa: E402
from prime_composer.cross_tokenizer.plan import plan_of  # noqa: E402
from prime_composer.cross_tokenizer.token_bytes import TokenBytes  # noqa: E402
from prime_composer.teachers.own_tokenizer import READ, ByRows  # noqa: E402
from tests.cross_tokenizer.reference import Exact, Reference  # noqa: E402
from tests.cross_tokenizer.toys import trained  # noqa: E402

K = 16
END = "<|eos|>"
COUNTED = 2000
"""Training problems on whose texts n-grams, and what is open, are counted."""

LEAST = 1e-4
"""Probability from which on the error of another id than the sampled one counts."""

KEPT_ROWS = 1500
"""Rows of the teacher that are kept: 0.3 GB of SmolLM2's."""

BATCH = 32


def problems_of(file: Path) -> list[tuple[str, str]]:
    """Return questions and worked answers, without the calculator's marks."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [(row["question"], re.sub(r"<<.*?>>", "", row["answer"])) for row in rows]


def student_of(name: str, texts: Sequence[tuple[str, str]]) -> tuple[TokenBytes, int]:
    """Return a student's tokenizer, and its end."""
    if name == "tekken":
        from transformers.integrations.mistral import convert_tekken_tokenizer

        spec = find_spec("mistral_common")
        assert spec is not None and spec.submodule_search_locations is not None
        file = Path(spec.submodule_search_locations[0]) / "data" / "tekken_240718.json"
        tokenizer = convert_tekken_tokenizer(str(file)).backend_tokenizer
        return TokenBytes(tokenizer, "tekken"), int(tokenizer.token_to_id("</s>"))
    tokenizer = trained((f"{q}\n{a}" for q, a in texts), int(name), [END])
    return TokenBytes(tokenizer, "the student"), int(tokenizer.token_to_id(END))


class NGrams:
    """An interpolated n-gram model of a student's tokens."""

    def __init__(self, tokens: TokenBytes, texts: Sequence[str], order: int = 4):
        self.order = order
        self.counts: list[dict[tuple[int, ...], Counter[int]]] = [
            defaultdict(Counter) for _ in range(order)
        ]
        for text in texts:
            ids = tokens.encode_all([text])[0]
            for at, token in enumerate(ids):
                for n in range(min(order, at + 1)):
                    self.counts[n][tuple(ids[at - n : at])][token] += 1
        self.base = np.full(len(tokens.of_id), 0.01)
        for token, count in self.counts[0][()].items():
            self.base[token] += count
        self.base /= self.base.sum()

    def row(self, ids: Sequence[int]) -> NDArray[np.float64]:
        """Return the probabilities after some tokens."""
        row = self.base.copy()
        for n in range(1, min(self.order, len(ids) + 1)):
            counts = self.counts[n].get(tuple(ids[-n:]))
            if not counts:
                break
            total, smooth = sum(counts.values()), 2.0 + 0.6 * len(counts)
            row *= smooth / (total + smooth)
            row[list(counts)] += np.array([*counts.values()]) / (total + smooth)
        return row


class TeacherRows:
    """A teacher after one prompt and answer: its rows, and those of other continuations."""

    def __init__(self, model: Any, prompt: Sequence[int], ids: Sequence[int]):
        self.model, self.start, self.ids = model, len(prompt), tuple(ids)
        with torch.inference_mode():
            out = model(torch.tensor([[*prompt, *ids]]), use_cache=True)
        self.cache = out.past_key_values
        self.rows = out.logits[0, self.start - 1 :].float().softmax(-1)
        self.kept: OrderedDict[tuple[int, ...], NDArray[np.float32]] = OrderedDict()

    def of(self, sequences: Sequence[tuple[int, ...]]) -> list[NDArray[np.float32]]:
        """Return the row after each sequence of the teacher's tokens."""
        groups = defaultdict(list)
        for sequence in dict.fromkeys(sequences):
            if sequence != self.ids[: len(sequence)] and sequence not in self.kept:
                shared = next(
                    i
                    for i, (a, b) in enumerate(zip(sequence, (*self.ids, -1), strict=False))
                    if a != b
                )
                groups[shared].append(sequence)
        new = {}
        for shared, group in groups.items():
            for begin in range(0, len(group), BATCH):
                new |= self._ask(shared, group[begin : begin + BATCH])
        found = [
            self.rows[len(one)].numpy()
            if one == self.ids[: len(one)]
            else new[one]
            if one in new
            else self.kept[one]
            for one in sequences
        ]
        self.kept.update(new)
        while len(self.kept) > KEPT_ROWS:
            self.kept.popitem(last=False)
        return found

    @torch.inference_mode()
    def _ask(
        self, shared: int, group: Sequence[tuple[int, ...]]
    ) -> dict[tuple[int, ...], NDArray[np.float32]]:
        """Return rows of sequences that have their first tokens with the answer in common."""
        from transformers import DynamicCache

        length = self.start + shared
        past = DynamicCache()
        for index, layer in enumerate(self.cache.layers):
            shape = (len(group), -1, -1, -1)
            keys, values = (part[:, :, :length] for part in (layer.keys, layer.values))
            past.update(keys.expand(shape), values.expand(shape), index)
        rest = [sequence[shared:] for sequence in group]
        width = max(map(len, rest))
        ids = torch.tensor([[*one, *[0] * (width - len(one))] for one in rest])
        states = self.model.model(ids, past_key_values=past, use_cache=True).last_hidden_state
        last = states[torch.arange(len(rest)), torch.tensor([len(one) - 1 for one in rest])]
        rows = self.model.lm_head(last).float().softmax(-1).numpy()
        return dict(zip(group, rows, strict=True))


@dataclass
class Errors:
    """What was found at the positions of one student, by the number of ids read of each row."""

    aligned: list[bool] = field(default_factory=list)
    own: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)
    mass: list[tuple[float, float]] = field(default_factory=list)
    reverse: list[tuple[float, float]] = field(default_factory=list)
    pruned: list[float] = field(default_factory=list)
    unscored: int = 0

    def add(self, token: int, scores: Scores, at: int, exact: Exact, student: Any) -> None:
        """Add one position: its scores, the reference's Q, and the student's probabilities."""
        if scores.scored is not None and not scores.scored[at]:
            self.unscored += 1
            return
        q = exact.q
        self.own.append(float(scores.ref_logprobs[at]) - math.log(max(q.get(token, 0.0), 1e-12)))
        known = scores.all_known[at]
        ids = scores.token_ids[at][known].tolist()
        computed = scores.teacher_logprobs[at][known].double().exp().numpy()
        true = np.array([q.get(i, 0.0) for i in ids])
        for i, one, other in zip(ids, computed, true, strict=True):
            if i != token and other > LEAST:
                self.others.append(abs(math.log(one / other)))
        self.mass.append((true.sum(), sum(sorted(q.values())[-K:])))
        p = student[ids]
        self.reverse.append((kl(p, true), kl(p, computed)))
        self.pruned.append(exact.pruned)

    def line(self) -> str:
        """Return the numbers of the table."""
        own, others = np.array(self.own), np.array(self.others or [0.0])
        mass, reverse = (np.array(pairs).mean(0) for pairs in (self.mass, self.reverse))
        size = np.abs(own)
        return (
            f"{len(own):5d} {np.mean(self.aligned):5.2f} | {size.mean():.4f} "
            f"{np.median(size):.1e} {np.quantile(size, 0.9):.4f} {size.max():.2f} | "
            f"{others.mean():.4f} {np.quantile(others, 0.9):.4f} | "
            f"{mass[0]:.3f} ({mass[1]:.3f}) | {reverse[0]:.3f} {reverse[1]:.3f} | "
            f"{self.unscored:3d} {np.mean(self.pruned):.1e}"
        )


def kl(left: NDArray[np.float64], right: NDArray[np.float64]) -> float:
    """Return the KL of two supports with their tails."""
    p, q = (np.append(part, max(1 - part.sum(), 1e-9)) for part in (left, right))
    use = p > 1e-15
    return float((p[use] * np.log(p[use] / np.maximum(q[use], 1e-12))).sum())


def listed(rows: torch.Tensor, ids: Sequence[int], count: int) -> Scores:
    """Return what a run reads of rows: the most probable ids of each, and its own token's."""
    top = rows.topk(min(count, rows.shape[1]), dim=-1)
    own = rows[: len(ids)].gather(1, torch.tensor([*ids], dtype=torch.long)[:, None])[:, 0]
    own = torch.cat([own, rows[len(ids) :, 0]])
    return Scores(own.log(), top.indices, top.values.log())


class Student:
    """A student: its pair with the teacher, its n-grams, and what was found of it."""

    def __init__(self, name: str, teacher: TokenBytes, ends: Sequence[int], texts: Any, seed: int):
        self.name = name
        tokens, end = student_of(name, texts)
        counted = texts[:COUNTED]
        self.pair = TokenizerPair(
            teacher, tokens, ends, end, [text for pair in counted for text in pair]
        )
        self.by_rows, self.grams = (
            ByRows(self.pair),
            NGrams(tokens, [answer for _, answer in counted]),
        )
        self.rng = random.Random(seed)
        self.found = {"whole": Errors(), str(READ): Errors()}

    def read(self, rows: TeacherRows, answer: str, count: int, threshold: float) -> None:
        """Compare some positions of an answer."""
        ids = [*self.pair.student.encode_all([answer])[0]]
        chosen = sorted(self.rng.sample(range(2, len(ids)), min(count, len(ids) - 2)))
        plan, size = plan_of(self.pair, ids), rows.rows.shape[1]
        assert plan.teacher_ids == rows.ids
        scores = {
            name: self.by_rows.scores(plan, listed(rows.rows, rows.ids, limit), K, size)[0]
            for name, limit in (("whole", size), (str(READ), READ))
        }
        reference = Reference(self.pair, rows.of, threshold)
        for at in chosen:
            position, exact = plan.positions[at], reference.target(ids, at)
            if exact is None or position is None:
                continue
            for name, errors in self.found.items():
                errors.aligned.append(position.aligned)
                errors.add(ids[at], scores[name], at, exact, self.grams.row(ids[:at]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--teacher", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="JSONL: question, answer")
    parser.add_argument("--texts", type=Path, required=True, help="the same, to train students on")
    parser.add_argument("--students", nargs="+", default=["1536", "8000", "tekken"])
    parser.add_argument("--answers", type=int, default=12)
    parser.add_argument("--per-answer", type=int, default=6)
    parser.add_argument("--threshold", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    torch.set_num_threads(1)
    tokenizer = load_tokenizer(args.teacher)
    assert tokenizer is not None
    model: Any = load_model(args.teacher, "float32", "cpu")
    ends = read_eos_token_ids(args.teacher)
    teacher = TokenBytes(tokenizer.backend_tokenizer, "the teacher", model.config.vocab_size, ends)
    texts = problems_of(args.texts)
    students = [Student(name, teacher, ends, texts, args.seed) for name in args.students]
    for count, (question, answer) in enumerate(problems_of(args.data)[: args.answers]):
        messages = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
        rows = TeacherRows(model, prompt_ids, teacher.encode_all([answer])[0])
        for student in students:
            student.read(rows, answer, args.per_answer, args.threshold)
        print(f"{count + 1} answers", file=sys.stderr, flush=True)
        for student in students if (count + 1) % 4 == 0 or count + 1 == args.answers else ():
            for name, errors in student.found.items():
                print(f"{student.name:7} {name:5} {errors.line()}", flush=True)


if __name__ == "__main__":
    main()
