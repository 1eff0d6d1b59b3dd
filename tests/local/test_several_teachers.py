"""Several teachers: the mixture against dense distributions, who is asked, and a whole run."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_composer.backends.mixture import Teachers, mix
from prime_composer.backends.protocols import Rollout, TeacherScores
from prime_composer.backends.self_teacher import PolicyTeacher
from prime_composer.local import evaluate
from prime_composer.local import train as train_module
from prime_composer.local.engine import Engine, preflight
from prime_composer.local.evaluate import by_environment
from prime_composer.local.preflight import PreflightError
from prime_composer.local.replay import read_pairs
from prime_composer.local.tracker import read_metrics
from prime_composer.local.train import train
from prime_composer.problems.config import DataConfig, Problem
from prime_composer.recipe.loading import parse_recipe
from prime_composer.recipe.routing import Routing, TeacherId
from prime_composer.recipe.schema import PolicyTeacherConfig, RecipeError

VOCAB = 12


def dense(count: int, n: int, seed: int) -> torch.Tensor:
    """Distributions of some teachers over the whole vocabulary, [teacher, seq, vocab], float64."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(count, n, VOCAB, generator=generator, dtype=torch.float64).mul(2.5).softmax(-1)
    )


def scored(q: torch.Tensor, token_ids: torch.Tensor, k: int) -> TeacherScores:
    top = q.log().topk(k, dim=-1)
    return TeacherScores(
        q.log().gather(1, token_ids[:, None])[:, 0].float(), top.indices, top.values.float()
    )


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, VOCAB),
    st.integers(0, 10**6),
    st.lists(st.floats(0.05, 1), min_size=4, max_size=4),
)
def test_the_mixture_is_a_lower_bound_exact_for_the_sampled_token_and_over_the_whole_vocabulary(
    count, k, seed, raw
):
    weights = torch.tensor(raw[:count], dtype=torch.float64)
    weights /= weights.sum()
    q = dense(count, 5, seed)
    token_ids = torch.randint(VOCAB, (5,), generator=torch.Generator().manual_seed(seed))
    mixed = mix(token_ids, [scored(one, token_ids, k) for one in q], weights.tolist())
    true = torch.einsum("i,inv->nv", weights, q)

    own = true.gather(1, token_ids[:, None])
    torch.testing.assert_close(
        mixed.ref_logprobs.double().exp()[:, None], own, rtol=1e-5, atol=1e-7
    )
    found, at_ids = mixed.teacher_logprobs.double().exp(), true.gather(1, mixed.token_ids)
    # What a teacher may hold on an id outside its own top K is at most its K-th probability.
    unseen = sum(w * one.topk(k, dim=-1).values[:, -1:] for w, one in zip(weights, q, strict=True))
    assert (found <= at_ids * (1 + 1e-5)).all() and (at_ids <= found + unseen + 1e-6).all()
    sampled = mixed.token_ids == token_ids[:, None]
    torch.testing.assert_close(found[sampled], at_ids[sampled], rtol=1e-5, atol=1e-7)
    if k == VOCAB:
        torch.testing.assert_close(found, at_ids, rtol=1e-5, atol=1e-7)
    assert mixed.token_ids.shape == (5, k)
    assert all(len(set(row)) == k for row in mixed.token_ids.tolist())
    assert (mixed.teacher_logprobs.diff(dim=1) <= 0).all()
    assert mixed.teacher_logprobs.dtype == torch.float32


def test_a_token_that_every_teacher_lists_has_exactly_the_mixtures_mass():
    ids = torch.tensor([[3, 1]])
    one = TeacherScores(torch.tensor([math.log(0.1)]), ids, torch.tensor([[0.6, 0.3]]).log())
    two = TeacherScores(
        torch.tensor([math.log(0.3)]), ids.flip(1), torch.tensor([[0.5, 0.2]]).log()
    )
    mixed = mix(torch.tensor([7]), [one, two], [0.25, 0.75])
    # id 1: .25 * .3 + .75 * .5; id 3: .25 * .6 + .75 * .2; the sampled id 7: .25 * .1 + .75 * .3
    assert mixed.token_ids.tolist() == [[1, 3]]
    torch.testing.assert_close(mixed.teacher_logprobs.exp(), torch.tensor([[0.45, 0.3]]))
    torch.testing.assert_close(mixed.ref_logprobs.exp(), torch.tensor([0.25]))


def test_ids_are_distinct_also_where_all_teachers_give_some_of_them_no_probability():
    q = dense(3, 5, 7)
    q[:, :, 8:] = 0
    q /= q.sum(-1, keepdim=True)
    token_ids = torch.arange(5)
    for k in (VOCAB, 10):
        mixed = mix(token_ids, [scored(one, token_ids, k) for one in q], [0.25, 0.25, 0.5])
        assert all(len(set(row)) == k for row in mixed.token_ids.tolist())
        expected = torch.einsum(
            "i,inv->nv", torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64), q
        )
        torch.testing.assert_close(
            mixed.teacher_logprobs.double().exp(),
            expected.gather(1, mixed.token_ids),
            rtol=1e-5,
            atol=0,
        )


def test_one_teacher_is_passed_through_bit_for_bit():
    scores = scored(dense(1, 4, 0)[0], torch.arange(4), 3)
    assert mix(torch.arange(4), [scores], [1.0]) is scores


def test_without_a_support_only_the_sampled_token_is_mixed():
    scores = [scored(q, torch.arange(4), 0) for q in dense(2, 4, 1)]
    mixed = mix(torch.arange(4), scores, [0.5, 0.5])
    assert mixed.token_ids.shape == (4, 0)
    expected = (scores[0].ref_logprobs.exp() + scores[1].ref_logprobs.exp()) / 2
    torch.testing.assert_close(mixed.ref_logprobs.exp(), expected)


def rollout(tokens: list[int]) -> Rollout:
    ids = torch.tensor(tokens)
    return Rollout(ids, torch.ones_like(ids, dtype=torch.bool), torch.zeros(len(tokens)), "stop", 0)


class Recorder:
    """A scorer that remembers what it was asked."""

    def __init__(self, logprob: float):
        self.logprob, self.asked, self.closed = logprob, [], False

    def score(self, rollouts, support_size):
        self.asked.append([r.token_ids.tolist() for r in rollouts])
        empty = [torch.zeros(len(r.token_ids), 0) for r in rollouts]
        return [TeacherScores(torch.full((len(e),), self.logprob), e.long(), e) for e in empty]

    def generate(self, prompts, params, seed): ...

    def update_weights(self, model): ...

    def close(self):
        self.closed = True


def test_each_teacher_is_asked_about_its_own_rollouts_and_the_order_stays():
    first, second, third = Recorder(-1.0), Recorder(-2.0), Recorder(-3.0)
    shares = {"a": {"x": 1.0}, "b": {"y": 1.0}, "both": {"y": 0.75, "x": 0.25}}
    teachers = Teachers(
        {"x": first, "y": second, "z": third}, lambda problem: shares[problem.question]
    )
    problems = [Problem(name, "#### 1") for name in ("b", "both", "a")]
    scores = teachers.score([rollout([1]), rollout([2, 3]), rollout([4])], problems, 0)
    assert first.asked == [[[2, 3], [4]]] and second.asked == [[[1], [2, 3]]] and third.asked == []
    both = math.log(0.25 * math.exp(-1) + 0.75 * math.exp(-2))
    assert [s.ref_logprobs.tolist() for s in scores] == [
        [-2.0],
        pytest.approx([both, both]),
        [-1.0],
    ]
    teachers.close()
    assert first.closed and second.closed and third.closed


# ------------------------------------------------------------------------------------------------------ the recipe

TINY = {
    "vocab_size": 300, "hidden_size": 16, "layers": 1, "heads": 1, "head_dim": 32, "intermediate_size": 32,
    "max_position_embeddings": 256, "batch_size": 8,
}  # fmt: skip


def raw(**changes) -> dict:
    table = {
        "student": {"prepare": {**TINY, "sft_steps": 5, "seed": 2}},
        "teachers": {
            "short": {
                "prepare": {**TINY, "sft_steps": 20, "environments": ["sums"]},
                "weight": 1.0,
            },
            "long": {
                "prepare": {**TINY, "sft_steps": 20, "environments": ["chains"]},
                "weight": 3.0,
            },
        },
        "environments": {
            "sums": {"size": 40, "operations": [1], "teacher": "short"},
            "chains": {
                "size": 40,
                "operations": [2, 3],
                "teacher": "long",
                "prompt_template": "Q: {question}\nA:",
            },
        },
        "loss": {"type": "topk_reverse_kl", "k": 8},
        "rollout": {"backend": "transformers", "max_tokens": 8, "max_model_len": 128},
        "trainer": {"steps": 2, "batch_size": 6, "lr": 1e-3},
        "eval": {"every": 1, "size": 8, "kl_size": 6},
        "logging": {"tensorboard": False},
    }
    for key, value in changes.items():
        here, names = table, key.split("__")
        for name in names[:-1]:
            here = here.setdefault(name, {})
        if value is None:
            del here[names[-1]]
        else:
            here[names[-1]] = value
    return table


def test_who_scores_what():
    recipe = parse_recipe(
        raw(environments__chains__teacher={"short": 1, "long": 1}, environments__free={"seed": 3})
    )
    routing = Routing.of_recipe(recipe)
    mixtures = {
        name: routing.of(Problem("?", "#### 1", environment=name)) for name in recipe.environments
    }
    assert mixtures == {
        "sums": {TeacherId("short"): 1.0},
        "chains": {TeacherId("short"): 0.5, TeacherId("long"): 0.5},
        "free": {TeacherId("short"): 0.25, TeacherId("long"): 0.75},
    }
    named = Problem("?", "#### 1", environment="chains", teacher="long")
    assert routing.of(named) == {TeacherId("long"): 1.0}
    with pytest.raises(RecipeError, match="names the teacher 'nobody'; .teachers. has short, long"):
        routing.of(Problem("?", "#### 1", environment="sums", teacher="nobody"))


@pytest.mark.parametrize(
    "changes,said",
    [
        ({"teacher": {"model": "x"}}, r"\[teacher\] and \[teachers.\*\]: keep one"),
        ({"data": {}}, r"\[data\] and \[environments.\*\]: keep one"),
        ({"environments__sums__teacher": "shrot"}, r"environments.sums.teacher names 'shrot'; \[teachers\] has short, long"),
        ({"environments__sums__teacher": {"short": 0}}, "each weight above 0"),
        ({"environments__sums__teacher_key": "by"}, "generated problems have none"),
        ({"teachers__short__weight": 0}, "teachers.short.weight"),
        ({"teachers__short": {"policy": {}}}, "has one teacher"),
        ({"teachers__a.b": {"model": "x"}}, "a name is made of letters"),
        ({"teachers__short__modell": "x"}, "unknown key teachers.short.modell; did you mean model"),
        ({"environments__sums__ratio": math.inf}, "environments.sums.ratio: Input should be a finite number"),
        ({"environments__sums__siez": 2}, "unknown key environments.sums.siez; did you mean size"),
        ({"student__prepare__environments": ["chess"]}, r"student: prepare.environments names 'chess'; \[environments\] has"),
        (
            {"teachers": None, "teacher": {"model": "x"}},
            r"environments.sums.teacher chooses among \[teachers.\*\], and there are none",
        ),
    ],
)  # fmt: skip
def test_a_table_that_does_not_fit_is_named_with_its_key(changes, said):
    with pytest.raises(RecipeError, match=said):
        parse_recipe(raw(**changes))


@pytest.fixture
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv(
        "PRIME_COMPOSER_CACHE", str(tmp_path_factory.getbasetemp() / "teachers-cache")
    )


def run(table: dict, folder):
    folder.mkdir()
    return train(parse_recipe(table), folder, Display())


class Display:
    def status(self, text: str) -> None: ...

    def step(self, step: int, metrics: dict[str, float]) -> None: ...


def test_two_teachers_of_two_environments_train_one_student(tmp_path, cache, monkeypatch):
    recipe = parse_recipe(raw())
    checked = {train_module: set(), evaluate: set()}
    for (
        module,
        seen,
    ) in checked.items():  # every second problem is answered, by the rule of its own environment

        def judge(text, problem, config, seen=seen):
            seen.add((problem.environment, config.prompt_template))
            return problem.environment == "sums"

        monkeypatch.setattr(module, "is_correct", judge)
    outcome = train(recipe, tmp_path, Display())
    own = {(name, data.prompt_template) for name, data in recipe.environments.items()}
    assert list(checked.values()) == [own, own]
    first = outcome.evaluations[0]
    names = {"eval/accuracy", "eval/reverse_kl", "teacher/accuracy"}
    assert {
        f"{name}/{environment}" for name in names for environment in recipe.environments
    } <= first.keys()
    assert {"teacher/short/accuracy", "teacher/long/accuracy"} <= first.keys()
    assert (first["eval/accuracy"], first["eval/accuracy/sums"], first["eval/accuracy/chains"]) == (
        0.5,
        1.0,
        0.0,
    )
    step = next(record for record in read_metrics(tmp_path) if "loss" in record)
    assert (step["rollout/reward"], step["rollout/reward/sums"], step["rollout/reward/chains"]) == (
        0.5,
        1.0,
        0.0,
    )


def test_an_environments_mean_is_over_its_own_problems():
    recipe = parse_recipe(raw(environments__free={"seed": 3}))
    problems = [Problem("?", "#### 1", environment=name) for name in ("sums", "chains", "sums")]
    assert by_environment("m", recipe, problems, [1.0, 0.0, 0.0]) == {
        "m/sums": 0.5,
        "m/chains": 0.0,
    }
    # Sums over 1, 2 and 3 tokens: (4 + 2) / (1 + 3), and nothing of the environment without a problem.
    assert by_environment("m", recipe, problems, [4.0, 5.0, 2.0], [1.0, 2.0, 3.0]) == {
        "m/sums": 1.5,
        "m/chains": 2.5,
    }


def test_a_teachers_accuracy_is_over_the_problems_that_it_has_a_share_in(monkeypatch):
    asked = []

    def answers(engine, sampler, recipe, problems):
        asked.append((sampler.logprob, [p.question for p in problems]))
        return [float(p.question in "ad") for p in problems], [0.0] * len(problems)

    monkeypatch.setattr(evaluate, "greedy_answers", answers)
    monkeypatch.setattr(evaluate, "teacher_sampler", lambda scorer, teacher, recipe: scorer)
    routed = parse_recipe(raw(eval__size=3))
    teachers = Teachers(
        {"teachers.short": Recorder(-1.0), "teachers.long": Recorder(-2.0)}, routed.mixture
    )
    engine = Engine(routed, torch.nn.Module(), None, Recorder(0.0), teachers)
    problems = [
        Problem(q, "#### 1", environment=e)
        for q, e in zip("abcd", ("sums", "chains", "sums", "chains"), strict=True)
    ]
    assert evaluate.teacher_accuracy(engine, routed, problems) == {
        "teacher/short/accuracy": 0.5, "teacher/long/accuracy": 0.0,
        "teacher/accuracy": pytest.approx(1 / 3), "teacher/accuracy/sums": 0.5, "teacher/accuracy/chains": 0.0,
    }  # fmt: skip
    assert asked == [(-1.0, ["a", "c"]), (-2.0, ["b"])]
    both = parse_recipe(raw(environments__chains__teacher={"short": 1, "long": 1}))
    # Who would answer for a mixture is not defined: each teacher alone, and no number for all.
    assert evaluate.teacher_accuracy(engine, both, problems) == {
        "teacher/short/accuracy": 0.5,
        "teacher/long/accuracy": 0.5,
    }


def test_the_measured_kl_is_that_to_each_environments_own_teacher(tmp_path, cache):
    """One environment's KL under routing is that of a run whose only teacher is that environment's."""
    routed = run(raw(trainer__steps=1), tmp_path / "routed").evaluations[0]
    alone = raw(trainer__steps=1, environments__sums__teacher="long")
    for_long = run(alone, tmp_path / "alone").evaluations[0]
    assert routed["eval/reverse_kl/chains"] == for_long["eval/reverse_kl/chains"]
    assert abs(routed["eval/reverse_kl/sums"] - for_long["eval/reverse_kl/sums"]) > 0.02


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_a_teachers_context_is_compared_with_its_own_problems_alone(
    tmp_path, cache, monkeypatch, fraction
):
    """Servers have contexts of their own: one is not refused for the problems of another."""

    def check(engine, recipe, problems, prompts, status):
        def needed(environment):
            return max(
                len(prompt)
                + max(8, len(engine.tokenizer.encode(f" {p.answer}")) + 1 if fraction < 1 else 0)
                for prompt, p in zip(prompts, problems, strict=True)
                if p.environment == environment
            )

        scorers = engine.teachers.scorers
        assert needed("sums") < needed("chains")
        for prompt, p in zip(prompts, problems, strict=True):
            assert engine.tokenizer.decode(prompt).startswith(
                "Q: " if p.environment == "chains" else "Question: "
            )
        scorers["teachers.short"].max_model_len = needed("sums") + 1
        preflight(engine, recipe, problems, prompts, status)
        scorers["teachers.long"].max_model_len = needed("chains")
        with pytest.raises(
            PreflightError,
            match=r"\[teachers.long\]: The longest prompt|solution .* teacher long takes",
        ):
            preflight(engine, recipe, problems, prompts, status)
        raise InterruptedError

    monkeypatch.setattr(train_module, "preflight", check)
    with pytest.raises(InterruptedError):
        run(
            raw(rollout__student_fraction=fraction, loss={"type": "generalized_jsd", "k": 8}),
            tmp_path / "run",
        )


def test_a_mixture_of_a_teacher_with_itself_is_that_teacher(tmp_path, cache):
    same = {name: {"prepare": {**TINY, "sft_steps": 20}} for name in ("short", "long")}
    both = {"short": 0.5, "long": 0.5}
    mixed = raw(
        teachers=same,
        environments__sums__teacher=both,
        environments__chains__teacher=both,
        loss__k=4,
    )
    one = raw(
        teachers=same,
        environments__sums__teacher="short",
        environments__chains__teacher="short",
        loss__k=4,
    )
    records = []
    for name, table in (("mixed", mixed), ("one", one)):
        run(table, tmp_path / name)
        records.append([r for r in read_metrics(tmp_path / name) if "loss" in r])
    for left, right in zip(*records, strict=True):
        assert left["loss"] == pytest.approx(right["loss"], rel=1e-5)
        assert left["grad_norm"] == pytest.approx(right["grad_norm"], rel=1e-4)


class Letters:
    eos_token_id = 0

    def encode(self, text, add_special_tokens=True):
        return [ord(letter) for letter in text]

    def apply_chat_template(self, conversation, **kwargs): ...


def test_a_told_policy_is_asked_as_its_environment_asks():
    sources = {name: DataConfig(prompt_template=f"{name}: {{question}}") for name in ("a", "b")}
    teacher = PolicyTeacher(
        PolicyTeacherConfig(update="live", template="{question}{hint}"),
        sources,
        torch.nn.Module(),
        Letters(),
    )
    ids = teacher.prompt(Problem("q", "#### 1", environment="b"), "h")
    assert "".join(map(chr, ids)) == "b: qh"


def test_a_pair_of_a_file_names_its_environment_where_there_are_several(tmp_path):
    one, two = DataConfig(prompt_template="1{question}"), DataConfig(prompt_template="2{question}")
    path = tmp_path / "pairs.jsonl"

    def first_letter(sources, **more):
        path.write_text(json.dumps({"question": "q", "chosen": "5", "rejected": "6", **more}))
        return chr(read_pairs(path, sources, Letters())[0].rejected.token_ids[0])

    assert first_letter({"a": one, "b": two}, environment="b") == "2"
    for environment in ({}, {"environment": "c"}, {"environment": ["a"]}):
        with pytest.raises(ValueError, match='pairs.jsonl:1: "environment" must be one of a, b'):
            first_letter({"a": one, "b": two}, **environment)
    assert (
        first_letter({"a": one}) == first_letter({"problems": one}, environment="elsewhere") == "1"
    )


def test_rows_that_name_their_teacher_go_to_it_and_an_unknown_name_is_an_error(tmp_path, cache):
    rows = [
        {"question": f"What is {i} + 1?", "answer": f"{i} + 1\n#### {i + 1}", "by": "long"}
        for i in range(40)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    environments = {
        "sums": {"source": "jsonl", "path": str(path), "teacher_key": "by", "teacher": "short"}
    }
    teachers = {name: {"prepare": {**TINY, "sft_steps": 2}} for name in ("short", "long")}
    outcome = run(raw(environments=environments, teachers=teachers), tmp_path / "run")
    assert (
        "teacher/long/accuracy" in outcome.evaluations[0]
        and "teacher/short/accuracy" not in outcome.evaluations[0]
    )
    path.write_text(path.read_text().replace('"long"', '"nobody"', 1))
    with pytest.raises(RecipeError, match="names the teacher 'nobody'"):
        run(raw(environments=environments, teachers=teachers), tmp_path / "other")
