"""An answer against its references, each measure a plain function: 0 to 1, and one reference at a time.

``squad_f1`` and ``squad_em`` are those of SQuAD's official script (v1.1; Rajpurkar et al. 2016), ``token_f1`` that of
the code released with CacheBlend (Yao et al., EuroSys 2025), ``rouge_l`` the F-measure of the longest common
subsequence (Lin 2004) as the package ``rouge_score`` computes it.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any

from blend.errors import InvalidInput

Tokenizer = Callable[[str], Sequence[Hashable]]
"""A text in, its tokens or token ids out, without special tokens."""

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> str:
    """Return a text as SQuAD compares it: lower case, no ASCII punctuation, no English articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_WITHOUT_PUNCTUATION)).split())


def words(text: str) -> list[str]:
    """Return the words between white space."""
    return text.split()


def squad_f1(answer: str, reference: str) -> float:
    """Return the F1 of the words that both have, counted as often as both have them, after :func:`normalize`.

    As in the official script, 0 where either has no words left, even if neither has.
    """
    return _overlap(words(normalize(answer)), words(normalize(reference)))


def squad_em(answer: str, reference: str) -> float:
    """Return 1 where both are the same text after :func:`normalize`, else 0."""
    return float(normalize(answer) == normalize(reference))


def token_f1(answer: str, reference: str, tokenizer: Tokenizer = words) -> float:
    """Return the F1 of the tokens that both have, as ``compute_f1`` of CacheBlend's released code counts it.

    Of the answer, its first line behind any line ends is taken. Where that begins with "Yes" or "yes", it is replaced
    by "Yes"; else, where its first word begins with "No" or "no", by "No": "Norway" becomes "No" too, there as here, so
    that figures can be set beside theirs. Then :func:`normalize` on both, and ``tokenizer`` on what is left. Unlike
    :func:`squad_f1`, 1 where neither has tokens.

    Theirs also drops each text's first token, which is the BOS that its tokenizer adds; ``tokenizer`` adds none here,
    so none is dropped. And theirs fails on an answer whose first line is empty, which here has no tokens.
    """
    left, right = list(tokenizer(normalize(_shortened(answer)))), list(tokenizer(normalize(reference)))
    if not left or not right:
        return float(left == right)
    return _overlap(left, right)


def rouge_l(answer: str, reference: str) -> float:
    """Return the F-measure of the longest common subsequence of words, without stemming.

    Words are runs of ASCII letters and digits in lower case, as ``rouge_score`` finds them: text in other scripts has
    none, and scores 0.

    Raises:
        InvalidInput: ``rouge_score`` is not installed; the message names the extra.
    """
    return float(_rouge().score(reference, answer)["rougeL"].fmeasure)


def contains(answer: str, reference: str) -> float:
    """Return 1 where the words of the reference stand in the answer, side by side and in order, else 0.

    Both after :func:`normalize`. A reference that has no words left stands in no answer.
    """
    wanted = normalize(reference)
    return float(bool(wanted) and f" {wanted} " in f" {normalize(answer)} ")


def _overlap(left: Sequence[Hashable], right: Sequence[Hashable]) -> float:
    same = (Counter(left) & Counter(right)).total()
    return 2 * same / (len(left) + len(right)) if same else 0.0


def _shortened(answer: str) -> str:
    line = answer.lstrip("\n").split("\n")[0]
    first = (line.split() or [""])[0]
    if line.startswith(("Yes", "yes")):
        return "Yes"
    return "No" if first.startswith(("No", "no")) else line


@cache
def _rouge() -> Any:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        allowed = "other metrics, or with the extra: pip install 'blendkv[eval]'"
        raise InvalidInput("rouge_l", f"no package rouge_score ({error})", allowed) from error
    return RougeScorer(["rougeL"], use_stemmer=False)
