"""What is said of translations that are not whole: cut at the length limit, or caught in a loop."""

from collections.abc import Sequence

from nmt.system.progress import say
from nmt.translate.translator import Translation


def count_loops(translations: Sequence[Translation]) -> int:
    """Count those that reach the length limit and repeat themselves."""
    return sum(each.is_cut and is_loop(each.piece_ids) for each in translations)


def is_loop(ids: Sequence[int]) -> bool:
    """Whether the end is the same pieces three times, so that more pieces would be more of them."""
    ends = ((ids[-n:], ids[-2 * n : -n], ids[-3 * n : -2 * n]) for n in range(1, len(ids) // 3 + 1))
    return any(first == second == third for first, second, third in ends)


def list_cut(translations: Sequence[Translation], first: int = 1) -> list[int]:
    """Return the numbers of the lines whose translations reach the length limit."""
    return [number for number, candidate in enumerate(translations, first) if candidate.is_cut]


def warn_of_cut(line: str, n_cut: int, n: int, n_loops: int) -> None:
    """Say that the translation at `line` is the first of `n_cut` that reach the length limit; `n_loops` of
    them repeat themselves.
    """
    remedies = ["raise decoding.max_extra"] * (n_loops < n_cut)
    if n_loops:
        remedies.append(
            f"{n_loops:,} of them repeat the same words: this text is not like the training text, or "
            "the model needs more training"
        )
    say(
        f"warning: {line}: its translation has as many pieces as decoding.max_ratio and "
        f"decoding.max_extra allow, so its end may be missing; so have {n_cut:,} of {n:,}; {'; '.join(remedies)}"
    )
