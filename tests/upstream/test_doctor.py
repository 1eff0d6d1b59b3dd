"""``prime-rl doctor`` on recorded signatures: which roads work, and what it prints."""

import json
import subprocess
import sys
import types

import pytest

from prime_composer.cli.commands import main
from prime_composer.scoring import patches
from prime_composer.upstream import launch, launcher_hook
from prime_composer.upstream.versions import doctor
from prime_composer.upstream.versions.capabilities import CAPABILITIES, ROADS, UnknownSurface
from prime_composer.upstream.versions.records import VERSIONS
from tests.parity.outcomes import tree_env
from tests.upstream.signatures import MAIN, TREES, recorded, stand_in

LOSS = "prime_rl.trainer.rl.loss"
HEAD = "prime_rl.trainer.models.layers.lm_head"
SAMPLES = "prime_rl.orchestrator.trajectories:trace_to_samples"
EVERY = list(ROADS)
ADAPTER = EVERY[2:5]
EXPECTED = {
    "v0.6": ("v0.6", EVERY[2:]),  # the five lines alone
    "head": ("as head", []),
    "orchestrator clients": ("as head", []),
    "two more fields": ("v0.7", EVERY),
    "kept tokens": ("as head", ADAPTER),  # before the contract of episodes
    "inline images": ("as head", []),
}
"""Tree -> what its configs are like, and the roads that it costs, by hand."""


def changed(tree, uses=None, **places):
    """The report on a tree with other signatures. None: the place is gone."""
    signatures = {**recorded(tree), **places}
    kept = {place: names for place, names in signatures.items() if names is not None}
    return doctor.examine_sources(stand_in(kept, uses), "HERE")


def write(tree, folder):
    """Write a stand-in with a tree's signatures, as a checkout has it."""
    for path, text in stand_in(recorded(tree))._texts.items():
        target = folder / "src" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return folder


@pytest.mark.parametrize("tree", TREES)
def test_examine_says_which_roads_each_tree_has(tree):
    report = doctor.examine_sources(stand_in(recorded(tree)))
    note, lost = EXPECTED[tree]
    assert report.working == [road for road in EVERY if road not in lost]
    assert report.findings[-1].note == note


def test_examine_finds_each_name_where_main_has_it():
    """October's and November's prime-rl, read and not run: what moved is found at its new place."""
    report = doctor.examine_sources(stand_in(recorded(MAIN)))
    places = {f.capability.name: str(f.place) for f in report.findings}
    assert places["questions to teachers"] == "orchestrator.clients:prefill_logprobs"
    assert places["place of the algorithm"] == "configs.orchestrator:TrainConfig"
    assert places["carrier of the support"] == "transports.batch.types:RoutedExperts"
    assert places["sample"] == "transports.batch.types:TrainingSample"
    assert [road for road in EVERY if road in report.working or road == "export"] == EVERY
    assert ("export" in report.working) == ("main" in VERSIONS)


@pytest.mark.parametrize(
    "place,names,lost,message",
    [
        (f"{LOSS}:LossInputs", "prompts", EVERY[:5], "requires prompts, which we do not know"),
        (f"{HEAD}:FusedOutputLinear.forward", "mask", EVERY[2:5], "requires mask"),
        (SAMPLES, "more", [], ""),
        ("prime_rl.orchestrator.algo.grpo:GRPOAlgorithm.__init__", "gate", ["rl"], "gate"),
    ],
)
def test_examine_refuses_a_new_required_name(place, names, lost, message):
    """Only the roads that need it are lost, and a name that is handed on costs none."""
    report = changed("head", **{place: f"{recorded('head')[place]} {names}"})
    assert [road for road in EVERY if road not in report.working] == lost
    assert all(message in finding.verdict for finding in report.misfits())


def test_examine_a_name_that_is_gone_costs_its_roads():
    report = changed("head", **{"prime_rl.utils.client:prefill_logprobs": None})
    (finding,) = report.misfits()
    assert report.working == ["losses", "slot", "export"]
    assert "there is no orchestrator.clients:prefill_logprobs or utils" in finding.verdict


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("prefill_logprobs", "questions to teachers: orchestrator.clients:prefill_logprobs"),
        # As in a fork whose train sink asks another function for more than the samples.
        ("trace_to_samples", "samples of a rollout: orchestrator.trajectories:trace_to_samples"),
    ],
)
def test_examine_a_function_that_nothing_calls_is_a_misfit(name, found):
    """A hook on it would never fire: it is kept for others, as its docstring may say."""
    uses = {place.rpartition(":")[2].rpartition(".")[2] for place in recorded(MAIN)}
    report = changed(MAIN, {*uses - {name}, f'"""A view for callers of {name}."""'})
    (finding, *_) = report.misfits("adapter")
    assert str(finding) == (
        f"{found} is there, and nothing in prime-rl uses it (costs adapter, full, rl)"
    )


def test_table_has_the_roads_then_what_differs():
    """One line per road, then what does not fit with its misfit below it, and the verdict."""
    head = f"{HEAD}:FusedOutputLinear.forward"
    report = changed("head", **{head: "hidden_states labels mask", SAMPLES: None})
    lines = doctor.format_report(report, "adapter").splitlines()
    states = {line.split()[1]: line.split()[0] for line in lines[2:8]}
    assert states == dict(zip(EVERY, ["works", "works", *["FAILS"] * 3, "works"], strict=True))
    (index,) = (i for i, line in enumerate(lines) if line.startswith("DIFFERS"))
    assert "fused output head" in lines[index]
    assert "has no temperature" in lines[index + 1] and "requires mask" in lines[index + 1]
    (gone,) = (line for line in lines if line.startswith("GONE"))
    assert "samples of a rollout" in gone
    every = len(CAPABILITIES) + 1  # and the TOML
    assert lines[-2] == f"{every - 2} of {every} fit. The road adapter does not work."


@pytest.mark.parametrize("tree,left", [("v0.6", ["losses", "slot"]), ("two more fields", [])])
def test_table_of_an_old_version_says_what_to_do(tree, left):
    """One finding in the place of all that is elsewhere there."""
    report = doctor.examine_sources(stand_in(recorded(tree)), "HERE")
    name, _ = EXPECTED[tree]
    lines = doctor.format_report(report, "adapter").splitlines()
    (old,) = [at for at, line in enumerate(lines) if line.startswith("OLD")]
    said = " ".join(line.strip() for line in lines[old + 1 : -2])
    assert f"prime-rl {name} " in said and "559b4477" in said and "commit 5218d7f" in said
    assert not any(line.startswith(("GONE", "DIFFERS")) for line in lines)
    (version,) = report.misfits()
    assert version.capability.roads == tuple(road for road in EVERY if road not in left)


@pytest.mark.parametrize("part", ["src", "src/prime_rl"])
def test_doctor_reads_the_checkout_of_a_part_of_it(tmp_path, capsys, monkeypatch, part):
    """The config classes are in another folder of the checkout than the rest."""
    source = write("head", tmp_path) / "src" / "prime_rl"
    configs = tmp_path / "packages" / "prime-rl-configs" / "src" / "prime_rl"
    configs.mkdir(parents=True)
    (source / "configs").rename(configs / "configs")
    assert main(["doctor", "--source", str(tmp_path / part)]) == 0
    monkeypatch.chdir(tmp_path / part)
    assert main(["doctor", "--source", "."]) == 0
    assert "FAILS" not in capsys.readouterr().out


def test_doctor_exit_status_follows_the_road(tmp_path, capsys):
    """Its JSON has every capability."""
    folder = str(write("kept tokens", tmp_path))
    assert main(["doctor", "--source", folder, "--road", "slot"]) == 0
    capsys.readouterr()
    assert main(["doctor", "--source", folder, "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["road"] == "adapter" and said["works"]["slot"] and not said["works"]["rl"]
    by_name = {entry["name"]: entry for entry in said["capabilities"]}
    assert len(by_name) == len(CAPABILITIES) + 1
    assert not by_name["scores of opd"]["fits"] and by_name["scores of opd"]["roads"] == ADAPTER
    assert by_name["distillation slot"]["place"] == "trainer.rl.loss:ref_kl_loss_fn"


def test_doctor_imports_neither_prime_rl_nor_torch(tmp_path):
    """A module of prime-rl that ends its process is read all the same."""
    write("head", tmp_path)
    (tmp_path / "src" / "prime_rl" / "__main__.py").write_text("raise SystemExit(9)\n")
    code = (
        "import sys; from prime_composer.upstream.versions import doctor;"
        "status = doctor.run_doctor('adapter', False, None);"
        "names = {'prime_rl', 'torch', 'verifiers', 'vllm'};"
        "print(sorted(names & set(sys.modules)), status)"
    )
    path = f"{tmp_path / 'src'}:{':'.join(filter(None, sys.path))}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines()[-1] == "[] 0", done.stderr
    assert done.stdout.startswith(f"prime-rl in {tmp_path / 'src' / 'prime_rl'}, as head\n")


@pytest.fixture
def misfit(monkeypatch):
    """Act as an environment whose prime-rl has another head."""
    head = f"{HEAD}:FusedOutputLinear.forward"
    report = changed("head", **{head: "hidden_states labels temperature mask"})
    monkeypatch.setattr(doctor, "examine_installed", lambda: report)


def test_require_says_what_differs_and_what_still_works(misfit):
    words = r"\(HERE\):\n +fused output head: .* requires mask, (?s:.*)five lines.*559b4477"
    with pytest.raises(UnknownSurface, match=words):
        doctor.require_road("adapter")
    doctor.require_road("slot")


def test_real_old_version_ends_a_process_with_the_variable(trees):
    """Its trainer, started by hand: one sentence, before it trains its own loss."""
    env = tree_env(trees("v0.6"), PRIME_COMPOSER="1")
    command = [sys.executable, "-m", "prime_rl.entrypoints.trainer"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "prime-rl v0.6 " in done.stderr and "commit 5218d7f" in done.stderr


def test_launch_asks_the_doctor_before_anything(misfit, monkeypatch, tmp_path):
    """Also for a dry run, and for a TOML of prime-rl's own."""
    monkeypatch.setattr(launch, "has_prime_rl", lambda: True)
    monkeypatch.setattr(launch, "check_pth", lambda: None)
    monkeypatch.setattr(launch, "probe_version", lambda: pytest.fail("asked too late"))
    for dry_run in (False, True):
        with pytest.raises(launch.RecipeError, match="fused output head.*(?s:.*)five lines"):
            launch.launch(tmp_path / "native.toml", dry_run=dry_run)


def test_prime_rls_own_launcher_asks_the_doctor(misfit):
    """``PRIME_COMPOSER=1 rl @ FILE`` ends before it starts a process; a trainer is not asked."""

    class Config:
        trainer = object()

    with pytest.raises(UnknownSurface, match="fused output head"):
        launcher_hook.resolve_settings(Config())
    Config.trainer = None
    launcher_hook.resolve_settings(Config())


def test_doctor_knows_the_vllms_that_the_plugin_knows():
    first, last = doctor.PLUGIN
    with pytest.raises(patches.UnknownVllm, match=f"vLLM 0.{first} to 0.{last}"):
        patches.patch(types.ModuleType("vllm.v1.worker.gpu_model_runner"))
