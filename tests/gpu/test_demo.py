"""The demo recipe on a GPU: sampler, teacher and trainer share it."""

import json

import pytest

from tests.gpu.programs import output_of

COMMON = ("eval.every=10", "checkpoint.every=0", "logging.tensorboard=false", "trainer.steps=10")
SMALL = ("teacher.prepare.sft_steps=120", "student.prepare.sft_steps=120", "eval.size=10")
"""Models that learn in seconds, for the CPU."""


def test_demo_recipe_comes_closer_to_its_teacher_on_a_gpu(device, tmp_path):
    pytest.importorskip("vllm", reason="vLLM is not installed: pip install -e '.[gpu,test]'")
    overrides = COMMON if device == "cuda" else (*COMMON, *SMALL)
    printed = output_of("tests.gpu.demo", "recipes/gsm8k_opd.toml", tmp_path, *overrides)
    result = json.loads(printed.splitlines()[-1])
    assert result["student"] == [device] and result["engines"] == device
    before, after = result["reverse_kl"]
    assert after < 0.8 * before
