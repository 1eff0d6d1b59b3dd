"""The benchmarks run on a GPU, each at one small size. What they print is in tests/README.md."""

import pytest

from tests.benchmarks.heads import OBJECTIVES
from tests.gpu.programs import output_of


def cells(line):
    """Return a table's cells of one line of Markdown."""
    return [cell.strip() for cell in line.strip("| ").split("|")]


def numbers(words):
    """Return numbers as a table writes them."""
    return [float(word.replace(",", "")) for word in words]


def test_heads_benchmark_prints_every_variant_on_a_gpu(device):
    """At 2,048 tokens all variants fit. The chunked ones take a quarter of plain's memory."""
    sizes = ["--widths", 1024, "--tokens", 2048, "--rounds", 2]
    if device == "cpu":
        sizes = ["--widths", 32, "--tokens", 64, "--rounds", 1, "--vocab", 600]
    header, _, _, _, *rows = output_of(
        "tests.benchmarks.heads", "--device", device, *sizes
    ).splitlines()
    assert header.split(",")[0] != "CPU" or device == "cpu"
    assert [cells(row)[0] for row in rows] == [*OBJECTIVES]
    for row in rows:
        times, ratio, memory = (cells(row)[part] for part in (slice(3, 7), 7, slice(8, 11)))
        if device == "cpu":
            assert (times.pop(), memory.pop()) == ("-", "-")  # nothing is compiled there
        products, chunked, *_ = timed = numbers(times)
        assert min(timed) > 0
        rounding = 0.05 / products + 0.05 / chunked  # times have one digit after the point
        assert float(ratio) == pytest.approx(chunked / products, rel=rounding, abs=0.005)
        chunked, plain, *_ = numbers(memory)
        assert device == "cpu" or chunked <= plain / 4


def test_losses_benchmark_runs_on_a_gpu(device):
    tokens = 512 if device == "cuda" else 8
    words = ["--device", device, "--tokens", tokens, "--rounds", 1]
    if device == "cpu":
        words += ["--hidden", 8]
    first, *rows = output_of("tests.benchmarks.losses", *words).splitlines()
    assert device in first and all(" ms " in row for row in rows)


def test_plugin_is_faster_than_json_on_a_gpu(device):
    """The server computes on the device that vLLM finds. K = 32 in binary beats JSON."""
    pytest.importorskip("vllm", reason="vLLM is not installed: pip install -e '.[gpu,test]'")
    sizes = ["--vocab", 151_936, "--hidden", 1024, "--layers", 28, "--dtype", "bfloat16"]
    if device == "cpu":
        sizes = ["--sequences", 4, "--tokens", 100]
    printed = output_of(
        "tests.benchmarks.served_scorer", *sizes, "--ks", 32, "--rounds", 2
    ).splitlines()
    rates = {line[:30].strip(): numbers(line[30:].split()[:1])[0] for line in printed[2:]}
    assert rates["plugin, K = 32"] > rates["JSON, K = 32"]
    assert rates["plugin, hidden states"] > 0
