"""Student and teacher whose heads are padded to different sizes, in both directions.

Expected numbers are those of both models' plain logits in float64. Ids that one side lacks are one
outcome with all that is outside the support.
"""

import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from prime_composer.backends.alignment import make_rollout
from prime_composer.backends.answers import InvalidAnswer
from prime_composer.backends.hf_model import load_model
from prime_composer.backends.http import ServerError
from prime_composer.backends.protocols import Rollout, SamplingParams
from prime_composer.divergences import reverse_kl
from prime_composer.full_vocabulary import compare
from prime_composer.full_vocabulary.kernel import LOG_BUCKET_FLOOR
from prime_composer.local.collect import up_to_padding
from prime_composer.local.engine import Engine
from prime_composer.local.evaluate import EVALUATION_SEED, Evaluator, kl_support
from prime_composer.local.preflight import preflight
from prime_composer.local.tracker import read_metrics
from prime_composer.losses import setup_loss_fn
from prime_composer.recipe.routing import TeacherId
from prime_composer.recipe.schema import Recipe
from prime_composer.scoring.shared_vocabulary import LOG_FLOOR
from prime_composer.step.batch import Sample
from prime_composer.step.student_forward import student_inputs
from prime_composer.teachers.compatibility import PreflightError
from tests.conftest import TINY_RECIPE
from tests.faults.server import SpoilingServer
from tests.local.helpers import (
    VOCAB,
    open_run,
    plain_overlap,
    probed,
    run,
    save_padded,
    tiny_models,
)
from tests.vllm_process import QUICK, TeacherProcess

Raw = Callable[..., dict[str, Any]]

EXTRA = 64
FLOOR = 1e-7
assert math.log(FLOOR) == LOG_FLOOR == LOG_BUCKET_FLOOR  # of sampled tokens, and of whole heads
WIDER = ("teacher", "student")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the directories of wider models, by table."""
    root = tmp_path_factory.mktemp("padded")
    own = tiny_models(TINY_RECIPE)
    return {table: save_padded(own[table], EXTRA, root / table) for table in WIDER}


@pytest.fixture
def pair(tiny_recipe: Raw, folders: dict[str, Path]) -> Callable[..., dict[str, Any]]:
    """Return a function: the table of a recipe in which one model's head is wider."""

    def make(wider: str, **changes: Any) -> dict[str, Any]:
        own = {wider: {"model": str(folders[wider])}} if wider in folders else {}
        return tiny_recipe(**own, **changes)

    return make


@pytest.fixture
def served_pair(
    pair: Raw, folders: dict[str, Path], tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Raw]:
    """Return a function: the same table, with the teacher in this process or on a server."""
    with ExitStack() as opened:

        def make(wider: str, road: str, **changes: Any) -> dict[str, Any]:
            table = pair(wider, **changes)
            if road == "vllm":
                table["rollout"]["backend"] = "vllm"
            elif road != "in process":
                folder = folders["teacher"] if wider == "teacher" else own_teacher()
                server: Any = SpoilingServer(folder, plugin=road == "plugin")
                if road == "vllm plugin":
                    options = ("--dtype", "float32", "--max-logprobs", 64, *QUICK)
                    server = TeacherProcess(
                        folder,
                        tmp_path / "server.log",
                        *options,
                        forks=request.getfixturevalue("vllm_forks"),
                    )
                url = opened.enter_context(server).url
                table["teacher"] = {"model": str(folder), "url": url}
            return table

        yield make


def own_teacher() -> Path:
    return tiny_models(TINY_RECIPE)["teacher"]


class Plain:
    """Student and teacher of an engine in float64, with plain softmaxes over their own heads."""

    def __init__(self, engine: Engine, recipe: Recipe):
        folder = recipe.teacher.model or own_teacher()
        self.student = load_model(str(engine.model.name_or_path), "float32").double()
        self.teacher = load_model(folder, "float32").double()

    @torch.no_grad()
    def logprobs(self, rollout: Rollout) -> tuple[Tensor, Tensor, Tensor]:
        """Return log p and log q of every id, and the trained tokens.

        The teacher reads the last id of its head in the place of one that it lacks.
        """
        ids, start = rollout.token_ids, rollout.start
        size = self.teacher.config.vocab_size
        log_p = self.student(ids[None]).logits[0].log_softmax(-1)
        log_q = self.teacher(ids.clamp(max=size - 1)[None]).logits[0].log_softmax(-1)
        return log_p[start - 1 : -1], log_q[start - 1 : -1], ids[start:]

    def sampled(self, rollout: Rollout) -> Tensor:
        """Return log q of the trained tokens: the floor where the teacher lacks one."""
        _, log_q, labels = self.logprobs(rollout)
        size = log_q.shape[1]
        own = log_q.gather(1, labels.clamp(max=size - 1)[:, None])[:, 0]
        return torch.where(labels >= size, math.log(FLOOR), own)

    def over(self, rollouts: list[Rollout], top: int | None) -> tuple[Tensor, Tensor]:
        """Return p and q of the teacher's top ids, or of all, and of one outcome for the rest."""
        pairs = []
        for rollout in rollouts:
            log_p, log_q, _ = self.logprobs(rollout)
            shared = min(log_p.shape[1], log_q.shape[1])
            kept = torch.zeros(log_q.shape, dtype=torch.bool)
            kept.scatter_(1, log_q.topk(top or log_q.shape[1]).indices, True)
            p, q = (
                torch.where(kept[:, :shared], one.exp()[:, :shared], 0.0) for one in (log_p, log_q)
            )
            pairs.append([torch.cat([x, (1 - x.sum(-1, keepdim=True)).clamp(min=FLOOR)], -1)
                          for x in (p, q)])  # fmt: skip
        p, q = (torch.cat(side) for side in zip(*pairs, strict=True))
        return p, q


def kl(p: Tensor, q: Tensor) -> Tensor:
    """Return KL(p || q) per token."""
    return torch.where(p > 0, p * (p.clamp(min=1e-300) / q.clamp(min=1e-300)).log(), 0.0).sum(-1)


def samples_of(engine: Engine) -> list[Sample]:
    problems = engine.problems.problem_set.practice[:6]
    prompts = [engine.problems.prompt(problem) for problem in problems]
    rollouts = engine.sampler.generate(prompts, SamplingParams(max_tokens=8), seed=3)
    return [Sample(*pair) for pair in zip(rollouts, problems, strict=True)]


@pytest.mark.parametrize("wider", WIDER)
@pytest.mark.parametrize(
    ("road", "k"),
    [
        *product(("in process", "plugin"), (40, "full")),
        ("json", 8),
        *(pytest.param("vllm", k, marks=pytest.mark.vllm) for k in (8, "full")),
    ],
)
def test_loss_of_unequal_heads_equals_plain_float64(
    served_pair: Raw, wider: str, road: str, k: int | str
) -> None:
    """KL on the teacher's top K, or on all ids: padding is in the tail, or is a bucket."""
    table = served_pair(wider, road, loss={"type": "topk_reverse_kl", "k": k})
    recipe, engine = open_run(table)
    with engine:
        samples = engine.score(samples_of(engine))[0]
        loss = setup_loss_fn(recipe.loss)(student_inputs(engine.model, samples))
        loss.loss.backward()
        rollouts = [sample.rollout for sample in samples]
        sampled = torch.cat([rollout.token_ids[rollout.start :] for rollout in rollouts])
        p, q = Plain(engine, recipe).over(rollouts, k if isinstance(k, int) else None)
        ids = torch.cat([sample.scores.token_ids for sample in samples])
        assert float(loss.loss.detach()) == pytest.approx(float(kl(p, q).sum()), rel=2e-5)
        grads = [one.grad for one in engine.model.parameters()]
        assert all(grad is not None and grad.isfinite().all() for grad in grads)
    if wider == "student":
        assert (sampled >= VOCAB).any()
    elif k != "full":
        assert (ids >= VOCAB).any(), "the teacher's padding is among its top K"


def test_padding_of_the_students_support_has_no_gradient(pair: Raw) -> None:
    """An id that the student lacks is not known, and no loss reads its entry."""
    _, engine = open_run(pair("teacher"))
    with engine:
        support = student_inputs(engine.model, engine.score(samples_of(engine))[0]).support
    beyond = support.token_ids >= VOCAB
    assert beyond.any() and not beyond.all()
    assert (support.known == ~beyond).all()


@pytest.mark.parametrize("road", ["in process", "plugin", "json"])
def test_sampled_padding_has_the_floor_of_the_teacher(served_pair: Raw, road: str) -> None:
    """Behind such an id the teacher's numbers are those after its own last id."""
    recipe, engine = open_run(served_pair("student", road, loss={"type": "sampled_reverse_kl"}))
    with engine:
        samples = engine.score(samples_of(engine))[0]
        plain = Plain(engine, recipe)
        floored = 0
        for sample in samples:
            expected = plain.sampled(sample.rollout)
            torch.testing.assert_close(
                sample.scores.ref_logprobs.double(), expected, atol=2e-5, rtol=0
            )
            floored += int((expected[:-1] == math.log(FLOOR)).sum())
        loss = setup_loss_fn(recipe.loss)(student_inputs(engine.model, samples)).loss
    assert floored and loss.isfinite()


def test_students_choice_leaves_padding_of_its_own_out(pair: Raw) -> None:
    """The K most probable ids of the shared vocabulary, which the teacher can score."""
    recipe, engine = open_run(pair("student", loss__chosen_by="student"))
    with engine:
        samples = engine.score(samples_of(engine))[0]
        preflight(engine, recipe, lambda text: None)
        plain = Plain(engine, recipe)
        for sample in samples:
            log_p, log_q, _ = plain.logprobs(sample.rollout)
            top = log_p[:, :VOCAB].topk(8).indices
            assert sample.scores.token_ids.tolist() == top.tolist()
            found = sample.scores.teacher_logprobs.double()
            torch.testing.assert_close(found, log_q.gather(1, top), atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("wider", "road", "asked", "top"),
    [
        *((wider, "in process", "auto", None) for wider in ("neither", *WIDER)),
        *((wider, "in process", 40, 40) for wider in WIDER),
        *((wider, "json", "auto", 8) for wider in WIDER),
    ],
)
def test_evaluation_of_any_pair_equals_plain_float64(
    served_pair: Raw, wider: str, road: str, asked: Any, top: int | None
) -> None:
    """Of a small vocabulary all ids are compared; without the plugin, as many as the loss's."""
    table = served_pair(wider, road, eval__kl_size=3, eval__kl_support=asked)
    recipe, engine = open_run(table)
    with engine:
        problems = [engine.problems.prompt(p) for p in engine.problems.problem_set.held_out[:3]]
        params = SamplingParams(max_tokens=recipe.rollout.max_tokens)
        rollouts = engine.sampler.generate(problems, params, seed=EVALUATION_SEED)
        p, q = Plain(engine, recipe).over(rollouts, top)
        measured = Evaluator(engine, recipe).student()
    assert measured.get("eval/kl_ids") == top
    expected = {"eval/reverse_kl": kl(p, q).mean(), "eval/forward_kl": kl(q, p).mean()}
    if top is None:
        for name, one in (("entropy", p), ("teacher_entropy", q)):
            expected[f"eval/{name}"] = torch.special.entr(one).sum(-1).mean()
    sides = zip(*(Plain(engine, recipe).logprobs(one)[:2] for one in rollouts), strict=True)
    log_p, log_q = map(torch.cat, sides)
    shared = min(log_p.shape[1], log_q.shape[1])
    among = log_q[:, :shared] if top is None else log_q
    expected["eval/overlap"], expected["eval/overlap_advantage"] = plain_overlap(
        log_p, among, min(recipe.loss.k, top or shared), shared
    )
    for name, value in expected.items():
        assert measured[name] == pytest.approx(float(value), abs=2e-5), name


@pytest.mark.parametrize(
    ("wider", "loss"),
    [
        ("teacher", {"type": "topk_forward_kl", "k": 8, "normalization": "renorm"}),
        ("student", {"type": "head_tail_reverse_kl", "k": 8}),
    ],
)
def test_run_of_unequal_heads_trains(
    pair: Raw, tmp_path: Path, wider: str, loss: dict[str, Any]
) -> None:
    """From the preflight to the last evaluation, with finite numbers at every step."""
    run(pair(wider, loss=loss, trainer__steps=2), tmp_path / "run")
    before, *steps = read_metrics(tmp_path / "run")
    assert math.isfinite(before["eval/reverse_kl"]) and len(steps) == 2
    for row in steps:
        assert math.isfinite(row["loss"]) and row["grad_norm"] > 0
        assert ("rollout/padding_ids" in row) == (wider == "student")


@pytest.mark.parametrize("wider", WIDER)
def test_probe_of_unequal_heads_passes(pair: Raw, wider: str) -> None:
    """With the sizes of both heads, and the preflight's warning."""
    report = probed(pair(wider))
    assert report.passed and "belong to the tail" in report.warnings[0]
    sizes = {"student": report.student.facts.vocabulary}
    sizes["teacher"] = report.teachers["teacher"].facts.vocabulary
    assert sizes == {"student": VOCAB, "teacher": VOCAB} | {wider: VOCAB + EXTRA}


def test_teachers_answer_ends_before_its_padding() -> None:
    """The student cannot learn an id that it lacks; the rest would follow from that."""
    answer = make_rollout([5, 6], [7, 8, 300, 9], [-1.0] * 4, "stop", 0)
    cut = up_to_padding(answer, VOCAB, TeacherId())
    assert cut.token_ids.tolist() == [5, 6, 7, 8] and cut.finish_reason == "length"
    assert cut.loss_mask.tolist() == [False, False, True, True]
    assert up_to_padding(answer, VOCAB + 1, TeacherId()) is answer
    with pytest.raises(InvalidAnswer, match=r"\[teacher\] began an answer with id 300"):
        up_to_padding(make_rollout([5], [300, 7], [-1.0] * 2, "stop", 0), VOCAB, TeacherId())


def test_kl_support_follows_a_server_that_lost_its_plugin(served_pair: Raw) -> None:
    """JSON is asked for the loss's K; each evaluation says what it compared."""
    recipe, engine = open_run(served_pair("teacher", "plugin"))
    with engine:
        assert kl_support(recipe.eval, engine) == "full"
        (scorer,) = engine.teachers.scorers.values()
        scorer.client.go_without_plugin()
        assert kl_support(recipe.eval, engine) == 8


def test_whole_kl_of_unequal_heads_needs_the_plugin(served_pair: Raw) -> None:
    """A support of all ids does not say how much of either side is outside it."""
    recipe, engine = open_run(served_pair("teacher", "json", eval__kl_support="full"))
    with engine, pytest.raises(PreflightError, match="or set eval.kl_support to a number"):
        preflight(engine, recipe, lambda text: None)
    recipe, engine = open_run(served_pair("teacher", "plugin", eval__kl_support="full"))
    with engine:
        preflight(engine, recipe, lambda text: None)


@pytest.mark.parametrize("plugin", [True, False], ids=["plugin", "json"])
def test_server_elsewhere_says_its_size_or_how_to(
    tiny_recipe: Raw, folders: dict[str, Path], tmp_path: Path, plugin: bool
) -> None:
    """With the plugin an id beyond its head is scored; in JSON the size is not known."""
    shutil.copytree(own_teacher(), tmp_path / "elsewhere")
    with SpoilingServer(tmp_path / "elsewhere", plugin=plugin) as server:
        shutil.rmtree(tmp_path / "elsewhere")
        student = {"model": str(folders["student"])}
        teacher = {"model": server.model, "url": server.url}
        recipe, engine = open_run(tiny_recipe(student=student, teacher=teacher))
        with engine:
            (scorer,) = engine.teachers.scorers.values()
            rollout = make_rollout([7, 8], [9, VOCAB + 3, 9], [-1.0] * 3, "length", 0)
            if plugin:
                assert scorer.limits.vocab_size == VOCAB
                assert float(scorer.score([rollout], 0)[0].ref_logprobs[1]) == pytest.approx(
                    LOG_FLOOR
                )
            else:
                with pytest.raises(
                    ServerError, match="wider head .* start it with prime-composer tea"
                ):
                    scorer.score([rollout], 0)


@pytest.mark.vllm
@pytest.mark.parametrize("wider", WIDER)
def test_served_vllm_of_another_size_equals_plain_float64(served_pair: Raw, wider: str) -> None:
    """With the plugin and in JSON, on one server: the top K, the sampled tokens, whole heads."""
    table = served_pair(wider, "vllm plugin", loss={"type": "topk_reverse_kl", "k": 8})
    recipe, engine = open_run(table)
    with engine:
        preflight(engine, recipe, lambda text: None)
        samples = samples_of(engine)
        rollouts = [sample.rollout for sample in samples]
        (scorer,) = engine.teachers.scorers.values()
        plain = Plain(engine, recipe)
        p, q = plain.over(rollouts, 8)
        for binary in (True, False):
            scores = scorer.score(rollouts, 8, binary=binary)
            scored = [replace(one, scores=own) for one, own in zip(samples, scores, strict=True)]
            loss = setup_loss_fn(recipe.loss)(student_inputs(engine.model, scored)).loss.detach()
            assert float(loss) == pytest.approx(float(kl(p, q).sum()), rel=2e-5)
            for rollout, own in zip(rollouts, scores, strict=True):
                torch.testing.assert_close(
                    own.ref_logprobs.double(), plain.sampled(rollout), atol=5e-5, rtol=0
                )
        scores = scorer.score(rollouts, 0, hidden=True)
        scored = [replace(one, scores=own) for one, own in zip(samples, scores, strict=True)]
        found = compare(student_inputs(engine.model, scored).hidden_states, reverse_kl)
        whole = kl(*plain.over(rollouts, None))
        torch.testing.assert_close(found.detach().double(), whole, atol=1e-4, rtol=1e-4)
