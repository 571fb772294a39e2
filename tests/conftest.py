"""What every test relies on: no network, one thread, and property tests that neither race a clock nor differ between CI runs."""

import os
from contextlib import suppress

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before diffusers is imported: it is read once

with suppress(ImportError):  # a GPU machine that runs only the gpu tests may lack it
    from hypothesis import settings

    settings.register_profile("diffgraph", deadline=None, derandomize="CI" in os.environ)
    settings.load_profile("diffgraph")


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """For models as small as these, several threads only wait for each other."""
    import torch

    torch.set_num_threads(1)
