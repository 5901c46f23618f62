"""One thread a process, no network: tests give the same results everywhere.

Processes run side by side (pytest-xdist), a file each; two threads in each would starve each other.
"""

import os

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
if not torch.cuda.is_available():  # set before transformers imports Triton
    os.environ["TRITON_INTERPRET"] = "1"
# The same examples at every run, so that a failure is one of the code and not of the day.
settings.register_profile("quick", max_examples=30, deadline=None, derandomize=True)
settings.register_profile("thorough", max_examples=300, deadline=None, derandomize=True)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """A GPU that Triton kernels run on, or the CPU, on which Triton's interpreter runs them."""
    triton = pytest.importorskip("triton")
    if (request.param == "cpu") != triton.knobs.runtime.interpret:
        pytest.skip("the interpreter is for machines without a CUDA device, and only for them")
    return torch.device(request.param)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow",
        action="store_true",
        help="also tests that start clusters, browsers, builds or runs to kill, and ten times as "
        "many examples of every property",
    )


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("thorough" if config.getoption("--slow") else "quick")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    items[:] = [item for item in items if item not in slow]
    config.hook.pytest_deselected(items=slow)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if not config.getoption("--slow"):
        terminalreporter.write_line(
            "left out: clusters, browsers, builds, runs to kill, and nine examples of ten "
            "(pytest --slow)"
        )
