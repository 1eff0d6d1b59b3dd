"""prime-rl's launcher: the settings are resolved once, and a wrong run ends before it starts."""

import json
import os
import sys
import types

import pytest

from prime_composer.upstream import launcher_hook, launches
from prime_composer.upstream.keys import IMPORT_PATH, SWITCH
from prime_composer.upstream.settings import AdapterSettings, parse_loss_table
from prime_composer.upstream.versions.toml_shapes import HEADER


@pytest.fixture(autouse=True)
def switched_on(monkeypatch):
    """Turn the adapter on; ``resolve`` rewrites the variable."""
    monkeypatch.setenv(SWITCH, "1")


def launcher_config(table=None, replay=False, path=IMPORT_PATH, **orchestrator):
    """Return prime-rl's config with a loss table in [trainer.loss.kwargs]."""
    loss = types.SimpleNamespace()
    if table is not None:
        loss = types.SimpleNamespace(import_path=path, kwargs=table)
    model = types.SimpleNamespace(name="a/model")
    trainer = types.SimpleNamespace(loss=loss, enable_router_replay=replay, model=model)
    return types.SimpleNamespace(
        trainer=trainer, orchestrator=types.SimpleNamespace(**orchestrator)
    )


def resolved(**settings):
    """Return settings as the launcher passes them on, with the student of ``launcher_config``."""
    return AdapterSettings(student_tokenizer="a/model", **settings)


BOTH = {"type": "topk_reverse_kl", "k": 2, "rl_mix": {"kd": 0.5}}


SAMPLED = {"type": "sampled_reverse_kl"}
IN_FILE = {
    "a loss of rewards": ({**BOTH, "k": "2"}, {"k": 2, "reads_rewards": True}),
    "settings": ({**SAMPLED, "adapter": "true", "head_on": "cpu"},
                 {"k": 0, "teachers_mixed": True, "head_on": "cpu"}),
    "tokenizers": ({**SAMPLED, "teacher_tokenizers": {"m3": "d"}},
                   {"k": 0, "teacher_tokenizers": {"m3": "d"}}),
}  # fmt: skip
"""What [trainer.loss.kwargs] has: a table, and what the launcher passes on beside the loss."""


@pytest.mark.parametrize("name", IN_FILE)
def test_resolve_passes_the_loss_of_the_file_on(name):
    """The file keeps all, so that a trainer without the adapter refuses the run."""
    table, expected = IN_FILE[name]
    config = launcher_config(dict(table))
    launcher_hook.resolve_settings(config)
    own = {"adapter", "head_on", "teacher_tokenizers"}
    loss = {key: value for key, value in table.items() if key not in own}
    assert AdapterSettings.from_env() == resolved(loss=loss, **expected)
    assert config.trainer.loss.kwargs == table


@pytest.mark.parametrize("key,texts", [("special_tokens", "strings"), ("stops", "texts")])
def test_resolve_writes_tokens_as_ids(monkeypatch, key, texts):
    """The launcher has the tokenizer, the trainer's loss has not. Channels have their own."""
    transformers = types.ModuleType("transformers")
    tokenizer = types.SimpleNamespace(encode=lambda text, add_special_tokens: [42])
    transformers.AutoTokenizer = types.SimpleNamespace(from_pretrained=lambda name: tokenizer)
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    channel = {**SAMPLED, key: {texts: ["<think>"]}}
    table = {"type": "compose", "distillation": {"a": {"weight": 1.0, "loss": channel}}}
    for given, place in (({**channel, "adapter": True}, ()), (table, ("distillation", "a"))):
        monkeypatch.setenv(SWITCH, "1")
        config = launcher_config(given)
        launcher_hook.resolve_settings(config)
        assert config.trainer.loss.kwargs.pop("adapter", None) is (None if place else True)
        for loss in (config.trainer.loss.kwargs, AdapterSettings.from_env().loss):
            read = parse_loss_table(loss)
            inner = read.distillation["a"].loss if place else read
            assert getattr(inner, key).ids == (42,) and getattr(getattr(inner, key), texts) == ()


@pytest.mark.parametrize(
    "path,words",
    [
        ("somebody.elses", "names no loss.*unset PRIME_COMPOSER"),
        ("prime_composer.nothing", f"did you mean .{IMPORT_PATH}"),
        ("prime_compser.upstream.loss_fn", f"did you mean .{IMPORT_PATH}"),
    ],
)
def test_resolve_refuses_a_run_without_a_loss_of_ours(path, words):
    """It would train prime-rl's own losses, and the variable says that ours are wanted."""
    with pytest.raises(ValueError, match=words):
        launcher_hook.resolve_settings(launcher_config({"type": "sampled_reverse_kl"}, path=path))
    with pytest.raises(ValueError, match="names no loss"):
        launcher_hook.resolve_settings(launcher_config())


def test_resolve_refuses_two_tables_that_disagree():
    launcher_hook.resolve_settings(launcher_config({"type": "topk_reverse_kl", "k": 2}))
    launcher_hook.resolve_settings(launcher_config({"type": "topk_reverse_kl", "k": "2"}))
    with pytest.raises(ValueError, match="keep one of them"):
        launcher_hook.resolve_settings(launcher_config({"type": "topk_reverse_kl", "k": 4}))


FULL = {"type": "topk_reverse_kl", "k": "full"}
OTHERS = [
    {"url": "http://a", "model": "a", "weight": 1.0},
    {"url": "http://b", "model": "b", "weight": 3.0},
]


def client(url="http://host:8001/v1", headers=(), **changes):
    """Return prime-rl's config of a teacher's client."""
    fields = {"base_url": url, "api_key_var": "KEY", "headers": dict(headers), **changes}
    return types.SimpleNamespace(**fields)


def teaching(**clients):
    """Return an orchestrator with a teacher for each environment."""
    environments = []
    for name, of_client in clients.items():
        of_client.name = "t"
        algorithm = types.SimpleNamespace(type="opd", teacher=of_client)
        environments.append(types.SimpleNamespace(resolved_name=name, algo=algorithm))
    rl = types.SimpleNamespace(resolved_name="rl", algo=types.SimpleNamespace(type="grpo"))
    return {"algo": None, "train": types.SimpleNamespace(source=[*environments, rl])}


ONE = [{"url": "http://host:8001/v1", "model": "t", "weight": 1.0, "api_key_var": "KEY"}]
MIXED = {HEADER: json.dumps(OTHERS)}


def test_resolve_reads_the_teachers_for_the_trainer():
    """With the adapter's header in the place of one client."""
    orchestrator = teaching(x=client(), y=client(headers=MIXED))
    launcher_hook.resolve_settings(launcher_config(FULL, **orchestrator))
    settings = AdapterSettings.from_env()
    assert settings.asked_by == "trainer" and settings.teachers == {"x": ONE, "y": OTHERS}


@pytest.mark.parametrize(
    "orchestrator,message",
    [
        (teaching(x=client(dynamo=types.SimpleNamespace(enabled=True))), "'x' has dynamo"),
        (teaching(x=client(headers_from_env={"A": "B"})), "has the headers A"),
    ],
)
def test_resolve_refuses_teachers_the_trainer_cannot_ask(orchestrator, message):
    with pytest.raises(ValueError, match=message):
        launcher_hook.resolve_settings(launcher_config(FULL, **orchestrator))


TOP = {"type": "topk_reverse_kl", "k": 2}


def in_env_vars(value, path="env_vars", table=TOP):
    """Return a launcher's config with the variable in one of prime-rl's own tables."""
    config = launcher_config(table)
    owner = config if path == "env_vars" else getattr(config, path.partition(".")[0])
    owner.env_vars = {SWITCH: value, "OTHER": "x"}
    return config, owner.env_vars


@pytest.mark.parametrize("path", ["env_vars", "orchestrator.env_vars"])
@pytest.mark.parametrize("value", ["1", json.dumps({"loss": TOP})])
def test_resolve_reads_env_vars_and_takes_them_out(path, value):
    """They override what the launcher resolves, and under Slurm JSON loses its quotes in them."""
    config, table = in_env_vars(value, path)
    launcher_hook.resolve_settings(config)
    assert AdapterSettings.from_env() == resolved(loss=TOP, k=2)
    assert table == {"OTHER": "x"}


@pytest.mark.parametrize("value", ["0", json.dumps({"loss": {**TOP, "k": 3}})])
def test_resolve_refuses_env_vars_that_contradict(monkeypatch, value):
    monkeypatch.setenv(SWITCH, json.dumps({"loss": TOP}))
    config, _ = in_env_vars(value, "trainer.env_vars", table=None)
    with pytest.raises(ValueError, match=r"\[trainer.env_vars\] PRIME_COMPOSER.*keep one of them"):
        launcher_hook.resolve_settings(config)


def test_launcher_refuses_in_one_line(monkeypatch):
    """A user sees the sentence, without prime-rl's traceback and without a password."""
    module = types.SimpleNamespace(cli=lambda config: config)
    launcher_hook.hook_config(module)
    monkeypatch.setenv(SWITCH, json.dumps({"student_tokenizer": "http://me:secret@host"}))
    with pytest.raises(SystemExit, match="^prime_composer: .*names no loss") as refusal:
        module.cli(launcher_config())
    assert refusal.value.__cause__ is None and "\n" not in str(refusal.value)
    assert "secret" not in str(refusal.value)


def cleaning(output_dir, resume_step):
    """Stand for prime-rl's function that cleans a run directory."""


@pytest.mark.parametrize("shared", [True, False])
def test_launch_hands_a_file_on_also_to_a_job_script(tmp_path, capfd, shared):
    """No shell, template or TOML changes it. The script ends where the package is missing."""
    module = types.ModuleType("prime_rl.utils.pathing")
    module.clean_future_steps = cleaning
    launcher_hook.hook_run_dir(module)
    config = launcher_config(TOP)
    install = "srun uv pip install PATH"
    slurm = {"pre_run_command": install, "shared_fs": shared, "template_path": None}
    config.slurm = types.SimpleNamespace(**slurm)
    config.dry_run = True
    launcher_hook.resolve_settings(config)
    module.clean_future_steps(tmp_path / "run", -1)
    value = os.environ[SWITCH]
    assert value.startswith("@") and AdapterSettings.from_env() == resolved(loss=TOP, k=2)
    file = launches.own() / launches.SETTINGS
    assert value == f"@{file}" and file.stat().st_mode & 0o777 == 0o600
    first, last, guard = config.slurm.pre_run_command.splitlines()
    assert first == install and last == f"export PRIME_COMPOSER={value}"
    assert guard.startswith("srun") is not shared and guard.endswith("|| exit 1")
    assert last in capfd.readouterr().err
    module.clean_future_steps(tmp_path / "another", -1)  # of a process that is no launcher
    assert not (tmp_path / "another").exists()


def test_launch_refuses_a_resume_from_foreign_steps(monkeypatch, tmp_path):
    """A launch that trained without a mark of its trainer has trained another loss."""
    monkeypatch.setenv(SWITCH, f"@{launches.begin(tmp_path, '{}')}")
    (tmp_path / "checkpoints" / "step_4").mkdir(parents=True)
    with pytest.raises(ValueError, match="trained.*earlier checkpoint"):
        launcher_hook.hand_on(launcher_config(TOP), tmp_path, 4)
    launcher_hook.hand_on(launcher_config(TOP), tmp_path, 2)
