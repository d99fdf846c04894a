"""Writes `gguf_splits.json`: llama.cpp's splits of texts for each value of `tokenizer.ggml.pre`, and ids of characters.

    pip install llama-cpp-python==0.3.36 gguf
    python tests/models/make_gguf_splits.py

The tests need neither llama.cpp nor this script. For the splits every part of every text is a token, and any two
neighbours merge to a third, so that each piece that llama.cpp splits off is one token. Vocabularies of characters split
nothing; of them the file has the ids that llama.cpp gives.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

TEXTS = [
    "",
    "   ",
    "\t",
    "\n",
    "\n\n\n",
    " \n \n\n \t\t\n  x",
    "line\r\n\r\nnext\r\n  indented\r\n",
    "tab\tbetween\t\ttabs",
    "Hello, world!",
    " Hello world",
    "  two leading, two trailing  ",
    "end with space ",
    "1",
    "12 123 1234 12345 1234567890",
    "3.14159e-10, 0x1F, 1,234,567.89 2024-11-26",
    "1a2b3c 4D 5'6\" 7% $8 #9 v1.2.3-rc4",
    "½ ² x² ⅓ ①②③ Ⅷ ٣٤٥ १२३",
    "I'm you're he'S we'VE they'LL I'D don'T 'tis it's' 's",
    "O'Reilly's ''quoted'' \u201cit\u2019s\u201d",
    "snake_case camelCase PascalCase HTTPServer XMLHttpRequest2",
    'def f(x: int) -> str:\n    return f"{x!r}" if x else None\n',
    "for(i=0;i<n;++i){a[i]+=b[i]*c[i];}//ok",
    "    four\n        eight\n\tTab\n",
    "x=1;y=2;;z===3 && !q || ~p",
    "你好\uff0c世界\uff01今天天气怎么样\uff1f",
    "日本語のテキスト、カタカナとひらがな。",
    "안녕하세요 세계, 한국어 문장입니다.",
    "混合 mixed 中文and英文123数字",
    "👨\u200d👩\u200d👧\u200d👦 family 👍🏽 🏳️\u200d🌈 🇩🇪",
    "🦙🦙 emoji🚀s in-between",
    "e\u0301 cafe\u0301 vs caf\u00e9",
    "A\u030a ngstro\u0308m \u1e9b\u0323",
    "مرحبا بالعالم، كيف الحالُ؟",
    "สวัสดีชาวโลก ภาษาไทย",
    "नमस्ते दुनिया, यह हिन्दी है।",
    "Привет, мир! Ёлка и ещё",
    "Ελληνικά ΚΕΦΑΛΑΊΑ Άλφα",
    "ÉCOLE École straßE ÀÉÎ",
    "\u01c4 \u01c5 \u01c6 titlecase",
    "zero\u200bwidth\u00a0nbsp\u3000ideographic\u2003em",
    "<|im_start|>user\nhi<|im_end|>",
    "</s><s>[INST] x [/INST] <|endoftext|>",
    "<think>\nhm\n</think>",
    "https://example.com/a/b?c=d&e=f#g user@mail.org",
    "!!!???...,,,;;; --- *** ### $$$ €£¥ ++",
    '(a) [b] {c} <d> `e` "f" \\n /g/ |h|',
    "donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa bbbbbbbbbbbbbbbbbbbbbbbbb",
    "\u2028line sep\u2029para \u0085 nel \x0b vt \x0c ff",
    "\x01\x7f control \ufeff bom \ufffd",
    "\u017ftra\u017f\u017fe '\u017f K \u212b long s",
    "Ünïcödé… \u2013 — \u2018x\u2019 «y» „z\u201c",
    "\u202e7\u202c \u2066abc\u2069 \u05d0\u05d1\u05d2 12 \u05d3",
    "\U000e0041tag\U000e007f \U0001d7d8\U0001d7d9 \U00010400\U00010428 \U00020000\u3007 \ue000\uffff",
    "a\n\n\n\n\n\n\n\n\nb \n \r\n\r\r\n\t\n c",
    "\u00a0\u00a0x \u00a0y\u2009\u2009z\t \u3000\n\u00a0",
    "1\ufe0f\u20e3 \u200b3 \u20444 \u00aa\u00ba \ufb01 \u0130\u0131 \u1e9e",
]


def letters() -> list[str]:
    """GPT-2's letter for each byte: itself where it can be seen, else one from U+0100 on."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unseen = [byte for byte in range(256) if byte not in seen]
    return [chr(byte if byte in seen else 256 + unseen.index(byte)) for byte in range(256)]


@cache
def vocabulary() -> tuple[list[str], list[str]]:
    """All parts of the texts as tokens, and merges by which every part becomes one."""
    spelled = letters()
    tokens, merges = dict.fromkeys(spelled), dict[str, None]()
    for text in TEXTS:
        characters = ["".join(spelled[byte] for byte in character.encode()) for character in text]
        for character in characters:
            for end in range(2, len(character) + 1):
                tokens[character[:end]] = None
                merges[f"{character[: end - 1]} {character[end - 1]}"] = None
    for text in TEXTS:
        characters = ["".join(spelled[byte] for byte in character.encode()) for character in text]
        for length in range(2, len(characters) + 1):
            for start in range(len(characters) - length + 1):
                part = characters[start : start + length]
                tokens["".join(part)] = None
                for cut in range(1, length):
                    merges["".join(part[:cut]) + " " + "".join(part[cut:])] = None
    return list(tokens), list(merges)


def words() -> list[str]:
    """`<unk>`, `<s>`, `</s>`, all bytes, and the parts of the texts that occur most often, by length and frequency."""
    spelled = [text.replace(" ", "\u2581") for text in TEXTS]
    counts = Counter(
        text[start : start + length]
        for text in spelled
        for length in (1, 2, 3, 4)
        for start in range(len(text) - length + 1)
    )
    # In real vocabularies no word has a line break beside other characters.
    frequent = [
        part
        for part, count in counts.items()
        if count > (1 if len(part) == 1 else 2) and (not part.strip("\n") or "\n" not in part)
    ]
    return [
        *("<unk>", "<s>", "</s>"),
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *sorted(frequent, key=lambda part: (-len(part) * counts[part], part)),
    ]


def characters(kind: str) -> dict[str, Any]:
    """What a file has after `tokenizer.ggml.` for a vocabulary of characters of the kind `llama` or `gemma4`."""
    tokens = words()
    first = tokens.index("<0xFF>") + 1
    usable = set(tokens[first:])
    merges = [
        f"{token[:cut]} {token[cut:]}"
        for token in tokens[first:]
        for cut in range(1, len(token))
        if {token[:cut], token[cut:]} <= usable
    ]
    return {
        "model": kind,
        "tokens": tokens,
        "token_type": [2, 3, 3, *[6] * 256, *[1] * len(usable)],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **({"merges": merges} if kind == "gemma4" else {"scores": [-float(rank) for rank in range(len(tokens))]}),
    }


def byte_level(name: str) -> dict[str, Any]:
    """What a file has after `tokenizer.ggml.` for the vocabulary of the splits."""
    tokens, merges = vocabulary()
    return {"model": "gpt2", "pre": name, "tokens": tokens, "merges": merges, "bos_token_id": 0, "eos_token_id": 0}


def ids_of(entries: dict[str, Any], *, special: bool) -> list[list[int]]:
    """The ids that llama.cpp gives for the texts by a file with these entries; `special` ones among them or not."""
    import gguf
    from llama_cpp import Llama

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocabulary.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        for key, value in entries.items():
            add = {str: writer.add_string, int: writer.add_uint32, bool: writer.add_bool, list: writer.add_array}
            add[type(value)](f"tokenizer.ggml.{key}", value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        model = Llama(str(path), vocab_only=True, verbose=False)
        return [model.tokenize(text.encode(), add_bos=special, special=special) for text in TEXTS]


def lengths_of(name: str) -> tuple[str, ...]:
    """How many characters each piece has that llama.cpp splits the texts into, by a value of `tokenizer.ggml.pre`."""
    entries = byte_level(name)
    spelled = {letter: byte for byte, letter in enumerate(letters())}
    lengths = []
    for text, ids in zip(TEXTS, ids_of(entries, special=False), strict=True):
        parts = [bytes(spelled[letter] for letter in entries["tokens"][number]).decode() for number in ids]
        assert "".join(parts) == text, (name, text, parts)
        lengths.append(" ".join(str(len(part)) for part in parts))
    return tuple(lengths)


#: Kinds of vocabularies of characters, by the name that the file has for their ids.
CHARACTERS = {
    "llama": characters("llama"),
    "llama without a space before": {**characters("llama"), "add_space_prefix": False},
    "gemma4": {**characters("gemma4"), "add_bos_token": False},
}


def main(names: list[str]) -> None:
    """Split the texts by llama.cpp and write the result into this folder."""
    by_lengths: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        by_lengths.setdefault(lengths_of(name), []).append(name)
        print(name, flush=True)
    content = {
        "texts": TEXTS,
        "splits": [{"pre": names, "lengths": lengths} for lengths, names in by_lengths.items()],
        "ids": {
            name: [" ".join(map(str, ids)) for ids in ids_of(entries, special=True)]
            for name, entries in CHARACTERS.items()
        },
    }
    target = Path(__file__).with_name("gguf_splits.json")
    target.write_text(json.dumps(content, ensure_ascii=True, indent=0) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from hetero_kv.models.gguf.pre_tokenizers import PRE_TOKENIZERS

    main(sorted(name for name, pre in PRE_TOKENIZERS.items() if pre.in_bytes))
