"""The experts of one layer: their tensors, where they come from, and what the layer is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn.parameter import is_lazy

from flashmoa_sglang.asyncep.packing import Packing
from flashmoa_sglang.asyncep.pinned import pinned

# No quantisation needs less than one bit of sixteen.
_LEAST_REPACKED = 16
# Bytes of one copy: other copies to the device wait for the end of one, and not for a whole layer.
_PIECE = 64 << 20


class Experts:
    """What a ``FusedMoE`` layer of SGLang computes with, expert by expert.

    Every tensor with a row for each expert belongs to them: weights, and whatever a quantisation
    has beside them (scales, zero points, biases).
    """

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.device: torch.device = next(layer.parameters()).device
        # Bytes of what is to be loaded, by name.
        self._expected: dict[str, int] = {}

    def leave_device(self) -> None:
        """Before the weights are loaded: have them loaded into host memory."""
        for name, parameter in self.layer.named_parameters(recurse=False):
            parameter.data = parameter.data.to("cpu")
            # Some have no size before they are loaded.
            if not is_lazy(parameter):
                self._expected[name] = parameter.nbytes

    def are_gone(self) -> bool:
        """Once the weights are loaded: whether most of them are not the layer's tensors any more.

        A quantisation may have put them elsewhere, and nothing in their place. Repacked ones are
        there, under their names or others, if only in a fraction of the bytes.
        """
        there = self.tensors()
        gone = sum(size for name, size in self._expected.items() if name not in there)
        new = sum(t.nbytes for name, t in there.items() if name not in self._expected)
        return 2 * gone > sum(self._expected.values()) and _LEAST_REPACKED * new < gone

    def return_rest(self) -> None:
        """Once the weights are loaded: have on the device what is not of single experts.

        It left with the rest, before a quantisation made one scale for all of several.
        """
        layer, of_experts = self.layer, self.tensors()
        rest = [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]
        self.bind({name: t.data.to(self.device) for name, t in rest if name not in of_experts})

    def tensors(self) -> dict[str, torch.Tensor]:
        """By name, once the weights are loaded and processed."""
        layer = self.layer
        found: dict[str, torch.Tensor] = {}
        for kind in (layer._parameters, layer._buffers, vars(layer)):
            for name, tensor in kind.items():
                if isinstance(tensor, torch.Tensor) and name not in found:
                    found[name] = tensor.data
        count = layer.num_local_experts
        return {
            name: tensor
            for name, tensor in sorted(found.items())
            if tensor.dim() > 0 and tensor.shape[0] == count
        }

    def bind(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Have the layer compute with these."""
        for name, tensor in tensors.items():
            parameter = self.layer._parameters.get(name)
            if parameter is not None:
                parameter.data = tensor
            elif name in self.layer._buffers:
                self.layer._buffers[name] = tensor
            else:
                setattr(self.layer, name, tensor)

    def give_back(self) -> None:
        """Free the loaded tensors; only their shapes are left until others are bound."""
        self.bind({name: t.new_empty(()).expand(t.shape) for name, t in self.tensors().items()})


class Kept(NamedTuple):
    """Where a layer's experts are while no slot has them, in bytes.

    ``share``: what this replica holds for all; ``at_peers``: what the others hold.
    """

    on_host: int = 0
    share: int = 0
    at_peers: int = 0


class Source(Protocol):
    """Where the experts of one layer come from, and how they lie in a slot."""

    experts: Experts
    packing: Packing
    kept: Kept

    def fill(self, memory: torch.Tensor) -> None:
        """Begin to copy them into a slot, on the current stream of a device that has streams."""
        ...


class HostExperts:
    """Experts packed into one piece of host memory; pinned where a GPU is to copy it."""

    def __init__(self, experts: Experts) -> None:
        self.experts = experts
        tensors = experts.tensors()
        self.packing = Packing.of(tensors)
        size = self.packing.bytes
        on_gpu = experts.device.type == "cuda"
        self._memory = pinned(size) if on_gpu else torch.empty(size, dtype=torch.uint8)
        self.packing.fill(self._memory, tensors)
        self.kept = Kept(on_host=self.packing.bytes)
        # The layer's own tensors are not needed any more.
        experts.bind(self.packing.views(self._memory))

    def fill(self, memory: torch.Tensor) -> None:
        pieces = memory[: self.packing.bytes].split(_PIECE)
        for piece, kept in zip(pieces, self._memory.split(_PIECE), strict=True):
            piece.copy_(kept, non_blocking=True)


def in_host_memory(layers: Sequence[Experts]) -> list[Source]:
    """Keep the experts of these layers in this process's host memory."""
    return [HostExperts(experts) for experts in layers]
