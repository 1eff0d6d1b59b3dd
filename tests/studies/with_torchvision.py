"""Fill a cell of the table of architectures where vLLM can import torchvision.

PyPI's torchvision does not load beside a PyTorch for the CPU, for which its operators are missing.
They are declared here, and none is called: a text has no image.
"""

import re
import sys

import torch

_LIBRARY = torch.library.Library("torchvision", "DEF")  # noqa: TOR901


def import_torchvision() -> None:
    """Import torchvision, with every operator declared that its build lacks."""
    while True:
        try:
            import torchvision  # noqa: F401
        except RuntimeError as error:
            missing = re.search(r"torchvision::(\w+) does not exist", str(error))
            if missing is None:
                raise
            _LIBRARY.define(f"{missing[1]}(Tensor x) -> Tensor")
            for name in [one for one in sys.modules if one.startswith("torchvision")]:
                del sys.modules[name]
        else:
            return


if __name__ == "__main__":
    import_torchvision()
    from tests.studies.architectures import main

    main()
