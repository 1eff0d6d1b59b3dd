"""Whole runs of an unmodified prime-rl on a CPU: launcher, orchestrator, env server and trainer.

Each distills for three optimizer steps, with the teacher's top-K sent by our adapter. One is v0.6,
with the five lines alone. Its numbers
are compared with float64, in scripts that import nothing of this package. A run takes about a
minute. It needs a checkout of prime-rl and the environments of make_venvs.py, and is skipped
without them.

    pytest tests/upstream -m upstream                     some, as CI does
    pytest tests/upstream -m "upstream or slow"           all of them
    PRIME_COMPOSER_WHOLE_RUNS=all pytest tests/upstream   all of them, and the quick tests

What stands in for a GPU is in rig/, what stands in for vLLM is e2e/server.py. Both exist in the
processes of a test only.
"""

import atexit
import base64
import functools
import importlib.util
import itertools
import json
import math
import os
import re
import sys
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer

from prime_composer.backends.hf_model import load_tokenizer
from prime_composer.scoring.wire import SCORE_PATH
from tests.fork_server import ForkServer
from tests.upstream.e2e import cpu_recipe, launch_run
from tests.upstream.e2e.launch_run import KEPT
from tests.upstream.make_venvs import NO_VENV, is_ready, python_of

HERE = Path(__file__).parent
E2E = HERE / "e2e"
LIBRARIES = (
    "msgspec",
    "torch._dynamo",
    "safetensors.torch",
    "transformers.models.qwen3.modeling_qwen3",
)
"""What the scripts of e2e/ import, of the environment of a prime-rl."""
EXAMPLES = HERE.parent / "examples"

newest = pytest.mark.upstream
other = pytest.mark.slow

K = 8
TOP_K = {"type": "topk_reverse_kl", "k": K}
SAMPLED = {"type": "sampled_reverse_kl"}
SAMPLED_V0_6 = {**SAMPLED, "dialect": "v0_6"}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return a function that makes the tiny models once per list of options."""
    folders = {}

    def make(python, *options):
        if options not in folders:
            folder = tmp_path_factory.mktemp("models")
            script(python, "models.py", folder, *options)
            folders[options] = folder
        return folders[options]

    return make


def cpu_env():
    """Return the environment of scripts that need no prime-rl."""
    return {**launch_run.without_adapter(), "PYTHONPATH": ""}


@functools.cache
def forks(python):
    """Return a server whose forks have imported what the scripts of e2e/ import."""
    server = ForkServer(*LIBRARIES, python=python)
    atexit.register(server.close)
    return server


def script(python, name, *words, **more):
    """Return what a script of e2e/ prints; ``more`` are variables of its environment."""
    done = forks(python).run(E2E / name, *words, env={**cpu_env(), **more})
    assert done.returncode == 0, done.stderr
    return done.stdout


def run(
    trees,
    models,
    folder,
    loss,
    *,
    version="head",
    vllm=None,
    by_vllm=("student", "teacher", "other"),
    plugin=False,
    tied=False,
    replay=False,
    apart=False,
    declared=True,
    switch="1",
    several=False,
    words=False,
    modules=(),
    meanwhile=None,
    tree=None,
    **recipe,
):
    """Do one whole run, and return the servers' requests, the trainer's log and the folder.

    Args:
        version: head, or v0.6 with its five lines.
        vllm: Python of real vLLM servers; None for the stand-in.
        by_vllm: roles that vLLM has. The stand-in has the others.
        plugin: the teacher's server has the scoring plugin.
        tied: one matrix for embedding and head.
        apart: the teacher has a tokenizer of its own.
        declared: the recipe says so.
        replay: the student has experts, and the trainer replays those of its server.
        switch: value of PRIME_COMPOSER, None for the plain launcher.
        several: two teachers, and two environments with mixtures of them.
        words: the student's answers are of letters, of different lengths.
        modules: folders for PYTHONPATH.
        meanwhile: called with the servers by role, beside the run.
        tree: one of ``BRANCHES``, in the place of the version's own sources.
        recipe: arguments of ``cpu_recipe.native``.
    """
    if not is_ready(version):
        pytest.skip(NO_VENV)
    python = str(python_of(version))
    chosen = {"tied": tied, "experts": replay, "apart": apart}
    options = [f"--{name}" for name, on in chosen.items() if on]
    model_folder = models(python, *options)
    folder.mkdir(exist_ok=True)
    roles = ("student", "teacher", *(["other"] if several else []))
    servers = {}
    for core, role in enumerate(roles):
        files = (model_folder / role).resolve(), folder / f"{role}.jsonl"
        if vllm is not None and role in by_vllm:
            with_plugin = plugin and role == "teacher"
            servers[role] = launch_run.VllmServer(vllm, *files, str(core), with_plugin)
            continue
        servers[role] = launch_run.Server(
            forks(python),
            *files,
            *(["--words"] if words and role == "student" else []),
            *(["--experts"] if replay and role == "student" else []),
            *(["--plugin"] if plugin and role != "student" else []),
        )
    try:
        for server in servers.values():
            server.wait()
        if several:
            recipe["other"] = servers["other"].url
        urls = servers["student"].url, servers["teacher"].url
        config = folder / "run.toml"
        if version == "v0.6":
            text = cpu_recipe.five_lines(*urls, model_folder, loss)
        else:
            chosen = {"replay": replay, "apart": apart and declared}
            text = cpu_recipe.native(*urls, model_folder, loss, **chosen, **recipe)
        config.write_text(text)
        switches = {} if switch is None else {"PRIME_COMPOSER": switch}
        sources = trees(tree or version)
        env = launch_run.environment(python, sources, folder, **switches)
        env["PYTHONPATH"] = os.pathsep.join([*map(str, modules), env["PYTHONPATH"]])
        command = [python, "-m", "prime_rl.entrypoints.rl", "@", str(config)]
        if meanwhile is not None:
            threading.Thread(target=meanwhile, args=(servers,), daemon=True).start()
        code = launch_run.run(command, env, folder, 900)
    finally:
        for server in servers.values():
            server.stop()
    # A resume begins new logs: of each name the newest counts.
    oldest_first = sorted(folder.rglob("*.log"), key=lambda path: path.stat().st_mtime)
    logs = {path.name: path.read_text(errors="replace") for path in oldest_first}
    if code != 0:
        tails = "\n".join(f"== {name}\n{text[-3000:]}" for name, text in logs.items())
        pytest.fail(f"the launcher ended with {code}\n{tails}")
    return {
        "python": python,
        "models": model_folder,
        "folder": folder,
        "trainer": logs["trainer.log"],
        **{role: server.requests() for role, server in servers.items()},
    }


def metric_rows(result):
    """Return the trainer's metrics: of prime-rl's JSONL monitor; of v0.6, of W&B's offline file."""
    outputs = result["folder"] / "outputs"
    if (outputs / "metrics.jsonl").exists():
        lines = (outputs / "metrics.jsonl").read_text().splitlines()
    else:
        (file,) = (outputs / "wandb").glob("offline-run-*/*.wandb")
        lines = script(result["python"], "read_wandb.py", file).splitlines()
    return [json.loads(line) for line in lines]


def first_value(rows, name):
    return next(row[name] for row in rows if name in row)


def generate_requests(result, role):
    """Return a server's requests to sample or to score, in order."""
    return [
        request
        for request in result[role]
        if request["path"] in ("/inference/v1/generate", SCORE_PATH) and "in" in request
    ]


def step_of(folder):
    return int(Path(folder).name.removeprefix("step_"))


def reference(result, mixture=lambda tokens: {"teacher": 1.0}):
    """Return the float64 numbers of the first batch that the teacher scored, and the last update.

    ``mixture`` gives the weights of the teachers by role, of a sequence.
    """
    sampled = generate_requests(result, "student")
    prompts = {json.dumps(r["in"] + r["out"]): len(r["in"]) for r in sampled}
    # A teacher is asked for the beginning of its first sequence again, which may be all of it.
    asked = dict.fromkeys(json.dumps(r["in"]) for r in generate_requests(result, "teacher"))
    scored = [json.loads(tokens) for tokens in asked if tokens in prompts][: cpu_recipe.BATCH]
    sequences = [
        [
            tokens,
            prompts[json.dumps(tokens)],
            {str(result["models"] / role): w for role, w in mixture(tokens).items()},
        ]
        for tokens in scored
    ]
    file = result["folder"] / "sequences.json"
    file.write_text(json.dumps(sequences))
    update = last_update(result)
    # The directory that the server read may be gone: the trainer keeps its last broadcasts.
    broadcast = max((result["folder"] / "outputs").rglob("broadcasts/step_*"), key=step_of)
    words = result["models"] / "student", K, file, broadcast
    return json.loads(script(result["python"], "reference.py", *words)), update


def last_update(result):
    """Return the request with the newest weights that the student's server took."""
    update = [r for r in result["student"] if r.get("weight_dir")][-1]
    assert step_of(update["weight_dir"]) > 0, "the server took no new weights"
    return update


def mean(values):
    return sum(values) / len(values)


def check_kl(actual, expected, error=5e-3):
    """Compare a run's mean divergence with float64's, of transformers' own forward in bfloat16.

    Rounding in the models' forward alone moves such a mean by 2 to 7 % of float64's, where a few of
    some hundred positions make most of it: the two models without prime-rl show the same.
    """
    assert actual == pytest.approx(mean(expected["tail_kl_bfloat16"]), abs=error)


def check_update(expected, update):
    """Check that the weights moved, reached the inference server whole, and that it took them."""
    assert expected["moved"] > 1e-3
    assert update["tensors"] > 10 and not update["missing"]


RUNS = [
    pytest.param({"fused": True}, marks=newest),
    pytest.param({"fused": False, "ranks": 2, "tied": True}, marks=other),
]
STOPS = range(0, 288, 4)
"""A quarter of the vocabulary, so that any answer has some of them."""


@pytest.mark.parametrize("how", RUNS, ids="-".join)
def test_whole_run_distils_on_the_teachers_top_k(trees, models, tmp_path, how):
    """The divergence of the first step is the one of the models alone."""
    check_top_k(run(trees, models, tmp_path, TOP_K, **how))


@other
@pytest.mark.parametrize("tree", ["orchestrator clients", "inline images"])
def test_whole_run_of_a_branch_distils_on_the_top_k(trees, models, tmp_path, tree):
    """Branches with parts of the next contract, of which none is a release, with head's TOML."""
    check_top_k(run(trees, models, tmp_path, TOP_K, tree=tree))


@newest
def test_whole_run_has_a_teacher_with_own_tokenizer(trees, models, tmp_path):
    """It reads each answer behind the question in its own template, in its own tokens."""
    result = run(trees, models, tmp_path, TOP_K, apart=True, plugin=True, words=True)
    own, other = (load_tokenizer(result["models"] / role) for role in ("student", "teacher"))
    read = []
    for request in generate_requests(result, "student"):
        question = own.decode(request["in"]).split("user\n")[1].split("<|im_end|>")[0]
        messages = [{"role": "user", "content": question}]
        text = other.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        parts = (text, own.decode(request["out"]))
        read.append(sum((other.encode(part, add_special_tokens=False) for part in parts), []))
    asked = [r["in"][:-1] for r in generate_requests(result, "teacher") if "start" in r]
    assert len(asked) >= cpu_recipe.BATCH and all(one in read for one in asked)
    rows = metric_rows(result)
    assert first_value(rows, "topk_reverse_kl/kl/mean") > 0
    assert first_value(rows, "optim/grad_norm") > 0 and last_update(result)["tensors"] > 10


@newest
def test_whole_run_ends_at_an_undeclared_tokenizer(trees, models, tmp_path):
    """It trained to its end, with losses like any others: no id was outside of the vocabulary."""
    with pytest.raises(pytest.fail.Exception, match="other tokens than the student"):
        run(trees, models, tmp_path, TOP_K, apart=True, declared=False)
    assert not [*tmp_path.rglob("broadcasts/step_1")]


STATISTICS = {"mean", "median", "std", "min", "max"}
"""What prime-rl logs of a metric's values."""


def check_top_k(result):
    """Check the numbers of a whole run with ``TOP_K`` against float64."""
    assert all(r["params"]["prompt_logprobs"] == K for r in result["teacher"] if "params" in r)
    assert "topk_reverse_kl was called" in result["trainer"]
    rows = metric_rows(result)
    expected, update = reference(result)
    check_kl(first_value(rows, "topk_reverse_kl/kl/mean"), expected)
    assert first_value(rows, "topk_reverse_kl/kl/max") == pytest.approx(
        max(expected["tail_kl_bfloat16"]), abs=1e-2
    )
    assert first_value(rows, "topk_reverse_kl/kl_in_support/mean") > 0
    # By token, as prime-rl's own series of the same form. The run has one environment.
    series = {name for row in rows for name in row if name.startswith("distillation/kl/")}
    (environment,) = {name.split("/")[2] for name in series} - STATISTICS
    assert f"mismatch_kl/{environment}/mean" in {name for row in rows for name in row}
    common = first_value(rows, "distillation/kl/mean")
    assert first_value(rows, f"distillation/kl/{environment}/mean") == common
    tokens = [value for sequence in expected["common_kl_bfloat16"] for value in sequence]
    assert common == pytest.approx(mean(tokens), abs=2e-2)
    assert 0 < first_value(rows, "loss/mean") < 10
    assert first_value(rows, "optim/grad_norm") > 0
    steps = {row["step"] for row in rows if "optim/grad_norm" in row}
    assert len(steps) == cpu_recipe.STEPS
    # checkpoint.every = 0 keeps the last state alone.
    checkpoints = (result["folder"] / "outputs/checkpoints").glob("step_*")
    assert [path.name for path in checkpoints] == [f"step_{cpu_recipe.STEPS}"]
    check_update(expected, update)


@other
def test_whole_run_mixes_teachers_by_environment(trees, models, tmp_path):
    """Two environments of the recipe, each with its own mixture of two teachers."""
    result = run(trees, models, tmp_path, TOP_K, several=True)
    mixture = mixture_of(result)
    scored = [[r["in"] for r in generate_requests(result, role)] for role in ("teacher", "other")]
    assert sorted(scored[0]) == sorted(scored[1])
    rows = metric_rows(result)
    expected, update = reference(result, mixture)
    unmixed, _ = reference(result)
    check_kl(first_value(rows, "topk_reverse_kl/kl/mean"), expected)
    mixed_kl, unmixed_kl = mean(expected["tail_kl"]), mean(unmixed["tail_kl"])
    assert abs(mixed_kl - unmixed_kl) > 2e-2  # prime-rl's one teacher would differ by this
    assert expected["moved"] > 1e-3 and not update["missing"]


def mixture_of(result):
    """Return a function that returns the weights of a sequence's teachers by role."""
    tokenizer = json.loads((result["models"] / "student" / "tokenizer.json").read_text())
    letters = tokenizer["model"]["vocab"]
    names = {name: [letters[letter] for letter in name] for name in cpu_recipe.MIXTURES}

    def mixture(tokens):
        """Return the weights of the environment, whose name is the first word of the prompt."""
        (name,) = [
            name
            for name, ids in names.items()
            if any(tokens[i : i + len(ids)] == ids for i in range(12))
        ]
        return cpu_recipe.MIXTURES[name]

    return mixture


@other
def test_whole_run_trains_a_loss_from_outside(trees, models, tmp_path, monkeypatch):
    """``type = "module:function"``, with a module that is on PYTHONPATH of all processes."""
    delta = 0.5
    monkeypatch.syspath_prepend(str(EXAMPLES))
    loss = {"type": "my_loss:huber", "delta": delta}
    # The whole batch fits one micro-batch, so that prime-rl's loss/mean is the loss per token.
    result = run(trees, models, tmp_path, loss, modules=[EXAMPLES], seq_len=512)
    assert "my_loss:huber was called" in result["trainer"]
    rows = metric_rows(result)
    expected, update = reference(result)
    gaps = [[abs(ratio) for ratio in ratios] for ratios in expected["log_ratio"]]
    huber = [
        gap**2 / 2 if gap <= delta else delta * (gap - delta / 2)
        for sequence in gaps
        for gap in sequence
    ]
    mean_gap = mean([mean(sequence) for sequence in gaps])
    # bfloat16 models: the logits of both sides are rounded to 8 bits.
    assert first_value(rows, "my_loss:huber/gap/mean") == pytest.approx(mean_gap, abs=2e-2)
    assert first_value(rows, "loss/mean") == pytest.approx(mean(huber), abs=1e-2)
    assert 0 < first_value(rows, "my_loss:huber/linear/mean") < 1
    check_update(expected, update)


@other
def test_whole_run_beside_rl_keeps_prime_rls_rl_loss(trees, models, tmp_path):
    """An rl environment has prime-rl's own loss; ours is named in PRIME_COMPOSER."""
    switch = json.dumps({"loss": TOP_K})
    result = run(trees, models, tmp_path, TOP_K, rl=True, steps=4, switch=switch)
    registered = "topk_reverse_kl registered for distillation tokens (ref_kl_loss_fn)"
    assert registered in result["trainer"]
    rows = metric_rows(result)
    # Whole groups of four fill a batch, of either kind: the first one with ours has four or eight.
    expected, update = reference(result)
    actual = first_value(rows, "topk_reverse_kl/kl/mean")
    assert any(
        actual == pytest.approx(mean(expected["tail_kl_bfloat16"][:n]), abs=5e-3)
        for n in (4, cpu_recipe.BATCH)
    )
    assert first_value(rows, "mismatch_kl/dice/mean") >= 0
    assert first_value(rows, "is_masked_high/mean") >= 0
    assert expected["moved"] > 1e-3 and not update["missing"]


def step_batches(result):
    """Return, step by step, the micro-batches that each rank of the trainer read."""
    steps = {}
    for file in sorted((result["folder"] / "outputs").rglob("step_*/rank_*.bin")):
        ranks = steps.setdefault(step_of(file.parent), [])
        ranks.append(msgspec.msgpack.decode(file.read_bytes()))
    return [steps[step] for step in sorted(steps)]


def trained_tokens(result):
    """Yield the tokens of each sequence that the trainer read."""
    for ranks in step_batches(result):
        for micro_batch in itertools.chain(*ranks):
            yield from sequences(micro_batch)


def sequences(micro_batch):
    """Yield the tokens of each packed sequence, up to the last one that trains."""
    for span in spans(micro_batch):
        yield micro_batch[0][span]


def spans(micro_batch):
    """Yield the slice of each packed sequence, up to the last token that trains."""
    mask = micro_batch[1]
    start = 0
    for length in micro_batch[5]:
        trained = [t for t in range(start, start + length) if mask[t]]
        if trained:
            yield slice(start, trained[-1] + 1)
        start += length


def weights_of(result, version):
    """Return the folder of a version of the student's weights, None for the initial ones."""
    if version == 0:
        return None
    kept = [result["folder"] / name / f"step_{version}" for name in (KEPT, "student.weights")]
    return str(next(folder for folder in kept if folder.exists()))


def scores_sent(micro_batch):
    """Return what the orchestrator sent in the place of scores, of the tokens that train."""
    tokens, mask, *_ = micro_batch
    field = next(
        field
        for field in micro_batch[2:]
        if isinstance(field, list) and any(isinstance(x, float) and math.isnan(x) for x in field)
    )
    return [score for score, trains in zip(field, mask, strict=True) if trains]


def replayed_steps(result):
    """Return what float64 needs of each step (reference_replay.py), with the experts to replay."""
    sampled = {json.dumps(r["in"] + r["out"]): r for r in generate_requests(result, "student")}
    steps = []
    for version, ((micro_batch,),) in enumerate(step_batches(result)):
        rollouts = []
        for tokens in sequences(micro_batch):
            request = sampled[json.dumps(tokens)]
            packed = request["routed_experts"]
            experts = np.frombuffer(base64.b64decode(packed["data"]), np.uint8)
            experts = experts.reshape(packed["shape"]).tolist()
            rollouts.append(
                {
                    "tokens": tokens,
                    "prompt": len(request["in"]),
                    "experts": [*experts, experts[-1]],  # the last token's have no forward
                }
            )
        steps.append({"weights": weights_of(result, version), "rollouts": rollouts})
    return steps


@other
def test_whole_run_replays_experts_beside_a_top_k(trees, models, tmp_path):
    """Both need the same field of a sample: it has the experts, and the trainer asks the teacher.

    The orchestrator sends NaN in the place of scores. The student's server uses each router's least
    probable experts, so that a trainer with its own choice would have another loss.
    """
    asked = {"asked_by": "trainer", "plugin": True, "seq_len": 512}
    result = run(trees, models, tmp_path, TOP_K, replay=True, **asked)
    requests = [r for r in result["teacher"] if "in" in r]
    assert all(r["kinds"] == ["sampled", "top_k"] and r["k"] == K for r in requests)
    for ((micro_batch,),) in step_batches(result):
        assert all(math.isnan(score) for score in scores_sent(micro_batch))
    steps = replayed_steps(result)
    assert len(steps) == cpu_recipe.STEPS
    expected = replay_numbers(result, steps)
    rows = metric_rows(result)
    actual = [
        [row[name] for row in rows if name in row]
        for name in ("loss/mean", "topk_reverse_kl/kl/max")
    ]
    # bfloat16 models: the logits of both sides are rounded to 8 bits.
    assert actual[0] == pytest.approx(expected[0], abs=5e-3)
    assert actual[1] == pytest.approx(expected[1], abs=1e-2)
    # With the same experts the trainer's policy is the one that sampled.
    assert first_value(rows, "mismatch_kl/all/mean") < 2e-3
    for step in steps:
        for rollout in step["rollouts"]:
            del rollout["experts"]
    own_choice = replay_numbers(result, steps)
    pairs = zip(sum(expected, []), sum(own_choice, []), strict=True)
    assert max(abs(a - b) for a, b in pairs) > 3e-2


def replay_numbers(result, steps):
    """Return of each step the mean KL of its tokens, and the largest mean of a rollout."""
    file = result["folder"] / "steps.json"
    file.write_text(json.dumps(steps))
    folders = [result["models"] / role for role in ("student", "teacher")]
    every = json.loads(script(result["python"], "reference_replay.py", *folders, K, file))
    return [sums["kl"] / sums["tokens"] for sums in every], [
        max(sums["rollouts"]) for sums in every
    ]


FULL = {"type": "topk_reverse_kl", "k": "full", "normalization": "full"}
# Seven rollouts of which no two fit one micro-batch, for two ranks: one more micro-batch trains
# nothing, so that both have four.
PROMPT = {"system": "You are kind, and answer in one letter.", "chat_template": True}
UNEVEN = {"ranks": 2, "batch": 7, "seq_len": 40}
FULL_RUNS = [
    pytest.param(UNEVEN, marks=newest),
    pytest.param({"tied": True, "fused": False, "stops": [*STOPS]}, marks=other),
    pytest.param({"tied": True, "ranks": 2, "prompt": PROMPT}, marks=other),
    pytest.param({"several": True, "lora": True}, marks=other),
]


def untrained_sequences(result):
    """Return the number of sequences of each step in micro-batches that train nothing."""
    return [
        sum(len(batch[5]) for batch in itertools.chain(*ranks) if not any(batch[1]))
        for ranks in step_batches(result)
    ]


def own_prompt(result, tokens):
    """Return what a teacher with ``PROMPT`` reads in the place of a prompt of the student."""
    tokenizer = load_tokenizer(result["models"] / "teacher")
    question = tokenizer.decode(tokens).split("user\n")[1].split("<|im_end|>")[0]
    messages = [
        {"role": "system", "content": PROMPT["system"]},
        {"role": "user", "content": question},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def full_reference(result, mixture=lambda tokens: {"teacher": 1.0}, stops=(), prompt=None):
    """Return float64's numbers of the steps, by the files that the trainer's ranks read.

    Args:
        mixture: weights of the teachers by role, of a sequence.
        stops: ids that are one outcome.
        prompt: ``PROMPT`` where the teacher reads its own.
    """
    prompts = {
        json.dumps(r["in"] + r["out"]): r["in"] for r in generate_requests(result, "student")
    }

    def of_prompt(read):
        return {"prompt": len(read), "read": own_prompt(result, read) if prompt else read}

    steps = []
    for version, ranks in enumerate(step_batches(result)):
        rollouts = [
            {
                "tokens": tokens,
                **of_prompt(prompts[json.dumps(tokens)]),
                "teachers": {
                    str(result["models"] / role): w for role, w in mixture(tokens).items()
                },
            }
            for micro_batch in itertools.chain(*ranks)
            for tokens in sequences(micro_batch)
        ]
        steps.append({"weights": weights_of(result, version), "rollouts": rollouts})
    file = result["folder"] / "steps.json"
    file.write_text(json.dumps(steps))
    listed = result["folder"] / "stops.json"
    listed.write_text(json.dumps([*stops]))
    words = result["models"] / "student", file, listed
    return json.loads(script(result["python"], "reference_full.py", *words))


@pytest.mark.parametrize("how", FULL_RUNS, ids="-".join)
def test_whole_run_compares_the_whole_vocabulary(trees, models, tmp_path, how):
    """The trainer asks for hidden states: each step's loss is the one that float64 gives.

    So is the direction in which the first update moves each weight, head and embeddings included.
    """
    chosen = {"plugin": True, "seq_len": 512, **how}
    stops = chosen.pop("stops", ())
    loss = {**FULL, "stops": {"ids": stops}} if stops else FULL
    result = run(trees, models, tmp_path, loss, **chosen)
    check_whole_vocabulary(result, how)
    if stops:
        apart, merged = (full_reference(result, stops=each)["steps"] for each in ((), stops))
        assert apart[0]["mean"] - merged[0]["mean"] > 3e-2


def check_whole_vocabulary(result, how, name="topk_reverse_kl"):
    """Check requests, metrics of every step and the first update of a run over all ids."""
    assert f"{name} was called" in result["trainer"]
    assert {r["path"] for r in result["teacher"] if "in" in r} == {SCORE_PATH}
    asked = [r for r in result["teacher"] if "in" in r]
    known = {json.dumps(r["in"]) for r in asked if "hidden" not in r["kinds"]}
    assert len(known) <= how.get("ranks", 1) < len(asked)  # each rank's known request
    mixture = mixture_of(result) if "several" in how else lambda tokens: {"teacher": 1.0}
    expected = full_reference(result, mixture, how.get("stops", ()), how.get("prompt"))
    rows = metric_rows(result)
    losses, values = (
        [row[key] for row in rows if key in row] for key in ("loss/mean", f"{name}/kl/mean")
    )
    assert len(losses) == cpu_recipe.STEPS
    # bfloat16 models, whose activations are rounded to 8 bits.
    steps, untrained = expected["steps"], untrained_sequences(result)
    if "batch" in how:
        assert all(untrained), "no micro-batch of padding came"
    # A sequence that trains nothing is a call of the loss too, whose metrics are 0.
    means = [
        sum(step["rollouts"]) / (len(step["rollouts"]) + extra)
        for step, extra in zip(steps, untrained, strict=True)
    ]
    assert values == pytest.approx(means, abs=5e-3)
    assert first_value(rows, "optim/grad_norm") == pytest.approx(expected["norm"], rel=0.05)
    per_token = [step["mean"] for step in steps]
    # prime-rl's loss/mean is the step's where one rank has the whole batch in one micro-batch.
    if not {"ranks", "several"} & set(how):
        assert losses == pytest.approx(per_token, abs=5e-3)
    assert max(per_token) - min(per_token) > 1e-2  # the policy that is compared moves
    # Adam's first step has its gradient's sign.
    assert min(expected["agreement"].values()) > 0.95, expected["agreement"]


@other
@pytest.mark.vllm
def test_whole_run_compares_the_whole_vocabulary_with_vllm(trees, models, tmp_path):
    """Real vLLM with the scoring plugin sends the teacher's head and hidden states."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here")
    served = {"vllm": sys.executable, "by_vllm": ["teacher"], "plugin": True}
    result = run(trees, models, tmp_path, FULL, seq_len=512, **served)
    check_whole_vocabulary(result, {})


@other
@pytest.mark.vllm
@pytest.mark.parametrize("plugin", [False, True], ids=["json", "plugin"])
def test_whole_run_with_vllm_servers(trees, models, tmp_path, plugin):
    """Student and teacher are served by real vLLM, the teacher's scores in JSON or in binary."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here")
    result = run(trees, models, tmp_path, TOP_K, vllm=sys.executable, plugin=plugin)
    roads = {request["path"] for request in generate_requests(result, "teacher")}
    assert roads == {SCORE_PATH if plugin else "/inference/v1/generate"}
    rows = metric_rows(result)
    expected, update = reference(result)
    check_kl(first_value(rows, "topk_reverse_kl/kl/mean"), expected)
    assert expected["moved"] > 1e-3 and not update["missing"]
    # Both compute the same policy: vLLM's log mu is the trainer's log p, to bfloat16.
    mismatch = [row["mismatch_kl/all/mean"] for row in rows if "mismatch_kl/all/mean" in row]
    assert len(mismatch) == cpu_recipe.STEPS and mismatch[0] < 0.01


@other
def test_whole_run_ends_when_the_teacher_turns_bad(trees, models, tmp_path):
    """prime-rl ends on an error of scoring, and the reason is a line of the orchestrator's log."""

    def spoil(servers):
        log = servers["teacher"].log
        while log.read_text().count("/inference/v1/generate") < 3:
            time.sleep(0.01)
        log.with_suffix(".spoiled").touch()

    with pytest.raises(pytest.fail.Exception, match="the launcher ended with"):
        run(trees, models, tmp_path, TOP_K, meanwhile=spoil)
    (log,) = tmp_path.rglob("orchestrator.log")
    line = r"prime_composer: a rollout got no scores, and the run ends: The teacher at http://127\."
    assert len(re.findall(line, log.read_text())) >= 1


@other
def test_whole_run_gives_the_policy_a_hint(trees, models, tmp_path):
    """A right sibling's answer, token for token, comes before what the policy has sampled."""
    how = {"words": True, "group_size": 4, "taskset": "tiny-dice"}
    result = run(trees, models, tmp_path, TOP_K, hint="sibling", **how)
    tokenizer = Tokenizer.from_file(str(result["models"] / "student" / "tokenizer.json"))
    requests = generate_requests(result, "student")
    scored = [r["in"] for r in requests if "prompt_logprobs" in r["params"]]
    sampled = [r for r in requests if "prompt_logprobs" not in r["params"]]
    assert scored and not generate_requests(result, "teacher")
    assert {r["params"].get("prompt_logprobs", K) for r in requests} == {K}

    def with_hint(request, reply):
        """Return what the policy scores of a sampled rollout, given a hint's reply."""
        text = (
            "<|im_start|>system\nHere is an example of an expert response:\n"
            f"<demonstration>\n{reply}\n</demonstration><|im_end|>\n"
        )
        return tokenizer.encode(text).ids + request["in"] + request["out"]

    possible = set()
    for request in sampled:
        # A reply of odd length is right. Others of the same prompt are siblings.
        siblings = [r for r in sampled if r is not request and r["in"] == request["in"]]
        replies = [tokenizer.decode(sibling["out"]) for sibling in siblings]
        possible |= {json.dumps(with_hint(request, one)) for one in replies if len(one) % 2}
    assert {json.dumps(tokens) for tokens in scored} <= possible
    rows = metric_rows(result)
    assert "topk_reverse_kl was called" in result["trainer"]
    assert first_value(rows, "topk_reverse_kl/kl/mean") > 0
    assert first_value(rows, "optim/grad_norm") > 0
    # What has no right sibling is not sent to the trainer.
    trained = list(trained_tokens(result))
    assert trained and all(any(tokens[-len(own) :] == own for tokens in scored) for own in trained)


@other
def test_whole_run_that_is_extended_keeps_its_schedule(trees, models, tmp_path):
    """The run ended at its last step, whose state nothing kept: its schedule repeats one step."""
    taid = {"type": "taid", "k": K, "total_steps": 10, "t_start": 0.2, "alpha": 0.5, "beta": 0.5}
    run(trees, models, tmp_path, taid, resume=False)
    (journal,) = (tmp_path / "outputs").rglob("prime_composer_loss.jsonl")
    before = journal.read_text().splitlines()
    steps = cpu_recipe.STEPS + 2
    result = run(trees, models, tmp_path, taid, resume=True, steps=steps)
    lines = journal.read_text().splitlines()
    assert len(before) == cpu_recipe.STEPS and lines[: len(before)] == before
    records = [json.loads(line) for line in lines]
    first = records[0]["step"]
    assert [record["step"] for record in records] == list(range(first, first + steps))
    t = [record["state"]["t"] for record in records]
    assert 0.2 == t[0] == t[1] < t[2] == t[3] < t[4]
    last = records[len(before) - 1]["step"]
    assert f"taid goes on with its state of step {last}, and repeats" in result["trainer"]


@other
def test_whole_run_of_v0_6_has_the_five_lines(trees, models, tmp_path):
    """``[trainer.loss] import_path`` alone; of all else v0.6 knows nothing of this package."""
    check_sampled(run(trees, models, tmp_path, SAMPLED_V0_6, version="v0.6", switch=None))


@other
def test_whole_run_of_the_plain_launcher_has_a_sampled_loss(trees, models, tmp_path):
    """No adapter, and prime-rl's own requests."""
    check_sampled(run(trees, models, tmp_path, SAMPLED, switch=None), "ref_kl")


def check_sampled(result, name="teacher_kl"):
    """Check the first step of a run without the adapter; ``name`` is prime-rl's of its metric."""
    assert all(r["params"]["prompt_logprobs"] == 1 for r in result["teacher"] if "params" in r)
    assert "sampled_reverse_kl was called" in result["trainer"]
    expected, _ = reference(result)
    ratio = mean([mean(ratios) for ratios in expected["log_ratio"]])
    actual = first_value(metric_rows(result), f"sampled_reverse_kl/{name}/mean")
    assert actual == pytest.approx(ratio, abs=2e-2)
    assert expected["moved"] > 1e-3
