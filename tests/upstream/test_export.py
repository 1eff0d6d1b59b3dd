"""Recipes in prime-rl's words: what is written, what is refused, and that prime-rl's own parser takes it."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from make_venvs import python_of, verifiers_of
from prime_rl_checkout import REPO, VERSIONS

from prime_composer.data import DataConfig
from prime_composer.recipe import RecipeError, load_recipe, parse_recipe
from prime_composer.upstream.environment import load_split
from prime_composer.upstream.export import export_recipe, to_toml
from prime_composer.upstream.orchestrator import HEADER
from prime_composer.upstream.probe import DIALECTS

E2E = Path(__file__).parent / "e2e"
sys.path.insert(0, str(E2E))

import cpu_recipe  # noqa: E402
import launch_run  # noqa: E402

RECIPES = sorted((REPO / "recipes").glob("*.toml"))


def recipe(**changes):
    raw = {
        "student": {"model": "a/student"},
        "teacher": {"model": "a/teacher", "url": "http://host:8001"},
        "loss": {"type": "topk_reverse_kl", "k": 16},
        "rollout": {"group_size": 2, "max_tokens": 64, "max_model_len": 256},
        "data": {},
        "trainer": {"steps": 7, "batch_size": 8, "lr": 1e-3},
    }
    for name, table in changes.items():
        raw[name] = {**raw.get(name, {}), **table}
    return parse_recipe(raw)


def native(dialect, **changes):
    return tomllib.loads(export_recipe(recipe(**changes), dialect))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_every_dialect_says_the_same_way(dialect):
    table = native(dialect)
    assert table["max_steps"] == 7 and table["seq_len"] == 256 and table["model"] == {"name": "a/student"}
    assert table["orchestrator"]["batch_size"] == 8 and table["orchestrator"]["group_size"] == 2
    assert table["orchestrator"]["train"]["sampling"]["max_completion_tokens"] == 64
    loss = table["trainer"]["loss"]
    assert loss["type"] == "custom" and loss["import_path"] == "prime_composer.upstream.loss_fn"
    assert loss["kwargs"] == {"type": "topk_reverse_kl", "k": 16}
    assert table["trainer"]["optim"]["lr"] == 1e-3


def test_the_teacher_stands_where_each_version_looks_for_it():
    old = native("v0.6")["orchestrator"]
    assert old["training_mode"] == "opd"
    assert old["teacher"] == {"model": {"name": "a/teacher"}, "client": {"base_url": ["http://host:8001/v1"]}}
    for dialect, url in (("v0.7", ["http://host:8001/v1"]), ("v0.8", ["http://host:8001/v1"]), ("head", "http://host:8001/v1")):
        assert native(dialect)["orchestrator"]["algo"] == {
            "type": "opd", "teacher": {"name": "a/teacher", "base_url": url}
        }  # fmt: skip


def test_v0_6_does_not_drop_groups_that_earn_the_same_reward():
    kinds = [entry["type"] for entry in native("v0.6")["orchestrator"]["post_batch_filters"]]
    assert kinds == ["gibberish", "repetition"]
    assert "post_batch_filters" not in native("head")["orchestrator"]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_top_p_goes_through_the_request_body(dialect):
    assert native(dialect, rollout={"top_p": 0.9})["orchestrator"]["train"]["sampling"]["extra_body"] == {"top_p": 0.9}
    assert "extra_body" not in native(dialect)["orchestrator"]["train"]["sampling"]


def test_a_loss_with_two_eras_is_told_which_one_it_is_in():
    loss = {"type": "sampled_reverse_kl", "k": None}
    loss.pop("k")
    for dialect, era in (("v0.6", "v0_6"), ("v0.7", "v0_7"), ("head", "v0_7")):
        text = export_recipe(parse_recipe({**recipe().model_dump(exclude_unset=True), "loss": loss}), dialect)
        assert tomllib.loads(text)["trainer"]["loss"]["kwargs"]["dialect"] == era


def test_native_settings_win_and_a_dialects_own_table_counts_for_it_alone():
    extra = {"orchestrator": {"batch_size": 99}, "head": {"seq_len": 1}, "wandb": {"project": "p"}}
    assert native("head", prime_rl=extra)["orchestrator"]["batch_size"] == 99
    assert native("head", prime_rl=extra)["seq_len"] == 1
    assert native("v0.6", prime_rl=extra)["seq_len"] == 256
    assert "head" not in native("v0.6", prime_rl=extra)


@pytest.mark.parametrize(
    "changes,said",
    [
        ({"rollout": {"student_fraction": 0.5}}, "rollout.student_fraction"),
        ({"loss": {"k": "full"}}, 'loss.k = "full"'),
    ],
)
def test_what_prime_rl_cannot_do_is_named(changes, said):
    with pytest.raises(RecipeError, match=said):
        export_recipe(recipe(**changes), "head")


def told(**policy):
    return parse_recipe({**recipe().model_dump(exclude_unset=True), "teacher": {"policy": policy}})


def test_self_distillation_is_prime_rls_opsd_with_the_datas_solution_as_the_hint():
    for dialect in ("v0.7", "v0.8", "head"):
        table = tomllib.loads(export_recipe(told(update="live"), dialect))
        assert table["orchestrator"]["algo"] == {"type": "opsd", "demo_key": "answer"}


@pytest.mark.parametrize(
    "policy,key",
    [
        ({"update": "live", "hint": "feedback"}, "teacher.policy.hint"),
        ({"update": "ema"}, "teacher.policy.update"),
        ({"update": "live", "template": "{question} {hint}"}, "teacher.policy.template"),
    ],
)
def test_what_opsd_cannot_do_is_refused_by_name(policy, key):
    with pytest.raises(RecipeError, match=key):
        export_recipe(told(**policy), "head")


def test_v0_6_has_no_self_distillation():
    with pytest.raises(RecipeError, match="v0.6 has no self-distillation"):
        export_recipe(told(update="live"), "v0.6")


def test_a_prepared_model_has_to_be_built_first():
    raw = tomllib.loads((REPO / "recipes" / "gsm8k_opd.toml").read_text())
    parsed = parse_recipe(raw)
    with pytest.raises(RecipeError, match="prime-rl prepare"):
        export_recipe(parsed, "head")
    text = export_recipe(parsed, "head", {"student": "/s", "teacher": "/t"})
    assert tomllib.loads(text)["model"]["name"] == "/s"


TWO = {
    "a": {"model": "a/first", "url": "http://a:8001"},
    "b": {"model": "a/second", "url": "http://b:8001", "weight": 3.0},
}
A = {"url": "http://a:8001/v1", "model": "a/first"}
B = {"url": "http://b:8001/v1", "model": "a/second"}
ENTRIES = {"v0.6": "env", "v0.7": "env", "v0.8": "source", "head": "source"}


def several(dialect, **changes):
    raw = {**recipe().model_dump(exclude_unset=True), "teachers": TWO, **changes}
    del raw["teacher"]
    if "environments" in raw:
        del raw["data"]
    return tomllib.loads(export_recipe(parse_recipe(raw), dialect))


def mixed_and_routed(folder):
    """A recipe with two environments, one of which has rows that name their teachers."""
    rows = [{"question": f"{i}?", "answer": f"#### {i}", **({"by": "ab"[i % 2]} if i % 4 else {})} for i in range(1, 13)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    environments = {"sums": {"teacher": "a"}, "rows": {"source": "jsonl", "path": str(folder / "rows.jsonl"), "teacher_key": "by"}}
    raw = {**recipe().model_dump(exclude_unset=True), "teachers": TWO, "environments": environments}
    raw["student"] = {"model": "Qwen/Qwen3-0.6B"}  # a name that prime-rl has a renderer for
    path = folder / "mixed_and_routed.recipe.toml"
    path.write_text(to_toml({key: value for key, value in raw.items() if key not in ("teacher", "data")}))
    return path


def test_a_mixture_for_all_travels_in_the_header_of_the_teachers_client():
    told = [{**A, "weight": 0.25}, {**B, "weight": 0.75}]
    client = several("v0.6")["orchestrator"]["teacher"]["client"]
    assert json.loads(client["headers"][HEADER]) == told
    for dialect in ("v0.7", "v0.8", "head"):
        table = several(dialect)
        assert json.loads(table["orchestrator"]["algo"]["teacher"]["headers"][HEADER]) == told
        assert table["trainer"]["loss"]["kwargs"]["adapter"] is True


def test_each_environment_has_its_own_teacher():
    environments = {"sums": {"teacher": "a"}, "code": {"teacher": "b", "ratio": 2.0, "seed": 1}}
    for dialect in DIALECTS:
        table = several(dialect, environments=environments)
        orchestrator = table["orchestrator"]
        entries = {entry["name"]: entry for entry in orchestrator["train"][ENTRIES[dialect]]}
        assert {name: entry["ratio"] for name, entry in entries.items()} == {"sums": 1.0, "code": 2.0}
        if dialect == "v0.6":  # one client; the header tells the environments apart
            told = json.loads(orchestrator["teacher"]["client"]["headers"][HEADER])
            assert told == {"sums": [{**A, "weight": 1.0}], "code": [{**B, "weight": 1.0}]}
            assert table["trainer"]["loss"]["kwargs"]["adapter"] is True
        else:  # prime-rl's own routing, without us
            assert "algo" not in orchestrator and "adapter" not in table["trainer"]["loss"]["kwargs"]
            for name, teacher in (("sums", A), ("code", B)):
                found = entries[name]["algo"]["teacher"]
                assert found["name"] == teacher["model"] and teacher["url"] in (found["base_url"], *found["base_url"])
                assert "headers" not in found


def test_rows_that_name_their_teacher_become_an_environment_for_each(tmp_path):
    table = tomllib.loads(export_recipe(load_recipe(mixed_and_routed(tmp_path)), "head"))
    entries = {entry["name"]: entry for entry in table["orchestrator"]["train"]["source"]}
    assert set(entries) == {"sums", "rows-a", "rows-b", "rows-others"}
    assert sum(entries[name]["ratio"] for name in entries if name != "sums") == pytest.approx(1.0)
    assert entries["rows-b"]["env"]["taskset"]["rows_of"] == "b"
    assert entries["rows-b"]["algo"]["teacher"]["name"] == "a/second"
    assert json.loads(entries["rows-others"]["algo"]["teacher"]["headers"][HEADER])[1] == {**B, "weight": 0.75}


@pytest.mark.parametrize("name,more", [("others", {}), ("b", {"rows-b": {"seed": 1}})])
def test_environments_that_would_have_one_name_are_refused(tmp_path, name, more):
    rows = [{"question": f"{i}?", "answer": f"#### {i}", "by": name if i % 2 else None} for i in range(1, 41)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    environments = {"rows": {"source": "jsonl", "path": str(tmp_path / "rows.jsonl"), "teacher_key": "by", "teacher": "a"}}
    with pytest.raises(RecipeError, match=f"would be called 'rows-{name}'.*Rename"):
        several("head", teachers={"a": TWO["a"], name: TWO["b"]}, environments={**environments, **more})


def test_the_rows_of_an_environment_are_those_that_name_its_teacher(tmp_path):
    mixed_and_routed(tmp_path)
    data = DataConfig(source="jsonl", path=tmp_path / "rows.jsonl", teacher_key="by", hold_out=0.3)
    parts = {name: load_split(data, "train", name) + load_split(data, "test", name) for name in ("a", "b", "")}
    assert {name: sorted(int(p.final) for p in found) for name, found in parts.items()} == {
        "a": [2, 6, 10], "b": [1, 3, 5, 7, 9, 11], "": [4, 8, 12]
    }  # fmt: skip
    assert len(load_split(data, "train", None)) == sum(len(load_split(data, "train", name)) for name in parts)


def test_teachers_without_a_url_are_looked_for_on_this_host_one_port_after_another():
    teachers = {name: {"model": f"a/{name}"} for name in ("a", "b")}
    told = json.loads(several("head", teachers=teachers)["orchestrator"]["algo"]["teacher"]["headers"][HEADER])
    assert [entry["url"] for entry in told] == ["http://localhost:8001/v1", "http://localhost:8002/v1"]


def test_an_unknown_dialect_lists_the_known_ones():
    with pytest.raises(RecipeError, match="v0.6, v0.7, v0.8, head"):
        export_recipe(recipe(), "v0.9")


def test_toml_survives_a_round_trip():
    table = {
        "a": 1, "b": 1e-7, "c": True, "d": 'quote " and \\ and é and \n', "e": [1, 2], "f": [], "g": {"h": {"i": "x"}},
        "odd key": {"j": 1}, "k": [{"l": 1, "m": {"n": 2}}, {"l": 2}], "o": {"p": [{"q": 1}]}, "empty": {},
    }  # fmt: skip
    assert tomllib.loads(to_toml(table)) == table


@pytest.mark.parametrize("version", VERSIONS)
def test_prime_rls_own_parser_and_dry_run_take_every_recipe(trees, tmp_path, version):
    python = python_of("v0.6" if version == "v0.6.0" else "newest")
    if not python.exists():
        pytest.skip("no environment for it (python tests/upstream/make_venvs.py)")
    tree = trees(version)
    dialect = cpu_recipe.DIALECT[version]
    files, refused = [], {}
    for path in [*RECIPES, mixed_and_routed(tmp_path)]:
        try:
            loaded = load_recipe(path)
            models = {"student": "Qwen/Qwen3-0.6B", **dict.fromkeys(loaded.scored_by, "Qwen/Qwen3-4B")}
            text = export_recipe(loaded, dialect, models)
        except RecipeError as error:
            refused[path.stem] = str(error)
            continue
        target = tmp_path / f"{path.stem}.toml"
        target.write_text(text)
        files.append(str(target))
    assert files
    env = launch_run.environment(str(python), tree, tmp_path, PRIME_COMPOSER="1")
    del env["PRIME_CPU_RIG"]
    other = verifiers_of(version)
    if other is not None:
        if not other.exists():
            pytest.skip(f"no verifiers for {version} (python tests/upstream/make_venvs.py newest)")
        env["PYTHONPATH"] = f"{other}{launch_run.os.pathsep}{env['PYTHONPATH']}"
    command = [str(python), str(E2E / "dry_run.py"), *files]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-2000:] + done.stderr[-3000:]
    results = json.loads(lines[-1].removeprefix("RESULT "))
    bad = {Path(file).stem: result for file, result in results.items() if result != "ok"}
    assert not bad, f"{bad}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    # A recipe may ask for what prime-rl cannot do; it then says so by name, and never half of it is exported.
    for stem, reason in refused.items():
        assert "--engine local" in reason, (stem, reason)
