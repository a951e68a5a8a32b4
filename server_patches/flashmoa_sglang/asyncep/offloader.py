"""Experts elsewhere, on their way into a few slots of the device (MoE-Prefill §6.2 and §6.3)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch.nn import Module
from torch.nn.modules.module import register_module_module_registration_hook

from flashmoa_sglang.asyncep.experts import Experts, ExpertSource
from flashmoa_sglang.asyncep.slots import Copying, ForwardClock, Rotation, StreamCopying
from flashmoa_sglang.saturation import LayerTimes

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
        """Allow layers of experts meanwhile, as the offloader is handed them."""
        self._handed_over = True
        try:
            yield
        finally:
            self._handed_over = False

    def end(self) -> None:
        """End the watch: the model is made."""
        self._hook.remove()

    def _registered(self, parent: Module, name: str, module: Any) -> None:
        """Check a module that became part of another one. Raises: SystemExit."""
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


logger = logging.getLogger(__name__)
T = TypeVar("T")
# Of sgl_kernel's copy_to_gpu_no_ce.
_WITHOUT_COPY = (64, 72)


@dataclass(frozen=True, slots=True)
class ExpertMemory:
    """Where the experts of a model are; sizes in bytes.

    Attributes:
        layers: with experts. slots: on the device.
        resident: of the first layer, which stays on the device. in_slots: of the slots.
        on_host: of all the others in this process's host memory.
        share: of all the others, what this replica holds for all. at_peers: what those hold.
        misses: how often a layer's experts were not there, nor on their way, when it began.
    """

    layers: int
    slots: int
    resident: int
    in_slots: int
    on_host: int
    share: int
    at_peers: int
    misses: int


class ExpertOffloader:
    """An offloader of SGLang (``BaseOffloader``) for the experts of any model.

    Args:
        moe_layer: the class of layers with experts.
        computing: the name of its method that computes with them.
        slots: on the device; two let one layer compute while the next one's experts come.
        keep: puts the loaded experts of all layers but the first where they are kept.
        whole: this process has the whole model, and not a stage of a pipeline.
    """

    def __init__(
        self,
        moe_layer: type,
        computing: str,
        slots: int,
        keep: Callable[[Sequence[Experts]], list[ExpertSource]],
        *,
        whole: bool = True,
    ) -> None:
        self._moe_layer = moe_layer
        self._computing = computing
        self._count = slots
        self._keep = keep
        self._whole = whole
        self._making = Making(moe_layer)
        self._experts: list[Experts] = []
        self._sources: list[ExpertSource] = []
        self._resident = 0
        self._slots: list[torch.Tensor] = []
        self._rotation: Rotation | None = None
        self._copying = Copying()
        # Of the forward that is timed, and of the last one that was.
        self._clock: ForwardClock | None = None
        self._timed: ForwardClock | None = None

    def wrap_modules(self, all_modules_generator: Iterable[Any], **_: Any) -> list[Any]:
        """Take the layers that SGLang makes, as it makes them.

        Each one's experts are in host memory before the next one is made, so that the device never
        holds more than those of one layer.
        """
        layers: list[Any] = []
        with self._making.handed_over():
            for module in all_modules_generator:
                self._take(module)
                layers.append(module)
        return layers

    def _take(self, module: Any) -> None:
        for part in module.modules():
            if isinstance(part, self._moe_layer):
                self._experts.append(Experts(part))
                # The first layer stays, so that a forward begins without waiting.
                if len(self._experts) > 1:
                    self._experts[-1].leave_device()

    def post_init(self) -> None:
        """Make the slots once the weights are loaded, and fill them.

        Raises: SystemExit for a model whose experts would all stay on the device.
        """
        self._making.end()
        if len(self._experts) < 2:
            self._refuse_too_few()
            return
        first, *others = self._experts
        self._resident = sum(t.nbytes for t in first.tensors().values())
        self._sources = self._put_away(others)
        self._rotation = Rotation(len(others), self._count)
        size = max(source.packing.bytes for source in self._sources)
        device, count = first.device, len(self._rotation.slots)
        self._slots = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(count)]
        on_gpu = device.type == "cuda"
        self._copying = StreamCopying(device, count) if on_gpu else Copying()
        for slot, layer in enumerate(self._rotation.slots):
            self._fetch(slot, layer)
        self._wrap(first.layer, lambda: None, lambda _: None)
        for number, experts in enumerate(others):
            self._wrap(experts.layer, partial(self._bring, number), partial(self._leave, number))
        logger.info("Experts of %d layers come from elsewhere: %s", len(others), self.memory())

    def _refuse_too_few(self) -> None:
        if self._whole:
            raise SystemExit(
                f"--flashmoa-asyncep does not go with this model: it has {len(self._experts)} "
                "layers of experts, of which the first stays on the device. Start without it."
            )
        logger.warning("This stage of the pipeline keeps its experts on the device.")

    def _put_away(self, others: Sequence[Experts]) -> list[ExpertSource]:
        """Have the experts of these layers where they are kept."""
        if any(experts.are_gone() for experts in others):
            raise SystemExit(
                "--flashmoa-asyncep does not go with this model's quantisation: SGLang keeps the "
                "weights of experts elsewhere than in their layers. Start without it."
            )
        for experts in others:
            experts.return_rest()
        try:
            return self._keep(others)
        except ValueError as error:
            raise SystemExit(
                f"--flashmoa-asyncep does not go with this model's quantisation: {error}. Start "
                "without it."
            ) from error

    def memory(self) -> ExpertMemory:
        """Return where the experts are now."""
        kept = [source.kept for source in self._sources]
        return ExpertMemory(
            layers=len(self._experts),
            slots=len(self._slots),
            resident=self._resident,
            in_slots=sum(slot.nbytes for slot in self._slots),
            on_host=sum(one.on_host for one in kept),
            share=sum(one.share for one in kept),
            at_peers=sum(one.at_peers for one in kept),
            misses=self._rotation.misses if self._rotation is not None else 0,
        )

    def time_next(self, tokens: int) -> None:
        """Time the layers of the next forward, which is of so many tokens."""
        beside = len(self._slots) > 1
        self._clock = ForwardClock(tokens, self._copying, beside_experts=beside)

    def times(self) -> LayerTimes | None:
        """Return the times of the last timed forward, once; wait for its copies."""
        timed, self._timed = self._timed, None
        return timed.times() if timed is not None else None

    @property
    def forbid_copy_engine_usage(self) -> bool:
        """Whether SGLang is to send numbers for each expert to the device without a copy.

        Then they do not wait behind experts on their way from host memory. Its kernel for that
        takes a few numbers of experts only (in every release 64 and 72) and raises for others.
        """
        count = self._experts[0].layer.num_local_experts if self._experts else 0
        return any(source.kept.on_host for source in self._sources) and count in _WITHOUT_COPY

    def _wrap(self, layer: Any, bring: Callable[[], T], leave: Callable[[T], None]) -> None:
        compute: Callable[..., Any] = getattr(layer, self._computing)
        is_last = layer is self._experts[-1].layer
        copying = self._copying

        def with_experts(*args: Any, **kwargs: Any) -> Any:
            clock = self._clock
            if clock is not None:
                clock.began.append(copying.mark())
            place = bring()
            result = compute(*args, **kwargs)
            if clock is not None:
                clock.ended.append(copying.mark())
            leave(place)
            if clock is not None and is_last:
                self._timed, self._clock = clock, None
            return result

        setattr(layer, self._computing, with_experts)

    def _bring(self, number: int) -> int:
        """Have a layer's experts in a slot, and the layer compute with them."""
        assert self._rotation is not None
        slot = self._rotation.slot(number)
        if slot is None:
            slot = self._rotation.miss(number)
            self._fetch(slot, number)
        self._copying.wait(slot)
        source = self._sources[number]
        source.experts.bind(source.packing.views(self._slots[slot]))
        return slot

    def _leave(self, number: int, slot: int) -> None:
        """Begin to copy the next layer's experts into the slot of one that has computed."""
        assert self._rotation is not None
        self._copying.used(slot)
        coming = self._rotation.done(number)
        if coming is not None:
            self._fetch(*coming)

    def _fetch(self, slot: int, number: int) -> None:
        what = slot, self._slots[slot], self._sources[number]
        if self._clock is None:
            self._copying.fetch(*what)
        else:
            self._clock.copies.append(self._copying.timed_fetch(*what))
