"""The architectures of llama.cpp that cannot be loaded, by reason; others without a table are not supported yet.

Source: `src/llama-arch.cpp` of https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

#: The installed transformers has no class for these, or only one that downloads its code.
NO_CLASS = frozenset({
    "arctic", "arwkv7", "baichuan", "bailingmoe", "bailingmoe2", "codeshell", "cogvlm", "deci", "deepseek",
    "graniteswitch", "grok", "grovemoe", "jais", "kimi-k3", "maincoder", "maple", "nanbeige",
    "openelm", "orion", "pangu-embedded", "plamo", "plamo2", "plamo3", "plm", "qwen", "refact", "rwkv6",
    "rwkv6qwen2", "rwkv7", "smallthinker", "spark2_5", "talkie",
})  # fmt: skip
#: They write a text by filling in masked words, in any order.
DIFFUSION = frozenset({"dream", "llada", "llada-moe", "rnd1"})
#: Their decoder attends to what an encoder made of the prompt.
ENCODER_DECODER = frozenset({"t5"})
#: They turn texts, images or sounds into vectors, or vectors into sounds.
NO_GENERATOR = frozenset({
    "bert", "clip", "eurobert", "gemma-embedding", "jina-bert-v2", "jina-bert-v3", "llama-embed", "modern-bert",
    "neo-bert", "nomic-bert", "nomic-bert-moe", "pockettts", "qwen3tts", "t5encoder", "wavtokenizer-dec",
})  # fmt: skip
#: They guess the next tokens of another model from its hidden states.
DRAFT = frozenset({"dflash", "eagle3", "gemma4-assistant"})
#: transformers has a class of these only as a part of a model of images or sounds.
WITHIN_ANOTHER = frozenset({
    "chameleon", "deepseek2-ocr", "glm5-next", "hunyuan_vl", "muse-glimmer", "paddleocr", "step35",
})  # fmt: skip
#: What transformers' class computes otherwise than the published models.
COMPUTED_OTHERWISE = {
    "minimax-01": "whose heads are rotated by half, and transformers' class rotates whole ones; give another model",
}


def reason(architecture: str) -> str:
    """Why an architecture without a table cannot be loaded, and what to do, as the end of a sentence."""
    if architecture in NO_CLASS:
        return "which transformers has no class for; give a model of another architecture"
    if architecture in DIFFUSION:
        return "which fills in masked words, and does not write one behind another; give the file of a model that does"
    if architecture in ENCODER_DECODER:
        return "which reads a prompt by an encoder; give the file of a model that is a decoder alone"
    if architecture in NO_GENERATOR:
        return "which generates no text; give the file of a language model"
    if architecture in DRAFT:
        return "which drafts tokens for another model; give that model's file"
    if architecture in WITHIN_ANOTHER:
        return "which transformers computes only as a part of a model of images; give a model of another architecture"
    if architecture in COMPUTED_OTHERWISE:
        return COMPUTED_OTHERWISE[architecture]
    return "which is not supported yet; give the model in Hugging Face format, without this file"
