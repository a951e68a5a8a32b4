"""``ExpertOffloader``: stores experts off the device and copies them into a few slots there.

``SlotRotation`` assigns layers to slots, ``SlotCopier`` and ``StreamCopier`` copy, ``ForwardClock``
measures. Papers: MoE-Prefill §6.2 and §6.3.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook

from flashmoa_sglang.moe.asyncep.cuda import CudaDevice
from flashmoa_sglang.moe.asyncep.experts import Experts, PackedExperts, Where
from flashmoa_sglang.moe.saturation import LayerTimes

logger = logging.getLogger(__name__)
Marks = tuple[Any, Any]
# Stores the loaded experts of layers off the device, which is this GPU, if there is one.
Store = Callable[[Sequence[Experts], CudaDevice | None], list[PackedExperts]]
# Models that compute with the experts' tensors themselves instead of calling the layer's method.
COMPUTE_THEMSELVES = ("sglang.srt.models.beam", "sglang.srt.models.inkling")


class SlotRotation:
    """Assigns layers to slots; copies nothing itself.

    Layers are numbered in the order of computation. At the start slot i has layer i. When a layer
    has computed, its slot is for the next layer without a slot. Layers may compute in any order,
    but their experts are always copied ahead only in the order of their numbers.

    Attributes:
        slots: the layer of each slot, whose experts are there or are being copied.
        misses: how often a layer without a slot was needed.
    """

    def __init__(self, layers: int, slots: int) -> None:
        self._layers = layers
        self.slots: list[int] = list(range(min(layers, slots)))
        self.misses = 0

    def slot_of(self, layer: int) -> int | None:
        return self.slots.index(layer) if layer in self.slots else None

    def evict_for(self, layer: int) -> int:
        """Assign a slot to a layer without one: the slot whose layer is needed last."""
        self.misses += 1
        slot = max(
            range(len(self.slots)), key=lambda index: (self.slots[index] - layer) % self._layers
        )
        self.slots[slot] = layer
        return slot

    def advance(self, layer: int) -> tuple[int, int] | None:
        """Note that a layer has computed. Return its slot and the next layer to copy into it.

        Return ``None`` if every layer has a slot.
        """
        if len(self.slots) == self._layers:
            return None
        slot = self.slots.index(layer)
        following = (layer + 1) % self._layers
        while following in self.slots:
            following = (following + 1) % self._layers
        self.slots[slot] = following
        return slot, following


class SlotCopier:
    """Copies experts into slots.

    This class copies synchronously, on a CPU; ``StreamCopier`` overrides it for CUDA. Call the
    methods in the order of the enqueued computation: on CUDA nothing has run yet when they return.
    A mark is a point in that order. Two marks measure the time between them.
    """

    def fetch(
        self, slot: int, memory: torch.Tensor, source: PackedExperts, *, timed: bool
    ) -> list[Marks]:
        """Copy experts into a slot, after all computation that has been enqueued with the slot.

        Return marks before and after the copies on each way, if they are timed.
        """
        before = self.mark()
        for channel in source.channels:
            for target, run in source.copies(memory, channel):
                target.copy_(run)
        return [(before, self.mark())] if timed else []

    def wait(self, slot: int) -> None:
        """Delay all computation that is enqueued from now on until the slot has been filled."""

    def note_use(self, slot: int) -> None:
        """Note that the computation enqueued so far reads the slot."""

    def mark(self) -> Any:
        return time.perf_counter()

    def seconds(self, earlier: Any, later: Any) -> float:
        """Return the time between two marks, when both have been reached."""
        return later - earlier


class StreamCopier(SlotCopier):
    """Copies on CUDA streams of its own, one for each way, from pinned memory and other devices.

    Create it after the slots: its first copies wait for the work that the current stream has
    enqueued until then, because the caching allocator reuses blocks.

    Args: channels: the ways to the device that experts take.
    """

    def __init__(self, gpu: CudaDevice, slots: int, channels: Iterable[str]) -> None:
        self._gpu = gpu
        self._streams = {channel: gpu.new_stream() for channel in sorted(channels)}
        self._filled_events = [
            {channel: gpu.new_event() for channel in self._streams} for _ in range(slots)
        ]
        self._used_events = [gpu.new_event() for _ in range(slots)]
        for slot in range(slots):
            self.note_use(slot)

    def fetch(
        self, slot: int, memory: torch.Tensor, source: PackedExperts, *, timed: bool
    ) -> list[Marks]:
        marks: list[Marks] = []
        for channel, stream in self._streams.items():
            stream.wait_event(self._used_events[slot])
            # The copy's time begins when the slot is free; the wait before is computing time.
            before = self._mark_on(stream) if timed else None
            for target, run in source.copies(memory, channel):
                self._gpu.copy(stream, target, run)
            self._filled_events[slot][channel].record(stream)
            if timed:
                marks.append((before, self._mark_on(stream)))
        return marks

    def wait(self, slot: int) -> None:
        for event in self._filled_events[slot].values():
            self._gpu.current_stream().wait_event(event)

    def note_use(self, slot: int) -> None:
        self._used_events[slot].record(self._gpu.current_stream())

    def mark(self) -> torch.cuda.Event:
        return self._mark_on(self._gpu.current_stream())

    def _mark_on(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = self._gpu.new_event(timed=True)
        event.record(stream)
        return event

    def seconds(self, earlier: torch.cuda.Event, later: torch.cuda.Event) -> float:
        later.synchronize()
        return earlier.elapsed_time(later) / 1000


class ForwardClock:
    """Collects marks in a forward: around layers' computations with experts, and around copies.

    Only a forward that ``time_next`` announces is timed, so that the others have no overhead.

    Args: copies_overlap: whether copies run while experts compute, as with two slots or more.

    Attributes:
        starts, ends: marks before and after each layer's computation with its experts.
        copies: marks before and after each layer's copies on one way.
    """

    def __init__(self, tokens: int, copier: SlotCopier, *, copies_overlap: bool) -> None:
        self._tokens = tokens
        self._copier = copier
        self._copies_overlap = copies_overlap
        self.starts: list[Any] = []
        self.ends: list[Any] = []
        self.copies: list[Marks] = []

    def times(self) -> LayerTimes | None:
        """Return the forward's times; ``None`` if it had fewer than two layers or copied nothing.

        ``window`` runs from the first layer's computation with experts to the second layer's. The
        first layer's experts never leave the device, so ``window`` contains no wait for a copy
        (MoE-Prefill §B.4 measures layer 0 for the same reason). With one slot a copy cannot begin
        before the experts have computed, so ``window`` begins after their computation.
        ``transfer`` is the time of the slowest copy.
        """
        if len(self.starts) < 2 or not self.copies:
            return None
        window_start = self.starts[0] if self._copies_overlap else self.ends[0]
        return LayerTimes(
            tokens=self._tokens,
            window=self._copier.seconds(window_start, self.starts[1]),
            transfer=max(self._copier.seconds(*marks) for marks in self.copies),
        )


def _refusal(reason: str) -> SystemExit:
    return SystemExit(
        f"--flashmoa-asyncep does not go with this model: {reason}. Start without "
        "--flashmoa-asyncep."
    )


class ExpertOffloader:
    """Offloads the experts of any model; has the methods of SGLang's ``BaseOffloader``.

    SGLang passes to an offloader only the layers that a model creates with ``make_layers`` or a
    similar function. Until the model is complete, the offloader watches every new module, and ends
    the start at the first layer of experts that would silently stay on the device.

    Args:
        moe_layer: the class of layers with experts.
        computing: the name of its method that computes with the experts.
        slots: with two, a layer can compute while the next layer's experts are copied.
        store: stores the loaded experts of all layers except the first off the device.
        whole: whether this process has the whole model, and not a stage of a pipeline.
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
        self._watching = register_module_module_registration_hook(self._check_module)
        self._makes_layers = False
        self._experts: list[Experts] = []
        self._sources: list[PackedExperts] = []
        self._resident = 0
        self._slots: list[torch.Tensor] = []
        self._rotation: SlotRotation | None = None
        self._copier = SlotCopier()
        # The clocks of the forward that is being timed, and of the last timed forward.
        self._clock: ForwardClock | None = None
        self._ended_clock: ForwardClock | None = None

    def wrap_modules(self, all_modules_generator: Iterable[Any], **_: Any) -> list[Any]:
        """Take over the experts of the layers, as the generator creates the layers.

        The experts of each layer move to host memory before the next layer is created, so that the
        device never has the experts of more than two layers.
        """
        layers: list[Any] = []
        self._makes_layers = True
        try:
            for module in all_modules_generator:
                layers.append(module)
                for part in module.modules():
                    if isinstance(part, self._moe_layer):
                        self._experts.append(Experts(part))
                        # The first layer's experts stay, so that a forward begins without waiting.
                        if len(self._experts) > 1:
                            self._experts[-1].move_to_host()
        finally:
            self._makes_layers = False
        return layers

    def stop_watching(self) -> None:
        self._watching.remove()

    def _check_module(self, parent: torch.nn.Module, name: str, module: Any) -> None:
        """Check a module that becomes a part of another one.

        Raises: SystemExit if it is a layer of experts that cannot be offloaded.
        """
        if not isinstance(module, self._moe_layer):
            return
        owner = type(parent)
        if owner.__module__.startswith(COMPUTE_THEMSELVES):
            reason = f"{owner.__name__} computes with the tensors of {name} itself"
        elif not self._makes_layers:
            reason = f"SGLang hands {name} of {owner.__name__} to no offloader"
        else:
            return
        self.stop_watching()
        raise _refusal(
            f"{reason}, so that its experts would stay on the device, or be read where they are "
            "kept"
        )

    def post_init(self) -> None:
        """Create and fill the slots, once the weights are loaded.

        Raises: SystemExit if all of the model's experts would stay on the device, or a quantisation
            has put them outside of their layers.
        """
        self.stop_watching()
        if len(self._experts) < 2:
            if self._whole:
                count = f"it has {len(self._experts)} layers of experts"
                raise _refusal(f"{count}, of which the first stays on the device")
            logger.warning("This stage of the pipeline keeps its experts on the device.")
            return
        first, *others = self._experts
        self._resident = sum(t.nbytes for t in first.tensors().values())
        gpu = self._open_gpu(device := first.device)
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
        self._wrap(first.layer, None)
        for number, experts in enumerate(others):
            self._wrap(experts.layer, number)
        text = "The experts of %d layers are kept off the device, in bytes: %s"
        logger.info(text, len(others), self.memory())

    def _store_experts(
        self, others: Sequence[Experts], gpu: CudaDevice | None
    ) -> list[PackedExperts]:
        if any(experts.are_missing() for experts in others):
            raise _refusal("its quantisation keeps the experts' weights outside their layers")
        for experts in others:
            experts.return_shared_tensors()
        try:
            return self._store(others, gpu)
        except ValueError as error:
            raise _refusal(f"its quantisation cannot be copied, because {error}") from error

    def memory(self) -> dict[str, int]:
        """Return where the model's experts are stored, in bytes, for ``GET /flashmoa/info``.

        ``resident``: the first layer's experts, which stay on the device. The other layers' experts
        are ``on_host`` (in host memory, once for all replicas), on this replica's device
        (``share``), and on the other replicas' devices (``at_peers``). ``misses`` counts how often
        a layer began whose experts were neither in a slot nor being copied.
        """
        return {
            "layers": len(self._experts),
            "slots": len(self._slots),
            "resident": self._resident,
            "in_slots": sum(slot.nbytes for slot in self._slots),
            "misses": self._rotation.misses if self._rotation is not None else 0,
            **{where.value: sum(one.stored(where) for one in self._sources) for where in Where},
        }

    def time_next(self, tokens: int) -> None:
        overlap = len(self._slots) > 1
        self._clock = ForwardClock(tokens, self._copier, copies_overlap=overlap)

    def take_times(self) -> LayerTimes | None:
        """Return the times of the last timed forward once, when its copies have ended."""
        clock, self._ended_clock = self._ended_clock, None
        return clock.times() if clock is not None else None

    @property
    def forbid_copy_engine_usage(self) -> bool:
        """Whether SGLang sends each expert's number of tokens to the device without a copy.

        A copy would wait for the experts' copies from host memory. In every release, SGLang's
        kernel ``copy_to_gpu_no_ce`` takes 64 or 72 numbers only and raises for others.
        """
        count = self._experts[0].layer.num_local_experts if self._experts else 0
        from_host = any(source.stored(Where.ON_HOST) for source in self._sources)
        return from_host and count in (64, 72)

    def _wrap(self, layer: Any, number: int | None) -> None:
        """Bind a layer with a number to a slot while it computes, and mark its computation."""
        compute: Callable[..., Any] = getattr(layer, self._computing)
        is_last = layer is self._experts[-1].layer
        copier = self._copier

        def compute_with_experts(*args: Any, **kwargs: Any) -> Any:
            clock = self._clock
            if clock is not None:
                clock.starts.append(copier.mark())
            slot = None if number is None else self._bind(number)
            try:
                result = compute(*args, **kwargs)
                if clock is not None:
                    clock.ends.append(copier.mark())
            finally:
                # A layer that raises may have enqueued kernels that read the slot.
                if number is not None and slot is not None:
                    self._refill(number, slot)
            if clock is not None and is_last:
                self._ended_clock, self._clock = clock, None
            return result

        setattr(layer, self._computing, compute_with_experts)

    def _bind(self, number: int) -> int:
        """Bind a layer to its experts in a slot, after a copy if needed. Return the slot."""
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
        assert self._rotation is not None
        self._copier.note_use(slot)
        if (slot_and_layer := self._rotation.advance(number)) is not None:
            self._fetch(*slot_and_layer)

    def _fetch(self, slot: int, number: int) -> None:
        clock = self._clock
        memory, source = self._slots[slot], self._sources[number]
        marks = self._copier.fetch(slot, memory, source, timed=clock is not None)
        if clock is not None:
            clock.copies += marks
