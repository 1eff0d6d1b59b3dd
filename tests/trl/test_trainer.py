"""The trainer's loss and gradient against the engine's, against trl's own, and against formulas."""

import copy
import math
import warnings
from typing import Any

import pytest
import torch

from prime_composer.backends.protocols import Rollout
from prime_composer.losses import parse_loss, setup_loss_fn
from prime_composer.problems.config import Problem
from prime_composer.recipe.schema import TrainerConfig
from prime_composer.step.batch import Batch, Sample
from prime_composer.step.gradients import NonFiniteLoss, accumulate_gradients
from prime_composer.teachers.policy import students_choice
from prime_composer.teachers.transformers import TransformersScorer
from prime_composer.trl.batch import SCORES

pytestmark = pytest.mark.xdist_group("trl")

JSD = {"type": "generalized_jsd", "beta": 0.5, "k": 8}
LOSSES: dict[str, dict[str, Any]] = {
    "reverse": {"type": "topk_reverse_kl", "k": 8},
    "jsd": JSD,
    "students_choice": {"type": "topk_reverse_kl", "k": 8, "chosen_by": "student"},
    "whole": {"type": "generalized_jsd", "beta": 0.3, "k": "full", "normalization": "full"},
    "sampled": {"type": "sampled_reverse_kl"},
    "weighted": {"type": "sampled_reverse_kl", "position_weights": {}},
    "composed": {
        "type": "compose",
        "rl": {"weight": 0.0},
        "distillation": {
            "near": {"loss": {"type": "topk_reverse_kl", "k": 8}, "weight": 0.7},
            "far": {"loss": {"type": "topk_forward_kl", "k": 4}, "weight": 0.3},
        },
    },
    "stops": {"type": "sampled_reverse_kl", "k": 8, "stops": {"ids": [5, 9]}},
}


def sampled_batch(trainer) -> dict[str, Any]:
    """Return a scored batch of all prompts, as trl prepares it for a step."""
    trainer.model.train()
    torch.manual_seed(0)
    return trainer._generate_and_score_completions(list(trainer.train_dataset))


def gradients(model) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def step_of(trainer, parts) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss of micro-batches, and their gradient."""
    trainer.model.zero_grad()
    trainer.model.train()
    losses = []
    for part in parts:
        loss = trainer.compute_loss(trainer.model, part)
        loss.backward()
        losses.append(float(loss.detach()))
    return sum(losses), gradients(trainer.model)


def rows(batch: dict[str, Any], *indices: int) -> dict[str, Any]:
    """Return rows of a batch. The number of the step's tokens stays."""
    return {
        name: value
        if name == "num_items_in_batch"
        else [value[i] for i in indices]
        if isinstance(value, list)
        else value[list(indices)]
        for name, value in batch.items()
    }


def rollouts_by_hand(batch: dict[str, Any]) -> list[Rollout]:
    """Return the rollouts of a batch, by the lengths of prompts and completions."""
    rollouts = []
    for row in range(len(batch["prompt_ids"])):
        n, m = int(batch["prompt_mask"][row].sum()), int(batch["completion_mask"][row].sum())
        prompt = batch["prompt_ids"][row].tolist()[len(batch["prompt_ids"][row]) - n :]
        ids = prompt + batch["completion_ids"][row].tolist()[:m]
        logprobs = torch.full((n + m,), torch.nan)
        rollouts.append(
            Rollout(torch.tensor(ids), torch.arange(n + m) >= n, logprobs, "length", row)
        )
    return rollouts


@torch.no_grad()
def with_log_mu(model, rollouts: list[Rollout]) -> list[Rollout]:
    """Set log mu to the model's own log-probs of each token, of one unpadded sequence each."""
    for rollout in rollouts:
        logits = model(input_ids=rollout.token_ids[None]).logits[0, :-1].double()
        own = logits.log_softmax(-1).gather(-1, rollout.token_ids[1:, None])[:, 0]
        rollout.inference_logprobs[1:] = own.float()
    return rollouts


def assert_close(actual, expected, rtol=1e-4) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        scale = float(value.abs().max())
        torch.testing.assert_close(actual[name], value, rtol=0, atol=rtol * scale, msg=name)


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient_are_the_engines(make_trainer, name):
    """The one-machine engine gives the same numbers for the same sequences."""
    trainer = make_trainer(LOSSES[name])
    batch = sampled_batch(trainer)
    value, own = step_of(trainer, [batch])

    config = parse_loss(LOSSES[name])
    model = copy.deepcopy(trainer.model).eval()
    model.zero_grad()
    rollouts = with_log_mu(model, rollouts_by_hand(batch))
    by_student = name == "students_choice"
    size = 8 if by_student else config.support_size
    scores = TransformersScorer(trainer.scorer.model).score(
        rollouts,
        size,
        candidate_ids=students_choice(model, rollouts, 8) if by_student else None,
        hidden="hidden_states" in config.needs,
    )
    samples = [
        Sample(rollout, Problem("", ""), scores=one)
        for rollout, one in zip(rollouts, scores, strict=True)
    ]
    metrics = accumulate_gradients(
        model,
        setup_loss_fn(config),
        Batch(samples),
        TrainerConfig(steps=1, batch_size=8, micro_batch_tokens=20),
        step=1,
    )
    assert value == pytest.approx(metrics["loss"], rel=1e-4)
    assert_close(own, gradients(model))


def test_texts_of_stops_are_ids_of_the_students_tokenizer(make_trainer):
    """And those of the mask of special tokens."""
    texts = ["w1"]
    table = {"type": "topk_reverse_kl", "stops": {"texts": texts, "ids": [5]}}
    trainer = make_trainer({**table, "special_tokens": {"strings": texts}})
    (end,) = trainer.processing_class.encode(texts[0], add_special_tokens=False)
    assert trainer.loss_config.stops.ids == (5, end)
    assert trainer.loss_config.special_tokens.ids == (end,)


def test_jsd_of_whole_vocabularies_is_its_formula(make_trainer):
    """The mean over trained tokens, in float64, from the logits of unpadded sequences."""
    trainer = make_trainer(LOSSES["whole"], double=True)
    batch = sampled_batch(trainer)
    value, own = step_of(trainer, [batch])
    model = copy.deepcopy(trainer.model).eval()
    model.zero_grad()
    beta, total, tokens = 0.3, torch.zeros((), dtype=torch.float64), 0
    for rollout in rollouts_by_hand(batch):
        ids = rollout.token_ids[None]
        log_p = model(input_ids=ids).logits[0].log_softmax(-1)
        with torch.no_grad():
            log_q = trainer.scorer.model(input_ids=ids).logits[0].log_softmax(-1)
        for t in rollout.loss_mask.nonzero().flatten().tolist():
            p, q = log_p[t - 1].exp(), log_q[t - 1].exp()
            mixture = beta * q + (1 - beta) * p
            total = total + beta * (q * (q / mixture).log()).sum()
            total = total + (1 - beta) * (p * (p / mixture).log()).sum()
            tokens += 1
    (total / tokens).backward()
    assert tokens == int(batch["num_items_in_batch"]) > 8
    assert value == pytest.approx(float(total.detach()) / tokens, rel=1e-12)
    assert_close(own, gradients(model), rtol=1e-11)


@pytest.mark.parametrize("wider", ["teacher", "student"])
def test_head_with_more_padding_is_taken(make_trainer, models, wider):
    """The 40 further entries of one side are part of the tail. trl asks for heads of one size."""
    sides = {"student": models.student, "teacher": models.teacher}
    sides[wider] = copy.deepcopy(sides[wider])
    sides[wider].resize_token_embeddings(171, mean_resizing=False)
    with torch.no_grad():
        for weight in {sides[wider].lm_head.weight, sides[wider].model.embed_tokens.weight}:
            weight[131:] = 1.1 * weight[30:70]
    trainer = make_trainer({"type": "topk_reverse_kl", "k": 8}, **sides)
    batch = sampled_batch(trainer)
    value, _ = step_of(trainer, [batch])
    total, tokens, padding = 0.0, 0, 0
    for rollout in rollouts_by_hand(batch):
        with torch.no_grad():
            ids = rollout.token_ids[None]
            p = trainer.model(input_ids=ids).logits[0].double().softmax(-1)
            read = ids.clamp(max=trainer.scorer.model.config.vocab_size - 1)
            q = trainer.scorer.model(input_ids=read).logits[0].double().softmax(-1)
        for t in rollout.loss_mask.nonzero().flatten().tolist():
            top = q[t - 1].topk(8).indices
            padding += int((top >= 131).sum() + (rollout.token_ids[t] >= 131))
            top = top[top < p.shape[1]]
            own, others = p[t - 1, top], q[t - 1, top]
            own, others = (torch.cat([x, 1 - x.sum(0, True)]) for x in (own, others))
            total += float((own * (own / others).log()).sum())
            tokens += 1
    assert padding and value == pytest.approx(total / tokens, rel=1e-5)


@pytest.mark.parametrize("beta", [0.0, 0.4])
def test_whole_vocabulary_losses_are_trls(trl, make_trainer, beta):
    """trl's own loss of the same batch, with the same divisor."""
    loss = {"type": "generalized_jsd", "beta": beta, "k": "full", "normalization": "full"}
    trainer = make_trainer(loss)
    batch = sampled_batch(trainer)
    value, own = step_of(trainer, [batch])

    trainer.model.zero_grad()
    trainer.beta, trainer.teacher_model = beta, trainer.scorer.model
    theirs = trl.DistillationTrainer.compute_loss(trainer, trainer.model, dict(batch))
    theirs.backward()
    assert value == pytest.approx(float(theirs.detach()), rel=1e-4)
    assert_close(own, gradients(trainer.model))


def test_training_does_not_depend_on_accumulation(make_trainer):
    """A step of trl's loop gives the same weights with 8 x 1, 4 x 2 and 1 x 8 rows."""
    weights = []
    for accumulation in (1, 2, 8):
        trainer = make_trainer(
            JSD,
            per_device_train_batch_size=8 // accumulation,
            gradient_accumulation_steps=accumulation,
        )
        trainer.train()
        weights.append(trainer.model.state_dict())
        logged = trainer.state.log_history[0]
        assert logged["generalized_jsd/jsd"] == pytest.approx(logged["loss"], rel=1e-5)
    for other in weights[1:]:
        assert_close(other, weights[0], rtol=1e-5)
    assert not torch.equal(weights[0]["lm_head.weight"], trainer.scorer.model.lm_head.weight)


def test_gradient_does_not_depend_on_padding(make_trainer):
    """More padding on both sides changes nothing, whatever its ids are."""
    trainer = make_trainer(JSD)
    batch = sampled_batch(trainer)
    value, whole = step_of(trainer, [batch])
    padded = dict(batch)
    for side, name in ((0, "prompt"), (1, "completion")):
        ids, mask = batch[f"{name}_ids"], batch[f"{name}_mask"]
        junk = torch.full((len(ids), 5), 9)
        parts, masks = [ids, junk], [mask, torch.zeros_like(junk)]
        padded[f"{name}_ids"] = torch.cat(parts if side else parts[::-1], dim=1)
        padded[f"{name}_mask"] = torch.cat(masks if side else masks[::-1], dim=1)
    again, own = step_of(trainer, [padded])
    assert again == value
    assert_close(own, whole, rtol=1e-6)


def test_tokens_of_a_tool_do_not_train(make_trainer):
    """The loss is the mean over the rest, and the tool's tokens stay in the context."""
    trainer = make_trainer(LOSSES["whole"], double=True)
    batch = sampled_batch(trainer)
    _, all_tokens = step_of(trainer, [batch])
    batch["tool_mask"] = torch.ones_like(batch["completion_mask"])
    batch["tool_mask"][:, 1:3] = 0
    batch["num_items_in_batch"] = (batch["tool_mask"] * batch["completion_mask"]).sum()
    batch[SCORES] = trainer._scores(batch, [])
    value, masked = step_of(trainer, [batch])

    per_token = []
    for row, rollout in enumerate(rollouts_by_hand(batch)):
        for t in rollout.loss_mask.nonzero().flatten().tolist():
            if batch["tool_mask"][row, t - rollout.start]:
                mask = torch.arange(len(rollout.token_ids)) == t
                alone = Rollout(rollout.token_ids, mask, rollout.inference_logprobs, "length", 0)
                (scores,) = trainer.scorer.score([alone], 0, hidden=True)
                per_token.append((alone, scores))
    samples = [Sample(rollout, Problem("", ""), scores=one) for rollout, one in per_token]
    metrics = accumulate_gradients(
        copy.deepcopy(trainer.model),
        setup_loss_fn(parse_loss(LOSSES["whole"])),
        Batch(samples),
        TrainerConfig(steps=1, batch_size=8),
        step=1,
    )
    assert len(samples) == int(batch["num_items_in_batch"])
    assert value == pytest.approx(metrics["loss"], rel=1e-6)
    assert not torch.allclose(
        masked["model.norm.weight"], all_tokens["model.norm.weight"], rtol=1e-3
    )


def test_evaluation_is_a_mean_over_all_its_tokens(make_trainer):
    """Batches of 3, 3 and 2 rows: the metric is weighted by tokens, and no gradient step counts."""
    trainer = make_trainer({"type": "taid", "total_steps": 10, "k": 8, "form": "kl"})
    sums = []
    original = trainer._summed_loss

    def noted(*args):
        loss, tokens, metrics = original(*args)
        sums.append((float(loss), tokens))
        return loss, tokens, metrics

    trainer._summed_loss = noted
    result = trainer.evaluate()
    assert len(sums) == 3 and len({tokens for _, tokens in sums}) > 1
    expected = sum(loss for loss, _ in sums) / sum(tokens for _, tokens in sums)
    assert result["eval_taid/kl"] == pytest.approx(expected, rel=1e-5)
    assert trainer.loss_fn.state_dict()["step"] == 0


def test_nan_of_a_student_ends_the_run(make_trainer):
    trainer = make_trainer(JSD)
    batch = sampled_batch(trainer)
    with torch.no_grad():
        trainer.model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(NonFiniteLoss, match="step 1: the loss 'generalized_jsd' of row 0 is nan"):
        step_of(trainer, [batch])


def test_lora_trains_the_adapter_alone(make_trainer):
    """The loss is that of the adapted model, and the base's weights stay."""
    peft = pytest.importorskip("peft", reason="peft is not installed (it is in the test extra)")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = make_trainer(LOSSES["jsd"], peft_config=lora)
    batch = sampled_batch(trainer)
    value, own = step_of(trainer, [batch])
    assert own and all("lora_" in name for name in own)
    before = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}

    merged = copy.deepcopy(trainer.model).merge_and_unload().requires_grad_(True)
    plain = make_trainer(LOSSES["jsd"], student=merged)
    assert step_of(plain, [batch])[0] == pytest.approx(value, rel=1e-4)
    assert value != pytest.approx(step_of(make_trainer(LOSSES["jsd"]), [batch])[0], rel=1e-2)

    trainer.train()
    changed = {n for n, weight in trainer.model.state_dict().items() if not weight.equal(before[n])}
    assert changed == own.keys()


RESUMED = {
    "within an epoch": (JSD, {"per_device_train_batch_size": 1}),
    "in the second epoch": (
        {"type": "taid", "total_steps": 4, "k": 8},
        {"per_device_train_batch_size": 2, "shuffle_dataset": False},
    ),
}


@pytest.mark.parametrize(
    "case", ["within an epoch", pytest.param("in the second epoch", marks=pytest.mark.slow)]
)
def test_resumed_run_has_the_weights_of_a_whole_one(make_trainer, tmp_path, case):
    """Bit for bit, and with the schedule's state.

    From the second epoch on, trl's own shuffling begins anew after a resume.
    """
    loss, settings = RESUMED[case]
    settings |= {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch"}
    settings |= {"learning_rate": 1e-2, "gradient_accumulation_steps": 2}
    whole = make_trainer(loss, **settings)
    whole.train()
    resumed = make_trainer(loss, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert resumed.state.global_step == 4
    for name, weight in whole.model.state_dict().items():
        assert weight.equal(resumed.model.state_dict()[name]), name
    assert resumed.loss_fn.state_dict() == whole.loss_fn.state_dict()
    if loss["type"] == "taid":
        assert whole.loss_fn.state_dict()["step"] == 4


def test_step_past_compute_loss_ends_the_run_untrained(make_trainer, monkeypatch):
    """A gradient that is not the loss's changes no weight."""
    trainer = make_trainer(JSD)
    before = [weight.detach().clone() for weight in trainer.model.parameters()]

    def training_step(model, *_):
        loss = sum(weight.sum() for weight in model.parameters())
        loss.backward()
        return loss.detach()

    monkeypatch.setattr(trainer, "training_step", training_step)
    with pytest.raises(RuntimeError, match="step 1: .* never called compute_loss"):
        trainer.train()
    assert all(map(torch.equal, trainer.model.parameters(), before))


@pytest.mark.parametrize("in_memory", [True, False])
def test_completions_end_where_the_teacher_ends_them(
    make_trainer, models, tmp_path, in_memory: bool
) -> None:
    """The teacher's generation config names a second end, which the student's does not."""
    import json
    import shutil

    folder = shutil.copytree(models.teacher_folder, tmp_path / "chat")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7]}))
    teacher: Any = str(folder)
    if in_memory:
        teacher = copy.deepcopy(models.teacher)
        teacher.generation_config.eos_token_id = [1, 7]
    trainer = make_trainer("sampled_reverse_kl", teacher)
    assert trainer.eos_token_ids == trainer.generation_config.eos_token_id == [1, 7]
    loss = {"type": "topk_reverse_kl", "k": 8}
    own = make_trainer(loss, teacher, generation_kwargs={"eos_token_id": [1]})
    assert own.eos_token_ids == own.generation_config.eos_token_id == [1]


def test_teacher_reads_its_own_prompt(make_trainer, models, tmp_path):
    """Its scores are those of the completions behind what its template writes, by a forward."""
    template = tmp_path / "chat.jinja"
    template.write_text(
        "w3 {{ messages[0].content }} w4{% if add_generation_prompt %} w5{% endif %}"
    )
    prompt = {"chat_template": str(template), "prompt_template": "w6 {question}"}
    trainer = make_trainer(JSD, double=True, prompt=prompt)
    batch = sampled_batch(trainer)
    asked = [row["prompt"] for row in trainer.train_dataset]
    own = rollouts_by_hand(batch)
    for rollout, scores, text in zip(own, batch[SCORES], asked, strict=True):
        before = models.tokenizer.encode(f"w3 w6 {text} w4 w5", add_special_tokens=False)
        completion = rollout.token_ids[rollout.start :]
        ids = torch.cat([torch.tensor(before), completion])
        with torch.no_grad():
            logits = trainer.scorer.model(input_ids=ids[None]).logits[0, len(before) - 1 : -1]
        rows_of_teacher = logits.double().log_softmax(-1)
        expected = rows_of_teacher.gather(1, scores.token_ids)
        torch.testing.assert_close(scores.teacher_logprobs.double(), expected, atol=1e-6, rtol=0)
        assert scores.start == rollout.start
    value, gradient = step_of(trainer, [batch])
    assert math.isfinite(value) and gradient
