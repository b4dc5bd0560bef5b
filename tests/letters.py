"""A tokenizer of one piece for each letter, so that a text has only one encoding."""

from flaxformer_min.tokens import EOS


class Letters:
    """Letters from A on follow the special tokens."""

    def encode_batch(self, texts):
        """Return the ids of each text."""
        return [[*(ord(letter) - 61 for letter in text), EOS] for text in texts]

    def decode(self, ids):
        """Return the text of ids."""
        return "".join(chr(i + 61) for i in ids if i > EOS)

    def pieces(self, ids):
        """Return the letter of each id."""
        return [chr(i + 61) for i in ids]
