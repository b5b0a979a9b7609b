"""The lexicon of the toy language: English words and the German word for each."""

WORDS = {
    "red": "rot",
    "blue": "blau",
    "dog": "hund",
    "cat": "katze",
    "sees": "sieht",
    "likes": "mag",
    "one": "ein",
    "house": "haus",
    "tree": "baum",
    "big": "groß",
    "small": "klein",
    "old": "alt",
    "and": "und",
    "not": "nicht",
}
