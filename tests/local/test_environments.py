"""Environments of verifiers, played in this process by scripted samplers."""

import asyncio
import copy
import re
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from prime_composer.backends.hf_model import import_transformers
from prime_composer.backends.mixture import Teachers
from prime_composer.backends.protocols import Limits, Sampler, SamplingParams
from prime_composer.local import collect as collecting
from prime_composer.local.checkpoint import list_checkpoints
from prime_composer.local.engine import Engine, conversation_room
from prime_composer.local.episodes import EnvironmentFailed, Episode, Failure
from prime_composer.local.evaluate import Evaluator
from prime_composer.local.sources import Sources, load_sources
from prime_composer.local.tasks import Task
from prime_composer.local.tokenized_problems import TokenizedProblems
from prime_composer.local.train import RunStopped, train
from prime_composer.recipe.environment import EnvironmentConfig
from prime_composer.recipe.loading import parse_recipe
from prime_composer.recipe.routing import TeacherId
from prime_composer.recipe.schema import EvalConfig, RecipeError, RolloutConfig
from tests.command import numbers
from tests.conftest import TINY_RECIPE
from tests.faults.server import SpoilingServer
from tests.local.environment_kit import (
    ENVIRONMENTS,
    STRIPPING,
    SUMMARY,
    Scripted,
    save_student,
    save_tokenizer,
)
from tests.local.helpers import Silent, weights
from tests.local.helpers import rollout as a_rollout
from tests.vllm_process import VllmProcess

import_transformers()  # before verifiers, which would import it beside a broken torchvision
pytest.importorskip("verifiers.v1", reason="environments by id need verifiers: the extra [env]")

from prime_composer.local.chat_harness import Tools, first_of_a_group  # noqa: E402
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
        vocab_size: int | None = None,
        **config: Any,
    ) -> list[Episode | Failure]:
        environment = open_environment("talk", EnvironmentConfig(id=id, **config))
        opened.append(
            Environments({"talk": environment}, str(template_dir), TOOLS, warnings.append)
        )
        tokenizer = save_tokenizer(template_dir / "again")
        sampler = run.sampler = Scripted(tokenizer, reply, room)  # type: ignore[attr-defined]
        if vocab_size is not None:
            sampler.limits = Limits(room, vocab_size)
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
        # Lists before verifiers 0.4.1, then arrays.
        assert list(branch.token_ids) == rollout.token_ids.tolist()
        assert list(branch.sampled_mask) == rollout.loss_mask.tolist()
        ours = rollout.inference_logprobs.nan_to_num(0.0).tolist()
        assert list(branch.logprobs) == pytest.approx(ours, abs=1e-6)


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


HALF_A_LETTER = [r'{"key": "\ud800"}', r'{"\ud83d": "ada"}', '{"key": "half"}']
"""Arguments of a call with half of a letter in them, or in the tool's answer."""


@pytest.mark.slow
@pytest.mark.parametrize("arguments", HALF_A_LETTER, ids=["value", "name", "answer"])
def test_run_tool_call_with_half_a_letter_is_an_error(play: Any, arguments: str) -> None:
    """The student reads an error, and goes on. It is trained on what it sampled."""
    call = f'<tool_call>{{"name": "get", "arguments": {arguments}}}</tool_call>'

    episode, _ = play(lambda text: "done" if "\nerror: " in text else call, id="tiny-lookup")
    trained = [text for rollout in words(play, episode) for text in rollout]
    assert trained == [f"{call}<|im_end|>", "done<|im_end|>"]
    assert (episode.turns, episode.tool_calls) == (2, 1)


def called(arguments: str, answer: Any) -> str:
    """Return what a conversation has of a call, where a tool answers or raises something."""

    class Session:
        async def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
            if isinstance(answer, Exception):
                raise answer
            return SimpleNamespace(content=[SimpleNamespace(text=answer)])

    tools = Tools()
    tools._calls["get"] = Session(), "get"
    return asyncio.run(tools.call({"name": "get", "arguments": arguments}))


@pytest.mark.parametrize(
    "arguments",
    [r'{"key": "\ud800"}', r'{"\ud83d": 1}', '{"key": ', "[1]", "[" * 100_000,
     '{"key": ' + 300 * "[" + 300 * "]" + "}", '{"key": ' + 5000 * "9" + "}"],
    ids=["half", "half_name", "cut", "list", "endless", "deep", "digits"],
)  # fmt: skip
def test_tools_arguments_that_cannot_be_sent_are_an_error(arguments: str) -> None:
    """The tool is not called."""
    answer = called(arguments, AssertionError("called"))
    assert answer.startswith("error: the arguments are not ")
    answer.encode()


def test_tools_answer_with_half_a_letter_is_whole() -> None:
    """A letter in two halves is put together, and half a letter becomes U+FFFD."""
    assert called("{}", "a\ud83d\ude00b\ud800c") == "a\U0001f600b\ufffdc"


class ServerSays(Exception):
    """An error of mcp, with JSON-RPC's code."""

    def __init__(self, code: int):
        super().__init__("no such thing")
        self.code = code


def test_tools_server_that_is_away_is_no_answer() -> None:
    """An error of the tool is read by the student. A lost connection ends the rollout."""
    assert called("{}", ServerSays(-32603)) == "error: no such thing"
    with pytest.raises(ServerSays):
        called("{}", ServerSays(-32000))
    with pytest.raises(ConnectionError, match="away"), first_of_a_group():
        raise ExceptionGroup("of mcp", [ExceptionGroup("tasks", [ConnectionError("away")])])


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"args": {"script": [{"raise": "broken"}]}}, "broken"),
        ({"args": {"script": ["go on", {"raise": "broken"}]}}, "broken"),
        ({"vocab_size": 257}, "token id 25[789].*the student's head has 257 entries"),
        ({"args": {"script": [{"leave": 0}]}}, "without an answer of the student"),
        ({"args": {"reward": "nan"}}, "reward is nan|must be finite, got nan"),
        ({"args": {"reward": "raise"}}, "no judge"),
        ({"args": {"reward": "none"}}, "judged|reward|NoneType"),
        ({"args": {"script": [{"sleep": 60}]}, "timeout": 1.0}, "time"),
        ({"args": {"script": [{"forever": "again"}]}, "timeout": 3.0}, "time|context"),
    ],
    ids=["raises", "raises_later", "alien", "nothing", "nan", "judge", "none", "hangs", "loops"],
)
def test_run_failed_rollout_has_no_reward(play: Any, config: dict[str, Any], reason: str) -> None:
    """Each is a failure with its reason, told once, and never a reward of zero."""
    failures = play(lambda text: "x", **config)
    assert [type(one) for one in failures] == [Failure, Failure]
    assert re.search(reason, failures[0].reason), failures[0]
    assert "2 of 2 rollouts failed" in play.warnings[-1]


def test_run_turn_limit_ends_the_rollout_with_its_reward(play: Any) -> None:
    """Endless talk ends after max_turns, and is judged as it stands."""
    episode, _ = play(lambda text: "x", args={"script": [{"forever": "on"}]}, max_turns=3)
    assert words(play, episode) == [["x<|im_end|>"] * 3]
    assert (episode.reward, episode.limited, episode.turns) == (1.0, True, 3)


def test_run_code_that_blocks_ends_the_run(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time limits do not reach code that never awaits: the run ends, and names the environments."""
    from prime_composer.local import environments

    monkeypatch.setattr(environments, "PATIENCE", 0.2)
    with pytest.raises(EnvironmentFailed, match="environments talk have neither asked.*blocks"):
        play(lambda text: "x", args={"script": [{"block": 4}], "tasks": 1}, timeout=0.2)


def test_play_failed_rollout_is_no_part_of_its_group() -> None:
    """The mean reward of a group is that of the rollouts that ended; the others are counted."""
    tasks = [Task("?", "", "talk", index=index) for index in range(2)]
    outcomes = [episode(3.0), Failure("broken"), episode(5.0), *[Failure("broken")] * 3]
    engine = engine_of(outcomes)
    played = collecting.play(engine, RolloutConfig(group_size=3), tasks, seed=0, step=1)
    assert [one.reward for one in played.samples] == [3.0, 5.0]
    assert [one.advantage for one in played.samples] == [-1.0, 1.0]
    assert played.metrics["rollout/failed"] == pytest.approx(4 / 6)
    outcomes[:] = [Failure("broken")] * 6
    with pytest.raises(EnvironmentFailed, match=r"step 1: every rollout failed.*broken"):
        collecting.play(engine, RolloutConfig(group_size=3), tasks, seed=0, step=1)


def test_student_evaluation_leaves_failed_rollouts_out() -> None:
    """The mean reward is that of the tasks that ended, and the share of the others is told."""
    tasks = [Task("?", "", "talk", index=index) for index in range(4)]
    outcomes = [episode(3.0), Failure("broken"), episode(5.0), Failure("broken")]
    engine = engine_of(outcomes)
    engine.problems = TokenizedProblems(Sources([], tasks, {}), None)
    measured = Evaluator(engine, EvalConfig(), 8, 64).student()
    counts = {"eval/turns": 1.0, "eval/tool_calls": 0.0}
    assert measured == {"eval/accuracy": 4.0, "eval/truncated": 0.0, "eval/failed": 0.5} | counts
    outcomes[:] = [Failure("broken")] * 4
    with pytest.raises(EnvironmentFailed, match="every task of the evaluation failed"):
        Evaluator(engine, EvalConfig(), 8, 64).student()


def engine_of(outcomes: list[Episode | Failure]) -> Any:
    """Return an engine whose environments give these outcomes, whatever they are asked."""
    return Mock(
        spec=Engine,
        sampler=Mock(spec=Sampler),
        teachers=None,
        environments=SimpleNamespace(run=lambda *args: outcomes),
    )


def episode(reward: float) -> Episode:
    return Episode([a_rollout(0)], reward, "text", 1, 0, False)


def test_open_environment_unknown_id_names_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the installed packages, those that need verifiers are environments."""
    from prime_composer.local import environments

    needs = {"tiny-tolks": ["verifiers>=0.3"], "tiny-talks": ["numpy"], "prime-composer": None}
    installed = [
        SimpleNamespace(metadata={"Name": name}, requires=requires)
        for name, requires in needs.items()
    ]
    monkeypatch.setattr(environments.metadata, "distributions", lambda: installed)
    with pytest.raises(RecipeError, match=r"The nearest installed: tiny_tolks\. Install it: pip"):
        open_environment("x", EnvironmentConfig(id="tiny-tolk"))


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


def run(
    raw: dict[str, Any], run_dir: Path, display: Silent | None = None, resume: bool = False
) -> list[dict[str, float]]:
    """Train, and return what was measured; ``resume`` continues the newest checkpoint."""
    run_dir.mkdir(exist_ok=True)
    recipe = parse_recipe(raw)
    checkpoint = list_checkpoints(run_dir)[-1] if resume else None
    train(recipe, load_sources(recipe), {}, run_dir, display or Silent(), resume=checkpoint)
    return numbers(run_dir)


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
    assert run(raw, tmp_path / "a") == run(raw, tmp_path / "b")


def test_train_environment_resumes_to_the_same_numbers(
    raw: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after two of four steps, a run ends with the numbers and weights of a whole one.

    The checkpoint's directory chooses no other renderer than the student's name did.
    """
    from prime_composer.local import environments

    models: list[str] = []
    init = Environments.__init__

    def keep_model(self: Any, opened: Any, model: str, *others: Any) -> None:
        models.append(model)
        init(self, opened, model, *others)

    monkeypatch.setattr(environments.Environments, "__init__", keep_model)
    longer = copy.deepcopy(raw)
    longer["trainer"] |= {"steps": 4, "lr": 1e-2}
    longer["eval"] |= {"every": 1}
    longer["environments"]["sums"] = {"source": "generated", "size": 40, "chat_template": True}
    whole = run(longer, tmp_path / "whole")
    cut = run(longer, tmp_path / "cut", Silent(interrupt_at=3))
    assert [record["step"] for record in cut] == [0, 1, 2]
    assert run(longer, tmp_path / "cut", resume=True) == whole
    expected, resumed = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)
    assert models == [raw["student"]["model"]] * 3


def served(raw: dict[str, Any], server: SpoilingServer | VllmProcess) -> dict[str, Any]:
    """Return the recipe with rollouts of a server, and steps that move the weights."""
    recipe = copy.deepcopy(raw)
    recipe["rollout"] |= {"backend": "server", "url": server.url}
    recipe["teacher"]["backend"] = "transformers"
    recipe["trainer"] |= {"steps": 3, "lr": 1e-2}
    return recipe


def test_train_environment_with_a_served_student(raw: dict[str, Any], tmp_path: Path) -> None:
    """Turns of a server are sampled as token ids, with its log-probs and the newest weights.

    Its log mu is the trainer's log-prob of the same ids in every step, also after updates.
    """
    with SpoilingServer(raw["student"]["model"]) as server:
        _, *steps = run(served(raw, server), tmp_path / "run")
    assert server.requests["/collective_rpc"] >= 3
    assert server.requests["/v1/completions"] > 2 * 4 * 3
    assert_own_turns(steps, largest_mismatch=1e-6)


def assert_own_turns(steps: list[dict[str, float]], largest_mismatch: float) -> None:
    """Check that every rollout had its two turns, sampled with the weights of the trainer."""
    for record in steps:
        assert record["rollout/turns"] == 2
        assert record["rollout/failed"] == 0
        assert abs(record["sampler/mismatch_kl"]) < largest_mismatch


@pytest.mark.slow
@pytest.mark.vllm
def test_train_environment_on_a_vllm_server(raw: dict[str, Any], tmp_path: Path) -> None:
    """The same with a server of vLLM, whose numbers are float32's."""
    with VllmProcess(
        Path(raw["student"]["model"]),
        tmp_path / "server.log",
        *("--dtype", "float32", "--max-model-len", 512),
        VLLM_SERVER_DEV_MODE="1",
    ) as server:
        _, *steps = run(served(raw, server), tmp_path / "run")
    assert_own_turns(steps, largest_mismatch=1e-5)
    assert steps[-1]["loss"] != steps[0]["loss"]


def test_train_environment_with_old_weights_is_stopped(raw: dict[str, Any], tmp_path: Path) -> None:
    """A server that ignores new weights ends the run: the turns are not those of the student."""
    with SpoilingServer(raw["student"]["model"]) as server:

        class Stale(Silent):
            def step(self, step: int, metrics: dict[str, float]) -> None:
                super().step(step, metrics)
                server.spoil("reload_ignored")

        with pytest.raises(RunStopped, match="sampler"):
            run(served(raw, server), tmp_path / "run", Stale())


def test_conversation_room_is_the_smallest_window() -> None:
    """A teacher's window holds one token less, and does not count where it cuts or drops."""

    class Window:
        def __init__(self, size: int | None):
            self.limits = Limits(max_model_len=size)

    def teachers(**windows: tuple[int | None, str]) -> Any:
        ids = {name: TeacherId(name) for name in windows}
        return Mock(
            spec=Teachers,
            scorers={ids[name]: Window(size) for name, (size, _) in windows.items()},
            routing=SimpleNamespace(
                teachers={
                    ids[name]: SimpleNamespace(on_overflow=rule)
                    for name, (_, rule) in windows.items()
                }
            ),
        )

    assert conversation_room(512, None) == 512
    assert conversation_room(512, teachers(a=(512, "error"), b=(None, "error"))) == 511
    assert conversation_room(512, teachers(a=(900, "error"), b=(100, "drop"))) == 512
    assert conversation_room(512, teachers(a=(300, "error"), b=(400, "error"))) == 299


def test_train_conversation_fills_the_context_of_all_models(
    raw: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last turn ends where the teacher's window does, one token before the student's."""
    from prime_composer.local import engine

    longest: list[int] = []
    score = engine.Teachers.score

    def keep_lengths(self: Any, rollouts: Any, *others: Any, **named: Any) -> Any:
        longest.append(max(len(rollout.token_ids) for rollout in rollouts))
        return score(self, rollouts, *others, **named)

    monkeypatch.setattr(engine.Teachers, "score", keep_lengths)
    full = copy.deepcopy(raw)
    full["rollout"] |= {"max_tokens": 40, "max_model_len": 140}
    full["environments"]["talk"]["args"]["script"] = SUMMARY
    full["trainer"]["steps"] = 1
    records = run(full, tmp_path / "run")
    assert max(longest) == 139
    assert records[-1]["rollout/truncated"] > 0


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


@pytest.mark.parametrize("failing", ["open_sampler", "open_scorer"])
def test_open_engine_that_fails_closes_what_is_open(
    failing: str, raw: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sampler or a teacher that cannot be opened leaves neither endpoint nor sampler behind."""
    from prime_composer.local import engine, environments

    urls: list[str] = []
    samplers: list[Any] = []
    serve, open_sampler = environments.serve, engine.open_sampler

    async def keep_url(*args: Any) -> Any:
        runner, url = await serve(*args)
        urls.append(url)
        return runner, url

    def keep_sampler(*args: Any) -> Any:
        samplers.append(open_sampler(*args))
        return samplers[-1]

    def fail(*args: Any) -> Any:
        port = int(urls[0].rpartition(":")[2].removesuffix("/v1"))
        socket.create_connection(("127.0.0.1", port)).close()
        raise ValueError("it cannot be opened")

    monkeypatch.setattr(environments, "serve", keep_url)
    monkeypatch.setattr(engine, "open_sampler", keep_sampler)
    monkeypatch.setattr(engine, failing, fail)
    recipe = parse_recipe(raw)
    with pytest.raises(ValueError, match="it cannot be opened"):
        engine.open_engine(recipe, load_sources(recipe), {}, lambda text: None)
    with pytest.raises(ConnectionRefusedError):
        fail()
    for sampler in samplers:
        with pytest.raises(ValueError, match="closed"):
            sampler.generate([[1]], PARAMS, seed=0)


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
