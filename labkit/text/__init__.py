"""Text: the corpus, the vocabularies, and the Engram class map and addresses."""
