"""How numbers are written for people, the same everywhere."""

from __future__ import annotations


def factor_text(factor: float) -> str:
    """A factor for people, the same in words, tables and pictures.

    >>> factor_text(1.2345), factor_text(987.6), factor_text(12345.6), factor_text(1.2e9)
    ('1.23', '988', '12,346', '1.2e+09')
    """
    return f"{factor:.3g}" if factor < 999.5 else f"{factor:,.0f}" if factor < 1e6 else f"{factor:.2g}"


def times(factor: float) -> str:
    """The same in a sentence.

    >>> times(1.2345)
    '1.23 times'
    """
    return f"{factor_text(factor)} times"
