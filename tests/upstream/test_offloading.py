"""Offloading of activations and optimizer states in prime-rl, with its own head and our loss."""

import json

import pytest

from tests.upstream.in_prime_rl import Interpreter

pytestmark = pytest.mark.xdist_group("prime-rl's orchestrator")

FULL = {"type": "topk_reverse_kl", "k": "full", "normalization": "full"}
CODE = """
from types import SimpleNamespace

import torch
from prime_rl.configs.trainer import ActivationOffloadingConfig
from prime_rl.trainer.optim.state_offload import CPUOffloadOptimizer
from prime_rl.trainer.models.layers.lm_head import FusedOutputLinear
from prime_rl.trainer.rl import loss as loss_module
from prime_rl.utils.act_offloading import maybe_activation_offloading
from prime_composer.contract import HiddenStates, TeacherHead, Scores
from prime_composer.upstream.trainer import questions
from prime_composer.upstream.trainer.adapter import trainer_adapter

V, D, N = 97, 64, 40


class Scorer:
    starts, origin = 1, "The teacher"

    def __init__(self, *args, **options):
        generator = torch.Generator().manual_seed(7)
        self.table = torch.randn(V, 8, generator=generator)
        self.head = TeacherHead(torch.randn(V, 8, generator=generator), tolerance=1e-3, origin="it")

    limits = SimpleNamespace(vocab_size=V)

    def own_logprobs(self, prompt):
        return "it samples nothing"

    def score(self, rollouts, k, hidden=False):
        scores = []
        for rollout in rollouts:
            states = self.table[rollout.token_ids[rollout.start - 1 : -1]]
            log_q = (states @ self.head.weight.T).log_softmax(-1)
            own = log_q.gather(1, rollout.token_ids[rollout.start :, None])[:, 0]
            none = torch.zeros(len(own), 0)
            scores.append(Scores(own, none.long(), none, (HiddenStates(states, self.head),)))
        return scores


questions.ServerScorer = Scorer
state = trainer_adapter()


def trained(config):
    torch.manual_seed(0)
    ids = torch.randint(0, V, (1, N))
    mask = torch.arange(N).unsqueeze(0) > 5
    ones = torch.ones(1, N)
    tensors = {
        "input_ids": ids, "loss_mask": mask, "temperatures": ones, "ref_kl_weights": mask.float(),
        "rl_weights": torch.zeros(1, N), "routed_experts": None, "sequence_lengths": [N],
        "env_names": ["sums"] * N,
    }
    embedding = torch.nn.Embedding(V, D)
    body = torch.nn.Sequential(torch.nn.Linear(D, D), torch.nn.SiLU(), torch.nn.Linear(D, D))
    head = FusedOutputLinear(in_features=D, out_features=V, chunk_size=16)
    torch.nn.init.normal_(head.weight)
    parameters = [*embedding.parameters(), *body.parameters(), head.weight]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    if config is not None:
        optimizer = CPUOffloadOptimizer(optimizer, pin_memory=False)
    losses, moved = [], 0
    for _ in range(3):
        state.batch_came([tensors])
        state.begin(tensors)
        context = maybe_activation_offloading(config)
        with context:
            labels = torch.cat([ids[:, 1:], torch.zeros(1, 1, dtype=torch.long)], dim=1)
            out = head(body(embedding(ids)), labels, temperature=ones)
        moved += sum(changed for _, changed in getattr(context, "tracker", {}).values())
        logprobs = torch.cat([-ones[:, :1], out["logprobs"][:, :-1]], dim=1)
        loss, _ = loss_module.compute_loss(
            trainer_logprobs=logprobs[0].split([N]),
            inference_logprobs=logprobs[0].detach().split([N]),
            ref_logprobs=(torch.nan * ones[0]).split([N]),
            advantages=ones[0].split([N]),
            loss_mask=mask[0].split([N]),
            rl_weights=tensors["rl_weights"][0].split([N]),
            ce_weights=None,
            ref_kl_weights=tensors["ref_kl_weights"][0].split([N]),
            rl_loss_fn=None,
            rl_scale=1,
            ce_scale=1,
            ref_kl_scale=N - 6,
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return moved, losses, [parameter.detach() for parameter in parameters]


_, losses, expected = trained(None)
moved, _, offloaded = trained(ActivationOffloadingConfig(pin_memory=False))
result = {
    "moved": moved,
    "equal": all(torch.equal(a, b) for a, b in zip(expected, offloaded, strict=True)),
    "losses": losses,
}
"""


@pytest.mark.upstream
def test_offloading_trains_the_same_weights(trees, tmp_path):
    """k = "full" multiplies the hidden states with the head after the offloading context."""
    settings = {
        "loss": FULL,
        "asked_by": "trainer",
        "teachers": [{"url": "http://teacher:1", "model": "m", "weight": 1}],
    }
    interpreter = Interpreter("head", trees, tmp_path, PRIME_COMPOSER=json.dumps(settings))
    try:
        result = interpreter.run(CODE)
    finally:
        interpreter.close()
    assert result["moved"] > 0 and result["equal"]
    assert result["losses"][0] > result["losses"][1] > result["losses"][2]
