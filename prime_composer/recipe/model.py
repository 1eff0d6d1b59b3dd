"""Define the tables of a model's origin, which student and teachers share."""

from pydantic import Field, model_validator

from prime_composer.recipe.carried import CARRIED
from prime_composer.recipe.prepare import AnyPrepare, StaysRoundedConfig
from prime_composer.tables import Table


class ModelConfig(Table):
    """Where a model comes from: ``model`` names one, or ``[*.prepare]`` builds or rounds one."""

    model: str | None = Field(default=None, json_schema_extra=CARRIED)
    """Directory in Hugging Face format, or a hub id."""

    prepare: AnyPrepare | None = Field(default=None, json_schema_extra=CARRIED)
    """Build a small model on this machine, or round an existing one, once, and cache it."""

    @model_validator(mode="after")
    def _check_origin(self) -> "ModelConfig":
        origins = [
            name for name in ("model", "prepare", "policy") if getattr(self, name, None) is not None
        ]
        if not origins and self.needs_no_model:
            return self
        if len(origins) != 1:
            choices = (
                "`model` and the table `prepare`"
                if not hasattr(self, "policy")
                else "`model`, `prepare` and `policy`"
            )
            raise ValueError(
                f"give exactly one of {choices}"
                + (f", not {' and '.join(origins)}" if origins else "")
            )
        return self

    @property
    def needs_no_model(self) -> bool:
        """Whether the table may leave the model's origin out."""
        return False


class StudentConfig(ModelConfig):
    """The model that is trained."""

    quantize: StaysRoundedConfig | None = Field(default=None, json_schema_extra=CARRIED)
    """Keep the linear layers rounded while the student learns."""
