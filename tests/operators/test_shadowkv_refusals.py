"""Models that ShadowKV cannot serve are refused by name."""

import pytest
from tiny_models import tiny_model

from hetero_kv import inject
from hetero_kv.operators.bridge import UnsupportedModelError


def test_rotations_that_change_as_a_sequence_grows_are_refused():
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    model = tiny_model("llama", rope_parameters=rope, max_position_embeddings=64)
    with pytest.raises(UnsupportedModelError, match=r"self_attn: .* rope_type 'dynamic'.* take RetrievalAttention"):
        inject(model, "shadowkv", command_line={"max_seq_len": 128, "rank": 8})
