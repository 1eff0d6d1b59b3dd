"""Batches in flight as a checkpoint stores them."""

import io
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from prime_composer.contract import HiddenStates, Scores, TeacherHead
from prime_composer.local.ahead.stored import batch_of_state, batch_state
from prime_composer.local.collect import Collected
from prime_composer.local.run_dir.recipe_file import check_continues, write_recipe
from prime_composer.problems.config import Problem
from prime_composer.recipe.loading import parse_recipe
from prime_composer.recipe.schema import RecipeError
from prime_composer.step.batch import Batch, Pair
from tests.local.helpers import PROBLEM, random_samples, sample
from tests.upstream.export_recipes import tables


def through_a_file(state: Any) -> Any:
    """Return what a checkpoint has of a state, without a class of ours in it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def same(a: Any, b: Any) -> bool:
    """Return whether two records are equal, entry by entry, and bit by bit."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))
    if is_dataclass(a):
        return type(a) is type(b) and all(
            same(getattr(a, one.name), getattr(b, one.name)) for one in fields(a)
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def bits(values: torch.Tensor) -> torch.Tensor:
    """Return the bits of floats, of which two NaNs are equal."""
    return values.view(torch.int32) if values.dtype == torch.float32 else values


def single(scores: Scores) -> Scores:
    """Return scores in float32, as teachers give them."""
    return replace(
        scores,
        ref_logprobs=scores.ref_logprobs.float(),
        teacher_logprobs=scores.teacher_logprobs.float(),
    )


def test_batch_comes_back_bit_by_bit() -> None:
    problems = [Problem(f"{n}?", f"#### {n}") for n in range(3)]
    samples = [
        replace(
            one,
            problem=problems[one.rollout.prompt_index],
            rollout=replace(one.rollout, inference_logprobs=one.rollout.inference_logprobs.float()),
            scores=single(one.scores),
        )
        for one in random_samples([(3, 4), (2, 6), (5, 1)], 4)
    ]
    own = samples[0]
    assert own.scores is not None
    known = torch.rand(own.scores.token_ids.shape) > 0.5
    samples[0] = replace(
        own,
        scores=replace(own.scores, known=known, start=own.rollout.start),
        advantage=-0.5, reward=1.0, text="a\n#### 5", weight=1.25, first=False,
        sampled=own.rollout.loss_mask,
    )  # fmt: skip
    samples[1] = replace(samples[1], scores=None)
    pairs = [Pair(samples[1], replace(samples[2], scores=None))]
    collected = Collected(Batch(samples, pairs), {"rollout/reward": 0.25}, {"time/sample": 1.0})
    back = batch_of_state(through_a_file(batch_state(collected)), problems)
    assert same(list(back.batch.samples), samples) and same(list(back.batch.pairs), pairs)
    assert back.metrics == {"rollout/reward": 0.25} and back.seconds == {}


def test_hidden_states_share_one_head() -> None:
    """Two teachers of a mixture have one each, however many samples there are."""
    heads = [TeacherHead(torch.randn(7, 3), torch.randn(7), 2.0, 30.0, 1e-3, name) for name in "ab"]
    samples = []
    for index in range(3):
        states = torch.randn(8, 2, 3)[:, 0]  # a view of twice as many numbers
        shares = tuple(
            HiddenStates(states, head, weight, torch.randn(8))
            for head, weight in zip(heads, (0.25, 0.75), strict=True)
        )
        nothing = torch.empty(8, 0)
        scores = Scores(torch.randn(8), nothing.long(), nothing, shares)
        samples.append(replace(sample(index), scores=scores))
    state = through_a_file(batch_state(Collected(Batch(samples), {})))
    assert [head["origin"] for head in state["heads"]] == ["a", "b"]
    stored = state["samples"][0]["scores"]["hidden"][0]["states"]
    assert stored.untyped_storage().nbytes() == 8 * 3 * 4
    back = batch_of_state(state, [PROBLEM] * 3)
    assert same(list(back.batch.samples), samples)
    found = [share.head for one in back.batch.samples if one.scores for share in one.scores.hidden]
    assert len({id(head) for head in found}) == 2


def test_pairs_of_a_file_are_not_stored_twice() -> None:
    pairs = [Pair(sample(0), sample(0))]
    state = batch_state(Collected(Batch([sample(0)], []), {}))
    back = batch_of_state(state, [PROBLEM], pairs)
    assert back.batch.pairs is pairs


def recipe_of(steps: int, ahead: int) -> dict[str, Any]:
    raw = tables(rollout={"backend": "server", "url": "http://h:1", "ahead": ahead})
    raw["trainer"]["steps"] = steps
    return parse_recipe(raw).model_dump(mode="json")


@pytest.mark.parametrize(("ahead", "done", "refused"), [(0, 7, False), (2, 5, False), (2, 6, True)])
def test_longer_run_needs_the_batches_that_it_would_have_begun(
    ahead: int, done: int, refused: bool, tmp_path: Path
) -> None:
    """Of seven steps with two ahead, the checkpoint of the fifth is the last that has them."""
    write_recipe(tmp_path, recipe_of(7, ahead))
    longer = recipe_of(9, ahead)
    if not refused:
        assert "trainer.steps is 9 now" in check_continues(tmp_path, longer, done)
        return
    with pytest.raises(RecipeError, match="rollout.ahead = 2 had begun no batch after step 7.*5"):
        check_continues(tmp_path, longer, done)
    assert check_continues(tmp_path, recipe_of(7, ahead), done) == ""
