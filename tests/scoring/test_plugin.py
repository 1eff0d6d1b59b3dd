"""Where the plugin enters vLLM, and where it does nothing at all."""

import importlib
import json
import os
import subprocess
import sys
import types

import pytest

from prime_composer.cli import teacher
from prime_composer.scoring import patches
from prime_composer.scoring.patches import UnknownVllm, patch
from prime_composer.scoring.runners import FINGERPRINT

RUNNER = "vllm.v1.worker.gpu_model_runner"


def python(code, plugins=None):
    env = {key: value for key, value in os.environ.items() if key != "VLLM_PLUGINS"}
    if plugins is not None:
        env["VLLM_PLUGINS"] = plugins
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("plugins", [None, "prime_composer_2,lora"])
def test_install_does_nothing_where_it_is_not_named(plugins):
    """Not even an import. vLLM loads general plugins everywhere where the variable is unset."""
    code = "import sys; from prime_composer.scoring.plugin import install; install(); "
    code += "print(sorted({'torch', 'msgspec', 'vllm', 'prime_composer.scoring.patches'} & "
    code += "set(sys.modules)), [f for f in sys.meta_path if 'prime' in type(f).__module__])"
    done = python(code, plugins)
    assert (done.stdout, done.stderr, done.returncode) == ("[] []\n", "", 0)


def module_like(name, **classes):
    made = types.ModuleType(name)
    vars(made).update(classes)
    return made


def test_unknown_layout_is_refused_by_name():
    class GPUModelRunner:
        def _get_prompt_logprobs_dict(self, hidden_states):
            """Another vLLM's."""

    with pytest.raises(UnknownVllm) as error:
        patch(module_like(RUNNER, GPUModelRunner=GPUModelRunner))
    message = str(error.value)
    assert "_get_prompt_logprobs_dict(self, hidden_states, num_scheduled_tokens)" in message
    assert "vLLM 0.26 to 0.33" in message and "VLLM_PLUGINS" in message
    with pytest.raises(UnknownVllm):
        patch(module_like(RUNNER))


def test_module_is_patched_after_its_import_and_once(tmp_path, monkeypatch):
    """The runner's module is not imported for it."""
    calls = []
    (tmp_path / "late_runner.py").write_text("class Runner:\n    def work(self, x): return x\n")
    known = patches.Patch(calls.append, {"Runner.work": ("self", "x")})
    monkeypatch.setattr(patches, "PATCHES", {"late_runner": known})
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    for _ in range(2):  # an engine in this process may have installed it before
        patches.install_patches()
    assert sum(isinstance(finder, patches._AfterImport) for finder in sys.meta_path) == 1
    assert calls == [] and "late_runner" not in sys.modules
    import late_runner  # type: ignore[import-not-found]

    assert calls == [late_runner]
    patches.install_patches()
    assert calls == [late_runner]
    monkeypatch.delitem(sys.modules, "late_runner")


def test_modules_of_a_namespace_package_are_imported_beside_the_finder(tmp_path, monkeypatch):
    """Their path is no sequence; wandb has such packages."""
    (tmp_path / "a_namespace").mkdir()
    (tmp_path / "a_namespace" / "a_module.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [patches._AfterImport(), *sys.meta_path])
    for name in ("a_namespace.a_module", "a_namespace"):
        assert importlib.import_module(name)
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize("method", ["load_model", "reload_weights", "update_weights", "wake_up"])
def test_fingerprint_is_another_one_after_each_load(method):
    """Also after one that failed in the middle."""

    class Worker:
        def __init__(self):
            self.model_runner = types.SimpleNamespace()

        def load(self, fails=False):
            if fails:
                raise RuntimeError("half of the weights")
            return "loaded"

    setattr(Worker, method, Worker.load)
    patches.patch_loads(module_like("gpu_worker", Worker=Worker))
    worker = Worker()
    assert getattr(worker, method)() == "loaded"
    names = [getattr(worker.model_runner, FINGERPRINT)]
    with pytest.raises(RuntimeError, match="half"):
        getattr(worker, method)(fails=True)
    names.append(getattr(worker.model_runner, FINGERPRINT))
    another = Worker()
    getattr(another, method)()
    names.append(getattr(another.model_runner, FINGERPRINT))
    assert len({*names}) == 3


def command(*options, monkeypatch):
    monkeypatch.setattr(teacher, "find_spec", lambda name: object())
    words = teacher.server_command("a/model", "127.0.0.1", 8001, options)
    assert words[-len(options) :] == list(options) or not options
    return words


def test_server_command_adds_what_scores_need(monkeypatch):
    """Any K, and no line per sequence in the access log; what the user says comes last."""
    words = command(monkeypatch=monkeypatch)
    for option, value in (
        ("--model", "a/model"),
        ("--host", "127.0.0.1"),
        ("--port", "8001"),
        ("--max-logprobs", "-1"),
        ("--disable-access-log-for-endpoints", "/v1/prime_composer/score"),
    ):
        assert words[words.index(option) + 1] == value
    words = command("--max-logprobs=64", "--disable-uvicorn-access-log", monkeypatch=monkeypatch)
    assert "-1" not in words and "--disable-access-log-for-endpoints" not in words


HF = "--hf-overrides"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], {"head_dtype": "float32"}),
        ([HF, '{"a": 1}'], {"head_dtype": "float32", "a": 1}),
        (["--hf_overrides", '{"head_dtype": "model"}'], {"head_dtype": "model"}),
        ([f'{HF}={{"head_dtype": "bfloat16"}}', "--x"], {"head_dtype": "bfloat16"}),
        (["--config", "a.yaml"], None),  # a file's option would be replaced
    ],
)
def test_teachers_server_has_a_float32_head(options, said, monkeypatch):
    """The user's own option wins, and their other overrides stay."""
    monkeypatch.setattr(teacher, "find_spec", lambda name: object())
    words = teacher.server_command("m", "h", 1, options)
    places = [i for i, word in enumerate(words) if "hf" in word]
    assert [json.loads(words[place + 1]) for place in places] == ([] if said is None else [said])
    assert words.count("--x") == options.count("--x")


@pytest.mark.parametrize("own", [["--hf_overrides.a.b", "1"], [f"{HF}.head_dtype=model"]])
def test_dotted_overrides_keep_the_float32_head(own, monkeypatch):
    """vLLM's parser joins what is dotted, the last one last, and drops the table beside it."""
    words = command(*own, monkeypatch=monkeypatch)
    assert HF not in words and words[words.index(f"{HF}.head_dtype") + 1] == "float32"


def test_server_environment_keeps_the_plugins_that_are_named():
    named = teacher.server_environment({"VLLM_PLUGINS": "prime_rl,prime_composer"})
    assert named == {"VLLM_PLUGINS": "prime_composer,prime_rl"}
    found = teacher.server_environment({})["VLLM_PLUGINS"].split(",")
    assert found[0] == "prime_composer" and found.count("prime_composer") == 1
