"""A whole run of an unmodified prime-rl on an environment of verifiers by id, in several turns.

As in test_whole_run.py, whose functions and stand-ins these are. It is the one with tools of
recipes/agent_opd.toml, with that recipe's models, renderer and loss.
"""

import itertools
import json
import os
import re
import shutil
import tomllib
from collections import Counter

import pytest
from tokenizers import Tokenizer

from prime_composer.problems.orders import price, times
from tests.prime_rl_checkout import REPO
from tests.upstream import test_whole_run as whole_run
from tests.upstream.test_export_upstream import AGENT
from tests.upstream.test_whole_run import other

models = whole_run.models


def trained_sequences(result):
    """Return tokens and mask of each sequence of each step, up to the last token that trains."""
    steps = []
    for ranks in whole_run.step_batches(result):
        sequences = []
        for micro_batch in itertools.chain(*ranks):
            for span in whole_run.spans(micro_batch):
                tokens, mask = (field[span] for field in micro_batch[:2])
                sequences.append((tokens, [t for t, trains in enumerate(mask) if trains]))
        steps.append(sequences)
    return steps


def sampled_places(tokens, requests):
    """Return the places of the tokens that the student's server sampled, and the number of turns.

    Each of a rollout's requests is the beginning of its sequence, which the trainer may have cut in
    the last turn. Another rollout's answer may be the beginning of this one's, so that of each turn
    the longest one counts.
    """
    turns = {}
    for request in requests:
        start, seen = len(request["in"]), (request["in"] + request["out"])[: len(tokens)]
        if start < len(tokens) and tokens[: len(seen)] == seen:
            turns[start] = max(len(seen), turns.get(start, 0))
    places = [place for start in sorted(turns) for place in range(start, turns[start])]
    return places, len(turns)


def check_divergence(result, step, k, error):
    """Compare the first step's metric with the models alone, and return the models' numbers."""
    teachers = {str(result["models"] / "teacher"): 1.0}
    file = result["folder"] / "sequences.json"
    file.write_text(json.dumps([[tokens, places, teachers] for tokens, places in step]))
    newest = max((result["folder"] / "outputs").rglob("broadcasts/step_*"), key=whole_run.step_of)
    words = result["models"] / "student", k, file, newest
    expected = json.loads(whole_run.script(result["python"], "reference.py", *words))
    rows = whole_run.metric_rows(result)
    whole_run.check_kl(whole_run.first_value(rows, "topk_reverse_kl/kl/mean"), expected, error)
    return expected


CHAT = {"env": {"agent": {"harness": {"id": "tiny-chat"}}}}
"""The plain chat with tools that one machine has, in the place of verifiers' program for it."""


@pytest.fixture(scope="module")
def orders_module(tmp_path_factory):
    """Return a folder with the environment's module, as the wheel places it."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copy(REPO / "prime_composer" / "upstream" / "prime_composer_orders.py", folder)
    return folder


@pytest.fixture(scope="module")
def orders_models(orders_module, tmp_path_factory):
    """Return a function that makes the recipe's models once."""
    folder = tmp_path_factory.mktemp("models")

    def make(python):
        if not list(folder.iterdir()):
            path = os.pathsep.join(map(str, (REPO, orders_module)))
            whole_run.script(python, "orders_models.py", AGENT, folder, PYTHONPATH=path)
        return folder

    return make


CALL = re.compile(
    r"<tool_call>(.*?)</tool_call><\|endoftext\|><\|tool\|>(.*?)<\|endoftext\|>", re.DOTALL
)
"""A call of a tool, and what the tool answered: an error has several lines."""


def tool_says(call):
    """Return what the tool answers to a call, None where it is not called as it can be."""
    try:
        function = json.loads(call)
        return {"price": price, "times": times}[function["name"]](**function["arguments"])
    except (KeyError, TypeError, ValueError):
        return None


def assistants_places(tokens, tokenizer):
    """Return the places from each <|assistant|> to the end of its turn, by the tokens alone."""
    begin, end = map(tokenizer.token_to_id, ("<|assistant|>", "<|endoftext|>"))
    places, speaks = [], False
    for place, token in enumerate(tokens):
        if speaks:
            places.append(place)
        speaks = token == begin or (speaks and token != end)
    return places


def trained_elsewhere(tokens, trained, every):
    """Return places before the trained ones that another sequence of the same rollout trains.

    That is a turn whose tokens the next prompt did not keep: the rollout goes on in a sequence of
    its own, in which the turns before it are context.
    """
    for sequence, places in every:
        shared = [place for place in places if place < trained[0]]
        if sequence == tokens or not shared:
            continue
        if sequence[: shared[-1] + 1] == tokens[: shared[-1] + 1]:
            return shared
    return []


@other
def test_whole_run_trains_on_an_environment_with_tools(
    trees, orders_models, orders_module, tmp_path
):
    """Of a price, a product and an answer the student's own tokens train, the tools' do not."""
    recipe = tomllib.loads(AGENT.read_text())
    loss, table = recipe["loss"], recipe["environments"]["orders"]
    result = whole_run.run(
        trees,
        orders_models,
        tmp_path,
        loss,
        environments={"orders": {**table, "timeout": 300, "prime_rl": CHAT}},
        rollout={key: recipe["rollout"][key] for key in ("renderer", "max_tokens")},
        seq_len=recipe["rollout"]["max_model_len"],
        lr=recipe["trainer"]["lr"],
        modules=[orders_module],
    )
    assert "topk_reverse_kl was called" in result["trainer"]
    requests = whole_run.generate_requests(result, "student")
    scored = [r["in"] for r in whole_run.generate_requests(result, "teacher")]
    tokenizer = Tokenizer.from_file(str(result["models"] / "student" / "tokenizer.json"))
    steps, turns_of, answers = trained_sequences(result), Counter(), Counter()
    every = [sequence for step in steps for sequence in step]
    for tokens, trained in every:
        places, turns = sampled_places(tokens, requests)
        text = tokenizer.decode(tokens, skip_special_tokens=False)
        earlier = trained_elsewhere(tokens, trained, every)
        assert sorted([*earlier, *trained]) == places, (turns, text)
        spoken = assistants_places(tokens, tokenizer)
        assert set(places) <= set(spoken), text
        # The whole context in one request.
        assert any(one[: len(tokens)] == tokens for one in scored)
        turns_of[turns if places == spoken else "forked"] += 1
        said = CALL.findall(text)
        assert len(said) >= turns - 1, text
        answers.update(answer == tool_says(call) for call, answer in said)
    # Most rollouts have three turns, in each of which the student's tokens are those that train.
    assert turns_of[3] > len(every) / 2, turns_of
    assert answers[True] > 4 * answers[False], answers  # some calls the tools do not understand
    # A teacher is asked for the beginning of its first sequence again, and for no other part.
    parts = [one for one in scored for tokens, _ in every if one == tokens[: len(one)]]
    assert len(parts) - len(every) <= 1
    expected = check_divergence(result, steps[0], loss["k"], error=1e-3)
    assert whole_run.mean(expected["tail_kl"]) > 4e-3
    whole_run.check_update(expected, whole_run.last_update(result))
