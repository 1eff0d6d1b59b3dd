"""The real thing: an unmodified prime-rl (launcher, orchestrator, env server, trainer) distils on a CPU, three
optimiser steps, with the teacher's top-K carried by our adapter; its numbers are checked against float64.

Needs a checkout of prime-rl and the environments of make_venvs.py; skipped where one is absent. By default three runs of
about a minute; PRIME_COMPOSER_WHOLE_RUNS=all for all versions, two ranks, the plain road, self-distillation, a resume, vLLM.
What stands in for a GPU is in rig/, what stands in for vLLM is e2e/server.py; both exist in the test's processes only.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.upstream.make_venvs import python_of, verifiers_of

HERE = Path(__file__).parent
E2E = HERE / "e2e"

from tests.upstream.e2e import cpu_recipe, launch_run

everything = pytest.mark.skipif(
    os.environ.get("PRIME_COMPOSER_WHOLE_RUNS") != "all",
    reason="a minute or more each: PRIME_COMPOSER_WHOLE_RUNS=all runs it",
)

K = 8
TOP_K = {"type": "topk_reverse_kl", "k": K}
SAMPLED = {"type": "sampled_reverse_kl"}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made = {}

    def make(python, tied):
        if tied not in made:
            folder = tmp_path_factory.mktemp("models")
            command = [python, str(E2E / "models.py"), str(folder), *(["--tied"] if tied else [])]
            subprocess.run(command, check=True, capture_output=True, env=cpu_env())
            made[tied] = folder
        return made[tied]

    return make


def cpu_env():
    clean = {
        key: value for key, value in os.environ.items() if not key.startswith("PRIME_COMPOSER")
    }
    return {**clean, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}


def run(
    version,
    trees,
    models,
    folder,
    loss,
    *,
    vllm=None,
    ranks=1,
    fused=True,
    tied=False,
    switch="1",
    several=False,
    **more_of_it,
):
    """One whole run; returns what the servers saw, the trainer's log and the rows of upstream's metric stream."""
    python = str(python_of("v0.6" if version == "v0.6.0" else "newest"))
    if not Path(python).exists() or not (verifiers_of(version) or Path(python)).exists():
        pytest.skip("no environment for it (python tests/upstream/make_venvs.py)")
    made = models(python, tied)
    folder.mkdir(exist_ok=True)
    roles = ("student", "teacher", *(["other"] if several else []))
    if vllm is None:
        servers = {
            role: launch_run.Server(python, made / role, folder / f"{role}.jsonl") for role in roles
        }
    else:
        servers = {
            role: launch_run.VllmServer(vllm, made / role, folder / f"{role}.jsonl", str(core))
            for core, role in enumerate(roles)
        }
    try:
        for server in servers.values():
            server.wait()
        if several:
            more_of_it["other"] = servers["other"].url
        urls = servers["student"].url, servers["teacher"].url
        config = folder / "run.toml"
        config.write_text(
            cpu_recipe.native(version, *urls, made, loss, ranks=ranks, fused=fused, **more_of_it)
        )
        more = {} if switch is None else {"PRIME_COMPOSER": switch}
        env = launch_run.environment(python, trees(version), folder, **more)
        if verifiers_of(version) is not None:
            env["PYTHONPATH"] = f"{verifiers_of(version)}{launch_run.os.pathsep}{env['PYTHONPATH']}"
        command = [python, "-m", "prime_rl.entrypoints.rl", "@", str(config)]
        code = launch_run.run(command, env, folder, 240)
    finally:
        for server in servers.values():
            server.stop()
    newest_last = sorted(
        folder.rglob("*.log"), key=lambda path: path.stat().st_mtime
    )  # a resume begins new ones
    logs = {path.name: path.read_text(errors="replace") for path in newest_last}
    if code != 0:
        tails = "\n".join(f"== {name}\n{text[-3000:]}" for name, text in logs.items())
        pytest.fail(f"the launcher ended with {code}\n{tails}")
    seen = {role: server.requests() for role, server in servers.items()}
    return {
        "python": python,
        "models": made,
        "folder": folder,
        "trainer": logs["trainer.log"],
        **seen,
    }


def metric_rows(result, version):
    """Upstream's own metric stream of the trainer: its JSONL monitor, or W&B's offline file."""
    folder = result["folder"]
    if version == "newest":
        return [
            json.loads(line) for line in (folder / "outputs/metrics.jsonl").read_text().splitlines()
        ]
    (file,) = (folder / "outputs" / "wandb").glob("offline-run-*/*.wandb")
    command = [result["python"], str(E2E / "read_wandb.py"), str(file)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=cpu_env())
    return [json.loads(line) for line in done.stdout.splitlines()]


def first_value(rows, name):
    return next(row[name] for row in rows if name in row)


def asked(result, role):
    """The sequences that a server was given, in order."""
    return [r["in"] for r in result[role] if r["path"] == "/inference/v1/generate"]


def step_of(folder):
    return int(Path(folder).name.removeprefix("step_"))


def reference(result, mixture=lambda tokens: {"teacher": 1.0}):
    """float64, from the first batch that the teacher was asked about; ``mixture``: weights of the teachers by role."""
    generated = [r for r in result["student"] if r["path"] == "/inference/v1/generate"]
    prompts = {json.dumps(r["in"] + r["out"]): len(r["in"]) for r in generated}
    sequences = [
        [
            tokens,
            prompts[json.dumps(tokens)],
            {str(result["models"] / role): w for role, w in mixture(tokens).items()},
        ]
        for tokens in asked(result, "teacher")[: cpu_recipe.BATCH]
    ]
    file = result["folder"] / "sequences.json"
    file.write_text(json.dumps(sequences))
    update = [r for r in result["student"] if r.get("weight_dir")][-1]
    assert step_of(update["weight_dir"]) > 0, "the server took no new weights"
    # What the server took may be gone: the trainer keeps its last broadcasts.
    broadcast = max((result["folder"] / "outputs").rglob("broadcasts/step_*"), key=step_of)
    made = result["models"]
    command = [
        result["python"],
        str(E2E / "reference.py"),
        str(made / "student"),
        str(K),
        str(file),
    ]
    command.append(str(broadcast))
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=cpu_env())
    return json.loads(done.stdout), update


RUNS = [
    ("v0.6.0", {"fused": False}),
    ("newest", {"fused": True}),
    pytest.param("v0.6.0", {"fused": True, "ranks": 2, "tied": True}, marks=everything),
    pytest.param("v0.7.0", {"fused": True}, marks=everything),
    pytest.param("v0.8.0", {"fused": True}, marks=everything),
    pytest.param("newest", {"fused": False, "ranks": 2, "tied": True}, marks=everything),
]


@pytest.mark.parametrize(
    "version,how", RUNS, ids=lambda value: value if isinstance(value, str) else "-".join(value)
)
def test_teacher_top_k_through_the_whole_unmodified_prime_rl(trees, models, tmp_path, version, how):
    result = run(version, trees, models, tmp_path, TOP_K, **how)
    assert all(r["params"]["prompt_logprobs"] == K for r in result["teacher"] if "params" in r)
    assert "topk_reverse_kl was called" in result["trainer"]
    rows = metric_rows(result, version)
    expected, update = reference(result)
    mean = sum(expected["tail_kl"]) / len(expected["tail_kl"])
    # bfloat16 models: the logits of both sides are rounded to 8 bits.
    assert first_value(rows, "topk_reverse_kl/kl/mean") == pytest.approx(mean, abs=5e-3)
    assert first_value(rows, "topk_reverse_kl/kl/max") == pytest.approx(
        max(expected["tail_kl"]), abs=1e-2
    )
    assert first_value(rows, "topk_reverse_kl/kl_in_support/mean") > 0
    assert 0 < first_value(rows, "loss/mean") < 10
    assert first_value(rows, "optim/grad_norm") > 0
    steps = {row["step"] for row in rows if "optim/grad_norm" in row}
    assert len(steps) == cpu_recipe.STEPS
    # checkpoint.every = 0 keeps the last state alone.
    assert [path.name for path in (result["folder"] / "outputs/checkpoints").glob("step_*")] == [
        f"step_{cpu_recipe.STEPS}"
    ]
    # The weights moved, reached the inference server whole, and the server took them.
    assert expected["moved"] > 1e-3
    assert update["tensors"] > 10 and not update["missing"]


@pytest.mark.parametrize(
    "version",
    ["newest", *(pytest.param(v, marks=everything) for v in ("v0.6.0", "v0.7.0", "v0.8.0"))],
)
def test_two_environments_of_the_recipe_each_with_its_own_mixture_of_two_teachers(
    trees, models, tmp_path, version
):
    result = run(version, trees, models, tmp_path, TOP_K, several=True)
    letters = json.loads((result["models"] / "student" / "tokenizer.json").read_text())["model"][
        "vocab"
    ]
    spelled = {name: [letters[letter] for letter in name] for name in cpu_recipe.MIXTURES}

    def mixture(tokens):  # by the first word of the prompt, which is the environment's name
        (name,) = [
            n
            for n, ids in spelled.items()
            if any(tokens[i : i + len(ids)] == ids for i in range(12))
        ]
        return cpu_recipe.MIXTURES[name]

    assert sorted(asked(result, "teacher")) == sorted(asked(result, "other"))
    rows = metric_rows(result, version)
    expected, update = reference(result, mixture)
    alone, _ = reference(result)
    mean, unmixed = (sum(kl["tail_kl"]) / len(kl["tail_kl"]) for kl in (expected, alone))
    assert first_value(rows, "topk_reverse_kl/kl/mean") == pytest.approx(mean, abs=5e-3)
    assert abs(mean - unmixed) > 2e-2  # prime-rl's one teacher would have been seen
    assert expected["moved"] > 1e-3 and not update["missing"]


@everything
@pytest.mark.parametrize("version", ["v0.6.0", "newest"])
def test_a_mixture_for_a_sampled_loss_stops_where_the_orchestrator_runs_without_the_adapter(
    trees, models, tmp_path, monkeypatch, version
):
    folder_of = launch_run.command_folder

    def without(python, folder):
        script = folder_of(python, folder) / "orchestrator"
        script.write_text(script.read_text().replace("exec", "unset PRIME_COMPOSER\nexec"))
        return folder

    assert (
        "sampled_reverse_kl was called"
        in run(version, trees, models, tmp_path / "with", SAMPLED, several=True)["trainer"]
    )
    monkeypatch.setattr(launch_run, "command_folder", without)
    with pytest.raises(
        pytest.fail.Exception, match="adapter = true: .* and the orchestrator runs without it"
    ):
        run(version, trees, models, tmp_path / "without", SAMPLED, several=True)


@everything
def test_rl_environments_beside_ours_keep_prime_rls_own_loss(trees, models, tmp_path):
    result = run(
        "newest",
        trees,
        models,
        tmp_path,
        TOP_K,
        rl=True,
        steps=4,
        switch=json.dumps({"loss": TOP_K}),
    )
    assert (
        "topk_reverse_kl registered for distillation tokens (ref_kl_loss_fn)" in result["trainer"]
    )
    rows = metric_rows(result, "newest")
    # Whole groups of four fill a batch, of either kind: the first one with ours has four or eight.
    expected, update = reference(result)
    means = [sum(expected["tail_kl"][:n]) / n for n in (4, cpu_recipe.BATCH)]
    assert any(
        first_value(rows, "topk_reverse_kl/kl/mean") == pytest.approx(mean, abs=5e-3)
        for mean in means
    )
    assert (
        first_value(rows, "mismatch_kl/dice/mean") >= 0
        and first_value(rows, "is_masked_high/mean") >= 0
    )
    assert expected["moved"] > 1e-3 and not update["missing"]


@everything
@pytest.mark.parametrize("version", ["newest"])
def test_with_real_vllm_as_student_and_as_teacher(trees, models, tmp_path, version):
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here")
    result = run(version, trees, models, tmp_path, TOP_K, vllm=sys.executable)
    rows = metric_rows(result, version)
    expected, update = reference(result)
    mean = sum(expected["tail_kl"]) / len(expected["tail_kl"])
    assert first_value(rows, "topk_reverse_kl/kl/mean") == pytest.approx(mean, abs=5e-3)
    assert expected["moved"] > 1e-3 and not update["missing"]
    # Both compute the same policy: vLLM's log mu is the trainer's log p, to bfloat16.
    mismatch = [row["mismatch_kl/all/mean"] for row in rows if "mismatch_kl/all/mean" in row]
    assert len(mismatch) == cpu_recipe.STEPS and mismatch[0] < 0.01


@everything
def test_self_distillation_in_the_newest_version_scores_with_the_policy_told_the_answer(
    trees, models, tmp_path
):
    result = run("newest", trees, models, tmp_path, TOP_K, told=True)
    scored = [
        r
        for r in result["student"]
        if r["path"] == "/inference/v1/generate" and "prompt_logprobs" in r["params"]
    ]
    sampled = [
        r["in"] + r["out"] for r in result["student"] if r["path"] == "/inference/v1/generate"
    ]
    assert scored and not [r for r in result["teacher"] if r["path"] == "/inference/v1/generate"]
    # The hint stands in front of the very same tokens.
    assert all(r["params"]["prompt_logprobs"] == K for r in scored)
    assert all(
        any(r["in"][-len(tokens) :] == tokens and len(r["in"]) > len(tokens) for tokens in sampled)
        for r in scored
    )
    rows = metric_rows(result, "newest")
    assert "topk_reverse_kl was called" in result["trainer"]
    assert first_value(rows, "topk_reverse_kl/kl/mean") > 0
    assert first_value(rows, "optim/grad_norm") > 0


@everything
@pytest.mark.parametrize("version", ["v0.6.0", "newest"])
def test_a_resumed_run_goes_on_with_the_state_of_its_loss(trees, models, tmp_path, version):
    taid = {"type": "taid", "k": K, "total_steps": 10, "t_start": 0.2, "alpha": 0.5, "beta": 0.5}
    run(version, trees, models, tmp_path, taid, resume=False)
    (kept,) = (tmp_path / "outputs").rglob("prime_composer_loss.jsonl")
    before = kept.read_text().splitlines()
    result = run(version, trees, models, tmp_path, taid, resume=True, steps=cpu_recipe.STEPS + 1)
    lines = kept.read_text().splitlines()
    assert len(before) == cpu_recipe.STEPS and lines[: len(before)] == before
    assert len({json.loads(line)["step"] for line in lines}) == len(lines)
    ts = [json.loads(line)["state"]["t"] for line in lines]
    assert 0.2 == ts[0] < ts[1] < ts[2]
    resumed_at = json.loads(lines[-2])["step"]
    assert f"taid goes on with its state of step {resumed_at}" in result["trainer"]


@everything
@pytest.mark.parametrize("version", ["v0.6.0", "newest"])
def test_the_plain_launcher_runs_our_sampled_loss_with_nothing_else_installed(
    trees, models, tmp_path, version
):
    result = run(version, trees, models, tmp_path, SAMPLED, switch=None)
    assert all(r["params"]["prompt_logprobs"] == 1 for r in result["teacher"] if "params" in r)
    assert "sampled_reverse_kl was called" in result["trainer"]
    rows = metric_rows(result, version)
    expected, _ = reference(result)
    mean = sum(expected["log_ratio"]) / len(expected["log_ratio"])
    name = "teacher_kl" if version == "v0.6.0" else "ref_kl"
    assert first_value(rows, f"sampled_reverse_kl/{name}/mean") == pytest.approx(mean, abs=2e-2)
    assert expected["moved"] > 1e-3
