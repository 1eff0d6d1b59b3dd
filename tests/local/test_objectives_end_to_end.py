"""Every objective through the one-machine loop: self-distillation, replay, GKD's lambda, sums of channels."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from prime_composer.backends.hf_model import load_student
from prime_composer.backends.protocols import Rollout
from prime_composer.backends.self_teacher import PolicyTeacher
from prime_composer.local.checkpoint import list_checkpoints
from prime_composer.local.gradients import Batch, accumulate_gradients
from prime_composer.local.replay import Pair, pairs_of_rollouts, read_pairs, response
from prime_composer.local.tracker import read_metrics
from prime_composer.local.train import group_advantages, train
from prime_composer.losses import LOSS_TYPES, setup_loss_fn
from prime_composer.losses import parse_loss
from prime_composer.problems.config import DataConfig, Problem
from prime_composer.recipe.loading import parse_recipe
from prime_composer.recipe.schema import PolicyTeacherConfig, RecipeError, TrainerConfig
from prime_composer.problems.loading import load_problem_set
from prime_composer.tiny_models.cache import prepare_model

Raw = Callable[..., dict[str, Any]]


class Silent:
    def status(self, text: str) -> None: ...

    def step(self, step: int, metrics: dict[str, float]) -> None: ...


def run(raw: dict[str, Any], run_dir: Path, resume: bool = False) -> list[dict[str, float]]:
    run_dir.mkdir(exist_ok=True)
    train(
        parse_recipe(raw),
        run_dir,
        Silent(),
        resume=list_checkpoints(run_dir)[-1] if resume else None,
    )
    return read_metrics(run_dir)


@pytest.fixture(scope="module")
def student(tiny_recipe: Raw) -> tuple[torch.nn.Module, Any]:
    recipe = parse_recipe(tiny_recipe())
    return load_student(prepare_model(recipe.student.prepare, load_problem_set(recipe.sources)))


DATA = DataConfig()
SOURCES = {"problems": DATA}
PROBLEM = Problem("Ada has 2 apples and buys 3 more. How many?", "2 + 3 = 5\n#### 5")


def rollout(group: int, ids: tuple[int, ...] = (5, 6, 7, 8)) -> Rollout:
    tokens = torch.tensor(ids)
    mask = torch.tensor([False, False, *[True] * (len(ids) - 2)])
    return Rollout(tokens, mask, torch.where(mask, -1.0, torch.nan), "stop", group)


DISTILLATION = {
    "sampled_reverse_kl": {},
    "topk_forward_kl": {"k": 8},
    "generalized_jsd": {"k": 8, "beta": 0.3},
    "head_tail_reverse_kl": {"k": 8},
    "taid": {"k": 8, "total_steps": 2},
    "entropy_aware_opd": {"tau": 0.5, "alpha": 1.0, "k": 8},
    "self_distillation": {"k": 8},
}


@pytest.mark.parametrize("name", DISTILLATION)
def test_every_distillation_loss_trains_and_logs_its_metrics_at_every_step(
    name: str, tiny_recipe: Raw, tmp_path: Path
) -> None:
    records = run(
        tiny_recipe(loss={"type": name, **DISTILLATION[name]}, trainer__steps=2), tmp_path / "run"
    )
    keys = [{key for key in record if key.startswith(f"{name}/")} for record in records[1:]]
    assert keys[0] == keys[1] and keys[0]
    assert all(record["grad_norm"] > 0 and math.isfinite(record["loss"]) for record in records[1:])


def test_the_losses_named_here_and_the_rl_and_replay_ones_are_all_there_are() -> None:
    assert set(LOSS_TYPES) == {
        *DISTILLATION,
        "topk_reverse_kl",
        "sft",
        "default",
        "ipo",
        "dpo",
        "simpo",
        "compose",
    }


def test_the_schedule_of_taid_moves_with_optimiser_steps_and_survives_a_resume(
    tiny_recipe: Raw, tmp_path: Path
) -> None:
    loss = {"type": "taid", "k": 8, "total_steps": 4}
    raw = tiny_recipe(
        loss=loss,
        trainer={"steps": 4, "batch_size": 6, "micro_batch_tokens": 60},
        checkpoint={"every": 2},
    )
    whole = run(raw, tmp_path / "whole")
    t = [record["taid/t"] for record in whole[1:]]
    assert t == sorted(t) and t[-1] > t[0]
    cut = tmp_path / "cut"
    cut.mkdir()
    (cut / "checkpoints").mkdir()
    (tmp_path / "whole" / "checkpoints" / "step_000002").rename(cut / "checkpoints" / "step_000002")
    (cut / "metrics.jsonl").write_text((tmp_path / "whole" / "metrics.jsonl").read_text())
    again = run(raw, cut, resume=True)
    assert [record["taid/t"] for record in again[1:]] == t


def test_a_reference_hint_stands_in_the_teachers_prompt_and_only_there(
    student: tuple[Any, Any],
) -> None:
    model, tokenizer = student
    teacher = PolicyTeacher(
        PolicyTeacherConfig(template="{question} Told: {hint}"), SOURCES, model, tokenizer
    )
    text = tokenizer.decode(teacher.prompt(PROBLEM, PROBLEM.answer))
    assert (
        text
        == "Question: Ada has 2 apples and buys 3 more. How many? Told: 2 + 3 = 5\n#### 5\nAnswer:"
    )


def test_braces_in_question_hint_and_attempt_stay_as_they_are(student: tuple[Any, Any]) -> None:
    config = PolicyTeacherConfig(template="{question}|{hint}|{attempt}")
    teacher = PolicyTeacher(
        config, {"problems": DataConfig(prompt_template="{question}")}, *student
    )
    prompt = teacher.prompt(
        Problem("a {hint}", "x"), hint="b {attempt} {question}", attempt="c {question}"
    )
    assert student[1].decode(prompt) == "a {hint}|b {attempt} {question}|c {question}"


def test_a_sibling_hint_is_the_first_correct_rollout_of_the_group_other_than_itself(
    student: tuple[Any, Any],
) -> None:
    teacher = PolicyTeacher(PolicyTeacherConfig(hint="sibling"), SOURCES, *student)
    rollouts = [rollout(0), rollout(0), rollout(0), rollout(1), rollout(1)]
    hints = teacher.hints(
        rollouts, ["a", "b", "c", "d", "e"], [PROBLEM] * 5, [1.0, 0.0, 1.0, 1.0, 0.0]
    )
    assert hints == ["c", "a", "a", None, "d"]


def test_feedback_names_the_right_answer_of_a_wrong_rollout(student: tuple[Any, Any]) -> None:
    teacher = PolicyTeacher(PolicyTeacherConfig(hint="feedback"), SOURCES, *student)
    hints = teacher.hints([rollout(0), rollout(1)], ["x", "y"], [PROBLEM] * 2, [0.0, 1.0])
    assert hints == ["This is wrong; the right answer is 5.", "This is correct."]


def test_the_policy_teacher_scores_the_rollouts_own_tokens_after_the_longer_prompt(
    student: tuple[Any, Any],
) -> None:
    model, tokenizer = student
    teacher = PolicyTeacher(PolicyTeacherConfig(update="live"), SOURCES, model, tokenizer)
    prompt = teacher.prompt(PROBLEM, PROBLEM.answer)
    mine = rollout(0, (5, 6, 40, 41, 42))
    (scores,) = teacher.score([mine], [prompt], 8)
    with torch.no_grad():
        logprobs = model(torch.tensor([[*prompt, 40, 41, 42]])).logits[0].log_softmax(-1)
    expected = [logprobs[len(prompt) - 1 + i, token] for i, token in enumerate((40, 41, 42))]
    torch.testing.assert_close(scores.ref_logprobs[2:], torch.stack(expected), rtol=0, atol=2e-5)


def test_the_student_may_choose_the_support(student: tuple[Any, Any]) -> None:
    model, tokenizer = student
    teacher = PolicyTeacher(PolicyTeacherConfig(update="live"), SOURCES, model, tokenizer)
    mine = rollout(0, (5, 6, 40, 41, 42))
    (scores,) = teacher.score([mine], [teacher.prompt(PROBLEM, "9")], 8, chosen_by_student=True)
    with torch.no_grad():
        untold = model(mine.token_ids[None]).logits[0]
    assert torch.equal(
        scores.token_ids[2:].sort().values, untold[1:-1].topk(8).indices.sort().values
    )


def test_an_ema_teacher_follows_at_its_rate_and_a_synced_one_in_jumps(tiny_recipe: Raw) -> None:
    recipe = parse_recipe(tiny_recipe())
    model, tokenizer = load_student(prepare_model(recipe.student.prepare, load_problem_set(recipe.sources)))
    before = model.model.norm.weight.detach().clone()
    ema = PolicyTeacher(PolicyTeacherConfig(update="ema", ema_rate=0.25), SOURCES, model, tokenizer)
    synced = PolicyTeacher(
        PolicyTeacherConfig(update="sync", sync_every=2), SOURCES, model, tokenizer
    )
    with torch.no_grad():
        model.model.norm.weight.add_(1.0)
    for teacher in (ema, synced):
        teacher.end_step(1)
    torch.testing.assert_close(ema.model.model.norm.weight, before + 0.25)
    torch.testing.assert_close(synced.model.model.norm.weight, before)
    for teacher in (ema, synced):
        teacher.end_step(2)
    torch.testing.assert_close(ema.model.model.norm.weight, before + 0.25 + 0.75 * 0.25)
    torch.testing.assert_close(synced.model.model.norm.weight, before + 1.0)


@pytest.mark.parametrize(
    "policy", [{"hint": "reference"}, {"hint": "feedback", "update": "sync", "sync_every": 1}]
)
def test_self_distillation_runs_and_resumes_with_its_teachers_own_weights(
    policy: dict[str, Any], tiny_recipe: Raw, tmp_path: Path
) -> None:
    raw = tiny_recipe(
        teacher={"policy": policy},
        loss={"type": "self_distillation", "k": 8, "chosen_by": "student"},
        rollout__max_model_len=256,
        trainer={"steps": 4, "batch_size": 6, "lr": 1e-2},
        checkpoint={"every": 2, "keep": 2},
    )
    whole = run(raw, tmp_path / "whole")
    assert {"teacher/accuracy", "eval/accuracy"} <= whole[0].keys()
    cut = tmp_path / "cut"
    (cut / "checkpoints").mkdir(parents=True)
    (tmp_path / "whole" / "checkpoints" / "step_000002").rename(cut / "checkpoints" / "step_000002")
    (cut / "metrics.jsonl").write_text((tmp_path / "whole" / "metrics.jsonl").read_text())
    again = run(raw, cut, resume=True)
    assert [record["loss"] for record in again[1:]] == [record["loss"] for record in whole[1:]]


def test_a_hint_that_leaves_no_room_for_the_response_is_refused_before_the_first_step(
    tiny_recipe: Raw, tmp_path: Path
) -> None:
    raw = tiny_recipe(
        teacher={"policy": {}},
        loss={"type": "self_distillation", "k": 8},
        rollout__max_model_len=100,
    )
    with pytest.raises(ValueError, match="raise rollout.max_model_len from 100 to"):
        run(raw, tmp_path / "run")


@pytest.mark.parametrize(
    ("policy", "rollout_changes", "message"),
    [
        (
            {"template": "{question} {hint}" + " x" * 150},
            {"max_model_len": 1000},
            "has only 256 positions",
        ),
        # A sibling's text may take all of max_tokens, whatever the data's own solutions take.
        (
            {"hint": "sibling", "template": "{question} {hint}"},
            {"max_tokens": 90, "max_model_len": 200},
            "max_model_len from 200",
        ),
    ],
)
def test_a_told_prompt_is_measured_against_the_model_and_with_the_longest_hint_there_may_be(
    policy: dict[str, str],
    rollout_changes: dict[str, int],
    message: str,
    tiny_recipe: Raw,
    tmp_path: Path,
) -> None:
    raw = tiny_recipe(
        teacher={"policy": policy},
        loss={"type": "self_distillation", "k": 8},
        rollout__group_size=2,
    )
    raw["rollout"] |= rollout_changes
    with pytest.raises(ValueError, match=message):
        run(raw, tmp_path / "run")


def test_rollouts_without_a_hint_train_nothing_and_are_counted(
    tiny_recipe: Raw, tmp_path: Path
) -> None:
    raw = tiny_recipe(
        teacher={"policy": {"hint": "sibling"}},
        loss={"type": "self_distillation", "k": 8},
        rollout={"backend": "transformers", "max_tokens": 8, "max_model_len": 256, "group_size": 2},
        trainer={"steps": 1, "batch_size": 4},
    )
    records = run(raw, tmp_path / "run")
    # The tiny student is never right, so no rollout has a correct sibling.
    assert records[1]["rollout/reward"] == 0 and records[1]["rollout/without_hint"] == 1.0
    assert "loss" not in records[1] and records[1]["grad_norm"] == 0


def test_pairs_join_a_correct_and_a_wrong_rollout_of_one_group() -> None:
    rollouts = [rollout(0), rollout(0), rollout(0), rollout(1), rollout(1), rollout(2), rollout(2)]
    pairs = pairs_of_rollouts(rollouts, [0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0], limit=9)
    assert [(pair.chosen, pair.rejected) for pair in pairs] == [
        (rollouts[1], rollouts[0]),
        (rollouts[6], rollouts[5]),
    ]
    assert len(pairs_of_rollouts(rollouts, [0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0], limit=1)) == 1


def test_pairs_are_read_with_file_and_line_of_what_is_wrong(
    student: tuple[Any, Any], tmp_path: Path
) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"question": "q", "chosen": "5", "rejected": "6"}) + "\n")
    (pair,) = read_pairs(path, SOURCES, student[1])
    assert student[1].decode(pair.chosen.completion_ids) == " 5" + student[1].eos_token
    path.write_text(path.read_text() + '{"question": "q", "chosen": 3, "rejected": "6"}\n')
    with pytest.raises(ValueError, match='pairs.jsonl:2: "chosen" must be a string'):
        read_pairs(path, SOURCES, student[1])
    with pytest.raises(ValueError, match="no such file"):
        read_pairs(tmp_path / "absent.jsonl", SOURCES, student[1])


@pytest.mark.parametrize("name", ["dpo", "simpo"])
def test_the_replay_channel_counts_as_its_weight_times_the_mean_over_pairs(
    name: str, tiny_recipe: Raw
) -> None:
    recipe = parse_recipe(tiny_recipe())
    folder = prepare_model(recipe.student.prepare, load_problem_set(recipe.sources))
    model, tokenizer = load_student(folder)
    model.double()
    reference, _ = load_student(prepare_model(recipe.teacher.prepare, load_problem_set(recipe.sources)))
    reference.double()
    prompt = tokenizer.encode("Question: 1 + 1?\nAnswer:")
    texts = [("2", "3 or so"), ("#### 2 and more", "1"), ("x", "y z")]
    pairs = [Pair(*(response(prompt, text, DATA, tokenizer, 0) for text in pair)) for pair in texts]
    config = parse_loss(
        {
            "type": "compose",
            "rl": {"weight": 0.0},
            "replay": {"weight": 0.5, "loss": {"type": name}},
        }
    )
    rollouts = [rollout(0, (5, 6, 40, 41, 42)), rollout(1)]
    for budget in (10_000, 1):
        model.zero_grad()
        trainer = TrainerConfig(steps=1, micro_batch_tokens=budget)
        metrics = accumulate_gradients(
            model,
            setup_loss_fn(config),
            Batch(rollouts, pairs=pairs),
            trainer,
            1,
            reference=reference,
        )
        gradient = model.model.norm.weight.grad.clone()

        model.zero_grad()
        values = []
        for pair in pairs:
            sums = []
            for side in (pair.chosen, pair.rejected):
                own, frozen = (
                    net(side.token_ids[None]).logits[0].log_softmax(-1)
                    for net in (model, reference)
                )
                where = [
                    (t - 1, int(side.token_ids[t]))
                    for t in range(len(side.token_ids))
                    if side.loss_mask[t]
                ]
                p, r = (sum(table[i] for i in where) for table in (own, frozen.detach()))
                sums.append((p, r, len(where)))
            (pc, rc, nc), (pr, rr, nr) = sums
            if name == "dpo":
                margin = 0.1 * ((pc - rc) - (pr - rr))
            else:
                fields = LOSS_TYPES["simpo"].model_fields
                margin = fields["beta"].default * (pc / nc - pr / nr) - fields["gamma"].default
            values.append(-torch.nn.functional.logsigmoid(margin))
        expected = 0.5 * sum(values) / len(values)
        expected.backward()
        assert metrics["loss"] == pytest.approx(float(expected.detach()), rel=1e-9)
        assert metrics["compose/replay/pairs"] == 3
        torch.testing.assert_close(gradient, model.model.norm.weight.grad, rtol=1e-8, atol=1e-12)


def test_three_channels_train_together(tiny_recipe: Raw, tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(
        "".join(
            json.dumps({"question": f"{i} + 1?", "chosen": f"#### {i + 1}", "rejected": "no"})
            + "\n"
            for i in range(5)
        )
    )
    raw = tiny_recipe(
        loss={
            "type": "compose",
            "rl": {"weight": 1.0},
            "distillation": {"near": {"weight": 0.5, "loss": {"type": "topk_reverse_kl", "k": 4}}},
            "replay": {"weight": 0.1, "loss": {"type": "dpo"}},
        },
        rollout__group_size=2,
        replay={"source": "jsonl", "path": str(path), "pairs_per_step": 3},
        trainer={"steps": 2, "batch_size": 4},
    )
    records = run(raw, tmp_path / "run")
    assert records[2]["compose/replay/pairs"] == 3.0
    parts = 1.0 * records[2]["compose/rl/loss"] + 0.5 * records[2]["compose/near/loss"]
    assert records[2]["loss"] == pytest.approx(
        parts + 0.1 * records[2]["compose/replay/loss"], abs=1e-5
    )


def test_gkds_lambda_replaces_sequences_by_the_datas_solutions(
    tiny_recipe: Raw, tmp_path: Path
) -> None:
    raw = tiny_recipe(
        loss={"type": "generalized_jsd", "k": 8}, trainer={"steps": 3, "batch_size": 12}
    )
    raw["rollout"]["student_fraction"] = 0.0
    solutions = run(raw, tmp_path / "solutions")
    assert all(record["rollout/reward"] == 1.0 for record in solutions[1:])
    raw["rollout"]["student_fraction"] = 0.5
    mixed = run(raw, tmp_path / "mixed")
    shares = [record["rollout/reward"] for record in mixed[1:]]
    assert all(0 < share < 1 for share in shares)


def test_a_loss_that_reads_the_samplers_probabilities_is_refused_on_the_datas_solutions(
    tiny_recipe: Raw,
) -> None:
    raw = tiny_recipe(loss={"type": "sampled_reverse_kl"})
    raw["rollout"]["student_fraction"] = 0.5
    with pytest.raises(RecipeError, match="student_fraction below 1 use a loss on a support"):
        parse_recipe(raw)


def test_a_solution_that_the_teacher_cannot_read_is_refused_before_the_first_step(
    tiny_recipe: Raw, tmp_path: Path
) -> None:
    path = tmp_path / "problems.jsonl"
    rows = [
        {"question": f"{i} + 1?", "answer": ("2 " * 300 if i % 2 else "") + f"#### {i + 1}"}
        for i in range(40)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    models = parse_recipe(tiny_recipe())
    raw = tiny_recipe(
        loss={"type": "generalized_jsd", "k": 8}, data={"source": "jsonl", "path": str(path)}
    )
    raw |= {
        role: {"model": str(prepare_model(getattr(models, role).prepare, load_problem_set(models.sources)))}
        for role in ("teacher", "student")
    }
    raw["rollout"] |= {"student_fraction": 0.5}
    with pytest.raises(
        ValueError, match="longest solution of the data has .* and the teacher takes 127"
    ):
        run(raw, tmp_path / "run")


def test_losses_that_read_no_sampler_may_train_on_the_datas_solutions(
    tiny_recipe: Raw, tmp_path: Path
) -> None:
    near = {"weight": 1.0, "loss": {"type": "generalized_jsd", "k": 4}}
    for loss in (
        {"type": "sft"},
        {"type": "self_distillation", "k": 4, "max_ratio": "off"},
        {"type": "compose", "rl": {"weight": 0.0}, "distillation": {"near": near}},
    ):
        raw = tiny_recipe(loss=loss, trainer__steps=1)
        raw["rollout"]["student_fraction"] = 0.0
        record = run(raw, tmp_path / loss["type"])[1]
        assert math.isfinite(record["loss"]) and record["grad_norm"] > 0
    told = {"weight": 1.0, "loss": {"type": "self_distillation", "k": 4}}
    for loss in (
        {"type": "self_distillation", "k": 4},
        {"type": "compose", "distillation": {"near": near}},
        {"type": "compose", "rl": {"weight": 0.0}, "distillation": {"near": near, "told": told}},
    ):
        raw = tiny_recipe(loss=loss, rollout__group_size=2)
        raw["rollout"]["student_fraction"] = 0.5
        with pytest.raises(RecipeError, match="reads the sampler's probabilities"):
            parse_recipe(raw)


def test_cross_entropy_on_the_students_own_samples_is_refused_before_the_first_step(
    tiny_recipe: Raw, tmp_path: Path
) -> None:
    # E_p[grad log p] = 0: it would walk at random.
    with pytest.raises(
        ValueError, match=r"\[loss\] type = 'sft' .* set rollout.student_fraction = 0"
    ):
        run(tiny_recipe(loss={"type": "sft"}), tmp_path / "run")


def test_a_sibling_hint_is_refused_beside_an_rl_term(
    tiny_recipe: Raw, student: tuple[Any, Any]
) -> None:
    # Why: of a group with one correct rollout, those that have a hint are the wrong ones, all of negative advantage.
    group, rewards = [rollout(0) for _ in range(4)], [0.0, 1.0, 0.0, 0.0]
    teacher = PolicyTeacher(PolicyTeacherConfig(hint="sibling"), SOURCES, *student)
    hints = teacher.hints(group, ["w", "right", "w", "w"], [PROBLEM] * 4, rewards)
    advantages = group_advantages(group, rewards)
    assert (
        sum(a for a, hint in zip(advantages, hints, strict=True) if hint) == -0.75
        and sum(advantages) == 0
    )
    raw = tiny_recipe(
        teacher={"policy": {"hint": "sibling"}},
        loss={"type": "self_distillation", "k": 4, "rl_mix": {"form": "add", "kd": 1.0}},
        rollout__group_size=2,
    )
    with pytest.raises(RecipeError, match="leaves the only correct rollout of a group out"):
        parse_recipe(raw)
    raw["teacher"]["policy"]["hint"] = "feedback"
    parse_recipe(raw)


def test_a_preference_loss_alone_is_refused_with_its_place(tiny_recipe: Raw) -> None:
    with pytest.raises(RecipeError, match=r"make it the replay channel of a compose loss"):
        parse_recipe(tiny_recipe(loss={"type": "dpo"}))
