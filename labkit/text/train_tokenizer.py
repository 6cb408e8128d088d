"""Trains the `mini` vocabulary: a byte-level BPE over the training part of the corpus."""

from __future__ import annotations

from pathlib import Path

from labkit.text.corpus import load_corpus
from labkit.text.tokenizer import SPECIAL_TOKENS, Tokenizer

MINI_VOCAB_SIZE = 4096

# The released vocabulary's own pre-tokenizer, applied in this order. BPE never merges across
# the pieces: numbers go in groups of up to three digits; Han and kana runs stand alone; then
# a word takes one leading space or sign with it, signs take the line breaks that follow, and
# white space before a word leaves its last space to the word.
_SPLITS = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)


def train_mini_tokenizer(
    out_path: str | Path | None = None, vocab_size: int = MINI_VOCAB_SIZE
) -> Tokenizer:
    """Train on `load_corpus("train")` and write `tokenizer.json` to `out_path`.

    The ids 0, 1, 2 are begin, end and padding as in the release; the other special tokens
    follow, then the 256 bytes, then the merges. The result depends on the text alone: two
    runs write the same bytes. Without `out_path` nothing is written.
    """
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Backend

    backend = Backend(models.BPE())
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS]
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, bytes_])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[names[0] for names in SPECIAL_TOKENS.values()],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(load_corpus("train").values(), trainer)
    tokenizer = Tokenizer(backend, "the trained vocabulary")
    if out_path is not None:
        path = Path(out_path)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Written beside the target and renamed: an interrupted run leaves no partial file.
        part = path.with_name(path.name + ".part")
        part.write_text(backend.to_str(pretty=True) + "\n", encoding="utf-8", newline="\n")
        part.replace(path)
        tokenizer.source = str(path)
    return tokenizer
