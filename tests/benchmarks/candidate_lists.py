"""What lists of ``student_candidates`` cut off of a real teacher's rows, and the client's own time.

    python -m tests.benchmarks.candidate_lists --teacher DIR --data FILE --texts FILE
        [--student 8000] [--answers 4] [--k 16]

The teacher reads worked answers of ``--data`` (GSM8K's JSONL), each after its question, and the
kind answers in this process. A student is made as in ``tests.studies.cross_tokenizer``. Compared
are scores from lists with those from whole rows, at all positions that have a score.

Printed per length of the student's lists, and of the list of what follows the teacher's own tokens:

    bytes     of a response per teacher token
    log Q     absolute error of the sampled token's log-prob in nats: mean, 90th percentile, largest
    ids       the same of the other ids that both supports have; then the share of ids that only
              the whole rows' support has, and only that of lists
    unscored  positions that whole rows score, and lists do not

Then the client's processor time in microseconds per token of the student: reading a text (plan),
writing the question (ask), and making scores of the answer (finish). Of new texts after as many
others of their kind, and of texts that were seen.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prime_composer.cli.commands import set_environment

set_environment()

import numpy as np  # noqa: E402
import torch  # noqa: E402

from prime_composer.backends.hf_model import (  # noqa: E402
    load_model,
    load_tokenizer,
    read_eos_token_ids,
)
from prime_composer.contract import Scores  # noqa: E402
from prime_composer.cross_tokenizer.finish import token_scores  # noqa: E402
from prime_composer.cross_tokenizer.pair import Pair  # noqa: E402
from prime_composer.cross_tokenizer.plan import Plan, plan_of  # noqa: E402
from prime_composer.cross_tokenizer.sums import Sums  # noqa: E402
from prime_composer.cross_tokenizer.teacher_rows import Rows  # noqa: E402
from prime_composer.cross_tokenizer.token_bytes import TokenBytes  # noqa: E402
from prime_composer.scoring.kinds import KindRequest  # noqa: E402
from prime_composer.scoring.pair_tables import KEPT_HERE  # noqa: E402
from prime_composer.scoring.student_candidates import register  # noqa: E402
from prime_composer.scoring.worker import (  # noqa: E402
    Piece,
    Progress,
    RowsRequest,
    answer_group,
)
from prime_composer.teachers import student_candidates  # noqa: E402
from prime_composer.teachers.own_tokenizer import ByRows  # noqa: E402
from prime_composer.teachers.student_candidates import LISTED, Question, Questions  # noqa: E402
from tests.studies.cross_tokenizer import problems_of, student_of  # noqa: E402

COUNTED = 400
"""Training problems on whose texts it is counted what is open."""

LENGTHS = ((32, 64), (64, 64), (128, 64), (256, 64), (64, 256), (256, 256))
"""Ids of the student's lists, and of what follows."""


def answered(pair: Pair, plan: Plan, logits: torch.Tensor, question: Question, listed: int) -> Any:
    """Return what a server answers, in this process."""
    next_ids = [*plan.teacher_ids, pair.teacher_ends[0]]
    KEPT_HERE.keep(question.beside.tables)
    requests = KindRequest("sampled"), KindRequest("top_k", listed), question.beside.request
    progress = Progress(RowsRequest(1, requests), 0, len(next_ids))
    piece = Piece(0, 0, next_ids, progress)
    answer_group(lambda hidden: hidden, logits.shape[1], logits, [piece])
    assert not progress.error, progress.error
    arrays = {name: array.numpy() for name, array in progress.arrays.items()}
    top = torch.from_numpy(arrays["top_ids"]).long(), torch.from_numpy(arrays["top_logprobs"])
    return Scores(torch.from_numpy(arrays["sampled"]), *top, beside=arrays)


class Differences:
    """How scores from lists differ from those of whole rows."""

    def __init__(self) -> None:
        self.own: list[float] = []
        self.ids: list[float] = []
        self.known = self.left_out = self.added = self.unscored = 0

    def add(self, whole: Scores, lists: Scores, tokens: Sequence[int]) -> None:
        """Add the positions of a text."""
        assert whole.scored is not None and lists.scored is not None
        self.unscored += int((whole.scored & ~lists.scored).sum())
        for at in (whole.scored & lists.scored).nonzero()[:, 0].tolist():
            self.own.append(abs(float(whole.ref_logprobs[at] - lists.ref_logprobs[at])))
            one, other = supported(whole, at), supported(lists, at)
            both = (one.keys() & other.keys()) - {tokens[at]}
            self.ids += [abs(one[i] - other[i]) for i in both]
            self.known += len(one)
            self.left_out += len(one.keys() - other.keys())
            self.added += len(other.keys() - one.keys())

    def line(self) -> str:
        """Return the numbers of a row."""
        parts = [
            f"{np.mean(each):.5f} {np.quantile(each, 0.9):.5f} {np.max(each):.3f}"
            for each in (self.own, self.ids)
        ]
        shares = f"{self.left_out / self.known:.3f} {self.added / self.known:.3f}"
        return f"{parts[0]} | {parts[1]} | {shares} | {self.unscored}"


def supported(scores: Scores, at: int) -> dict[int, float]:
    """Return the log-probs of a position's known ids."""
    known = scores.all_known[at]
    ids, logprobs = scores.token_ids[at][known], scores.teacher_logprobs[at][known]
    return dict(zip(ids.tolist(), logprobs.tolist(), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--teacher", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="JSONL: question, answer")
    parser.add_argument("--texts", type=Path, required=True, help="the same, to train on")
    parser.add_argument("--student", default="8000")
    parser.add_argument("--answers", type=int, default=4)
    parser.add_argument("--k", type=int, default=16)
    args = parser.parse_args()

    torch.set_num_threads(1)
    register()
    tokenizer = load_tokenizer(args.teacher)
    assert tokenizer is not None
    model: Any = load_model(args.teacher, "float32", "cpu")
    ends = read_eos_token_ids(args.teacher)
    teacher = TokenBytes(tokenizer.backend_tokenizer, "the teacher", model.config.vocab_size, ends)
    texts = problems_of(args.texts)
    tokens, end = student_of(args.student, texts)
    pair = Pair(teacher, tokens, ends, end, [text for each in texts[:COUNTED] for text in each])
    rollouts, logits = [], []
    for question, answer in problems_of(args.data)[: args.answers]:
        messages = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
        rollouts.append([*tokens.encode_all([answer])[0], end])
        read = [*prompt_ids, *teacher.encode_all([answer])[0]]
        with torch.inference_mode():
            logits.append(model(torch.tensor([read])).logits[0, len(prompt_ids) - 1 :].float())
    compare(pair, rollouts, logits, args.k)


def compare(pair: Pair, rollouts: list[list[int]], logits: list[torch.Tensor], k: int) -> None:
    """Print the table, and the client's time."""
    by_rows, sums, plans = ByRows(pair), Sums(pair), [plan_of(pair, ids) for ids in rollouts]
    size, wholes = logits[0].shape[1], []
    for plan, row in zip(plans, logits, strict=True):
        rows = row.softmax(-1)
        candidates = sums.candidates(rows, plan, size)
        wholes.append(token_scores(pair, plan, candidates, Rows(rows), k)[0])
    print(f"{sum(map(len, rollouts))} tokens of a student of {len(pair.student.of_id)}, K = {k}")
    for length, listed in LENGTHS:
        student_candidates.FEWEST = length
        asked, found = Questions(pair), Differences()
        for ids, plan, row, whole in zip(rollouts, plans, logits, wholes, strict=True):
            question = asked.of(plan, min(k, length // 2))
            read = answered(pair, plan, row, question, listed)
            scores, _ = by_rows.scores(plan, read, k, size, question)
            found.add(whole, scores, ids)
        size_of_row = 14 * question.beside.request.k + 4 + 8 * listed + 4
        print(f"{length:4d} {listed:4d} {size_of_row:6d} | {found.line()}", flush=True)
    student_candidates.FEWEST = 64
    measure(pair, rollouts, logits, k)


def measure(pair: Pair, rollouts: list[list[int]], logits: list[torch.Tensor], k: int) -> None:
    """Print the client's time."""
    fresh = Pair(pair.teacher, pair.student, pair.teacher_ends, pair.student_end, [])
    by_rows, asked, half = ByRows(fresh), Questions(fresh), len(rollouts) // 2
    # Only the tables' texts differ from the pair's.
    state: dict[int, list[Any]] = {at: [] for at in range(len(rollouts))}

    def plan(at: int) -> None:
        state[at] = [plan_of(fresh, rollouts[at])]

    def ask(at: int) -> None:
        state[at].append(asked.of(state[at][0], k))

    def finish(at: int) -> None:
        its, question, read = state[at]
        by_rows.scores(its, read, k, logits[at].shape[1], question)

    def timed(step: Callable[[int], None], places: Sequence[int]) -> float:
        begin = time.process_time()
        for at in places:
            step(at)
        count = sum(len(rollouts[at]) for at in places)
        return 1e6 * (time.process_time() - begin) / count

    for name, places in (
        ("first texts", range(half)),
        ("new texts", range(half, len(rollouts))),
        ("seen texts", range(len(rollouts))),
    ):
        spent = [timed(plan, places), timed(ask, places)]
        for at in places:
            state[at].append(answered(fresh, state[at][0], logits[at], state[at][1], LISTED))
        spent.append(timed(finish, places))
        print(
            f"{name:12} plan {spent[0]:.0f} ask {spent[1]:.0f} finish {spent[2]:.0f} us per token"
        )


if __name__ == "__main__":
    main()
