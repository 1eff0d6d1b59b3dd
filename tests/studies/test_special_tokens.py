"""The planted teacher of the special-token study is the distribution it claims to be."""

import math

import torch

from prime_composer.backends.protocols import Limits, Rollout
from prime_composer.contract import Scores
from tests.studies.special_tokens import PlantedScorer, plant

Q = torch.tensor([[0.5, 0.3, 0.1, 0.06, 0.04], [0.2, 0.7, 0.05, 0.03, 0.02]], dtype=torch.float64)
END = 1


class FullScorer:
    limits = Limits()
    sampler = None
    gives_any_ids = True

    def score(self, rollouts, support_size, prompts=None, **_):
        k = Q.shape[1] if support_size == "full" else support_size
        logprobs, ids = Q.log().sort(dim=-1, descending=True)
        ref = Q.log().gather(1, rollouts[0].token_ids[:, None])[:, 0]
        return [Scores(ref, ids[:, :k], logprobs[:, :k])]


def test_plant_keeps_the_proportions_of_other_tokens() -> None:
    tokens = torch.tensor([END, 3])
    rollout = Rollout(tokens, torch.tensor([True, True]), torch.zeros(2), "stop", 0)
    (planted,) = PlantedScorer(FullScorer(), END).score([rollout], 3)
    rest = 1 - math.exp(-20)
    torch.testing.assert_close(planted.token_ids, torch.tensor([[0, 2, 3], [0, 2, 3]]))
    expected = (
        torch.tensor([[0.5, 0.1, 0.06], [0.2, 0.05, 0.03]], dtype=torch.float64)
        * rest
        / torch.tensor([[0.7], [0.3]])
    )
    torch.testing.assert_close(planted.teacher_logprobs.exp(), expected, rtol=1e-6, atol=0)
    assert planted.ref_logprobs[0] == -20
    torch.testing.assert_close(
        float(planted.ref_logprobs[1].exp()), 0.03 / 0.3 * rest, rtol=1e-6, atol=0
    )


def test_moved_end_is_another_token_with_its_probability() -> None:
    """In the top K and as the sampled token; the others keep theirs."""
    tokens = torch.tensor([END, 4])
    rollout = Rollout(tokens, torch.tensor([True, True]), torch.zeros(2), "stop", 0)
    (moved,) = PlantedScorer(FullScorer(), END, other=4).score([rollout], 3)
    torch.testing.assert_close(moved.token_ids, torch.tensor([[0, 4, 2], [4, 0, 2]]))
    expected = torch.tensor([[0.5, 0.3, 0.1], [0.7, 0.2, 0.05]], dtype=torch.float64)
    torch.testing.assert_close(moved.teacher_logprobs.exp(), expected)
    assert moved.ref_logprobs[0] == -20
    torch.testing.assert_close(float(moved.ref_logprobs[1].exp()), 0.7)


def test_planted_scorer_measures_with_the_true_teacher() -> None:
    rollout = Rollout(torch.tensor([END, 3]), torch.tensor([True, True]), torch.zeros(2), "stop", 0)
    (true,) = PlantedScorer(FullScorer(), END).score([rollout], "full")
    torch.testing.assert_close(
        true.teacher_logprobs.exp().sum(-1), torch.ones(2, dtype=torch.float64)
    )
    assert true.ref_logprobs[0].exp() == 0.3


def test_plant_of_an_unconsidered_token_changes_nothing() -> None:
    scores = Scores(
        torch.log(torch.tensor([0.6])),
        torch.tensor([[0, 2]]),
        torch.log(torch.tensor([[0.6, 0.3]])),
    )
    planted = plant(scores, torch.tensor([0]), token=7, k=1)
    torch.testing.assert_close(
        planted.teacher_logprobs, scores.teacher_logprobs[:, :1], rtol=0, atol=1e-6
    )
