"""``ExpertOffloader``: stores experts off the device and copies them into a few slots there.

Papers: MoE-Prefill §6.2 and §6.3.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from flashmoa_sglang.asyncep.cuda import CudaDevice
from flashmoa_sglang.asyncep.experts import Experts, PackedExperts, Where
from flashmoa_sglang.asyncep.layer_guard import LayerGuard
from flashmoa_sglang.asyncep.slots import ForwardClock, SlotCopier, SlotRotation, StreamCopier
from flashmoa_sglang.saturation import LayerTimes

logger = logging.getLogger(__name__)
T = TypeVar("T")
# Stores the loaded experts of layers off the device, which is this GPU, if there is one.
Store = Callable[[Sequence[Experts], CudaDevice | None], list[PackedExperts]]
# The numbers of experts for which sgl_kernel's copy_to_gpu_no_ce works, in every release.
_WITHOUT_COPY = (64, 72)


@dataclass(frozen=True, slots=True)
class ExpertMemory:
    """Where the experts of a model are stored; sizes in bytes.

    Attributes:
        layers, slots: number of layers with experts, and of slots on the device.
        resident: size of the first layer's experts, which stay on the device.
        in_slots: size of the slots.
        on_host: size of the other layers' experts in host memory, which replicas have in common.
        share, at_peers: size of the parts on this replica's and on the other replicas' devices.
        misses: how often a layer began whose experts were neither in a slot nor being copied.
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
    """Offloads the experts of any model; has the methods of SGLang's ``BaseOffloader``.

    Args:
        moe_layer: the class of layers with experts.
        computing: the name of its method that computes with the experts.
        slots: number of slots on the device. With two, a layer can compute while the experts of the
            next layer are copied.
        store: stores the loaded experts of all layers but the first off the device.
        whole: whether this process has the whole model, and not a stage of a pipeline.
        open_gpu: returns the GPU with a device, if it is one.
    """

    def __init__(
        self,
        moe_layer: type,
        computing: str,
        slots: int,
        store: Store,
        *,
        whole: bool = True,
        open_gpu: Callable[[torch.device], CudaDevice | None] = CudaDevice.of,
    ) -> None:
        self._open_gpu = open_gpu
        self._moe_layer = moe_layer
        self._computing = computing
        self._wanted_slots = slots
        self._store = store
        self._whole = whole
        self._guard = LayerGuard(moe_layer)
        self._experts: list[Experts] = []
        self._sources: list[PackedExperts] = []
        self._resident = 0
        self._slots: list[torch.Tensor] = []
        self._rotation: SlotRotation | None = None
        self._copier = SlotCopier()
        # The clocks of a forward that is being timed, and of the last one that has ended.
        self._clock: ForwardClock | None = None
        self._ended_clock: ForwardClock | None = None

    def wrap_modules(self, all_modules_generator: Iterable[Any], **_: Any) -> list[Any]:
        """Take over the experts of the layers, as the generator creates the layers.

        The experts of each layer move to host memory before the next layer is created, so that the
        device never holds the experts of more than two layers.
        """
        layers: list[Any] = []
        with self._guard.allow_layers():
            for module in all_modules_generator:
                self._take_experts(module)
                layers.append(module)
        return layers

    def _take_experts(self, module: Any) -> None:
        for part in module.modules():
            if isinstance(part, self._moe_layer):
                self._experts.append(Experts(part))
                # The first layer's experts stay, so that a forward begins without waiting.
                if len(self._experts) > 1:
                    self._experts[-1].move_to_host()

    def post_init(self) -> None:
        """Create and fill the slots, once the weights are loaded.

        Raises: SystemExit if all of the model's experts would stay on the device, or a quantisation
            has put them where they are not found.
        """
        self._guard.stop()
        if len(self._experts) < 2:
            self._refuse_too_few()
            return
        first, *others = self._experts
        self._resident = sum(t.nbytes for t in first.tensors().values())
        device = first.device
        gpu = self._open_gpu(device)
        self._sources = self._store_experts(others, gpu)
        self._rotation = SlotRotation(len(others), self._wanted_slots)
        size = max(source.packing.bytes for source in self._sources)
        count = len(self._rotation.slots)
        self._slots = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(count)]
        if gpu is not None:
            channels = set[str]().union(*(source.channels for source in self._sources))
            self._copier = StreamCopier(gpu, count, channels)
        for slot, layer in enumerate(self._rotation.slots):
            self._fetch(slot, layer)
        self._wrap(first.layer, lambda: None, lambda _: None)
        for number, experts in enumerate(others):
            self._wrap(experts.layer, partial(self._bind, number), partial(self._refill, number))
        logger.info(
            "The experts of %d layers are kept off the device, in bytes: %s",
            len(others),
            self.memory(),
        )

    def _refuse_too_few(self) -> None:
        if self._whole:
            raise SystemExit(
                f"--flashmoa-asyncep does not go with this model: it has {len(self._experts)} "
                "layers of experts, of which the first stays on the device. Start without "
                "--flashmoa-asyncep."
            )
        logger.warning(
            "This stage of the pipeline has fewer than two layers of experts and keeps them on the "
            "device."
        )

    def _store_experts(
        self, others: Sequence[Experts], gpu: CudaDevice | None
    ) -> list[PackedExperts]:
        if any(experts.are_missing() for experts in others):
            raise SystemExit(
                "--flashmoa-asyncep does not go with this model's quantisation: SGLang keeps the "
                "experts' weights outside their layers. Start without --flashmoa-asyncep."
            )
        for experts in others:
            experts.return_shared_tensors()
        try:
            return self._store(others, gpu)
        except ValueError as error:
            raise SystemExit(
                f"--flashmoa-asyncep does not go with this model's quantisation: {error}. Start "
                "without --flashmoa-asyncep."
            ) from error

    def memory(self) -> ExpertMemory:
        """Return where the experts are now."""
        stored = {
            where.value: sum(source.stored(where) for source in self._sources) for where in Where
        }
        return ExpertMemory(
            layers=len(self._experts),
            slots=len(self._slots),
            resident=self._resident,
            in_slots=sum(slot.nbytes for slot in self._slots),
            misses=self._rotation.misses if self._rotation is not None else 0,
            **stored,
        )

    def time_next(self, tokens: int) -> None:
        """Time the layers of the next forward, which has ``tokens`` tokens."""
        overlap = len(self._slots) > 1
        self._clock = ForwardClock(tokens, self._copier, copies_overlap=overlap)

    def take_times(self) -> LayerTimes | None:
        """Return the times of the last timed forward, once; wait for its copies to end."""
        clock, self._ended_clock = self._ended_clock, None
        return clock.times() if clock is not None else None

    @property
    def forbid_copy_engine_usage(self) -> bool:
        """Whether SGLang sends each expert's number of tokens to the device without a copy.

        With a copy, these numbers would wait until experts have been copied from host memory.
        SGLang's kernel for this takes only a few numbers of experts and raises for others.
        """
        count = self._experts[0].layer.num_local_experts if self._experts else 0
        from_host = any(source.stored(Where.ON_HOST) for source in self._sources)
        return from_host and count in _WITHOUT_COPY

    def _wrap(self, layer: Any, before: Callable[[], T], after: Callable[[T], None]) -> None:
        """Call ``before`` and ``after`` around the layer's computation, and mark when it runs."""
        compute: Callable[..., Any] = getattr(layer, self._computing)
        is_last = layer is self._experts[-1].layer
        copier = self._copier

        def compute_with_experts(*args: Any, **kwargs: Any) -> Any:
            clock = self._clock
            if clock is not None:
                clock.starts.append(copier.mark())
            slot = before()
            try:
                result = compute(*args, **kwargs)
                if clock is not None:
                    clock.ends.append(copier.mark())
            finally:
                # A layer that raises may have enqueued kernels that read the slot.
                after(slot)
            if clock is not None and is_last:
                self._ended_clock, self._clock = clock, None
            return result

        setattr(layer, self._computing, compute_with_experts)

    def _bind(self, number: int) -> int:
        """Bind a layer to its experts in a slot, and copy them there if needed. Return the slot."""
        assert self._rotation is not None
        slot = self._rotation.slot_of(number)
        if slot is None:
            slot = self._rotation.evict_for(number)
            self._fetch(slot, number)
        self._copier.wait(slot)
        source = self._sources[number]
        source.experts.bind(source.packing.views(self._slots[slot]))
        return slot

    def _refill(self, number: int, slot: int) -> None:
        """Copy other experts into the slot of a layer that has computed, if some are needed."""
        assert self._rotation is not None
        self._copier.note_use(slot)
        if (slot_and_layer := self._rotation.advance(number)) is not None:
            self._fetch(*slot_and_layer)

    def _fetch(self, slot: int, number: int) -> None:
        arguments = slot, self._slots[slot], self._sources[number]
        if self._clock is None:
            self._copier.fetch(*arguments)
        else:
            self._clock.copies.extend(self._copier.timed_fetch(*arguments))
