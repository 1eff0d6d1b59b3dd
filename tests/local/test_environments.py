"""Environments of verifiers, played in this process by scripted samplers."""

import copy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from prime_composer.backends.hf_model import import_transformers
from prime_composer.backends.protocols import SamplingParams
from prime_composer.local.episodes import EnvironmentFailed, Episode, Failure
from prime_composer.local.sources import Sources, load_sources
from prime_composer.local.train import train
from prime_composer.recipe.environment import EnvironmentConfig
from prime_composer.recipe.loading import parse_recipe
from prime_composer.recipe.schema import RecipeError
from tests.conftest import TINY_RECIPE
from tests.local.environment_kit import ENVIRONMENTS, STRIPPING, Scripted, save_tokenizer
from tests.local.helpers import Silent

import_transformers()  # before verifiers, which would import it beside a broken torchvision
pytest.importorskip("verifiers.v1", reason="environments by id need verifiers: the extra [env]")

from prime_composer.local.environments import Environments, open_environment  # noqa: E402

# verifiers and its servers leave sockets and loops to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

TOOLS = {"name": "default", "tool_parser": "qwen3"}
REPLAY = {"weight": 1.0, "loss": {"type": "dpo", "beta": 0.1}}
PARAMS = SamplingParams(max_tokens=200)


@pytest.fixture(autouse=True)
def test_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let verifiers, and the tool servers that it starts, find the environments of this folder."""
    monkeypatch.syspath_prepend(str(ENVIRONMENTS))
    monkeypatch.setenv("PYTHONPATH", str(ENVIRONMENTS), prepend=":")


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return folder


Play = Callable[..., list[Episode | Failure]]


@pytest.fixture
def play(tokenizer_dir: Path) -> Iterator[Play]:
    """Return a function that plays all tasks of an environment once with a scripted sampler."""
    opened: list[Environments] = []
    warnings: list[str] = []

    def run(
        reply: Callable[[str], str],
        id: str = "tiny-talk",
        template_dir: Path = tokenizer_dir,
        params: SamplingParams = PARAMS,
        room: int = 4096,
        **config: Any,
    ) -> list[Episode | Failure]:
        environment = open_environment("talk", EnvironmentConfig(id=id, **config))
        opened.append(
            Environments({"talk": environment}, str(template_dir), TOOLS, warnings.append)
        )
        tokenizer = save_tokenizer(template_dir / "again")
        run.sampler = Scripted(tokenizer, reply, room)  # type: ignore[attr-defined]
        return opened[-1].run(run.sampler, environment.problems, params, seed=3)  # type: ignore[attr-defined]

    run.warnings = warnings  # type: ignore[attr-defined]
    yield run
    for environments in opened:
        environments.close()


def words(play: Any, episode: Episode | Failure) -> list[list[str]]:
    """Return the trained tokens of each rollout as text, one item per run of trained tokens."""
    assert isinstance(episode, Episode), episode
    texts = []
    for rollout in episode.rollouts:
        runs: list[list[int]] = []
        previous = False
        for token, is_trained in zip(
            rollout.token_ids.tolist(), rollout.loss_mask.tolist(), strict=True
        ):
            if is_trained:
                runs += [] if previous else [[]]
                runs[-1].append(token)
            previous = is_trained
        texts.append([play.sampler.tokenizer.decode(run) for run in runs])
    return texts


def test_run_single_turn_is_one_rollout_with_its_reward(play: Any) -> None:
    """Prompt and answer, the reward of the rubric, and log mu as it was sampled."""
    first, second = play(lambda text: "no" if "task 0" in text else "maybe")
    assert words(play, first) == [["no<|im_end|>"]]
    assert words(play, second) == [["maybe<|im_end|>"]]
    assert (first.reward, second.reward) == (2.0, 5.0)
    assert (first.turns, first.tool_calls, first.limited) == (1, 0, False)
    (rollout,) = second.rollouts
    sampled = play.sampler.sampled[1]
    assert rollout.token_ids.tolist() == sampled.token_ids.tolist()
    assert torch.equal(rollout.loss_mask, sampled.loss_mask)
    assert rollout.inference_logprobs[-6:].tolist() == sampled.inference_logprobs[-6:].tolist()


def test_run_two_turns_train_on_the_answers_alone(play: Any) -> None:
    """What the environment says between two answers is context, in one rollout."""
    episode, _ = play(lambda text: "two" if "go on" in text else "one", args={"script": ["go on"]})
    assert words(play, episode) == [["one<|im_end|>", "two<|im_end|>"]]
    (rollout,) = episode.rollouts
    text = play.sampler.tokenizer.decode(rollout.token_ids.tolist())
    assert "user\ngo on<|im_end|>" in text
    assert play.sampler.calls[1][0] + "two<|im_end|>" == text


def test_run_rounds_sample_all_rollouts_side_by_side(play: Any) -> None:
    """Two turns of three rollouts are two calls of three prompts, in the tasks' order."""
    play(lambda text: "x", args={"script": ["go on"], "tasks": 3})
    assert [len(texts) for texts in play.sampler.calls] == [3, 3]
    for texts in play.sampler.calls:
        assert [f"task {i}" in text for i, text in enumerate(texts)] == [True] * 3
    assert len(set(play.sampler.seeds)) == 2


def test_run_rewritten_history_is_a_sample_of_its_own(play: Any) -> None:
    """An environment that summarizes the conversation gives two samples and loses nothing."""
    summary = [{"role": "user", "content": "so far: one"}]
    episode, _ = play(
        lambda text: "two" if "so far" in text else "one", args={"script": [{"messages": summary}]}
    )
    assert words(play, episode) == [["one<|im_end|>"], ["two<|im_end|>"]]


def test_run_template_that_strips_answers_branches(play: Any, tmp_path: Path) -> None:
    """A turn that the chat template does not keep is warned of at the start, and not re-tokenized.

    The student trains on the ids that it sampled, spaces included.
    """
    save_tokenizer(tmp_path, STRIPPING)
    episode, _ = play(
        lambda text: "two" if "go on" in text else " one ",
        template_dir=tmp_path,
        args={"script": ["go on"]},
    )
    assert words(play, episode) == [[" one <|im_end|>"], ["two<|im_end|>"]]
    assert "does not keep an answer such as ' 7'" in play.warnings[0]


def test_run_template_that_keeps_answers_warns_of_nothing(play: Any) -> None:
    """The same environment with a faithful template."""
    play(lambda text: " one ", args={"script": ["go on"]})
    assert play.warnings == []


def test_run_agrees_with_the_graph_of_verifiers(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids, masks and log-probs are those that verifiers records in its own message graph."""
    from prime_composer.local import environments

    traces: dict[int, Any] = {}
    outcome = environments.outcome

    def keep(episode: Any, turns: Any, place: int) -> Any:
        (traces[place],) = episode.traces
        return outcome(episode, turns, place)

    monkeypatch.setattr(environments, "outcome", keep)
    episodes = play(lambda text: "answer", args={"script": ["a", "b"]})
    assert len(traces) == len(episodes)
    for place, episode in enumerate(episodes):
        (branch,), (rollout,) = traces[place].branches, episode.rollouts
        assert branch.token_ids == rollout.token_ids.tolist()
        assert branch.sampled_mask == rollout.loss_mask.tolist()
        ours = rollout.inference_logprobs.nan_to_num(0.0).tolist()
        assert branch.logprobs == pytest.approx(ours, abs=1e-6)


@pytest.mark.slow
def test_run_tool_output_is_context(play: Any) -> None:
    """A tool on verifiers' own server is called twice; its words are read, not trained on."""

    def reply(text: str) -> str:
        last = text.rpartition("<|im_end|>\n<|im_start|>assistant")[0].rpartition("\n")[2]
        key = {"river of ada?": "ada", "paris": "paris"}.get(last)
        if key is None:
            return last
        return f'<tool_call>{{"name": "get", "arguments": {{"key": "{key}"}}}}</tool_call>'

    episode, _ = play(reply, id="tiny-lookup")
    assert words(play, episode) == [
        [
            '<tool_call>{"name": "get", "arguments": {"key": "ada"}}</tool_call><|im_end|>',
            '<tool_call>{"name": "get", "arguments": {"key": "paris"}}</tool_call><|im_end|>',
            "seine<|im_end|>",
        ]
    ]
    assert (episode.reward, episode.turns, episode.tool_calls) == (1.0, 3, 2)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"args": {"script": [{"raise": "broken"}]}}, "broken"),
        ({"args": {"script": [{"leave": 0}]}}, "without an answer of the student"),
        ({"args": {"reward": "nan"}}, "reward is nan"),
        ({"args": {"reward": "raise"}}, "no judge"),
        ({"args": {"reward": "none"}}, "judged|reward|NoneType"),
        ({"args": {"script": [{"sleep": 60}]}, "timeout": 1.0}, "time"),
        ({"args": {"script": [{"forever": "again"}]}, "timeout": 3.0}, "time|context"),
    ],
    ids=["raises", "nothing", "nan", "judge", "none", "hangs", "loops"],
)
def test_run_failed_rollout_has_no_reward(play: Any, config: dict[str, Any], reason: str) -> None:
    """Each is a failure with its reason, told once, and never a reward of zero."""
    failures = play(lambda text: "x", **config)
    assert [type(one) for one in failures] == [Failure, Failure]
    assert pytest.importorskip("re").search(reason, failures[0].reason), failures[0]
    assert "2 of 2 rollouts failed" in play.warnings[-1]


def test_run_turn_limit_ends_the_rollout_with_its_reward(play: Any) -> None:
    """Endless talk ends after max_turns, and is judged as it stands."""
    episode, _ = play(lambda text: "x", args={"script": [{"forever": "on"}]}, max_turns=3)
    assert words(play, episode) == [["x<|im_end|>"] * 3]
    assert (episode.reward, episode.limited, episode.turns) == (1.0, True, 3)


def test_run_full_context_is_a_failure(play: Any) -> None:
    """A conversation that outgrows the sampler's context has no reward."""
    failures = play(lambda text: "x" * 20, args={"script": [{"forever": "on"}]}, room=120)
    assert all("leaves no room" in failure.reason for failure in failures)


def test_run_turn_is_cut_where_the_context_ends(play: Any) -> None:
    """The last turn gets what is left of the context, and counts as truncated."""
    (episode, _) = play(lambda text: "x" * 50, room=60)
    (rollout,) = episode.rollouts
    assert len(rollout.token_ids) == 60
    assert rollout.finish_reason == "length"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"id": "tiny-tolk"}, r"id = 'tiny-tolk' is not installed.*pip install tiny-tolk"),
        ({"id": "owner/tiny-tolk"}, "prime env install owner/tiny-tolk"),
        ({"id": "tiny-talk", "api": "v0"}, "api = 'v0'.*--engine prime-rl"),
        ({"id": "tiny-v0"}, "verifiers' v0 API"),
        ({"id": "tiny-talk", "args": {"wrong": 1}}, "args.*wrong"),
        ({"id": "tiny-talk", "args": {"tasks": 0}}, "has no tasks"),
    ],
)
def test_open_environment_unusable_is_named(config: dict[str, Any], message: str) -> None:
    """Unknown, of the old API, with wrong arguments, or empty: one sentence with the remedy."""
    with pytest.raises(RecipeError, match=rf"(?s)\[environments\.x\].*{message}"):
        open_environment("x", EnvironmentConfig(**config))


@pytest.mark.parametrize("harness", ["rlm", "codex"])
def test_open_environment_harness_with_uv_is_refused(
    harness: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A harness that installs a program is named before the start."""
    import tiny_talk

    monkeypatch.setattr(tiny_talk, "__all__", ["TalkTaskset"])
    monkeypatch.setattr("verifiers.v1.utils.loaders.default_harness_id", lambda taskset_id: harness)
    with pytest.raises(RecipeError, match=f"harness '{harness}', which needs uv and a network"):
        open_environment("x", EnvironmentConfig(id="tiny-talk"))


def test_environments_tools_without_a_parser_are_refused(tokenizer_dir: Path) -> None:
    """A renderer that reads no tool calls cannot play an environment with tools."""
    environment = open_environment("x", EnvironmentConfig(id="tiny-lookup"))
    with pytest.raises(RecipeError, match=r"has tools, and the renderer.*\[rollout\] renderer"):
        Environments({"x": environment}, str(tokenizer_dir), {}, print)


def save_student(folder: Path, seed: int) -> Path:
    tokenizer = save_tokenizer(folder)
    torch.manual_seed(seed)
    transformers = import_transformers()
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return a recipe of two steps with a teacher, two turns, and problems beside them."""
    folder = tmp_path_factory.mktemp("models")
    recipe = copy.deepcopy(TINY_RECIPE)
    del recipe["data"]
    recipe["student"] = {"model": str(save_student(folder / "student", 1))}
    recipe["teacher"] = {"model": str(save_student(folder / "teacher", 2))}
    recipe["rollout"] |= {"max_model_len": 512, "group_size": 2}
    recipe["trainer"] |= {"steps": 2, "batch_size": 4}
    recipe["eval"] |= {"every": 0}
    recipe["checkpoint"] = {"every": 1}
    recipe["environments"] = {
        "talk": {"id": "tiny-talk", "args": {"script": ["go on"], "tasks": 3}}
    }
    return recipe


def run(raw: dict[str, Any], run_dir: Path, resume: bool = False) -> list[dict[str, float]]:
    from prime_composer.local.checkpoint import list_checkpoints
    from prime_composer.local.tracker import read_metrics

    run_dir.mkdir(exist_ok=True)
    recipe = parse_recipe(raw)
    train(
        recipe,
        load_sources(recipe),
        {},
        run_dir,
        Silent(),
        resume=list_checkpoints(run_dir)[0] if resume else None,
    )
    return list(read_metrics(run_dir))


def test_train_two_turns_with_a_teacher(raw: dict[str, Any], tmp_path: Path) -> None:
    """A whole run: every turn is scored and trained on, and counts are in the metrics."""
    records = run(raw, tmp_path / "run")
    for record in records[1:]:
        assert record["rollout/turns"] == 2
        assert record["rollout/samples"] >= 1
        assert record["rollout/failed"] == 0
        assert record["topk_reverse_kl/kl"] > 0
        assert record["sampler/mismatch_kl"] < 1e-3
    assert records[0]["eval/failed"] == 0
    assert (records[0]["eval/turns"], records[0]["eval/tool_calls"]) == (2, 0)
    assert (records[0]["teacher/turns"], records[0]["teacher/tool_calls"]) == (2, 0)
    assert records[-1]["eval/reverse_kl"] > 0


def test_train_same_recipe_twice_is_bit_exact(raw: dict[str, Any], tmp_path: Path) -> None:
    """Threads and servers change no number: two runs have the same losses and rewards."""

    def numbers(records: list[dict[str, float]]) -> list[dict[str, float]]:
        timed = ("time/", "tokens_per_second")
        return [
            {key: value for key, value in record.items() if not key.startswith(timed)}
            for record in records
        ]

    assert numbers(run(raw, tmp_path / "a")) == numbers(run(raw, tmp_path / "b"))


def test_train_environment_beside_problems(raw: dict[str, Any], tmp_path: Path) -> None:
    """Problems and tasks share the steps by their ratios."""
    mixed = copy.deepcopy(raw)
    mixed["environments"]["sums"] = {"source": "generated", "size": 40, "chat_template": True}
    mixed["trainer"] |= {"steps": 1, "batch_size": 8}
    records = run(mixed, tmp_path / "run")
    assert {"rollout/reward/talk", "rollout/reward/sums"} <= records[-1].keys()
    assert {"eval/accuracy/talk", "eval/accuracy/sums"} <= records[-1].keys()


def test_sources_models_learn_from_problems_alone(raw: dict[str, Any]) -> None:
    """A prepared model beside an environment by id is that of the recipe without it."""
    mixed = copy.deepcopy(raw)
    mixed["environments"]["sums"] = {"source": "generated", "size": 40, "chat_template": True}
    both = load_sources(parse_recipe(mixed))
    del mixed["environments"]["talk"]
    alone = load_sources(parse_recipe(mixed))
    assert both.worked == alone.worked == alone.practice
    assert len(both.practice) == len(alone.practice) + 3


def test_train_environment_that_always_fails_ends_the_run(
    raw: dict[str, Any], tmp_path: Path
) -> None:
    """No step is trained on nothing: the run ends with the environment and the reason."""
    broken = copy.deepcopy(raw)
    broken["environments"]["talk"]["args"] = {"script": [{"raise": "broken"}]}
    with pytest.raises(EnvironmentFailed, match="failed"):
        run(broken, tmp_path / "run")


def test_load_sources_use_decides_what_is_trained_on(raw: dict[str, Any]) -> None:
    """`eval` gives no task to train on, and `train` none to evaluate."""
    own = copy.deepcopy(raw)
    talk = own["environments"]["talk"]
    own["environments"] = {
        "learnt": {**talk, "use": "train"},
        "asked": {**talk, "use": "eval", "args": {"tasks": 2}},
    }
    sources = load_sources(parse_recipe(own))
    assert isinstance(sources, Sources)
    assert [task.environment for task in sources.practice] == ["learnt"] * 3
    assert [task.environment for task in sources.held_out] == ["asked"] * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {
                "loss": {"type": "distillm2", "beta_steps": 4},
                "rollout": {"student_fraction": 0.5, "other_source": "teacher", "group_size": 2},
            },
            "only the student",
        ),
        (
            {
                "loss": {"type": "compose", "rl": {"weight": 0.0}, "replay": REPLAY},
                "rollout": {"group_size": 2},
                "teacher": None,
            },
            "answers of a group",
        ),
    ],
)
def test_load_sources_recipe_that_needs_problems_is_refused(
    raw: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    """What the engine does with problems only is refused by name."""
    own = copy.deepcopy(raw)
    for table, values in changes.items():
        own[table] = {**(own[table] if table == "rollout" else {}), **(values or {})}
        if values is None:
            del own[table]
    with pytest.raises(RecipeError, match=message):
        load_sources(parse_recipe(own))


def test_sys_modules_has_the_harness_by_its_id() -> None:
    """verifiers finds the engine's chat loop by a name that no package has."""
    open_environment("x", EnvironmentConfig(id="tiny-lookup"))
    assert sys.modules["prime_composer_chat"].ChatHarness.NEEDS_CONTAINER is False
