"""The programs of ``examples/`` as modules: what is measured is what is shown."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from flashmoa.errors import FlashMoAError

# An installed package does not have them; a clone does.
_FOLDERS = (Path(__file__).parents[2] / "examples", Path("examples"))


def example(name: str) -> ModuleType:
    """``examples/NAME.py``. Raises: FlashMoAError where it, or what it needs, is missing."""
    file = next((file for folder in _FOLDERS if (file := folder / f"{name}.py").exists()), None)
    if file is None:
        raise FlashMoAError(f"there is no examples/{name}.py; run this in a clone of FlashMoA")
    full_name = f"flashmoa_examples.{name}"
    if full_name in sys.modules:
        return sys.modules[full_name]
    spec = spec_from_file_location(full_name, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[full_name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        del sys.modules[full_name]
        raise FlashMoAError(
            f"{file.name} needs {error.name}: pip install 'flashmoa[examples]'"
        ) from error
    return module
