"""Whole runs of an unmodified prime-rl on an environment of verifiers by id, in several turns.

As in test_whole_run.py, whose functions and stand-ins these are. The environment is a module of its
own, e2e/tiny_turns.py, which our package does not know: it is named in the recipe alone.
"""

import json
import subprocess

import msgspec
import pytest
from tokenizers import Tokenizer

from tests.upstream import test_whole_run as whole_run
from tests.upstream.test_export_upstream import BY_ID
from tests.upstream.test_whole_run import TOP_K, K, other

models = whole_run.models

HARNESS = {"id": "tiny-turns"}
NATIVE = {
    "v0.7": {"harness": HARNESS},
    "v0.8": {"env": {"agent": {"harness": HARNESS}}},
    "head": {"env": {"agent": {"harness": HARNESS}}},
}
"""The environment's own harness, in the place of prime-rl's, which needs PyPI at run time."""


def environment(api):
    """Return a table of the recipe: numbers from 20 on, of which even ones take two turns.

    With the API v1 they would take three turns. The recipe's limit ends them.
    """
    if api == "v0":
        table = {"id": "tiny-turns-v0", "args": {"turns": 2, "first": 20}}
    else:
        table = {"id": "tiny-turns", "args": {"turns": 3, "first": 20}, "max_turns": 2}
    return {**table, "api": api, "timeout": 300}


def trained_sequences(result):
    """Return tokens and mask of each sequence of each step, up to the last token that trains."""
    files = (result["folder"] / "outputs").rglob("step_*/rank_0.bin")
    steps = []
    for file in sorted(files, key=lambda file: whole_run.step_of(file.parent)):
        sequences = []
        for tokens, mask, *fields in msgspec.msgpack.decode(file.read_bytes()):
            lengths = fields[3] if isinstance(fields[3][0], int) else fields[5]
            start = 0
            for length in lengths:
                trained = [t for t in range(length) if mask[start + t]]
                if trained:
                    sequences.append((tokens[start : start + trained[-1] + 1], trained))
                start += length
        steps.append(sequences)
    return steps


def sampled_places(tokens, requests):
    """Return the places of the tokens that the student's server sampled, and the number of turns.

    Each of a rollout's requests is the beginning of its sequence. Another rollout's answer may be
    the beginning of this one's, so that of each turn the longest one counts.
    """
    turns = {}
    for request in requests:
        start, seen = len(request["in"]), request["in"] + request["out"]
        if tokens[: len(seen)] == seen:
            turns[start] = max(len(seen), turns.get(start, 0))
    places = [place for start in sorted(turns) for place in range(start, turns[start])]
    return places, len(turns)


@other
@pytest.mark.parametrize("version,api", BY_ID)
def test_whole_run_trains_on_environments_by_id(trees, models, tmp_path, version, api):
    """Only the student's own tokens train, in every turn; their divergence is float64's."""
    table = environment(api)
    if api == "v1":
        table["prime_rl"] = NATIVE[version]
    result = whole_run.run(
        version,
        trees,
        models,
        tmp_path,
        TOP_K,
        environments={"spell": table},
        words=True,
        seq_len=512,
    )
    assert "topk_reverse_kl was called" in result["trainer"]
    requests = whole_run.generate_requests(result, "student")
    scored = [r["in"] for r in whole_run.generate_requests(result, "teacher")]
    tokenizer = Tokenizer.from_file(str(result["models"] / "student" / "tokenizer.json"))
    steps, seen = trained_sequences(result), set()
    for tokens, trained in (sequence for step in steps for sequence in step):
        places, turns = sampled_places(tokens, requests)
        assert trained == places, (turns, tokenizer.decode(tokens))
        assert tokens in scored  # the whole context in one request
        text = tokenizer.decode(tokens)
        even = any(f"spell 2{i}" in text for i in range(0, 8, 2))
        assert turns == (2 if even else 1) and ("again 1" in text) == even
        seen.add(turns)
    assert seen == {1, 2}
    check_divergence(result, version, steps[0])


def check_divergence(result, version, step):
    """Compare prime-rl's metric of the first step with float64."""
    teachers = {str(result["models"] / "teacher"): 1.0}
    file = result["folder"] / "sequences.json"
    file.write_text(json.dumps([[tokens, places, teachers] for tokens, places in step]))
    script, student = str(whole_run.E2E / "reference.py"), str(result["models"] / "student")
    command = [result["python"], script, student, str(K), str(file)]
    env = whole_run.cpu_env()
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
    expected = json.loads(done.stdout)["tail_kl"]
    rows = whole_run.metric_rows(result, version)
    actual = whole_run.first_value(rows, "topk_reverse_kl/kl/mean")
    # bfloat16 models: the logits of both sides are rounded to 8 bits.
    assert actual == pytest.approx(whole_run.mean(expected), abs=5e-3)
