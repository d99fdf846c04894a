"""Writes `gguf_splits.json`: llama.cpp's splits of texts for each value of `tokenizer.ggml.pre`.

    pip install llama-cpp-python==0.3.36 gguf
    python tests/models/make_gguf_splits.py

The tests need neither llama.cpp nor this script. Every part of every text is a token here, and any two neighbours merge
to a third, so that each piece that llama.cpp splits off is one token.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

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
]


def letters() -> list[str]:
    """GPT-2's letter for each byte: itself where it can be seen, else one from U+0100 on."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unseen = [byte for byte in range(256) if byte not in seen]
    return [chr(byte if byte in seen else 256 + unseen.index(byte)) for byte in range(256)]


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


def main(names: list[str]) -> None:
    """Split the texts by llama.cpp and write the result into this folder."""
    import gguf
    from llama_cpp import Llama

    tokens, merges = vocabulary()
    by_pieces: dict[tuple[str, ...], list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            path = Path(folder) / "vocabulary.gguf"
            writer = gguf.GGUFWriter(path, "llama")
            writer.add_tokenizer_model("gpt2")
            writer.add_tokenizer_pre(name)
            writer.add_token_list(tokens)
            writer.add_token_merges(merges)
            for end in (writer.add_bos_token_id, writer.add_eos_token_id):
                end(0)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.close()
            model = Llama(str(path), vocab_only=True, verbose=False)
            pieces = []
            for text in TEXTS:
                found = [tokens[number] for number in model.tokenize(text.encode(), add_bos=False, special=False)]
                spelled = {letter: byte for byte, letter in enumerate(letters())}
                parts = [bytes(spelled[letter] for letter in token).decode() for token in found]
                assert "".join(parts) == text, (name, text, parts)
                pieces.append(" ".join(str(len(part)) for part in parts))
            by_pieces.setdefault(tuple(pieces), []).append(name)
            print(name, flush=True)
    content = {
        "texts": TEXTS,
        "splits": [{"pre": names, "lengths": pieces} for pieces, names in by_pieces.items()],
    }
    target = Path(__file__).with_name("gguf_splits.json")
    target.write_text(json.dumps(content, ensure_ascii=True, indent=0) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from hetero_kv.models.gguf.pre_tokenizers import PRE_TOKENIZERS

    main(sorted(name for name, pre in PRE_TOKENIZERS.items() if pre.in_bytes))
