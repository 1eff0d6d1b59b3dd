"""A served teacher, by both of its roads, against the same teacher in this process."""

from pathlib import Path

import pytest

from prime_composer.backends.http import ServerError
from prime_composer.recipe.backends import Served
from prime_composer.teachers.server import ServerScorer
from tests.faults.server import SpoilingServer
from tests.trl.test_trainer import JSD, assert_close, sampled_batch, step_of
from tests.vllm_process import QUICK, TeacherProcess, VllmProcess

pytestmark = pytest.mark.xdist_group("trl")

REVERSE = {"type": "topk_reverse_kl", "k": 8}
WHOLE = {"type": "generalized_jsd", "beta": 0.5, "k": "full", "normalization": "full"}
CHOSEN = {"type": "topk_reverse_kl", "k": 8, "chosen_by": "student"}
SCORE_PATH = "/v1/prime_composer/score"


@pytest.fixture(params=["json", "plugin"])
def server(request, models):
    with SpoilingServer(models.teacher_folder, plugin=request.param == "plugin") as server:
        yield server


def assert_as_in_process(make_trainer, url, loss, rtol=1e-4):
    """Compare loss and gradient of one batch, which both teachers score."""
    expected = make_trainer(loss)
    batch = sampled_batch(expected)
    served = make_trainer(loss, teacher=url)
    value, own = step_of(served, [sampled_batch(served)])
    reference, gradient = step_of(expected, [batch])
    assert value == pytest.approx(reference, rel=rtol)
    assert_close(own, gradient, rtol=rtol)
    served.scorer.close()


def test_served_top_k_is_that_of_the_model(make_trainer, server):
    """A JSD with K > 1 from a server, which trl's own server trainer refuses."""
    assert_as_in_process(make_trainer, server.url, JSD)
    road = SCORE_PATH if server.plugin else "/v1/completions"
    assert server.requests[road] >= 8


@pytest.mark.parametrize("loss", [WHOLE, CHOSEN], ids=["whole", "students_choice"])
def test_loss_beyond_top_k_needs_the_plugin(make_trainer, server, loss):
    if server.plugin:
        assert_as_in_process(make_trainer, server.url, loss)
    else:
        with pytest.raises(ServerError, match="no scoring plugin.*prime-composer teacher"):
            make_trainer(loss, teacher=server.url)


def test_completions_of_a_step_are_asked_for_once(make_trainer, models):
    """Micro-batches share the answers of their step."""
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    with SpoilingServer(models.teacher_folder) as server:
        trainer = make_trainer(REVERSE, teacher=server.url, **settings)
        before = server.requests["/v1/completions"]
        trainer.train()
        assert server.requests["/v1/completions"] - before == 8
        trainer.scorer.close()


def test_scorer_with_settings_of_its_own_is_taken(make_trainer, models, monkeypatch):
    monkeypatch.setenv("OWN_KEY", "secret")
    with SpoilingServer(models.teacher_folder, api_key="secret") as server:
        scorer = ServerScorer(
            Served(url=server.url, api_key_var="OWN_KEY"), section="teacher_model"
        )
        trainer = make_trainer(REVERSE, teacher=scorer)
        assert trainer.scorer is scorer
        scorer.close()
        with pytest.raises(ServerError, match="VLLM_API_KEY"):
            make_trainer(REVERSE, teacher=server.url)


@pytest.mark.xdist_group("servers")
@pytest.mark.vllm
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(VllmProcess, id="json", marks=pytest.mark.slow),
        pytest.param(TeacherProcess, id="plugin"),
    ],
)
def test_teacher_on_vllm_is_that_of_the_model(
    make_trainer, models, vllm_forks, tmp_path: Path, kind
):
    """A real server in float32. Both of its roads, and hidden states with the plugin."""
    options = ("--dtype", "float32", *QUICK)
    with kind(models.teacher_folder, tmp_path / "server.log", *options, forks=vllm_forks) as server:
        assert_as_in_process(make_trainer, server.url, JSD, rtol=1e-3)
        if kind is TeacherProcess:
            assert_as_in_process(make_trainer, server.url, WHOLE, rtol=1e-3)
