from pathlib import Path

import pytest
import torch

GPU_TESTS = Path(__file__).parent / "gpu"


def _no_hopper():
    """Why GPU tests can't run here, or None."""
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        return f"needs a GPU of compute capability 9.0, this one has {capability[0]}.{capability[1]}"
    return None


def pytest_collection_modifyitems(items):
    for item in items:
        if GPU_TESTS in item.path.parents:
            item.add_marker("gpu")
        # A Hopper GPU without usable kernels is no reason to skip: the tests shall fail then.
        if item.get_closest_marker("gpu") and (reason := _no_hopper()):
            item.add_marker(pytest.mark.skip(reason=reason))
