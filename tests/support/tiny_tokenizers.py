"""Tiny tokenizers of every kind, with control tokens that words or merges could spell too."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

BEGIN, END, TOOL = "<|im_start|>", "<|im_end|>", "<tool_call>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
_CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n", "▁"]


def _merged(letters: list[str], *words: str) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A vocabulary and merges that build the words letter by letter."""
    tokens, merges = list(letters), []
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in tokens:
                tokens.append(word[:end])
                merges.append((word[: end - 1], word[end - 1]))
    return {token: number for number, token in enumerate(tokens)}, merges


def _finished(backend: Tokenizer, *, unknown: str | None = None, **flags: bool) -> PreTrainedTokenizerFast:
    backend.add_special_tokens([AddedToken(END, **flags), AddedToken(BEGIN, **flags)])
    backend.add_tokens([AddedToken(TOOL, normalized=False), AddedToken("  ", normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=BEGIN, eos_token=END, unk_token=unknown, chat_template=TEMPLATE
    )


def byte_level(**settings: bool) -> PreTrainedTokenizerFast:
    """As of GPT-2, Qwen and Llama 3; control tokens are words of the vocabulary, as `ignore_merges` would find them."""
    vocabulary, merges = _merged(_LETTERS, "ĊĊ", "Ġhello", "<|", "user", "Ċ<")
    vocabulary |= {BEGIN: len(vocabulary), END: len(vocabulary) + 1}
    backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=settings.pop("ignore_merges", False)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(use_regex=not settings.pop("whole", False), **settings)
    backend.decoder = decoders.ByteLevel()
    return _finished(backend)


def sentencepiece(scheme: str) -> PreTrainedTokenizerFast:
    """As of Llama 2 and Gemma in transformers' reading: merges spell the control tokens too."""
    vocabulary, merges = _merged(_CHARACTERS, "▁hello", "▁▁", END, TOOL, "\n\n")
    vocabulary |= {f"<0x{byte:02X}>": len(vocabulary) + byte for byte in range(256)}
    backend = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True))
    if scheme == "prepend":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = _finished(backend, lstrip=scheme == "never", rstrip=scheme == "never")
    start = tokenizer.bos_token_id
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, start)]
    )
    return tokenizer


def unigram() -> PreTrainedTokenizerFast:
    """As of T5 and XGLM: every word of the vocabulary is found in a text, control tokens among them."""
    words = [*_CHARACTERS, "▁hello", "\n\n", BEGIN, END]
    backend = Tokenizer(models.Unigram([("<unk>", 0.0), *((word, -float(len(word))) for word in words)], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    backend.decoder = decoders.Metaspace(prepend_scheme="never")
    return _finished(backend, unknown="<unk>")


def normalising() -> PreTrainedTokenizerFast:
    """One whose control tokens are looked for in normalised text, where one in wide capitals is one too."""
    vocabulary, merges = _merged(_LETTERS, "hello")
    backend = Tokenizer(models.BPE(vocabulary, merges))
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return _finished(backend, normalized=True)


def words() -> PreTrainedTokenizerFast:
    """Whole words between white space."""
    vocabulary = {word: number for number, word in enumerate(["<unk>", "hello", "user", "assistant", BEGIN, END])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _finished(backend, unknown="<unk>")


def in_python() -> ByT5Tokenizer:
    """One that no library in Rust backs."""
    tokenizer = ByT5Tokenizer(extra_ids=0, additional_special_tokens=[BEGIN, END])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


#: Those whose tokens are the text, so that decoding gives it back.
LOSSLESS = {
    "byte level": byte_level(add_prefix_space=False),
    "byte level, whole words": byte_level(add_prefix_space=False, ignore_merges=True, whole=True),
    "spaces before the first": sentencepiece("first"),
    "spaces never": sentencepiece("never"),
    "bytes in python": in_python(),
}
ALL = {
    **LOSSLESS,
    "byte level with a prefix": byte_level(add_prefix_space=True),
    "spaces before all": sentencepiece("always"),
    "spaces by the normaliser": sentencepiece("prepend"),
    "unigrams": unigram(),
    "normalised": normalising(),
    "words": words(),
}
