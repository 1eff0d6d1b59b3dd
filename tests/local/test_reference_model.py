"""G-OPD on one machine: the teacher's scores, extrapolated from a reference model's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from prime_composer.local import collect
from prime_composer.local.tracker import read_metrics
from prime_composer.recipe.routing import REFERENCE, TeacherId
from tests.conftest import TINY_MODEL
from tests.local.helpers import copy_first_half, opened, planned, run, sample, tiny_models

Raw = Callable[..., dict[str, Any]]
THIRD = {"prepare": {**TINY_MODEL, "seed": 3, "sft_steps": 5}}


def test_scores_are_extrapolated_from_the_reference(tiny_recipe: Raw) -> None:
    """lambda log q + (1 - lambda) log r of two open scorers, and the support is the teacher's."""
    raw = tiny_recipe(loss={"type": "sampled_reverse_kl"}, reference={**THIRD, "reward_scale": 1.5})
    assert set(tiny_models(raw)) == {"teacher", "student", "reference"}
    assert any(line.startswith("reference: ") for line in planned(raw))
    with opened(raw) as engine:
        one = sample(0)
        (scored,) = engine.score([one])[0]
        q, r = (
            engine.teachers.scorers[who].score([one.rollout], 0)[0].ref_logprobs
            for who in (TeacherId(), REFERENCE)
        )
    torch.testing.assert_close(scored.scores.ref_logprobs, 1.5 * q - 0.5 * r)
    assert not torch.equal(q, r)


def test_reference_is_the_start_also_after_a_resume(
    tiny_recipe: Raw, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first step p = r, so that A is lambda (log q - log p). A resumed run is the same."""
    of_teacher: list[bool] = []
    monkeypatch.setattr(
        collect, "end_metrics", lambda samples, own=True: of_teacher.append(own) or {}
    )
    changes: dict[str, Any] = dict(
        loss={"type": "sampled_reverse_kl"},
        trainer={"steps": 4, "batch_size": 6, "lr": 1e-2},
        checkpoint={"every": 2, "keep": 2},
        eval={"every": 0, "size": 2, "kl_size": 2},
    )
    runs = {}
    for name, own in (
        ("plain", {"trainer": {"steps": 1, "batch_size": 6}}),
        ("g_opd", {"reference": {"start": True}}),
    ):
        run(tiny_recipe(**{**changes, **own}), tmp_path / name)
        runs[name] = read_metrics(tmp_path / name)
    key = "sampled_reverse_kl/ref_kl"
    assert runs["g_opd"][1][key] == pytest.approx(1.25 * runs["plain"][1][key], rel=1e-4)
    assert of_teacher == [True, *[False] * 4]  # extrapolated scores are no probability of an end
    copy_first_half(tmp_path / "g_opd", tmp_path / "cut")
    run(tiny_recipe(**changes, reference={"start": True}), tmp_path / "cut", resume=True)
    resumed = read_metrics(tmp_path / "cut")
    assert [one["loss"] for one in resumed[1:]] == [one["loss"] for one in runs["g_opd"][1:]]


def test_reference_of_another_vocabulary_is_refused(tiny_recipe: Raw) -> None:
    reference = {"prepare": {**THIRD["prepare"], "vocab_size": 310}}
    raw = tiny_recipe(loss={"type": "sampled_reverse_kl"}, reference=reference)
    tiny_models(raw)
    with pytest.raises(ValueError, match=r"^\[reference\]: "):
        planned(raw)
