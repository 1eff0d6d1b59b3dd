"""Checks before the first step: what is refused, and with which remedy."""

import json
import shutil
from contextlib import closing, nullcontext
from functools import partial
from itertools import product

import pytest
import torch

from prime_composer.backends.alignment import make_rollout
from prime_composer.backends.answers import InvalidAnswer
from prime_composer.backends.hf_model import load_model
from prime_composer.backends.http import ServerError
from prime_composer.backends.protocols import Limits
from prime_composer.contract import Scores
from prime_composer.local.context import check_fits
from prime_composer.local.preflight import own_scores, preflight
from prime_composer.local.weight_sync import check_weight_sync
from prime_composer.recipe.routing import TeacherId
from prime_composer.samplers.transformers import TransformersSampler
from prime_composer.step.batch import Sample
from prime_composer.teachers.compatibility import (
    PreflightError,
    check_served_tokenizer,
    check_tokenizers,
    check_vocabularies,
)
from prime_composer.teachers.server import ServerScorer
from tests.chat_models import SPECIAL, make_tokenizer
from tests.conftest import TINY_RECIPE
from tests.faults.server import SpoilingServer
from tests.local.helpers import open_run, opened, run, tiny_models
from tests.teachers.own import wrapped

PROMPTS = [[(5 * i + 3 * j) % 120 + 4 for j in range(20)] for i in range(12)]


MERGES = [("s", "o"), ("o", "l")]


@pytest.mark.parametrize(
    ("student", "teacher", "words"),
    [
        (partial(wrapped, MERGES), partial(wrapped, MERGES[::-1]),
         r"'ol' is 257 and 256\); choose a teacher and a student with one tokenizer"),
        (make_tokenizer, partial(make_tokenizer, special=SPECIAL[::-1]),
         r"special token '<\|endoftext\|>' has id 0 for the student and 2 for the teacher"),
        (partial(wrapped, [*MERGES, ("so", "l")]), partial(wrapped, [*MERGES, ("s", "ol")]),
         "although their vocabularies are equal"),
    ],
    ids=["swapped", "special", "merges"],
)  # fmt: skip
def test_vocabularies_with_swapped_ids_are_refused(student, teacher, words):
    """So are other ids of special tokens, and other splits."""
    with pytest.raises(PreflightError, match=words):
        check_tokenizers(student(), teacher())


@pytest.mark.parametrize(
    ("student", "teacher", "limit", "k", "message"),
    [
        (6, 7, 20, 4, "7 tokens and the student's head 6 entries; resize"),
        (7, 6, 20, 4, "7 tokens and the teacher's head 6 entries; choose"),
        (64, 64, 20, 32, "K = 32 teacher log-probs .* answers at most 20; .*--max-logprobs 32"),
        (64, 72, 72, "full", "student's has 64 entries and the teacher's 72"),
    ],
)
def test_k_or_head_out_of_reach_names_sizes_and_remedy(student, teacher, limit, k, message):
    limits = Limits(vocab_size=teacher, max_logprobs=limit)
    with pytest.raises(PreflightError, match=message):
        check_vocabularies(student, limits, 7, k)


@pytest.mark.parametrize(
    ("reader", "max_tokens", "message"),
    [
        ("teacher's scorer", 9, None),
        ("teacher's scorer", 10, "longest prompt .* is 30, .* takes 29; .* to 31"),
        ("student's sampler", 10, None),
    ],
)
def test_context_too_short_names_the_length_to_set(reader, max_tokens, message):
    asked = reader, 30, {"prompt": [3, 20]}, max_tokens
    with pytest.raises(PreflightError, match=message) if message else nullcontext():
        check_fits(*asked)


@pytest.fixture
def sampler(vllm_sampler, models):
    yield vllm_sampler
    vllm_sampler.update_weights(models.tied_model)


@pytest.mark.vllm
def test_weight_sync_agrees_to_a_ten_thousandth_of_a_nat(sampler, tied_model):
    assert check_weight_sync(sampler, tied_model, PROMPTS) < 1e-4


@pytest.mark.vllm
def test_weight_sync_names_a_stale_tied_head(sampler, tied_model, monkeypatch):
    def update_by_parameters(model):
        weights = iter([*model.named_parameters()])
        sampler.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        sampler.forget_prefixes()

    monkeypatch.setattr(sampler, "update_weights", update_by_parameters)
    with pytest.raises(PreflightError, match="disagree by .* lm_head.weight .* tied"):
        check_weight_sync(sampler, tied_model, PROMPTS)


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("forget_prefixes", "disagree by .* reset its prefix cache"),
        ("update_weights", "kept old weights"),
    ],
)
def test_weight_sync_names_what_is_stale(sampler, tied_model, monkeypatch, name, words):
    monkeypatch.setattr(sampler, name, lambda *_: None)
    with pytest.raises(PreflightError, match=words):
        check_weight_sync(sampler, tied_model, PROMPTS)


def rounded(sampler):
    """Move one of eight log-probs by 0.8 nat, which is bfloat16's rounding."""
    generate = sampler.generate

    def moved(*args, **kwargs):
        (rollout,) = generate(*args, **kwargs)
        rollout.inference_logprobs[-1] -= 0.8
        return [rollout]

    sampler.generate = moved


def deaf(sampler, updates=0):
    """Let a sampler take weights so many times."""
    update, calls = sampler.update_weights, []
    sampler.update_weights = lambda model: (
        calls.append(1), len(calls) <= updates and update(model)
    )  # fmt: skip


@pytest.mark.parametrize(
    ("spoil", "dtype", "words"),
    [
        (rounded, "float32", "disagree by 0.8 nat"),
        (rounded, "bfloat16", None),
        (deaf, "float32", "kept old weights"),
        (deaf, "bfloat16", "kept old weights"),
        (lambda sampler: deaf(sampler, 1), "float32", "After a second weight sync"),
    ],
)
def test_weight_sync_that_does_not_work_is_refused(models, tied_model, spoil, dtype, words):
    sampler = TransformersSampler(models.tied)
    spoil(sampler)
    if words is None:
        assert 0.05 < check_weight_sync(sampler, tied_model, PROMPTS, dtype) < 0.5
        return
    with pytest.raises(PreflightError, match=words):
        check_weight_sync(sampler, tied_model, PROMPTS, dtype)


def test_weight_sync_refuses_a_sampler_of_other_weights(models, tied_model):
    with pytest.raises(PreflightError, match="before any training .* load the same weights"):
        check_weight_sync(TransformersSampler(models.untied), tied_model, PROMPTS)


def alien_scores(token):
    """Scores of four tokens whose last position lists an id."""
    ids = torch.tensor([[5, 6], [5, 6], [5, 6], [5, token]])
    return Scores(torch.full((4,), -3.0), ids, torch.full((4, 2), -1.0))


def test_engine_refuses_ids_beyond_the_students_head(tiny_recipe, monkeypatch):
    """A teacher that lists such an id in mid-run ends it with its table, the id, and a remedy."""
    with opened(tiny_recipe()) as engine:
        scorer = engine.teachers.scorers[TeacherId()]
        monkeypatch.setattr(scorer, "score", lambda *_, **__: [alien_scores(9999)])
        rollout = make_rollout([7, 8], [5, 9, 6, 1], [-1.0] * 4, "stop", 0)
        message = r"\[teacher\]: the scores of rollout 0 list id 9999, .* 300 entries, .* choose a"
        with pytest.raises(InvalidAnswer, match=message):
            engine.score([Sample(rollout, engine.problems.problem_set.practice[0])])


@pytest.fixture
def served_elsewhere(tmp_path):
    """A server of the tiny teacher whose directory is gone; it is on another machine."""
    directory = tmp_path / "teacher"
    shutil.copytree(tiny_models(TINY_RECIPE)["teacher"], directory)
    with SpoilingServer(directory) as server:
        shutil.rmtree(directory)
        yield server


def test_teacher_that_samples_needs_a_known_tokenizer(served_elsewhere, tiny_recipe):
    """Of a teacher on another machine its server is asked, and a warning where it cannot say.

    Ids that nobody has compared are never trained on.
    """
    teacher = {"model": served_elsewhere.model, "url": served_elsewhere.url}
    sampling = {"rollout__other_source": "teacher", "rollout__student_fraction": 0.5}
    remedy = "set teacher.model to its directory"
    for changes, can_tokenize in product(({}, sampling), (True, False)):
        served_elsewhere.can_tokenize = can_tokenize
        recipe, engine = open_run(tiny_recipe(teacher=teacher, **changes))
        with engine:
            if changes and not can_tokenize:
                message = f"other_source = 'teacher' trains on them; {remedy}"
                with pytest.raises(PreflightError, match=message):
                    preflight(engine, recipe, lambda text: None)
                continue
            warnings = preflight(engine, recipe, lambda text: None).warnings
            assert [f"{remedy} or hub id" in one for one in warnings] == [True] * (not can_tokenize)


def test_served_tokenizer_that_splits_otherwise_is_refused(served_elsewhere, student):
    """The message shows the text, and the first token that differs."""
    served_elsewhere.spoil("tokens_shifted", road="tokenize")
    scorer = ServerScorer(served_elsewhere.url, served_elsewhere.model)
    with pytest.raises(PreflightError, match="server reads 'Natalia .* token 0 is"):
        check_served_tokenizer(student[1], scorer)
    scorer.close()


def test_served_tokenizer_with_swapped_tokens_is_refused(tmp_path, student):
    """Two rare tokens that changed places are found among the sampled ids, and one is named."""
    shutil.copytree(tiny_models(TINY_RECIPE)["teacher"], tmp_path / "teacher")
    file = tmp_path / "teacher" / "tokenizer.json"
    table = json.loads(file.read_text())
    vocab = table["model"]["vocab"]
    one, other = sorted(vocab, key=vocab.get)[-2:]
    vocab[one], vocab[other] = vocab[other], vocab[one]
    file.write_text(json.dumps(table))
    with SpoilingServer(tmp_path / "teacher") as server:
        scorer = ServerScorer(server.url, server.model)
        named = f"Some ids are other tokens .* for example {vocab[other]}, "
        with pytest.raises(PreflightError, match=named):
            check_served_tokenizer(student[1], scorer)
        scorer.close()


@pytest.mark.parametrize(
    ("k", "less", "message"),
    [
        ("full", 1, "set k to a number .* to 23."),
        (8, 1, "lower the loss's k, .* to 23."),
        (8, 0, None),
    ],
)
def test_preflight_refuses_rollouts_beyond_a_servers_answer(k, less, message, tiny_recipe):
    """A token takes 4 bytes, 8 for each id of the support, and 4 for each hidden number."""
    directory = tiny_models(tiny_recipe())["teacher"]
    loss = {"type": "topk_reverse_kl", "k": k}
    with SpoilingServer(directory, plugin=True) as server:
        columns = server._right.model.config.hidden_size
        most = 24 * (4 + 8 + 4 * columns if k == "full" else 4 + 8 * k) - less
        limits = {"sequences": 9, "tokens": 2**20, "question_bytes": 2**20, "answer_bytes": most}
        server._right.limits = limits
        teacher = {"model": server.model, "url": server.url}
        recipe, engine = open_run(tiny_recipe(teacher=teacher, loss=loss, rollout__max_tokens=24))
        with engine:
            if message is None:
                preflight(engine, recipe, lambda text: None)
                return
            with pytest.raises(ServerError, match=f"24 tokens of its own takes .*{message}"):
                preflight(engine, recipe, lambda text: None)


def hinted(policy, **rollout):
    """Return a recipe whose teacher is the policy with a hint."""
    sizes = {f"rollout__{key}": value for key, value in rollout.items()}
    loss = {"type": "self_distillation", "k": 8}
    return {"teacher": {"policy": policy}, "loss": loss, "rollout__group_size": 2} | sizes


SIBLING = {"hint": "sibling", "template": "{question} {hint}"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # E_p[grad log p] = 0: it would walk at random.
        ({"loss": {"type": "sft"}}, r"\[loss\] type = 'sft' .* set rollout.student_fraction = 0"),
        (
            hinted({"template": "{question} {hint}" + " x" * 150}, max_model_len=1000),
            "the student with a hint takes 256;",
        ),
        # A sibling's text may take all of max_tokens, whatever the data's own solutions take.
        (
            hinted(SIBLING, max_tokens=90, max_model_len=200),
            "with a hint takes 200; raise rollout.max_model_len",
        ),
    ],
    ids=["sft", "positions", "sibling"],
)
def test_preflight_refuses_what_cannot_train(changes, message, tiny_recipe, tmp_path):
    """The longest hint, attempt and response are compared with the context and the positions."""
    with pytest.raises(PreflightError, match=message):
        run(tiny_recipe(**changes), tmp_path / "run")


@pytest.mark.parametrize("plugin", [True, False])
def test_server_that_scores_otherwise_than_it_samples_is_refused(plugin, tiny_recipe, tmp_path):
    """As vLLM does with a LoRA adapter on the output head. One that samples nothing is said."""
    models = tiny_models(tiny_recipe())
    other = load_model(models["teacher"])
    with torch.no_grad():
        other.lm_head.weight.mul_(-2)
    other.save_pretrained(tmp_path)
    otherwise = (
        "mean log-prob of -.* where it samples them, and of -.* adapter merged into its model"
    )
    with (
        SpoilingServer(models["teacher"], plugin=plugin, other=tmp_path) as server,
        closing(ServerScorer(server.url, server.model)) as scorer,
    ):
        server.spoil("other_model", road="binary" if plugin else "scoring")
        with pytest.raises(PreflightError, match=otherwise):
            own_scores(scorer, [5, 6, 7])
        server.heal()
        server.spoil("status_404", road="sampling")
        (found,) = own_scores(scorer, [5, 6, 7])
    assert "does not generate" in found
