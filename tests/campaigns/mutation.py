"""Small damage to a file: bytes flipped, cut out, doubled, or taken from elsewhere in it."""

from __future__ import annotations

from random import Random

_ODD = (
    b"\x00",
    b"\xff",
    b"\n",
    b"\t",
    b": ",
    b"- ",
    b"{",
    b"}",
    b"[",
    b"]",
    b'"',
    b"'",
    b"#",
    b"&a ",
    b"*a",
    b"<<: ",
    b"!!int ",
    b"1" * 30,
    b"null",
    b"\xed\xa0\x80",
    b"\\ud800",
    b",",
    b"-1",
    b"1e999",
    b"true",
)


def mutated(content: bytes, random: Random) -> bytes:
    """`content` with one to four pieces changed."""
    for _ in range(random.randint(1, 4)):
        start = random.randrange(len(content) + 1)
        end = min(len(content), start + random.choice((0, 1, 1, 4, 20, 200)))
        elsewhere = random.randrange(len(content) + 1)
        piece = random.choice(
            (
                b"",
                bytes([random.randrange(256)]),
                random.choice(_ODD),
                content[start:end] * random.choice((2, 3, 50)),
                content[elsewhere : elsewhere + random.choice((5, 40, 400))],
            )
        )
        content = content[:start] + piece + content[end:]
    return content if random.random() < 0.9 else content[: random.randrange(len(content) + 1)]
