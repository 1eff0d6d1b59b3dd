"""prime-rl's launcher: the settings are resolved once, and a wrong run ends before it starts."""

import json
import os
import sys
import types

import pytest

from prime_composer.upstream import launcher_hook, launches
from prime_composer.upstream.settings import (
    IMPORT_PATH,
    SWITCH,
    AdapterSettings,
    parse_loss_table,
)
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


def test_resolve_passes_on_that_the_loss_reads_rewards():
    launcher_hook.resolve(launcher_config(BOTH))
    assert AdapterSettings.from_env() == resolved(loss=BOTH, k=2, rewards="in_loss")


def test_resolve_refuses_rewards_and_teacher_outside_the_file(monkeypatch):
    """Its tokens are rl tokens, which [trainer.loss] is called on."""
    monkeypatch.setenv(SWITCH, json.dumps({"loss": BOTH}))
    with pytest.raises(ValueError, match="reads rewards and a teacher.*into .trainer.loss."):
        launcher_hook.resolve(launcher_config())


def test_resolve_passes_two_streams_on(monkeypatch):
    """prime-rl's own rl loss beside ours, for the same tokens."""
    table = {"type": "topk_reverse_kl", "k": 2}
    monkeypatch.setenv(SWITCH, json.dumps({"loss": table, "rewards": "beside"}))
    launcher_hook.resolve(launcher_config())
    assert AdapterSettings.from_env() == resolved(loss=table, k=2, rewards="beside")
    with pytest.raises(ValueError, match="and this run names ours there"):
        launcher_hook.resolve(launcher_config(table))


def test_resolve_passes_the_files_loss_and_k_on():
    launcher_hook.resolve(launcher_config({"type": "topk_reverse_kl", "k": "16"}))
    assert json.loads(os.environ[SWITCH]) == {
        "loss": {"type": "topk_reverse_kl", "k": "16"},
        "k": 16,
        "teachers_mixed": False,
        "rewards": None,
        "asked_by": None,
        "head_on": None,
        "teachers": None,
        "student_tokenizer": "a/model",
    }


def test_resolve_splits_the_file_key_off_and_keeps_it_there():
    """The trainer's own config keeps it, so that a trainer without the adapter refuses the run."""
    config = launcher_config({"type": "sampled_reverse_kl", "adapter": "true"})
    launcher_hook.resolve(config)
    settings = AdapterSettings.from_env()
    assert settings == resolved(loss={"type": "sampled_reverse_kl"}, k=0, teachers_mixed=True)
    assert config.trainer.loss.kwargs["adapter"] == "true"


def test_resolve_accepts_the_loss_in_the_environment(monkeypatch):
    table = {"type": "topk_reverse_kl", "k": 3}
    monkeypatch.setenv(SWITCH, json.dumps({"loss": table}))
    launcher_hook.resolve(launcher_config())
    assert AdapterSettings.from_env() == resolved(loss=table, k=3)


def test_resolve_writes_special_tokens_as_ids(monkeypatch):
    """The launcher has the tokenizer, the trainer's loss has not."""
    transformers = types.ModuleType("transformers")
    tokenizer = types.SimpleNamespace(
        encode=lambda text, add_special_tokens: {"<think>": [42]}[text]
    )
    transformers.AutoTokenizer = types.SimpleNamespace(from_pretrained=lambda name: tokenizer)
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    special_tokens = {"strings": ["<think>"]}
    table = {"type": "topk_reverse_kl", "k": 2, "special_tokens": special_tokens, "adapter": True}
    config = launcher_config(table)
    launcher_hook.resolve(config)
    in_file = {key: value for key, value in config.trainer.loss.kwargs.items() if key != "adapter"}
    for resolved in (in_file, AdapterSettings.from_env().loss):
        assert parse_loss_table(resolved).special_tokens.ids == (42,)
        assert parse_loss_table(resolved).special_tokens.strings == ()
    assert config.trainer.loss.kwargs["adapter"] is True
    assert AdapterSettings.from_env().teachers_mixed


@pytest.mark.parametrize("key,texts", [("special_tokens", "strings"), ("stops", "texts")])
def test_resolve_writes_ids_in_nested_tables(monkeypatch, key, texts):
    """Each channel of a sum has modifiers of its own."""
    transformers = types.ModuleType("transformers")
    tokenizer = types.SimpleNamespace(encode=lambda text, add_special_tokens: [42])
    transformers.AutoTokenizer = types.SimpleNamespace(from_pretrained=lambda name: tokenizer)
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    channel = {"type": "sampled_reverse_kl", key: {texts: ["<think>"]}}
    table = {"type": "compose", "distillation": {"a": {"weight": 1.0, "loss": channel}}}
    launcher_hook.resolve(launcher_config(table))
    settings = AdapterSettings.from_env()
    loss = parse_loss_table(settings.loss).distillation["a"].loss
    assert getattr(loss, key).ids == (42,)
    assert settings.loss["distillation"]["a"]["loss"][key][texts] == []


@pytest.mark.parametrize(
    "path,words",
    [
        ("somebody.elses", "names no loss.*unset PRIME_COMPOSER"),
        ("prime_composer.upstream.lossfn", f"did you mean .{IMPORT_PATH}"),
        ("prime_composer.nothing", f"did you mean .{IMPORT_PATH}"),
        ("prime_compser.upstream.loss_fn", f"did you mean .{IMPORT_PATH}"),
    ],
)
def test_resolve_refuses_a_run_without_a_loss_of_ours(path, words):
    """It would train prime-rl's own losses, and the variable says that ours are wanted."""
    with pytest.raises(ValueError, match=words):
        launcher_hook.resolve(launcher_config({"type": "sampled_reverse_kl"}, path=path))
    with pytest.raises(ValueError, match="names no loss"):
        launcher_hook.resolve(launcher_config())


def test_resolve_leaves_processes_without_a_trainer_alone():
    """Env servers and the orchestrator parse their own configs through the same function."""
    launcher_hook.resolve(types.SimpleNamespace())
    assert os.environ[SWITCH] == "1"


def test_resolve_refuses_a_loss_of_rl_tokens_outside_the_file(monkeypatch):
    monkeypatch.setenv(SWITCH, json.dumps({"loss": {"type": "default"}}))
    message = f'a loss of rl tokens.* import_path = "{IMPORT_PATH}"'
    with pytest.raises(ValueError, match=message):
        launcher_hook.resolve(launcher_config())


def test_resolve_refuses_two_tables_that_disagree():
    launcher_hook.resolve(launcher_config({"type": "topk_reverse_kl", "k": 2}))
    launcher_hook.resolve(launcher_config({"type": "topk_reverse_kl", "k": "2"}))
    with pytest.raises(ValueError, match="keep one of them"):
        launcher_hook.resolve(launcher_config({"type": "topk_reverse_kl", "k": 4}))


def test_resolve_refuses_router_replay_with_a_support():
    with pytest.raises(ValueError, match='asked_by = "trainer".*enable_router_replay = false'):
        launcher_hook.resolve(launcher_config({"type": "topk_reverse_kl", "k": 2}, replay=True))
    launcher_hook.resolve(launcher_config({"type": "sampled_reverse_kl"}, replay=True))


def sampled_with(**sampling):
    """Return an orchestrator whose one source has sampling settings, as prime-rl types them."""
    source = types.SimpleNamespace(sampling=types.SimpleNamespace(**sampling))
    return types.SimpleNamespace(
        sampling=types.SimpleNamespace(top_p=1.0, top_k=None), source=[source]
    )


@pytest.mark.parametrize("k", [2, "full"])
@pytest.mark.parametrize("key,value", [("top_p", 0.9), ("top_k", 50)])
def test_resolve_refuses_sampling_replay_with_whole_rows(k, key, value):
    """The trainer's log-probs would be over the ids that were kept, the teacher's over all."""
    table = {"type": "topk_reverse_kl", "k": k, "normalization": "full"}
    if k == 2:
        del table["normalization"]
    config = launcher_config(table, train=sampled_with(**{key: value}))
    (source,) = config.orchestrator.train.source
    (taught, _) = teaching(x=client())["train"].source
    source.resolved_name, source.algo = taught.resolved_name, taught.algo
    with pytest.raises(
        ValueError, match=rf"leave out orchestrator.train.source\[0\].sampling.{key}"
    ):
        launcher_hook.resolve(config)
    config = launcher_config({"type": "sampled_reverse_kl"}, train=sampled_with(**{key: value}))
    launcher_hook.resolve(config)


def test_resolve_refuses_the_masks_of_a_server():
    config = launcher_config({"type": "topk_reverse_kl", "k": 2})
    config.inference = types.SimpleNamespace(enable_return_sampling_mask=True)
    with pytest.raises(ValueError, match="leave out inference.enable_return_sampling_mask"):
        launcher_hook.resolve(config)


def test_resolve_finds_the_algorithm_below_train():
    """A newer prime-rl has orchestrator.train.algo; two streams need it, one loss its file."""
    train = types.SimpleNamespace(algo={"type": "opd"}, min_abs_advantage=0.0)
    launcher_hook.resolve(launcher_config(BOTH, train=train))
    train.min_abs_advantage = 0.01
    with pytest.raises(ValueError, match="min_abs_advantage = 0.01 .* set it to 0"):
        launcher_hook.resolve(launcher_config(BOTH, train=train))


def test_resolve_refuses_a_least_advantage_of_a_source():
    """prime-rl's main has the key in each source, and none for all of them."""
    sources = [types.SimpleNamespace(), types.SimpleNamespace(min_abs_advantage=0.02)]
    train = types.SimpleNamespace(algo={"type": "opd"}, source=sources)
    with pytest.raises(ValueError, match=r"train.source\[1\].min_abs_advantage = 0.02"):
        launcher_hook.resolve(launcher_config(BOTH, train=train))


def test_resolve_passes_two_streams_on_below_train(monkeypatch):
    table = {"type": "topk_reverse_kl", "k": 2}
    monkeypatch.setenv(SWITCH, json.dumps({"loss": table, "rewards": "beside"}))
    train = types.SimpleNamespace(algo={"type": "opd"})
    launcher_hook.resolve(launcher_config(train=train))
    assert AdapterSettings.from_env().rewards == "beside"


def test_resolve_refuses_experts_that_the_server_sends():
    """head has vLLM's options in a table of their own."""
    for inference in (
        types.SimpleNamespace(enable_return_routed_experts=True),
        types.SimpleNamespace(vllm=types.SimpleNamespace(enable_return_routed_experts=True)),
    ):
        config = launcher_config({"type": "topk_reverse_kl", "k": 2})
        config.inference = inference
        with pytest.raises(ValueError, match=r"inference\.\S*experts = false"):
            launcher_hook.resolve(config)


FULL = {"type": "topk_reverse_kl", "k": "full"}


@pytest.mark.parametrize("key", ["fsdp_cpu_offload", "full_offload"])
def test_resolve_refuses_a_head_on_the_cpu_for_full(monkeypatch, key):
    """The loss uses it after the forward. A number k, and other offloading, are fine."""
    config = launcher_config(FULL, **teaching(x=client()))
    setattr(config.trainer.model, key, True)
    with pytest.raises(ValueError, match=rf"trainer\.model\.{key} keeps it.*a number k"):
        launcher_hook.resolve(config)
    setattr(config.trainer.model, key, False)
    config.trainer.model.optim_cpu_offload = True
    launcher_hook.resolve(config)
    monkeypatch.setenv(SWITCH, "1")
    top = launcher_config({"type": "topk_reverse_kl", "k": 2})
    setattr(top.trainer.model, key, True)
    launcher_hook.resolve(top)


OTHERS = [
    {"url": "http://a", "model": "a", "weight": 1.0},
    {"url": "http://b", "model": "b", "weight": 3.0},
]


def client(url="http://host:8001/v1", headers=(), **changes):
    """Return prime-rl's config of a teacher's client."""
    fields = {"base_url": url, "api_key_var": "KEY", "headers": dict(headers), **changes}
    return types.SimpleNamespace(**fields)


def teaching(kind="opd", **clients):
    """Return an orchestrator with a teacher for each environment."""
    environments = []
    for name, of_client in clients.items():
        of_client.name = "t"
        algorithm = types.SimpleNamespace(type=kind, teacher=of_client)
        environments.append(types.SimpleNamespace(resolved_name=name, algo=algorithm))
    rl = types.SimpleNamespace(resolved_name="rl", algo=types.SimpleNamespace(type="grpo"))
    return {"algo": None, "train": types.SimpleNamespace(source=[*environments, rl])}


ONE = [{"url": "http://host:8001/v1", "model": "t", "weight": 1.0, "api_key_var": "KEY"}]
MIXED = {HEADER: json.dumps(OTHERS)}


def test_resolve_reads_the_teachers_for_the_trainer():
    """With the adapter's header in the place of one client."""
    orchestrator = teaching(x=client(), y=client(headers=MIXED))
    launcher_hook.resolve(launcher_config(FULL, **orchestrator))
    settings = AdapterSettings.from_env()
    assert settings.asked_by == "trainer" and settings.teachers == {"x": ONE, "y": OTHERS}


@pytest.mark.parametrize(
    "orchestrator,message",
    [
        (teaching(x=client(dynamo=types.SimpleNamespace(enabled=True))), "'x' has dynamo"),
        (teaching(x=client(headers={"X-Team": "1"})), "the teacher of 'x' has the headers X-Team"),
        (teaching(x=client(headers_from_env={"A": "B"})), "has the headers A"),
        (teaching(kind="opsd", x=client()), "'x' has the algorithm opsd.*a number k"),
    ],
)
def test_resolve_refuses_teachers_the_trainer_cannot_ask(orchestrator, message):
    with pytest.raises(ValueError, match=message):
        launcher_hook.resolve(launcher_config(FULL, **orchestrator))


def test_resolve_lets_router_replay_be_where_the_trainer_asks():
    """The answers are not sent in its field."""
    table = {"type": "topk_reverse_kl", "k": 2, "asked_by": "trainer"}
    launcher_hook.resolve(launcher_config(table, replay=True, **teaching(x=client())))
    settings = AdapterSettings.from_env()
    assert (settings.k, settings.asked_by, settings.teachers) == (2, "trainer", {"x": ONE})


def test_hook_config_resolves_what_cli_returns():
    module = types.ModuleType("prime_rl.utils.config")
    config = launcher_config({"type": "topk_reverse_kl", "k": 2})
    module.cli = lambda cls, args=None: config
    launcher_hook.hook_config(module)
    assert module.cli(object, args=[]) is config
    assert AdapterSettings.from_env().k == 2


TOP = {"type": "topk_reverse_kl", "k": 2}


def in_env_vars(value, path="env_vars", table=TOP):
    """Return a launcher's config with the variable in one of prime-rl's own tables."""
    config = launcher_config(table)
    owner = config if path == "env_vars" else getattr(config, path.partition(".")[0])
    owner.env_vars = {SWITCH: value, "OTHER": "x"}
    return config, owner.env_vars


@pytest.mark.parametrize("path", ["env_vars", "trainer.env_vars", "orchestrator.env_vars"])
@pytest.mark.parametrize("value", ["1", json.dumps({"loss": TOP})])
def test_resolve_reads_env_vars_and_takes_them_out(path, value):
    """They override what the launcher resolves, and under Slurm JSON loses its quotes in them."""
    config, table = in_env_vars(value, path)
    launcher_hook.resolve(config)
    assert AdapterSettings.from_env() == resolved(loss=TOP, k=2)
    assert table == {"OTHER": "x"}


@pytest.mark.parametrize("value", ["0", json.dumps({"loss": {**TOP, "k": 3}})])
def test_resolve_refuses_env_vars_that_contradict(monkeypatch, value):
    monkeypatch.setenv(SWITCH, json.dumps({"loss": TOP}))
    config, _ = in_env_vars(value, "trainer.env_vars", table=None)
    with pytest.raises(ValueError, match=r"\[trainer.env_vars\] PRIME_COMPOSER.*keep one of them"):
        launcher_hook.resolve(config)


def test_launcher_refuses_in_one_line(monkeypatch):
    """A user sees the sentence, without prime-rl's traceback and without a password."""
    module = types.SimpleNamespace(cli=lambda config: config)
    launcher_hook.hook_config(module)
    monkeypatch.setenv(SWITCH, json.dumps({"student_tokenizer": "http://me:secret@host"}))
    with pytest.raises(SystemExit, match="^prime_composer: .*names no loss") as refusal:
        module.cli(launcher_config())
    assert refusal.value.__cause__ is None and "\n" not in str(refusal.value)
    assert "secret" not in str(refusal.value)


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
        ({"pre_run_command": "sudo pkill vllm"}, "uv pip install"),
        ({"pre_run_command": "uv pip install PATH"}, None),
        ({"pre_run_command": "uv add PATH"}, None),
        ({"pre_run_command": "uv pip install PATH", "shared_fs": False}, "srun .*uv pip install"),
        ({"pre_run_command": "srun -n 2 uv pip install PATH", "shared_fs": False}, None),
        ({"template": "uv sync --inexact"}, None),
        ({"template": "# no uv sync here"}, None),
        ({"lock": '[[package]]\nname = "prime-composer"\n'}, None),
    ],
)
def test_resolve_refuses_a_job_script_without_us(tmp_path, how, remedy):
    """prime-rl's `uv sync` removes what prime-rl does not lock, and nobody would say so."""
    config = launcher_config(TOP)
    config.slurm = slurm_of(tmp_path, **how)
    if remedy is None:
        launcher_hook.resolve(config)
        return
    with pytest.raises(ValueError, match=rf"\[slurm\].*removes.*pre_run_command = .{remedy}"):
        launcher_hook.resolve(config)


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
    config.slurm = slurm_of(tmp_path, pre_run_command=install, shared_fs=shared)
    config.dry_run = True
    launcher_hook.resolve(config)
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
        launcher_hook.begin(launcher_config(TOP), tmp_path, 4)
    launcher_hook.begin(launcher_config(TOP), tmp_path, 2)
