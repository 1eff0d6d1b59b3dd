"""Environments of verifiers, played in this process by scripted samplers."""

import asyncio
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prime_composer.backends.hf_model import import_transformers
from prime_composer.backends.protocols import Limits, SamplingParams
from prime_composer.environments.episodes import EnvironmentFailed, Episode, Failure
from prime_composer.recipe.environment import EnvironmentConfig
from prime_composer.recipe.schema import RecipeError
from tests.environments.kit import (
    STRIPPING,
    WARNINGS,
    Scripted,
    save_tokenizer,
)

import_transformers()  # before verifiers, which would import it beside a broken torchvision
pytest.importorskip("verifiers.v1", reason="environments by id need verifiers: the extra [env]")

from prime_composer.environments.chat_harness import Tools, first_of_a_group  # noqa: E402
from prime_composer.environments.opening import open_environment  # noqa: E402
from prime_composer.environments.runner import Environments  # noqa: E402

pytestmark = WARNINGS

TOOLS = {"name": "default", "tool_parser": "qwen3"}
PARAMS = SamplingParams(max_tokens=200)


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


def test_run_rounds_sample_all_rollouts_side_by_side(play: Any) -> None:
    """Two turns of three rollouts are two calls of three prompts, in the tasks' order."""
    play(lambda text: "x", args={"script": ["go on"], "tasks": 3})
    assert [len(texts) for texts in play.sampler.calls] == [3, 3]
    for texts in play.sampler.calls:
        assert [f"task {i}" in text for i, text in enumerate(texts)] == [True] * 3
    assert len(set(play.sampler.seeds)) == 2


def test_run_template_that_strips_answers_branches(play: Any, tmp_path: Path) -> None:
    """A turn that the chat template does not keep is not re-tokenized.

    The student trains on the ids that it sampled, spaces included.
    """
    save_tokenizer(tmp_path, STRIPPING)
    episode, _ = play(
        lambda text: "two" if "go on" in text else " one ",
        template_dir=tmp_path,
        args={"script": ["go on"]},
    )
    assert words(play, episode) == [[" one <|im_end|>"], ["two<|im_end|>"]]


def test_run_agrees_with_the_graph_of_verifiers(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids, masks and log-probs are those that verifiers records in its own message graph."""
    from prime_composer.environments import runner as environments

    traces: dict[int, Any] = {}
    outcome = environments.outcome

    def keep(episode: Any, turns: Any, place: int, *others: Any) -> Any:
        (traces[place],) = episode.traces
        return outcome(episode, turns, place, *others)

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
    [r'{"key": "\ud800"}', "[1]", "[" * 100_000, '{"key": ' + 300 * "[" + 300 * "]" + "}"],
    ids=["half", "list", "endless", "deep"],
)
def test_tools_arguments_that_cannot_be_sent_are_an_error(arguments: str) -> None:
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
    from prime_composer.environments import runner as environments

    monkeypatch.setattr(environments, "PATIENCE", 0.2)
    with pytest.raises(EnvironmentFailed, match="environments talk have neither asked.*blocks"):
        play(lambda text: "x", args={"script": [{"block": 4}], "tasks": 1}, timeout=0.2)


def test_run_full_context_is_a_failure(play: Any) -> None:
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
        ({"id": "tiny-v0"}, "verifiers' v1 API.*__all__"),
        ({"id": "tiny-talk", "args": {"wrong": 1}}, "args.*wrong"),
        ({"id": "tiny-talk", "args": {"tasks": 0}}, "has no tasks"),
    ],
)
def test_open_environment_unusable_is_named(config: dict[str, Any], message: str) -> None:
    """Unknown, of the old API, with wrong arguments, or empty: one sentence with the remedy."""
    with pytest.raises(RecipeError, match=rf"(?s)\[environments\.x\].*{message}"):
        open_environment("x", EnvironmentConfig(**config))


def test_open_environment_harness_with_uv_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import tiny_talk

    monkeypatch.setattr(tiny_talk, "__all__", ["TalkTaskset"])
    monkeypatch.setattr("verifiers.v1.utils.loaders.default_harness_id", lambda taskset_id: "rlm")
    with pytest.raises(RecipeError, match="harness 'rlm', which needs uv and a network"):
        open_environment("x", EnvironmentConfig(id="tiny-talk"))


def test_environments_tools_without_a_parser_are_refused(tokenizer_dir: Path) -> None:
    environment = open_environment("x", EnvironmentConfig(id="tiny-lookup"))
    with pytest.raises(RecipeError, match=r"has tools, and the renderer.*\[rollout\] renderer"):
        Environments({"x": environment}, str(tokenizer_dir), {}, print)
