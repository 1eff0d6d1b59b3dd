"""Config classes like those of prime-rl's main after August 2026, in our own words: READ, NOT RUN.

No whole tree of these versions can be had. "september" has what the orchestrator's config had in
that month: no `filter_zero_advantages`, a typed `top_p`, and the rest as in v0.9. "main" is what
single files of October and November have. Only what an export writes is here, with the rules that
refuse a part of it.
"""

import importlib.machinery
import sys
import types
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

KINDS = ("september", "main")


class Base(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Frozen(Base):
    name: str
    base_url: str
    api_key_var: str = "VLLM_API_KEY"
    headers: dict[str, str] = {}


class OPD(Base):
    type: Literal["opd"]
    teacher: Frozen


class OPSD(Base):
    type: Literal["opsd"]
    demo_key: str
    template: str = ""
    renderer: dict[str, Any] = {}


class GRPO(Base):
    type: Literal["grpo"] = "grpo"


Algo = Annotated[OPD | OPSD | GRPO, Field(discriminator="type")]


class Sampling(Base):
    temperature: float = 1.0
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int | None = None
    max_completion_tokens: int | None = None
    extra_body: dict[str, Any] = {}

    @model_validator(mode="after")
    def truncation_is_typed(self):
        if self.extra_body.get("top_p", 1.0) < 1:
            raise ValueError("extra_body carries a truncating top_p")
        return self


class EvalSampling(Base):
    temperature: float | None = None
    max_completion_tokens: int | None = None


class Select(Base):
    limit: int | None = None


class Source(Base):
    env: dict[str, Any]
    name: str
    group_size: int = 1


class TrainSource(Source):
    sampling: Sampling = Sampling()
    ratio: float = 1.0
    algo: Algo | None = None


class TrainSourceOfMain(TrainSource):
    select: Select = Select()
    min_abs_advantage: float = 0.0


class Train(Base):
    source: list[TrainSource]
    sampling: Sampling = Sampling()


class TrainOfMain(Base):
    env: dict[str, Any] = {}
    source: list[TrainSourceOfMain]
    sampling: Sampling = Sampling()
    group_size: int = 1
    algo: Algo = GRPO()


class EvalSource(Source):
    num_examples: int = -1


class EvalSourceOfMain(Source):
    select: Select = Select()


class Eval(Base):
    source: list[EvalSource]
    sampling: EvalSampling = EvalSampling()
    interval: int = 100
    num_examples: int = -1


class EvalOfMain(Base):
    source: list[EvalSourceOfMain]
    sampling: EvalSampling = EvalSampling()
    interval: int = 100
    select: Select = Select()


class Client(Base):
    base_url: str = ""
    api_key_var: str = "VLLM_API_KEY"


class PolicyModel(Base):
    client: Client = Client()


def refuse_replayed_teachers(train: Any, algorithm: Any) -> None:
    samplings = [train.sampling, *(source.sampling for source in train.source)]
    algorithms = [algorithm, *(source.algo for source in train.source)]
    if any(one.top_p < 1 or one.top_k for one in samplings) and any(
        isinstance(one, OPD | OPSD) for one in algorithms
    ):
        raise ValueError("opd/opsd is not supported with truncated train sampling")


class Orchestrator(Base):
    algo: Algo = GRPO()
    model: PolicyModel = PolicyModel()
    train: Train
    eval: Eval | None = None
    renderer: dict[str, Any] = {}
    batch_size: int
    group_size: int = 1

    @model_validator(mode="after")
    def check(self):
        refuse_replayed_teachers(self.train, self.algo)
        return self


class OrchestratorOfMain(Base):
    model: PolicyModel = PolicyModel()
    train: TrainOfMain
    eval: EvalOfMain | None = None
    renderer: dict[str, Any] = {}
    batch_size: int

    @model_validator(mode="after")
    def check(self):
        refuse_replayed_teachers(self.train, self.train.algo)
        return self


class CustomLoss(Base):
    type: Literal["custom"]
    import_path: str
    kwargs: dict[str, Any] = {}


class IPOLoss(Base):
    type: Literal["ipo"] = "ipo"


class AdamW(Base):
    type: Literal["adamw"] = "adamw"
    lr: float
    weight_decay: float
    betas1: float
    betas2: float
    max_norm: float | None


class Constant(Base):
    type: Literal["constant"] = "constant"


class Linear(Base):
    type: Literal["linear"]
    warmup_steps: int
    decay_steps: int


class Cosine(Base):
    type: Literal["cosine"]
    warmup_steps: int


class Checkpointing(Base):
    mode: Literal["full", "selective"] = "full"


class TrainerModel(Base):
    ac: Checkpointing | Literal["None"] | None = None
    ac_offloading: Literal["None"] | None = None


class Trainer(Base):
    loss: Annotated[IPOLoss | CustomLoss, Field(discriminator="type")]
    optim: AdamW
    scheduler: Annotated[Constant | Linear | Cosine, Field(discriminator="type")]
    model: TrainerModel = TrainerModel()


class VLLM(BaseModel):
    model_config = ConfigDict(extra="allow")

    seed: int = 0


class Inference(Base):
    vllm: VLLM = VLLM()


class Run(Base):
    name: str | None = None


class Checkpoints(Base):
    interval: int | None = None
    keep_last: int | None = None


class Wandb(Base):
    project: str | None = None
    name: str | None = None


class Monitors(Base):
    wandb: Wandb | None = None


class Model(Base):
    name: str


class RL(Base):
    trainer: Trainer
    orchestrator: Orchestrator
    inference: Inference | None = None
    run: Run = Run()
    output_dir: str = "outputs"
    ckpt: Checkpoints | None = None
    resume: dict[str, Any] | None = None
    monitors: Monitors = Monitors()
    model: Model | None = None
    max_steps: int | None = None
    seq_len: int | None = None
    deployment: dict[str, Any] = {}
    slurm: dict[str, Any] | None = None
    dashboard: bool = True


class RLOfMain(RL):
    orchestrator: OrchestratorOfMain  # type: ignore[assignment]


ROOTS = {"september": RL, "main": RLOfMain}


def put(monkeypatch, kind):
    """Make the classes importable under prime-rl's names for one test; return that of the TOML."""
    main = kind == "main"
    contents = {
        "prime_rl": {},
        "prime_rl.configs": {},
        "prime_rl.configs.rl": {"RLConfig": ROOTS[kind]},
        "prime_rl.configs.orchestrator": {
            "OrchestratorConfig": OrchestratorOfMain if main else Orchestrator,
            "TrainConfig": TrainOfMain if main else Train,
        },
        "prime_rl.configs.algorithm": {"FrozenModelConfig": Frozen},
    }
    for name, members in contents.items():
        module = types.ModuleType(name)
        module.__path__ = []
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    return ROOTS[kind]
