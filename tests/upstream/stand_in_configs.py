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

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

KINDS = ("september", "main")


class Base(BaseModel):
    model_config = ConfigDict(extra="forbid")


def table(name, base=Base, /, **fields):
    """Return a class. A field is its type, where it has to be given, a default, or both."""
    kinds = {
        key: value
        if isinstance(value, tuple)
        else (type(value), value)
        if isinstance(value, str | int | float | dict | BaseModel)
        else (value, ...)
        for key, value in fields.items()
    }
    return create_model(name, __base__=base, **kinds)


def one_of(*classes):
    """Return a union whose member a table names by its ``type``."""
    union = classes[0]
    for cls in classes[1:]:
        union = union | cls
    return Annotated[union, Field(discriminator="type")]


INT, WORD = (int | None, None), (str | None, None)  # Fields that may be left out

Frozen = table(
    "Frozen", name=str, base_url=str, api_key_var="VLLM_API_KEY", headers=(dict[str, str], {})
)
OPD = table("OPD", type=Literal["opd"], teacher=Frozen)
OPSD = table("OPSD", type=Literal["opsd"], demo_key=str, template="", renderer={})
GRPO = table("GRPO", type=(Literal["grpo"], "grpo"))
Algo = one_of(OPD, OPSD, GRPO)


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


EvalSampling = table("EvalSampling", temperature=(float | None, None), max_completion_tokens=INT)
Select = table("Select", limit=INT)
Source = table("Source", env=dict[str, Any], name=str, group_size=1)
TrainSource = table("TrainSource", Source, sampling=Sampling(), ratio=1.0, algo=(Algo | None, None))
TrainSourceOfMain = table("Source", TrainSource, select=Select(), min_abs_advantage=0.0)
Train = table("Train", source=list[TrainSource], sampling=Sampling())
TrainOfMain = table(
    "Train",
    env={},
    source=list[TrainSourceOfMain],
    sampling=Sampling(),
    group_size=1,
    algo=(Algo, GRPO()),
)
EvalSource = table("EvalSource", Source, num_examples=-1)
EvalSourceOfMain = table("EvalSource", Source, select=Select())
EVALUATION = {"sampling": EvalSampling(), "interval": 100}
Eval = table("Eval", source=list[EvalSource], num_examples=-1, **EVALUATION)
EvalOfMain = table("Eval", source=list[EvalSourceOfMain], select=Select(), **EVALUATION)
Client = table("Client", base_url="", api_key_var="VLLM_API_KEY")
PolicyModel = table("PolicyModel", client=Client())


class AnyOrchestrator(Base):
    model: PolicyModel = PolicyModel()
    renderer: dict[str, Any] = {}
    batch_size: int

    @model_validator(mode="after")
    def teachers_are_not_replayed(self):
        of_all = self.train.algo if hasattr(self.train, "algo") else self.algo
        samplings = [self.train.sampling, *(source.sampling for source in self.train.source)]
        algorithms = [of_all, *(source.algo for source in self.train.source)]
        if any(one.top_p < 1 or one.top_k for one in samplings) and any(
            isinstance(one, OPD | OPSD) for one in algorithms
        ):
            raise ValueError("opd/opsd is not supported with truncated train sampling")
        return self


Orchestrator = table(
    "Orchestrator",
    AnyOrchestrator,
    algo=(Algo, GRPO()),
    train=Train,
    eval=(Eval | None, None),
    group_size=1,
)
OrchestratorOfMain = table(
    "Orchestrator", AnyOrchestrator, train=TrainOfMain, eval=(EvalOfMain | None, None)
)
CustomLoss = table("CustomLoss", type=Literal["custom"], import_path=str, kwargs={})
IPOLoss = table("IPOLoss", type=(Literal["ipo"], "ipo"))
AdamW = table(
    "AdamW",
    type=(Literal["adamw"], "adamw"),
    **dict.fromkeys(("lr", "weight_decay", "betas1", "betas2"), float),
    max_norm=float | None,
)
Constant = table("Constant", type=(Literal["constant"], "constant"))
Linear = table("Linear", type=Literal["linear"], warmup_steps=int, decay_steps=int)
Cosine = table("Cosine", type=Literal["cosine"], warmup_steps=int)
Checkpointing = table("Checkpointing", mode=(Literal["full", "selective"], "full"))
TrainerModel = table(
    "TrainerModel",
    ac=(Checkpointing | Literal["None"] | None, None),
    ac_offloading=(Literal["None"] | None, None),
)
Trainer = table(
    "Trainer",
    loss=one_of(IPOLoss, CustomLoss),
    optim=AdamW,
    scheduler=one_of(Constant, Linear, Cosine),
    model=TrainerModel(),
)


class VLLM(BaseModel):
    model_config = ConfigDict(extra="allow")

    seed: int = 0


Inference = table("Inference", vllm=VLLM())
Run = table("Run", name=WORD)
Checkpoints = table("Checkpoints", interval=INT, keep_last=INT)
Wandb = table("Wandb", project=WORD, name=WORD)
Monitors = table("Monitors", wandb=(Wandb | None, None))
Model = table("Model", name=str)
RL = table(
    "RL",
    trainer=Trainer,
    orchestrator=Orchestrator,
    inference=(Inference | None, None),
    run=Run(),
    output_dir="outputs",
    ckpt=(Checkpoints | None, None),
    resume=(dict[str, Any] | None, None),
    monitors=Monitors(),
    model=(Model | None, None),
    max_steps=INT,
    seq_len=INT,
    deployment={},
    slurm=(dict[str, Any] | None, None),
    dashboard=True,
)
RLOfMain = table("RL", RL, orchestrator=OrchestratorOfMain)
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
