"""Refuse what a recipe lacks on this machine before anything is built or loaded."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from torch import nn

from prime_composer.backends.cpu_guard import built_for_cpu, missing_for
from prime_composer.backends.errors import how_to_install
from prime_composer.backends.four_bits import import_bitsandbytes
from prime_composer.backends.hf_model import (
    ModelUnavailable,
    cache_argument,
    reads_images,
    refuse_quantized,
)
from prime_composer.backends.lora.adapter import (
    CONFIG,
    check_directory,
    folder_of_adapter,
    import_peft,
)
from prime_composer.backends.model_files import (
    has_tokenizer,
    missing_folder,
    read_json,
    why_not_on_hub,
)
from prime_composer.backends.transformers import window
from prime_composer.local.tracker import import_wandb
from prime_composer.problems.metrics import require_library
from prime_composer.recipe.backends import backend_of
from prime_composer.recipe.prepare import DamagedConfig, PrepareConfig
from prime_composer.recipe.routing import Routing
from prime_composer.recipe.schema import ModelConfig, Recipe, RecipeError


def check_requirements(recipe: Recipe, hub: bool = True) -> None:
    """Refuse a run whose models or libraries are not here; ``hub``: ask it for its models."""
    check_models(recipe, hub)
    check_libraries(recipe)


def check_models(recipe: Recipe, hub: bool = True) -> None:
    """Refuse a model of a run on this machine that is not there, not whole, or not long enough."""
    lora = recipe.student.lora
    if lora is not None and lora.start is not None:
        try:
            check_directory(folder_of_adapter(lora.start), lora)
        except ModelUnavailable as error:
            raise RecipeError(str(error)) from None
    for table, config, backend in local_models(recipe):
        # Unset, it becomes what the models can read.
        longest = recipe.rollout.max_model_len or 0
        if isinstance(config.prepare, PrepareConfig):
            limit: int | None = config.prepare.max_position_embeddings
            origin = f"[{table}.prepare]"
        else:
            origin, model = existing_model(table, config)
            reason = why_unfit(model, table, hub)
            if reason is not None:
                raise RecipeError(f"{origin} {reason}")
            limit = window(model) if longest else None
        # A teacher's own window is its limit, and `on_overflow` says what is beyond it.
        if table == "student" and limit is not None and limit < longest:
            raise RecipeError(
                f"{origin} has {limit} positions and rollout.max_model_len is {longest}, which "
                f"{backend} refuses: set it to at most {limit}"
            )


def check_libraries(recipe: Recipe) -> None:
    """Refuse a run whose libraries are missing, naming all of them with their pip lines."""
    student = recipe.rollout.backend
    backends = {student}
    if recipe.asks_teacher:
        opened = Routing.of_recipe(recipe).opened.values()
        backends |= {teacher.runs_on(student) for teacher in opened}
    libraries = {"transformers", "rich", "matplotlib"}
    libraries |= {library for name in backends for library in backend_of(name).libraries}
    libraries |= {"tensorboard"} if recipe.logging.tensorboard else set()
    missing = sorted(name for name in libraries if find_spec(name) is None)
    if missing:
        raise ImportError(f"this recipe needs {', '.join(missing)}: {how_to_install()}")
    for data in recipe.problem_sources.values():
        require_library(data.metric)
    if recipe.student.lora is not None:
        import_peft()
    if recipe.student.load == "nf4":
        import_bitsandbytes()
    if recipe.logging.wandb is not None:
        import_wandb()


def existing_model(table: str, config: ModelConfig) -> tuple[str, str]:
    """Return the key that names an existing model, with its value as written, and the model."""
    if isinstance(config.prepare, DamagedConfig):
        return f"[{table}.prepare] from = {config.prepare.source!r}", config.prepare.source
    assert config.model is not None
    return f"[{table}] model = {config.model!r}", config.model


def why_unfit(model: str, table: str, hub: bool) -> str | None:
    """Return why a model that is named in a recipe cannot be loaded, as far as its files show."""
    folder = Path(model)
    if not folder.is_dir():
        reason = missing_folder(model)
        if reason is None and hub and (why := why_not_on_hub(model)) is not None:
            reason = f"cannot be loaded: {why}"
        return reason
    reason = what_is_missing(folder)
    if reason is None and table == "student" and not has_tokenizer(folder):
        reason = "has no tokenizer (tokenizer.json and tokenizer_config.json)"
    return reason


def what_is_missing(folder: Path) -> str | None:
    """Return why a folder is no whole model, as its configs show; None where it may be one."""
    has_adapter = (folder / CONFIG).exists()
    if read_json(folder / "config.json") is None:
        if has_adapter:
            return (
                "is a LoRA adapter, and no whole model: name its base here, and the adapter in "
                "student.lora.start; or let a run write merged checkpoints (checkpoint.merge)"
            )
        return "has no config.json that is a JSON object"
    if has_adapter:
        return (
            f"has an adapter beside a whole model ({CONFIG}), which transformers would add to it "
            "and vLLM would not: move the adapter's files to another folder"
        )
    return None


def check_backend(model: nn.Module, backend: str, dtype: str, trains: bool) -> None:
    """Refuse a model, with or without weights, that a backend on this machine cannot run."""
    if trains:
        refuse_quantized(model)
    if backend_of(backend).by_head and cache_argument(model) is None:
        raise ModelUnavailable(
            f"{type(model).__name__} takes no cache, which the transformers sampler continues "
            "from; choose another backend or model"
        )
    if not (backend_of(backend).packs and built_for_cpu()):
        return
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    reason = None
    if trains and any(len(one) == 3 and min(one[:2]) > 1 for one in shapes.values()):
        reason = "packs its experts when it opens, and takes no new weights for them"
    if dtype == "float32" and any(name.endswith("A_log") for name in shapes):  # decay rates
        reason = "does not compute its recurrent layers in float32"
    if reads_images(model.config) and (package := missing_for(type(model).__name__)):
        reason = f"needs a {package} of this PyTorch's build (pip install {package} --index-url "
        reason += "https://download.pytorch.org/whl/cpu)"
    if reason is not None:
        raise ModelUnavailable(
            f"vLLM's CPU build cannot run {type(model).__name__} here: it {reason}; choose backend "
            '= "transformers", or another model'
        )


def local_models(recipe: Recipe) -> Iterator[tuple[str, ModelConfig, str]]:
    """Yield table, config and backend of the student, and of the teachers that are no servers."""
    yield "student", recipe.student, recipe.rollout.backend
    if not recipe.asks_teacher:
        return
    for teacher, config in Routing.of_recipe(recipe).opened.items():
        backend = config.own_backend or recipe.rollout.backend
        if config.url is None and not backend_of(backend).serves:
            yield teacher.table, config, backend


def warnings_of_paths(recipe: Recipe) -> list[str]:
    """Return a warning for each path that is no folder here; another machine may have it."""
    named = [
        existing_model(table, config)
        for table, config, _ in local_models(recipe)
        if not isinstance(config.prepare, PrepareConfig)
    ]
    return [
        f"warning: {origin} {reason}"
        for origin, model in named
        if (reason := missing_folder(model)) is not None
    ]


@contextmanager
def in_table(table: str) -> Iterator[None]:
    """Within the block, add the recipe's table to the message of a model that does not load."""
    try:
        yield
    except ModelUnavailable as error:
        raise ModelUnavailable(f"[{table}] {error}") from error
