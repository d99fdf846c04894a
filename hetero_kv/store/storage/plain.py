"""Storage types that store each number separately."""

from hetero_kv.store.storage.registry import StorageType, register

FP16 = register(
    StorageType("FP16", "float16", "float16", 2, "half precision: 2 bytes per element", largest=65504.0),
)
FP32 = register(
    StorageType("FP32", "float32", "float32", 4, "single precision: 4 bytes per element, exact for fp32 models"),
)
BF16 = register(
    StorageType(
        "BF16", "bfloat16", "bfloat16", 2, "bfloat16: 2 bytes per element, exact for bf16 models, coarse for others"
    ),
)
