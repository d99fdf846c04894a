"""A cohort: sequences of equal length that go on together, and what every layer of the model holds of them."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Any

from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from hetero_kv.engine import untouched
from hetero_kv.engine.device_table import DeviceTable
from hetero_kv.engine.layer import FamilyLayer
from hetero_kv.engine.sequence import Layout, Sequence
from hetero_kv.engine.step import PromptPart, Step
from hetero_kv.engine.store import Store
from hetero_kv.errors import HeteroKVError

#: What layers hand to each other: by a name that a family chooses, arrays by keys of its own, [rows, ...] each.
Shared = dict[Any, dict[Any, Any]]


@dataclass(frozen=True)
class CohortSnapshot:
    """What `Cohort.rollback` comes back to; its size does not grow with the sequences."""

    length: int
    prompt_length: int
    stored: dict[Layout, int]
    closed: dict[Layout, int]
    shared: Shared
    layers: tuple[Any, ...]


class Cohort:
    """Rows of a batch that have the same length. A batch whose rows have several lengths is several cohorts.

    Attributes:
        layers: what each layer of the model holds: a family's layer, or transformers' own.
        sequences: a row each; none before the first tokens.
        store: where their blocks are.
        length: tokens of each sequence.
        prompt_length: what `length` was when the last prompt ended.
        closed: by layout, blocks from the beginning on whose contents are final, and what is derived from them made.
        shared: what layers hand to each other. An array is replaced and never changed.
        step: the one that is under way.
        device_tables: by layout, what devices have of the block tables.
    """

    def __init__(self, layers: Rows[CacheLayerMixin], store: Store) -> None:
        self.layers = list(layers)
        self.store = store
        self.sequences: list[Sequence] = []
        self.length = self.prompt_length = 0
        self.closed: dict[Layout, int] = {}
        self.shared: Shared = {}
        self.step: Step | None = None
        self.device_tables: dict[Layout, DeviceTable] = {}
        self._bind()

    def _bind(self) -> None:
        self.family_layers = [layer for layer in self.layers if isinstance(layer, FamilyLayer)]
        self.layouts: dict[Layout, Layout] = {}
        for index, layer in enumerate(self.layers):
            if isinstance(layer, FamilyLayer):
                layer.bind(self, index)
                if layer.layout is not None:
                    # Equal layouts are one object, whose identity a step goes by.
                    layer.layout = self.layouts.setdefault(layer.layout, layer.layout)

    def open(self, rows: int) -> None:
        """Have `rows` empty sequences; the store has been provided for them."""
        self.sequences = [Sequence({layout: self.store.table(layout) for layout in self.layouts}) for _ in range(rows)]
        self.closed = dict.fromkeys(self.layouts, 0)

    @property
    def statistics(self) -> dict[str, list[float | int | None]]:
        """What the layers have counted, by name, a value for each layer; None where a layer does not know the name."""
        said = [layer.statistics if isinstance(layer, FamilyLayer) else {} for layer in self.layers]
        names = dict.fromkeys(name for each in said for name in each)
        return {name: [each.get(name) for each in said] for name in names}

    # -- a step

    def expect(self, tokens: int) -> set[Layout]:
        """Tell the layers that `tokens` new ones of each row are about to come; room for them is asked for next.

        Returns the layouts whose blocks are all to be closed anew.
        """
        return {layer.layout for layer in self.family_layers if layer.expect(tokens) and layer.layout is not None}

    def close_anew(self, layouts: Iterable[Layout]) -> None:
        """Have what is derived from the blocks of these layouts made anew, of all of them, in the next step."""
        self.closed |= dict.fromkeys(layouts, 0)

    def begin(self, tokens: int, rows: slice, *, is_decode: bool, part: PromptPart, keeps: bool) -> Step:
        """Reserve the blocks of a step, in every layer: the caller ends it, or rolls back.

        Args:
            rows: where this cohort's stand in the batch.

        Raises MemoryError when too few blocks are free, which `room.require_room` tells before; nothing has changed.
        """
        self.step = step = Step(self, rows, tokens, is_decode=is_decode, part=part, keeps=keeps)
        if keeps:
            self._reserve(step)
        return step

    def end(self, step: Step) -> None:
        """Let the tokens of a step be the sequences'."""
        if not step.keeps:
            return
        for sequence in self.sequences:
            sequence.length = step.length
        self.length = step.length
        if step.part.is_last:
            for layout in self.layouts:
                self.closed[layout] = max(self.closed[layout], layout.closed(step.length))
            if not step.is_decode:
                self.prompt_length = step.length

    def _reserve(self, step: Step) -> None:
        """Have blocks for the tokens of a step, and for itself those that it derives something of its own from."""
        before = {layout: self.sequences[0].tables[layout].length for layout in self.layouts}
        try:
            for layout in self.layouts:
                stored = layout.stored(
                    before[layout], step.length, is_prompt=not step.is_decode, is_last=step.part.is_last
                )
                for sequence in self.sequences:
                    sequence.tables[layout].reserve(stored)
                if layout.closes_alone and step.part.is_last:
                    first, end = self.closed[layout], layout.closed(step.length)
                    for sequence in self.sequences:
                        sequence.tables[layout].own(first, end)
        except BaseException:
            for layout in self.layouts:
                for sequence in self.sequences:
                    sequence.tables[layout].truncate(before[layout])
                self.store.allocators[layout].recount()
            raise

    # -- going back, and going several ways

    def crop_layers(self, length: int) -> None:
        """Let layers forget the tokens from position `length` on; `cut` follows, or `rollback` if this fails."""
        for layer in self.layers:
            if isinstance(layer, FamilyLayer):
                layer.crop(length)
            else:
                layer.crop(length - self.length)

    def cut(self, length: int) -> None:
        """Let go of the blocks of the tokens from position `length` on; may be called again if it is interrupted."""
        for sequence in self.sequences:
            sequence.crop(length)
        for layout in self.layouts:
            self.closed[layout] = min(self.closed[layout], length // layout.block_size)
        if length < self.length:
            # It may speak of tokens that are gone.
            self.shared = {}
        self.length, self.prompt_length = length, min(self.prompt_length, length)

    def require_croppable(self) -> None:
        """Raise HeteroKVError where a layer cannot forget its newest tokens."""
        stuck = {
            type(layer).__name__
            for layer in self.layers
            if not (layer.can_crop if isinstance(layer, FamilyLayer) else isinstance(layer, DynamicLayer))
        }
        if stuck:
            raise HeteroKVError(
                f"this cache cannot go back (assisted decoding?): it has layers of kind {', '.join(sorted(stuck))}, "
                "which do not keep every token; fork() it before what may have to be forgotten"
            )

    def snapshot(self) -> CohortSnapshot:
        """What `rollback` needs to come back to the present state."""
        stored = {layout: table.length for layout, table in self.sequences[0].tables.items()} if self.sequences else {}
        layers = [
            layer.snapshot() if isinstance(layer, FamilyLayer) else untouched.snapshot(layer) for layer in self.layers
        ]
        return CohortSnapshot(
            self.length, self.prompt_length, stored, dict(self.closed), _copy(self.shared), tuple(layers)
        )

    def rollback(self, snapshot: CohortSnapshot) -> None:
        """Forget what was stored since `snapshot`, and what its queries looked at."""
        for sequence in self.sequences:
            for layout, table in sequence.tables.items():
                table.truncate(snapshot.stored.get(layout, 0))
            sequence.length = snapshot.length
        self.length, self.prompt_length = snapshot.length, snapshot.prompt_length
        self.closed = {layout: min(closed, snapshot.closed.get(layout, 0)) for layout, closed in self.closed.items()}
        self.shared = _copy(snapshot.shared)
        self.step = None
        for layer, state in zip(self.layers, snapshot.layers, strict=True):
            if isinstance(layer, FamilyLayer):
                layer.leave_prefill()
                layer.rollback(state)
            else:
                untouched.rollback(layer, state)

    def fork(self, memo: dict[int, Any]) -> Cohort:
        """A second cohort with the same tokens, in the same blocks; `memo` as for copy.deepcopy, one for a cache."""
        return self._twin([sequence.fork() for sequence in self.sequences], memo)

    def taken(self, rows: range) -> Cohort:
        """A cohort of some of the rows, with the sequences themselves: this one is only to be rolled back to."""
        twin = self._twin([self.sequences[row] for row in rows], {})
        if rows != range(len(self.sequences)):
            twin._select(list(rows))
        return twin

    def selected(self, rows: Rows[int]) -> Cohort:
        """A cohort whose row i is what row `rows[i]` was, sharing blocks; this one is not to be used any more."""
        twin = self._twin([self.sequences[row].fork() for row in rows], {})
        twin._select(rows)
        return twin

    def _twin(self, sequences: list[Sequence], memo: dict[int, Any]) -> Cohort:
        layers = [
            layer.fork(memo) if isinstance(layer, FamilyLayer) else untouched.fork(layer, memo) for layer in self.layers
        ]
        twin = Cohort(layers, self.store)
        twin.sequences, twin.closed = sequences, dict(self.closed)
        twin.length, twin.prompt_length = self.length, self.prompt_length
        twin.shared = _copy(self.shared)
        return twin

    def _select(self, rows: Rows[int]) -> None:
        """Let what is held beside the sequences be that of these rows."""
        for layer in self.layers:
            if isinstance(layer, FamilyLayer):
                layer.select(rows)
            else:
                untouched.select(layer, rows)
        self.shared = {
            name: {key: value[list(rows)] for key, value in values.items()} for name, values in self.shared.items()
        }


def _copy(shared: Shared) -> Shared:
    return {name: dict(values) for name, values in shared.items()}
