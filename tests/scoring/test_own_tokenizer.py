"""A served teacher with a tokenizer of its own: the same scores as one in this process."""

import re
from contextlib import closing
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("fastapi", reason="vLLM's server is not installed")

from prime_composer.backends.hf_model import load_model  # noqa: E402
from prime_composer.backends.protocols import Limits  # noqa: E402
from prime_composer.contract import Scores  # noqa: E402
from prime_composer.cross_tokenizer.finish import NEVER  # noqa: E402
from prime_composer.local.opening import open_engine  # noqa: E402
from prime_composer.local.preflight import preflight  # noqa: E402
from prime_composer.local.sources import load_sources  # noqa: E402
from prime_composer.recipe.loading import parse_recipe  # noqa: E402
from prime_composer.teachers import own_tokenizer  # noqa: E402
from prime_composer.teachers.compatibility import PreflightError  # noqa: E402
from prime_composer.teachers.own_tokenizer import OwnTokenizerScorer  # noqa: E402
from prime_composer.teachers.server import ServerScorer  # noqa: E402
from prime_composer.teachers.tokenizer_pair import make_pair  # noqa: E402
from prime_composer.teachers.transformers import TransformersScorer  # noqa: E402
from tests.local.helpers import tiny_models  # noqa: E402
from tests.scoring.served_rows import Rows, Served  # noqa: E402
from tests.stand_in import Reply, serving  # noqa: E402
from tests.teachers.own import (  # noqa: E402
    STUDENT,
    TEACHER,
    Prompts,
    own_recipe,
    rollout_of,
    wrapped,
)
from tests.tiny_qwen import make_model  # noqa: E402
from tests.vllm_process import QUICK, TeacherProcess  # noqa: E402

K = 6
TEXTS = ("abcab c", " cab bc abc", "a b c", "aabbcc ab")


class WholeRows:
    """A scorer with the numbers of a stand-in server's model, in float64."""

    gives_any_ids, sampler = True, None

    def __init__(self, rows):
        self._rows = rows
        self.limits = Limits(vocab_size=rows.model_config.get_vocab_size())

    def score(self, rollouts, support_size, *_, **__):
        found = []
        for rollout in rollouts:
            log_q = self._rows.logprobs(rollout.token_ids.tolist())[rollout.start - 1 : -1]
            own = log_q.gather(1, rollout.token_ids[rollout.start :, None])[:, 0]
            top = log_q.topk(support_size)
            found.append(Scores(own, top.indices, top.values, start=rollout.start))
        return found

    def close(self):
        """Do nothing."""


def over(scorer, student_merges=STUDENT):
    """Return a scorer of the student's tokens, over one of the teacher's, and the student's."""
    teacher, student = wrapped(TEACHER), wrapped(student_merges)
    pair = make_pair(teacher, student, [teacher.eos_token_id], [], "teacher")

    prompts = Prompts(lambda ids: teacher.encode(student.decode(ids)))
    return OwnTokenizerScorer(scorer, pair, prompts, len(student)), student


def check_equal(served, inside, student):
    """Check that two scorers give the same, of some rollouts of which much is resolved."""
    rollouts = [rollout_of(student, "ab", text) for text in TEXTS]
    compared = 0
    for one, two in zip(served.score(rollouts, K), inside.score(rollouts, K), strict=True):
        assert torch.equal(one.scored, two.scored) and torch.equal(one.all_known, two.all_known)
        at = one.scored
        torch.testing.assert_close(
            one.ref_logprobs[at].double(), two.ref_logprobs[at].double(), atol=1e-4, rtol=0
        )
        compared += int((one.ref_logprobs[at] > NEVER).sum())
        for row in at.nonzero()[:, 0].tolist():
            q = [
                dict(zip(ids[known].tolist(), logprobs[known].tolist(), strict=True))
                for ids, logprobs, known in (
                    (s.token_ids[row], s.teacher_logprobs[row], s.all_known[row])
                    for s in (one, two)
                )
            ]
            assert q[0] == pytest.approx(q[1], abs=1e-4)
    assert compared > 10


def read_of_rows(monkeypatch, read):
    """Let only this many ids of a row be read, as of a large vocabulary. None: all."""
    if read is not None:
        monkeypatch.setattr(own_tokenizer, "WHOLE_UP_TO", 0)
        monkeypatch.setattr(own_tokenizer, "READ", read)


def kinds(rows):
    """Return the names of the kinds that a stand-in was last asked for."""
    return [request.kind for request in rows.asked[-1].requests]


@pytest.mark.parametrize("read", [None, 100])
def test_served_own_tokenizer_scores_as_in_process(read, monkeypatch, vllm_without_its_libraries):
    """Whole rows of a small vocabulary are read, and some ids of a large one's."""
    read_of_rows(monkeypatch, read)
    rows = Rows(3, len(wrapped(TEACHER)))
    with Served(rows) as one, closing(ServerScorer(one.url)) as scorer:
        served, student = over(scorer)
        check_equal(served, over(WholeRows(rows))[0], student)
    assert kinds(rows) == ["sampled", "top_k"]


def test_own_tokenizer_refuses_a_server_without_plugin():
    """Its JSON takes milliseconds per token for so many ids."""

    teacher = wrapped(TEACHER)
    models = {"data": [{"id": "m", "max_model_len": 64}]}

    def answer(path, body):
        return Reply.of(models) if path == "/v1/models" else Reply.of({}, status=404)

    with serving(answer) as url, closing(ServerScorer(url)) as scorer:
        own = over(scorer)[0]
        own.prompts = SimpleNamespace(tokenizer=teacher)
        with pytest.raises(PreflightError, match="no scoring plugin.*prime-composer teacher"):
            own.check([], 8, "error")


def test_served_pair_that_does_not_align_is_refused(
    monkeypatch, vllm_without_its_libraries, tiny_recipe
):
    """By the preflight, with its number and the remedy."""
    raw = own_recipe(tiny_recipe)
    teacher = str(tiny_models(raw)["teacher"])
    rows = Rows(3, load_model(teacher).config.vocab_size)
    rows.model_config.model = teacher
    read_of_rows(monkeypatch, 256)
    with Served(rows) as one:
        raw["teacher"] = {"model": teacher, "url": one.url, "tokenizer": "own", "wait": 0}
        recipe = parse_recipe(raw)
        sources = load_sources(recipe)
        with open_engine(recipe, sources, tiny_models(raw), lambda text: None) as engine:
            with pytest.raises(PreflightError) as refused:
                preflight(engine, recipe, lambda text: None)
    message = str(refused.value)
    assert re.search(r"\b[1-9]\d\.\d\d% begin .*97%", message) and "[teacher]" in message
    assert 'backend = "transformers"' in message and "no url" in message


@pytest.mark.vllm
def test_vllm_own_tokenizer_scores_as_in_process(vllm_forks, monkeypatch, tmp_path):
    """A real server, in pieces of 16 tokens: its rows are read whole, or 256 ids of each."""
    teacher = wrapped(TEACHER)
    model = make_model(True, 3, vocab_size=len(teacher), eos_token_id=teacher.eos_token_id)
    model.save_pretrained(tmp_path / "model")
    teacher.save_pretrained(tmp_path / "model")
    options = ["--dtype", "float32", "--enable-chunked-prefill", "--max-num-batched-tokens", 16]
    options += QUICK
    with (
        TeacherProcess(tmp_path / "model", tmp_path / "log", *options, forks=vllm_forks) as server,
        closing(ServerScorer(server.url)) as scorer,
    ):
        assert scorer.tokenize("ab c") == teacher.encode("ab c")
        for read in (None, 256):
            read_of_rows(monkeypatch, read)
            for merges in (STUDENT, TEACHER[:3]):  # words that are split elsewhere, and nowhere
                served, student = over(scorer, merges)
                check_equal(served, over(TransformersScorer(model), merges)[0], student)
