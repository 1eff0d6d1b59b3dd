"""An environment of verifiers' first API."""


def load_environment(**settings: object) -> None: ...
