"""Text: the corpus, the vocabularies, and the Engram class map and addresses."""

from labkit.text.corpus import load_corpus
from labkit.text.engram_map import engram_classes
from labkit.text.tokenizer import StreamDecoder, Tokenizer

__all__ = ["StreamDecoder", "Tokenizer", "engram_classes", "load_corpus"]
