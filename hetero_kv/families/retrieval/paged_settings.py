"""Storage settings that are common to the families that keep all tokens in blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hetero_kv.settings.setting import SettingError

if TYPE_CHECKING:
    from hetero_kv.store.storage import StorageType


class PagedSettings:
    """Mixin for settings with these fields: how a sequence is divided and stored."""

    block_size: int
    sink_tokens: int
    local_windows_len: int
    kv_type: str
    key_type: str
    value_type: str
    key_offset: str

    @property
    def offset_keys(self) -> bool:
        """Whether keys are stored as differences to the mean key of their block."""
        return self.key_storage.is_coarse if self.key_offset == "auto" else self.key_offset == "block_mean"

    @property
    def storage_settings(self) -> tuple[str, str]:
        """The names of the settings that apply to keys and to values."""
        return (
            "kv_type" if self.key_type == "kv_type" else "key_type",
            "kv_type" if self.value_type == "kv_type" else "value_type",
        )

    @property
    def key_storage(self) -> StorageType:
        """The keys' storage type."""
        from hetero_kv.store import storage

        return storage.get(getattr(self, self.storage_settings[0]))

    @property
    def value_storage(self) -> StorageType:
        """The values' storage type."""
        from hetero_kv.store import storage

        return storage.get(getattr(self, self.storage_settings[1]))

    @property
    def stored_representatives(self) -> int:
        """Representatives stored per block and kv head."""
        return 0

    def representative_kind(self, *dims: int) -> StorageType:
        """The storage type of representatives and mean values of these dimensions."""
        return self.key_storage.for_representatives

    def require_whole_groups(self) -> None:
        """Raise SettingError for a block size that a storage type cannot encode."""
        for name, kind in zip(self.storage_settings, (self.key_storage, self.value_storage), strict=True):
            multiple = kind.block_multiple
            if self.block_size % multiple:
                raise SettingError(
                    "block_size",
                    self.block_size,
                    f"{name} {kind.name} needs a multiple of {multiple}, such as "
                    f"{-(-self.block_size // multiple) * multiple}; or set {name} to FP16",
                )
