"""The setting for the storage type of weights."""

from __future__ import annotations

from dataclasses import dataclass

from hetero_kv.settings.setting import Settings, setting

AUTO, AS_STORED, FP32, BF16, Q8_0, Q4_0 = CHOICES = ("auto", "as_stored", "fp32", "bf16", "q8_0", "q4_0")
#: Setting -> GGML's name of the type that weights are quantized to.
QUANTIZED = {Q8_0: "Q8_0", Q4_0: "Q4_0"}


@dataclass(frozen=True)
class WeightSettings(Settings):
    """The settings of QuantizedLinear, QuantizedEmbedding and QuantizedExperts."""

    weights: str = setting(
        AUTO,
        "how weights are kept in memory, a GPU's too: auto and as_stored keep a GGUF file's quantized blocks and its "
        "numbers of 16 bits as they are, and leave other weights in the model's dtype; fp32 and bf16 unpack them; q8_0 "
        "and q4_0 quantize what has another type",
        choices=CHOICES,
    )
