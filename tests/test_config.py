"""Settings: checks, messages and descriptions."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_kv.errors import ConfigError, HeteroKVError
from hetero_kv.families.retrieval import representatives
from hetero_kv.families.retrieval.settings import RetrievalSettings
from hetero_kv.families.window.settings import SlidingWindowSettings
from hetero_kv.rules.owners import every_settings_class
from hetero_kv.settings.description import describe
from hetero_kv.settings.engine_settings import EngineSettings
from hetero_kv.settings.mapping import settings_from_mapping
from hetero_kv.settings.setting import SettingError, Settings, setting
from hetero_kv.store import storage


@dataclass(frozen=True)
class PaperSettings(Settings):
    rank: int = setting(160, "rank of the keys", minimum=32, maximum=1024, multiple_of=32)
    ratio: float = setting(0.5, "share that is kept", minimum=0.0, maximum=1.0, aliases=("keep",))
    exponent: float = setting(1.0, "any number")
    pooled: bool = setting(False, "whether votes are pooled")
    note: str = setting("", "a text")


def message(call: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        call()
    return str(raised.value)


def retrieval(**mapping: Any) -> RetrievalSettings:
    return settings_from_mapping(RetrievalSettings, mapping, where="here")


def test_defaults_are_those_of_the_specification() -> None:
    assert EngineSettings() == EngineSettings(chunk_size=4096, max_seq_len="auto", threads_num="auto")
    assert RetrievalSettings() == RetrievalSettings(
        block_size=128,
        sink_tokens=128,
        local_windows_len=4096,
        top_k_blocks=96,
        preselect_block=False,
        preselect_block_count=96,
        kernel_size=5,
        observation="question",
        representative_type="DYNAMIC",
        representative_num=1,
        head_select_mode="SHARED",
        group_reduce="mean",
        layer_step=1,
        token_step=1,
        dense_layer_num=0,
        kv_type="FP16",
    )


def test_an_empty_mapping_and_an_empty_yaml_block_give_the_defaults() -> None:
    assert retrieval() == RetrievalSettings()
    assert settings_from_mapping(RetrievalSettings, None, where="here") == RetrievalSettings()


def test_values_not_in_the_mapping_come_from_the_defaults() -> None:
    base = RetrievalSettings(block_size=16, sink_tokens=0)
    assert settings_from_mapping(
        RetrievalSettings, {"sink_tokens": 4}, where="here", defaults=base
    ) == RetrievalSettings(block_size=16, sink_tokens=4)


def test_ktransformers_names_are_aliases() -> None:
    settings = retrieval(second_select_num=7, anchor_type="BLOCK_MEAN", anchor_num=1)
    assert (settings.top_k_blocks, settings.representative_type, settings.representative_num) == (7, "MEAN", 1)
    assert settings_from_mapping(EngineSettings, {"cpu_infer": 3}, where="here").threads_num == 3


def test_dashes_and_underscores_in_keys_are_the_same() -> None:
    assert settings_from_mapping(EngineSettings, {"chunk-size": 512}, where="here").chunk_size == 512


def test_texts_of_a_choice_may_be_written_in_any_case() -> None:
    settings = retrieval(kv_type="fp32", head_select_mode="separate", anchor_type="block_mean", top_k_blocks="ALL")
    assert (settings.kv_type, settings.head_select_mode) == ("FP32", "SEPARATE")
    assert (settings.representative_type, settings.top_k_blocks) == ("MEAN", "all")


def test_python_users_get_the_same_checks_as_yaml() -> None:
    assert RetrievalSettings(kv_type="fp32").kv_type == "FP32"
    with pytest.raises(SettingError, match="block_size is 0; it must be a whole number from 1 to 65536"):
        RetrievalSettings(block_size=0)


def test_an_unknown_key_is_named_with_the_nearest_right_spelling() -> None:
    assert message(lambda: retrieval(blok_size=1)) == "here: unknown setting 'blok_size'; did you mean block_size?"
    assert message(lambda: retrieval(second_select_nun=1)).endswith("did you mean second_select_num?")


def test_an_unknown_key_near_nothing_is_answered_with_all_that_are_known() -> None:
    text = message(lambda: retrieval(generate_device="cpu"))
    assert "unknown setting 'generate_device'" in text
    assert all(field.name in text for field in fields(RetrievalSettings))


def test_a_class_without_settings_says_so() -> None:
    text = message(lambda: settings_from_mapping(SlidingWindowSettings, {"window": 4}, where="here"))
    assert text == "here: unknown setting 'window'; there are no settings here"


def test_a_setting_under_two_names_is_an_error() -> None:
    assert message(lambda: retrieval(top_k_blocks=1, second_select_num=1)) == (
        "here: 'top_k_blocks' and 'second_select_num' are the same setting, top_k_blocks; keep one of them"
    )


@pytest.mark.parametrize("mapping", [[1, 2], "block_size", 4])
def test_settings_that_are_no_mapping_are_an_error(mapping: Any) -> None:
    text = message(lambda: settings_from_mapping(RetrievalSettings, mapping, where="here"))
    assert text == f"here: {mapping!r} is not a mapping; write `key: value` pairs"


@pytest.mark.parametrize(
    ("mapping", "expected"),
    [
        (
            {"block_size": "4096"},
            "block_size is '4096'; it must be a whole number from 1 to 65536 (this is text: write 4096",
        ),
        ({"block_size": True}, "block_size is True; it must be a whole number"),
        ({"block_size": 12.5}, "block_size is 12.5; it must be a whole number"),
        ({"block_size": None}, "block_size is None; it must be a whole number"),
        ({"block_size": 0}, "block_size is 0; it must be a whole number from 1 to 65536"),
        ({"sink_tokens": -1}, "sink_tokens is -1; it must be a whole number of at least 0"),
        ({"local_windows_len": 0}, "local_windows_len is 0; it must be a whole number of at least 1"),
        ({"second_select_num": -1}, "second_select_num is -1; it must be a whole number of at least 0, or all"),
        (
            {"top_k_blocks": "al"},
            "or all, or a list of them, one per layer, or pyramid(low, high); did you mean all?",
        ),
        ({"kv_type": "FP61"}, "kv_type is 'FP61'; it must be FP16 or FP32 or BF16 or Q8_0 or Q4_0; did you mean FP16?"),
        ({"kv_type": 16}, "kv_type is 16; it must be FP16"),
        ({"head_select_mode": "SHRED"}, "it must be SHARED or SEPARATE; did you mean SHARED?"),
        (
            {"anchor_type": "MEAM"},
            "anchor_type is 'MEAM'; it must be MAX or MEAN or MEANSTD or QUEST or DYNAMIC or FIXED; did you mean MEAN?",
        ),
        (
            {"representative_type": "MEAN", "representative_num": 2},
            "representative_num is 2; representative_type MEAN takes 1",
        ),
        ({"representative_type": "QUEST"}, "representative_num is 1; representative_type QUEST takes 2"),
        (
            {"representative_type": "DYNAMIC", "residual_attention": "estimate"},
            "residual_attention is 'estimate'; representative_type DYNAMIC has no mean to estimate a block by; "
            "use MEAN or MEANSTD, or set residual_attention to drop",
        ),
        (
            {"representative_type": "QUEST", "representative_num": 2, "rerank": 2},
            "use MEAN or MEANSTD, or set rerank to 1",
        ),
        ({"representative_type": "MEAN", "attend_to": "tokens"}, "set rerank to all or to 2 or more"),
        ({"target_mass": 0.9}, "target_mass is 0.9; representative_type DYNAMIC has no mean"),
        ({"target_mass": 1.5}, "target_mass is 1.5; it must be a number from 0 to 1, or none"),
        (
            {"representative_type": "MEAN", "target_mass": 0},
            "target_mass is 0.0; a share of 0 has no effect; set a share above 0, such as 0.9, or none",
        ),
        (
            {"representative_type": "MEAN", "target_mass": 0.9, "min_blocks": 5, "top_k_blocks": 4},
            "min_blocks is 5; with target_mass top_k_blocks, which is 4, limits the attended blocks; "
            "set 4 or fewer, or a larger top_k_blocks",
        ),
        (
            {"representative_type": "FIXED", "group_blocks": 4},
            "group_blocks is 4; representatives of representative_type FIXED cannot be combined to those of a group of "
            "blocks; use one of MAX, MEAN, MEANSTD, QUEST, or set group_blocks to 1",
        ),
        ({"representative_storage": "Q4_0"}, "it must be auto, or FP16 or FP32 or BF16 or Q8_0"),
        ({"group_reduce": "softmx"}, "did you mean softmax?"),
        ({"representative_num": 129}, "it exceeds the 128 keys of a block (block_size)"),
        ({"kernel_size": 4}, "kernel_size is 4; it must be odd"),
        ({"block_size": 8, "kv_type": "Q8_0"}, "block_size is 8; kv_type Q8_0 needs a multiple of 16, such as 16"),
        ({"block_size": 100, "kv_type": "q4_0"}, "block_size is 100; kv_type Q4_0 needs a multiple of 16, such as 112"),
        ({"block_size": 24, "key_type": "q4_0"}, "block_size is 24; key_type Q4_0 needs a multiple of 16, such as 32"),
        ({"block_size": 8, "kv_type": "q8_0", "key_type": "FP16"}, "block_size is 8; kv_type Q8_0 needs a multiple"),
        ({"block_size": 8, "value_type": "q8_0"}, "block_size is 8; value_type Q8_0 needs a multiple of 16"),
        ({"value_type": "FP61"}, "value_type is 'FP61'; it must be kv_type, or FP16 or FP32"),
        ({"preselect_block": "yes"}, "preselect_block is 'yes'; it must be true or false"),
        ({"preselect_block_count": "pyramid(9, 1)"}, "or pyramid(low, high)"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_right(mapping: dict[str, Any], expected: str) -> None:
    text = message(lambda: retrieval(**mapping))
    assert text.startswith("here: ")
    assert expected in text


@pytest.mark.parametrize(
    ("mapping", "expected"),
    [
        ({"rank": 48}, "rank is 48; it must be a whole number that is a multiple of 32 from 32 to 1024"),
        ({"rank": 2048}, "rank is 2048; it must be a whole number"),
        ({"keep": 1.5}, "keep is 1.5; it must be a number from 0.0 to 1.0"),
        ({"ratio": float("nan")}, "ratio is nan; it must be a number from 0.0 to 1.0"),
        ({"exponent": float("inf")}, "exponent is inf; it must be a number"),
        ({"ratio": "0.25"}, "(this is text: write 0.25 without quotes)"),
        ({"pooled": 1}, "pooled is 1; it must be true or false"),
        ({"note": 3}, "note is 3; it must be text"),
    ],
)
def test_every_kind_of_constraint_is_checked(mapping: dict[str, Any], expected: str) -> None:
    assert expected in message(lambda: settings_from_mapping(PaperSettings, mapping, where="here"))


@given(rank=st.integers(1, 32).map(lambda n: 32 * n), ratio=st.floats(0, 1), pooled=st.booleans(), note=st.text())
def test_values_in_range_are_kept_as_they_are(rank: int, ratio: float, pooled: bool, note: str) -> None:
    mapping = {"rank": rank, "ratio": ratio, "pooled": pooled, "note": note}
    settings = settings_from_mapping(PaperSettings, mapping, where="here")
    assert {name: getattr(settings, name) for name in mapping} == mapping


def test_an_integer_is_accepted_as_a_float() -> None:
    settings = settings_from_mapping(PaperSettings, {"ratio": 1}, where="here")
    assert isinstance(settings.ratio, float)


def test_settings_that_exclude_each_other_are_located_by_settings_from_mapping() -> None:
    @dataclass(frozen=True)
    class Pair(Settings):
        low: int = setting(1, "the lower")
        high: int = setting(2, "the higher")

        def validate(self) -> None:
            if self.low > self.high:
                raise SettingError("low", self.low, f"it must be at most high, {self.high}")

    assert message(lambda: settings_from_mapping(Pair, {"low": 5}, where="a.yaml: rule 1")) == (
        "a.yaml: rule 1: low is 5; it must be at most high, 2"
    )
    assert settings_from_mapping(Pair, {"low": 5, "high": 6}, where="here") == Pair(5, 6)


def test_a_new_registration_is_a_choice_without_any_change_to_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage.registry, "_REGISTRY", {**storage.registry._REGISTRY, "NEW8": storage.FP16})
    assert retrieval(kv_type="new8").kv_type == "NEW8"


def test_every_registered_storage_and_representative_type_is_accepted() -> None:
    for name in storage.names():
        assert retrieval(kv_type=name.lower()).kv_type == name
    for name in representatives.names():
        num = representatives.get(name).counts[0]
        assert retrieval(representative_type=name.lower(), representative_num=num).representative_type == name


def test_no_alias_of_the_flat_block_is_the_name_of_another_setting_and_no_operator_has_one_of_the_engines() -> None:
    meant: dict[str, set[str]] = {}
    for cls in every_settings_class():
        for row in describe(cls):
            for spelling in (row.name, *row.aliases):
                meant.setdefault(spelling, set()).add(row.name)
    assert all(len(names) == 1 for names in meant.values())
    engine, *operators = every_settings_class()
    assert not {row.name for row in describe(engine)} & {row.name for cls in operators for row in describe(cls)}


@pytest.mark.parametrize("cls", every_settings_class())
def test_every_setting_describes_itself(cls: type[Settings]) -> None:
    rows = list(describe(cls))
    assert [row.name for row in rows] == [field.name for field in fields(cls)]  # type: ignore[arg-type]
    for row in rows:
        assert row.doc
        assert "\n" not in row.doc
        assert row.type
        assert row.default == getattr(cls(), row.name)


def test_a_description_holds_type_range_unit_and_aliases() -> None:
    row = next(row for row in describe(RetrievalSettings) if row.name == "top_k_blocks")
    assert row[:5] == (
        "top_k_blocks",
        "a whole number of at least 0, or all, or a list of them, one per layer, or pyramid(low, high)",
        96,
        "blocks",
        ("second_select_num",),
    )


def test_choices_of_a_literal_type_are_described() -> None:
    @dataclass(frozen=True)
    class Modes(Settings):
        mode: Literal["A", "B"] = setting("A", "a mode")

    assert re.fullmatch("A or B", next(describe(Modes)).type)


def test_errors_are_the_packages_own() -> None:
    assert issubclass(SettingError, ConfigError)
    assert issubclass(ConfigError, HeteroKVError)
    assert issubclass(HeteroKVError, ValueError)
