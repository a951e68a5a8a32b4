"""What is watched while SGLang makes a model: that its experts can come from elsewhere."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch.nn import Module
from torch.nn.modules.module import register_module_module_registration_hook

# Models that compute with the experts' tensors themselves, past the layer's method.
_COMPUTE_THEMSELVES = "sglang.srt.models.inkling"


class Making:
    """Ends the start at the first layer of experts that would silently stay on the device.

    SGLang hands an offloader only the layers that a model makes with ``make_layers`` and the like.

    Args: moe_layer: the class of layers with experts.
    """

    def __init__(self, moe_layer: type) -> None:
        self._moe_layer = moe_layer
        self._handed_over = False
        self._hook = register_module_module_registration_hook(self._registered)

    @contextmanager
    def handed_over(self) -> Generator[None]:
        """While layers are made that the offloader is handed."""
        self._handed_over = True
        try:
            yield
        finally:
            self._handed_over = False

    def end(self) -> None:
        """The model is made."""
        self._hook.remove()

    def _registered(self, parent: Module, name: str, module: Any) -> None:
        """A module has been made part of another one. Raises: SystemExit."""
        if not isinstance(module, self._moe_layer):
            return
        owner = type(parent)
        if owner.__module__.startswith(_COMPUTE_THEMSELVES):
            why = f"{owner.__name__} computes with the tensors of {name} itself"
        elif not self._handed_over:
            why = f"SGLang hands {name} of {owner.__name__} to no offloader"
        else:
            return
        self.end()
        raise SystemExit(
            f"--flashmoa-asyncep does not go with this model: {why}, so that its experts would "
            "stay on the device, or be read where they are kept. Start without it."
        )
