"""A tiny Qwen2 model, its vocabulary, and its GGUF file."""

from __future__ import annotations

import gguf
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TOKENS = (*sorted(pre_tokenizers.ByteLevel.alphabet()), "he", *SPECIAL_TOKENS)
END_OF_TEXT, END_OF_TURN = len(TOKENS) - 3, len(TOKENS) - 1
GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
}


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.BPE({token: i for i, token in enumerate(TOKENS)}, [("h", "e")]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    words.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<|endoftext|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE
    )


def tiny_qwen2() -> Qwen2ForCausalLM:
    """A random model of two layers over the vocabulary above; always the same one."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(TOKENS),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=END_OF_TEXT,
    )
    return Qwen2ForCausalLM(config)


def write_gguf(path, model, change=lambda writer: None, without=(), kind=None):
    """Write the tiny model as a GGUF file: `change(writer)` may add metadata, `without` names tensors to leave out,
    `kind` is what matrices are quantized to."""
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(model.config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3 if token in SPECIAL_TOKENS else 1 for token in TOKENS])
    writer.add_token_merges(["h e"])
    writer.add_eos_token_id(END_OF_TEXT)
    writer.add_chat_template(CHAT_TEMPLATE)
    change(writer)
    for name, tensor in model.state_dict().items():
        for theirs, ours in GGUF_NAMES.items():
            name = name.replace(theirs, ours)
        if name in without:
            continue
        if kind is None or tensor.dim() == 1:
            writer.add_tensor(name, tensor.numpy())
        else:
            writer.add_tensor(name, gguf.quantize(tensor.numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
