"""The meaning of a change of a file's metadata, and whether a loaded model follows it.

The meaning is llama.cpp's (`src/llama-model.cpp` and `src/models/` of https://github.com/ggml-org/llama.cpp).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from hetero_kv.models.gguf.architectures import ARCHITECTURES
from hetero_kv.models.gguf.ignored_keys import WITHOUT_EFFECT
from tests.support.gguf_models.conversion import layout_of, metadata

IDS = torch.randint(5, 250, (1, 40), generator=torch.Generator().manual_seed(0))
#: Of the logits' standard deviation: rounding, and what no other model's logits are within.
ROUNDING = 1e-3
#: Behind the architecture's name: what is not of the tokens' values.
OF_NO_VALUE = {
    "context_length": "the longest text, which no token's logits depend on",
    "rope.scaling.finetuned": "says whether it was trained so",
}
#: The architecture in which this key is the switch for a rotation.
ROTATES_IF_FINETUNED = ("granitehybrid", "rope.scaling.finetuned")
#: Values that say that something is not there.
NEUTRAL: tuple[Any, ...] = (0, 0.0, False, "none", "", [])
#: Keys on which the order of rows in a file depends, so that other values are other weights.
OF_THE_LAYOUT = ("attention.head_count", "attention.head_count_kv")
#: Where 0 is no groups, and no cap and no clamp.
GROUPS = ("expert_group_count", "expert_group_used_count")
NONE_WHERE_ZERO = ("attn_logit_softcapping", "final_logit_softcapping", "attention.clamp_kqv")
_GRANITE = {
    "attention.scale": ("attention_multiplier", 0.25),
    "embedding_scale": ("embedding_multiplier", 1.0),
    "residual_scale": ("residual_multiplier", 1.0),
    "logit_scale": ("logits_scaling", 1.0),
}
_ROUTED = {"expert_weights_scale": ("routed_scaling_factor", 1.0), "expert_weights_norm": ("norm_topk_prob", False)}
# No groups are the same as all four.
_GROUPED = {**_ROUTED, "expert_group_count": ("topk_group", 4)}
_FULL = ("layer_types", "full_attention")
_UNSCALED = {"expert_weights_scale": ("routed_scaling_factor", 1.0)}
#: What stands for a key that is not there: architecture -> key -> (setting, its value; of each layer the same).
DEFAULTS: dict[str, dict[str, tuple[str, Any]]] = {
    "gemma2": {
        "attn_logit_softcapping": ("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": ("final_logit_softcapping", 30.0),
        "attention.sliding_window": ("sliding_window", 4096),
    },
    "gemma4": {"final_logit_softcapping": ("final_logit_softcapping", None)},
    "gemma3n": {
        "final_logit_softcapping": ("final_logit_softcapping", 30.0),
        "attention.shared_kv_layers": ("num_kv_shared_layers", 0),
    },
    "gemma3": {
        "final_logit_softcapping": ("final_logit_softcapping", None),
        "attention.sliding_window": _FULL,
    },
    "command-r": {"logit_scale": ("logit_scale", 1.0)},
    "granite": _GRANITE,
    "granitemoe": _GRANITE,
    "granite_swa": {**_GRANITE, "attention.rope_pattern": ("layer_rope_theta", 1e4)},
    "granitehybrid": _GRANITE,
    "olmo": {"attention.clamp_kqv": ("clip_qkv", None)},
    "laguna": {
        "attention.sliding_window": _FULL,
        "expert_weights_scale": ("moe_routed_scaling_factor", 1.0),
        "leading_dense_block_count": ("mlp_layer_types", "sparse"),
    },
    "mpt": {"attention.clamp_kqv": ("attn_config", {"clip_qkv": None})},
    "mellum": {"attention.sliding_window": _FULL},
    "cohere2moe": {"expert_weights_norm": _ROUTED["expert_weights_norm"]},
    "hy_v3": {"expert_weights_scale": ("router_scaling_factor", 1.0)},
    "mimo2": {"attention.value_scale": ("attention_value_scale", 1.0)},
    "bailingmoe3": {**_GROUPED, "expert_weights_norm": ("moe_renormalize", False)},
    "kimi-linear": {"expert_weights_scale": _ROUTED["expert_weights_scale"]},
    "afmoe": {"expert_weights_scale": ("route_scale", 1.0)},
    "nemotron_h_moe": {**_ROUTED, "expert_group_count": ("topk_group", 4)},
    "dots1": _ROUTED,
    "deepseek2": _GROUPED,
    "deepseek32": _GROUPED,
    "deepseek4": _UNSCALED,
    "minimax-m3": _UNSCALED,
    "hy_v4": _ROUTED,
    "dots3note": _ROUTED,
    "hrm_text": {"embedding_scale": ("embedding_scale", 1.0)},
    "glm-dsa": _GROUPED,
    "mistral4": _GROUPED,
    "glm4moe": _ROUTED,
    "exaone-moe": _ROUTED,
}
_ROTATION = re.compile(
    r"rope\.(freq_base|freq_base_swa|dimension_count|dimension_count_swa|scale_linear"
    r"|scaling\.(type|factor|original_context_length|yarn_beta_fast|yarn_beta_slow|yarn_attn_factor))"
    r"|attention\.compress_rope_freq_base"
)
#: Of Mistral 3, and the first of DeepSeek.
_BY_POSITION = ("rope.scaling.yarn_log_multiplier", "attention.temperature_scale")
_SCALED_BY_POSITION = ("mistral3", "mistral4", "deepseek2", "deepseek32")
#: Kinds of layers with a rotation of their own, of which only theirs is scaled.
KINDS = ("full_attention", "indexed_attention", "compress")
#: Where layers with a window have the base of the others, unless the file says theirs.
_ONE_BASE = ("laguna", "mellum", "mimo2")


@dataclass(frozen=True)
class Base:
    """A model whose file is changed."""

    original: Any

    @cached_property
    def logits(self) -> torch.Tensor:
        return self._logits(self.original)

    @cached_property
    def architecture(self) -> str:
        return layout_of(self.original.config).architecture

    @cached_property
    def said(self) -> dict[str, Any]:
        """What the untouched file says, without the vocabulary."""
        return metadata(self.original.config)

    def wrong(self, key: str, value: Any, model: Any) -> str | None:
        """What is wrong with a model that was loaded from the file with `key` as `value`; None where it is right.

        value: None where the key is removed.
        """
        found = self._logits(model)
        same = self._equal(found, self.logits)
        suffix = key.removeprefix(f"{self.architecture}.")
        if self.without_effect(key):
            return None if same else "has no effect, and the logits are others"
        if (expected := self._expected(suffix, value)) is not None:
            return None if self._equal(found, expected) else "computes something else than it says"
        if value is None:
            return None if same else "is gone, and the logits are others"
        if same:
            known = self.said.get(key)
            neutral = value in NEUTRAL or (value == 1 and suffix.endswith(("factor", "scale", "causal")))
            # The text is longer than either, and what scales attention is another key.
            short = suffix == "rope.scaling.original_context_length" and isinstance(value, int)
            neutral |= short and value < IDS.shape[1]
            # A list of the layers that attend stands before how often they do.
            named = f"{self.architecture}.attention.recurrent_layers" in self.said
            neutral |= suffix == "full_attention_interval" and named
            return None if neutral or value == known else "is passed over"
        layout = layout_of(self.original.config)
        known = suffix in layout.keys or suffix in layout.scalars.values() or suffix.startswith("rope.")
        return None if known else "changes the logits, and is no key of such a model"

    def without_effect(self, key: str) -> bool:
        """Whether a key is listed as without effect on the logits."""
        table = ARCHITECTURES[self.architecture].without_effect
        suffix = key.removeprefix(f"{self.architecture}.")
        listed = any(re.fullmatch(pattern, key) for pattern in WITHOUT_EFFECT)
        listed |= suffix in OF_NO_VALUE and (self.architecture, suffix) != ROTATES_IF_FINETUNED
        return listed or (suffix != key and suffix in table)

    def _expected(self, suffix: str, value: Any) -> torch.Tensor | None:
        """The logits that the changed file stands for, where they are those of a model with other settings."""
        setting = layout_of(self.original.config).keys.get(suffix)
        settings = self.original.config.to_dict()
        if _ROTATION.fullmatch(suffix) or (suffix in _BY_POSITION and self.architecture in _SCALED_BY_POSITION):
            settings["rope_parameters"] = self._rotation({**self.said, f"{self.architecture}.{suffix}": value})
            if settings["rope_parameters"] is None:
                return None
            if "layer_rope_theta" in settings:
                base = settings["rope_parameters"]["rope_theta"]
                settings["layer_rope_theta"] = [each and base for each in settings["layer_rope_theta"]]
        elif (self.architecture, suffix) == ROTATES_IF_FINETUNED:
            settings["position_embedding_type"] = None if value is False else "rope"
        elif value is None and self.architecture == "exaone4" and suffix.startswith("attention.sliding_window"):
            # A model without windows, as the small one is.
            settings |= {"sliding_window": None, "layer_types": ["full_attention"] * len(settings["layer_types"])}
        elif value is None:
            if suffix not in DEFAULTS.get(self.architecture, {}):
                return None
            name, default = DEFAULTS[self.architecture][suffix]
            settings[name] = [default] * len(settings[name]) if isinstance(settings[name], list) else default
        elif isinstance(setting, str) and suffix not in OF_THE_LAYOUT and not isinstance(value, list):
            none = {**dict.fromkeys(NONE_WHERE_ZERO), **dict.fromkeys(GROUPS, 1)}
            settings[setting] = none.get(suffix, value) if value == 0 else value
        else:
            return None
        try:
            model = AutoModelForCausalLM.from_config(type(self.original.config).from_dict(settings))
            # What is left over is of layers that use the keys of others.
            if model.load_state_dict(self.original.state_dict(), strict=False).missing_keys:
                return torch.full_like(self.logits, torch.nan)
            return self._logits(model.eval())
        except Exception:  # whatever transformers makes of settings that are no model's
            return torch.full_like(self.logits, torch.nan)

    def _rotation(self, said: dict[str, Any]) -> dict[str, Any] | None:
        said = {key.removeprefix(f"{self.architecture}."): value for key, value in said.items() if value is not None}
        config = self.original.config
        # The kind of layers whose rotation may be scaled, where there are several.
        scaled = next((name for name in KINDS if name in config.rope_parameters), None)
        old = config.rope_parameters[scaled] if scaled else config.rope_parameters
        if old["rope_type"] in ("llama3", "longrope"):
            return None
        usual = said.get("rope.freq_base", 1e4) if self.architecture in _ONE_BASE else 1e4
        window = {"rope_type": "default", "rope_theta": said.get("rope.freq_base_swa", usual)}
        if old["rope_type"] == "proportional":
            full = {**old, "rope_theta": said.get("rope.freq_base", 1e4)}
            return {"full_attention": full, "sliding_attention": window}
        config = config.per_layer_config[0]
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        rotated = said.get("rope.dimension_count", dim)
        if rotated != dim and "partial_rotary_factor" not in old:
            return None
        new = {"truncate": old["truncate"]} if "truncate" in old else {}
        new |= {"rope_theta": said.get("rope.freq_base", 1e4)}
        share = {"partial_rotary_factor": rotated / dim} if "partial_rotary_factor" in old else {}
        new |= share
        window |= share
        if "rope.dimension_count_swa" in said and share:
            window["partial_rotary_factor"] = said["rope.dimension_count_swa"] / dim
        factor = said.get("rope.scaling.factor", said.get("rope.scale_linear", 0)) or 1
        kind = said.get("rope.scaling.type", "linear")
        if kind == "yarn":
            length = said.get("rope.scaling.original_context_length") or config.max_position_embeddings
            more = {
                "attention_factor": said.get("rope.scaling.yarn_attn_factor"),
                "beta_fast": said.get("rope.scaling.yarn_beta_fast"),
                "beta_slow": said.get("rope.scaling.yarn_beta_slow"),
            }
            if "llama_4_scaling_beta" in old:
                is_latent = self.architecture == "mistral4"
                more["llama_4_scaling_beta"] = said.get("attention.temperature_scale", 0.1 if is_latent else 0.0)
                if multiplier := said.get("rope.scaling.yarn_log_multiplier"):
                    whole = multiplier / 0.1 if is_latent else multiplier
                    more |= {"mscale": whole if is_latent else 1.0, "mscale_all_dim": whole}
            elif "mscale_all_dim" in old:
                more |= dict.fromkeys(
                    ("mscale", "mscale_all_dim"), said.get("rope.scaling.yarn_log_multiplier", 0) / 0.1
                )
            new |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": length}
            new |= {name: value for name, value in more.items() if value is not None}
        elif kind == "linear" and factor != 1:
            new |= {"rope_type": "linear", "factor": factor}
        elif kind in ("linear", "none"):
            new |= {"rope_type": "default"}
        else:
            return None
        if scaled == "compress":
            main = {"rope_type": "default", "rope_theta": new["rope_theta"], **share}
            new |= {"rope_theta": said.get("attention.compress_rope_freq_base"), "attention_factor": 1.0}
            return {"main": main, scaled: new}
        return {scaled: new, "sliding_attention": window} if scaled else new

    def _logits(self, model: Any) -> torch.Tensor:
        with torch.inference_mode():
            return model(IDS).logits

    def _equal(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        return bool(((one - other).abs().max() / self.logits.std()) < ROUNDING)
