"""An equal-length group: sequences of equal length that pass through the model together, with their layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from transformers.cache_utils import CacheLayerMixin

from hetero_kv.engine import hf_cache_layers
from hetero_kv.engine.checkpoint import Checkpoint, LayerCheckpoint
from hetero_kv.engine.device_table import DeviceTable
from hetero_kv.engine.layer import FamilyLayer
from hetero_kv.engine.recurrent_state import StateBeside
from hetero_kv.engine.sequence import Layout, Sequence
from hetero_kv.engine.step import PromptPart, Step
from hetero_kv.engine.store import Store
from hetero_kv.errors import HeteroKVError

#: Arrays that layers pass to each other: name of the family's choice -> key -> array [rows, ...].
Shared = dict[Any, dict[Any, Any]]
NO_COPIES: Mapping[int, LayerCheckpoint] = MappingProxyType({})


@dataclass(frozen=True)
class GroupSnapshot:
    """The state that `EqualLengthGroup.rollback` restores; its size is independent of the sequences' length."""

    length: int
    prompt_length: int
    stored: dict[Layout, int]
    finalized: dict[Layout, int]
    shared: Shared
    layers: tuple[Any, ...]


class EqualLengthGroup:
    """Rows of a batch with the same length. A batch with several lengths has several groups.

    Attributes:
        layers: one cache layer per layer of the model: a family's layer, or transformers' own. Behind them are the
            states of layers that have both (`StateBeside`).
        family_layers: the families' layers among them.
        strided_layers: those of them whose forwards run in strides.
        number_of_layers: of the model.
        keeps_states_alone: whether no layer keeps keys and values.
        state_places: layer of the model -> the index in `layers` of its state, for those that have both.
        sequences: one per row; empty before the first tokens.
        store: owns their blocks.
        shared: arrays that layers pass to each other. An array is replaced and never changed.
        step: the step in progress.
        device_tables: by layout, the copies of the block tables on devices.
    """

    def __init__(self, layers: Rows[CacheLayerMixin], store: Store) -> None:
        self.layers = list(layers)
        self.store = store
        self.sequences: list[Sequence] = []
        self.shared: Shared = {}
        self.step: Step | None = None
        self.device_tables: dict[Layout, DeviceTable] = {}
        self._bind()

    def _bind(self) -> None:
        self.family_layers = family = [layer for layer in self.layers if isinstance(layer, FamilyLayer)]
        # Of most classes no layer does more for a token than `FamilyLayer`.
        self._expecting = [layer for layer in family if type(layer).expect is not FamilyLayer.expect]
        self._waiting = [layer for layer in family if type(layer).waits_for_others is not FamilyLayer.waits_for_others]
        self.strided_layers = [layer for layer in family if layer.is_strided]
        self.layouts: dict[Layout, Layout] = {}
        beside = {index: layer for index, layer in enumerate(self.layers) if isinstance(layer, StateBeside)}
        self.state_places = {layer.layer_idx: index for index, layer in beside.items()}
        self.number_of_layers = len(self.layers) - len(beside)
        self.keeps_states_alone = not any(isinstance(layer, CacheLayerMixin) for layer in self.layers)
        for index, layer in enumerate(self.layers):
            if isinstance(layer, FamilyLayer):
                layer.bind(self, index)
                if layer.layout is not None:
                    # Equal layouts become one object: a step looks layouts up by identity.
                    layer.layout = self.layouts.setdefault(layer.layout, layer.layout)

    def open(self, rows: int) -> None:
        """Create `rows` empty sequences; the store already has blocks for them."""
        self.sequences = [Sequence({layout: self.store.table(layout) for layout in self.layouts}) for _ in range(rows)]

    @property
    def length(self) -> int:
        """Tokens of each sequence."""
        return self.sequences[0].length if self.sequences else 0

    @property
    def prompt_length(self) -> int:
        """See Sequence."""
        return self.sequences[0].prompt_length if self.sequences else 0

    @property
    def finalized(self) -> Mapping[Layout, int]:
        """See Sequence; set by `set_finalized`."""
        return MappingProxyType(self.sequences[0].finalized if self.sequences else {})

    @property
    def statistics(self) -> dict[str, list[float | int | None]]:
        """The layers' statistics by name, one value per layer; None for a layer without that statistic."""
        layers = self.layers[: self.number_of_layers]
        per_layer = [layer.statistics if isinstance(layer, FamilyLayer) else {} for layer in layers]
        names = dict.fromkeys(name for each in per_layer for name in each)
        return {name: [each.get(name) for each in per_layer] for name in names}

    # -- a step

    def expect(self, tokens: int) -> set[Layout]:
        """Announce `tokens` new tokens of each row to the layers; the caller then reserves room for them.

        Returns the layouts whose blocks must all be finalized again.
        """
        return {layer.layout for layer in self._expecting if layer.expect(tokens) and layer.layout is not None}

    @property
    def takes_other_lengths(self) -> bool:
        """Whether each layer is a family's, and has no work when a token is through all of them.

        Such layers take a token of rows of several lengths in one forward.
        """
        return len(self.family_layers) == len(self.layers) and not any(each.waits_for_others for each in self._waiting)

    def unfinalize(self, layouts: Iterable[Layout]) -> None:
        """Make the next step finalize all blocks of these layouts again."""
        for layout in layouts:
            self.set_finalized(layout, 0)

    def set_finalized(self, layout: Layout, blocks: int) -> None:
        """Make the next step finalize the blocks of a layout from the one with this number on."""
        for sequence in self.sequences:
            sequence.finalized[layout] = blocks

    def begin(self, tokens: int, rows: slice, *, is_decode: bool, part: PromptPart, stores: bool) -> Step:
        """Reserve the blocks of a step, in every layer. The caller ends the step, or rolls back.

        Args:
            rows: the rows of the batch that are this group's.

        Raises MemoryError when too few blocks are free, and changes nothing; `capacity.require_room` checks that.
        """
        self.step = step = Step(self, rows, tokens, is_decode=is_decode, part=part, stores=stores)
        if stores:
            self._reserve(step)
        return step

    def begin_draft(self, rows: slice) -> list[Step]:
        """Reserve the blocks of consecutive tokens of the one sequence, one per row; each has a step of its own.

        Raises MemoryError as `begin`; the caller rolls back.
        """
        steps: list[Step] = []
        for row in range(rows.start, rows.stop):
            after = steps[-1] if steps else None
            self.step = step = Step(
                self, slice(row, row + 1), 1, is_decode=True, part=PromptPart(), stores=True, is_draft=True, after=after
            )
            self._reserve(step)
            for layout in self.layouts:
                # Built now, while the table has no blocks of later tokens.
                step.blocks(layout)
            steps.append(step)
        return steps

    def end(self, step: Step) -> None:
        """Make the tokens of a step part of the sequences."""
        if not step.stores:
            return
        for sequence in self.sequences:
            sequence.grow(step.length, is_prompt=not step.is_decode, is_last=step.part.is_last)

    def _reserve(self, step: Step) -> None:
        """Reserve blocks for the tokens of a step; copy the shared blocks that it derives private data from."""
        before = {layout: self.sequences[0].tables[layout].length for layout in self.layouts}
        try:
            for layout in self.layouts:
                stored = layout.stored(
                    before[layout], step.length, is_prompt=not step.is_decode, is_last=step.part.is_last
                )
                for sequence in self.sequences:
                    sequence.tables[layout].reserve(stored)
                if layout.finalizes_per_sequence and step.part.is_last:
                    first, end = self.finalized[layout], layout.finalized(step.length)
                    for sequence in self.sequences:
                        sequence.tables[layout].own(first, end)
        except BaseException:
            for layout in self.layouts:
                for sequence in self.sequences:
                    sequence.tables[layout].truncate(before[layout])
                self.store.allocators[layout].recount()
            raise

    # -- rollback and fork

    def crop_layers(self, length: int, copies: Mapping[int, LayerCheckpoint] = NO_COPIES) -> None:
        """Make layers drop the tokens from position `length` on. `cut` follows, or `rollback` after an error.

        copies: of the layers that cannot drop tokens (`Checkpoint.layers`).
        """
        for index, layer in enumerate(self.layers):
            if index in copies:
                if isinstance(layer, FamilyLayer):
                    layer.return_to(copies[index])
                else:
                    hf_cache_layers.rollback(layer, copies[index].state)
            elif isinstance(layer, FamilyLayer):
                layer.crop(length)
            else:
                layer.crop(length - self.length)

    def cut(self, length: int) -> None:
        """Free the blocks of the tokens from position `length` on. Repeatable after an interrupt."""
        if length < self.length:
            # It may refer to dropped tokens.
            self.shared = {}
        for sequence in self.sequences:
            sequence.crop(length)

    def stuck(self, length: int | None = None, copies: Mapping[int, LayerCheckpoint] = NO_COPIES) -> set[str]:
        """The kinds of layers that cannot drop their tokens from position `length` on (None: from any on)."""
        found = set()
        for index, layer in enumerate(self.layers):
            if not isinstance(layer, FamilyLayer):
                goes_back = hf_cache_layers.can_crop(layer, length)
            else:
                goes_back = layer.can_crop if length is None else layer.can_crop_to(length)
            if not goes_back and index not in copies:
                found.add(type(layer).__name__)
        return found

    @property
    def is_croppable(self) -> bool:
        """Whether every layer can drop its newest tokens, any number of them."""
        return not self.stuck()

    def can_crop_to(self, length: int) -> bool:
        """Whether every layer can drop its tokens from position `length` on."""
        return not self.stuck(length)

    def require_croppable(self, length: int | None = None, copies: Mapping[int, LayerCheckpoint] = NO_COPIES) -> None:
        """Raise HeteroKVError unless every layer can drop its tokens from position `length` on (None: from any on)."""
        stuck = self.stuck(length, copies)
        if stuck:
            raise HeteroKVError(
                f"this cache cannot roll back (assisted decoding?): its layers of kind {', '.join(sorted(stuck))} do "
                "not keep every token; fork() it before tokens that may be dropped"
            )

    def checkpoint(self) -> Checkpoint | None:
        """A copy of the states that layers do not keep; None if all keep them, or a layer cannot return to a copy."""
        copies = {}
        for index, layer in enumerate(self.layers):
            if isinstance(layer, FamilyLayer):
                copied = None if layer.can_crop else (layer.checkpoint(),)
            else:
                copied = None if hf_cache_layers.can_crop(layer) else (hf_cache_layers.checkpoint(layer),)
            if copied is not None:
                if copied[0] is None:
                    return None
                copies[index] = copied[0]
        return Checkpoint(self.length, copies) if copies else None

    def snapshot(self) -> GroupSnapshot:
        """The present state, for `rollback`."""
        stored = {layout: table.length for layout, table in self.sequences[0].tables.items()} if self.sequences else {}
        if len(self.family_layers) == len(self.layers):
            layers = [layer.snapshot() for layer in self.family_layers]
        else:
            layers = [
                layer.snapshot() if isinstance(layer, FamilyLayer) else hf_cache_layers.snapshot(layer)
                for layer in self.layers
            ]
        return GroupSnapshot(
            self.length, self.prompt_length, stored, dict(self.finalized), _copy(self.shared), tuple(layers)
        )

    def rollback(self, snapshot: GroupSnapshot) -> None:
        """Return to `snapshot`: drop newer tokens and the queries' observations."""
        for sequence in self.sequences:
            for layout, table in sequence.tables.items():
                table.truncate(snapshot.stored.get(layout, 0))
            sequence.length, sequence.prompt_length = snapshot.length, snapshot.prompt_length
        for layout in self.layouts if self.sequences else ():
            least = min(sequence.finalized[layout] for sequence in self.sequences)
            self.set_finalized(layout, min(least, snapshot.finalized.get(layout, 0)))
        self.shared = _copy(snapshot.shared)
        self.step = None
        for layer, state in zip(self.layers, snapshot.layers, strict=True):
            if isinstance(layer, FamilyLayer):
                layer.leave_prefill()
                layer.rollback(state)
            else:
                hf_cache_layers.rollback(layer, state)

    def fork(self, memo: dict[int, Any]) -> EqualLengthGroup:
        """A second group with the same tokens, in the same blocks; `memo` as for copy.deepcopy, one per cache."""
        return self._clone([sequence.fork() for sequence in self.sequences], memo)

    def split_off(self, rows: range) -> EqualLengthGroup:
        """A group of some of the rows that takes over their sequences; `self` then serves rollbacks only."""
        clone = self._clone([self.sequences[row] for row in rows], {})
        if rows != range(len(self.sequences)):
            clone._select(list(rows))
        return clone

    def selected(self, rows: Rows[int]) -> EqualLengthGroup:
        """A group whose row i is the present row `rows[i]`, sharing blocks; `self` must not be used afterwards."""
        clone = self._clone([self.sequences[row].fork() for row in rows], {})
        clone._select(rows)
        return clone

    def _clone(self, sequences: list[Sequence], memo: dict[int, Any]) -> EqualLengthGroup:
        layers = [
            layer.fork(memo) if isinstance(layer, FamilyLayer) else hf_cache_layers.fork(layer, memo)
            for layer in self.layers
        ]
        clone = EqualLengthGroup(layers, self.store)
        clone.sequences = sequences
        clone.shared = _copy(self.shared)
        return clone

    def _select(self, rows: Rows[int]) -> None:
        """Select these rows of everything outside the sequences."""
        for layer in self.layers:
            if isinstance(layer, FamilyLayer):
                layer.select(rows)
            else:
                hf_cache_layers.select(layer, rows)
        self.shared = {
            name: {key: value[list(rows)] for key, value in values.items()} for name, values in self.shared.items()
        }


def _copy(shared: Shared) -> Shared:
    return {name: dict(values) for name, values in shared.items()}
