"""Find or build the models under a recipe's ``[*.prepare]``, and cache them.

A model that comes with the package (``shipped/``) is found by its cache key and never trained,
unless the user asks for it. Two generated models of one recipe get the same tokenizer whenever
their ``vocab_size`` agrees: a byte-level BPE trained on the recipe's own data.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from prime_composer.backends.model_files import cache_root, fingerprint
from prime_composer.problems.loading import ProblemSet
from prime_composer.problems.prompts import answer_text, prompt_text
from prime_composer.recipe.prepare import AnyPrepare, DamagedConfig, PrepareConfig
from prime_composer.recipe.routing import Routing
from prime_composer.recipe.schema import ModelConfig, Recipe
from prime_composer.tiny_models.transcripts import CHAT_TEMPLATE

Progress = Callable[[int, int, float], None]  # Steps done, total steps, loss

FORMAT = 1  # Part of the cache key. Raise it when the same description builds another model.

ROUNDING = 2  # The same for a model whose weights are rounded

DESCRIPTION = "prepare.json"  # Beside the weights, how they were made

WEIGHTS = "model.safetensors"

SHIPPED = Path(__file__).parent / "shipped"
"""Models that come with the package: a folder by cache key, its weights in half precision. The
first one is trained by ``python -m tests.studies.ship``."""


def cache_key(config: AnyPrepare, problems: ProblemSet) -> str | None:
    """Return a readable name and a hash of all that decides what the model is.

    Contents count, not paths. None: the source is not on this machine.
    """
    if isinstance(config, DamagedConfig):
        content = fingerprint(config.source)
        return None if content is None else _key_of_damaged(config, content)
    description = [FORMAT, config.model_dump(mode="json", exclude_none=True)]
    digest = hashlib.sha256(json.dumps(description, sort_keys=True).encode())
    for problem in problems.worked:
        transcript = problems.transcript(problem)
        if transcript is None:
            data = problems.config_of(problem)
            texts = [prompt_text(problem, data), problem.answer]
            if not (data.chat_template or answer_text("", data)):
                texts.append("")  # up to efc5349 such a model learned a space before the answer
        else:
            texts = [CHAT_TEMPLATE, transcript]
        if config.environments is not None:
            texts.append(str(problem.environment in config.environments))
        digest.update(json.dumps(texts).encode())
    return f"qwen3-{config.layers}x{config.hidden_size}-{digest.hexdigest()[:16]}"


def _key_of_damaged(config: DamagedConfig, content: str) -> str:
    """Return the cache key of a damaged model, given its source's fingerprint."""
    dropped, quantize = sorted(config.drop_layers), config.quantize
    settings: list[Any] = [FORMAT if quantize is None else ROUNDING, content]
    names = []
    if dropped:
        settings.append({"drop_layers": dropped})
        names.append(f"without-{len(dropped)}")
    if quantize is not None:
        settings.append(quantize.model_dump(mode="json"))
        names.append(f"rounded-{quantize.bits}bit-{quantize.group}")
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    return "-".join([*names, digest.hexdigest()[:16]])


def folder_of(
    config: AnyPrepare, problems: ProblemSet, cache_dir: Path | None = None
) -> tuple[Path, bool] | None:
    """Return a prepared model's folder, and whether it is there; None where ``cache_key`` is None.

    A model of the package comes before one of the cache, unless that one was rebuilt. A pruned
    model counts only if it was pruned from the model that is found for the same description.
    Nothing heavy is imported.
    """
    key = cache_key(config, problems)
    if key is None:
        return None
    path = (cache_dir or cache_root()) / "models" / key
    is_there = path.is_dir()
    if not (is_there and _description(path).get("rebuilt")) and (shipped := _shipped(key)):
        return shipped, True
    if is_there and isinstance(config, PrepareConfig) and config.prune:
        unpruned = cached_path(_unpruned(config), problems, cache_dir)
        was = _description(path).get("unpruned")
        is_there = unpruned is None or was == weights_digest(unpruned)
    return path, is_there


def cached_path(
    config: AnyPrepare, problems: ProblemSet, cache_dir: Path | None = None
) -> Path | None:
    """Return the folder that ``folder_of`` names if the model is there, else None."""
    match folder_of(config, problems, cache_dir):
        case path, True:
            return path
    return None


def is_shipped(folder: Path) -> bool:
    """Return whether a prepared model comes with the package."""
    return folder.parent == SHIPPED


def _shipped(key: str) -> Path | None:
    """Return the package's model of a cache key, None where it has none."""
    folder = SHIPPED / key
    if not folder.is_dir():
        return None
    if weights_digest(folder) != _description(folder)["sha256"]:
        raise ValueError(f"{folder / WEIGHTS} is damaged; install prime-composer again")
    return folder


def weights_digest(folder: Path) -> str | None:
    """Return the SHA-256 of a model's weights, None where they are missing."""
    try:
        return hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()
    except FileNotFoundError:
        return None


def _description(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return found


def _unpruned(config: PrepareConfig) -> PrepareConfig:
    return config.model_copy(update={"prune": 0.0})


def prepare_configs(recipe: Recipe) -> dict[str, tuple[str, AnyPrepare]]:
    """Return table -> display name and description of every model under a ``[*.prepare]``."""
    models: list[tuple[str, str, ModelConfig]] = [
        (teacher.table, teacher.display, config)
        for teacher, config in Routing.of_recipe(recipe).opened.items()
    ]
    models.append(("student", "student", recipe.student))
    return {
        table: (display, model.prepare)
        for table, display, model in models
        if model.prepare is not None
    }


def model_folders(recipe: Recipe, problems: ProblemSet) -> dict[str, Path]:
    """Return the folder of every prepared model of a recipe, built or not, by table."""
    return {
        table: found[0]
        for table, (_, config) in prepare_configs(recipe).items()
        if (found := folder_of(config, problems)) is not None
    }


def prepare_models(
    recipe: Recipe,
    problems: ProblemSet,
    rebuild: bool = False,
    progress: Callable[[str, int], Progress] | None = None,
) -> dict[str, Path]:
    """Find or build every model under a ``[*.prepare]`` table; return their folders by table.

    ``rebuild`` trains again, and replaces what is cached. ``progress`` is called before a model is
    built, with its display name and its steps of fine-tuning, and returns the callback for these.
    """
    paths: dict[str, Path] = {}
    for table, (display, config) in prepare_configs(recipe).items():
        path = None if rebuild else cached_path(config, problems)
        if path is None:
            steps = config.sft_steps if isinstance(config, PrepareConfig) else 0
            callback = None if progress is None else progress(display, steps)
            path = prepare_model(
                config, problems, rebuild=rebuild, progress=callback, rebuilt=paths.values()
            )
        paths[table] = path
    return paths


def prepare_model(
    config: AnyPrepare,
    problems: ProblemSet,
    cache_dir: Path | None = None,
    rebuild: bool = False,
    progress: Progress | None = None,
    rebuilt: Collection[Path] = (),
) -> Path:
    """Return the folder of a model and its tokenizer: cached, or built now.

    No reader ever finds half a model, and runs that need the same one wait for the first to finish
    it. A pruned model is made from the unpruned one of the same description, which is cached too.
    ``rebuilt`` names what this command has trained, which ``rebuild`` leaves as it is.
    """
    models = (cache_dir or cache_root()) / "models"
    key = cache_key(config, problems)
    if key is None:  # a damaged model's source is on the hub, and its config is fetched
        from prime_composer.backends.hf_model import read_config

        assert isinstance(config, DamagedConfig)
        read_config(config.source)
        key = cache_key(config, problems)
        assert key is not None, "the download is in the Hugging Face cache"
    path = models / key
    rebuild = rebuild and path not in rebuilt
    if not rebuild and (found := cached_path(config, problems, cache_dir)) is not None:
        return found
    from filelock import FileLock

    models.mkdir(parents=True, exist_ok=True)
    with FileLock(models / f"{key}.lock"):
        if not rebuild and (found := cached_path(config, problems, cache_dir)) is not None:
            return found
        unfinished = models / f"{key}.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        unpruned = None
        if isinstance(config, PrepareConfig) and config.prune:
            unpruned = prepare_model(
                _unpruned(config), problems, cache_dir, rebuild, progress, rebuilt
            )
        progress = progress or (lambda done, steps, loss: None)
        details = _write_model(config, problems, unfinished, progress, unpruned, rebuild)
        described = {"format": FORMAT, "prepare": config.model_dump(mode="json"), **details}
        text = json.dumps(described, indent=2) + "\n"
        (unfinished / DESCRIPTION).write_text(text, encoding="utf-8")
        replaced = models / f"{key}.replaced"
        shutil.rmtree(replaced, ignore_errors=True)
        if path.is_dir():
            path.rename(replaced)
        unfinished.rename(path)
        shutil.rmtree(replaced, ignore_errors=True)
    return path


def _write_model(
    config: AnyPrepare,
    problems: ProblemSet,
    folder: Path,
    progress: Progress,
    unpruned: Path | None,
    rebuilt: bool,
) -> dict[str, Any]:
    """Write a model and its tokenizer into ``folder``, and return what there is to say of it."""
    if isinstance(config, DamagedConfig):
        from prime_composer.tiny_models.damage import damage_model

        return damage_model(config, folder)
    from prime_composer.tiny_models import training

    data = {name: data.model_dump(mode="json") for name, data in problems.sources.items()}
    if unpruned is None:
        loss = training.build_model(config, problems, folder, progress)
        return {"data": data, "loss": loss} | ({"rebuilt": True} if rebuilt else {})
    training.prune_model(unpruned, config.prune, folder)
    loss = _description(unpruned)["loss"]
    progress(config.sft_steps, config.sft_steps, loss)
    return {"data": data, "loss": loss, "unpruned": weights_digest(unpruned)}
