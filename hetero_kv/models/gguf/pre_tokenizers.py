"""The pre-tokenizers, which split a text before BPE merges it, for each value of `tokenizer.ggml.pre`.

Names and regular expressions are llama.cpp's (`src/llama-vocab.cpp`). llama.cpp rewrites the models' expressions for an
engine with fewer character classes, and does not normalise text. If a model's vocabulary shows that its own tokenizer
differs, the model's expressions are used instead; `docs/gguf_files.md` lists these cases. Sources: transformers'
tokenizers of these models, their `tokenizer.json`, and the originals that llama.cpp quotes.
"""

from __future__ import annotations

from dataclasses import dataclass

# Parts of expressions, in the syntax of Oniguruma, which the package `tokenizers` uses.
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT, _DIGITS, _UP_TO_THREE = r"\p{N}", r"\p{N}+", r"\p{N}{1,3}"
_THREE = "[0-9][0-9][0-9]"


def _either(*expressions: str) -> str:
    return "|".join(expressions)


_LLAMA3 = _either(_CONTRACTION, _WORD, _UP_TO_THREE, _SIGNS, _SPACES)
_QWEN2 = _either(_CONTRACTION, _WORD, _DIGIT, _SIGNS, _SPACES)

# Words that a capital letter splits, as in o200k; letters of all scripts have a case class.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LED = r"[^\r\n\p{L}\p{N}]?"


def _cased(upper: str = _UPPER, lower: str = _LOWER, ending: str = "") -> str:
    return _either(f"{_LED}{upper}*{lower}+{ending}", f"{_LED}{upper}+{lower}*{ending}")


_SIGNS_AND_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_O200K = _either(_cased(ending=_CONTRACTION + "?"), _UP_TO_THREE, _SIGNS_AND_SLASH, _SPACES)
_TEKKEN = _either(_cased(), _DIGIT, _SIGNS_AND_SLASH, _SPACES)
_KIMI = _either(
    r"\p{Han}+",
    _cased(
        r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", _CONTRACTION + "?"
    ),
    _UP_TO_THREE,
    _SIGNS,
    _SPACES,
)
# Groups of three digits from the right, as thousands are written.
_THOUSANDS = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
_THOUSANDS_AT_A_WORDS_END = r"\d{1,3}(?=(?:\d{3})*\b)"

_HAN_AND_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_ASCII_SIGN_AND_LETTERS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
_WORD_WITH_MARKS = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
_DEEPSEEK_V3 = (
    _UP_TO_THREE,
    _HAN_AND_KANA,
    _either(_ASCII_SIGN_AND_LETTERS, _WORD_WITH_MARKS, r" ?[\p{P}\p{S}]+[\r\n]*", _SPACES),
)
_SPARK = (
    _UP_TO_THREE,
    _HAN_AND_KANA,
    _either(_ASCII_SIGN_AND_LETTERS, _WORD_WITH_MARKS, r" ?[\p{P}\p{S}]+", r"[\r\n]", r"\s+(?!\S)", r"\s+"),
    _DIGIT,
)
_HAN_AND_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# The letters with case of Unicode 11, as DeepSeek's file spells them out.
_LETTERS_WITH_CASE = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-"
    "\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-"
    "\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-"
    "\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-"
    "\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-"
    "\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-"
    "\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-"
    "\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_LETTERS_WITH_CASE}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _HAN_AND_HANGUL,
    _DIGITS,
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_AND_HANGUL, _DIGIT)
_YOUTU = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    "|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    _either(_cased(ending=_CONTRACTION + "?"), _DIGIT, _SIGNS_AND_SLASH, _SPACES),
)
_AFMOE = (
    _THOUSANDS,
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+",
    _either(_ASCII_SIGN_AND_LETTERS, _WORD_WITH_MARKS, r" ?[\p{P}\p{S}]+[\r\n]*", _SPACES),
)
# Text between punctuation marks of several scripts.
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_PUNCTUATION = r"[\p{P}$+<=>^~|`]+"
_CHAMELEON = (
    "<sentinel:[0-9]+>",
    "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
    r"([\t\n]|    |  )",
    _DIGIT,
    r"[\p{P}!-/:-@\[-`{-~]",
    _GPT2,
)
# Runs of spaces by powers of two.
_SPACES_BY_HALVES = "|".join(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4))
_JAIS2 = _either(
    _CONTRACTION, _WORD, _UP_TO_THREE, _SIGNS, r"\s*[\r\n]+", _SPACES_BY_HALVES, r"\s{1,2}(?!\S)", r"\s{1}"
)


@dataclass(frozen=True)
class PreTokenizer:
    """A pre-tokenizer.

    Attributes:
        splits: Oniguruma expressions; each one splits the pieces of the one before into matches and the text between.
        composes: whether the text is first normalised to Unicode's form C (NFC).
        ignore_merges: whether a piece that is a token of the vocabulary stays whole, without applying merges.
        add_bos: whether a text begins with a BOS token by default.
        in_bytes: whether the vocabulary spells bytes by GPT-2's letters. Otherwise it spells characters: U+2581 is a
            space, and `<0xFF>` a byte that is in no word.
    """

    splits: tuple[str, ...]
    composes: bool = False
    ignore_merges: bool = False
    add_bos: bool = False
    in_bytes: bool = True


_LIKE_LLAMA3 = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_LIKE_GPT2 = PreTokenizer((_GPT2,))
_LIKE_GPT_NEOX = PreTokenizer((_GPT2,), composes=True)
_LIKE_STARCODER = PreTokenizer((_DIGIT, _GPT2))
_LIKE_QWEN2 = PreTokenizer((_QWEN2,), composes=True)
_LIKE_GPT4O = PreTokenizer((_O200K,))
_LIKE_BLOOM = PreTokenizer((_BLOOM,))
_LIKE_DEEPSEEK_V3 = PreTokenizer(_DEEPSEEK_V3)
_LIKE_BAILING = PreTokenizer(
    (_either(r"'(?i:[sdmt]|ll|ve|re)", _WORD, _DIGIT, _SIGNS, r"\s*[\r\n]", r"\s+(?!\S)", r"\s+"),)
)
_LIKE_TINY_AYA = PreTokenizer((_THOUSANDS_AT_A_WORDS_END, _O200K), composes=True)
_LIKE_GEMMA = PreTokenizer((), add_bos=True, in_bytes=False)
_LIKE_GLM4 = PreTokenizer((_LLAMA3,), ignore_merges=True)

#: By the value of `tokenizer.ggml.pre`.
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2, _DIGITS, _THREE)),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"), _LIKE_LLAMA3),
    "falcon-h1": _LIKE_LLAMA3,
    "falcon3": PreTokenizer((_PUNCTUATION, _GPT2, _DIGIT), ignore_merges=True, add_bos=True),
    "jais-2": PreTokenizer((_JAIS2,)),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), PreTokenizer((_LLAMA3,))),
    **dict.fromkeys(("glm4", "glm5"), _LIKE_GLM4),
    "minicpm5": PreTokenizer(
        (_UP_TO_THREE, _either(_CONTRACTION, _WORD, _DIGITS, _SIGNS, _SPACES)), ignore_merges=True
    ),
    "deepseek-llm": PreTokenizer(_DEEPSEEK_LLM),
    "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _LIKE_DEEPSEEK_V3),
    "spark2_5": PreTokenizer(_SPARK),
    "youtu": PreTokenizer(_YOUTU, ignore_merges=True),
    "falcon": PreTokenizer((_PUNCTUATION, _GPT2, _THREE)),
    **dict.fromkeys(("starcoder", "refact", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"), _LIKE_STARCODER),
    "command-r": PreTokenizer((_DIGIT, _GPT2), composes=True),
    **dict.fromkeys(("gpt-2", "phi-2", "a.x-4.0", "mellum", "jais", "trillion", "granite-docling"), _LIKE_GPT2),
    **dict.fromkeys(("exaone4", "jina-es", "jina-de", "jina-v1-en", "jina-v2-es", "jina-v2-de"), _LIKE_GPT2),
    **dict.fromkeys(("jina-v2-code", "roberta-bpe"), _LIKE_GPT2),
    **dict.fromkeys(("mpt", "olmo", "modern-bert"), _LIKE_GPT_NEOX),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "f2llmv2", "stablelm2", "hunyuan"), _LIKE_QWEN2),
    **dict.fromkeys(("kormo", "megrez", "solar-open", "grok-2"), PreTokenizer((_QWEN2,))),
    "qwen35": PreTokenizer(
        (
            _either(
                _CONTRACTION, r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", _DIGIT, r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", _SPACES
            ),
        ),
        composes=True,
    ),
    "ufakzeka": PreTokenizer((_either(_WORD, _DIGIT, _SIGNS, _SPACES),)),
    "laguna": PreTokenizer((r"[^\n]+|[\n]+", _QWEN2)),
    "seed-coder": PreTokenizer((_either(_CONTRACTION, _WORD, _DIGIT, r" ?[^\s\p{L}\p{N}\r\n]+", _SPACES),)),
    "exaone-moe": PreTokenizer(
        (
            _either(
                _CONTRACTION,
                r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+",
                _DIGIT,
                r" ?[^\s\p{L}\p{N}]+[\r\n/]?",
                r"\s*[\r\n]",
                r"\s+(?!\S)",
                r"\s+",
            ),
        ),
        composes=True,
    ),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _LIKE_BAILING),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), _LIKE_BLOOM),
    "viking": PreTokenizer((_BLOOM, _DIGIT)),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2", "gigachat"), _LIKE_GPT4O),
    "granite-embed-multi-97m": PreTokenizer((_O200K,), ignore_merges=True),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), _LIKE_TINY_AYA),
    "kimi-k2": PreTokenizer((_KIMI,)),
    "afmoe": PreTokenizer(_AFMOE),
    "superbpe": PreTokenizer((_DIGITS, r"(?=(\d{3})+(?!\d))")),
    "chameleon": PreTokenizer(_CHAMELEON, add_bos=True),
    **dict.fromkeys(("gemma4", "granite-embed-multi-311m"), _LIKE_GEMMA),
    "sarvam-moe": PreTokenizer((), in_bytes=False),
}
