"""``LayerGuard``: refuses models whose experts the offloader would not get."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch.nn import Module
from torch.nn.modules.module import register_module_module_registration_hook

# Models that compute with the experts' tensors themselves instead of calling the layer's method.
_COMPUTE_THEMSELVES = ("sglang.srt.models.beam", "sglang.srt.models.inkling")


class LayerGuard:
    """Ends the start at the first layer of experts that would silently stay on the device.

    SGLang passes to an offloader only the layers that a model creates with ``make_layers`` or a
    similar function. This watches every module that is created until :meth:`stop`.

    Args: moe_layer: the class of layers with experts.
    """

    def __init__(self, moe_layer: type) -> None:
        self._moe_layer = moe_layer
        self._allows_layers = False
        self._hook = register_module_module_registration_hook(self._check_module)

    @contextmanager
    def allow_layers(self) -> Generator[None]:
        """Allow layers of experts inside this context, in which the offloader gets them."""
        self._allows_layers = True
        try:
            yield
        finally:
            self._allows_layers = False

    def stop(self) -> None:
        """Stop watching, once the model is complete."""
        self._hook.remove()

    def _check_module(self, parent: Module, name: str, module: Any) -> None:
        """Check a module that becomes a part of another one.

        Raises: SystemExit if it is a layer of experts that cannot be offloaded.
        """
        if not isinstance(module, self._moe_layer):
            return
        owner = type(parent)
        if owner.__module__.startswith(_COMPUTE_THEMSELVES):
            reason = f"{owner.__name__} computes with the tensors of {name} itself"
        elif not self._allows_layers:
            reason = f"SGLang hands {name} of {owner.__name__} to no offloader"
        else:
            return
        self.stop()
        raise SystemExit(
            f"--flashmoa-asyncep does not go with this model: {reason}, so that its experts would "
            "stay on the device, or be read where they are kept. Start without "
            "--flashmoa-asyncep."
        )
