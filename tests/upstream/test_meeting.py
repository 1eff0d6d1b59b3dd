"""The first meeting with a teacher's server: one with another tokenizer trains nothing."""

import asyncio
import contextlib

import pytest
import torch

pytest.importorskip("numpy")
pytest.importorskip("msgspec")
openai = pytest.importorskip("openai")

from prime_composer.backends.hf_model import load_model  # noqa: E402
from prime_composer.backends.protocols import Rollout  # noqa: E402
from prime_composer.backends.server import Card  # noqa: E402
from prime_composer.teachers.server import ServerScorer  # noqa: E402
from prime_composer.upstream.keys import SWITCH  # noqa: E402
from prime_composer.upstream.orchestrator.client import Requests  # noqa: E402
from prime_composer.upstream.settings import AdapterSettings, Teacher  # noqa: E402
from prime_composer.upstream.trainer import questions as trainer  # noqa: E402
from tests.conftest import TINY_RECIPE  # noqa: E402
from tests.faults.server import SpoilingServer  # noqa: E402
from tests.local.helpers import tiny_models  # noqa: E402
from tests.stand_in import Reply, serving  # noqa: E402
from tests.teachers.own import STUDENT, TEACHER, wrapped  # noqa: E402

K = 4
LOSS = {"type": "topk_reverse_kl", "k": K}


def reading_as(tokenizer):
    """Return the answers of a server that reads up to 512 tokens, and scores nothing."""

    def answer(path, body):
        if path == "/tokenize":
            ids = tokenizer.encode(body["prompt"], add_special_tokens=False)
            return Reply.of({"tokens": ids, "count": len(ids), "max_model_len": 512})
        if path == "/detokenize":
            return Reply.of({"prompt": tokenizer.decode(body["tokens"])})
        return Reply.of({"error": "it scores nothing"}, status=404)

    return answer


async def by_orchestrator(url):
    """Ask for two rollouts at once, as prime-rl does, by its openai client."""
    requests = Requests()
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="EMPTY", max_retries=0) as client:
        ask = [requests.score(client, "m3", [1, 2, 3], K, frozen=True) for _ in range(2)]
        for result in await asyncio.gather(*ask, return_exceptions=True):
            if not isinstance(result, openai.OpenAIError):
                raise result


async def by_trainer(url):
    with contextlib.closing(Opened(url, "m3")) as scorer:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trainer, "ServerScorer", lambda *_, **__: scorer)
            teacher = Teacher(url=url, model="m3", weight=1.0)
            trainer.TeacherConnections([], K, False).frozen(teacher)


class Opened(ServerScorer):
    """A connection to a server whose list of models is known."""

    window = 512

    def _find(self, model):
        return Card(model, model, self.window)


@pytest.fixture(params=[by_orchestrator, by_trainer])
def meet(request, monkeypatch, tmp_path):
    """Return a function that meets a server for a student, with settings as the launcher's."""
    wrapped(STUDENT).save_pretrained(tmp_path)
    settings = AdapterSettings(loss=LOSS, k=K, student_tokenizer=str(tmp_path), seq_len=512)

    def meeting(answer, window=512, **changed):
        value = settings.model_copy(update=changed).to_env()[SWITCH]
        monkeypatch.setenv(SWITCH, value)
        monkeypatch.setattr(Opened, "window", window)
        with serving(answer) as url:
            asyncio.run(request.param(url))

    return meeting


def test_meeting_refuses_a_teacher_with_another_tokenizer(meet):
    """Nobody has declared it, and its scores would look like any others."""
    with pytest.raises(ValueError, match="other tokens than the student.*teacher_tokenizers"):
        meet(reading_as(wrapped(TEACHER)))


def test_meeting_names_a_window_below_the_runs_sequences(meet, capfd):
    meet(reading_as(wrapped(STUDENT)))
    said = capfd.readouterr().err
    assert "reads at most 511 tokens" in said and "--max-model-len 513" in said
    meet(reading_as(wrapped(STUDENT)), seq_len=511)
    said = capfd.readouterr().err
    assert "reads at most" not in said and "not compared with the student" not in said


def test_meeting_says_what_was_not_compared(meet, capfd):
    """A server that does not tell, and processes that were started without the student's name."""
    silent = reading_as(None)
    meet(lambda path, body: silent("/else", body), window=None)
    said = capfd.readouterr().err
    assert "not compared" in said and "/tokenize" in said and "longest sequence" in said
    meet(reading_as(wrapped(STUDENT)), student_tokenizer=None)
    assert "student_tokenizer is None" in capfd.readouterr().err


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A checkpoint with another head, as a LoRA adapter on it makes one."""
    directory = tmp_path_factory.mktemp("other")
    model = load_model(tiny_models(TINY_RECIPE)["teacher"])
    with torch.no_grad():
        model.lm_head.weight.mul_(-2)
    model.save_pretrained(directory)
    return directory


IDS = [5 + (7 * i) % 100 for i in range(24)]


async def scored_by_orchestrator(url, model):
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="EMPTY", max_retries=0) as client:
        return await Requests().score(client, model, IDS, K, frozen=True)


async def scored_by_trainer(url, model):
    with contextlib.closing(ServerScorer(url, model)) as scorer:
        rollout = Rollout.not_sampled(torch.tensor(IDS), 1, "length")
        (scores,) = trainer.Frozen(scorer, K, False).ask([rollout])()
    return scores


@pytest.mark.parametrize("plugin", [True, False])
@pytest.mark.parametrize("road", [scored_by_orchestrator, scored_by_trainer])
def test_server_that_scores_otherwise_than_it_samples(road, plugin, other, monkeypatch, capfd):
    """Its first scores never train; one that does not sample is used, and named in the log."""
    monkeypatch.delenv(SWITCH, raising=False)
    teacher = tiny_models(TINY_RECIPE)["teacher"]
    with SpoilingServer(teacher, plugin=plugin, other=other) as server:
        scores = asyncio.run(road(server.url, str(teacher)))
        assert len(scores) == len(IDS) - 1
        assert "does not generate" not in capfd.readouterr().err
        server.spoil("status_404", road="sampling")
        asyncio.run(road(server.url, str(teacher)))
        assert "does not generate" in capfd.readouterr().err
        server.heal()
        server.spoil("other_model", road="binary" if plugin else "scoring")
        with pytest.raises(ValueError, match="samples them, and of .* adapter merged"):
            asyncio.run(road(server.url, str(teacher)))
