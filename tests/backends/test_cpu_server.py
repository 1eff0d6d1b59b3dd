"""The options that vLLM's server is given on a CPU machine."""

import json
from itertools import pairwise

import pytest

from prime_composer.backends.cpu_server import cpu_options

GIB = 2**30


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)


@pytest.fixture
def model(tmp_path):
    """A config of Qwen3-0.6B: 28 layers with 8 heads of 128 for keys and values, 40,960 tokens."""
    config = {"model_type": "qwen3", "num_hidden_layers": 28, "num_attention_heads": 16}
    config |= {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("options", "size"),
    [
        # A token takes 2 * 28 * 8 * 128 numbers; one block of 128 tokens is added.
        ([], 57344 * 2 * (40960 + 128)),
        (["--dtype", "float32"], 57344 * 4 * (40960 + 128)),
        (["--dtype=float32", "--max-model-len=20000"], 57344 * 4 * (20096 + 128)),
        (["--max_model_len", "4096"], GIB),
    ],
)
def test_cache_has_room_for_a_sequence_and_at_least_a_gibibyte(model, options, size):
    added = cpu_options(["--model", model, *options])
    assert added == [
        *("--no-enable-chunked-prefill", "--enforce-eager", "--kv-cache-memory-bytes", str(size))
    ]


@pytest.mark.parametrize(
    ("option", "missing"),
    [
        ("--enable-chunked-prefill", "--no-enable-chunked-prefill"),
        ("--no-enforce-eager", "--enforce-eager"),
        ("--enforce_eager", "--enforce-eager"),
        ("--kv_cache_memory_bytes=5", "--kv-cache-memory-bytes"),
        ("--gpu-memory-utilization=0.5", "--kv-cache-memory-bytes"),
        ("--config=server.yaml", "--kv-cache-memory-bytes"),
    ],
)
def test_option_of_the_command_line_stays_alone(model, option, missing):
    before, after = cpu_options(["--model", model]), cpu_options(["--model", model, option])
    index = before.index(missing)
    width = 2 if missing.endswith("bytes") else 1
    assert after == before[:index] + before[index + width :]


@pytest.mark.parametrize(
    ("options", "expected"),
    [([], ["1"]), (["--max-num-seqs", "3"], []), (["--max_num_seqs=3"], [])],
)
def test_adapters_get_one_sequence_at_a_time(model, options, expected):
    added = cpu_options(["--model", model, "--enable-lora", *options])
    assert [b for a, b in pairwise(added) if a == "--max-num-seqs"] == expected


def test_variables_of_the_environment_stay_alone(model, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    assert cpu_options(["--model", model]) == ["--no-enable-chunked-prefill"]


@pytest.mark.parametrize("options", [[], ["--model"], ["--model", "/nowhere"]])
def test_what_is_wrong_is_left_to_vllm(options):
    assert cpu_options(options) == ["--no-enable-chunked-prefill", "--enforce-eager"]
