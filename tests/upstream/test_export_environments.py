"""Export environments of verifiers by id: their shape, and what is refused.

The expected tables are written from prime-rl's own config classes and recipes.
``test_prime_rl_reads_environments_by_id`` gives them to those classes.
"""

import subprocess
import sys

import pytest
import tomli_w

from prime_composer.recipe.loading import load_recipe, parse_recipe
from prime_composer.upstream.export import export_recipe
from prime_composer.upstream.versions.records import VERSIONS
from tests.prime_rl_checkout import REPO
from tests.upstream.export_recipes import TWO, tables

AGENT = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}


def raw(environments=None, **changes):
    """Return a recipe with one environment by id, or with others."""
    table = {**tables(), **changes}
    del table["data"]
    rev = {"id": "reverse-text", "args": {"num_examples": 100}}
    table["environments"] = {"rev": rev} if environments is None else environments
    return table


def exported(version, environments=None, **changes):
    """Return [orchestrator] of an export."""
    return export_recipe(parse_recipe(raw(environments, **changes)), version).table["orchestrator"]


def trained(version, environments=None, **changes):
    """Return the environments to train on, by name."""
    train = exported(version, environments, **changes)["train"]
    return {entry["name"]: entry for entry in train["source"]}


@pytest.mark.parametrize("version", VERSIONS)
def test_environment_by_id_is_a_source_with_an_agent(version):
    shape = {"env": {"taskset": {"id": "reverse-text", "num_examples": 100}, "agent": AGENT}}
    assert trained(version) == {"rev": {"name": "rev", "ratio": 1.0, **shape}}


@pytest.mark.parametrize("version", VERSIONS)
def test_limits_of_a_rollout_are_prime_rls_own(version):
    """Turns and seconds."""
    entry = trained(version, {"e": {"id": "x", "timeout": 60, "max_turns": 4}})["e"]
    assert entry["env"]["agent"] == {**AGENT, "max_turns": 4, "timeout": {"rollout": 60.0}}


@pytest.mark.parametrize("version", VERSIONS)
def test_native_settings_of_an_environment_win(version):
    """A table named after a version counts for that version alone."""
    native = {"group_size": 3, "v0_9": {"max_retries": 1}, "head": {"serve": {"max_concurrent": 2}}}
    entry = trained(version, {"rev": {"id": "x", "ratio": 2.0, "prime_rl": native}})["rev"]
    assert entry["group_size"] == 3 and entry["ratio"] == 2.0
    assert ("max_retries" in entry) == (version == "v0.9")
    assert ("serve" in entry) == (version == "head")
    assert not entry.keys() & {*VERSIONS, "v0_9"}


def test_native_harness_replaces_the_plain_chat():
    """`[environments.NAME.prime_rl]` is merged table by table."""
    native = {"env": {"agent": {"harness": {"id": "bash"}}}}
    entry = trained("head", {"rev": {"id": "x", "prime_rl": native}})["rev"]
    assert entry["env"]["agent"] == {"harness": {"id": "bash"}, "runtime": {"type": "subprocess"}}
    assert entry["env"]["taskset"] == {"id": "x"}


USES = {
    "a": {"id": "x", "args": {"split": "train"}, "use": "train"},
    "b": {"id": "x", "args": {"split": "test"}, "use": "eval"},
    "c": {"id": "y", "prime_rl": {"group_size": 2}},
    "sums": {"size": 40},
}


@pytest.mark.parametrize("version", VERSIONS)
def test_use_divides_training_from_evaluation(version):
    """Problems are in both, and their share of the evaluation's size counts those evaluated."""
    orchestrator = exported(version, USES, eval={"every": 2, "size": 90})
    assert [entry["name"] for entry in orchestrator["train"]["source"]] == ["a", "c", "sums"]
    evaluated = {entry["name"]: entry for entry in orchestrator["eval"]["source"]}
    assert list(evaluated) == ["b", "c", "sums"]
    size = {"select": {"limit": 30}} if version == "main" else {"num_examples": 30}
    assert {key: orchestrator["eval"].get(key) for key in size} == size
    assert ("num_examples" in orchestrator["eval"]) is (version != "main")
    assert evaluated["c"]["group_size"] == 2
    assert evaluated["b"]["env"]["taskset"]["split"] == "test"


@pytest.mark.parametrize("version", VERSIONS)
def test_environment_by_id_has_its_own_teacher(version):
    """As an environment of problems has. One for evaluation alone has none."""
    environments = {
        "rev": {"id": "x", "teacher": "a"},
        "sums": {"teacher": "b"},
        "test": {"id": "x", "use": "eval", "teacher": "b"},
    }
    changes = {"teachers": TWO, "eval": {"every": 1}}
    table = raw(environments, **changes)
    del table["teacher"]
    orchestrator = export_recipe(parse_recipe(table), version).table["orchestrator"]
    entries = {entry["name"]: entry for entry in orchestrator["train"]["source"]}
    models = {name: entry["algo"]["teacher"]["name"] for name, entry in entries.items()}
    assert models == {"rev": "a/first", "sums": "a/second"}
    assert all("algo" not in entry for entry in orchestrator["eval"]["source"])


def test_head_names_the_environments_to_install():
    """Each id once."""
    head = export_recipe(parse_recipe(raw(USES)), "head").head
    place = head.index("Environments that have to be installed beside prime-rl:")
    assert head[place + 1] == "    x, y"


@pytest.mark.parametrize("version", VERSIONS)
def test_recipe_with_tools_names_its_environment(version):
    """Training and test have a split each.

    The student's server, which prime-rl starts, parses calls of tools for the evaluation.
    """
    loaded = load_recipe(REPO / "recipes" / "agent_opd.toml")
    models = {"student": "/student", "teacher": "/teacher"}
    table = export_recipe(loaded, version, models).table
    orchestrator = table["orchestrator"]
    assert orchestrator["renderer"] == {"name": "default", "tool_parser": "qwen3"}
    assert table["inference"] == {"vllm": {"tool_call_parser": "hermes"}}
    (train,), (test,) = orchestrator["train"]["source"], orchestrator["eval"]["source"]
    identity = {"id": "prime-composer-orders"}
    assert train["env"]["taskset"] == identity
    assert test["env"]["taskset"] == {**identity, "split": "test"}
    assert [entry["env"]["agent"]["max_turns"] for entry in (train, test)] == [4, 4]


def test_check_and_export_import_no_environment(tmp_path):
    """Neither verifiers nor the environment's package is imported, or looked for."""
    path = tmp_path / "r.toml"
    path.write_text(tomli_w.dumps(raw({"rev": {"id": "no-such-environment"}})))
    program = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        assert name.partition(".")[0] not in ("verifiers", "no_such_environment"), name
sys.meta_path.insert(0, Refuse())
from prime_composer.cli import main
for words in (["check", sys.argv[1]], ["export", sys.argv[1], "--dialect", "head"]):
    assert main(words) in (0, None), words
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert 'id = "no-such-environment"' in done.stdout
