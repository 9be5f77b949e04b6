"""Hardware markers. MQA_REQUIRE_CUDA=1 turns the skips for want of a GPU into failures."""

from __future__ import annotations

import os

import pytest
import torch

REQUIRED = os.environ.get("MQA_REQUIRE_CUDA", "0") not in ("", "0")


def missing_hardware(item: pytest.Item) -> str | None:
    cuda, sm90 = (item.get_closest_marker(name) is not None for name in ("cuda", "sm90"))
    if (cuda or sm90) and not torch.cuda.is_available():
        return "needs a CUDA GPU"
    if sm90 and torch.cuda.get_device_capability()[0] != 9:
        return "needs a Hopper GPU"
    return None


def pytest_runtest_setup(item: pytest.Item) -> None:
    if reason := missing_hardware(item):
        if REQUIRED:
            pytest.fail(f"{reason}, and MQA_REQUIRE_CUDA is set", pytrace=False)
        pytest.skip(reason)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param
