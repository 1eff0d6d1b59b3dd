"""What does not go together inside prime-rl: each rule once, and at each of its doors."""

import json
import types

import pytest
import tomli_w

from prime_composer.recipe.loading import parse_recipe
from prime_composer.recipe.schema import RecipeError
from prime_composer.upstream import launch, launcher_hook
from prime_composer.upstream.export import export_recipe
from prime_composer.upstream.keys import IMPORT_PATH, SWITCH
from prime_composer.upstream.settings import AdapterSettings, parse_loss_table
from tests.upstream.export_recipes import recipe, tables

TOP = {"type": "topk_reverse_kl", "k": 2}
FULL = {"type": "topk_reverse_kl", "k": "full", "normalization": "full"}
BOTH = {**TOP, "rl_mix": {"kd": 0.5}}
SAMPLED = {"type": "sampled_reverse_kl"}
RL = {"type": "default"}
OPD = {"type": "opd", "teacher": {"name": "t", "base_url": "http://host:1/v1", "headers": {}}}
OWN = {"t": "d"}


def source(**changes):
    """Return a config whose second source has other settings than the first one."""
    sources = [{"name": name, "resolved_name": name, "algo": OPD} for name in "ab"]
    sources[1] |= changes
    return {"orchestrator": {"train": {"source": sources, "sampling": {"top_p": 1.0}}}}


def trainer(**changes):
    return {"trainer": {"model": changes}}


def inference(**changes):
    return {"inference": changes}


EXPERTS, KEPT = "enable_return_routed_experts", "enable_return_sampling_mask"
WHOLE = r"compares log-probs over the whole vocabulary.*leave out "
SECOND = r"orchestrator\.train\.source\[1\]"
ROWS = {
    "ids of the student": ({**TOP, "chosen_by": "student"}, {}, {}, 'own top 2,.*chosen_by = "tea'),
    "least advantage": (BOTH, {}, source(min_abs_advantage=0.02),
                        rf"{SECOND}\.min_abs_advantage = 0.02 .* set it to 0"),
    "states by the orchestrator": (FULL, {"asked_by": "orchestrator"}, {}, "leave asked_by out"),
    "tokenizers, by the trainer": (
        TOP, {"asked_by": "trainer", "teacher_tokenizers": OWN}, {}, "tokenizer.*leave"
    ),
    "a hint of states": (FULL, {}, source(algo={"type": "opsd"}), f"{SECOND} .*opsd.*a number k"),
    "hints by the trainer": (
        TOP, {"asked_by": "trainer"},
        {"orchestrator": {"algo": {"type": "opsd"}, "train": {"source": [{}]}}}, "leave asked_by"),
    "tokenizers and rewards": (
        BOTH, {"teacher_tokenizers": OWN}, {}, "a loss of the teacher alone"),
    "tokenizers in a mixture": (
        TOP, {"teacher_tokenizers": OWN, "teachers_mixed": True}, {}, "route each environment"),
    "head on the CPU": (FULL, {}, {**source(), **trainer(full_offload=True)},
                        r"trainer\.model\.full_offload keeps it.*optim_cpu_offload"),
    "router replay": (TOP, {}, {"trainer": {"enable_router_replay": True}},
                      'asked_by = "trainer".*enable_router_replay = false'),
    "experts of a server": (
        TOP, {}, inference(**{EXPERTS: True}), rf"inference\.{EXPERTS} = false"),
    "experts of vLLM": (
        TOP, {}, inference(vllm={EXPERTS: True}), rf"inference\.vllm\.{EXPERTS} = false"),
    "masks of a server": (TOP, {}, inference(**{KEPT: True}), rf"{WHOLE}inference\.{KEPT}"),
    **{f"top-p, {loss.get('k', loss['type'])}": (loss, {}, source(sampling={"top_p": 0.9}),
                                                 rf"{WHOLE}{SECOND}\.sampling\.top_p")
       for loss in (TOP, SAMPLED)},
    "top-k": (TOP, {}, source(sampling={"top_k": 50}), rf"{WHOLE}{SECOND}\.sampling\.top_k"),
    "min-p of the request": (TOP, {}, source(sampling={"extra_body": {"min_p": 0.1}}),
                             rf"{WHOLE}{SECOND}\.sampling\.extra_body\.min_p"),
}  # fmt: skip
"""Name -> loss, settings, prime-rl's config, and what the sentence has: key and remedy."""

FINE = {
    "least advantage without a teacher in it": (TOP, {}, source(min_abs_advantage=0.02)),
    "top-p of rewards": (RL, {}, source(sampling={"top_p": 0.9})),
    "no top-k": (TOP, {}, source(sampling={"top_p": 1.0, "top_k": -1, "extra_body": {"top_k": 0}})),
    "experts where the trainer asks": (
        TOP, {"asked_by": "trainer"}, {**source(), "trainer": {"enable_router_replay": True}}),
    "a top K and a head on the CPU": (TOP, {}, trainer(full_offload=True)),
    "hints by the orchestrator": (TOP, {}, source(algo={"type": "opsd"})),
}  # fmt: skip


def as_object(value):
    """Return tables as objects, as prime-rl's config has them."""
    if isinstance(value, dict):
        return types.SimpleNamespace(**{key: as_object(below) for key, below in value.items()})
    return [as_object(one) for one in value] if isinstance(value, list) else value


def launched(loss, settings, config):
    """Let prime-rl's launcher read a loss in its config."""
    raw = {"orchestrator": {}, "inference": {}, **config}
    config = as_object(raw)
    config.trainer = as_object({"model": {}, **raw.get("trainer", {})})
    config.trainer.model.name = "a/model"
    config.trainer.loss = types.SimpleNamespace(import_path=IMPORT_PATH, kwargs=dict(loss))
    for one in getattr(getattr(config.orchestrator, "train", None), "source", []):
        if hasattr(one, "algo") and one.algo.type == "opd":
            one.algo.teacher.headers, one.algo.teacher.api_key_var = {}, "KEY"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, json.dumps(settings) if settings else "1")
        launcher_hook.resolve_settings(config)


def written(loss, settings, config):
    """Apply the rules to tables, as the export does for a prime-rl that replays sampling."""
    parsed = parse_loss_table(loss)
    AdapterSettings(loss=loss, **settings).derived(parsed, config=config, replays=True)


@pytest.mark.parametrize("door", [launched, written])
@pytest.mark.parametrize("name", ROWS)
def test_rule_names_key_and_remedy(door, name):
    """Of the launcher's objects and of an export's tables."""
    *given, words = ROWS[name]
    with pytest.raises(ValueError, match=words):
        door(*given)


@pytest.mark.parametrize("door", [launched, written])
@pytest.mark.parametrize("name", FINE)
def test_what_goes_together_is_not_refused(door, name):
    door(*FINE[name])


@pytest.mark.parametrize("table", [RL, BOTH])
def test_loss_of_rl_tokens_has_to_be_in_the_file(monkeypatch, table):
    """[trainer.loss] is called on them, and nothing else."""
    config = as_object({"trainer": {"model": {"name": "m"}, "loss": {}}, "orchestrator": {}})
    monkeypatch.setenv(SWITCH, json.dumps({"loss": table}))
    with pytest.raises(ValueError, match=rf'loss of rl tokens.* import_path = "{IMPORT_PATH}"'):
        launcher_hook.resolve_settings(config)


@pytest.mark.parametrize(
    "changes,words",
    [
        ({"loss": {"chosen_by": "student"}}, r"^\[loss\] .*chosen_by"),
        ({"rollout": {"top_p": 0.9}}, r"leave out orchestrator\.train\.sampling\.top_p .*rollout"),
        ({"prime_rl": {"trainer": {"enable_router_replay": True}}}, "enable_router_replay"),
    ],
)
def test_export_applies_the_rules_to_what_it_writes(changes, words):
    """prime-rl's own settings, which win, are in it. Another way out is one machine."""
    with pytest.raises(RecipeError, match=f"{words}.*--engine local"):
        export_recipe(parse_recipe(tables(**changes)), "main")


def test_export_for_older_versions_cuts_in_the_request_alone():
    """Their trainers do not replay it."""
    body = {"orchestrator": {"train": {"sampling": {"extra_body": {"top_k": 9}}}}}
    for version in ("head", "v0.9"):
        export_recipe(recipe(rollout={"top_p": 0.9}, prime_rl=body), version)


def test_check_applies_the_rules_to_a_native_toml(tmp_path):
    native = {
        "orchestrator": {"train": {"min_abs_advantage": 0.5}},
        "trainer": {"loss": {"type": "custom", "import_path": IMPORT_PATH, "kwargs": BOTH}},
    }
    (tmp_path / "native.toml").write_text(tomli_w.dumps(native))
    with pytest.raises(ValueError, match="min_abs_advantage = 0.5"):
        launch.check_native(tmp_path / "native.toml", [])
    native["orchestrator"]["train"]["min_abs_advantage"] = 0.0
    native["slurm"] = {"template_path": "of another machine"}  # the launcher reads it
    (tmp_path / "native.toml").write_text(tomli_w.dumps(native))
    assert launch.check_native(tmp_path / "native.toml", [])["k"] == 2


def slurm_of(folder, template="uv sync --all-extras", lock="", **fields):
    """Return prime-rl's [slurm], with a template and a lock file."""
    (folder / "rl.sbatch.j2").write_text(f"cd x\n{template}\n{{{{ pre_run_command }}}}\nuv run rl")
    (folder / "uv.lock").write_text(lock)
    given = {"pre_run_command": None, "shared_fs": True} | fields
    return types.SimpleNamespace(template_path=folder / "rl.sbatch.j2", project_dir=folder, **given)


@pytest.mark.parametrize(
    "how,remedy",
    [
        ({}, "uv pip install"),
        ({"pre_run_command": "uv pip install PATH"}, None),
        ({"pre_run_command": "uv pip install PATH", "shared_fs": False}, "srun .*uv pip install"),
        ({"pre_run_command": "srun -n 2 uv pip install PATH", "shared_fs": False}, None),
        ({"template": "uv sync --inexact"}, None),
        ({"lock": '[[package]]\nname = "prime-composer"\n'}, None),
    ],
)
def test_job_script_has_to_keep_this_package(tmp_path, how, remedy):
    """prime-rl's `uv sync` removes what prime-rl does not lock, and nobody would say so."""
    config = types.SimpleNamespace(slurm=slurm_of(tmp_path, **how))
    settings, loss = AdapterSettings(loss=TOP), parse_loss_table(TOP)
    if remedy is None:
        settings.derived(loss, config=config)
        return
    with pytest.raises(ValueError, match=rf"\[slurm\].*removes.*pre_run_command = .{remedy}"):
        settings.derived(loss, config=config)
