"""What the tests share: where the real data is, a tiny random CLIP, determinism."""

import os
import pathlib
import signal

import pytest

ROOT = pathlib.Path(__file__).parent.parent

# The same tests everywhere, with DROPLE_TEST_GPU=1 on a GPU. Without one our kernels are interpreted; Triton looks when
# it is imported, and torch may import it.
if os.environ.get("DROPLE_TEST_GPU") != "1":
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}

# A shell starts background jobs deaf to Ctrl-C, and the processes that tests interrupt would inherit it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def shared() -> pathlib.Path:
    """The folder with real data and the fp16 model; tests that need it are skipped where it is absent."""
    folder = pathlib.Path(os.environ.get("DROPLE_SHARED", ROOT.parent / "shared"))
    if not (folder / "data").is_dir():
        pytest.skip(
            f"real data not found at {folder}: set DROPLE_SHARED to the folder that holds data/ and models/"
        )
    return folder
