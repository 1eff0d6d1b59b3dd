"""LoRA adapters of a real vLLM server as teachers: their scores are those of the merged weights."""

import contextlib
import json

import pytest
import torch

from prime_composer.backends.protocols import Rollout
from prime_composer.local.preflight import own_scores
from prime_composer.teachers.server import ServerScorer
from tests.tiny_qwen import VOCAB, make_model
from tests.vllm_process import TeacherProcess, save_tokenizer

pytestmark = pytest.mark.vllm

RANK = 8
ADAPTED = {
    "head": "lm_head",
    "attention": "model.layers.0.self_attn.q_proj",
}


def save_adapter(directory, target, weight, generator):
    """Save a LoRA adapter in peft's layout, and return what it adds to the weight."""
    from safetensors.torch import save_file

    down = torch.randn(RANK, weight.shape[1], generator=generator)
    up = torch.randn(weight.shape[0], RANK, generator=generator) / 20
    directory.mkdir()
    prefix = f"base_model.model.{target}"
    tensors = {f"{prefix}.lora_A.weight": down, f"{prefix}.lora_B.weight": up}
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK}
    config |= {"target_modules": [target.split(".")[-1]], "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return up @ down


def test_adapters_score_as_their_merged_weights(vllm_forks, tmp_path):
    """With a large part on the output head, which vLLM on a GPU leaves out of prompts' scores.

    Several sequences at once end the engine of vLLM's CPU build, so the server takes one.
    """
    generator = torch.Generator().manual_seed(0)
    model = make_model(tied=False, seed=3)
    model.save_pretrained(tmp_path / "base")
    save_tokenizer(tmp_path / "base", VOCAB)
    added = {
        name: save_adapter(
            tmp_path / name, target, model.get_parameter(f"{target}.weight"), generator
        )
        for name, target in ADAPTED.items()
    }
    rollouts = [
        Rollout.not_sampled(torch.randint(0, VOCAB, (40 + i,), generator=generator), 3, "length")
        for i in range(6)
    ]
    modules = [f"{name}={tmp_path / name}" for name in ADAPTED]
    options = ["--dtype", "float32", "--enable-lora", "--lora-modules", *modules]
    model.double()
    log = tmp_path / "server.log"
    with TeacherProcess(tmp_path / "base", log, *options, forks=vllm_forks) as process:
        for name, target in ADAPTED.items():
            with contextlib.closing(ServerScorer(process.url, name)) as scorer:
                assert own_scores(scorer, [5, 6, 7]) == []
                scores = scorer.score(rollouts, 4)
            weight = model.get_parameter(f"{target}.weight").data
            weight += added[name].double()
            for rollout, found in zip(rollouts, scores, strict=True):
                with torch.no_grad():
                    exact = model(rollout.token_ids[None]).logits[0].log_softmax(-1)
                own = exact[:-1].gather(1, rollout.token_ids[1:, None])[2:, 0]
                torch.testing.assert_close(found.ref_logprobs.double(), own, rtol=0, atol=2e-4)
            weight -= added[name].double()
