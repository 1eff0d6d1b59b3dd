"""Students and teachers of families with something of their own: biases, caps, states, towers."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from prime_composer.backends.hf_model import linear_layers, load_model
from prime_composer.local import student as training
from tests.local.helpers import run
from tests.studies.architecture_models import write_model

FAMILIES: list[tuple[str, int | str]] = [
    *((family, "full") for family in ("Gemma-2", "Granite", "Cohere", "Phi")),
    *((family, 8) for family in ("Gemma-2", "GPT-J", "Falcon-H1", "Mamba-2", "Qwen3-VL")),
]


def recipe(folder: Path, family: str, loss: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe of 4 steps of two models of a family, both in this process."""
    student, teacher = (write_model(family, folder / str(seed), seed) for seed in (0, 1))
    rows = [{"question": f"What is {'1 + ' * i}{i}?", "answer": "x"} for i in (1, 2, 3)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "student": {"model": str(student)},
        "teacher": {"model": str(teacher), "backend": "transformers"},
        "loss": loss,
        "rollout": {"backend": "transformers", "max_tokens": 6, "max_model_len": 256},
        "data": {"path": str(folder / "data.jsonl"), "metric": "contains"},
        "trainer": {"steps": 4, "batch_size": 8, "dtype": "float32", "lr": 5e-3},
        "eval": {"size": 2, "kl_size": 2},
        "logging": {"tensorboard": False},
    }


def reverse_kl(student: Any, teacher: Any, samples: Any, k: int | str) -> torch.Tensor:
    """Return the mean reverse KL of the samples' tokens by plain forwards in float64."""
    values = []
    for sample in samples:
        ids, mask = sample.rollout.token_ids[None], sample.rollout.loss_mask[1:]
        p, q = (net(ids).logits[0, :-1].log_softmax(-1)[mask] for net in (student, teacher))
        if isinstance(k, int):
            top = q.topk(k).indices
            p, q = (
                torch.cat([own, torch.log1p(-own.exp().sum(-1, keepdim=True))], -1)
                for own in (p.gather(1, top), q.gather(1, top))
            )
        values.append((p.exp() * (p - q)).sum(-1))
    return torch.cat(values).mean()


@pytest.mark.parametrize(("family", "k"), FAMILIES)
def test_family_trains_and_begins_with_float64s_loss(
    family: str, k: int | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss and gradients of the first step are those of plain float64 forwards. In 4 steps the
    divergence of its tokens falls.
    """
    first: dict[str, Any] = {}
    accumulate = training.accumulate_gradients

    def noting(model: Any, loss: Any, batch: Any, *rest: Any) -> Any:
        before = None if first else copy.deepcopy(model)
        found = accumulate(model, loss, batch, *rest)
        if before is not None:
            trained = {name: one.grad for name, one in model.named_parameters()}
            grads = {name: one.clone() for name, one in trained.items() if one is not None}
            first.update(model=before, samples=batch.samples, grads=grads)
        return found

    monkeypatch.setattr(training, "accumulate_gradients", noting)
    normalization = "full" if k == "full" else "tail"
    loss = {"type": "topk_reverse_kl", "k": k, "normalization": normalization}
    raw = recipe(tmp_path, family, loss)
    run(raw, tmp_path / "run")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [row["loss"] for row in map(json.loads, lines) if "loss" in row]
    student, teacher = first["model"].double(), load_model(raw["teacher"]["model"]).double()
    student.zero_grad()
    with torch.enable_grad():
        exact = reverse_kl(student, teacher, first["samples"], k)
    assert losses[0] == pytest.approx(float(exact.detach()), rel=1e-4)
    trained = load_model(tmp_path / "run" / "checkpoints" / "step_000004").double()
    with torch.no_grad():
        after = reverse_kl(trained, teacher, first["samples"], k)
    assert len(losses) == 4 and after < 0.95 * exact
    exact.backward()
    of_text = {name: one for name, one in student.named_parameters() if ".visual." not in name}
    assert of_text.keys() == first["grads"].keys()
    for name, one in of_text.items():
        own = first["grads"][name].double()
        torch.testing.assert_close(
            own, one.grad, rtol=1e-3, atol=1e-4 * float(one.grad.abs().max())
        )


def test_model_that_reads_images_stays_one(tmp_path: Path):
    """Its towers neither train nor get an adapter, and a checkpoint has them, with the files of
    their processor.
    """
    raw = recipe(tmp_path, "Qwen3-VL", {"type": "topk_reverse_kl", "k": 8})
    raw["trainer"]["steps"] = 2
    (Path(raw["student"]["model"]) / "preprocessor_config.json").write_text('{"own": 1}')
    run(raw, tmp_path / "run")
    saved = tmp_path / "run" / "checkpoints" / "step_000002"
    before, after = load_model(raw["student"]["model"]), load_model(saved)
    assert type(after) is type(before) and (saved / "preprocessor_config.json").is_file()
    changed = {
        name.removeprefix("model.").split(".")[0]
        for (name, one), other in zip(before.named_parameters(), after.parameters(), strict=True)
        if not torch.equal(one, other)
    }
    assert changed == {"language_model", "lm_head"}
    assert all(".language_model." in name for name, _ in linear_layers(before))
