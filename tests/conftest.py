"""Shapes and types of every annotation in the package are executed while the tests run."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from jaxtyping import install_import_hook  # noqa: E402

install_import_hook("prime_composer", "beartype.beartype")
