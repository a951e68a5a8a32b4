"""Which layer's experts are in which slot, and whose come next; pure.

Layers are asked for in turn, forward after forward: behind the last one comes the first again, so
that the next forward's first layers are there when it begins.
"""

from __future__ import annotations


class Rotation:
    """Slots for the experts of some layers, numbered in the order of a forward.

    At first the first layers are in the slots. Layers may be asked for in any order; the one that
    is expected costs nothing.
    """

    def __init__(self, layers: int, slots: int) -> None:
        if layers < 1 or slots < 1:
            raise ValueError(f"{layers} layers in {slots} slots: at least one of each is needed")
        self._layers = layers
        self.slots: list[int] = list(range(min(layers, slots)))
        # Layers that were asked for and were not there.
        self.misses = 0

    def slot(self, layer: int) -> int | None:
        """Where a layer is; ``None`` if it is nowhere."""
        return self.slots.index(layer) if layer in self.slots else None

    def miss(self, layer: int) -> int:
        """Give a layer that is nowhere the slot of the one that is needed last from here."""
        self.misses += 1
        slot = max(range(len(self.slots)), key=lambda at: self._ahead(layer, self.slots[at]))
        self.slots[slot] = layer
        return slot

    def done(self, layer: int) -> tuple[int, int] | None:
        """A layer has been computed: the slot it leaves, and the layer that comes into it.

        ``None`` where every layer has a slot of its own.
        """
        if len(self.slots) == self._layers:
            return None
        slot = self.slots.index(layer)
        coming = (layer + 1) % self._layers
        while coming in self.slots:
            coming = (coming + 1) % self._layers
        self.slots[slot] = coming
        return slot, coming

    def _ahead(self, layer: int, other: int) -> int:
        """How many layers after ``layer`` another one is needed."""
        return (other - layer) % self._layers
