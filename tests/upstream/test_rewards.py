"""What groups give to distillation in prime-rl's own orchestrator and loss.

An exported recipe is read by prime-rl's parser. Its algorithm scores eight rollouts with our hooks
and its sink makes a batch of them. Its packer packs it, and its ``compute_loss`` calls our loss.
"""

import math

import pytest

from prime_composer.recipe.loading import parse_recipe
from prime_composer.upstream.export import export_recipe
from tests.upstream.export_recipes import tables
from tests.upstream.in_prime_rl import interpreters

# It starts no server: the whole runs need not wait for it.
pytestmark = pytest.mark.xdist_group("prime-rl's orchestrator")

KD = 0.25
SAMPLED = {"type": "sampled_reverse_kl", "dialect": "v0_7"}
LOSS = {"type": "compose", "distillation": {"teacher": {"weight": KD, "loss": SAMPLED}}}
PROMPT = 2
REWARDS = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]]
"""Of two groups. The advantages of the second one are 0."""
SHIFT = 0.02
"""log p - log mu of every token: both trust regions keep it."""


def rollouts():
    """Return eight rollouts by group, of different lengths."""
    groups = []
    for g, rewards in enumerate(REWARDS):
        group = []
        for i, reward in enumerate(rewards):
            n = 2 + i + g
            log_mu = [-1.0 - 0.1 * ((t + i) % 4) for t in range(n)]
            group.append(
                {
                    "token_ids": [
                        10 * g + 1,
                        10 * g + 2,
                        *(100 + 20 * g + 5 * i + t for t in range(n)),
                    ],
                    "log_mu": log_mu,
                    "log_p": [value + SHIFT for value in log_mu],
                    "log_q": [-0.5 - 0.2 * ((t + g) % 3) for t in range(n)],
                    "reward": reward,
                    "text": f"answer {i}",
                }
            )
        groups.append(group)
    return groups


def advantages(groups):
    """Return reward minus the group's mean, per rollout."""
    for group in groups:
        mean = sum(rollout["reward"] for rollout in group) / len(group)
        yield from ((rollout, rollout["reward"] - mean) for rollout in group)


def rl_sum(rollout, advantage):
    rho, tau = math.exp(SHIFT), 1e-3 * SHIFT**2
    return len(rollout["log_p"]) * (-advantage * rho + tau)


def kd_sum(rollout):
    rho, tau = math.exp(SHIFT), 1e-3 * SHIFT**2
    pairs = zip(rollout["log_q"], rollout["log_p"], strict=True)
    return sum(-(q - p) * rho + tau for q, p in pairs)


MAKE_BATCH = """
import asyncio, os, sys
from types import SimpleNamespace as Names

os.environ["PRIME_COMPOSER"] = "1"
from prime_rl.configs.rl import RLConfig
from prime_rl.utils.config import cli

sys.argv = ["rl", "@", path]
config = cli(RLConfig)  # hooked: it resolves the settings

import torch
import verifiers.v1 as vf
from verifiers.v1.graph import MessageNode
from verifiers.v1.types import AssistantMessage, UserMessage
from prime_composer.upstream.orchestrator import hooks
from prime_rl.configs.algorithm import GRPOAlgoConfig
from prime_rl.orchestrator import train_sink
from prime_rl.orchestrator.algo import build_algorithm
from prime_rl.trainer import batch as packing
from prime_rl.trainer.rl import loss as losses

orchestrator = config.orchestrator
(source,) = orchestrator.train.source
every = [rollout for group in groups for rollout in group]
scores = {tuple(r["token_ids"]): [0.0] * prompt + r["log_q"] for r in every}


asked = []


class Pool:
    async def score(self, token_ids):
        asked.append(list(token_ids))
        hooks.SCORING.get().asked = True  # which these scores stand for
        return list(scores.get(tuple(token_ids), [-1.0] * len(token_ids)))


class Renderer:
    def render_ids(self, messages, add_generation_prompt):
        (message,) = messages
        assert message["role"] == "system" and not add_generation_prompt
        return [1000 + ord(letter) for letter in message["content"]]


class Data(vf.TaskData):
    question: str = "1+1?"
    answer: str = "#### 2"


def algorithm_of(algo):
    algorithm = build_algorithm(algo, Pool())
    algorithm.teacher_pool = algorithm.teacher_clients = Pool()
    algorithm.renderer = Renderer()
    return algorithm


def trace_of(rollout, index):
    completion = rollout["token_ids"][prompt:]
    nodes = [
        MessageNode(
            message=UserMessage(content="U"),
            token_ids=rollout["token_ids"][:prompt],
            mask=[False] * prompt,
        ),
        MessageNode(
            parent=0,
            message=AssistantMessage(content=rollout["text"]),
            sampled=True,
            token_ids=completion,
            mask=[True] * len(completion),
            logprobs=rollout["log_mu"],
        ),
    ]
    task = vf.TraceTask(type="Task", data=Data(idx=index, prompt=None))
    return vf.Trace(
        task=task,
        nodes=nodes,
        rewards={"r": vf.Reward(score=rollout["reward"])},
        agent=vf.AgentInfo(config=vf.AgentConfig()),
        ok=True,
    )


env = Names(
    algorithm=algorithm_of(source.algo),
    config=Names(group_size=4),
    sampling_args={"temperature": 1.0},
    requires_group_scoring=False,
)
grpo = build_algorithm(GRPOAlgoConfig(), Pool())
environments = {"scored": env, "plain": Names(**{**vars(env), "algorithm": grpo})}
sink = train_sink.TrainSink(
    orchestrator,
    progress=Names(step=1),
    tokenizer=None,
    train_envs=Names(get=environments.__getitem__),
    mm_token_type_ids_mapping=None,
    batch_size=batch_size,
    token_batch_size=None,
)


async def make_batch():
    batch = None
    for index, group in enumerate(groups):
        for rollout in group:
            trace = trace_of(rollout, index)
            name = "plain" if index in without_teacher else "scored"
            item = vf.Episode(
                env=vf.EnvInfo(id=name, name=name),
                task=trace.task,
                group=vf.GroupInfo(id=str(index)),
                traces=[trace],
            )
            batch = await sink.add(item)
    return batch


batch = asyncio.run(make_batch())
result = {"asked": asked, "sent": [list(sample.token_ids) for sample in batch.samples]}
"""
COMPUTE_LOSS = """
((micro_batch,),) = packing.prepare_batch(
    batch.samples, seq_len=512, num_train_workers=1, bin_cost=sum
)
log_p = {tuple(r["token_ids"]): [0.0] * prompt + r["log_p"] for r in every}
lengths = micro_batch.sequence_lengths


def split(values, dtype=torch.float32):
    return None if values is None else list(torch.tensor(values, dtype=dtype).split(lengths))


sequences = [tuple(ids.tolist()) for ids in split(micro_batch.input_ids, torch.long)]
mask = split(micro_batch.loss_mask, torch.bool)
rl_weights, ref_kl_weights = split(micro_batch.rl_weights), split(micro_batch.ref_kl_weights)


def count(rows):
    return max(sum(int(row.sum()) for row in rows), 1)


# As its train loop does.
rl_scale = count(mask if rl_weights is None else [m & (w != 0) for m, w in zip(mask, rl_weights)])
ref_kl_scale = 1 if ref_kl_weights is None else count([w != 0 for w in ref_kl_weights])
value, _ = losses.compute_loss(
    trainer_logprobs=[torch.tensor(log_p[ids], requires_grad=True) for ids in sequences],
    inference_logprobs=split(micro_batch.inference_logprobs),
    ref_logprobs=split(micro_batch.ref_logprobs),
    advantages=split(micro_batch.advantages),
    loss_mask=mask,
    rl_weights=rl_weights,
    ce_weights=None,
    ref_kl_weights=ref_kl_weights,
    rl_loss_fn=losses.setup_rl_loss_fn(config.trainer.loss),
    rl_scale=rl_scale,
    ce_scale=1,
    ref_kl_scale=ref_kl_scale,
)
result = {"loss": value.item(), "rl_scale": rl_scale, "ref_kl_scale": ref_kl_scale}
"""


@pytest.fixture(scope="module")
def libraries(trees, tmp_path_factory):
    """Version -> a process with prime-rl's libraries. Its forks import prime-rl itself, hooked."""
    names = "torch, transformers, verifiers.v1"
    with interpreters(trees, tmp_path_factory, names, PRIME_COMPOSER="1") as get:
        yield get


@pytest.fixture
def run(libraries, tmp_path):
    """Return a function that trains one step in a new process with prime-rl.

    With ``policy``, the policy is its own teacher, and a batch is made and not trained.
    """

    def start(
        loss,
        without_teacher=(),
        policy=None,
        batch_size=8,
        **prime_rl,
    ):
        raw = tables(student={"model": "Qwen/Qwen3-0.6B"}, rollout={"group_size": 4})
        raw["loss"] = loss
        if policy is not None:
            raw["teacher"] = {"policy": policy}
        raw["prime_rl"] = prime_rl
        export = export_recipe(parse_recipe(raw), "head")
        path = tmp_path / "run.toml"
        path.write_text(export.text())
        return libraries("head").run(
            MAKE_BATCH + (COMPUTE_LOSS if policy is None else ""),
            fork=True,
            path=str(path),
            groups=rollouts(),
            prompt=PROMPT,
            without_teacher=without_teacher,
            batch_size=batch_size,
        )

    return start


@pytest.mark.upstream
def test_rewards_and_teacher_are_one_loss_over_all_tokens(run):
    """Rollouts of zero advantage are among them."""
    check_one_loss(run(LOSS))


@pytest.mark.upstream
def test_rewards_and_teacher_keep_what_prime_rl_prunes(run):
    """Later versions always take tokens with an advantage of 0 out of the rl loss."""
    pruned = {"orchestrator": {"train": {"filter_zero_advantages": True}}}
    check_one_loss(run(LOSS, **pruned))


def check_one_loss(actual):
    scored = list(advantages(rollouts()))
    tokens = sum(len(rollout["log_p"]) for rollout, _ in scored)
    total = sum(rl_sum(rollout, advantage) + KD * kd_sum(rollout) for rollout, advantage in scored)
    assert actual["rl_scale"] == tokens and actual["ref_kl_scale"] == 1
    assert actual["loss"] == pytest.approx(total / tokens, rel=1e-5)


@pytest.mark.upstream
def test_rewards_and_teacher_refuse_a_group_without_a_teacher(run):
    """Its rollouts are packed with scored ones, where prime-rl fills 0.0 in for no score."""
    with pytest.raises(AssertionError, match="no teacher has scored the token at position 2 of"):
        run(LOSS, without_teacher=[0])


def system_message(text):
    """Return the tokens that ``Renderer`` makes of a hint."""
    return [1000 + ord(letter) for letter in text]


@pytest.mark.upstream
def test_policy_is_given_a_right_sibling_of_the_group(run):
    """The only right rollout of the first group has none, and is not sent to the trainer."""
    policy = {"update": "live", "hint": "sibling"}
    actual = run(SAMPLED, policy=policy, batch_size=7)  # of what trains
    first, second = rollouts()
    pairs = [(first[0], rollout) for rollout in first[1:]]
    pairs += [(second[1], second[0]), *((second[0], rollout) for rollout in second[1:])]
    template = "Here is an example of an expert response:\n<demonstration>\n{}\n</demonstration>"
    expected = [
        system_message(template.format(hint["text"])) + rollout["token_ids"]
        for hint, rollout in pairs
    ]
    assert sorted(actual["asked"]) == sorted(expected)
    assert sorted(actual["sent"]) == sorted(rollout["token_ids"] for _, rollout in pairs)


@pytest.mark.upstream
def test_policy_is_given_the_verdict_on_its_own_answer(run):
    actual = run(SAMPLED, policy={"update": "live", "hint": "feedback"})
    every = [rollout for group in rollouts() for rollout in group]
    verdicts = {0.0: "This is wrong; the right answer is 2.", 1.0: "This is correct."}
    expected = [
        system_message(
            f"An earlier attempt: {rollout['text']}\nIts verdict: {verdicts[rollout['reward']]}"
        )
        + rollout["token_ids"]
        for rollout in every
    ]
    assert sorted(actual["asked"]) == sorted(expected)
    assert sorted(actual["sent"]) == sorted(rollout["token_ids"] for rollout in every)
