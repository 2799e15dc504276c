"""drople: adapting vision-language models from a handful of images.

>>> from drople import PromptLearner
>>> learner = PromptLearner().fit("photos", shots=16)
>>> learner.predict(["new.jpg"])
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from drople.errors import DropleError
    from drople.learner import PromptLearner

__all__ = ["DropleError", "PromptLearner", "__version__"]


def __getattr__(name: str) -> Any:
    # torch takes seconds to import; `drople --help` must not wait for it.
    if name == "PromptLearner":
        from drople.learner import PromptLearner

        return PromptLearner
    if name == "DropleError":
        from drople.errors import DropleError

        return DropleError
    raise AttributeError(f"module 'drople' has no attribute {name!r}")
